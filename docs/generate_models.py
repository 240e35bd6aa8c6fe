"""Write ``docs/reference/models.md`` from the families: ``python docs/generate_models.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptctl import models
from ckptctl.verbs.models import NOT_PROVEN, UNTRANSLATED, ModelType

PAGE = Path(__file__).parent / "reference" / "models.md"
HEAD = """# Model types and layouts

Generated from the families in `converters/` by `python docs/generate_models.py`.

`ckptctl models NAME` shows the tables of a family: the key, the axes and the parts of every
tensor in every layout. `ckptctl map KEY` shows the counterparts of one key. To add a family,
[write a table](../how-to/add-a-model-family.md).

| model type | aliases | models | layouts | logits comparison |
| --- | --- | --- | --- | --- |
"""
FOOT = """
The last column names the programs that computed equal logits before and after a conversion, for a
model with random weights (including norms). Layouts without a program in this column were not
compared in this way. For the Gemmas and GLM-4 0414, Megatron-Bridge and slime use modules that are
not in Megatron-Core and that require Transformer Engine. These were not run.

For a model type marked as not translated, only Hugging Face's key names are known. Such a model is
recognized, verified, pruned and converted between formats like any other. Key names of other
programs are not supported for it.

## Layouts

| layout | origin of names and axis orders |
| --- | --- |
| `hf` | Hugging Face, as `save_pretrained` writes them |
| `hf-v5` | transformers 5, in memory, if [different](../how-to/mixture-of-experts.md) from `hf` |
| `hf-fresh` | transformers 5, as it saves a newly created model, for models where this differs |
| `hf-3.5` | Hugging Face, Qwen 3.5 as published, which differs from Qwen 3.6 |
| `meta` | Meta's `consolidated.NN.pth` |
| `mistral` | mistral-inference's `consolidated.safetensors` |
| `torchtune` | torchtune's models |
| `torchtitan@0.2`, `torchtitan@0.3` | torchtitan, where names differ between versions |
| `mlx` | mlx-lm, or mlx-vlm for models with a vision tower |
| `mcore`, `mcore-local` | Megatron-Core, with and without Transformer Engine |
| others | the model's own code: `deepseek`, `openai`, `olmo`, ... |

Layouts of a family may differ in the order of rotary pairs. In Llama's `hf` layout, a pair consists
of rows `j` and `j + e/2` of a head's `e` rows. In its other layouts, it consists of `2j` and
`2j + 1`. The axes show this order: `(h p r) d` and `(h r p) d`.

## How a model is recognized

Detection uses `config.json` and `params.json` first, then the keys. If several model types match
and the conversion is the same for all of them, it proceeds. Otherwise an error lists them, and
`--model-type` or `--assets` selects one.

| model type | detected by |
| --- | --- |
"""
TAIL = """
The numbers of heads are required if layouts differ in rotary order, or if one of them concatenates
queries, keys and values. They come from `config.json` or `params.json` of the source or `--assets`,
or from `--set`, for example `--set num_attention_heads=32`.

Layout `hf-base` is saved by transformers classes without a head, such as `LlamaModel`: the names of
`hf` without the prefix `model.`. `hf-v5-base` and `hf-fresh-base` are the equivalents of `hf-v5`
and `hf-fresh`. They are read for every model type with this prefix. `--to hf` keeps these names,
and `--to-layout hf` writes the names of `hf`.

A checkpoint of an unknown model can be converted between `hf`, `dcp` and `torch` with its key names
unchanged.
"""


def render() -> str:
    """Return the page."""
    known = models().models
    first = (
        (f"`{m.family.name}`", _quoted(m.family.aliases), m.family.title, _quoted(m.layouts))
        for m in known
    )
    rows = ((*row, _proofs(model)) for row, model in zip(first, known, strict=True))
    signs = ((f"`{m.family.name}`", "; ".join(m.recognized)) for m in known)
    return "".join((HEAD, *_rows(rows), FOOT, *_rows(signs), TAIL))


def _rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _proofs(model: ModelType) -> str:
    found: dict[str, list[str]] = {}
    for name in model.layouts:
        if model.describe_proof(name) != NOT_PROVEN:
            found.setdefault(model.describe_proof(name), []).append(name)
    said = [f"{_quoted(names)}: {proof}" for proof, names in found.items()]
    return "; ".join(said if model.translated else [*said, UNTRANSLATED])


if __name__ == "__main__":
    PAGE.write_text(render())
