"""Write a model of a known shape with random weights: a Hugging Face folder, and a GGUF beside it.

Speed does not depend on what the weights say, so a benchmark needs no download. The same seed and
shape give the same weights on every machine.

    python bench/random_model.py OUT --shape qwen3-0.6b --gguf
"""

import argparse
import json
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from expert_shapes import EXPERT_SHAPES
from model_shapes import SHAPES, WEIGHT_STD, Shape, Tensor
from numpy.typing import NDArray
from rich.progress import Progress
from synthetic_vocab import Vocabulary, make_vocabulary, tokenizer_config, tokenizer_json

NORM_STD = 0.05
GGUF_NAME = "bf16.gguf"


def random_bytes(tensor: Tensor, seed: int, norm_offset: float = 0.0) -> NDArray[np.uint8]:
    """The tensor as it lies in a folder; see `random_bf16`."""
    if tensor.dtype == "BF16":
        return random_bf16(tensor, seed, norm_offset).view(np.uint8)
    low, high = (119, 122) if tensor.kind == "exponents" else (0, 256)
    return _generator(tensor, seed).integers(low, high, tensor.shape, np.uint8)


def _generator(tensor: Tensor, seed: int) -> np.random.Generator:
    return np.random.Generator(
        np.random.SFC64([seed, zlib.crc32((tensor.follows or tensor.name).encode())])
    )


def random_bf16(tensor: Tensor, seed: int, norm_offset: float = 0.0) -> NDArray[np.uint16]:
    """The tensor's bfloat16 bits; they depend on the seed and the name, not on other tensors.
    `norm_offset` is what the weights of norms lack to the factors that they are."""
    generator = _generator(tensor, seed)
    values = generator.standard_normal(tensor.shape, dtype=np.float32)
    match tensor.kind:
        case "norm" | "plain_norm":
            values *= NORM_STD
            values += 1.0 - (norm_offset if tensor.kind == "norm" else 0.0)
        case "decay":
            values += 1.0
        case "weight" | "router":
            values *= tensor.std
    if tensor.follows:
        values = np.roll(values, 1, axis=0)
    return to_bf16(values)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds finite float32 to the nearest bfloat16, ties to even, in place of `values`."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits >>= 16
    return bits.astype(np.uint16)


def write_safetensors(path: Path, shape: Shape, seed: int, progress: Progress) -> None:
    """Writes tensor after tensor, so that memory holds one of them at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shape.tensors():
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    task = progress.add_task(path.name, total=offset)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shape.tensors():
            file.write(random_bytes(tensor, seed, shape.norm_offset).data)
            progress.advance(task, tensor.num_bytes)


def write_gguf(
    path: Path, shape: Shape, vocabulary: Vocabulary, seed: int, progress: Progress
) -> None:
    """The same weights as a BF16 GGUF; norms and routers in F32, as llama.cpp wants them."""
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture[2], use_temp_file=False)
    writer.add_name("random")
    shape.add_fields(writer)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_vocabulary(writer, vocabulary)
    stacks = [list(stack) for _, stack in groupby(shape.tensors(), lambda one: one.gguf_name)]
    for stack in stacks:
        first, count = stack[0], sum(tensor.num_elements for tensor in stack)
        kinds = gguf.GGMLQuantizationType
        kind = kinds.F32 if first.kept_in_f32 else kinds.BF16
        dims: tuple[int, ...] = (len(stack), *first.shape) if len(stack) > 1 else first.shape
        if first.kept_in_f32:
            dims = shape.as_gguf(first, np.empty(first.shape, np.float32)).shape
        num_bytes = count * (4 if first.kept_in_f32 else 2)
        writer.add_tensor_info(
            first.gguf_name, dims, np.dtype(np.float32), num_bytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    task = progress.add_task(path.name, total=sum(t.num_elements for t in shape.tensors()))
    for stack in stacks:
        one_by_one = (shape.arranged(t, random_bf16(t, seed, shape.norm_offset)) for t in stack)
        bits = np.concatenate([np.ascontiguousarray(values) for values in one_by_one])
        if (first := stack[0]).kept_in_f32:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.write_tensor_data(np.ascontiguousarray(shape.as_gguf(first, values)))
        else:
            writer.write_tensor_data(bits)
        progress.advance(task, bits.size)
    writer.close()


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Adds the tokenizer's fields to a GGUFWriter."""
    import gguf

    num_plain = vocabulary.bos_id
    num_special = len(vocabulary.tokens) - num_plain
    types = [gguf.TokenType.NORMAL] * num_plain + [gguf.TokenType.CONTROL] * num_special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in vocabulary.merges])
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_add_bos_token(False)


def config_json(shape: Shape, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of config.json in the style that both old and new transformers read."""
    name, model_type, _ = shape.architecture
    return {
        "architectures": [name],
        "model_type": model_type,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "hidden_act": "silu",
        "initializer_range": WEIGHT_STD,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **shape.config(),
    }


def write_model(folder: Path, shape: Shape, seed: int, with_gguf: bool, progress: Progress) -> None:
    """Writes the configuration, the tokenizer, model.safetensors and perhaps bf16.gguf."""
    vocabulary = make_vocabulary(shape.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config_json(shape, vocabulary),
        "generation_config.json": {
            "bos_token_id": vocabulary.bos_id,
            "eos_token_id": vocabulary.eos_id,
        },
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_safetensors(folder / "model.safetensors", shape, seed, progress)
    if with_gguf:
        write_gguf(folder / GGUF_NAME, shape, vocabulary, seed, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    shapes = SHAPES | EXPERT_SHAPES
    parser.add_argument("--shape", choices=shapes, default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", action="store_true", help=f"write {GGUF_NAME} too (needs gguf)")
    args = parser.parse_args()
    if args.gguf and args.shape in EXPERT_SHAPES:
        parser.error("--gguf: make one of this shape's folder by `vllmx quantize`")
    with Progress() as progress:
        write_model(args.out, shapes[args.shape], args.seed, args.gguf, progress)


if __name__ == "__main__":
    main()
