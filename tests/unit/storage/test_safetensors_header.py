"""Safetensors headers against the reference implementation."""

import json

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptctl import dtypes
from ckptctl.errors import CkptError, DamagedError, RefusedError, UnsupportedError
from ckptctl.storage.files import source_files
from ckptctl.storage.safetensors_header import encode_safetensors_header, read_safetensors_header
from tests import effort, hostile

HELD = [name for name, found in dtypes.BY_NAME.items() if found.safetensors]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def read(path):
    with source_files(path.parent) as files:
        return read_safetensors_header(files, path.name)


def write(path, tensors, metadata):
    header, offsets = encode_safetensors_header(tensors, metadata)
    sizes = [torch.Size(shape).numel() * dtypes.get_itemsize(dtype) for _, dtype, shape in tensors]
    data = b"".join(bytes([i % 2]) * size for i, size in enumerate(sizes))
    path.write_bytes(header + data)
    assert len(header) % 8 == 0
    assert offsets[:1] in ((), (len(header),))
    return offsets


def test_headers_written_by_safetensors_are_read(tmp_path):
    tensors = {
        name: torch.zeros(2, 3, 4, dtype=torch.uint8).view(getattr(torch, name))
        if dtypes.get_itemsize(name) == 1
        else torch.zeros(2, 3, 4, dtype=getattr(torch, name))
        for name in HELD
        if name != "bool"
    }
    tensors |= {"bool": torch.ones(3, dtype=torch.bool), "scalar": torch.tensor(2.5)}
    tensors |= {"none": torch.zeros(0, 5), "é\U0001f600\n": torch.ones(1)}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt", "ключ": "значение"})
    found = read(tmp_path / "a")
    assert found.metadata == {"format": "pt", "ключ": "значение"}
    assert found.tensors.keys() == tensors.keys()
    raw = (tmp_path / "a").read_bytes()
    for name, (dtype, shape, begin, end) in found.tensors.items():
        tensor = tensors[name]
        assert (dtype, shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        view = tensor.reshape(-1)
        assert raw[begin:end] == bytes(view.view(torch.uint8).tolist() if view.numel() else ())


def test_written_headers_load_in_safetensors(tmp_path):
    tensors = [(name, name, (3, 4)) for name in HELD] + [
        ("scalar", "float32", ()), ("none", "bfloat16", (0, 5)), ('quote"\\\n', "int8", (3,)),
    ]  # fmt: skip
    offsets = write(tmp_path / "a", tensors, {"format": "pt"})
    loaded = load_file(tmp_path / "a")
    assert list(loaded) and loaded.keys() == {name for name, _, _ in tensors}
    for name, dtype, shape in tensors:
        assert loaded[name].dtype == getattr(torch, dtype)
        assert tuple(loaded[name].shape) == shape
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = read(tmp_path / "a")
    assert list(found.tensors) == [name for name, _, _ in tensors]
    assert [span[2] for span in found.tensors.values()] == list(offsets)


@given(
    st.dictionaries(
        TEXT.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(HELD), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    ),
    st.dictionaries(TEXT, TEXT, max_size=3),
)
def test_headers_round_trip(tmp_path_factory, tensors, metadata):
    folder = tmp_path_factory.getbasetemp() / "safetensors"
    folder.mkdir(exist_ok=True)
    listed = [
        (name, dtype, tuple(shape) or ((1,) if dtype.startswith("float4") else ()))
        for name, (dtype, shape) in tensors.items()
    ]
    write(folder / "a", listed, metadata)
    found = read(folder / "a")
    assert [(name, *span[:2]) for name, span in found.tensors.items()] == listed
    assert found.metadata == metadata
    with safetensors.safe_open(folder / "a", "pt") as file:
        assert set(file.keys()) == set(tensors)


@pytest.mark.parametrize("name", list(hostile.evil_headers()))
def test_malicious_headers_are_refused(tmp_path, name):
    (tmp_path / "a").write_bytes(hostile.evil_headers()[name])
    with pytest.raises((DamagedError, UnsupportedError)) as error:
        read(tmp_path / "a")
    assert error.value.where == str(tmp_path / "a")


REFERENCE_ACCEPTS = {
    "duplicate-tensor", "duplicate-other-dtype", "leading-space", "extra-field", "rank-101",
    "rank-100000", "f6",
}  # fmt: skip


@pytest.mark.parametrize("name", list(hostile.evil_headers()))
def test_safetensors_accepts_only_known_malicious_headers(tmp_path, name):
    """Shows which of the corpus are our own rules and that the others are really malformed."""
    (tmp_path / "a").write_bytes(hostile.evil_headers()[name])
    try:
        with safetensors.safe_open(tmp_path / "a", "pt") as file:
            list(file.keys())
        accepted = True
    except Exception:
        accepted = False
    assert accepted == (name in REFERENCE_ACCEPTS)


@settings(max_examples=100)
@given(st.data())
def test_mutated_headers_accepted_here_load_in_safetensors(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    text = b'{"__metadata__":{"a":"b"},"x":{"dtype":"U8","shape":[2,1],"data_offsets":[0,2]}}'
    raw = bytearray(hostile.header_file(text, b"ab"))
    for _ in range(data.draw(st.integers(1, 3))):
        alphabet = b'{}[]":,0123456789-+.eE \\\x00u'
        raw[data.draw(st.integers(8, len(raw) - 1))] = data.draw(st.sampled_from(list(alphabet)))
    (folder / "a").write_bytes(raw)
    try:
        read(folder / "a")
    except CkptError:
        return
    with safetensors.safe_open(folder / "a", "pt") as file:
        list(file.keys())


def test_packed_float4_shape_counts_like_torch(tmp_path):
    write(tmp_path / "a", [("w", "float4_e2m1fn_x2", (4, 3))], {})
    raw = (tmp_path / "a").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["w"] == {"dtype": "F4", "shape": [4, 6], "data_offsets": [0, 12]}
    assert read(tmp_path / "a").tensors["w"][:2] == ("float4_e2m1fn_x2", (4, 3))


@pytest.mark.parametrize(
    "tensors",
    [
        [("__metadata__", "uint8", (1,))],
        [("\ud800", "uint8", (1,))],
        [("a", "uint8", (1,)), ("a", "uint8", (1,))],
        [("a", "complex128", (1,))],
        [("a", "qint8", (1,))],
        [("a", "uint8", (1,) * 65)],
        [("a", "float4_e2m1fn_x2", ())],
    ],
)
def test_unrepresentable_tensors_are_refused(tensors):
    with pytest.raises(RefusedError):
        encode_safetensors_header(tensors, {})


def test_metadata_with_lone_surrogate_is_refused():
    with pytest.raises(RefusedError):
        encode_safetensors_header([], {"a": "\udc00"})


def test_files_without_tensors_are_read(tmp_path):
    (tmp_path / "a").write_bytes(hostile.header_file({"__metadata__": None}))
    assert read(tmp_path / "a").tensors == {}
    header, offsets = encode_safetensors_header([], {})
    (tmp_path / "b").write_bytes(header)
    assert offsets == ()
    assert read(tmp_path / "b").tensors == {}


def test_header_of_large_sparse_tensor_is_read(tmp_path):
    header, offsets = encode_safetensors_header(
        [("a", "uint8", (6 << 30,)), ("b", "int8", (3,))], {}
    )
    with (tmp_path / "a").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + (6 << 30) + 3)
    assert read(tmp_path / "a").tensors["b"] == ("int8", (3,), offsets[1], offsets[1] + 3)


def test_header_work_grows_linearly_with_tensors(tmp_path):
    def work(count):
        tensors = [(f"model.layers.{i}.weight", "bfloat16", (4, 4)) for i in range(count)]
        write(tmp_path / "a", tensors, {"format": "pt"})
        assert len(read(tmp_path / "a").tensors) == count

    assert effort.growth(work, 1000) < 2.1
