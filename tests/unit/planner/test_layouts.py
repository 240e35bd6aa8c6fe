import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import Box
from ckptctl.errors import MappingError, MissingTensorsError, UsageError
from ckptctl.families import family, load_families
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.families.declarations import (
    choose_field_alias,
    matches_conditions,
    split_aliases,
)
from ckptctl.planner.families.tables import format_dims, parse_dims, parse_tables
from ckptctl.planner.families.templates import Template, TemplateTable
from ckptctl.planner.layouts import PRESENT, Family
from ckptctl.planner.mapping import tensors
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import MappingOptions, map_tensors
from ckptctl.planner.model_parallel import (
    find_split_dim,
    fits_ranks,
    list_part_splits,
    list_possible_repeats,
    split_tensor,
)
from tests import effort
from tests.contract import tables
from tests.contract.tables import copies, stored_shapes

V, D, F, H, K, E, N = 48, 32, 40, 4, 2, 8, 3
SIZES = {"v": V, "d": D, "f": F, "h": H, "k": K, "e": E, "i": N}
FACTS = ModelFacts(sizes=SIZES)


def hf(layers=N, lm_head=True):
    shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (H * E, D),
            at + "self_attn.k_proj.weight": (K * E, D),
            at + "self_attn.v_proj.weight": (K * E, D),
            at + "self_attn.o_proj.weight": (D, H * E),
            at + "mlp.gate_proj.weight": (F, D),
            at + "mlp.up_proj.weight": (F, D),
            at + "mlp.down_proj.weight": (D, F),
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
        }
    return shapes | {"model.norm.weight": (D,)} | ({"lm_head.weight": (V, D)} if lm_head else {})


def meta(layers=N):
    mapped = map_tensors(
        family("llama3"), "hf", "meta", hf(layers), ModelFacts(sizes=SIZES | {"i": layers})
    )
    return stored_shapes(mapped.tensors)


# templates


def test_template_key_roundtrips():
    template = Template.parse("a.{i}.w1.{x}.weight")
    assert template.indices == ("i", "x")
    assert template.format_key({"i": 3, "x": 11}) == "a.3.w1.11.weight"


@pytest.mark.parametrize("text", ["a{i}.b", "a.{i", "a..b", "a.{I}.b", ""])
def test_invalid_templates_are_errors(text):
    with pytest.raises(ValueError, match="template"):
        Template.parse(text)


def test_lookup_is_anchored_and_literal_numbers_match():
    table = TemplateTable(
        [(Template.parse(t), t) for t in ("a.{i}.b", "mtp.0.x", "a.{i}.c.{i}.d", "m.{i}.x")]
    )
    assert table.find_match("a.12.b") == ("a.{i}.b", {"i": 12})
    assert table.find_match("mtp.0.x") == ("mtp.0.x", {})
    assert table.find_match("a.2.c.2.d") == ("a.{i}.c.{i}.d", {"i": 2})
    for key in ("a.12.b.c", "z.a.12.b", "a.012.b", "a.-1.b", "mtp.1.x", "a.2.c.3.d", "a.#.b", ""):
        assert table.find_match(key) is None, key


def test_words_stand_for_index_values():
    template = Template.parse("a.{i}.{c=gate|up}.x")
    assert template.indices == ("i", "c")
    assert [template.format_key({"i": 3, "c": c}) for c in (0, 1)] == ["a.3.gate.x", "a.3.up.x"]
    assert template.format_key({"i": "{i}", "c": "{c}"}) == "a.{i}.{c=gate|up}.x"
    table = TemplateTable([(template, "t")])
    assert table.find_match("a.3.up.x") == ("t", {"i": 3, "c": 1})
    assert table.find_match("a.3.down.x") is table.find_match("a.3.c.x") is None
    for text in ("{c=a|b}.{d=a|b}", "{c=a|b}.{c}", "{c=a}.x", "{c=}.x"):
        with pytest.raises(ValueError, match="template"):
            Template.parse(text)


