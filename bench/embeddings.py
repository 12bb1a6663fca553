"""Embeddings on the CPU beside llama.cpp and transformers, in bfloat16, by as many threads.

    python bench/embeddings.py --setup models/embeddings          # writes both shapes, 1.5 GB
    python bench/embeddings.py models/embeddings --rounds 3

Random weights in the shapes of BERT-base and of Qwen3-Embedding-0.6B; 64 texts of 128 and of 512
tokens (--texts: as many). vllmx: `LLM.embed` on token ids, all in one call. transformers: the
model's own pass over eight texts at a time, faster than all at once. llama.cpp: `llama-bench` with
embeddings on, one text in a batch, so that its attention sees no mask over other texts. Each engine
runs in a process of its own, one after the other in each round; tokens per second, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cpu_peers.host_load import available_processors
from output_file import output_file

LENGTHS = (128, 512)
NUM_TEXTS = 64
AT_A_TIME = 8
VOCABULARY = {"bert-base": 30522, "qwen3-embedding-0.6b": 151936}
LLAMA = Path(__file__).parent / ".peers" / "llama.cpp" / "build" / "bin" / "llama-bench"
GGUF_NAME = "bf16.gguf"
BERT_TENSORS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm": "token_embd_norm",
}
BERT_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setup", action="store_true", help="write the models, measure nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="of each length")
    parser.add_argument("--shapes", default=",".join(VOCABULARY))
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(WORKERS[args.worker](args.folder, args.threads, args.texts)))
    elif args.setup:
        setup(args.folder)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    taken: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(args.rounds):
        for shape in args.shapes.split(","):
            for worker in WORKERS:
                if worker == "llama.cpp" and not LLAMA.exists():
                    continue
                here = [sys.executable, __file__, str(args.folder / shape), "--worker", worker]
                here += ["--threads", str(args.threads), "--texts", str(args.texts)]
                done = subprocess.run(here, stdout=subprocess.PIPE, check=True)
                for length, rate in json.loads(done.stdout.splitlines()[-1]).items():
                    taken.setdefault((shape, worker, int(length)), []).append(rate)
                    print(f"{shape} {length} {worker}: {rate:.0f}", file=sys.stderr)
    medians = {key: statistics.median(rates) for key, rates in taken.items()}
    print("| tokens/s | " + " | ".join(WORKERS) + " | vllmx / the others |\n|-|" + "-|" * 4)
    for shape, length in dict.fromkeys((key[0], key[2]) for key in medians):
        found = [medians.get((shape, worker, length)) for worker in WORKERS]
        cells = [f"{rate:.0f}" if rate else "-" for rate in found]
        ratios = [f"{found[0] / rate:.2f}" for rate in found[1:] if rate and found[0]]
        print(f"| {shape}, {length} | {' | '.join(cells)} | {', '.join(ratios)} |")
    if args.json:
        named = {f"{shape} {length} {worker}": r for (shape, worker, length), r in taken.items()}
        args.json.write_text(json.dumps(named, indent=1))


def texts(folder: Path, length: int, count: int) -> list[list[int]]:
    """Ids that are no special tokens."""
    import numpy as np

    generator = np.random.default_rng(length)
    size = VOCABULARY[folder.name]
    ids: list[list[int]] = generator.integers(1000, size - 1000, (count, length)).tolist()
    return ids


def rate(run: Callable[[list[list[int]]], Any], folder: Path, length: int, count: int) -> float:
    """Tokens per second of all texts, after a pass over some."""
    ids = texts(folder, length, count)
    run(ids[:AT_A_TIME])
    begin = time.perf_counter()
    run(ids)
    return count * length / (time.perf_counter() - begin)


def vllmx_worker(folder: Path, threads: int, count: int) -> dict[int, float]:
    from vllmx import LLM

    with LLM(
        str(folder),
        backend="cpu",
        task="embed",
        dtype="bf16",
        max_model_len=512,
        enable_prefix_caching=False,
        num_threads=threads,
    ) as llm:

        def run(texts: list[list[int]]) -> None:
            prompts: Any = [{"prompt_token_ids": ids} for ids in texts]
            llm.embed(prompts, use_tqdm=False)

        return {length: rate(run, folder, length, count) for length in LENGTHS}


def transformers_worker(folder: Path, threads: int, count: int) -> dict[int, float]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(texts: list[list[int]]) -> None:
        with torch.inference_mode():
            for begin in range(0, len(texts), AT_A_TIME):
                model(input_ids=torch.tensor(texts[begin : begin + AT_A_TIME]))

    return {length: rate(run, folder, length, count) for length in LENGTHS}


def llama_worker(folder: Path, threads: int, _: int) -> dict[int, float]:
    rates = {}
    for length in LENGTHS:
        size = str(length)
        command = [
            str(LLAMA), "-m", str(folder / GGUF_NAME), "-t", str(threads), "-embd", "1", "-p", size,
            "-n", "0", "-b", size, "-ub", size, "-fa", "on,off", "-r", "3", "-o", "json",
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rates[length] = max(max(each["samples_ts"]) for each in json.loads(done.stdout))
    return rates


WORKERS: dict[str, Callable[[Path, int, int], dict[int, float]]] = {
    "vllmx": vllmx_worker,
    "llama.cpp": llama_worker,
    "transformers": transformers_worker,
}


def setup(folder: Path) -> None:
    from model_shapes import SHAPES
    from random_model import write_model
    from rich.progress import Progress

    with Progress() as progress:
        shape = SHAPES["qwen3-0.6b"]
        write_model(folder / "qwen3-embedding-0.6b", shape, 0, with_gguf=True, progress=progress)
    write_bert(folder / "bert-base")


def write_bert(folder: Path) -> None:
    """BERT-base with random weights, a WordPiece tokenizer of made-up words, and its GGUF."""
    import torch
    from tokenizers import BertWordPieceTokenizer

    hub: Any = import_module("transformers")  # whose types know neither class
    torch.manual_seed(0)
    model = hub.BertModel(hub.BertConfig(), add_pooling_layer=False).to(torch.bfloat16)
    model.save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"word{i}" for i in range(VOCABULARY["bert-base"] - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    backend = BertWordPieceTokenizer(str(folder / "vocab.txt"))
    hub.BertTokenizerFast(tokenizer_object=backend._tokenizer).save_pretrained(folder)
    write_bert_gguf(folder / GGUF_NAME, model, words)


def write_bert_gguf(path: Path, model: Any, words: list[str]) -> None:
    import gguf
    import torch

    writer = gguf.GGUFWriter(path, "bert")
    config = model.config
    writer.add_name("random")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    # llama.cpp marks the beginning of a word, not its continuations.
    writer.add_token_list([word if word[0] == "[" else f"\u2581{word}" for word in words])
    writer.add_token_type_count(config.type_vocab_size)
    for name, values in model.state_dict().items():
        theirs = _bert_name(name)
        if theirs is None:
            continue
        if values.ndim == 1 or "token_types" in theirs or "position" in theirs:
            writer.add_tensor(theirs, values.float().numpy())
            continue
        bits = values.contiguous().view(torch.uint16).numpy()
        writer.add_tensor(theirs, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bert_name(name: str) -> str | None:
    """A weight's name in a GGUF; None where it has none."""
    for ours, theirs in BERT_TENSORS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    if not name.startswith("encoder.layer."):
        return None
    layer, _, rest = name.removeprefix("encoder.layer.").partition(".")
    part, _, last = rest.rpartition(".")
    return f"blk.{layer}.{BERT_LAYER[part]}.{last}"


if __name__ == "__main__":
    main()
