"""Leaves that are no tensors, saved and loaded by us and by stock DCP, in all four ways."""

from __future__ import annotations

import datetime
import enum
import logging
import pathlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler

from ckptctl.distributed.dcp.load_planner import LoadPlanner
from ckptctl.distributed.dcp.storage_reader import Reader
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import RefusedError, UnsafePickleError, UnsupportedError, UsageError
from ckptctl.save_load.loading.load_options import LoadReport

SAVES: dict[str, Callable[[Any, Path], object]] = {
    "ours": lambda state, path: save(state, path, sync=False),
    "stock": lambda state, path: stock_save(state, checkpoint_id=path, no_dist=True),
}
LOADS: dict[str, Callable[[Any, Path], object]] = {
    "ours": lambda state, path: load(state, path),
    "stock": lambda state, path: stock_load(state, checkpoint_id=path, no_dist=True),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
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
def test_rng_states_roundtrip_and_continue(tmp_path: Path, saved: str, loaded: str) -> None:
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
def test_strings_times_and_paths_roundtrip(
    tmp_path: Path, saved: str, loaded: str, name: str
) -> None:
    SAVES[saved]({"x": {name: LEAVES[name]}}, tmp_path / "a")
    target: dict[str, Any] = {"x": {name: ["", 0, 0] if name == "paths" else None}}
    LOADS[loaded](target, tmp_path / "a")
    found, wanted = target["x"][name], LEAVES[name]
    assert type(found) is type(wanted)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Arguments:
    rate: float = 0.1


class Point(NamedTuple):
    x: int = 1


class Words(str):
    __slots__ = ()


UNKNOWN: dict[str, Any] = {
    "enum": Color.RED,
    "number": Level.LOW,
    "dataclass": Arguments(),
    "inside": (1, {"a": [Arguments()]}),
    "named": Point(),
    "text": Words("x"),
    "structured": np.zeros(2, dtype=[("a", "i4")]),
    "objects": np.array([None, 1], dtype=object),
    "attributed": (torch.zeros(1),),
}
UNKNOWN["attributed"][0].note = "x"


def test_unreadable_leaves_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "x": {**UNKNOWN, "day": datetime.date(2024, 2, 3)}}
    with pytest.raises(RefusedError, match="9 values cannot be saved") as found:
        save(state, tmp_path / "a", sync=False)
    said = str(found.value.where)
    for name, leaf in UNKNOWN.items():
        assert f"`x.{name}: " in said
        assert type(leaf).__qualname__ in said
    assert "x.day" not in said
    assert "trusted=True" in str(found.value.hint)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RefusedError, match=r"`x\.f` cannot be saved") as found:
        save({"x": {"f": lambda: 1, "day": UNKNOWN["enum"]}}, tmp_path / "a", trusted=True)
    assert "trusted" not in str(found.value.hint), "it does not help"


@pytest.mark.parametrize("name", ["enum", "dataclass", "structured", "text"])
def test_trusted_leaves_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    save({"x": {"leaf": UNKNOWN[name], "n": 1}}, tmp_path / "a", sync=False, trusted=True)
    target: dict[str, Any] = {"x": {"leaf": "mine", "n": 0}}
    with pytest.raises(UnsafePickleError, match=r"`x\.leaf`") as found:
        load(target, tmp_path / "a")
    assert "`strict=False`" in str(found.value.hint)
    assert target == {"x": {"leaf": "mine", "n": 0}}
    load(target, tmp_path / "a", trusted=True)
    assert bool(np.all(target["x"]["leaf"] == UNKNOWN[name]))


def unknown_beside_known(path: Path) -> dict[str, Any]:
    """Save leaves of which some need trust, and return what they are loaded into."""
    state = {"w": torch.ones(2), "x": {"a": Color.RED, "b": Arguments(), "n": 7}}
    save(state, path, sync=False, trusted=True)
    return {"w": torch.zeros(2), "x": {"a": "mine", "b": None, "n": 0}}


def test_untrusted_leaves_are_all_named(tmp_path: Path) -> None:
    target = unknown_beside_known(tmp_path / "a")
    with pytest.raises(UnsafePickleError, match=r"2 values .*`x\.a`, `x\.b`"):
        load(target, tmp_path / "a")
    assert not target["w"].any()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptctl").addHandler(handler)
    yield found
    logging.getLogger("ckptctl").removeHandler(handler)


def by_load(target: dict[str, Any], path: Path) -> LoadReport:
    return load(target, path, strict=False)


def by_planner(target: dict[str, Any], path: Path) -> LoadReport:
    planner = LoadPlanner(strict=False)
    stock_load(target, checkpoint_id=path, planner=planner, no_dist=True)
    return planner.report


