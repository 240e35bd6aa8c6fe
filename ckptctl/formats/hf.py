"""Hugging Face directories: safetensors, one file or shards with an index, and older ``.bin``.

Sources: the safetensors format specification; ``huggingface_hub/serialization`` for the index and
the names of shards; ``transformers/utils/__init__.py`` for the names of weight files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats import torch_file
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import (
    AS_IT_IS,
    Output,
    OutputRequest,
    OutputTensor,
    Place,
    ReadOptions,
    Sniff,
    WritableFormat,
    absent,
    constant,
    document,
)
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.planner.shards import fill, grouped
from ckptctl.storage.files import SourceFiles, contained
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.safetensors_header import encode_header, read_header

INDEX = ".safetensors.index.json"
BIN = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_PART = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")
RANK = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
_OTHER = ("adapter_model", "consolidated", "optimizer", "model.sharded")


class HfFormat(WritableFormat):
    """Safetensors with ``config.json`` beside them."""

    name = "hf"
    title = "Hugging Face: safetensors (or pytorch_model*.bin, read only) with config.json"
    layout = "hf"
    other_layouts = True
    stem: ClassVar[str] = "model"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if path.is_file():
            foreign = path.name.startswith(("adapter_model", "consolidated"))
            if foreign or RANK.fullmatch(path.name):
                return None
            named = path.name.endswith((".safetensors", INDEX)) or path.name in BIN
            return Sniff(path.name) if named or torch_file.HF_BIN.fullmatch(path.name) else None
        if not path.is_dir():
            return None
        main = _main_files(path)
        return Sniff(listed(main)) if main else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        root = path if path.is_dir() else path.parent
        main = _chosen(path)
        with SourceFiles(root) as files:
            if main.endswith("index.json"):
                return self._read_index(files, path, main)
            if main.endswith(".bin"):
                whole = read_bin(files, main)
                return self._catalog(files, path, whole.tensors, {}, [main], whole.notes, None)
            names = _set_of(path, main)
            return self._read_safetensors(files, path, names)

    def _read_safetensors(self, files: SourceFiles, path: Path, names: list[str]) -> Catalog:
        tensors: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for name in names:
            found, strings = read_shard(files, name)
            merge(tensors, found, name)
            metadata |= strings
        notes = () if len(names) == 1 else (f"{len(names)} shards without an index",)
        return self._catalog(files, path, tensors, metadata, names, notes, None)

    def _read_index(self, files: SourceFiles, path: Path, main: str) -> Catalog:
        index = read_json(files, main)
        weight_map, strings = _checked_index(index, str(files.root / main))
        tensors: dict[str, TensorEntry] = {}
        metadata = dict(strings)
        shards = list(dict.fromkeys(weight_map.values()))
        notes: dict[str, None] = {}
        _require_all(files, shards, main)
        for name in shards:
            if name.endswith(".safetensors"):
                found, more = read_shard(files, name)
            else:
                contents = read_bin(files, name)
                found, more = contents.tensors, {}
                notes |= dict.fromkeys(contents.notes)
            _agree(weight_map, found, name, str(files.root / main))
            tensors |= found
            metadata |= {key: value for key, value in more.items() if key != "format"}
        ordered = {name: tensors[name] for name in weight_map}
        return self._catalog(files, path, ordered, metadata, shards, tuple(notes), main)

    def _catalog(
        self,
        files: SourceFiles,
        path: Path,
        tensors: dict[str, TensorEntry],
        metadata: Mapping[str, str],
        names: Sequence[str],
        notes: tuple[str, ...],
        index: str | None,
    ) -> Catalog:
        root = files.root
        used = {*names, index} if index else set(names)
        assets = side_files(root, exclude=used)
        stray = [item for item in _weights(root) if item not in used]
        if stray:
            notes = (*notes, f"not part of this checkpoint: {listed(stray)}")
        notes = (*notes, *left_behind(root, exclude=used))
        return Catalog(
            root=str(root),
            path=str(path),
            format=self.name,
            files={name: files.size(name) for name in names},
            tensors=_with_aliases(tensors, metadata),
            assets=assets,
            documents=documents(root),
            metadata=dict(metadata),
            notes=notes,
        )

    def holds(self, dtype: str) -> bool:
        """Return whether safetensors has a code for *dtype*."""
        return dtype in dtypes.BY_NAME and dtypes.BY_NAME[dtype].safetensors is not None

    def lay_out(self, request: OutputRequest) -> Output:
        """See :meth:`WritableFormat.lay_out`."""
        self.refuse_unheld(request.tensors)
        kept = [tensor for tensor in request.tensors if tensor.alias_of is None]
        aliases = {t.name: t.alias_of for t in request.tensors if t.alias_of is not None}
        by_name = {tensor.name: tensor for tensor in kept}
        shards = _shards(kept, request)
        names = request.like_files
        if not names or not all(name.endswith(".safetensors") for name in names):
            names = _shard_names(self.stem, len(shards))
        writer = Writer(aliases if len(shards) == 1 else {})
        for file, shard in zip(names, shards, strict=True):
            writer.add(file, [by_name[name] for name in shard])
        if len(names) > 1:
            placed = zip(names, shards, strict=True)
            writer.files.append(_index(self.stem, kept, placed, aliases))
        left_out = {blob.name: "a safetensors file holds tensors only" for blob in request.blobs}
        return Output(tuple(writer.files), tuple(writer.records), writer.boxes, (), left_out)


class Writer:
    """Collects files, records and boxes.

    Args:
        aliases: For each tensor that is left out as shared the one that is kept.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.metadata = {"format": "pt", **aliases}
        self.files: list[OutputFile] = []
        self.records: list[Record] = []
        self.boxes: dict[str, tuple[Place, ...]] = {}

    def add(self, file: str, tensors: Sequence[OutputTensor]) -> None:
        """Lay out one file with *tensors* in their order."""
        header, offsets = encode_header(
            [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], self.metadata
        )
        size = len(header)
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.boxes[tensor.name] = (Place(Box.whole(tensor.shape), len(self.records)),)
            self.records.append(Record(tensor.name, file, offset, tensor.nbytes))
            size = offset + tensor.nbytes
        self.files.append(OutputFile(file, size, constant(header)))


