"""Writes docs/models.md from what vllmx's own plugins provide: `python docs/list_models.py`."""

from __future__ import annotations

from pathlib import Path

from vllmx.cli.models import architectures

TARGET = Path(__file__).parent / "models.md"
HEAD = """\
# Models

The architectures that vllmx serves; this page is made from the code by `python
docs/list_models.py`, and `vllmx models` prints the same for what is installed, plugins of others
included. Weights come from safetensors, in any of the formats of
[quantization.md](quantization.md), and from GGUF files where the third column has the name that
`general.architecture` gives them. A name in an `architectures` list that is not here is refused
with the nearest that is.

Every file of a model runs on every backend that has the ops it needs; a backend that lacks one
refuses the model by name before a weight is read. CUDA's attention has heads of up to 256
features, so that it refuses Gemma 4.

Each one is compared with transformers in the tests: random weights in a tiny shape, written by
`save_pretrained`, logits to 2e-5 and 64 greedy ids, whole prompts and chunks. Those that
transformers has no class for (Aquila, InternLM, MiMo, Xverse, Yi) are read as the Llama that
they are, and only their configuration and names of tensors are tested.

| model type | architecture | GGUF |
|-|-|-|
"""


def page() -> str:
    """The text of docs/models.md."""
    rows = [
        f"| {one.model_type} | {', '.join(one.architectures)} | {', '.join(one.gguf) or '-'} |"
        for one in architectures()
        if one.plugin.startswith("vllmx-models")
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