@pytest.mark.parametrize("way", [by_load, by_planner])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_load_without_strict_skips_untrusted_leaves(
    tmp_path: Path, way: Callable[..., LoadReport], warnings: list[str]
) -> None:
    target = unknown_beside_known(tmp_path / "a")
    report = way(target, tmp_path / "a")
    assert target["x"] == {"a": "mine", "b": None, "n": 7}
    assert target["w"].all()
    assert {"x.a", "x.b"} <= report.left_out.keys()
    assert not {"x.a", "x.b"} & set(report.loaded)
    assert "x.a" in str(warnings)
    assert "Color" in str(warnings)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reader_skips_untrusted_leaves_with_lenient_planner(tmp_path: Path) -> None:
    target = unknown_beside_known(tmp_path / "a")
    planner, reader = LoadPlanner(strict=False), Reader(tmp_path / "a")
    stock_load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert target["x"] == {"a": "mine", "b": None, "n": 7}
    with pytest.raises(CheckpointException, match="harmless"):
        stock_load(target, storage_reader=Reader(tmp_path / "a"), no_dist=True)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler_states_roundtrip(tmp_path: Path, scheduler: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    own, other = SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](optimizer)
    optimizer.step()
    own.step(*([1] if scheduler == "plateau" else []))
    save({"s": own.state_dict()}, tmp_path / "a", sync=False)
    target = {"s": other.state_dict()}
    load(target, tmp_path / "a")
    other.load_state_dict(target["s"])
    assert repr(other.state_dict()) == repr(own.state_dict())


class _Text:
    """Pickles as a text dtype that calls itself objects, for numpy's own ``__setstate__``."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {"a": (np.dtype("O"), 0)}
        return np.dtype, ("U2", False, True), (3, "|", None, ("a",), fields, 8, 8, 63)


class _Pointer:
    def __reduce__(self) -> tuple[Any, ...]:
        made = (np.ndarray, (0,), b"b")
        reconstruct = np.array(1).__reduce__()[0]
        return reconstruct, made, (1, (1,), _Text(), False, b"AAAAAA\0\0")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pickled_pointers_are_refused(tmp_path: Path) -> None:
    stock_save({"x": {"leaf": _Pointer(), "n": 1}}, checkpoint_id=tmp_path / "a", no_dist=True)
    target: dict[str, Any] = {"x": {"leaf": None, "n": 0}}
    with pytest.raises(UnsafePickleError, match="leaf"):
        load(target, tmp_path / "a")
    load(target, tmp_path / "a", strict=False)
    assert target == {"x": {"leaf": None, "n": 1}}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_generator_state_with_invalid_position_is_refused(tmp_path: Path) -> None:
    state = np.random.MT19937(1).state
    state["state"]["pos"] = 10**9
    stock_save({"rng": state, "n": 1}, checkpoint_id=tmp_path / "a", no_dist=True)
    target: dict[str, Any] = {"rng": np.random.MT19937(2).state, "n": 0}
    with pytest.raises(UnsupportedError, match="harmless") as found:
        load(target, tmp_path / "a")
    assert "position 1,000,000,000 of 624" in str(found.value.why)
    for strict in (True, False):
        with pytest.raises(CheckpointException, match=r"position 1,000,000,000 of 624"):
            planner = LoadPlanner(strict=strict)
            stock_load(target, checkpoint_id=tmp_path / "a", planner=planner, no_dist=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@ways
def test_datetime_fold_roundtrips(tmp_path: Path, saved: str, loaded: str) -> None:
    if saved == "stock":
        return  # protocol 2, which stock torch writes, has no place for it
    zone = datetime.timezone(datetime.timedelta(hours=1))
    times: list[Any] = [
        datetime.datetime(2026, 10, 25, 2, 30, fold=1),
        datetime.time(2, 30, fold=1),
    ]
    times += [time.replace(tzinfo=zone) for time in times]
    SAVES[saved]({"at": {"all": times}}, tmp_path / "a")
    state: dict[str, Any] = {"at": {"all": [time.replace(fold=0) for time in times]}}
    LOADS[loaded](state, tmp_path / "a")
    found = state["at"]["all"]
    assert found == times and [time.fold for time in found] == [1] * 4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reader_keeps_datetime_fold(tmp_path: Path) -> None:
    time = datetime.datetime(2026, 10, 25, 2, 30, fold=1)
    save({"at": time}, tmp_path / "a", sync=False)
    state = {"at": time.replace(fold=0)}
    stock_load(state, storage_reader=Reader(tmp_path / "a"), no_dist=True)
    assert state["at"].fold == 1


def cycles() -> list[Any]:
    """Return containers that contain themselves."""
    values, keys, deep = [1], {"a": 1}, [torch.ones(1)]
    values.append(values)  # type: ignore[arg-type]
    keys["self"] = keys  # type: ignore[assignment]
    deep.append({"inside": deep})  # type: ignore[arg-type]
    return [values, keys, deep]


@pytest.mark.parametrize("value", cycles(), ids=["list", "dict", "list of tensors"])
def test_self_containing_state_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match="contains itself") as caught:
        save({"w": torch.ones(1), "odd": value}, tmp_path / "a", sync=False)
    assert caught.value.where == "`odd`"
    assert not (tmp_path / "a").exists()
