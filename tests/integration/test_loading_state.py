"""What a load says and does beside the bytes: names, dtypes, leaves that are no tensors."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptctl.distributed.loading import load
from ckptctl.errors import MappingError, UnsafePickleError
from tests.checkpoints import save_dcp, save_hf, save_torch, tiny_llama


def test_names_dtypes_and_shapes_are_errors_that_list_them(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"model": {"one": torch.ones(3), "two": torch.ones(4)}})
    with pytest.raises(MappingError, match="1 names of the state are missing") as found:
        load({"model": {"one": torch.zeros(3), "twos": torch.zeros(4)}}, folder)
    assert "twos" in str(found.value.why) and "model.two" in str(found.value.why)
    assert "near" in str(found.value.hint)
    with pytest.raises(MappingError, match="0 names .* missing in the checkpoint, 1 of its"):
        load({"model": {"one": torch.zeros(3)}}, folder)
    with pytest.raises(MappingError, match="another shape"):
        load({"model": {"one": torch.zeros(5), "two": torch.zeros(4)}}, folder)
    state = {"model": {"one": torch.zeros(3), "two": torch.zeros(4).bfloat16()}}
    with pytest.raises(MappingError, match="another dtype") as found:
        load(state, folder)
    assert "cast=True" in str(found.value.hint)
    assert not state["model"]["one"].any(), "nothing changes when planning fails"


def test_cast_and_lenient_are_reported(tmp_path: Path) -> None:
    source = {"one": torch.randn(300, 7), "two": torch.ones(4)}
    folder = save_dcp(tmp_path / "a", {"model": source})
    state = {"model": {"one": torch.zeros(300, 7).bfloat16(), "new": torch.zeros(2)}}
    report = load(state, folder, strict=False, cast=True)
    assert torch.equal(state["model"]["one"], source["one"].bfloat16())
    assert report.missing == ("model.new",) and report.unexpected == ("model.two",)
    assert report.cast == {"model.one": ("float32", "bfloat16")}
    assert report.loaded == ("model.one",)


def test_integers_are_never_cast(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"ids": torch.arange(4)})
    with pytest.raises(MappingError, match="another dtype"):
        load({"ids": torch.zeros(4)}, folder, cast=True)


def test_another_part_of_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    model = {"w": torch.randn(3)}
    folder = save_dcp(tmp_path / "a", {"model": model, "optim": {"w": torch.ones(3)}, "step": 4})
    state = {"model": {"w": torch.zeros(3)}}
    report = load(state, folder)
    assert torch.equal(state["model"]["w"], model["w"])
    assert set(report.left_out) == {"optim.w", "step"}


def test_other_leaves_are_replaced_where_they_are(tmp_path: Path) -> None:
    saved = {
        "step": 7,
        "optim": {
            "state": {0: {"exp_avg": torch.randn(3), "step": 9.0}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
        },
        "rng": {"python": random.getstate(), "numpy": np.random.get_state()},
        "seen": np.float64(0.5),
    }
    folder = save_dcp(tmp_path / "a", saved)
    groups = [{"lr": 0.0, "betas": (0.0, 0.0), "params": []}]
    state: dict[str, Any] = {
        "step": 0,
        "optim": {"state": {0: {"exp_avg": torch.zeros(3), "step": 0.0}}, "param_groups": groups},
        "rng": {"python": None, "numpy": None},
        "seen": None,
    }
    inner = state["optim"]
    load(state, folder)
    assert state["optim"] is inner and inner["param_groups"] is groups
    assert list(inner["state"]) == [0] and inner["state"][0]["step"] == 9.0
    assert torch.equal(inner["state"][0]["exp_avg"], saved["optim"]["state"][0]["exp_avg"])
    assert groups[0] == {"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}
    assert state["step"] == 7 and state["seen"] == 0.5
    random.setstate(state["rng"]["python"])
    np.random.set_state(state["rng"]["numpy"])


def test_objects_get_their_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder = save_dcp(tmp_path / "a", {"model": model, "optim": optimizer})
    fresh = torch.nn.Linear(4, 3)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh(torch.ones(2, 4)).sum().backward()
    other.step()
    load({"model": fresh, "optim": other}, folder)
    assert torch.equal(fresh.weight, model.weight) and other.param_groups[0]["lr"] == 0.25
    moments = (next(iter(one.state.values()))["exp_avg"] for one in (optimizer, other))
    assert torch.equal(*moments)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HOSTILE"],)


def test_a_hostile_leaf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    folder = save_dcp(tmp_path / "a", {"w": torch.ones(2), "hook": _Hostile()})
    state: dict[str, Any] = {"w": torch.zeros(2), "hook": None}
    with pytest.raises(UnsafePickleError, match="`hook`") as found:
        load(state, folder)
    assert "trusted=True" in str(found.value.hint)
    assert not (tmp_path / "ran").exists() and not state["w"].any()
    load(state, folder, trusted=True)
    assert (tmp_path / "ran").exists()


def test_a_torch_file_with_other_leaves(tmp_path: Path) -> None:
    weights, _ = tiny_llama()
    path = save_torch(tmp_path / "a.pt", weights, "state_dict")
    state: dict[str, Any] = {
        "state_dict": {name: torch.zeros_like(value) for name, value in weights.items()},
        "epoch": 0,
    }
    load(state, path)
    assert state["epoch"] == 3
    assert all(torch.equal(state["state_dict"][name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", ["turned", "gaps", "columns"])
def test_any_strides(tmp_path: Path, kind: str) -> None:
    full = torch.randn(130, 70)
    folder = save_dcp(tmp_path / "a", {"w": full})
    base = torch.zeros(140, 300)
    views = {"turned": base[:70, :130].t(), "gaps": base[:130, 3:143:2], "columns": base[:130, :70]}
    load({"w": views[kind]}, folder)
    assert torch.equal(views[kind], full)
    assert base.count_nonzero() == full.count_nonzero()


def test_a_slice_reads_its_own_bytes(tmp_path: Path) -> None:
    """One rank of eight, without a process group: what it reads goes with what it wants."""
    from ckptctl import formats
    from ckptctl.catalog import Box, memory_name
    from ckptctl.ops.load_options import LoadOptions
    from ckptctl.ops.loading import Target, Wanted, prepare
    from ckptctl.ops.state_mapping import Leaf, map_state
    from ckptctl.storage.executor import ExecutionOptions, execute

    weights, config = tiny_llama()
    folder = save_hf(tmp_path / "hf", weights, config)
    name = "layers.0.attention.wq.weight"
    full = torch.zeros(weights["model.layers.0.self_attn.q_proj.weight"].shape).bfloat16()
    rows, columns = full.shape
    leaves = {
        key: Leaf("bfloat16", tuple(value.shape), (key,)) for key, value in _meta(weights).items()
    }
    for box in (Box((rows // 8, 0), (rows // 8, columns)), Box((0, 24), (rows, columns // 8))):
        memory = bytearray(box.numel * 2)
        target = Target(box, "0", (box.sizes[1], 1))
        wanted = {name: Wanted("bfloat16", (rows, columns), (target,))}
        mapping = map_state(formats.open_checkpoint(folder), leaves, LoadOptions())
        plan = prepare(mapping, wanted, cast=False).plan(wanted)
        how = ExecutionOptions(checksum=False)
        views = {memory_name("0"): memoryview(memory)}
        done = execute(plan, folder, how, lambda _: None, memory=views)
        assert done.bytes_read == len(memory)
        from tests.checkpoints import to_meta_names

        part = to_meta_names(weights, config)[name]
        slices = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        found = torch.frombuffer(memory, dtype=torch.bfloat16).view(box.sizes)
        assert torch.equal(found, part[slices])


def _meta(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from tests.checkpoints import rename

    return rename(weights, "hf", "meta")
