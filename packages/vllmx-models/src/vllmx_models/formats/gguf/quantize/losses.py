"""Parts of a checkpoint that a GGUF file cannot store, one line each for the summary."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from vllmx_core.end_tokens import end_tokens
from vllmx_core.errors import listing, shown

from vllmx_models.formats.gguf.quantize.tokenizer_files import NAMES, TokenizerFiles, steps

SHOWN = 6
COMPOSED = frozenset(
    (
        "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "mpt", "olmo", "command-r", "qwen35",
    )
)  # fmt: skip
"""Pre-tokenizers whose readers compose characters first (Unicode NFC)."""
WHOLE_TOKENS = frozenset(
    (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "glm4", "glm5", "tekken",
    )
)  # fmt: skip
"""Pre-tokenizers whose readers do not split a piece that is a token."""
_OF_NO_MATTER = frozenset(
    (
        "_from_model_config", "transformers_version", "eos_token_id", "bos_token_id",
        "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation",
        "assistant_early_exit", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "return_dict_in_generate", "output_scores", "output_attentions", "output_hidden_states",
    )
)  # fmt: skip
"""Keys of generation_config.json that change no answer, or that the file stores elsewhere."""
_PARTS = {
    "vision_config": "the part of the model that sees images",
    "audio_config": "the part of the model that hears",
    "video_config": "the part of the model that sees videos",
}


def of_generation_config(values: Mapping[str, Any], written: Collection[str]) -> Iterator[str]:
    """Sampling defaults that the file does not have; `written` are the keys that it has."""
    for key, value in values.items():
        plain = value is None or (key == "do_sample" and value is True)
        if not plain and key not in written and key not in _OF_NO_MATTER:
            yield f"generation_config.json: {key} = {shown(value)}"


def of_config(config: Mapping[str, Any]) -> Iterator[str]:
    """Parts of the model that the file does not have."""
    for key, text in _PARTS.items():
        if config.get(key) is not None:
            yield f"config.json: {key}, {text}"


def of_tensors(towers: Collection[str], predicting: Collection[str]) -> Iterator[str]:
    """Tensors that the file does not have, by what they are for."""
    for names, text in ((towers, "towers"), (predicting, "layers of multi-token prediction")):
        if names:
            yield f"{len(names)} tensors of {text}, such as {min(names)}"


def of_tokenizer(files: TokenizerFiles, pre: str | None, ids: Mapping[str, int]) -> Iterator[str]:
    """Steps of tokenizer.json that readers of the file skip. `pre` names the pre-tokenizer of a
    byte-level BPE; None: SentencePiece."""
    kinds = [step["type"] for step in steps(files.tokenizer.get("normalizer"))]
    usual = {"Prepend", "Replace"} if pre is None else {"NFC"} if pre in COMPOSED else set()
    for kind in kinds:
        if kind not in usual:
            yield f"tokenizer.json: the normalizer {kind}"
    if pre in COMPOSED and "NFC" not in kinds:
        yield f"tokenizer.json has no normalizer, readers of {pre!r} compose characters first (NFC)"
    model = files.tokenizer["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            yield f"tokenizer.json: {key} = {shown(model[key])}"
    if pre is not None and bool(model.get("ignore_merges")) != (pre in WHOLE_TOKENS):
        yield f"tokenizer.json: ignore_merges = {shown(bool(model.get('ignore_merges')))}"
    pre_steps = steps(files.tokenizer.get("pre_tokenizer"))
    if pre is not None and any(
        step["type"] == "ByteLevel" and step.get("add_prefix_space") for step in pre_steps
    ):
        yield "tokenizer.json: add_prefix_space = True"
    for flag in ("lstrip", "rstrip", "single_word"):
        tokens = [token["content"] for token in files.added if token.get(flag)]
        if tokens:
            yield f"added tokens with {flag}: {listing(tokens, SHOWN)}"
    strange = list(_marks(files))
    if strange:
        yield f"tokens that tokenizer.json puts around a text: {listing(strange, SHOWN)}"
    for name in NAMES:
        token = files.token(name)
        if token is not None and token not in ids:
            yield f"{name}_token {shown(token)}: the vocabulary does not have it"


def of_ends(
    wanted: Collection[str], metadata: Mapping[str, Any], tokens: list[str], marked: Collection[str]
) -> Iterator[str]:
    """End tokens that readers of the file do not know, and tokens that they wrongly take for end
    tokens. `wanted`: those of the checkpoint; `metadata`: the keys of the tokenizer."""
    named = {
        tokens[metadata[key]]
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        if key in metadata
    }
    found = end_tokens(named, marked)
    lost, more = sorted(set(wanted) - found), sorted(found - set(wanted))
    if lost:
        yield (
            f"end tokens {listing(lost, SHOWN)}: a file names three, and these are not known by"
            " their names; give them to requests as stop_token_ids"
        )
    if wanted and more:
        yield f"readers end at {listing(more, SHOWN)} too, by name; the checkpoint does not"


def _marks(files: TokenizerFiles) -> Iterator[str]:
    """Tokens of the post-processor's template other than the named ones."""
    named = {files.token(name) for name in ("bos", "eos", "cls", "sep")}
    for step in steps(files.tokenizer.get("post_processor")):
        if step["type"] == "TemplateProcessing":
            for piece in step["single"]:
                token = piece.get("SpecialToken", {}).get("id")
                if token is not None and token not in named:
                    yield token
