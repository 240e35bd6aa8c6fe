"""Write ``docs/reference/facts.md`` from the table of facts and the families.

``python docs/generate_facts.py``

Which other facts a config.json states is that of the tiny models in ``tests/data/golden``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptctl.facts.compared import (
    list_compared_counts,
    list_compared_layer_facts,
    list_compared_sizes,
)
from ckptctl.facts.fact_names import IGNORED_KEYS, LOGIT_NEUTRAL_KEYS
from ckptctl.families import load_families
from ckptctl.planner.layouts import FACTS, Fact, Family

HERE = Path(__file__).parent
PAGE = HERE / "reference" / "facts.md"
GOLDEN = HERE.parent / "tests" / "data" / "golden"
HEAD = """# Facts that the tensors show

Generated from the table of facts and the families in `converters/` by
`python docs/generate_facts.py`.

`convert`, `verify` and `inspect` compare `config.json` with the tensors in the same way. A value
that contradicts the tensors is an error of `convert` (exit code 5), a finding of `verify` (9), and
a problem in `inspect`. If `config.json` does not state a size, transformers' default for the model
type is compared.

* **Sizes** are compared with shapes and with the numbers of tensors. Some facts occur only as a
  product, such as heads and their dimension. If the others are known, one of them is compared.
* **Layers** are facts that determine which tensors exist, and in which layers.
* **Not shown** are facts that no tensor shows. No command detects a wrong value from the
  tensors. They are compared with [other statements](../explanation/safety.md) of the same fact, if
  there are any.

For all model types, counts are compared with each other:

* `num_key_value_heads` divides `num_attention_heads`.
* `num_experts_per_tok` is at most the number of experts, and `n_group` divides that number.
* `topk_group` is at most `n_group`.
* `layer_types` and other lists of layers have one entry per layer.

| model type | sizes | layers | not shown |
| --- | --- | --- | --- |
"""
NAMES = """
## Names in other files

A fact that several files state is compared under its name in `config.json`. Megatron-Core's names
are those of `run_config.yaml`; some arguments of Megatron-LM have other names. GGUF keys follow the
name of the architecture. Model types may have names of their own for further facts.

| config.json | params.json | Megatron-Core | GGUF |
| --- | --- | --- | --- |
"""


def render() -> str:
    """Return the page."""
    shared = (fact for fact in FACTS.values() if fact.params or fact.megatron or fact.gguf)
    table = HEAD + "".join(map(_row, load_families().values()))
    return table + NAMES + "".join(map(_names_of, shared))


def _names_of(fact: Fact) -> str:
    names = (fact.config, fact.params, fact.megatron, fact.gguf)
    return "| " + " | ".join(f"`{name}`" if name else "-" for name in names) + " |\n"


def _row(family: Family) -> str:
    stated = set(_stated(family))
    counts = {*list_compared_counts()}
    sizes = {*list_compared_sizes(family)} & stated
    layers = {*list_compared_layer_facts(family)} & stated - sizes
    rest = {name for name in stated - sizes - layers - counts if not _says_nothing(name)}
    return f"| `{family.name}` | {_listed(sizes)} | {_listed(layers)} | {_listed(rest)} |\n"


def _stated(family: Family) -> Iterator[str]:
    for file in sorted(GOLDEN.glob("*.json")):
        if file.name.partition(".")[0] == family.name:
            yield from _names(json.loads(file.read_text())["config"])


def _names(config: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value and key != "per_layer_config":
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _says_nothing(name: str) -> bool:
    last = name.rpartition(".")[2]
    skipped = {
        *LOGIT_NEUTRAL_KEYS,
        *(key for keys in IGNORED_KEYS.values() for key in keys),
        "model_type",
    }
    return last in skipped or last.startswith("_")


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "-"


if __name__ == "__main__":
    PAGE.write_text(render())
