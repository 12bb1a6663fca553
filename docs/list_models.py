"""Makes the site's page from what vllmx's own plugins provide: `python docs/list_models.py`."""

from __future__ import annotations

from pathlib import Path

from vllmx.cli.models import architectures, cells
from vllmx_models.verified import KINDS

TARGET = Path(__file__).parent / "models.md"
HEAD = """\
# Models

The architectures that vllmx serves; this page is made from the code by `python
docs/list_models.py`, and `vllmx models` prints the same for what is installed, plugins of others
included. Weights come from safetensors, in any of the formats of
[quantization.md](quantization.md), and from GGUF files where the third column has the name that
`general.architecture` gives them.

A name in an `architectures` list that is not here is run by transformers' own code where that is
installed (`pip install 'vllmx[transformers]'`) and can be, see [below](#everything-else). Else it
is refused with the nearest name that is here.

A backend runs a model if it has all its ops, whatever the form of the files; one that lacks an op
refuses the model by name before a weight is read. The fourth column says which have them.

Every decoder also answers with vectors or scores ([embeddings.md](embeddings.md)): under the name
of its layers alone, such as Qwen3Model, as `...ForSequenceClassification`, or with `--task`.

What the tests compare, with random weights in a tiny shape:

"""

TABLE = """
| model type | architecture | GGUF | backends | checked |
|-|-|-|-|-|
"""

