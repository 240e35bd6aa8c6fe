"""What every model family in ``converters/`` has to satisfy."""

import numpy as np
import pytest

from ckptctl.errors import MappingError
from ckptctl.families import list_model_types
from ckptctl.numerics.quantization.linear_weights import EXPERT_LAYERS_BY_STACK, TensorRoles
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.layouts import HF, LLM_COMPRESSOR
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.matching import list_index_values
from ckptctl.planner.model_parallel import split_tensor
from tests.contract.tables import (
    ALL,
    FAMILIES,
    PAIRS,
    cells,
    copies,
    direct,
    layers_of,
    mapped,
    moved,
    numbered,
    stored_shapes,
    tiny,
    tiny_sizes,
)
from tests.sweeps import one_in

DIVIDED = [pair for pair in ALL if not pair[1].startswith("mcore")]
"""Layouts whose tensors ranks may divide: no parts of them take turns."""

SHOWN_BY_CONFIG = {("mistral4", LLM_COMPRESSOR)}
"""Layouts with the keys in which another family is published: those of DeepSeek-V2."""


@pytest.mark.parametrize("name", list_model_types())
def test_family_name_matches_file_and_fields_are_set(name):
    family = FAMILIES[name]
    assert family.name == name
    assert family.title and family.architecture and family.tiny
    assert family.refines is None or family.refines in FAMILIES
    assert len(set(family.layouts)) == len(family.layouts) > 0
    used = {tensor.variant for tensor in family.tensors.values()} - {None}
    assert used == {variant for group in family.variants for variant in group}


