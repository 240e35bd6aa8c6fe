"""One leaf of every kind that is read without trust, and zips of ``torch.save`` with any pickle."""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import random
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

_SHARED = torch.arange(12).reshape(3, 4)

KINDS: dict[str, Any] = {
    "none": None,
    "numbers": [True, 3, -1, 10**50, 2.5, float("inf"), 1 + 2j],
    "texts": ("ä", b"\x00\xff", b"", bytearray(b"ab")),
    "containers": {"a": [1, [2, (3,)]], (1, "b"): {1, 2}, None: frozenset("ab"), 1.5: {}},
    "slice": slice(1, None, 2),
    "range": range(3, 9, 2),
    "date": datetime.date(2024, 2, 3),
    "datetime": datetime.datetime(2024, 2, 3, 4, 5, 6, 7),
    "utc": datetime.datetime(2024, 2, 3, tzinfo=datetime.UTC),
    "zone": datetime.timezone(datetime.timedelta(hours=-3), "x"),
    "time": datetime.time(1, 2, 3, 4),
    "timedelta": datetime.timedelta(-3, 5, 7),
    "decimal": Decimal("-1.50"),
    "fraction": Fraction(1, 3),
    "uuid": uuid.UUID(int=1 << 100),
    "deque": deque([1, "x"], 5),
    "endless": deque([{"a": 1}]),
    "counter": Counter("abca"),
    "ordered": OrderedDict(b=1, a=[2]),
    "default": defaultdict(list, {"a": [1]}),
    "factories": [defaultdict(None, {1: 2}), defaultdict(set), defaultdict(OrderedDict)],
    "namespace": argparse.Namespace(a=1, b=[2]),
    "simple": types.SimpleNamespace(x={"y": 1}),
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:/d")],
    "keys": {pathlib.Path("a"): 1, datetime.date(2024, 1, 1): 2, torch.float16: 3},
    "dtypes": (torch.float32, torch.bfloat16, np.dtype("f4"), np.dtype("M8[25s]")),
    "device": (torch.device("cpu"), torch.device("cuda", 1), torch.strided),
    "size": torch.Size([1, 2]),
    "scalars": (np.float32(1.5), np.bool_(True), np.complex64(1j), np.int8(-1), np.uint64(7)),
    "words": (np.str_("ä"), np.str_(""), np.bytes_(b"x")),
    "moments": (np.datetime64("2024-02-03"), np.datetime64("NaT", "s"), np.timedelta64(3, "s")),
    "array": np.arange(6, dtype=np.int32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(3, dtype=">i2"),
    "booleans": np.array([True, False, True]),
    "strings": np.array(["a", "bcd"]),
    "octets": np.array([b"a", b"bcd"]),
    "times": np.array(["2024-02-03", "NaT"], dtype="M8[ns]"),
    "spans": np.array([1, 2], dtype="m8"),
    "hollow": np.zeros((0, 3)),
    "point": np.array(7),
    "python": random.Random(1).getstate(),
    "numpy": np.random.RandomState(1).get_state(),
    "generators": [
        kind(1).state for kind in (np.random.MT19937, np.random.Philox, np.random.PCG64)
    ],
    "tensors": (_SHARED, _SHARED[1:], _SHARED.t(), _SHARED[:, 1::2], torch.tensor(1.5)),
    "low": (torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float8_e4m3fn)),
    "bits": (torch.tensor([True, False]), torch.ones(2, dtype=torch.uint16), torch.tensor(1j)),
    "grad": (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))),
    "mirrored": (torch.tensor([1j]).conj(), torch.tensor([1j, 2j]).conj().imag),
    "expanded": (torch.ones(1, 2).expand(3, 2),),
    "empty": (torch.empty(0, 3), torch.empty(0)),
}


def saved(value: object, protocol: int = 2) -> bytes:
    """Return what ``torch.save`` makes of *value*."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def zip_of(pickle: bytes, storages: Mapping[str, bytes] = {}) -> bytes:
    """Return a zip as torch writes it, with any pickle and any storages."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    writer.write_record("data.pkl", pickle, len(pickle))
    writer.write_record("byteorder", b"little", 6)
    for key, content in storages.items():
        writer.write_record(f"data/{key}", content, len(content))
    writer.write_end_of_file()
    return buffer.getvalue()