def test_words_of_several_parts_contain_numbers():
    template = Template.parse("a.{n=1.0|2.9|2.11}.x.{i}")
    assert template.indices == ("n", "i")
    assert template.format_key({"n": 2, "i": 5}) == "a.2.11.x.5"
    table = TemplateTable([(template, "t")])
    assert table.find_match("a.2.9.x.7") == ("t", {"n": 1, "i": 7})
    assert table.find_match("a.2.10.x.7") is table.find_match("a.9.x.7") is None


def test_separately_named_parts_form_one_tensor():
    """The gates and ups of gpt-oss' experts, which mlx-lm has in two tensors."""
    oss = family("gpt_oss")
    whole = tables.tiny(oss, "mlx")
    up = "model.layers.1.mlp.experts.up_proj.weight"
    found = map_tensors(oss, "mlx", "hf", whole)
    (one,) = [t for t in found.tensors if up in {view.key for view in t.sources}]
    gate = up.replace("up", "gate")
    assert [view.key for view in one.sources] == [gate, up]
    with pytest.raises(MissingTensorsError, match="is missing a tensor") as error:
        map_tensors(oss, "mlx", "hf", {k: v for k, v in whole.items() if k != up})
    assert error.value.where == f"tensor `{up}`"


def test_parts_interleaved_in_both_layouts_stay_one_tensor():
    deepseek = family("deepseek_v3")
    key = "model.layers.0.self_attn.kv_b_proj.weight"
    found = map_tensors(deepseek, "hf", "deepseek", tables.tiny(deepseek, "hf"))
    ours = [t for t in compose_tensors(found.tensors).values() if t.sources[0].key == key]
    assert [([*t.logical], t.is_rename) for t in ours] == [(["kv_b_k.0"], True)]


@given(st.text(alphabet="a.0129#{}xé٣", max_size=12))
def test_lookup_of_any_text_is_exact(key):
    table = TemplateTable([(Template.parse("a.{i}.x"), "t")])
    found = table.find_match(key)
    if found:
        assert f"a.{found[1]['i']}.x" == key


# tables


def test_tables_parse_into_tensors_and_leaves():
    first = """
    logical  axes      one: l.{i}.  two: m.{i}.
    q        (h* r) d  wq (r h) d   q
    b?       h*        wb           -
    """
    second = """
    logical  axes
    n        d
    """
    third = """
    logical  two: m.{i}.
    q        p
    """
    q, b, n = parse_tables([first, second, third], {"three": "one"})
    assert (q.name, q.indices, q.split_axis, q.optional) == ("q.{i}", ("i",), "h", False)
    assert q.leaves["one"].dims == (("r", "h"), ("d",))
    assert q.leaves["two"].key.text == "m.{i}.p"
    assert q.leaves["three"] == q.leaves["one"]
    assert b.optional and set(b.leaves) == {"one", "three"}
    assert n.leaves == {} and n.block == 1


def test_inherited_keys_get_longest_matching_prefix():
    table = """
        logical  axes  hf            mlx
        embed    v d   model.embed   -
        q        h d   model.text.q  own.q
        patch    d c   visual.patch  -
    """
    changes = {"v5": {"model.": "a.", "model.text.": "b.", "own.": "c."}, "mlx": {"own.": "c."}}
    found = parse_tables((table,), {"v5": "hf"}, changes)
    assert [t.leaves["v5"].key.text for t in found] == ["a.embed", "b.q", "visual.patch"]
    assert found[1].leaves["mlx"].key.text == "own.q"


@pytest.mark.parametrize(
    "table",
    [
        "axes  one\nv  a",
        "logical  one\nq",
        "logical  axes  one\nq  (h  a",
    ],
)
def test_invalid_tables_are_errors(table):
    with pytest.raises(ValueError):
        parse_tables([table], {})


@pytest.mark.parametrize("text", ["(h p", "h h", "h* k*", "h+d", "((h) d)", "H"])
def test_invalid_axes_are_errors(text):
    with pytest.raises(ValueError, match=r"invalid axes|repeated axis"):
        parse_dims(text)