def _shards(kept: Sequence[OutputTensor], request: OutputRequest) -> list[list[str]]:
    if request.like is not None:
        return grouped([t.name for t in kept], request.like, len(request.like_files))
    return fill(((t.name, t.nbytes) for t in kept), request.max_shard_size)


def _shard_names(stem: str, count: int) -> tuple[str, ...]:
    if count == 1:
        return (f"{stem}.safetensors",)
    return tuple(f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))


def _index(
    stem: str,
    kept: Sequence[OutputTensor],
    shards: Iterator[tuple[str, list[str]]],
    aliases: Mapping[str, str],
) -> OutputFile:
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in kept), **aliases},
        "weight_map": {name: file for file, shard in shards for name in shard},
    }
    return document(f"{stem}{INDEX}", json.dumps(content, indent=2).encode() + b"\n")


def read_shard(files: SourceFiles, name: str) -> tuple[dict[str, TensorEntry], Mapping[str, str]]:
    """Return the tensors of one safetensors file, and its metadata."""
    header = read_header(files, name)
    tensors = {
        key: TensorEntry(
            key, dtype, shape, (Extent(Box.whole(shape), name, begin, end - begin),), (key,)
        )
        for key, (dtype, shape, begin, end) in header.tensors.items()
    }
    return tensors, header.metadata


def read_bin(files: SourceFiles, name: str) -> torch_file.Contents:
    """Return what a ``torch.save`` file holds, which has to be tensors only.

    Raises:
        DamagedError: It holds something else, or is damaged.
    """
    found = torch_file.read_contents(files, name)
    if found.blobs:
        raise DamagedError(
            "there is more than tensors in this file",
            where=str(files.root / name),
            why=listed(list(found.blobs)),
            hint="read it with `--from torch`",
        )
    return found


