"""``ckptctl.diff``: what differs, and by how much, against numpy's and torch's own arithmetic."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.catalog import Box
from ckptctl.errors import (
    CoverageError,
    DamagedError,
    MappingError,
    UsageError,
)
from ckptctl.storage.compare import Tolerance, compare_windows, sum_squares
from ckptctl.storage.tensor_reader import split_into_boxes
from ckptctl.verbs.comparison import values as diff_values
from tests.checkpoints.golden import Golden
from tests.checkpoints.readers import differences


def saved(folder, name, state):
    path = folder / name
    if name.endswith(".pt"):
        torch.save(state, path)
    else:
        save_file(state, path)
    return path


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(1)
    return {f"w{i}": torch.randn(7, 5, generator=generator) for i in range(3)}


def test_diff_errors_match_numpy(tmp_path, state):
    other = {name: value.clone() for name, value in state.items()}
    other["w1"][2, 3] += 1e-3
    other["w1"][4, 4] = 0.0
    other["w2"][0] *= 3
    a, b = saved(tmp_path, "a.safetensors", state), saved(tmp_path, "b.pt", other)
    found = ckptctl.diff(a, b)
    assert not found.same and found.compared == 3
    expected = {}
    for name in ("w1", "w2"):
        x, y = (one[name].numpy().astype(np.float64) for one in (state, other))
        gap, wrong = np.abs(x - y), x != y
        relative = gap[wrong & (y != 0)] / np.abs(y[wrong & (y != 0)])
        worst = tuple(map(int, np.unravel_index(gap.argmax(), gap.shape)))
        expected[name] = (int(wrong.sum()), gap.max(), relative.max(), worst)
    values = {one.name: one.values for one in found.tensors}
    seen = {n: (v.differing, v.max_abs, v.max_rel, v.worst) for n, v in values.items()}
    assert seen == expected
    assert [one.name for one in found.tensors] == sorted(expected, key=lambda n: -expected[n][1])


@pytest.mark.parametrize(("atol", "rtol"), [(1e-3, 0.0), (0.0, 1e-2), (1e-4, 1e-3), (10.0, 0.0)])
def test_diff_tolerances_match_numpy_isclose(tmp_path, state, atol, rtol):
    other = {n: v + torch.randn(v.shape) * 10.0 ** -int(n[1:]) for n, v in state.items()}
    a, b = saved(tmp_path, "a.safetensors", state), saved(tmp_path, "b.safetensors", other)
    found = ckptctl.diff(a, b, atol=atol, rtol=rtol)
    expected = {}
    for name, value in state.items():
        x, y = value.double().numpy(), other[name].double().numpy()
        count = int((~np.isclose(x, y, atol=atol, rtol=rtol)).sum())
        expected |= {name: count} if count else {}
    assert {one.name: one.values.differing for one in found.tensors} == expected
    assert found.within == 3 - len(expected)
    assert found.same == (not expected)


def test_nan_equals_only_same_nan_bits(tmp_path):
    nan = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    a = saved(tmp_path, "a.safetensors", {"w": nan})
    assert ckptctl.diff(a, saved(tmp_path, "b.safetensors", {"w": nan})).same
    bits = nan.clone().view(torch.int32)
    bits[1] += 1
    b = saved(tmp_path, "c.safetensors", {"w": bits.view(torch.float32)})
    for tolerance in ({}, {"atol": 1.0}):
        values = ckptctl.diff(a, b, **tolerance).tensors[0].values
        assert (values.differing, values.nonfinite, values.max_abs) == (1, 1, None)
    negative = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    c = saved(tmp_path, "d.safetensors", {"w": negative})
    assert ckptctl.diff(a, c).tensors[0].values.differing == 1
    assert ckptctl.diff(a, c, atol=0.0).same


def test_diff_reports_names_shapes_and_dtypes(tmp_path):
    a = {"x": torch.zeros(4, 2), "y": torch.ones(3), "z": torch.ones(2), "one": torch.ones(1)}
    b = {"x": torch.zeros(2, 4), "y": torch.ones(3).bfloat16(), "z": torch.ones(2)}
    b["two"] = torch.ones(1)
    paths = saved(tmp_path, "a.safetensors", a), saved(tmp_path, "b.safetensors", b)
    for structure in (False, True):
        found = ckptctl.diff(*paths, structure=structure)
        assert (found.a.only, found.b.only) == (("one",), ("two",))
        assert {one.name: one.kinds for one in found.tensors} == {"x": ("shape",), "y": ("dtype",)}
    scope = {"include": ["y", "z"]}
    found = ckptctl.diff(*paths, **scope, ignore_dtype=True)
    assert found.same and found.compared == 2
    assert set(found.a.left_out) == {"x", "one"} and set(found.b.left_out) == {"x", "two"}
    with pytest.raises(MappingError, match="no tensor matches"):
        ckptctl.diff(*paths, exclude="nothing*")


def test_structure_diff_reads_no_data_and_claims_no_equality(tmp_path, state):
    other = {name: value + 1 for name, value in state.items()}
    a, b = saved(tmp_path, "a.safetensors", state), saved(tmp_path, "b.safetensors", other)
    found = ckptctl.diff(a, b, structure=True)
    assert (found.same, found.evidence) == (None, "structure")
    assert found.verdict == "the same structure; data not read"
    assert found.a.bytes_read == found.b.bytes_read == 0
    found = ckptctl.diff(a, b)
    assert (found.same, found.verdict, found.evidence) == (False, "different", "data")


@pytest.mark.parametrize("option", [{"quick": True}, {"atol": 0.0}, {"rtol": 1.0}])
def test_structure_conflicts_with_data_options(tmp_path, state, option):
    path = saved(tmp_path, "a.safetensors", state)
    with pytest.raises(UsageError, match="conflicts with"):
        ckptctl.diff(path, path, structure=True, **option)


def test_tensor_with_several_dtypes_is_different_despite_ignore_dtype(tmp_path):
    """Elements of a tensor that B has in two dtypes are not compared, so nothing may be claimed."""
    config = DATA / "tiny-llama3-hf"
    meta, mixed = tmp_path / "mcore", tmp_path / "mixed"
    ckptctl.convert(config, meta, to="mcore")
    shutil.copytree(config, mixed)
    for file in sorted(mixed.glob("*.safetensors")):
        held = load_file(file)
        found = {n: v.float() if n.endswith("k_proj.weight") else v for n, v in held.items()}
        save_file(found, file)
    found = ckptctl.diff(meta, mixed, only="model", ignore_dtype=True)
    assert found.same is False
    assert {one.has_several_dtypes for one in found.tensors} == {True}
    assert any("several dtypes" in note for note in found.notes)


def test_diff_compares_values_besides_tensors(tmp_path):
    value = {"step": 3, "lr": float("nan"), "names": ["a"], "w": torch.ones(2)}
    a = saved(tmp_path, "a.pt", value)
    assert ckptctl.diff(a, saved(tmp_path, "b.pt", value)).same
    changed = {**value, "step": 3.0, "names": ["a", "b"], "more": "x"}
    found = ckptctl.diff(a, saved(tmp_path, "c.pt", changed))
    differing = {one.name: (one.a, one.b) for one in found.leaves}
    assert differing == {"step": ("3", "3.0"), "names": ("['a']", "['a', 'b']")}
    assert found.b.only_leaves == ("more",)
    assert not found.tensors and not found.a.only_leaves


def test_quick_diff_compares_recorded_checksums(tmp_path, state, monkeypatch):
    a, b = saved(tmp_path, "a.pt", state), saved(tmp_path, "b.pt", state)
    found = ckptctl.diff(a, b)
    assert (found.same, found.verdict, found.evidence) == (True, "the same", "data")
    nbytes = 3 * 7 * 5 * 4
    assert (found.by_checksum, found.a.bytes_read, found.b.bytes_read) == (0, nbytes, nbytes)
    monkeypatch.setattr(diff_values, "compare_windows", None)
    found = ckptctl.diff(a, b, quick=True)
    assert (found.same, found.evidence, found.by_checksum) == (None, "checksums", 3)
    assert found.verdict == "recorded checksums match; data not read"
    assert found.a.bytes_read == found.b.bytes_read == 0


def test_quick_diff_reads_tensors_without_checksums(tmp_path, state):
    a, b = saved(tmp_path, "a.pt", state), saved(tmp_path, "b.safetensors", state)
    found = ckptctl.diff(a, b, quick=True)
    assert (found.same, found.evidence, found.by_checksum) == (True, "data", 0)
    assert found.a.bytes_read == found.b.bytes_read == 3 * 7 * 5 * 4


def test_quick_diff_reads_tensors_with_different_checksums(tmp_path, state):
    other = {**state, "w1": state["w1"] + 1}
    a, b = saved(tmp_path, "a.pt", state), saved(tmp_path, "b.pt", other)
    found = ckptctl.diff(a, b, quick=True)
    assert found.same is False and found.by_checksum == 2
    assert [one.name for one in found.tensors] == ["w1"]
    assert found.a.bytes_read == found.b.bytes_read == 7 * 5 * 4


def test_quick_diff_ignores_checksums_of_transposed_tensors(tmp_path):
    """The bytes of a transposed tensor are the same, its elements are not."""
    value = torch.arange(9.0)
    a = saved(tmp_path, "a.pt", {"w": value.clone().view(3, 3)})
    b = saved(tmp_path, "b.pt", {"w": value.clone().view(3, 3).t()})
    found = ckptctl.diff(a, b, quick=True)
    assert found.by_checksum == 0 and found.tensors[0].values.differing == 6


def test_diff_result_is_independent_of_window_size(tmp_path, state, monkeypatch):
    other = {name: value.clone() for name, value in state.items()}
    other["w0"][6, 4] = 9
    a, b = saved(tmp_path, "a.safetensors", state), saved(tmp_path, "b.safetensors", other)
    whole = ckptctl.diff(a, b).tensors
    monkeypatch.setattr(diff_values, "WINDOW_ELEMENTS", 3)
    monkeypatch.setattr(diff_values, "BATCH_BYTES", 24)
    assert ckptctl.diff(a, b).tensors == whole
    assert whole[0].values.differing == 1


def test_compared_buffers_are_freed_without_garbage_collection(tmp_path, monkeypatch):
    """Cycles that hold buffers would let memory grow with the checkpoint."""

    class Buffer(bytearray):
        pass

    alive, most = weakref.WeakValueDictionary(), [0]

    def made(nbytes):
        buffer = Buffer(nbytes)
        alive[id(buffer)] = buffer
        most[0] = max(most[0], len(alive))
        return buffer

    monkeypatch.setattr(diff_values, "bytearray", made, raising=False)
    monkeypatch.setattr(diff_values, "WINDOW_ELEMENTS", 10)
    monkeypatch.setattr(diff_values, "BATCH_BYTES", 40)
    paths = [saved(tmp_path, name, {"w": torch.zeros(1000)}) for name in ("a.safetensors", "b.pt")]
    gc.collect()
    gc.disable()
    try:
        assert ckptctl.diff(*paths).same
    finally:
        gc.enable()
    assert most[0] == 2 and not alive


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (1, 1, 9), (2, 0, 3)])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_boxes_within_limit_tile_shape(shape, limit):
    seen = np.zeros(shape, int)
    for box in split_into_boxes(shape, limit):
        assert box.numel <= limit
        seen[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_are_compared_exactly(dtype):
    x = np.array([2**62, 2**62 + 5, 7], dtype)
    y = np.array([2**62 + 1, 2**62 + 5, 3], dtype)
    data = [bytearray(one.tobytes()) for one in (x, y)]
    found = compare_windows(*data, dtype, dtype, Box((10,), (3,)))
    assert (found.count, found.differing, found.max_abs, found.worst) == (3, 2, 4.0, (12,))
    near = compare_windows(*data, dtype, dtype, Box((0,), (3,)), Tolerance(atol=4))
    assert (near.differing, near.worst) == (0, (2,))


@pytest.mark.parametrize(("model", "layout"), [("lfm2", "mlx"), ("qwen3_vl_moe", "hf")])
def test_layouts_with_equal_names_but_other_axes_are_mapped(tmp_path, model, layout):
    a, b = tmp_path / "a", tmp_path / "b"
    Golden.read(model).save(a)
    ckptctl.convert(a, b, to="hf", to_layout=layout)
    for paths in ((a, b), (b, a)):
        found = ckptctl.diff(*paths)
        assert found.same and found.a.layout != found.b.layout
    wanted = load_file(a / "model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    ckptctl.load(state, b)
    assert not differences(state, wanted)


def test_diff_of_tied_model_is_symmetric(tmp_path):
    tied = Golden.read("qwen2.tied")
    tied.save(tmp_path / "tied")
    state = load_file(tmp_path / "tied" / "model.safetensors")
    head = state["model.embed_tokens.weight"]
    for name, stored in (("equal", head.clone()), ("other", torch.zeros_like(head))):
        shutil.copytree(tmp_path / "tied", tmp_path / name)
        save_file({**state, "lm_head.weight": stored}, tmp_path / name / "model.safetensors")
        pair = tmp_path / "tied", tmp_path / name
        found, reverse = ckptctl.diff(*pair), ckptctl.diff(*reversed(pair))
        assert found.same == reverse.same == (name == "equal")
        assert found.compared == reverse.compared == len(state) + 1
        differing = [] if name == "equal" else ["lm_head.weight"]
        assert [one.name for one in found.tensors] == differing
        assert [one.name for one in reverse.tensors] == differing


def test_parameter_names_in_training_state_are_mapped_to_first_layout(tmp_path):
    state = Golden.read("qwen3").state()
    names = list(state)
    groups = [{"lr": 0.1, "params": names[:5]}, {"lr": 0.2, "params": names[5:]}]
    settings = {name: {"lr": 0.1, "foreach": None, "m": state[name]} for name in names}
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"model": state, "groups": groups, "settings": settings, "step": 1}, a)
    ckptctl.convert(a, b, to="torch", to_layout="torchtune", only="all", model_type="qwen3")
    found = ckptctl.diff(a, b, model_type="qwen3")
    assert found.same and found.compared_leaves == 5 + 2 * len(names)
    changed = torch.load(b)
    changed["groups"][0]["params"].reverse()
    changed["settings"]["output.weight"]["lr"] = 0.2
    torch.save(changed, b)
    found = ckptctl.diff(a, b, model_type="qwen3")
    differing = {leaf.name for leaf in found.leaves}
    assert differing == {"groups.0.params", "settings.lm_head.weight.lr"}
    scope = {"include": ["settings.lm_head.*"], "model_type": "qwen3"}
    assert ckptctl.diff(a, b, **scope).compared_leaves == 2


@pytest.mark.parametrize(
    ("a", "b", "x", "y", "difference"),
    [
        ("int64", "float64", 2**53 + 1, 2**53, 1),
        ("int64", "float64", 2**62 + 1, 2**62, 1),
        ("int64", "float64", -(2**53), -(2**53), 0),
        ("float64", "int64", 2.0**63, 2**63 - 1, 1),
        ("float64", "int64", -(2.0**63), -(2**63), 0),
        ("float64", "int64", np.nan, 0, None),
        ("int64", "uint64", 2**62 + 1, 2**62, 1),
        ("int64", "uint64", 2**62 + 1, 2**62 + 1, 0),
        ("int64", "uint64", -1, 2**64 - 1, 2.0**64),
        ("uint64", "float64", 2**64 - 1, 2.0**64, 1),
        ("uint64", "float64", 2**63, 2.0**63, 0),
        ("int64", "int32", 2**31, -(2**31), 2**32),
        ("bfloat16", "int64", 2.0**60, 2**60 + 3, 3),
        ("bfloat16", "int64", np.inf, 1, None),
    ],
)
def test_wide_integers_are_compared_exactly_with_other_dtypes(a, b, x, y, difference):
    tensors = [torch.tensor([v], dtype=getattr(torch, d)) for v, d in ((x, a), (y, b))]
    data = [bytearray(tensor.view(torch.uint8).numpy()) for tensor in tensors]
    found = compare_windows(*data, a, b, Box((0,), (1,)))
    assert (found.differing, found.max_abs) == (difference != 0, difference or None)
    if difference is not None:
        assert sum_squares(*data, a, b)[1] == float(difference) ** 2


def test_complex_and_fp8_errors_are_measured():
    x, y = torch.tensor([1 + 1j]), torch.tensor([4 + 5j])
    data = [bytearray(one.numpy().tobytes()) for one in (x, y)]
    assert compare_windows(*data, "complex64", "complex64", Box((0,), (1,))).max_abs == 5.0
    x, y = (torch.tensor(v).to(torch.float8_e4m3fn) for v in ([1.0, 2.0], [1.0, 4.0]))
    data = [bytearray(one.view(torch.uint8).numpy().tobytes()) for one in (x, y)]
    found = compare_windows(*data, "float8_e4m3fn", "float8_e4m3fn", Box((0,), (2,)))
    assert (found.differing, found.max_abs, found.max_rel) == (1, 2.0, 0.5)


@pytest.mark.parametrize("window", [2, 100])
def test_diff_reports_index_of_worst_element(tmp_path, monkeypatch, window):
    monkeypatch.setattr(diff_values, "WINDOW_ELEMENTS", window)
    kept = {"float": torch.zeros(3, 4), "nan": torch.zeros(3, 4), "scalar": torch.zeros(())}
    bits = {"bits": torch.zeros(6, dtype=torch.float4_e2m1fn_x2)}
    a = saved(tmp_path, "a.pt", kept | bits)
    kept = {name: one.clone() for name, one in kept.items()}
    kept["float"][1, 1], kept["float"][2, 3], kept["scalar"] = 2.0, -3.0, torch.ones(())
    kept["nan"][0, 1], kept["nan"][1, 2], kept["nan"][2, 0] = 9.0, float("nan"), float("inf")
    raw = torch.zeros(6, dtype=torch.uint8)
    raw[4] = 1
    bits = {"bits": raw.view(torch.float4_e2m1fn_x2)}
    found = ckptctl.diff(a, saved(tmp_path, "b.pt", kept | bits)).tensors
    worst = {one.name: one.values.worst for one in found}
    assert worst == {"float": (2, 3), "nan": (1, 2), "scalar": (), "bits": (4,)}


@pytest.mark.parametrize(
    "globs", [{"exclude": ["*"]}, {"include": ["w1"], "exclude": ["w1"]}], ids=["all", "each other"]
)
def test_diff_without_selected_tensors_is_an_error(tmp_path, state, globs):
    path = saved(tmp_path, "a.safetensors", state)
    with pytest.raises(MappingError, match="nothing to compare"):
        ckptctl.diff(path, path, **globs)


@pytest.mark.parametrize("option", [{"atol": -1.0}, {"rtol": float("nan")}, {"only": "some"}])
def test_invalid_diff_options_are_usage_errors(tmp_path, state, option):
    path = saved(tmp_path, "a.safetensors", state)
    with pytest.raises(UsageError):
        ckptctl.diff(path, path, **option)


def test_diff_with_truncated_file_is_an_error(tmp_path, state):
    a, b = saved(tmp_path, "a.safetensors", state), saved(tmp_path, "b.safetensors", state)
    b.write_bytes(b.read_bytes()[:-10])
    with pytest.raises((DamagedError, CoverageError)):
        ckptctl.diff(a, b)


# --------------------------------------------------------------------- what is said of either side

DATA = Path(__file__).parents[3] / "data"
ZERO = DATA / "deepspeed" / "z1_bf16" / "ckpt"


def test_master_and_module_weights_differ_within_bf16_precision():
    """bf16 keeps 8 bits: every parameter is within 2^-8 of the fp32 copy that it was made of."""
    sides = {"weights_a": "master", "weights_b": "module", "only": "model"}
    found = ckptctl.diff(ZERO, ZERO, **sides)
    wrong = [one for one in found.tensors if one.values]
    assert wrong and {(one.dtype_a, one.dtype_b) for one in wrong} == {("float32", "bfloat16")}
    assert all(one.values.max_rel <= 2.0**-8 for one in wrong)
    assert ckptctl.diff(ZERO, ZERO, **sides, ignore_dtype=True, rtol=2.0**-8).same
    with pytest.raises(UsageError, match="not supported for `hf`"):
        ckptctl.diff(ZERO, DATA / "tiny-llama3-hf", weights_b="master")


def test_diff_compares_two_tags_of_one_folder(tmp_path):
    shutil.copytree(ZERO, tmp_path / "run")
    shutil.copytree(ZERO / "global_step2", tmp_path / "run" / "global_step1")
    victim = tmp_path / "run" / "global_step1" / "mp_rank_00_model_states.pt"
    whole = torch.load(victim, weights_only=False)
    next(iter(whole["module"].values())).add_(1)
    torch.save(whole, victim)
    run, more = tmp_path / "run", {"only": "model", "weights_a": "module", "weights_b": "module"}
    assert ckptctl.diff(run, run, tag_a="global_step2", **more).same
    assert not ckptctl.diff(run, run, tag_a="global_step1", tag_b="global_step2", **more).same
    assert not ckptctl.diff(run, run, tag_b="global_step1", **more).same
    with pytest.raises(UsageError, match="nowhere"):
        ckptctl.diff(run, run, tag_b="nowhere")


def test_root_options_select_compared_prefix(tmp_path):
    one, other = torch.ones(2, 2), torch.zeros(2, 2)
    a = saved(tmp_path, "a.pt", {"ema": {"w": other}, "net": {"w": one}})
    b = saved(tmp_path, "b.pt", {"w": one})
    assert ckptctl.diff(a, b, root_a="net.", only="model").same
    assert not ckptctl.diff(a, b, root_a="ema.", only="model").same
    assert ckptctl.diff(b, a, root_b="net.", only="model").same
    with pytest.raises(UsageError, match="prefix `nothing"):
        ckptctl.diff(a, b, root_a="nothing.")


def test_rules_apply_only_to_sides_that_need_them(tmp_path):
    ranks = DATA / "megatron" / "tp2_pp2_vp2" / "ckpt"
    ckptctl.convert(ranks, tmp_path / "whole", to="dcp", rules="megatron-core")
    with pytest.raises(MappingError):
        ckptctl.diff(ranks, tmp_path / "whole", only="model")
    for both in ((ranks, tmp_path / "whole"), (tmp_path / "whole", ranks), (ranks, ranks)):
        assert ckptctl.diff(*both, rules="megatron-core", only="model").same
    with pytest.raises(UsageError, match="rules"):
        ckptctl.diff(tmp_path / "whole", tmp_path / "whole", rules="megatron-core")


def test_quantized_equals_its_dequantized_copy_with_dequantize(tmp_path):
    weight = torch.randn(256, 128)
    scale = torch.full((2, 1), 0.5)
    eight = {"l.weight": weight.to(torch.float8_e4m3fn), "l.weight_scale_inv": scale}
    plain = {"l.weight": (eight["l.weight"].float() * 0.5).bfloat16()}
    a, b = saved(tmp_path, "a.safetensors", eight), saved(tmp_path, "b.safetensors", plain)
    assert not ckptctl.diff(a, b).same
    told = (
        "is quantized (fp8 with 128x128 blocks); "
        "pass `dequantize='bf16'` to compare dequantized values"
    )
    assert f"A {told}" in ckptctl.diff(a, b).notes and f"B {told}" in ckptctl.diff(b, a).notes
    for both in ((a, b), (b, a), (a, a)):
        found = ckptctl.diff(*both, dequantize="bf16")
        assert found.same and not any("is quantized" in note for note in found.notes)
    assert not any("is quantized" in note for note in ckptctl.diff(a, a).notes)
    with pytest.raises(UsageError, match="quantized"):
        ckptctl.diff(b, b, dequantize="bf16")


def test_only_model_ignores_numbered_optimizers(tmp_path):
    """Lightning numbers them; what is left of them without a model beside counts as well."""
    a = {"w": torch.ones(2), "optimizer_0": {"lr": 0.1, "state": {"m": torch.ones(2)}}}
    torch.save(a, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    assert not ckptctl.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    assert ckptctl.diff(tmp_path / "a.pt", tmp_path / "b.pt", only="model").same


def test_empty_dictionary_is_a_difference_unless_format_stores_none(tmp_path):
    state = {"w": torch.ones(2), "step": 1}
    torch.save({**state, "extra": {}}, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt")
    assert not ckptctl.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", only="all")
    for pair in (("a.pt", "dcp"), ("dcp", "a.pt")):
        assert ckptctl.diff(*(tmp_path / name for name in pair)).same