def test_axes_are_shown_as_written():
    assert format_dims(parse_dims("(h* r p) d")[0]) == "(h r p) d"
    assert parse_dims("") == ((), None)


# mapping


def permute(w, heads):
    """transformers' ``convert_llama_weights_to_hf.permute``."""
    rows, dim = w.shape
    return w.reshape(heads, rows // heads // 2, 2, dim).transpose(0, 2, 1, 3).reshape(rows, dim)


def test_meta_to_hf_permutes_like_transformers():
    rng = np.random.default_rng(0)
    shapes = meta()
    data = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    mapped = map_tensors(family("llama3"), "meta", "hf", shapes, FACTS)
    out = tables.moved(mapped, data)
    for i in range(N):
        wq, wk, wv, wo = (data[f"layers.{i}.attention.w{x}.weight"] for x in "qkvo")
        at = f"model.layers.{i}.self_attn."
        np.testing.assert_array_equal(out[at + "q_proj.weight"], permute(wq, H))
        np.testing.assert_array_equal(out[at + "k_proj.weight"], permute(wk, K))
        np.testing.assert_array_equal(out[at + "v_proj.weight"], wv)
        np.testing.assert_array_equal(out[at + "o_proj.weight"], wo)
        assert not np.array_equal(out[at + "k_proj.weight"], wk)
        w1, w2, w3 = (data[f"layers.{i}.feed_forward.w{x}.weight"] for x in "123")
        mlp = f"model.layers.{i}.mlp."
        np.testing.assert_array_equal(out[mlp + "gate_proj.weight"], w1)
        np.testing.assert_array_equal(out[mlp + "down_proj.weight"], w2)
        np.testing.assert_array_equal(out[mlp + "up_proj.weight"], w3)
    back = tables.moved(
        map_tensors(family("llama3"), "hf", "meta", stored_shapes(mapped.tensors), FACTS),
        out,
    )
    assert back.keys() == data.keys()
    for key, value in data.items():
        np.testing.assert_array_equal(back[key], value)


@pytest.mark.parametrize("target", ["torchtune", "torchtitan@0.2", "torchtitan@0.3"])
def test_interleaved_layouts_differ_only_in_names(target):
    mapped = map_tensors(family("llama3"), "meta", target, meta())
    composed = compose_tensors(mapped.tensors).values()
    assert all(tensor.is_rename for tensor in composed)
    assert [t.sources[0].key for t in composed] == list(meta())


def test_torchtitan_keys_have_expected_names():
    keys = stored_shapes(map_tensors(family("llama3"), "meta", "torchtitan@0.3", meta()).tensors)
    assert "layers.2.attention.qkv_linear.wk.weight" in keys and "lm_head.weight" in keys
    assert "layers.2.attention.wo.weight" in keys


def test_layers_are_in_numeric_order_and_match_hf():
    mapped = map_tensors(
        family("llama3"), "meta", "hf", meta(12), ModelFacts(sizes=SIZES | {"i": 12})
    )
    assert list(stored_shapes(mapped.tensors)) == list(hf(12))
    assert stored_shapes(mapped.tensors) == hf(12)


def test_same_layout_is_identity():
    shapes = hf() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    mapped = map_tensors(family("llama2"), "hf", "hf", shapes, ModelFacts(tied=True))
    assert stored_shapes(mapped.tensors) == shapes
    assert not mapped.dropped_keys and not mapped.redundant


def test_rotary_frequencies_are_dropped_by_name():
    shapes = meta() | {"rope.freqs": (4,)}
    mapped = map_tensors(family("llama2"), "meta", "hf", shapes, FACTS)
    assert list(mapped.dropped_keys) == ["rope.freqs"]


def test_missing_head_count_is_an_error():
    with pytest.raises(MappingError) as caught:
        map_tensors(family("llama3"), "hf", "meta", hf())
    assert "num_attention_heads" in caught.value.what and "--assets" in caught.value.hint


def test_head_dim_suffices_to_find_head_counts():
    mapped = map_tensors(family("llama3"), "hf", "meta", hf(), ModelFacts(sizes={"e": E}))
    assert (mapped.sizes["h"], mapped.sizes["k"], mapped.sizes["v"]) == (H, K, V)


@pytest.mark.parametrize(
    ("axis", "size"), [("h", 8), ("k", 4), ("d", 64), ("f", 41), ("v", 49), ("e", 16), ("e", 3)]
)
def test_config_that_contradicts_shapes_is_refused(axis, size):
    for target in ("hf", "meta"):
        with pytest.raises(MappingError) as caught:
            map_tensors(
                family("llama3"), "hf", target, hf(), ModelFacts(sizes=SIZES | {axis: size})
            )
        assert str(size) in f"{caught.value.what} {caught.value.why}"


def test_contradicting_tensor_shapes_are_refused():
    shapes = hf() | {"model.layers.1.mlp.up_proj.weight": (F, D + 1)}
    with pytest.raises(MappingError) as caught:
        map_tensors(family("llama3"), "hf", "torchtune", shapes, ModelFacts(sizes={"e": E}))
    assert "model.layers.1.mlp.up_proj.weight" in caught.value.where
    shapes = hf() | {"model.norm.weight": (D, 1)}
    with pytest.raises(MappingError, match="2 dimensions, not 1"):
        map_tensors(family("llama3"), "hf", "hf", shapes)


def test_unknown_key_error_names_nearest_key():
    shapes = hf()
    shapes["model.layers.1.self_attn.q_prj.weight"] = shapes.pop(
        "model.layers.1.self_attn.q_proj.weight"
    )
    with pytest.raises(MappingError) as caught:
        map_tensors(family("llama3"), "hf", "meta", shapes, FACTS)
    assert "q_prj.weight` (near: `model.layers.1.self_attn.q_proj.weight`)" in caught.value.why


@pytest.mark.parametrize(
    "gone",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"],
)
def test_missing_keys_are_an_error_unless_partial(gone):
    shapes = hf()
    del shapes[gone]
    with pytest.raises(MissingTensorsError) as caught:
        map_tensors(family("llama3"), "hf", "meta", shapes, FACTS)
    assert gone in caught.value.why
    part = map_tensors(
        family("llama3"),
        "hf",
        "meta",
        shapes,
        FACTS,
        MappingOptions(partial=True),
    )
    assert len(part.tensors) == len(shapes)


def test_layer_gap_or_missing_last_layer_is_an_error():
    gap = {k: v for k, v in hf().items() if ".layers.1." not in k}
    with pytest.raises(MissingTensorsError, match="9 tensors"):
        map_tensors(family("llama3"), "hf", "meta", gap, ModelFacts(sizes={"e": E}))
    with pytest.raises(MissingTensorsError, match="9 tensors"):
        map_tensors(family("llama3"), "hf", "meta", hf(2), FACTS)
    with pytest.raises(MappingError, match="= 4, but the configuration states 3"):
        map_tensors(family("llama3"), "hf", "meta", hf(4), FACTS)


def test_absurd_layer_number_is_little_work():
    key = "model.layers.{}.mlp.up_proj.weight"
    shapes = hf() | {key.format(99999): (F, D)}
    with effort.counted() as counted:
        with pytest.raises(MissingTensorsError, match="is missing"):
            map_tensors(family("llama3"), "hf", "meta", shapes, ModelFacts(sizes={"e": E}))
        with pytest.raises(MappingError, match="1 tensor is unknown"):
            absurd = hf() | {key.format(99999999999999): (F, D)}
            map_tensors(family("llama3"), "hf", "meta", absurd, ModelFacts(sizes={"e": E}))
        with pytest.raises(MissingTensorsError, match="is missing"):
            map_tensors(
                family("llama3"), "hf", "meta", hf(), ModelFacts(sizes=SIZES | {"i": 10**12})
            )
        map_tensors(
            family("llama3"),
            "hf",
            "meta",
            shapes,
            ModelFacts(sizes={"e": E}),
            MappingOptions(partial=True),
        )
    assert counted.lines < 200_000


def test_biases_map_only_where_layout_has_them():
    bias = {f"model.layers.{i}.self_attn.o_proj.bias": (D,) for i in range(N)}
    same = map_tensors(family("llama3"), "hf", "hf", hf() | bias)
    assert "model.layers.0.self_attn.o_proj.bias" in stored_shapes(same.tensors)
    with pytest.raises(MappingError, match="no place"):
        map_tensors(family("llama3"), "hf", "meta", hf() | bias, FACTS)
    bias.pop("model.layers.1.self_attn.o_proj.bias")
    with pytest.raises(MissingTensorsError, match="is missing"):
        map_tensors(family("llama3"), "hf", "hf", hf() | bias)


def test_bias_is_permuted_with_row_axes():
    llama = family("llama3")
    extra = "logical  meta: layers.{i}.\nq_bias  attention.wq.bias"
    with_bias = dataclasses.replace(llama, tables=(*llama.tables, extra), drops=())
    shapes = meta() | {f"layers.{i}.attention.wq.bias": (H * E,) for i in range(N)}
    mapped = map_tensors(with_bias, "meta", "hf", shapes, FACTS)
    data = {key: np.arange(np.prod(shape)).reshape(shape) for key, shape in shapes.items()}
    out = tables.moved(mapped, data)
    weight = np.arange(H * E)[:, None]
    np.testing.assert_array_equal(
        out["model.layers.1.self_attn.q_proj.bias"], permute(weight, H)[:, 0]
    )


def test_unknown_layout_error_suggests_known_one():
    with pytest.raises(UsageError) as caught:
        map_tensors(family("llama3"), "hf", "torchtitan@0.4", hf())
    assert "torchtitan@0.3" in caught.value.hint or "torchtitan@0.2" in caught.value.hint


def test_mapping_work_is_linear_in_keys():
    def work(layers):
        tensors._get_target_cache.cache_clear()  # so that each call does all of the work
        shapes = hf(layers)
        mapped = map_tensors(
            family("llama3"), "hf", "meta", shapes, ModelFacts(sizes=SIZES | {"i": layers})
        )
        assert len(mapped.tensors) == len(shapes)

    assert effort.growth(work, 100) < 2.1


# ties


def test_tied_output_is_added_and_removed_by_layout():
    tied = family("llama3_2")
    there = map_tensors(tied, "hf", "meta", hf(lm_head=False), FACTS)
    assert stored_shapes(there.tensors)["output.weight"] == (V, D)
    assert there.tensors[-1].sources[0].key == "model.embed_tokens.weight"
    assert not there.redundant
    back = map_tensors(tied, "meta", "hf", stored_shapes(there.tensors), FACTS)
    assert stored_shapes(back.tensors) == hf(lm_head=False)
    assert copies(back) == {"output.weight": "tok_embeddings.weight"}
    assert list(back.dropped_keys) == ["output.weight"]
    tune = map_tensors(tied, "meta", "torchtune", stored_shapes(there.tensors), FACTS)
    assert "output.weight" not in stored_shapes(tune.tensors)


def test_config_decides_tying():
    found = map_tensors(family("llama3"), "hf", "meta", hf(), ModelFacts(sizes=SIZES, tied=True))
    assert copies(found) == {"lm_head.weight": "model.embed_tokens.weight"} and found.tied
    with pytest.raises(MissingTensorsError) as caught:
        map_tensors(
            family("llama3_2"), "hf", "meta", hf(lm_head=False), ModelFacts(sizes=SIZES, tied=False)
        )
    assert "tie_word_embeddings" in caught.value.hint


def test_tied_model_with_only_output_is_mapped():
    shapes = hf()
    del shapes["model.embed_tokens.weight"]
    there = map_tensors(family("llama3_2"), "hf", "meta", shapes, FACTS)
    assert {t.targets[0].key for t in there.tensors if t.sources[0].key == "lm_head.weight"} == {
        "tok_embeddings.weight",
        "output.weight",
    }
    with pytest.raises(MissingTensorsError, match="is missing"):
        del shapes["lm_head.weight"]
        map_tensors(family("llama3_2"), "hf", "meta", shapes, FACTS)


def test_untie_keeps_embedding_and_output():
    found = map_tensors(
        family("llama3_2"),
        "meta",
        "hf",
        meta(),
        FACTS,
        MappingOptions(untie=True),
    )
    assert stored_shapes(found.tensors) == hf() and not found.redundant and not found.tied
    assert found.tensors[-1].sources[0].key == "output.weight"
    found = map_tensors(
        family("llama3_2"),
        "hf",
        "torchtune",
        hf(lm_head=False),
        FACTS,
        MappingOptions(untie=True),
    )
    assert found.tensors[-1].sources[0].key == "model.embed_tokens.weight"


def test_untie_adds_only_tensors_of_layout():
    t5 = family("t5_encoder")
    shapes = tables.tiny(t5, "torchtune")
    found = map_tensors(t5, "torchtune", "torchtune", shapes, options=MappingOptions(untie=True))
    assert stored_shapes(found.tensors) == shapes
    found = map_tensors(
        t5, "hf", "hf", tables.tiny(t5, "hf"), options=MappingOptions(untie=True, resize={"v": 30})
    )
    made = stored_shapes(found.tensors)
    assert made["encoder.embed_tokens.weight"] == made["shared.weight"] == (30, t5.tiny["d"])


def test_partial_mapping_does_not_add_missing_output():
    shapes = meta()
    del shapes["output.weight"]
    found = map_tensors(
        family("llama3_2"), "meta", "torchtitan@0.3", shapes, options=MappingOptions(partial=True)
    )
    assert "lm_head.weight" not in stored_shapes(found.tensors)


# model-parallel shards


def cut_of(name, key):
    (cut,) = list_part_splits(family(name), "meta", key)
    return cut.dim, cut.axis


def split(llama, key, shape, sizes, ranks):
    return split_tensor(llama, "meta", key, shape, AxisSizes(sizes, {}), ranks)


def test_split_axes_follow_family_rules():
    assert cut_of("llama2", "tok_embeddings.weight") == (1, "d")
    assert cut_of("llama3", "tok_embeddings.weight") == (0, "v")
    rules = {"wq": (0, "h"), "wk": (0, "k"), "wv": (0, "k"), "wo": (1, "h")}
    for name, expected in rules.items():
        assert cut_of("llama3", f"layers.0.attention.{name}.weight") == expected
    for name, expected in {"w1": (0, "f"), "w2": (1, "f"), "w3": (0, "f")}.items():
        assert cut_of("llama3", f"layers.0.feed_forward.{name}.weight") == expected
    assert cut_of("llama3", "output.weight") == (0, "v")
    for key in ("norm.weight", "layers.1.ffn_norm.weight"):
        assert find_split_dim(family("llama3"), "meta", key) is None
    assert list_part_splits(family("llama3"), "meta", "rope.freqs") == ()
    with pytest.raises(MappingError):
        list_part_splits(family("llama3"), "meta", "nonsense")


def test_kv_heads_are_repeated_on_neighboring_ranks():
    key, llama = "layers.0.attention.wk.weight", family("llama3")
    found = split(llama, key, (K * E, D), SIZES, 4)
    first, second = Box((0, 0), (E, D)), Box((E, 0), (E, D))
    assert [share.pieces[0].box for share in found] == [first, first, second, second]
    assert list_possible_repeats({"k": 4}, 4) == (4, 2) and list_possible_repeats({"k": 4}, 2) == ()


def test_interleaved_parts_cannot_be_divided():
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    sizes = AxisSizes({"k": 2, "h": 4, "e": 3, "d": 12}, {})
    with pytest.raises(MappingError, match="parts of a tensor alternate"):
        split_tensor(family("llama3"), "mcore", key, (24, 12), sizes, 2)


def test_interleaved_heads_are_divided_between_heads():
    key, deepseek = "layers.0.attn.wkv_b.weight", family("deepseek_v32")
    sizes = AxisSizes({"h": 4, "kn": 3, "vd": 2, "kl": 5}, {})
    found = split_tensor(deepseek, "deepseek", key, (20, 5), sizes, 2)
    boxes = [piece.box for share in found for piece in share.pieces]
    assert boxes == [Box((0, 0), (10, 5)), Box((10, 0), (10, 5))]


@pytest.mark.parametrize("ranks", [3, 8])
def test_indivisible_head_count_is_refused(ranks):
    key = "layers.0.attention.wq.weight"
    with pytest.raises(MappingError, match="cannot be divided"):
        split(family("llama3"), key, (H * E, D), SIZES, ranks)
    with pytest.raises(MappingError, match="without"):
        split(family("llama3"), key, (H * E, D), {}, 2)


def rank_shapes(name):
    llama = family(name)
    return {key: split(llama, key, shape, SIZES, 2)[1].shape for key, shape in meta().items()}


def test_rank_shapes_distinguish_llama2_and_llama3():
    for name, other in (("llama2", "llama3"), ("llama3", "llama2")):
        assert fits_ranks(family(name), "meta", rank_shapes(name), 2)
        assert not fits_ranks(family(other), "meta", rank_shapes(name), 2)
    found = detect_layouts(rank_shapes("llama2"), load_families(), ranks=2, prefer="meta")
    assert ("llama2", "meta") in names_of(found)
    assert ("llama3", "meta") not in names_of(found)


# detection


def names_of(found):
    return [(c.family, c.layout) for c in found]


LLAMA3 = {"model_type": "llama", "rope_theta": 500000.0, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, "llama2"),
        (LLAMA3, "llama3"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 500000.0}}, "llama3"),
        ({"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8}}, "llama3"),
        (LLAMA3 | {"tie_word_embeddings": True}, "llama3_2"),
    ],
)
def test_config_determines_family(config, expected):
    shapes = hf(lm_head=expected != "llama3_2")
    found = detect_layouts(shapes, load_families(), config)
    assert names_of(found) == [(expected, "hf")] and found[0].is_exact
    assert any("config.json" in text for text in found[0].evidence)


