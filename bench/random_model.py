"""Write a model of a known shape with random weights: a Hugging Face folder, and a GGUF beside it.

Speed does not depend on what the weights say, so a benchmark needs no download. The same seed and
shape give the same weights on every machine.

    python bench/random_model.py OUT --shape qwen3-0.6b --gguf
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from synthetic_vocab import Vocabulary, make_vocabulary, tokenizer_config, tokenizer_json

WEIGHT_STD = 0.02
NORM_STD = 0.05
GGUF_NAME = "bf16.gguf"


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 decoder, dense or with experts; the fields carry the names of its
    config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def architecture(self) -> tuple[str, str, str]:
        """Its class and type in config.json, its name in a GGUF."""
        if self.num_experts:
            return "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe"
        return "Qwen3ForCausalLM", "qwen3", "qwen3"


SHAPES = {
    "qwen3-tiny": Shape(
        64, 192, 2, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096
    ),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, tie_word_embeddings=False),
    "qwen3-moe-tiny": Shape(
        64, 192, 2, 4, 2, head_dim=32, vocab_size=2048, max_position_embeddings=4096,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
    ),
    # a quarter of Qwen3-30B-A3B: its widths, 12 of 48 layers, a quarter of the vocabulary
    "qwen3-moe-quarter": Shape(
        2048, 6144, 12, 32, 4, vocab_size=37984, tie_word_embeddings=False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One weight, with its name in either format."""

    name: str
    gguf_name: str
    """Experts share one: a GGUF has them as one tensor."""
    shape: tuple[int, ...]

    @property
    def kept_in_f32(self) -> bool:
        """In a GGUF, as llama.cpp wants it."""
        return self.is_norm or "ffn_gate_inp" in self.gguf_name

    @property
    def is_norm(self) -> bool:
        return len(self.shape) == 1

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape))


def tensors_of(shape: Shape) -> Iterator[Tensor]:
    """Every weight of the model in the order of the file."""
    hidden, head = shape.hidden_size, shape.head_dim
    query, key = shape.num_attention_heads * head, shape.num_key_value_heads * head
    layer_weights: list[tuple[str, str, tuple[int, ...]]] = [
        ("input_layernorm", "attn_norm", (hidden,)),
        ("self_attn.q_proj", "attn_q", (query, hidden)),
        ("self_attn.k_proj", "attn_k", (key, hidden)),
        ("self_attn.v_proj", "attn_v", (key, hidden)),
        ("self_attn.q_norm", "attn_q_norm", (head,)),
        ("self_attn.k_norm", "attn_k_norm", (head,)),
        ("self_attn.o_proj", "attn_output", (hidden, query)),
        ("post_attention_layernorm", "ffn_norm", (hidden,)),
        *feed_forward(shape),
    ]
    yield Tensor("model.embed_tokens.weight", "token_embd.weight", (shape.vocab_size, hidden))
    for i in range(shape.num_hidden_layers):
        for name, gguf_name, size in layer_weights:
            yield Tensor(f"model.layers.{i}.{name}.weight", f"blk.{i}.{gguf_name}.weight", size)
    yield Tensor("model.norm.weight", "output_norm.weight", (hidden,))
    if not shape.tie_word_embeddings:
        yield Tensor("lm_head.weight", "output.weight", (shape.vocab_size, hidden))


def feed_forward(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The names of a layer's MLP, or of its router and experts."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if shape.num_experts:
        inner = shape.moe_intermediate_size
        yield "mlp.gate", "ffn_gate_inp", (shape.num_experts, hidden)
    for name, size in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        if not shape.num_experts:
            yield f"mlp.{name}_proj", f"ffn_{name}", size
        for expert in range(shape.num_experts):
            yield f"mlp.experts.{expert}.{name}_proj", f"ffn_{name}_exps", size


def random_bf16(tensor: Tensor, seed: int) -> NDArray[np.uint16]:
    """The tensor's bfloat16 bits; they depend on the seed and the name, not on other tensors."""
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
    values = generator.standard_normal(tensor.shape, dtype=np.float32)
    values *= NORM_STD if tensor.is_norm else WEIGHT_STD
    if tensor.is_norm:
        values += 1.0
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
    for tensor in tensors_of(shape):
        end = offset + 2 * tensor.num_elements
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    task = progress.add_task(path.name, total=offset)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors_of(shape):
            file.write(random_bf16(tensor, seed).data)
            progress.advance(task, 2 * tensor.num_elements)


def write_gguf(
    path: Path, shape: Shape, vocabulary: Vocabulary, seed: int, progress: Progress
) -> None:
    """The same weights as a BF16 GGUF; norms and routers in F32, as llama.cpp wants them."""
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture[2], use_temp_file=False)
    writer.add_name("random")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_per_tok)
        writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_vocabulary(writer, vocabulary)
    stacks = [list(stack) for _, stack in groupby(tensors_of(shape), lambda one: one.gguf_name)]
    for stack in stacks:
        first, count = stack[0], sum(tensor.num_elements for tensor in stack)
        kinds = gguf.GGMLQuantizationType
        kind = kinds.F32 if first.kept_in_f32 else kinds.BF16
        dims = (len(stack), *first.shape) if len(stack) > 1 else first.shape
        num_bytes = count * (4 if first.kept_in_f32 else 2)
        writer.add_tensor_info(
            first.gguf_name, dims, np.dtype(np.float32), num_bytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    task = progress.add_task(path.name, total=sum(t.num_elements for t in tensors_of(shape)))
    for stack in stacks:
        bits = np.concatenate([random_bf16(tensor, seed) for tensor in stack])
        if stack[0].kept_in_f32:
            writer.write_tensor_data((bits.astype(np.uint32) << 16).view(np.float32))
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
    experts = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    sizes = {key: value for key, value in vars(shape).items() if value}
    return {
        "architectures": [name],
        "model_type": model_type,
        **sizes,
        **(experts if shape.num_experts else {}),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "hidden_act": "silu",
        "initializer_range": WEIGHT_STD,
        "max_window_layers": shape.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
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
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", action="store_true", help=f"write {GGUF_NAME} too (needs gguf)")
    args = parser.parse_args()
    with Progress() as progress:
        write_model(args.out, SHAPES[args.shape], args.seed, args.gguf, progress)


if __name__ == "__main__":
    main()