def test_family_names_and_aliases_are_unique():
    every = [n for f in FAMILIES.values() for n in (f.name, *f.aliases)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(("name", "layout"), one_in(3, ALL))
def test_tensors_of_one_layout_have_distinct_keys(name, layout):
    family, table = FAMILIES[name], FAMILIES[name].get_layout(layout)
    numbered = [shift for shift in family.shifts if shift.layout == layout]
    texts = [(s.template.text, numbered and s.parts[0][0].indices) for s in table.stored]
    texts += [(drop.key, "") for drop in family.drops if drop.layout == layout]
    assert len(set(map(str, texts))) == len(texts)
    for stored in table.stored:
        values = {index: 7 + n for n, index in enumerate(stored.template.indices)}
        if stored.template.words:
            values[stored.template.word_index] = 1
        assert (stored, values) in list(
            table.table.iterate_matches(stored.template.format_key(values))
        )


@pytest.mark.parametrize(("name", "source", "target"), one_in(4, direct(PAIRS)))
def test_mapping_reads_and_writes_every_key(name, source, target):
    family = FAMILIES[name]
    before, after = tiny(family, source), tiny(family, target)
    found = mapped(family, source, target, before)
    assert stored_shapes(found.tensors) == after
    made = {zeros.key for zeros in found.zeros}
    read = {view.key for tensor in found.tensors for view in tensor.sources} - made
    assert read | found.dropped_keys.keys() == before.keys()


@pytest.mark.parametrize(("name", "source", "target"), one_in(11, direct(PAIRS)))
def test_mapping_round_trip_preserves_values(name, source, target):
    family = FAMILIES[name]
    shapes = tiny(family, source)
    there = mapped(family, source, target, shapes)
    values = numbered(shapes)
    for other, kept in copies(there).items():
        values[other] = values[kept]
    for one in there.redundant:
        if one.same_as is None:
            values[one.part.key][...] = 0
    found = moved(there, values)
    assert all((array >= 0).all() for array in found.values())
    back = mapped(family, target, source, {k: v.shape for k, v in found.items()})
    again = moved(back, found)
    assert again.keys() | there.dropped_keys.keys() == values.keys()
    retiled = {zeros.like for zeros in there.zeros}
    for key, array in again.items():
        assert key in retiled or (array == values[key]).all(), key


@pytest.mark.parametrize(("name", "layout"), one_in(5, DIVIDED))
@pytest.mark.parametrize("ranks", [2, 4])
def test_rank_shards_tile_every_tensor(name, layout, ranks):
    family = FAMILIES[name]
    sizes = AxisSizes(tiny_sizes(family), {})
    for key, shape in tiny(family, layout, optional=True).items():
        whole = np.zeros(shape, int)
        shares = [s for s in split_tensor(family, layout, key, shape, sizes, ranks) if s]
        for share in shares:
            held = np.zeros(share.shape, int)
            for piece in share.pieces:
                whole[cells(piece.box.offsets, piece.box.sizes)] += 1
                held[cells(piece.offsets, piece.box.sizes)] += 1
            assert (held == 1).all(), key
        found = np.unique(whole)
        assert all(0 < n <= ranks and ranks % n == 0 for n in found.tolist()), key


@pytest.mark.parametrize(("name", "layout"), one_in(3, ALL))
def test_model_family_and_layout_are_detected_from_keys(name, layout):
    family = FAMILIES[name]
    found = detect_layouts(tiny(family, layout), FAMILIES)
    assert all(c.is_exact for c in found)
    needs_config = family.shown_by is not None or (name, layout) in SHOWN_BY_CONFIG
    if needs_config and all(c.family != name for c in found):
        found = detect_layouts(tiny(family, layout), FAMILIES, dict(family.config_signs[0]))
    assert any(c.family == name and layout in (c.layout, *c.alike) for c in found)


def test_separate_experts_do_not_make_published_keys_ambiguous():
    """Mistral 4 has the keys of DeepSeek-V2 if its experts are separate."""
    found = detect_layouts(tiny(FAMILIES["deepseek_v2"], HF), FAMILIES)
    assert {c.family for c in found} == {"deepseek_v2"}


@pytest.mark.parametrize("layout", FAMILIES["deepseek_v3"].layouts)
def test_deepseek_v3_keys_are_detected_only_as_deepseek_v3(layout):
    found = detect_layouts(tiny(FAMILIES["deepseek_v3"], layout), FAMILIES)
    assert {c.family for c in found} == {"deepseek_v3"}


def test_indexer_tensors_are_detected_as_glm_5():
    shapes = tiny(FAMILIES["glm_moe_dsa"], "hf", optional=True)
    assert "glm_moe_dsa" in {c.family for c in detect_layouts(shapes, FAMILIES)}


def test_lfm2_mlx_is_distinguished_by_shapes():
    found = detect_layouts(tiny(FAMILIES["lfm2"], "mlx"), FAMILIES)
    assert [(c.family, c.layout) for c in found] == [("lfm2", "mlx")]


@pytest.mark.parametrize(("name", "source", "target"), one_in(5, direct(PAIRS)))
def test_optional_tensors_without_target_are_refused(name, source, target):
    family = FAMILIES[name]
    before = tiny(family, source, optional=True)
    after = tiny(family, target, optional=True)
    names = set(family.get_layout(source).leaves) - set(family.get_layout(target).leaves)
    names -= {tie.tensor for tie in family.ties if family.tied}
    names -= {name for rule in family.tiles for name in (rule.grid, rule.rows)}
    sizes = tiny_sizes(family)
    shown = layers_of(family, sizes).keys() | {None}
    homeless = [
        n for n in names if list_index_values(t := family.tensors[n], sizes) and t.variant in shown
    ]
    if homeless:
        with pytest.raises(MappingError, match="no place"):
            mapped(family, source, target, before)
    else:
        found = mapped(family, source, target, before)
        assert set(stored_shapes(found.tensors)) <= set(after)


@pytest.mark.parametrize("name", list_model_types())
def test_stacks_that_quantization_splits_have_layout_by_expert(name):
    """Otherwise, no command knows the experts that ``--quantize`` writes."""
    family = FAMILIES[name]
    saved = [one for one in family.layouts if one == HF or one.startswith(f"{HF}-")]
    if not all(TensorRoles(family, family.get_layout(one)).has_stacked_experts for one in saved):
        return
    table = family.get_layout(HF)
    roles = TensorRoles(family, table)
    for stored in table.stored:
        key = stored.template.format_key(dict.fromkeys(stored.template.indices, 0))
        if roles.get_role(key, (2, 2, 2)) not in ("experts", "transposed"):
            continue
        module, _, stack = key.rpartition(".")
        leaves = family.get_layout(LLM_COMPRESSOR).leaves
        assert [
            leaves[tensor.name].key.format_key(dict.fromkeys((*tensor.indices, "x"), 0))
            for tensor, _ in stored.parts
        ] == [f"{module}.0.{layer}.weight" for layer in EXPERT_LAYERS_BY_STACK[stack]]