def test_model_type_overrides_shared_keys():
    assert names_of(detect_layouts(hf(), load_families(), {"model_type": "mistral"})) == [
        ("mistral", "hf")
    ]
    assert not detect_layouts(hf(), load_families(), {"model_type": "unheard_of"})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"dim": 4096, "vocab_size": -1}, "llama2"),
        ({"dim": 4096, "rope_theta": 500000.0}, "llama3"),
        ({"dim": 2048, "n_layers": 16, "use_scaled_rope": True, "rope_theta": 5e5}, "llama3_2"),
        ({"model": {"dim": 4096, "rope_theta": 500000.0}}, "llama3"),
    ],
)
def test_params_determine_family(params, expected):
    found = detect_layouts(meta(), load_families(), None, params, prefer="meta")
    assert names_of(found) == [(expected, "meta")]
    assert found[0].alike == ("torchtitan@0.2",)


def test_params_of_mistral_are_not_llama():
    found = detect_layouts(meta(), load_families(), None, {"dim": 8, "hidden_dim": 16})
    assert names_of(found) == [("mistral", "mistral")]


def test_keys_without_config_match_several_families():
    found = detect_layouts(meta(), load_families())
    assert {c.family for c in found} >= {"llama2", "llama3", "llama3_2"}
    assert {"meta", "mistral"} <= {c.layout for c in found}
    found = detect_layouts(meta(), load_families(), prefer="torchtitan@0.2")
    assert ("llama3", "torchtitan@0.2") in names_of(found)
    assert ("llama3", "meta") not in names_of(found)
    found = detect_layouts(hf(lm_head=False), load_families())
    assert ("llama3_2", "hf") in names_of(found)
    assert ("llama3", "hf") not in names_of(found)