TAIL = """
## Encoders

The published files of all-mpnet-base-v2, jina-embeddings-v2 and others name a class
`...ForMaskedLM`; they are embedders, as their `modules.json` says. The backend cuda lacks the bias
that MPNet and Jina v2 add to scores of attention by distance, and the pooling of SPLADE, a maximum.

- Jina v3 is served as transformers saves it (JinaEmbeddingsV3Model). jinaai/jina-embeddings-v3
  itself, with the adapters of its tasks in the weights, is refused.
- jina-embeddings-v2-base-code, which norms queries and keys, is refused.
- DeBERTa is not served: its scores add products of queries and of keys with embeddings of the
  distance, which no op computes.

## Text of multimodal models

A class that is not in the table, such as LlavaNextForConditionalGeneration, serves its text alone
if its `text_config` (or `llm_config`, `language_config`, `thinker_config`) has a class or a
`model_type` of the table, and the tensors lie below one prefix; a line in the log says so. A tiny
model of each such class of transformers is compared with transformers: Aya Vision, Cohere 2
Vision, DeepSeek-VL, GLM-ASR, GOT-OCR 2, Granite Speech, Idefics 2, Janus, Kimi K2.5,
LFM2-VL, LLaVA-NeXT and LLaVA-OneVision, MiniCPM-V 4.6 and 4.7, Nemotron Omni, Ovis 2, VibeVoice
ASR, VideoLLaMA 3. PaliGemma is
refused: its prompts need attention in both directions. Kimi K3 is refused: its text has an
activation, an output gate and residuals that KimiLinearForCausalLM does not have. PaddleOCR-VL
rotates in another way than ERNIE 4.5, so it is not in the list.

## Folders in Mistral's own form

A folder on this machine without config.json may have Mistral's params.json,
consolidated*.safetensors and tekken.json: dense models are served from them, text alone where there
is a tower. Experts, latent attention and quantised weights in that form are refused by name; the
same models with config.json are served. A chat needs `--chat-template`, since such a folder has
none. tekken.json is read wherever tokenizer.json is missing.

## DeepSeek V4

Flash and Pro run on `cpu`, `metal`, `numpy` and `torch`; `cuda` lacks `compressed_attention` and
refuses them by name. Published files are read as they are: FP8 blocks, experts in MXFP4, the tables
of the hash layers. Multi-token prediction and GGUF files are not served. With tensor parallelism
each rank computes all of attention and its share of the experts.

## Everything else

`--model-impl` says whose code runs a model: `vllmx`, its own file; `transformers`, any decoder of
[transformers](https://github.com/huggingface/transformers); `auto` (the default), the own file
where there is one. A log line says when transformers runs a model, because it costs: backend torch
alone, several times slower than a model of vllmx's own, logits rounded to the model's dtype. GGUF
and `--isq` are refused. Quantised checkpoints (GPTQ, AWQ, compressed-tensors, FP8, MXFP4, ModelOpt,
MLX) are dequantised at load, as backend torch does for vllmx's own models, and take the memory of
the model's dtype. Scheduler, prefix cache, sampler and API are those of any other model. Code of a
model's folder is never executed, whatever its config.json asks for.

Where attention is one of transformers' exchangeable functions, with a causal mask or a window, it
reads vllmx's pages, and all sequences of a step run together. After loading, three tokens show
whether tokens meet anywhere but in attention; a model in which they do is refused. A model whose
rotary factors depend on the longest position of a batch (longrope) is served up to its first
context length. On a GPU, weights pass through the memory of the host as a whole.

Every other model runs its sequences one after the other, each over the cache object that
transformers makes for it: recurrent layers, convolutions, chunked masks, ALiBi, layers that share
keys. A state slot holds such an object, so prefix hits and preemption work as for vllmx's hybrids.
A slot is counted with the cache of `--max-model-len` tokens in 32 bits: lower it if slots do not
fit. After loading, two prompts show whether the model continues a prompt in chunks, or token by
token. One that has no usable cache reads all tokens of a sequence again in each step; a log line
says so. A model that looks forward, such as an encoder, is refused. `--kv-disk`,
`--kv-host-memory` and `--kv-connector` are refused, because these caches are not copied out.

Transformers 5.23 has 181 causal classes. vllmx runs 170 of them by transformers' code, with the
same greedy ids on tiny random checkpoints; `nox -s classes` checks them. The table in
`tests/integration/parity/test_transformers_classes.py` has the reasons for the other types.

Compared with transformers in the tests as above, with 64 greedy ids, prefix hits, batch mates and
preemption: GPT-BigCode (StarCoder 1), Granite with windows, Jais 2, MiniCPM3, Nemotron, OLMo,
Persimmon, Phi, VaultGemma; and, where `--model-impl transformers` asks for it, Dots1, Exaone 4,
GPT-2, GPT-NeoX, Hunyuan 1, OPT, Phi-MoE and Starcoder2, which have files of their own, too.

What keeps well-known models from having a file of their own:

| model | what vllmx lacks | served |
|-|-|-|
| Qwen4-Exp | gated residuals, embeddings of n-grams, an own indexer | by transformers' code |
| Step 3.5 and 3.7 | clamps behind activations, gates of heads | no |
| MiniMax M3 | block-sparse attention | no |
| Kimi K3 | its activation, output gate and residuals | no |
| Ling 2.5 (BailingMoeV2_5) | linear attention that rotates its keys | by transformers' code |
| LongCat-Flash | experts that pass a token on unchanged | by transformers' code |
| dots3 note | the layers of its text | by transformers' code |
| OLMo Hybrid | nothing: a plugin has it ([plugins.md](plugins.md)) | by transformers' code |
| BLOOM, MPT, Falcon RW | biases that grow with the distance (ALiBi) | by transformers' code |
| OPT-350M | norms behind sums, embeddings of another size | by transformers' code |

MiMo-V2-Flash keeps zeros behind its values in the KV cache, as wide as its keys: 384 numbers of a
head in place of 320, a fifth more memory. The published window counts the tokens before the token
itself, 128, as transformers and SGLang read it; a GGUF file's counts the token, as in llama.cpp.
Gemma 3n is served as text: files with towers for images and audio lose both. About 70 of the
110 ops of a layer mix its four streams, each a small one.

Falcon, Falcon-H1, Gemma 3n, GPT-2, GPT-NeoX, Jamba, Kimi Linear and Mamba are read from GGUF
files; `vllmx quantize` does not write them. `--isq` refuses GPT-2, whose matrices are stored by
their input features. For Phi-3.5-MoE's GGUF files vllmx uses layer norms and SparseMixer with the
published jitter of 0.01, as its authors do; llama.cpp uses RMS norms and weights of experts that
add up to one.

The `cuda` backend lacks SparseMixer and the decays of Mamba 1: it refuses Phi-3.5-MoE, Jamba, Mamba
1 and Falcon Mamba by name. With tensor parallelism each rank computes all of a layer of Mamba 1.

Llama 4 is served as text, GGUF files with the chunks of 8,192 tokens that llama.cpp assumes.
Ling and Ring 2 are compared with GLM-4.5's code, whose formula they have, since transformers has
none of their own. Files of Falcon-H1 have its factors in their weights, and the norm of its
recurrence behind the gate, as llama.cpp computes it.
"""


def page() -> str:
    """The text of docs/models.md."""
    rows = [
        f"| {' | '.join((one.model_type, *cells(one)))} |"
        for one in architectures()
        if one.plugin.startswith("vllmx-models")
    ]
    kinds = [f"- *{name}*: {text}." for name, text in KINDS.items()]
    return HEAD + "\n".join(kinds) + "\n" + TABLE + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    TARGET.write_text(page())
