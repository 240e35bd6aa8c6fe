"""Leaves of all kinds come back as they were; what else a file says is refused."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptctl.distributed.leaves.safe_reader import read_leaf
from ckptctl.errors import CkptError, UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_writer import dump_pickle
from tests.unit.distributed.leaves.kinds import KINDS, saved, zip_of

CORE = "numpy._core" if hasattr(np, "_core") else "numpy.core"


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_every_kind_roundtrip(kind: str, protocol: int) -> None:
    value = KINDS[kind]
    found = read_leaf(saved(value, protocol), "here")
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_shared_objects_stay_shared() -> None:
    tensor, words = torch.arange(4), ["x"]
    found: Any = read_leaf(saved((tensor, tensor[1:], tensor, words, {"w": words})), "here")
    assert found[0] is found[2]
    assert found[3] is found[4]["w"]
    found[0][1] = 9
    assert found[1][0] == 9


def test_attributes_of_ordered_dict_are_kept() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    found: Any = read_leaf(saved((state,)), "here")
    assert type(found[0]) is OrderedDict
    assert found[0]._metadata == state._metadata  # type: ignore[attr-defined]


def dtype(code: str, *state: object) -> Inert:
    return Inert("numpy", "dtype", (code, False, True), state)


def plain(code: str, order: str = "<") -> Inert:
    return dtype(code, 3, order, None, None, None, -1, -1, 0)


def array(shape: object, kind: Inert, content: object, fortran: object = False) -> Inert:
    made = (Global("numpy", "ndarray"), (0,), b"b")
    state = (1, shape, kind, fortran, content)
    return Inert(f"{CORE}.multiarray", "_reconstruct", made, state)


def timed(*unit: object, extra: object = None) -> Inert:
    return dtype("M8", 4, "<", None, None, None, -1, -1, 0, (extra, unit))


def call(module: str, name: str, *args: object, state: object = None) -> Inert:
    return Inert(module, name, args, state)


POINTER = b"AAAAAA\0\0"
OBJECT = Inert("numpy", "dtype", ("O8", False, True), (3, "|", None, None, None, -1, -1, 63))
TEXT_THAT_IS_OBJECTS = dtype("U2", 3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 8, 63)
PAIR = dtype("V8", 3, "|", None, ("a",), {"a": (plain("i4"), 0)}, 8, 4, 16)
TWISTER = array((624,), plain("u4"), KINDS["numpy"][1].tobytes())
MIDNIGHT = b"\x07\xe8\x01\x01\0\0\0\0\0\0"

FORGED: dict[str, object] = {
    "dtype-with-fields": array((1,), TEXT_THAT_IS_OBJECTS, POINTER),
    "dtype-alone": TEXT_THAT_IS_OBJECTS,
    "dtype-flags": array((1,), dtype("U2", 3, "<", None, None, None, 8, 4, 63), POINTER),
    "dtype-part": array((1,), dtype("U2", 3, "<", (OBJECT, (1,)), None, None, 8, 4, 8), POINTER),
    "dtype-size": array((1,), dtype("U2", 3, "<", None, None, None, 1 << 30, 4, 8), POINTER),
    "dtype-negative": array((1,), dtype("U2", 3, "<", None, None, None, -8, 4, 8), POINTER),
    "dtype-state": array((1,), dtype("U2", 3), POINTER),
    "dtype-text": array((1,), plain("f4,O"), POINTER),
    "dtype-long": array((1,), plain("U" + "9" * 30), POINTER),
    "dtype-order": array((1,), plain("f4", "O,"), bytes(4)),
    "objects": array((1,), OBJECT, POINTER),
    "objects-in-a-list": array((1,), OBJECT, [7]),
    "list-of-numbers": array((1,), plain("i8"), [7]),
    "structured": array((1,), PAIR, POINTER),
    "longdouble": array((1,), plain("f16"), b"\xff" * 16),
    "short": array((3,), plain("i8"), POINTER),
    "long": array((0,), plain("i8"), POINTER),
    "overflow": array((1 << 62, 4), plain("i8"), b""),
    "overflow-of-nothing": array((0, 1 << 62, 1 << 62), plain("i8"), b""),
    "huge": array((1 << 63,), plain("i8"), POINTER),
    "negative": array((-1, -1), plain("i8"), POINTER),
    "shape-of-text": array("1", plain("i8"), POINTER),
    "dimensions": array((1,) * 60, plain("i8"), POINTER),
    "endless-of-nothing": array((1 << 62,), plain("S0"), b""),
    "fortran": array((1,), plain("i8"), POINTER, fortran="F"),
    "subclass": Inert(
        f"{CORE}.multiarray", "_reconstruct", (Global("numpy", "memmap"), (0,), b"b"), (1, (), 0)
    ),
    "truth": array((1,), plain("b1", "|"), b"\x07"),
    "character": array((1,), plain("U1"), b"\xff\xff\xff\x7f"),
    "unit": array((1,), timed(b"xx", 1, 1, 1), POINTER),
    "unit-of-none": array((1,), timed(b"s", 0, 1, 1), POINTER),
    "unit-count": array((1,), timed(b"s", 1 << 40, 1, 1), POINTER),
    "unit-metadata": array((1,), timed(b"s", 1, 1, 1, extra={"a": 1}), POINTER),
    "scalar": call(f"{CORE}.multiarray", "scalar", TEXT_THAT_IS_OBJECTS, POINTER),
    "scalar-of-object": call(f"{CORE}.multiarray", "scalar", OBJECT, POINTER),
    "scalar-short": call(f"{CORE}.multiarray", "scalar", plain("i8"), b""),
    "buffer": call(f"{CORE}.numeric", "_frombuffer", POINTER, TEXT_THAT_IS_OBJECTS, (1,), "C"),
    "buffer-short": call(f"{CORE}.numeric", "_frombuffer", POINTER, plain("i8"), (2,), "C"),
    "buffer-order": call(f"{CORE}.numeric", "_frombuffer", POINTER, plain("i8"), (1,), 3),
    "array-called": call("numpy", "ndarray", (1,), OBJECT, POINTER),
    "position": ("MT19937", TWISTER, 10**9, 0, 0.0),
    "position-below": {"key": TWISTER, "pos": -5},
    "buffer-position": {"buffer": array((4,), plain("u8"), bytes(32)), "buffer_pos": -(1 << 20)},
    "month": call("datetime", "date", b"\x07\xe8\xff\x01"),
    "hour": call("datetime", "datetime", b"\x07\xe8\x01\x01\xff\0\0\0\0\0"),
    "minute": call("datetime", "time", b"\x01\xff\0\0\0\0"),
    "date-state": call("datetime", "date", b"\x07\xe8\x01\x01", state={"a": 1}),
    "zone": call("datetime", "timezone", call("datetime", "timedelta", 9, 0, 0)),
    "zone-of-text": call("datetime", "datetime", MIDNIGHT, "utc"),
    "days": call("datetime", "timedelta", 1 << 62, 0, 0),
    "digits": call("decimal", "Decimal", "x"),
    "divided-by-nothing": call("fractions", "Fraction", 1, 0),
    "fraction-of-text": call("fractions", "Fraction", "1e999999999"),
    "uuid": call("uuid", "UUID", state={"int": -1}),
    "uuid-attribute": call("uuid", "UUID", state={"int": 1, "__class__": 2}),
    "step": call("builtins", "range", 0, 1, 0),
    "longest": call("collections", "deque", (), 1 << 70),
    "deque-of-text": call("collections", "deque", "a" * 100),
    "counter": call("collections", "Counter", [1]),
    "factory": call("collections", "defaultdict", Global("builtins", "eval")),
    "function": Global("os", "system"),
    "namespace": call("argparse", "Namespace", state=[1]),
    "attribute": call("types", "SimpleNamespace", state={1: 2}),
    "device": call("torch", "device", "no such thing"),
    "device-index": call("torch", "device", "cuda", 1 << 40),
    "layout": call("torch.serialization", "_get_layout", "torch.ops"),
    "size": call("torch", "Size", (1 << 70,)),
    "parameter": call("torch._utils", "_rebuild_parameter", 3, True, None),
    "memory": call("_io", "BytesIO", b"x"),
    "enum": call("uuid", "SafeUUID", 0),
    "code": call("posix", "system", "true"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_records_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError):
        read_leaf(zip_of(dump_pickle([FORGED[name]])), "here")


SPARSE = torch.eye(2).to_sparse()
META = torch.empty(2, device="meta")


@pytest.mark.parametrize("tensor", [SPARSE, META], ids=["sparse", "meta"])
def test_sparse_and_meta_tensors_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="are not supported"):
        read_leaf(saved((tensor,)), "here")


@pytest.mark.parametrize("kind", ["array", "text"])
def test_small_leaf_that_expands_is_refused(kind: str) -> None:
    content, text = bytes(100_000), "1" * 100_000
    made: dict[str, Callable[[], object]] = {
        "array": lambda: array((100_000,), plain("i1"), content),
        "text": lambda: call("decimal", "Decimal", text),
    }
    leaf = dump_pickle([made[kind]() for _ in range(2000)])
    assert len(leaf) < 500_000
    with pytest.raises(UnsupportedError) as found:
        read_leaf(zip_of(leaf), "here")
    assert "values" in str(found.value.why)


def test_numpy_records_are_read_as_numpy_writes_them() -> None:
    numbers = array((2,), plain("i8"), bytes(15) + b"\1")
    times = array((1,), timed(b"s", 25, 1, 1), bytes(8))
    found: Any = read_leaf(zip_of(dump_pickle([numbers, times])), "here")
    assert found[0].tolist() == [0, 1 << 56]
    assert found[1].dtype == np.dtype("M8[25s]")


class Storage:
    """What a persistent id stands for."""

    def __init__(self, kind: object, numel: object) -> None:
        self.pid = ("storage", kind, "0", "cpu", numel)


class Call:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Pickler(pickle.Pickler):
    def persistent_id(self, found: object) -> object:
        return found.pid if isinstance(found, Storage) else None


def forged_tensor(
    offset: object, shape: object, strides: object, kind: type, numel: object, grad: object
) -> bytes:
    """Return a leaf with a tensor over a storage of 16 bytes."""
    arguments: tuple[Any, ...] = (Storage(kind, numel), offset, shape, strides, grad, OrderedDict())
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump([Call(torch._utils._rebuild_tensor_v2, arguments)])
    return zip_of(buffer.getvalue(), {"0": b"\x02" * 16})


FLOATS, TRUTHS, LONGS = torch.FloatStorage, torch.BoolStorage, torch.LongStorage
TENSORS: dict[str, tuple[object, ...]] = {
    "beyond": (0, (5,), (1,), FLOATS, 4, False),
    "behind": (4, (1,), (1,), FLOATS, 4, False),
    "below": (-1, (1,), (1,), FLOATS, 4, False),
    "backwards": (3, (4,), (-1,), FLOATS, 4, False),
    "negative": (0, (-1, -4), (1, 1), FLOATS, 4, False),
    "stride": (0, (2,), (1 << 61,), FLOATS, 4, False),
    "wraps": (0, (1 << 32, 1 << 32), (1 << 32, 1), FLOATS, 4, False),
    "endless": (0, (1 << 40,), (0,), FLOATS, 4, False),
    "nothing": (0, (0, 1 << 62, 1 << 62), (1, 1, 1), FLOATS, 4, False),
    "huge": (0, (1 << 63,), (1,), FLOATS, 4, False),
    "storage": (0, (4,), (1,), FLOATS, 1 << 61, False),
    "storage-small": (0, (4,), (1,), FLOATS, 1, False),
    "storage-negative": (0, (4,), (1,), FLOATS, -4, False),
    "truth": (0, (16,), (1,), TRUTHS, 16, False),
    "gradient": (0, (2,), (1,), LONGS, 2, True),
    "flag": (0, (2,), (1,), LONGS, 2, 7),
    "strides": (0, (2, 2), (1,), FLOATS, 4, False),
    "text": (0, "ab", (1, 1), FLOATS, 4, False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_forged_tensors_are_refused(name: str) -> None:
    with pytest.raises(CkptError):
        read_leaf(forged_tensor(*TENSORS[name]), "here")  # type: ignore[arg-type]


def test_self_overlapping_tensors_are_read() -> None:
    found: Any = read_leaf(forged_tensor(0, (2, 2), (1, 1), FLOATS, 4, True), "here")
    (tensor,) = found
    assert tensor.stride() == (1, 1)
    assert tensor.requires_grad
    tensor = read_leaf(forged_tensor(1, (1, 2), (1 << 62, 1), FLOATS, 4, False), "here")[0]  # type: ignore[index]
    assert (
        tensor.sum().item()
        == 2 * torch.frombuffer(bytearray(b"\x02" * 4), dtype=torch.float32).item()
    )
