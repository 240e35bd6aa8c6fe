"""One ``torch.save`` file per rank with DTensors or ShardedTensors in it.

Names: verl (``model_world_size_2_rank_0.pt``), accelerate with ``use_dcp=False``
(``pytorch_model_fsdp_0_rank0.bin``, ``utils/fsdp_utils.py``), torch's
``distributed/checkpoint/_experimental`` (``checkpoint_0.pt``), ``rank_0_model_states.pt`` with
``trainer_state.pt``, and ``rank0.pt`` of one's own scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff, absent
from ckptctl.formats.rank_archive import read_rank_file
from ckptctl.formats.rank_merge import RankMerger
from ckptctl.formats.torch_file import Contents
from ckptctl.storage.files import SourceFiles

_RANK = r"(?P<rank>\d{1,7})"
PATTERNS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"(?P<group>\w+)_world_size_(?P<world>\d{{1,7}})_rank_{_RANK}\.pt",
        rf"(?P<group>pytorch_model(_fsdp)?|optimizer)(_(?P<number>\d{{1,3}}))?_rank_?{_RANK}\.bin",
        rf"(?P<group>extra_state)_rank_{_RANK}\.pt",
        rf"rank_?{_RANK}_(?P<group>model|optimizer)_states\.pt",
        rf"checkpoint_{_RANK}\.pt",
        rf"rank_?{_RANK}\.(pt|pth|bin)",
    )
)
TRAINER = "trainer_state.pt"
_CALLED = {"pytorch_model_fsdp": "model", "pytorch_model": "model"}


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a file name says.

    Attributes:
        name: The name.
        group: What it holds of the rank's state, under the name that its leaves get; ``""``: all.
        rank: The rank.
        world: How many ranks there are, if the name says so.
    """

    name: str
    group: str
    rank: int
    world: int | None


class RankFilesFormat(Format):
    """A directory with one file, or one of each kind, per rank."""

    name = "rank-files"
    title = "one torch.save file per rank, of DTensors or ShardedTensors (verl, accelerate, ...)"

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if not path.is_dir() or (path / ".metadata").exists():
            return None
        found = sorted(file.name for file in rank_files(path))
        return Sniff(listed(found, 2)) if found else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        if not path.is_dir():
            raise FormatError(
                "this is one file of many", where=str(path), hint="name the directory it is in"
            )
        groups = _grouped(path)
        with SourceFiles(path) as files:
            joined = _joined(files, groups)
            sizes = {name: files.size(name) for name in _names(path, groups)}
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors=joined.tensors,
            blobs=joined.blobs,
            assets=side_files(path, exclude=sizes),
            documents=documents(path),
            notes=(*joined.notes, *left_behind(path, exclude=sizes)),
        )


def rank_files(path: Path) -> Iterator[RankFile]:
    """Yield the files in *path* that are called as a rank's file is."""
    for item in path.iterdir():
        found = parse(item.name)
        if found and item.is_file():
            yield found


def parse(name: str) -> RankFile | None:
    """Return what a file name says, or None when it is no rank's file."""
    match = next((m for pattern in PATTERNS if (m := pattern.fullmatch(name))), None)
    if match is None:
        return None
    fields = match.groupdict()
    group, number = fields.get("group") or "", int(fields.get("number") or 0)
    group = _CALLED.get(group, group) + (f"_{number}" if number else "")
    world = fields.get("world")
    return RankFile(name, group, int(fields["rank"]), int(world) if world else None)


def _grouped(path: Path) -> dict[str, dict[int, RankFile]]:
    """Return the files by group and rank; all ranks up to the highest must be there."""
    groups: dict[str, dict[int, RankFile]] = {}
    for file in sorted(rank_files(path), key=lambda found: (found.group, found.rank, found.name)):
        twin = groups.setdefault(file.group, {}).setdefault(file.rank, file)
        if twin is not file:
            raise DamagedError(
                f"two files are rank {file.rank}'s",
                where=str(path),
                why=listed([twin.name, file.name]),
                hint="they belong to different saves; keep those of one",
            )
    if not groups:
        raise FormatError(
            "there is no file of a rank",
            where=str(path),
            why="as in `model_world_size_2_rank_0.pt`",
        )
    for found in groups.values():
        worlds = sorted({file.world for file in found.values() if file.world is not None})
        if len(worlds) > 1:
            raise DamagedError(
                "files of two saves lie in one directory",
                where=str(path),
                why=f"world sizes {' and '.join(map(str, worlds))}",
                hint="keep those of one world size",
            )
    return groups


def _joined(files: SourceFiles, groups: Mapping[str, Mapping[int, RankFile]]) -> Contents:
    merger = RankMerger(files)
    for group in groups.values():
        world = max(max(file.rank + 1, file.world or 0) for file in group.values())
        _require(group, world, str(files.root))
    for group in groups.values():
        for rank, file in sorted(group.items()):
            merger.add(rank, file.name, _below(file.group, read_rank_file(files, file.name)))
        _require(group, max(merger.ranks, default=-1) + 1, str(files.root))
    if (files.root / TRAINER).is_file() and "model" in groups:
        merger.add(0, TRAINER, _below("trainer_state", read_rank_file(files, TRAINER)))
    if set(groups) == {""}:
        merger.refuse_unrelated(str(files.root))
    return merger.finish()


def _require(group: Mapping[int, RankFile], world: int, where: str) -> None:
    """Refuse a group that lacks the file of one of *world* ranks.

    Raises:
        DamagedError: Naming the files that are missing.
    """
    example = next(iter(group.values()))
    present = [rank for rank in group if rank < world]
    count, named = absent(present, 0, world - 1, lambda rank: _named(example, rank))
    if count:
        raise DamagedError(
            f"{count:,} of {world:,} ranks' files are missing",
            where=where,
            why=named,
            hint="every rank writes its own file; copy them from the nodes they are on",
        )


def _named(example: RankFile, rank: int) -> str:
    """Return *example*'s name with another rank in it."""
    at = example.name.rindex("rank") + len("rank") if "rank" in example.name else 0
    head, tail = example.name[:at], example.name[at:]
    return head + re.sub(r"\d+", str(rank), tail, count=1)


def _below(
    group: str, leaves: Iterator[tuple[KeyPath, object]]
) -> Iterator[tuple[KeyPath, object]]:
    for path, leaf in leaves:
        yield ((group, *path) if group else path), leaf


def _names(path: Path, groups: Mapping[str, Mapping[int, RankFile]]) -> Iterator[str]:
    for group in groups.values():
        yield from (file.name for file in group.values())
    if "model" in groups and (path / TRAINER).is_file():
        yield TRAINER


FORMAT = RankFilesFormat()
