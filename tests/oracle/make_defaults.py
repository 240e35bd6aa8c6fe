"""What transformers' configurations take where config.json is silent, as data of the program.

``python -m tests.oracle.make_defaults`` writes ``ckptctl/planner/config_defaults.py``. A default
that follows from other facts, as the number of key/value heads does in many models, is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ckptctl.facts.contradictions import LIMITED
from ckptctl.families import families
from ckptctl.planner.config_facts import names_in
from ckptctl.planner.families.declarations import spellings
from tests.checkpoints.golden import Golden, family_of, names

FILE = Path(__file__).parents[2] / "ckptctl/planner/config_defaults.py"
Config = Mapping[str, Any]
HEAD = '''"""Sizes that transformers takes where config.json does not state them, by ``model_type``.

Made by ``python -m tests.oracle.make_defaults`` from transformers {version}; not edited by hand.
"""

from __future__ import annotations

from collections.abc import Mapping

# One paragraph for each model type, as a table: formatted, it would have 800 lines.
# fmt: off
DEFAULTS: Mapping[str, Mapping[str, int]] = {{
'''


def found() -> dict[str, dict[str, int]]:
    """Return the defaults of each model type, also of those inside others."""
    known: dict[str, dict[str, int]] = {}
    for name in names():
        golden = Golden.read(name)
        wanted = _wanted(family_of(name))
        for prefix, part in _parts(golden.config):
            inside = {n.removeprefix(prefix) for n in wanted if n.startswith(prefix)}
            inside = {n for n in inside if "." not in n}
            own = known.setdefault(part["model_type"], {})
            own |= {n: v for n in sorted(inside) if (v := _default(part, n)) is not None}
    return {kind: dict(sorted(own.items())) for kind, own in sorted(known.items()) if own}


def _wanted(family_name: str) -> set[str]:
    family = families()[family_name]
    sizes = {one for stated, _ in family.sizes.values() for one in spellings(stated) if one}
    formulas = {one for _, text in family.formulas for one in names_in(text)}
    kinds = {fact for kind in family.kinds for fact in kind.facts}
    limited = {f"{prefix}{name}" for prefix in ("", "text_config.") for name in LIMITED}
    own = {fact for one in family.layer_sizes for fact in one.facts}
    return sizes | formulas | limited | kinds | own


def _parts(config: Config, prefix: str = "") -> Iterator[tuple[str, Config]]:
    if isinstance(config.get("model_type"), str):
        yield prefix, config
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _parts(value, f"{prefix}{key}.")


def _default(config: Config, name: str) -> int | None:
    """Return the default of one fact; None: there is none, or it follows from other facts."""
    if config["model_type"] not in CONFIG_MAPPING or not _is_count(config.get(name)):
        return None
    kind = CONFIG_MAPPING[config["model_type"]]
    default = kind().to_dict().get(name)
    less = {key: value for key, value in deepcopy(dict(config)).items() if key != name}
    try:
        silent = kind.from_dict(as_python(less)).to_dict().get(name)
    except Exception:  # it contradicts the rest, as a number of layers may
        silent = default
    return default if default == silent and _is_count(default) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def as_python(config: Config) -> dict[str, Any]:
    """Return a config.json with infinity, which transformers spells as an object, as a number."""
    limit = config.get("time_step_limit")
    if not limit:
        return dict(config)
    read = tuple(float(one["__float__"]) if isinstance(one, Mapping) else one for one in limit)
    return {**config, "time_step_limit": read}


def text() -> str:
    """Return the module."""
    blocks = [HEAD.format(version=".".join(transformers.__version__.split(".")[:2]))]
    for kind, own in found().items():
        # No line is wrapped at such a blank: each name stays with its size.
        entry = f"{kind!r}: {own},".replace("'", '"').replace(": ", ":\xa0")
        lines = textwrap.fill(entry, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
        blocks.append(lines.replace("\xa0", " ") + "\n")
    blocks.append(
        '}\n"""Of those that differ from model type to model type, none follows from others."""\n'
    )
    return "".join(blocks)


if __name__ == "__main__":
    FILE.write_text(text())
