"""The pickle machine: what harmless pickles become, and that hostile ones get nowhere."""

import argparse
import collections
import contextlib
import datetime
import io
import pathlib
import pickle
import random
import tracemalloc
import uuid
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.errors import CkptError, DamagedError, UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles import pickle_reader
from ckptctl.storage.pickles.inert import (
    MAX_DEPTH,
    Builder,
    Global,
    Inert,
    Size,
    check_tree,
    walk_values,
)
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import StorageRef, parse_storage_id
from tests import effort, hostile
from tests.sweeps import one_in

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.recursive(
    st.text() | st.integers(-(2**63), 2**63) | st.booleans() | st.none() | st.binary(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
OBJECTS = st.recursive(
    SCALARS | st.frozensets(KEYS, max_size=4) | st.sets(KEYS, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=30,
)


def read(data, **options):
    return load_pickle(data, where="file", table=TORCH_TABLE, **options)


@given(OBJECTS, st.integers(2, 5))
def test_plain_objects_match_pickle_loads(obj, protocol):
    assert read(pickle.dumps(obj, protocol)) == obj


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(protocol):
    obj = {"a": [1, -1, 70000, 1 << 40, -(1 << 70), 2.5, True, None], "b": ("x", "é\n", (1, 2, 3))}
    obj["again"] = obj["a"]
    found = read(pickle.dumps(obj, protocol))
    assert found == obj
    assert found["again"] is found["a"]


def test_long_containers_and_strings_are_read():
    obj = [{str(i): i for i in range(3000)}, list(range(70000)), "x" * 100_000, b"y" * 100_000]
    for protocol in range(6):
        assert read(pickle.dumps(obj, protocol)) == obj


def test_unknown_globals_become_inert_records():
    found = read(pickle.dumps(datetime.date(2024, 1, 2)))
    assert isinstance(found, Inert)
    assert (found.module, found.name) == ("datetime", "date")
    assert read(pickle.dumps(torch.bfloat16)) == Global("torch", "bfloat16")
    assert read(pickle.dumps(torch.Size([1, 2]))) == Size((1, 2))
    assert read(pickle.dumps(pathlib.Path("/a/b"))) == "/a/b"
    state = read(pickle.dumps(torch.nn.Linear(1, 1).state_dict().__class__(a=1)))
    assert state == {"a": 1}


def test_ordered_dict_attributes_are_kept_separately():
    obj = collections.OrderedDict(a=1)
    obj._metadata = {"": {"version": 1}, "items": "not a method"}
    obj.items_ = 1
    found = read(pickle.dumps(obj))
    assert dict(found.items()) == {"a": 1}
    assert found.state["_metadata"][""] == {"version": 1}


@pytest.mark.parametrize("name", list(hostile.code_pickles("x")))
@pytest.mark.parametrize("unknown", ["refuse", "inert"])
def test_hostile_pickle_code_never_runs(name, unknown, tmp_path):
    marker = tmp_path / "marker"
    data = hostile.code_pickles(str(marker))[name]
    try:
        found = read(data, unknown=unknown)
    except UnsafePickleError as error:
        assert error.where == "file"
        assert "at byte" in error.why
    else:
        assert unknown == "inert"
        assert any(isinstance(node, Inert) for node in walk_values(found))
    assert not marker.exists()


def test_hostile_pickle_executes_under_plain_pickle(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(hostile.code_pickles(str(marker))["eval"])
    assert marker.exists()


def test_refused_global_is_named_in_error():
    with pytest.raises(UnsafePickleError, match=r"`posix\.system`"):
        read(hostile.code_pickles("x")["posix-system"])


@pytest.mark.parametrize("name", one_in(7, hostile.exhausting_pickles()))
def test_exhausting_pickles_are_refused_with_bounded_work(name):
    data = hostile.exhausting_pickles()[name]
    refused = True
    with effort.counted() as counted, suppress(DamagedError, UnsupportedError):
        found = read(data)
        check_tree(found, limit=max(1000, len(data)), where="file")
        refused = False
    assert refused == (name != "memo-index")
    assert counted.lines < 100_000 + 150 * len(data)


@pytest.mark.parametrize(
    ("end", "error", "what"),
    one_in(
        3,
        [
            (b"", DamagedError, "truncated"),
            (b"j\xff\xff\xff\xff.", UnsupportedError, "malformed"),
            (b"N.", UnsupportedError, "malformed"),
            (b"cposix\nsystem\n.", UnsafePickleError, "not allowed"),
            (b"q\x000" + b"](" + b"h\x00" * 1000 + b"e.", UnsupportedError, "expands"),
        ],
    ),
    ids=["truncated", "unknown-entry", "two-values", "unsafe", "expanding"],
)
def test_raised_error_keeps_no_objects_alive(end, error, what):
    data = b"\x80\x02](" + b"}" * 50_000 + b"e" + end
    tracemalloc.start()
    try:
        with pytest.raises(error, match=what) as caught:
            read(data)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.where == "file"
    assert kept < 500_000, "50,000 dicts take more than 3,000,000 bytes"


@pytest.mark.parametrize("name", one_in(7, hostile.sharing_pickles(1, 1)))
def test_repeatedly_shared_values_are_refused_with_bounded_work(name, monkeypatch):
    monkeypatch.setattr(pickle_reader, "FREE_OBJECTS", 0)
    data = hostile.sharing_pickles(count=2_000)[name]
    tracemalloc.start()
    try:
        with effort.counted() as counted, pytest.raises(UnsupportedError) as caught:
            read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "malformed" not in caught.value.what
    assert counted.lines < 100_000 + 200 * len(data)
    assert peak < 1_000_000 + 120 * len(data)


@pytest.mark.parametrize("name", hostile.sharing_pickles(1, 1))
def test_few_shared_values_are_read(name):
    with suppress(UnsupportedError):  # of what cannot be a key
        read(hostile.sharing_pickles(3, 3)[name])
        return
    assert any(name.endswith(end) for end in ("set", "key")), name


@pytest.mark.parametrize("name", one_in(4, list(hostile.swelling_pickles(0))))
def test_pickle_memory_use_is_bounded(name, monkeypatch):
    monkeypatch.setattr(pickle_reader, "FREE_OBJECTS", 0)
    data = hostile.swelling_pickles(20_000)[name]
    tracemalloc.start()
    try:
        with suppress(UnsupportedError):
            read(data, unknown="inert")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 45 * len(data) + 200_000


def test_self_referencing_list_is_refused_in_bounded_memory():
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        read(b"]q\x00(" + b"h\x00" * 50_000 + b"e.")
    found: list[object] = []
    found += [found] * 50_000
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match="nested too deeply"):
            check_tree(found, limit=1_000_000, where="file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("protocol", [2, 4])
def test_realistic_training_state_stays_below_object_limit(protocol, monkeypatch):
    monkeypatch.setattr(pickle_reader, "FREE_OBJECTS", 0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(200)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    each = [{"params": [one]} for one in model.parameters()]
    grouped = torch.optim.SGD(each, lr=1e-3).state_dict()
    pairs = [(epoch % 200, epoch % 90) for epoch in range(10_000)]
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pairs": pairs}
    for obj in (whole, grouped, random.getstate(), pairs, [{"loss": 0.5} for _ in range(1000)]):
        saved = io.BytesIO()
        torch.save(obj, saved, pickle_protocol=protocol)
        with zipfile.ZipFile(saved) as archive:
            content = archive.read("archive/data.pkl")
        storages = {}
        read(content, persistent_load=lambda pid, known=storages: known.setdefault(
            pid[2], StorageRef(*parse_storage_id(pid))
        ))  # fmt: skip


@pytest.mark.parametrize("name", list(hostile.malformed_pickles()))
def test_malformed_pickles_are_refused(name):
    with pytest.raises((DamagedError, UnsupportedError)) as error:
        read(hostile.malformed_pickles()[name])
    assert error.value.where == "file"


SEEDS = [
    pickle.dumps({"a": [1, 2.5, "x", b"y", None, True, (1, 2, 3, 4), {3, 4}, 1j]}, protocol)
    for protocol in range(6)
] + [
    pickle.dumps(
        [collections.OrderedDict(a=torch.float32), datetime.date(2020, 1, 1), np.float32(1)], p
    )
    for p in (2, 4)
]


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255))))
def test_mutated_pickles_raise_only_ckpt_errors(seed, changes):
    data = bytearray(seed)
    for position, value in changes:
        data[position % len(data)] = value
    for unknown in ("refuse", "inert"):
        try:
            found = read(bytes(data), unknown=unknown, persistent_load=str)
            check_tree(found, limit=10_000, where="file")
        except CkptError:
            pass


@given(st.binary(max_size=60))
def test_random_bytes_raise_only_ckpt_errors(noise):
    with contextlib.suppress(CkptError):
        read(noise, unknown="inert")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_truncated_pickle_is_refused(seed):
    """One that happens to end as a pickle does is refused, too, but might be something else."""
    for end in range(len(seed)):
        last = seed[end - 1 : end]
        with pytest.raises((UnsupportedError, DamagedError) if last == b"." else DamagedError):
            read(seed[:end])


def test_builders_constants_and_persistent_ids_are_applied():
    table = {("m", "f"): Builder(lambda a, b: [a, b]), ("m", "c"): 7}
    data = b"\x80\x02cm\nf\ncm\nc\nX\x01\0\0\0pQ\x86R."
    assert load_pickle(data, where="x", table=table, persistent_load=lambda pid: pid * 2) == [
        7,
        "pp",
    ]
    with pytest.raises(UnsafePickleError, match="external object"):
        load_pickle(data, where="x", table=table)
    with pytest.raises(UnsupportedError):
        load_pickle(b"\x80\x02cm\nc\n)R.", where="x", table=table)


def test_python2_module_names_are_translated():
    assert read(pickle.dumps({1, 2}, 2)) == {1, 2}
    assert b"__builtin__" in pickle.dumps({1, 2}, 2)


def test_inert_records_are_dict_keys_by_value():
    make = b"cm\nIndex\n)\x81}X\x03\0\0\0fqnX\x01\0\0\0%csb"
    data = b"\x80\x02}(" + make % b"a" + b"K\x01" + make % b"b" + b"K\x02u."
    found = load_pickle(data, where="x", table={}, unknown="inert")
    key = Inert("m", "Index", newobj=True)
    key.build({"fqn": "b"})
    assert found[key] == 2
    twice = b"\x80\x02}(" + make % b"a" + b"K\x01" + make % b"a" + b"K\x02u."
    with pytest.raises(UnsupportedError, match="pickle"):
        load_pickle(twice, where="x", table={}, unknown="inert")


def test_changing_record_after_use_as_key_is_refused():
    data = b"\x80\x02cm\nK\n)\x81q\x00}h\x00K\x01s0h\x00}b."
    with pytest.raises(UnsupportedError, match="after use as a key"):
        load_pickle(data, where="x", table={}, unknown="inert")


def test_tree_depth_and_size_are_bounded():
    deep: list[object] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(UnsupportedError, match="deeply"):
        check_tree(deep, limit=10_000, where="x")
    wide = [[1] * 10] * 10
    assert check_tree(wide, limit=111, where="x") == 111
    with pytest.raises(UnsupportedError, match="without bound"):
        check_tree(wide, limit=110, where="x")


def test_walk_visits_each_node_once():
    shared = ["s"]
    record = Inert("m", "n", args=(shared, "arg"), state={"k": "state"})
    found = [n for n in walk_values({"a": [record, shared]}) if isinstance(n, str)]
    assert sorted(found) == ["arg", "s", "state"]


LEAVES: list[object] = [
    torch.Size([1, 2]),
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.strided,
    slice(1, 2),
    bytearray(b"abc"),
    datetime.datetime(2024, 1, 2, 3, 4),
    datetime.UTC,
    datetime.timedelta(1),
    np.float32(1.5),
    np.arange(3),
    random.Random(0).getstate(),
    collections.defaultdict(list, {1: [2]}),
    collections.defaultdict(set),
    collections.Counter("aab"),
    collections.deque([1, 2]),
    uuid.UUID(int=7),
    argparse.Namespace(a=1, b=[2]),
    io.BytesIO(b"12"),
    1j,
    b"",
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_harmless_leaves_are_read(leaf, protocol):
    check_tree(read(pickle.dumps(leaf, protocol)), limit=10_000, where="x")


def test_read_work_grows_linearly_with_records():
    def work(count):
        size = torch.Size([4, 4])
        names = (f"model.layers.{i}.weight" for i in range(count))
        records = {name: {"size": size, "at": [i, i * 100]} for i, name in enumerate(names)}
        assert len(read(pickle.dumps(records, 4))) == count

    assert effort.growth(work, 500) < 2.1