def test_incomplete_model_is_detected_as_inexact():
    shapes = hf()
    del shapes["model.layers.1.mlp.up_proj.weight"]
    found = detect_layouts(shapes, load_families(), LLAMA3)
    assert names_of(found) == [("llama3", "hf")] and not found[0].is_exact
    assert found[0].missing == ("model.layers.1.mlp.up_proj.weight",)
    found = detect_layouts(hf() | {"model.extra": (1,)}, load_families(), LLAMA3)
    assert found[0].unmatched == ("model.extra",)


def test_unrelated_keys_match_no_family():
    assert not detect_layouts({"a": (1,), "b": (2,)}, load_families())
    assert not detect_layouts({}, load_families())


def test_single_table_defines_new_family():
    table = "logical  axes  mine  theirs\nw  (a b) c  w  x c (b a)"
    toy = Family("toy", "Toy", ("mine", "theirs"), (table,), "Toy")
    mapped = map_tensors(toy, "mine", "theirs", {"w": (6, 5)}, ModelFacts(sizes={"a": 2}))
    data = np.arange(30).reshape(6, 5)
    out = tables.moved(mapped, {"w": data})["x"]
    expected = data.reshape(2, 3, 5).transpose(2, 1, 0).reshape(5, 6)
    np.testing.assert_array_equal(out, expected)