def _with_aliases(
    tensors: dict[str, TensorEntry], metadata: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Add the tensors that a writer dropped as shared and recorded as ``{dropped: kept}``."""
    from dataclasses import replace

    aliases = {
        dropped: replace(tensors[kept], name=dropped, path=(dropped,), alias_of=kept)
        for dropped, kept in metadata.items()
        if kept in tensors and dropped not in tensors and dropped != "format"
    }
    return tensors | aliases


def _main_files(path: Path) -> list[str]:
    """The files that describe a whole model; more than one is a contradiction."""
    names = sorted(item.name for item in path.iterdir() if item.is_file())
    indices = [n for n in names if n.endswith(INDEX) and not n.startswith(_OTHER)]
    singles = [n for n in names if n.endswith(".safetensors") and not n.startswith(_OTHER)]
    singles = [n for n in singles if not RANK.fullmatch(n)]
    if indices:
        return indices + [n for n in singles if n == "model.safetensors" and _unlisted(path, n)]
    if singles:
        return singles
    return [n for n in BIN if n in names][:1]


def _unlisted(path: Path, name: str) -> bool:
    return not any(
        f'"{name}"' in (path / index.name).read_text(errors="replace")
        for index in path.glob(f"*{INDEX}")
        if index.stat().st_size < 100_000_000
    )


def _chosen(path: Path) -> str:
    if path.is_file():
        if path.suffix == ".json" and not path.name.endswith("index.json"):
            raise _no_weights("this is no weight file", path)
        require_whole(path, [path.name], f"name the directory `{path.parent}`, or its index")
        return path.name
    main = _main_files(path)
    if not main:
        raise _no_weights("there are no weight files here", path)
    if _complete_set(main):
        return main[0]
    require_whole(path, main, "download the missing shards, and the index")
    if len(main) == 1:
        return main[0]
    raise FormatError(
        "several files could be the model",
        where=str(path),
        why=listed(main),
        hint=f"name one: `{path / main[0]}`",
    )


def _no_weights(what: str, path: Path) -> FormatError:
    return FormatError(
        what,
        where=str(path),
        why=f"expected *.safetensors, *{INDEX} or {' or '.join(BIN)}",
    )


def require_whole(path: Path, names: Sequence[str], hint: str) -> None:
    """Refuse some shards of a set; they are told by their names."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    kinds = {(match[1], match[3], match[4]) for match in matches}
    if len(matches) < len(names) or len(kinds) != 1:
        return
    stem, total, suffix = next(iter(kinds))
    numbers = {int(match[2]) for match in matches}
    first, last, width = min(1, *numbers), int(total), len(total)
    if max(numbers) > last:
        return
    count, missing = absent(
        numbers, first, last, lambda n: f"{stem}-{n:0{width}d}-of-{total}.{suffix}"
    )
    if count:
        raise DamagedError(
            f"{listed(names)}: only {len(names)} of {last - first + 1:,} shards",
            where=str(path),
            why=f"the model lacks {missing}",
            hint=hint,
        )


def _require_all(files: SourceFiles, shards: Sequence[str], main: str) -> None:
    missing = sorted(name for name in shards if not (files.root / name).exists())
    if missing:
        raise DamagedError(
            f"{len(missing)} of {len(shards)} shards are missing",
            where=str(files.root / main),
            why=listed(missing),
            hint="download them again",
        )


def _complete_set(names: Sequence[str]) -> bool:
    """Whether *names* are all of ``stem-00001-of-0000N.safetensors``."""
    stems = {name.rsplit("-", 3)[0] for name in names}
    expected = {
        f"{stem}-{i + 1:05d}-of-{len(names):05d}.safetensors"
        for stem in stems
        for i in range(len(names))
    }
    return len(stems) == 1 and set(names) == expected


def _set_of(path: Path, main: str) -> list[str]:
    return [main] if path.is_file() else sorted(_main_files(path))


def _weights(root: Path) -> list[str]:
    found = (item.name for item in root.iterdir() if item.is_file())
    return sorted(n for n in found if n.endswith((".safetensors", ".bin", ".pth", ".pt")))


def merge(tensors: dict[str, TensorEntry], found: Mapping[str, TensorEntry], name: str) -> None:
    """Add to *tensors* what was *found* in the shard called *name*.

    Raises:
        DamagedError: A tensor is there already.
    """
    twice = [key for key in found if key in tensors]
    if twice:
        other = tensors[twice[0]].extents[0].file
        raise DamagedError(
            f"`{twice[0]}` is in two shards", where=name, why=f"it is in `{other}` as well"
        )
    tensors |= found


def _checked_index(index: object, where: str) -> tuple[dict[str, str], dict[str, str]]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError("the index has no `weight_map`", where=where)
    for key, file in weight_map.items():
        if not isinstance(file, str):
            raise DamagedError(f"`weight_map` gives no file for `{key}`", where=where)
        contained(file, where)
    metadata = index.get("metadata") if isinstance(index, dict) else None
    strings = metadata.items() if isinstance(metadata, dict) else ()
    return weight_map, {key: value for key, value in strings if isinstance(value, str)}


def _agree(
    weight_map: Mapping[str, str], found: Mapping[str, TensorEntry], name: str, where: str
) -> None:
    expected = {key for key, file in weight_map.items() if file == name}
    missing = sorted(expected - found.keys())
    if missing:
        raise DamagedError(
            f"`{name}` lacks {len(missing)} tensors that the index places in it",
            where=where,
            why=listed(missing),
            hint="download the shard again",
        )
    extra = sorted(found.keys() - expected)
    if extra:
        raise DamagedError(
            f"`{name}` holds {len(extra)} tensors that the index does not place in it",
            where=where,
            why=listed(extra),
        )


FORMAT = HfFormat()
