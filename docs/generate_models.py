"""Write ``docs/reference/models.md`` from the families: ``python docs/generate_models.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptctl import models
from ckptctl.ops.models import CARRIED, NOT_PROVEN, Model

PAGE = Path(__file__).parent / "reference" / "models.md"
HEAD = """# Model types and layouts

Generated from the families in `converters/` by `python docs/generate_models.py`.

`ckptctl models FAMILY` shows the tables of one: the key, the axes and the parts of every tensor in
every layout. `ckptctl map KEY` shows where one key goes. A family that is missing is
[a table away](../how-to/add-a-model-family.md).

| model type | also called | models | layouts | logits compared |
| --- | --- | --- | --- | --- |
"""
FOOT = """
Where logits were compared, a model with random weights, norms included, gave the same logits before
and after a conversion, computed by the program named. A layout without a name in that column was
not compared so. The Gemmas and GLM-4 0414 have modules in Megatron-Bridge and slime that
Megatron-Core lacks and that need Transformer Engine: they were not run.

"Carried, not translated" is a model type of which only Hugging Face's spellings are known: it is
recognized, proven whole, turned from format to format, pruned and verified as any other one, and no
other program's names are written for it.

## Layouts

| layout | whose names and axis orders |
| --- | --- |
| `hf` | Hugging Face, as `save_pretrained` writes them |
| `hf-v5` | what transformers 5 has in memory, where it [differs](../how-to/mixture-of-experts.md) |
| `hf-fresh` | what transformers 5 writes of a model that came from no file, where that differs |
| `hf-3.5` | Hugging Face's of Qwen 3.5 as published, which differs from that of Qwen 3.6 |
| `meta` | Meta's `consolidated.NN.pth` |
| `mistral` | mistral-inference's `consolidated.safetensors` |
| `torchtune` | torchtune's models |
| `torchtitan@0.2`, `torchtitan@0.3` | torchtitan, which changes names from version to version |
| `mlx` | mlx-lm's, and mlx-vlm's where it has a tower for pictures |
| `mcore`, `mcore-local` | Megatron-Core's, with Transformer Engine and without it |
| others | the model's own code: `deepseek`, `openai`, `olmo`, ... |

Layouts of a family may differ in the order of rotary pairs: in Llama's `hf` a pair is `j`,
`j + e/2` of a head's `e` rows, in its other layouts it is `2j`, `2j + 1`. The axes show it:
`(h p r) d` and `(h r p) d`.

## How a model is recognized

`config.json` and `params.json` come first, then the keys. Where several model types fit and the
conversion would be the same for all of them, it goes ahead; otherwise it is an error that names
them, and `--model-type` or `--assets` decides.

| model type | recognized by |
| --- | --- |
"""
TAIL = """
Where layouts differ in rotary order, or one of them concatenates queries, keys and values, numbers
of heads have to be known: from `config.json` or `params.json`, of the source or of `--assets`, or
from `--set`, as in `--set num_attention_heads=32`.

Layout `hf-base` is what transformers saves of a class without a head, as `LlamaModel`: the names
of `hf` without the `model.` before them; `hf-v5-base` and `hf-fresh-base` are the same of
`hf-v5` and `hf-fresh`. Every model type whose names have it is read so; `--to hf`
keeps these names, and `--to-layout hf` writes the others.

A checkpoint of an unknown model converts between `hf`, `dcp` and `torch` with the names it has.
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


def _proofs(model: Model) -> str:
    found: dict[str, list[str]] = {}
    for name in model.layouts:
        if model.proof(name) != NOT_PROVEN:
            found.setdefault(model.proof(name), []).append(name)
    said = [f"{_quoted(names)}: {proof}" for proof, names in found.items()]
    return "; ".join(said if model.translated else [*said, CARRIED])


if __name__ == "__main__":
    PAGE.write_text(render())