def test_equivalent_layouts_are_merged():
    """Where no layer has experts, what packs experts is no other layout."""
    found = [c for c in detect_layouts(hf(), load_families()) if c.family == "qwen2_moe"]
    assert [(c.layout, "hf-v5" in c.alike) for c in found] == [("hf", True)]


def test_shapes_distinguish_layouts_with_same_keys():
    """transformers 5 transposes the experts of Qwen 3 VL; where neither order fits, both stay."""
    moe = family("qwen3_vl_moe")
    for layout, other in (("hf", "hf-v5"), ("hf-v5", "hf")):
        shapes = tables.tiny(moe, layout)
        found = detect_layouts(shapes, load_families(), {"model_type": "qwen3_vl_moe"})
        assert names_of(found) == [("qwen3_vl_moe", layout)]
        assert shapes.keys() == tables.tiny(moe, other).keys()
    square = {
        key: (shape[0], 40, 40) if "experts" in key else shape for key, shape in shapes.items()
    }
    found = detect_layouts(square, load_families(), {"model_type": "qwen3_vl_moe"})
    assert {layout for _, layout in names_of(found)} == {"hf", "hf-v5"}


def test_size_may_have_several_names_in_several_places():
    assert split_aliases("text.a|b") == ("text.a", "text.b")
    assert split_aliases("a|text.a") == ("a", "text.a")
    assert choose_field_alias({"text": {"a": 3}}, "a|text.a") == "text.a"
    assert choose_field_alias({}, "a|text.a") == "a"


