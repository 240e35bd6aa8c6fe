"""Meta's checkpoints: ``consolidated.NN.pth``, one per model-parallel rank, and ``params.json``.

Sources: ``llama_models/checkpoint.py`` and ``fairscale/nn/model_parallel/layers.py`` for what each
rank holds. Which dimension of a tensor is divided is the family's knowledge, not the file's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl import families
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import DamagedError, FormatError, MappingError, listed
from ckptctl.formats import torch_file
from ckptctl.formats.assets import amended, documents, left_behind, side_files
from ckptctl.formats.base import (
    Output,
    OutputRequest,
    OutputTensor,
    Place,
    Sniff,
    WritableFormat,
    absent,
)
from ckptctl.planner.axes import Observation, solve
from ckptctl.planner.configs import read_sizes
from ckptctl.planner.detect import detect
from ckptctl.planner.layouts import Family, Stored
from ckptctl.planner.parallel import possible_repeats, split_axis
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.compare import equal
from ckptctl.storage.files import SourceFiles

LAYOUT = "meta"
_SHARD = torch_file.META_SHARD
Shard = Mapping[str, TensorEntry]


class MetaFormat(WritableFormat):
    """Model-parallel shards with ``params.json``."""

    name = "meta"
    title = "Meta: consolidated.NN.pth with params.json"
    layout = LAYOUT

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        folder = path if path.is_dir() else path.parent
        if path.is_file() and not _SHARD.fullmatch(path.name):
            return None
        shards = [item for item in folder.glob("consolidated*.pth") if _SHARD.fullmatch(item.name)]
        return Sniff(f"{len(shards)} consolidated.*.pth") if shards else None

    def read(self, path: Path, model_type: str | None = None) -> Catalog:
        """See :meth:`Format.read`.

        Raises:
            MappingError: There are several shards and no family, or several, can join them.
        """
        root = path if path.is_dir() else path.parent
        if path.is_file() and not _SHARD.fullmatch(path.name):
            raise _no_shards(path)
        names = _shards(root)
        with SourceFiles(root) as files:
            described = documents(root)
            read = [torch_file.read_contents(files, name) for name in names]
            joined = _Joined([found.tensors for found in read], names, described, model_type)
            tensors = joined.tensors(files)
            sizes = {name: files.size(name) for name in names}
        return Catalog(
            root=str(root),
            path=str(root),
            format=self.name,
            files=sizes,
            tensors=tensors,
            blobs=read[0].blobs,
            assets=side_files(root),
            documents=joined.documents,
            notes=(
                *joined.notes,
                *dict.fromkeys(note for found in read for note in found.notes),
                *left_behind(root),
            ),
        )

    def lay_out(self, request: OutputRequest) -> Output:
        """See :meth:`WritableFormat.lay_out`."""
        files: list[OutputFile] = []
        records: list[Record] = []
        boxes: dict[str, list[Place]] = {}
        of_rank = {tensor.name: _rank_boxes(tensor, request) for tensor in request.tensors}
        for rank in range(request.mp):
            parts = [_part(tensor, of_rank[tensor.name][rank]) for tensor in request.tensors]
            name = f"consolidated.{rank:02d}.pth"
            shard = torch_file.FORMAT.lay_out(replace(request, name=name, tensors=parts, blobs=()))
            for tensor, part in zip(request.tensors, parts, strict=True):
                if part.alias_of is None:
                    record = len(records) + shard.boxes[tensor.name][0].record
                    box = of_rank[tensor.name][rank]
                    boxes.setdefault(tensor.name, []).append(Place(box, record))
            files += [_shifted(file, len(records)) for file in shard.files]
            records += shard.records
        left_out = {blob.name: "Meta's files hold tensors only" for blob in request.blobs}
        return Output(
            tuple(files),
            tuple(records),
            {name: tuple(found) for name, found in boxes.items()},
            left_out=left_out,
        )


class _Joined:
    """Shards, and what the family says about joining them."""

    def __init__(
        self,
        shards: Sequence[Shard],
        names: Sequence[str],
        described: Mapping[str, Mapping[str, object]],
        model_type: str | None,
    ) -> None:
        self.shards, self.names = shards, names
        self.documents = dict(described)
        self.notes: tuple[str, ...] = ()
        self.ranks = len(shards)
        _same_keys(shards, names)
        self.known = self._known(model_type)

    def tensors(self, files: SourceFiles) -> dict[str, TensorEntry]:
        if self.ranks == 1:
            joined = dict(self.shards[0])
        else:
            repeats = self._repeats(files)
            joined = {key: self._join(files, key, repeats) for key in self.shards[0]}
        if self.known:
            self._check(joined)
        return joined

    @property
    def family(self) -> Family:
        """The family that says how to join the shards.

        Raises:
            MappingError: There is none.
        """
        if not self.known:
            raise MappingError(
                f"no known model type fits these {self.ranks} shards",
                where=self.names[0],
                why=f"their keys are {listed(list(self.shards[0]))}",
                hint="name it with `--model-type`; a shard may be missing",
            )
        return self.known[0]

    def _known(self, model_type: str | None) -> tuple[Family, ...]:
        """The families that the shards may be of; all of them divide tensors alike."""
        if model_type:
            return (families.family(model_type),)
        params = self.documents.get("params.json")
        shapes = {key: entry.shape for key, entry in self.shards[0].items()}
        found = detect(
            shapes,
            families.families(),
            self.documents.get("config.json"),
            params,
            ranks=self.ranks,
            prefer=LAYOUT,
        )
        fitting = [c for c in found.candidates if LAYOUT in (c.layout, *c.alike)]
        known = {c.family: families.family(c.family) for c in fitting}
        splits = {tuple(_split_of(f, key) for key in shapes) for f in known.values()}
        if len(splits) > 1 and self.ranks > 1:
            raise MappingError(
                f"the shards could be {' or '.join(known)}, which divide tensors differently",
                where=self.names[0],
                hint=f"say which with `--model-type {next(iter(known))}`",
            )
        return tuple(known.values())

    def _repeats(self, files: SourceFiles) -> int:
        """How many neighbouring ranks hold the same key/value head.

        config.json says it where there is one; else the bytes do. When all of them are equal
        (zeros, say) they say nothing.
        """
        params, config = self.documents.get("params.json"), self.documents.get("config.json")
        if params is None:
            return 1
        possible = possible_repeats(read_sizes(self.family, params=params), self.ranks)
        repeated = [key for key in self.shards[0] if self._is_repeated(key)]
        if not repeated or not possible:
            return 1
        stated = read_sizes(self.family, config).get("k") if config else None
        if stated is not None:
            repeats = self.ranks // stated if self.ranks % stated == 0 else 1
            self._require_copies(files, repeated, repeats)
        else:
            shown = (n for n in possible if all(self._copies(files, k, n) for k in repeated))
            repeats = next(shown, 1)
            if repeats == self.ranks:
                self.notes += ("all key/value heads are equal; they are kept as stored",)
                return 1
        if repeats > 1:
            self.notes += (f"each key/value head is stored {repeats} times; one is used",)
            kept = self.ranks // repeats
            self.documents["params.json"] = amended(params, "n_kv_heads", kept)
        return repeats

    def _require_copies(self, files: SourceFiles, repeated: Sequence[str], repeats: int) -> None:
        differ = [key for key in repeated if not self._copies(files, key, repeats)]
        if differ:
            raise DamagedError(
                f"the ranks disagree on `{differ[0]}`",
                where=listed(self.names),
                why=f"by config.json each {repeats} neighbours hold copies of one head",
                hint="config.json may belong to another model",
            )

    def _is_repeated(self, key: str) -> bool:
        found = split_axis(self.family, LAYOUT, key)
        return found is not None and found[1] in self.family.repeated

    def _copies(self, files: SourceFiles, key: str, repeats: int) -> bool:
        return all(
            _equal(files, self.shards[rank - rank % repeats][key], self.shards[rank][key])
            for rank in range(self.ranks)
        )

    def _join(self, files: SourceFiles, key: str, repeats: int) -> TensorEntry:
        entries = [shard[key] for shard in self.shards]
        split = split_axis(self.family, LAYOUT, key)
        if split is None:
            self._require_equal(files, key)
            return entries[0]
        dim, axis = split
        kept = entries[:: repeats if axis in self.family.repeated else 1]
        step = kept[0].shape[dim]
        extents = tuple(_moved(e.extents[0], dim, n * step) for n, e in enumerate(kept))
        shape = (*kept[0].shape[:dim], step * len(kept), *kept[0].shape[dim + 1 :])
        return replace(entries[0], shape=shape, extents=extents, alias_of=None)

    def _require_equal(self, files: SourceFiles, key: str) -> None:
        for rank, shard in enumerate(self.shards):
            if not _equal(files, self.shards[0][key], shard[key]):
                raise DamagedError(
                    f"the ranks disagree on `{key}`",
                    where=f"{self.names[0]} and {self.names[rank]}",
                    why="every rank holds a copy of it, and these two differ",
                )

    def _check(self, joined: Shard) -> None:
        """Compare the joined shapes with params.json: a missing shard shows here."""
        params = self.documents.get("params.json")
        seen: dict[str, Observation] = {}
        layout = self.family.layout(LAYOUT)
        for key, entry in joined.items():
            found = layout.table.find(key)
            if found and isinstance(found[0], Stored):
                seen.setdefault(found[0].template.text, Observation(key, found[0], entry.shape))
        try:
            solve(self.family, seen.values(), read_sizes(self.family, params=params))
        except MappingError as error:
            raise DamagedError(
                "the tensors do not add up to the model that params.json describes",
                where=f"{listed(self.names)}, {error.where}",
                why=error.why or error.what,
                hint="a shard may be missing, or params.json belongs to another model",
            ) from error


def _shards(root: Path) -> list[str]:
    """The names of all shards in order of rank."""
    found: dict[int, str] = {}
    for name in sorted(item.name for item in root.iterdir()):
        match = _SHARD.fullmatch(name)
        rank = int(match[1] or 0) if match else None
        if rank in found:
            raise DamagedError(
                f"two files are the shard of rank {rank}",
                where=str(root),
                why=f"`{found[rank]}` and `{name}`",
            )
        if rank is not None:
            found[rank] = name
    if not found:
        raise _no_shards(root)
    total = max(found) + 1
    if len(found) != total:
        count, names = absent(found, 0, total - 1, lambda rank: f"consolidated.{rank:02d}.pth")
        raise DamagedError(f"{count:,} of {total:,} shards are missing", where=str(root), why=names)
    return [found[rank] for rank in sorted(found)]


def _no_shards(path: Path) -> FormatError:
    return FormatError(
        "there are no shards of Meta's format here",
        where=str(path),
        why="expected consolidated.00.pth, consolidated.01.pth, ... and params.json",
    )


def _same_keys(shards: Sequence[Shard], names: Sequence[str]) -> None:
    for shard, name in zip(shards, names, strict=True):
        differ = sorted(shard.keys() ^ shards[0].keys())
        if differ:
            raise DamagedError(
                f"`{name}` and `{names[0]}` hold different tensors", where=name, why=listed(differ)
            )
        for key, entry in shard.items():
            first = shards[0][key]
            if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                raise DamagedError(
                    f"the ranks disagree on `{key}`",
                    where=f"{names[0]} and {name}",
                    why=f"{first.dtype} {list(first.shape)} and {entry.dtype} {list(entry.shape)}",
                )


def _equal(files: SourceFiles, a: TensorEntry, b: TensorEntry) -> bool:
    crcs = a.extents[0].crc32, b.extents[0].crc32
    if crcs[0] is not None and crcs[1] is not None and crcs[0] != crcs[1]:
        return False
    return equal(files, a, b)


def _split_of(family: Family, key: str) -> int | None:
    found = split_axis(family, LAYOUT, key)
    return found[0] if found else None


def _moved(extent: Extent, dim: int, by: int) -> Extent:
    offsets = tuple(o + by if d == dim else o for d, o in enumerate(extent.box.offsets))
    return replace(extent, box=Box(offsets, extent.box.sizes))


def _rank_boxes(tensor: OutputTensor, request: OutputRequest) -> Sequence[Box]:
    if request.rank_boxes is None:
        return (Box.whole(tensor.shape),) * request.mp
    return request.rank_boxes(tensor)


def _part(tensor: OutputTensor, box: Box) -> OutputTensor:
    return replace(tensor, shape=box.sizes)


def _shifted(file: OutputFile, by: int) -> OutputFile:
    frame = file.frame
    return replace(file, frame=lambda crc_of: frame(lambda record: crc_of(record + by)))


FORMAT = MetaFormat()
