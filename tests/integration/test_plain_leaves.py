"""Leaves that are no tensors, saved and loaded by us and by stock DCP, in all four ways."""

from __future__ import annotations

import datetime
import pathlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.utils.data import DataLoader, RandomSampler

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import UnsafePickleError

SAVES: dict[str, Callable[[Any, Path], object]] = {
    "ours": lambda state, path: save(state, path, sync=False),
    "stock": lambda state, path: stock_save(state, checkpoint_id=path, no_dist=True),
}
LOADS: dict[str, Callable[[Any, Path], object]] = {
    "ours": lambda state, path: load(state, path),
    "stock": lambda state, path: stock_load(state, checkpoint_id=path, no_dist=True),
}
ways = pytest.mark.parametrize(("saved", "loaded"), [(s, t) for s in SAVES for t in LOADS])


def seed(number: int) -> tuple[torch.Generator, np.random.Generator]:
    """Seed all sources of random numbers, and return two of their own."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number), np.random.default_rng(number)


def states(of_torch: torch.Generator, of_numpy: np.random.Generator) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy_generator": of_numpy.bit_generator.state,
        "torch": torch.get_rng_state(),
        "generator": of_torch.get_state(),
        "workers": [torch.get_rng_state(), {"epoch": 3, "seen": (1, 2)}],
    }


def drawn(of_torch: torch.Generator, of_numpy: np.random.Generator) -> list[object]:
    order = RandomSampler(range(9), generator=of_torch)
    return [
        random.random(),
        np.random.rand(),
        of_numpy.integers(1 << 60),
        torch.rand(()).item(),
        [batch.tolist() for batch in DataLoader(range(9), batch_size=2, sampler=order)],  # type: ignore[arg-type]
    ]


@ways
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_numbers_go_on(tmp_path: Path, saved: str, loaded: str) -> None:
    own = seed(1)
    SAVES[saved]({"rng": states(*own)}, tmp_path / "a")
    expected = drawn(*own)
    own = seed(2)
    target = {"rng": states(*own)}
    LOADS[loaded](target, tmp_path / "a")
    found = target["rng"]
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    own[1].bit_generator.state = found["numpy_generator"]
    torch.set_rng_state(found["torch"])
    own[0].set_state(found["generator"])
    assert drawn(*own) == expected
    assert found["workers"][1] == {"epoch": 3, "seen": (1, 2)}


LEAVES = {
    "text": np.str_("ä"),
    "texts": np.array(["a", "bcd"]),
    "bytes": np.bytes_(b"x"),
    "day": np.datetime64("2024-02-03"),
    "times": np.array(["2024-02-03", "NaT"], dtype="datetime64[ns]"),
    "span": np.timedelta64(3, "s"),
    "complex": np.complex64(1 + 2j),
    "bool": np.bool_(True),
    "path": pathlib.Path("/data/set"),
    "paths": ["x", pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/d")],
}


@ways
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_texts_times_and_paths(tmp_path: Path, saved: str, loaded: str, name: str) -> None:
    SAVES[saved]({"x": {name: LEAVES[name]}}, tmp_path / "a")
    target: dict[str, Any] = {"x": {name: ["", 0, 0] if name == "paths" else None}}
    LOADS[loaded](target, tmp_path / "a")
    found, wanted = target["x"][name], LEAVES[name]
    assert type(found) is type(wanted)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("leaf", [datetime.date(2024, 2, 3), np.zeros(2, dtype=[("a", "i4")])])
def test_other_classes_are_named_and_need_trust(tmp_path: Path, leaf: object) -> None:
    save({"x": {"leaf": leaf}}, tmp_path / "a", sync=False)
    target: dict[str, Any] = {"x": {"leaf": None}}
    with pytest.raises(UnsafePickleError, match=r"`x\.leaf`"):
        load(target, tmp_path / "a")
    load(target, tmp_path / "a", trusted=True)
    assert bool(np.all(target["x"]["leaf"] == leaf))
