"""``.metadata`` read entry by entry or opcode by opcode, and what is written, read by torch."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptctl.catalog import Blob, Box, Index
from ckptctl.errors import CkptError, RefusedError
from ckptctl.formats.base import OutputTensor, TensorPlace
from ckptctl.formats.dcp import metadata_writer as dcp_metadata_writer
from ckptctl.formats.dcp.metadata import (
    TABLE,
    DecodedMetadata,
    Item,
    Origin,
    decode_metadata,
    extract_metadata_leaves,
    extract_origin,
    list_path_notes,
)
from ckptctl.formats.dcp.metadata_scan import Scanner
from ckptctl.formats.dcp.metadata_writer import encode_metadata, encode_tensor_metadata
from ckptctl.storage.pickles.pickle_reader import load_pickle
from tests.sweeps import one_in

SHARED, MANY, OWN = "sizes are shared", "many ranks", "many ranks, objects are shared"
SEVERAL = "ranks have several chunks, and objects"
FILES = (
    *("dcp-rank-local/w2/ckpt/__1.metadata", "dcp/dcp_2d/ckpt/.metadata", SHARED, SEVERAL),
    *(MANY, OWN),
)


def pickle_of(data: Path, name: str) -> bytes:
    if name in (MANY, OWN):
        return pickle.dumps(of_many_ranks(shared=name == OWN), protocol=4)
    if name == SEVERAL:
        return pickle.dumps(of_several(), protocol=4)
    if name != SHARED:
        return (data / name).read_bytes()
    metadata = pickle.loads((data / FILES[0]).read_bytes())
    sizes: dict[torch.Size, torch.Size] = {}
    for leaf in metadata.state_dict_metadata.values():
        if isinstance(leaf, TensorStorageMetadata):
            leaf.size = sizes.setdefault(leaf.size, leaf.size)
    return pickle.dumps(metadata, protocol=4)


def of_many_ranks(*, shared: bool) -> Metadata:
    """Return what 150 ranks save of three tensors; frames of the pickle end within entries."""
    entries: dict[str, Any] = {
        f"große.{rows}": TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size((rows, 70_000)), []
        )
        for rows in (150, 300, 75)
    }
    storage = {}
    for rank in range(150):
        for number, (name, entry) in enumerate(entries.items()):
            rows = entry.size[0] // 150 or 1
            if rank * rows >= entry.size[0]:
                continue
            offsets, sizes = torch.Size((rank * rows, 0)), torch.Size((rows, 70_000))
            own = (name, offsets) if shared else pickle.loads(pickle.dumps((name, offsets)))
            index = MetadataIndex(own[0], own[1], len(entry.chunks) + 200)
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[index] = _StorageInfo(f"__{rank}_0.distcp", number << 30, rows * 280_000)
    return Metadata(entries, {name: (name,) for name in entries}, storage)


def of_several() -> Metadata:
    """Return what 20 ranks save that each have two rows of a tensor, of one name, and an object."""
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((40, 7)), [])
    entries: dict[str, Any] = {"rows": entry}
    storage = {}
    for rank in range(20):
        name, other, file = pickle.loads(pickle.dumps(("rows", f"o.{rank}", f"__{rank}_0.distcp")))
        for row in (2 * rank, 2 * rank + 1):
            offsets = torch.Size((row, 0))
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size((1, 7))))
            storage[MetadataIndex(name, torch.Size((row, 0)), row)] = _StorageInfo(file, 9 * row, 9)
        entries[other] = BytesStorageMetadata()
        storage[MetadataIndex(other)] = _StorageInfo(file, 900, 5)
    return Metadata(entries, None, storage)


def slowly(raw: bytes) -> DecodedMetadata:
    root = load_pickle(raw, where="here", table=TABLE)
    leaves = extract_metadata_leaves(root, "here")
    return DecodedMetadata(leaves, extract_origin(root), list_path_notes(root, leaves))


def outcome(read: Any, *arguments: Any) -> object:
    """Return what is read, or all that the error says."""
    try:
        return read(*arguments)
    except CkptError as error:
        return type(error), error.what, error.where, error.why, error.hint


@pytest.mark.parametrize("name", FILES)
def test_entry_scanner_matches_opcode_interpreter(data: Path, name: str) -> None:
    raw = pickle_of(data, name)
    scanner = Scanner()
    load_pickle(raw, where="here", table=TABLE, hook=scanner)
    assert scanner.entries > 30
    assert decode_metadata(raw, "here") == slowly(raw)


def test_rank_names_and_objects_do_not_break_entry_scanning(data: Path) -> None:
    scanner = Scanner()
    load_pickle(pickle_of(data, SEVERAL), where="here", table=TABLE, hook=scanner)
    assert scanner.entries == 40 + 60 - 2, "the first chunk and place are read by opcodes"


@pytest.mark.parametrize("name", [MANY, OWN])
def test_only_entries_across_pickle_frames_are_read_by_opcode(data: Path, name: str) -> None:
    raw = pickle_of(data, name)
    scanner = Scanner()
    load_pickle(raw, where="here", table=TABLE, hook=scanner)
    assert raw.count(b"\x95") > 1
    assert scanner.entries > 0.95 * 2 * (150 + 150 + 75)


@pytest.mark.parametrize("times", [100, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_in(3, FILES))
def test_damaged_metadata_has_same_outcome_in_both_decoders(
    data: Path, name: str, times: int
) -> None:
    raw = pickle_of(data, name)
    chance = random.Random(5)
    for _ in range(times if len(raw) < 1 << 15 else times // 10):
        broken = bytearray(raw)
        for _ in range(chance.choice((1, 1, 2))):
            broken[chance.randrange(len(raw))] = chance.choice((chance.randrange(256), *b"hK)\x94"))
        assert outcome(decode_metadata, bytes(broken), "here") == outcome(slowly, bytes(broken))


def test_wrong_memo_reference_has_same_outcome_in_both_decoders(
    data: Path,
) -> None:
    raw = pickle_of(data, FILES[1])
    places = [match.start(1) for match in re.finditer(rb"h(.)", raw, re.DOTALL)]
    for at in places[:: len(places) // 30]:
        for step in (-1, 1):  # the name of a class stands before it
            other = raw[:at] + bytes(((raw[at] + step) % 256,)) + raw[at + 1 :]
            assert outcome(decode_metadata, other, "here") == outcome(slowly, other)


@pytest.mark.parametrize("opcodes", [b"0", b"2", b"\x94", b"00"], ids=["POP", "DUP", "PUT", "2"])
def test_stack_opcodes_have_same_outcome_in_both_decoders(data: Path, opcodes: bytes) -> None:
    raw = pickle_of(data, MANY)
    ends = [match.end() for match in re.finditer(rb"ub(?=[hj])", raw, re.DOTALL)]
    at = ends[350]  # a chunk of the last tensor
    moved = raw[:at] + opcodes + raw[at:]
    assert outcome(decode_metadata, moved, "here") == outcome(slowly, moved)


@pytest.mark.parametrize("name", one_in(3, FILES))
def test_misplaced_entries_have_same_outcome_in_both_decoders(data: Path, name: str) -> None:
    raw = pickle_of(data, name)
    ends = [at + 2 for at in range(len(raw)) if raw[at : at + 2] == b"ub"]
    chance = random.Random(6)
    for _ in range(100 if len(raw) < 1 << 15 else 5):
        start, end = sorted(chance.sample(ends, 2))
        to = chance.choice(ends)
        for moved in (raw[:start] + raw[end:], raw[:to] + raw[start:end] + raw[to:]):
            assert outcome(decode_metadata, moved, "here") == outcome(slowly, moved)


@pytest.mark.parametrize(
    "name",
    one_in(2, [*FILES[:4], *(pytest.param(name, marks=pytest.mark.slow) for name in FILES[4:])]),
)
def test_duplicate_storage_key_is_refused_by_both_decoders(data: Path, name: str) -> None:
    raw = pickle_of(data, name)
    ends = [at + 2 for at in range(len(raw)) if raw[at : at + 2] == b"ub"]
    refused = 0
    for start, end in zip(ends[-30:-2], ends[-28:], strict=True):
        twice = raw[:end] + raw[start:end] + raw[end:]
        found = outcome(slowly, twice)
        assert outcome(decode_metadata, twice, "here") == found
        refused += isinstance(found, tuple) and "same key twice" in str(found)
    assert refused > 5


SHAPES = {
    "model.scalar": (),
    "model.vector": (7,),
    "model.empty": (0, 3),
    "model.cube": (2, 3, 70_000),
    "model.four": (1, 2, 3, 4),
    "model.große": (1 << 33, 2),
    "n" * 300: (5, 5),
}


def written(count: int = 1) -> tuple[bytes, dict[str, list[Box]]]:
    """Return metadata of tensors and other leaves, and the boxes in it."""
    tensors = [
        OutputTensor(name, "bfloat16", shape, ("model", name[6:]), None, name.endswith("r"))
        for name, shape in SHAPES.items()
    ]
    tensors += [OutputTensor(f"t.{n}", "float32", (count,), ("t", Index(n))) for n in range(3)]
    boxes = {t.name: [Box.whole(t.shape)] for t in tensors[:-3]}
    boxes |= {t.name: [Box((row,), (1,)) for row in range(count)] for t in tensors[-3:]}
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {
        (name, box.offsets): Item(f"__{n % 3}_0.distcp", n << 20, 1000 + n)
        for name, found in boxes.items()
        for n, box in enumerate(found)
    }
    blob = Blob("step", ("step",))
    items["step", None] = Item("__0_1.distcp", 0, 1 << 40)
    places = {name: [TensorPlace(box, 0) for box in found] for name, found in boxes.items()}
    return encode_metadata(tensors, [blob], places, items), boxes


@pytest.mark.parametrize("count", one_in(3, [1, 2, 1000, 2001]))
def test_written_metadata_loads_in_torch(count: int) -> None:
    raw, boxes = written(count)
    read = pickle.loads(raw)
    assert isinstance(read, Metadata)
    for name, found in boxes.items():
        entry = read.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.chunks == [
            ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in found
        ]
        assert tuple(entry.size) == SHAPES.get(name, (count,))
        assert entry.properties.requires_grad == name.endswith("r")
    assert read.planner_data is not None
    assert read.planner_data["t.1"] == ("t", 1)
    assert len(read.storage_data) == 1 + sum(map(len, boxes.values()))
    assert next(iter(read.storage_data)).fqn == "model.scalar"


@pytest.mark.parametrize("count", one_in(2, [1, 2001]))
def test_written_metadata_decodes_equally_in_both_decoders(count: int) -> None:
    raw, boxes = written(count)
    assert decode_metadata(raw, "here") == slowly(raw)
    leaves = slowly(raw).leaves
    assert {n: list(leaf.extents.boxes) for n, leaf in leaves.items() if leaf.dtype} == boxes
    assert leaves["step"].item == Item("__0_1.distcp", 0, 1 << 40)


@pytest.mark.parametrize("origin", [Origin(), Origin("a" * 32), Origin("", 3), Origin("b", 70_000)])
def test_save_id_is_stored_in_torch_storage_meta(origin: Origin) -> None:
    tensor = OutputTensor("save_id", "float32", (4,), ("modules",))
    made = encode_tensor_metadata(
        [tensor], [[Box((0,), (4,))]], [("save_id", [((0,), "x", 0, 16)])]
    )
    values = [(Blob("ckptctl", ("version",)), Item("x", 16, 2))]
    raw = b"".join(made.add_values(values, origin))
    found, read = decode_metadata(raw, "here"), pickle.loads(raw)
    assert (found.origin, slowly(raw)) == (origin, found)
    assert list(found.leaves) == ["save_id", "ckptctl"]
    assert read.version == "1.0.0"
    expected = StorageMeta(save_id=origin.save_id) if origin.save_id else None
    assert read.storage_meta == expected
    assert getattr(read, "ckptctl", {}) == ({"world_size": origin.world} if origin.world else {})


def test_stock_dcp_save_id_is_read(data: Path) -> None:
    raw = (data / "dcp/dcp_2d/ckpt/.metadata").read_bytes()
    assert decode_metadata(raw, "here").origin == Origin(pickle.loads(raw).storage_meta.save_id)


def test_metadata_over_size_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = OutputTensor("a", "float32", (4,), ("a",))
    box = Box((0,), (4,))
    written = encode_tensor_metadata([tensor], [[box]], [("a", [((0,), "__0_0.distcp", 0, 16)])])
    length = sum(map(len, written.add_values([])))
    monkeypatch.setattr(dcp_metadata_writer, "MAX_METADATA", length)
    assert sum(map(len, written.add_values([]))) == length
    monkeypatch.setattr(dcp_metadata_writer, "MAX_METADATA", length - 1)
    with pytest.raises(RefusedError, match="too large to read"):
        written.add_values([])


def test_metadata_with_shared_boxes_and_batches_loads_in_torch() -> None:
    rows = [Box((row, 0), (1, 3)) for row in range(2500)]
    whole = [Box((), ())]
    tensors = [
        OutputTensor("a", "float32", (2500, 3), ("a",)),
        OutputTensor("b", "float16", (2500, 3), ("b",)),
        OutputTensor("c", "int64", (), ("c",)),
    ]
    boxes = [rows, rows, whole]
    places = [
        (
            tensor.name,
            [(box.offsets, f"__{n % 3}_0.distcp", n % 7, 12) for n, box in enumerate(own)],
        )
        for tensor, own in zip(tensors, boxes, strict=True)
    ]
    found = pickle.loads(b"".join(encode_tensor_metadata(tensors, boxes, places).add_values([])))
    for tensor, own in zip(tensors, boxes, strict=True):
        chunks = found.state_dict_metadata[tensor.name].chunks
        assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
            (b.offsets, b.sizes) for b in own
        ]
    said = [
        (index.fqn, tuple(index.offset), one.relative_path, one.offset, one.length)
        for index, one in found.storage_data.items()
    ]
    assert said == [(name, *one) for name, some in places for one in some]