def test_signs_match_values_and_presence():
    said = {"a": 1, "b": {"c": 2}, "d": None}
    assert matches_conditions({"a": 1, "b.c": 2, "d": None, "e.f": None}, said)
    assert matches_conditions({"a": PRESENT, "b.c": PRESENT}, said)
    assert not any(matches_conditions({name: PRESENT}, said) for name in ("d", "e", "b.x", "a.c"))
    assert str(PRESENT) == "stated"


def test_columns_of_other_layouts_are_omitted():
    mistral = family("mistral")
    assert {name for t in mistral.tensors.values() for name in t.leaves} == set(mistral.layouts)
    assert family("llama2").get_layout("meta").leaves == mistral.get_layout("mistral").leaves


@pytest.mark.parametrize(
    ("name", "published", "saved"),
    [
        ("bailing_hybrid", "word_embeddings.weight", "embed_tokens.weight"),
        ("hy_v4", "hc_head.hc_head_fn", "hc_head.hc_pre.hc_head_fn"),
    ],
)
def test_prefixes_apply_to_one_layout_without_head(name: str, published: str, saved: str) -> None:
    layouts = {layout: family(name).get_layout(layout) for layout in family(name).base_layouts}
    keys = {
        layout: {stored.template.text for stored in table.stored}
        for layout, table in layouts.items()
    }
    assert published in keys["hf-base"] and saved not in keys["hf-base"]
    assert saved in keys["hf-fresh-base"] and published not in keys["hf-fresh-base"]
    assert "norm.weight" in keys["hf-fresh-base"]
