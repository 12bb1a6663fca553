"""Whisper on the CPU beside transformers: seconds of audio a second, in bfloat16.

    python bench/audio.py --setup models/whisper --shape small      # random weights
    python bench/audio.py models/whisper --windows 4 --rounds 3

Windows of 30 s of noise, 100 tokens for each, greedy, without timestamps. vllmx takes all windows
at once; transformers too, in one batch. Frames are made before the clock starts. Each engine runs
in a process of its own, one after the other in each round; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cpu_peers.host_load import available_processors

SHAPES: dict[str, Any] = {
    "small": {"width": 768, "layers": (12, 12), "heads": 12, "mels": 80},
    "turbo": {"width": 1280, "layers": (32, 4), "heads": 20, "mels": 128},
    "large-v3": {"width": 1280, "layers": (32, 32), "heads": 20, "mels": 128},
}
TOKENS, SECONDS, RATE = 100, 30, 16000
NAMES = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev",
         "notimestamps")  # fmt: skip
VOCAB, FIRST = 51865, 50257


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setup", action="store_true", help="write the model, measure nothing")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setup:
        write(args.folder, **SHAPES[args.shape])
    elif args.worker:
        seconds = WORKERS[args.worker](args.folder, args.windows, args.threads)
        print(json.dumps(args.windows * SECONDS / seconds))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {}
    here = [sys.executable, __file__, str(args.folder), "--windows", str(args.windows)]
    for _ in range(args.rounds):
        for worker in WORKERS:
            line = [*here, "--threads", str(args.threads), "--worker", worker]
            done = subprocess.run(line, stdout=subprocess.PIPE, check=True)
            found.setdefault(worker, []).append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{worker}: {found[worker][-1]:.2f} s of audio a second", file=sys.stderr)
    ours, theirs = (statistics.median(found[worker]) for worker in WORKERS)
    print(f"vllmx {ours:.2f}, transformers {theirs:.2f}, vllmx / the other {ours / theirs:.2f}")


def write(folder: Path, width: int, layers: tuple[int, int], heads: int, mels: int) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    hub: Any = import_module("transformers")
    torch.manual_seed(0)
    config = hub.WhisperConfig(
        vocab_size=VOCAB, d_model=width, encoder_layers=layers[0], decoder_layers=layers[1],
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, num_mel_bins=mels, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model = hub.WhisperForConditionalGeneration(config)
    model.generation_config.update(lang_to_id={"<|en|>": FIRST + 2}, is_multilingual=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"token{number}" for number in range(FIRST - len(letters))]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": mels}))


def noise(windows: int) -> np.ndarray:
    """(windows, samples)."""
    rng = np.random.default_rng(0)
    return (0.1 * rng.standard_normal((windows, SECONDS * RATE))).astype(np.float32)


def by_vllmx(folder: Path, windows: int, threads: int) -> float:
    from vllmx_engine.audio.slices import finished
    from vllmx_engine.client.request import RequestOptions
    from vllmx_engine.llm import LLM
    from vllmx_engine.speech.offline import answers
    from vllmx_engine.speech.transcriber import SpeechTask, Transcriber, Window

    options: dict[str, Any] = {"num_threads": threads, "encoder_cache_memory": 4 << 30}
    with LLM(str(folder), backend="cpu", dtype="bfloat16", **options) as llm:
        transcriber = Transcriber(llm._engine.builder)
        task, requests = SpeechTask("en"), []
        for samples in noise(windows):
            heard = finished(transcriber.heard(Window(0.0, samples)))
            one = transcriber.request(heard, task, "en", RequestOptions())
            core = [
                msgspec.structs.replace(each, max_tokens=TOKENS, stop_ids=[]) for each in one.core
            ]
            requests.append(msgspec.structs.replace(one, core=core))
        begin_s = time.perf_counter()
        outputs = answers(llm._engine, requests)
        assert all(len(one.outputs[0].token_ids) == TOKENS for one in outputs)
        return time.perf_counter() - begin_s


def by_transformers(folder: Path, windows: int, threads: int) -> float:
    import torch

    hub: Any = import_module("transformers")
    torch.set_num_threads(threads)
    model = hub.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()
    frames = hub.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    made = frames(list(noise(windows)), sampling_rate=RATE, return_tensors="pt")
    features = made["input_features"].to(torch.bfloat16)
    prompt = [FIRST + NAMES.index(name) for name in NAMES if name in ("startoftranscript", "en")]
    ids = torch.tensor([[*prompt, FIRST + 4, FIRST + 6]] * windows)
    begin_s = time.perf_counter()
    with torch.no_grad():
        encoded = model.model.encoder(features)
        cache, read = None, ids
        for _ in range(TOKENS):
            step = model(
                encoder_outputs=encoded, decoder_input_ids=read, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache, read = step.past_key_values, step.logits[:, -1:].argmax(-1)
    return time.perf_counter() - begin_s


WORKERS = {"vllmx": by_vllmx, "transformers": by_transformers}

if __name__ == "__main__":
    main()
