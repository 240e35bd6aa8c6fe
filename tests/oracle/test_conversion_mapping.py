"""Hugging Face's columns against the table by which transformers 5 itself reads its files.

``conversion_mapping.py`` says, by patterns of names, how what is in a file becomes what a model
holds in memory. It is applied here to the golden tensors in each of Hugging Face's layouts of a
family, and what results has to be that family's layout in memory, names and elements.
``pytest -s`` prints what it changes, and where the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import families
from ckptctl.families import family
from tests.checkpoints.golden import Golden
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle.hf_models import State, build_on_meta
from tests.oracle.test_families import in_memory_layout

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CASES = [
    (name, layout)
    for name in TINY
    if family_of(name) in families.list_model_types()
    for layout in Golden.read(name).digests
    if layout.partition("-")[0] == "hf" and layout != "hf-v5"
]
ALL = [(name, layout) for name, layout in CASES if "." not in name]
PLACES = [dict.fromkeys("abcdefghijklmnopqrstuvwxyz", n) for n in range(4)]
"""Index values: some layers have what the first one has not."""


class Table:
    """transformers' table for a model."""

    def __init__(self, name: str) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.model = build_on_meta(TINY[name]())
        self.held = self.model.state_dict()
        found = conversion_mapping.get_model_conversion_mapping(self.model, add_legacy=False)
        renaming, converter = core_model_loading.WeightRenaming, core_model_loading.WeightConverter
        self.renamings = [one for one in found if isinstance(one, renaming)]
        self.converters = [one for one in found if isinstance(one, converter)]
        self.by_pattern = {text: one for one in self.converters for text in one.source_patterns}

    def renamed(self, key: str) -> tuple[str, str | None]:
        """Return where *key* goes, and the pattern of what computes it there; None: nothing."""
        from transformers.core_model_loading import rename_source_key

        tables, prefix = (self.renamings, self.converters), self.model.base_model_prefix
        target, pattern = rename_source_key(key, *tables, prefix, self.held)
        return (key, None) if target not in self.held and key in self.held else (target, pattern)

    def targets(self, key: str) -> list[str]:
        """Return where *key* goes, or the parts that it is divided into."""
        target, pattern = self.renamed(key)
        if pattern is None:
            return [target]
        first, *others = self.by_pattern[pattern].target_patterns
        return [target, *(target.replace(first, other) for other in others)]

    def held_of(self, state: State) -> tuple[State, set[str]]:
        """Return *state* as the model would hold it, and the keys that were more than renamed.

        As ``convert_and_load_state_dict_in_model`` of its ``core_model_loading.py`` does it.
        """
        from transformers.core_model_loading import dot_natural_key

        found: State = {}
        collected: dict[str, Any] = {}
        for key in sorted(state, key=dot_natural_key):
            target, pattern = self.renamed(key)
            if pattern is None:
                found[target] = state[key]
            else:
                converter = collected.setdefault(target, deepcopy(self.by_pattern[pattern]))
                converter.add_tensor(target, key, pattern, lambda value=state[key]: value)
        for target, converter in collected.items():
            made = converter.convert(target, model=self.model, config=self.model.config)
            found |= {key: v[0] if isinstance(v, list) else v for key, v in made.items()}
        return found, set(collected)


def same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether the bits are the same: they are arbitrary, NaN included."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (one, other)))


def in_layout(folder: Path, name: str, layout: str) -> State:
    source, out = folder / "golden", folder / f"{layout}.pt"
    if not source.exists():
        Golden.read(name).save(source)
    if not out.exists():
        ckptctl.convert(source, out, to="torch", to_layout=layout, model_type=family_of(name))
    state: State = torch.load(out, weights_only=True)
    return state


def different(found: State, expected: State, aliases: Collection[str]) -> list[str]:
    """Return the keys that are not the same in both, tied ones left out."""
    lacking = expected.keys() - found.keys() - set(aliases)
    unlike = {key for key, value in found.items() if not same(expected.get(key), value)}
    return sorted(lacking | unlike)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_transformers_mapping_loads_same_tensors(tmp_path: Path, name: str, layout: str) -> None:
    table = Table(name)
    state = in_layout(tmp_path, name, layout)
    expected = in_layout(tmp_path, name, in_memory_layout(name, family_of(name)))
    found, computed = table.held_of(state)
    wrong = different(found, expected, table.model._tied_weights_keys or ())
    renamed = len(found.keys() - state.keys() - computed)
    print(
        f"\n{name} {layout}: {len(state)} tensors, {renamed} renamed, {len(computed)} computed, "
        f"{len(wrong)} different {wrong[:5] or ''}"
    )
    assert not wrong


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_layout_rows_map_to_transformers_targets(name: str, layout: str) -> None:
    """Rows that no tiny model has, too, such as biases that a configuration may ask for."""
    table, tables = Table(name), family(family_of(name))
    ours = tables.get_layout(in_memory_layout(name, family_of(name))).leaves
    wrong = {}
    for row, leaf in tables.get_layout(layout).leaves.items():
        if row not in ours:
            continue
        at = next((at for at in PLACES if ours[row].key.format_key(at) in table.held), PLACES[0])
        key, place = leaf.key.format_key(at), ours[row].key.format_key(at)
        if not ignored(table.model, key) and place not in table.targets(key):
            wrong[key] = f"{table.targets(key)}, here {place}"
    print(f"\n{name} {layout}: {len(wrong)} rows different {wrong or ''}")
    assert not wrong


def ignored(model: Any, key: str) -> bool:
    """Whether transformers leaves out what a file has under *key*."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, key) for pattern in patterns)


def test_swapped_expert_tensors_are_detected(tmp_path: Path) -> None:
    state = in_layout(tmp_path, "qwen3_moe", "hf")
    expected = in_layout(tmp_path, "qwen3_moe", "hf-v5")
    one, other = (f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up"))
    state |= {one: state[other], other: state[one]}
    found, _ = Table("qwen3_moe").held_of(state)
    assert different(found, expected, ()) == ["model.layers.1.mlp.experts.gate_up_proj"]
