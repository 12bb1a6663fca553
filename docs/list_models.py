"""Makes the site's page from what vllmx's own plugins provide: `python docs/list_models.py`."""

from __future__ import annotations

from pathlib import Path

from vllmx.cli.models import architectures, cells
from vllmx_models.checked import KINDS

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
## Everything else

`--model-impl` says whose code runs a model: `vllmx`, its own file; `transformers`, any decoder of
[transformers](https://github.com/huggingface/transformers) whose attention is one of its
exchangeable functions; `auto` (the default), the own file where there is one. A log line says when
transformers runs a model, because it costs: backend torch alone, several times slower than a model
of vllmx's own, weights as they are stored (a quantised checkpoint, GGUF and `--isq` are refused),
logits rounded to the model's dtype. Scheduler, pages, prefix cache, sampler and API are those of
any other model. Code of a model's folder is never executed, whatever its config.json asks for.

What could not be honoured is refused before a weight is read: attention that is code of its own
(BLOOM, MPT, Falcon, GPT-J, XGLM), masks other than causal and windows, layers that keep
something else than keys and values (Mamba, convolutions), encoders. After loading, three tokens
show whether tokens meet anywhere but in attention; a model in which they do is refused, too. A
model whose rotary factors depend on the longest position of a batch (longrope) is served up to its
first context length. On a GPU, weights pass through the memory of the host as a whole.

Compared with transformers in the tests as above, with 64 greedy ids, prefix hits, batch mates and
preemption:
Dots1, Exaone 4, GPT-2, GPT-BigCode, GPT-NeoX, Granite with windows, Jais 2, MiniCPM3, Nemotron,
OLMo, OPT, Persimmon, Phi, Starcoder2, VaultGemma.
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
