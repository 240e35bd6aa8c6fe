"""The pickle writer against Python's and torch's own pickles."""

import collections
import datetime
import io
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given

from ckptctl import dtypes
from ckptctl.errors import RefusedError
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.pickles.pickle_writer import StorageTensor, dump_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from tests import effort
from tests.unit.storage.pickles.test_reader import LEAVES, OBJECTS


def torch_pickle(obj):
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return zipfile.ZipFile(buffer).read("archive/data.pkl")


@given(OBJECTS)
def test_plain_objects_round_trip(obj):
    assert pickle.loads(dump_pickle(obj)) == obj


PLAIN = {
    "lr": 1e-3,
    "integers": [0, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 31), -(1 << 31) - 1, 1 << 63],
    "long": [1 << 5000, -(1 << 5000), 255**9, -(1 << 63), -(1 << 39), -(1 << 40)],
    "bytes": b"xyz\xff",
    "flags": [True, None, False],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "complex": 1 + 2j,
    "one": [1],
    "many": list(range(2500)),
    "odict": collections.OrderedDict(a=1),
    "bytearray": bytearray(b"q"),
    "text": "é\U0001f600",
    "slice": slice(1, 2),
    "map": {i: str(i) for i in range(1500)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_pickle_bytes_match_c_pickler(name):
    obj = {name: PLAIN[name]}
    assert dump_pickle(obj) == pickle.dumps(obj, 2)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_tensor_pickle_matches_torch():
    tensors, stored = {}, {}
    for position, (name, found) in enumerate(dtypes.BY_NAME.items()):
        tensors[name] = torch.empty(3, 2, dtype=getattr(torch, name))
        stored[name] = StorageTensor(str(position), 6 * found.itemsize, name, 0, (3, 2), (2, 1))
    count = len(tensors)
    base = torch.zeros(4, 5)
    tensors |= {"scalar": torch.zeros((), requires_grad=True), "empty": torch.zeros(0, 3)}
    tensors |= {"view": base[1:, 2], "t": base.t(), "deep": torch.zeros(2, 2, 2, 300)}
    key = [str(count + i) for i in range(4)]
    stored["scalar"] = StorageTensor(key[0], 4, "float32", 0, (), (), True)
    stored["empty"] = StorageTensor(key[1], 0, "float32", 0, (0, 3), (3, 1))
    stored["view"] = StorageTensor(key[2], 80, "float32", 7, (3,), (5,))
    stored["t"] = StorageTensor(key[2], 80, "float32", 0, (5, 4), (1, 5))
    stored["deep"] = StorageTensor(key[3], 9600, "float32", 0, (2, 2, 2, 300), (1200, 600, 300, 1))
    leaves = {name: PLAIN[name] for name in ("lr", "flags", "tuples", "odict", "bytes")}
    assert dump_pickle(stored | leaves) == torch_pickle(tensors | leaves)


def test_tied_tensor_pickle_matches_torch():
    tensor = torch.arange(3.0)
    stored = StorageTensor("0", 12, "float32", 0, (3,), (1,))
    assert dump_pickle(stored) == torch_pickle(tensor)
    assert dump_pickle({"a": stored, "b": [stored]}) == torch_pickle({"a": tensor, "b": [tensor]})


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_leaves_round_trip_through_reader_and_writer(leaf, protocol):
    found = load_pickle(pickle.dumps(leaf, protocol), where="x", table=TORCH_TABLE)
    back = pickle.loads(dump_pickle({"leaf": found}))["leaf"]
    assert type(back) is type(leaf)
    if isinstance(leaf, io.BytesIO):
        assert back.getvalue() == leaf.getvalue()
    elif isinstance(leaf, np.ndarray):
        np.testing.assert_array_equal(back, leaf)
    else:
        assert back == leaf
    if isinstance(leaf, collections.defaultdict):
        assert back.default_factory is leaf.default_factory


def test_state_dict_metadata_round_trips():
    state = torch.nn.BatchNorm1d(2).state_dict()
    plain = collections.OrderedDict((name, 1) for name in state)
    plain._metadata = state._metadata
    found = load_pickle(pickle.dumps(plain), where="x", table=TORCH_TABLE)
    back = pickle.loads(dump_pickle(found))
    assert back._metadata == state._metadata
    assert back == plain


def test_shared_leaf_stays_shared():
    date = datetime.date(2024, 1, 2)
    found = load_pickle(pickle.dumps([date, date], 2), where="x", table=TORCH_TABLE)
    back = pickle.loads(dump_pickle(found))
    assert back == [date, date]
    assert back[0] is back[1]


def test_shared_and_cyclic_containers_round_trip():
    shared = [1]
    cycle: list[object] = [shared, shared]
    cycle.append(cycle)
    found = pickle.loads(dump_pickle(cycle))
    assert found[0] is found[1]
    assert found[2] is found


@pytest.mark.parametrize("value", [object(), torch.float32, np.float32(1), pickle, len])
def test_unsupported_objects_are_refused(value):
    with pytest.raises(RefusedError, match="cannot be written"):
        dump_pickle({"a": [value]})


def test_deeply_nested_object_is_refused():
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RefusedError, match="deeply"):
        dump_pickle(deep)


def test_set_pickle_is_independent_of_insertion_order():
    names = [str(i) for i in range(50)]
    shuffled = names[:]
    random.Random(1).shuffle(shuffled)
    assert dump_pickle(set(names)) == dump_pickle(set(shuffled))


def test_write_work_and_bytes_grow_linearly_with_tensors():
    def work(count):
        state = {
            f"model.layers.{i}.weight": StorageTensor(str(i), 32, "bfloat16", 0, (4, 4), (4, 1))
            for i in range(count)
        }
        assert len(dump_pickle(state)) < count * 130

    assert effort.growth(work, 1000) < 2.1
