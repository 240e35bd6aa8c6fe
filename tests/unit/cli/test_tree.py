import pytest

from ckptctl.cli import listing
from ckptctl.verbs.inspection.inspect_result import TensorInfo


def T(name, shape=(4,), dtype="bfloat16", alias_of=None):
    return TensorInfo(name, dtype, shape, 2 * shape[0], 1, alias_of)


def flat(branches):
    return [
        (nesting, branch.label, branch.copies, branch.nbytes)
        for nesting, _, _, branch in listing.walk_branches(branches)
    ]


def llama(layers):
    per_layer = ("wq", "wk")
    return [T(f"layers.{i}.{w}") for i in range(layers) for w in per_layer]


def test_equal_layers_collapse_in_natural_order():
    tensors = [T("tok", (8,)), *llama(12), T("norm")]
    assert flat(listing.build_tree(tensors)) == [
        (0, "layers.[0-11]", 12, 12 * 16),
        (1, "wk", 1, 8),
        (1, "wq", 1, 8),
        (0, "norm", 1, 8),
        (0, "tok", 1, 16),
    ]


def test_differing_layers_are_split():
    tensors = [T(f"m.{i}.w", (4 if i < 2 else 6,)) for i in range(5)] + [
        T("m.5.w", dtype="float32")
    ]
    assert [label for _, label, _, _ in flat(listing.build_tree(tensors))] == [
        "m.[0-1]", "w", "m.[2-4]", "w", "m.5", "w",
    ]  # fmt: skip


def test_experts_collapse_within_layers():
    tensors = [
        T(f"layers.{i}.experts.{e}.{w}") for i in range(3) for e in range(8) for w in ("w1", "w2")
    ]
    rows = list(listing.walk_branches(listing.build_tree(tensors)))
    assert [(label, outer, b.copies) for _, label, outer, b in rows] == [
        ("layers.[0-2]", 1, 3),
        ("layers.[0-2].experts.[0-7]", 3, 8),
        ("layers.[0-2].experts.[0-7].w1", 24, 1),
        ("layers.[0-2].experts.[0-7].w2", 24, 1),
    ]
    assert rows[0][3].tensors == 48
    assert rows[0][3].nbytes == 48 * 8


def test_numbered_tensors_collapse_into_range():
    (branch,) = listing.build_tree([T(f"bias.{i}") for i in range(3)])
    assert (branch.label, branch.copies, branch.dtype, branch.nbytes) == (
        "bias.[0-2]", 3, "bfloat16", 24,
    )  # fmt: skip


def test_depth_aggregates_deeper_tensors():
    tensors = [
        T("model.embed.weight", (8,)),
        *(T(f"model.{t.name}") for t in llama(3)),
        T("head.w"),
    ]
    for depth, expected in (
        (1, [("head", 1, 1), ("model", 7, 1)]),
        (2, [("head.w", 1, 1), ("model.embed", 1, 1), ("model.layers", 6, 1)]),
        (3, [("head.w", 1, 1), ("model.embed.weight", 1, 1), ("model.layers.[0-2]", 6, 3)]),
    ):
        found = listing.build_tree(tensors, depth=depth)
        assert [(b.label, b.tensors, b.copies) for b in found] == expected
        assert all(not b.children for b in found)
        assert sum(b.nbytes for b in found) == sum(t.nbytes for t in tensors)


def test_non_model_tensors_are_folded_into_one_line_each():
    names = [
        *("model.0.w", "model.1.w", "optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"),
        *("lr_scheduler.x", "callbacks.a.best", "callbacks.b.best", "rng"),
    ]
    found = listing.build_model_tree([T(name) for name in names], "model.", "dcp", "name")
    assert [(branch.label, branch.tensors, branch.nbytes) for branch in found] == [
        ("model.[0-1]", 2, 16),
        ("callbacks", 2, 16),
        ("rng", 1, 8),
        ("optimizer", 2, 16),
        ("scheduler", 1, 8),
    ]
    assert all(not branch.children for branch in found[1:])
    alone = [T("optimizer.state.0.exp_avg"), T("rng")]
    assert listing.build_model_tree(alone, "model.", "dcp", "name") == listing.build_tree(alone)


def test_size_sort_puts_largest_first():
    tensors = [T("a", (1,)), T("b", (2,)), T("c.0.x", (1,)), T("c.0.y", (2,)), T("c.1.z", (9,))]
    assert [label for _, label, _, _ in flat(listing.build_tree(tensors, sort="size"))] == [
        "c.1", "z", "c.0", "y", "x", "b", "a",
    ]  # fmt: skip


def test_aliases_count_no_bytes_and_stay_separate():
    tensors = [T("l.0.w"), T("l.1.w", alias_of="l.0.w")]
    branches = listing.build_tree(tensors)
    assert [(b.label, b.nbytes) for b in branches] == [("l.0", 8), ("l.1", 0)]


def test_tensor_name_may_be_prefix_of_another():
    assert [b.label for b in listing.build_tree([T("a"), T("a.b")])] == ["a", "a.b"]


def test_name_with_thousands_of_parts_is_kept():
    (branch,) = listing.build_tree([T(".".join("x" * 5000))])
    assert branch.label == ".".join("x" * 5000)


@pytest.mark.parametrize("name", ["", ".", "007", "1" * 5000, "²"])
def test_odd_names_are_kept(name):
    tensors = [T(f"a.{name}.w"), T("a.0.w"), T("a.1.w")]
    labels = {label for _, label, _, _ in listing.walk_branches(listing.build_tree(tensors))}
    assert f"a.{name}.w" in labels


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "3"),
        ([0, 1], "0-1"),
        (list(range(32)), "0-31"),
        ([0, 5], "0,5"),
        ([0, 2, 4, 6], "0-6:2"),
        ([0, 3, 4, 5, 9], "0,3-5,9"),
        ([0, 1, 5, 6, 7], "0-1,5-7"),
    ],
)
def test_spans_compress_indices_into_ranges(indices, text):
    assert listing.format_index_ranges(indices) == text
