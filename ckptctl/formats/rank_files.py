"""One ``torch.save`` file per rank with DTensors or ShardedTensors in it.

Names: verl (``model_world_size_2_rank_0.pt``), accelerate with ``use_dcp=False``
(``pytorch_model_fsdp_0_rank0.bin``, ``utils/fsdp_utils.py``), torch's
``distributed/checkpoint/_experimental`` (``checkpoint_0.pt``), ``rank_0_model_states.pt`` with
``trainer_state.pt``, and ``rank0.pt`` of custom scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats.base import AS_IT_IS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.shared.findings import Faults, mixed_saves
from ckptctl.formats.sidecar_files import CONFIGURATION, with_folder
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import list_zip_ends, prefetch_items
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.formats.shared.rank_merge import RankMerger
    from ckptctl.formats.shared.stored_leaves import Leaves

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
SHARDING = "fsdp_config.json"
"""verl's description of the ranks, which only applies to their files."""
_CALLED = {"pytorch_model_fsdp": "model", "pytorch_model": "model"}


@dataclass(frozen=True, slots=True)
class RankFile:
    """The parts of a file name.

    Attributes:
        name: The file name.
        group: Part of the rank's state in the file, which becomes the first key; ``""`` for all.
        rank: The rank.
        world: World size, if it is in the name.
    """

    name: str
    group: str
    rank: int
    world: int | None


RankGroup = Mapping[int, RankFile]
RankGroups = Mapping[str, RankGroup]


class RankFilesFormat(Format):
    """A directory with one file per rank, or one file of each kind per rank."""

    name = "rank-files"
    title = "one torch.save file per rank, with DTensors or ShardedTensors (verl, accelerate, ...)"
    recognized = (
        "names such as `model_world_size_2_rank_0.pt`, `pytorch_model_fsdp_0_rank0.bin`, "
        "`rank_0_model_states.pt`, `checkpoint_0.pt` or `rank0.pt`; no `.metadata` in the folder"
    )
    marks = re.compile(r".*rank|checkpoint_\d", re.DOTALL)
    wholeness = (
        "every rank has its files, according to file names, DTensor meshes, ShardedTensor world "
        "sizes and the rank's other files; the shards of all ranks tile every tensor (files "
        "with only regular tensors do not record the world size, so missing last ranks go "
        "undetected)"
    )
    tested = "verl, accelerate, torch (FSDP1/2, HSDP, TP on 2-4 ranks)"
    proof = (
        "reading: with 2 FSDP2 ranks, verl's layout, accelerate (`use_dcp=False`) and torch's "
        "experimental checkpointer equal the live weights "
        "(tests/unit/formats/test_rank_files.py); reading: ShardedTensors of FSDP1 equal the "
        "output of `dcp_to_torch_save` for the same run (tests/unit/formats/test_rank_files.py); "
        "FSDP1's flat parameters are refused (tests/unit/formats/test_rank_files.py); reading: "
        "with FSDP2 and tensor parallelism, HSDP and other placements on 2 x 2 ranks, tensors "
        "equal `full_tensor()` (tests/integration/test_rank_files.py)"
    )

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        found = [] if listing.has(".metadata") else [file.name for file in rank_files(listing)]
        return quote_names(found, 2) if found else None

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.shared.rank_merge import RankMerger

        groups = _grouped(path)
        with source_files(path) as files:
            faults = Faults(path, asked.partial)
            merger = RankMerger(files, faults, listed=asked.replicas)
            joined = _joined(files, groups, merger)
            names = [file.name for group in groups.values() for file in group.values()]
            names += [TRAINER] * ("model" in groups and (path / TRAINER).is_file())
            sizes = faults.sizes(files, names)
        around = with_folder(path, CONFIGURATION, {*names, SHARDING})
        return replace(
            around.catalog(path, self.name),
            files=sizes,
            tensors=joined.tensors,
            blobs=joined.blobs,
            notes=tuple(joined.notes),
            replicas=merger.replicas,
            findings=tuple(faults.findings),
            lost=faults.lost,
        )


def rank_files(listing: Listing) -> Iterator[RankFile]:
    """Yield the files in a folder whose names match those of a rank's file."""
    for name in listing.names:
        found = parse(name)
        if found and listing.has(name):
            yield found


def parse(name: str) -> RankFile | None:
    """Parse a file name, or return None if it is not that of a rank's file."""
    match = next((m for pattern in PATTERNS if (m := pattern.fullmatch(name))), None)
    if match is None:
        return None
    fields = match.groupdict()
    group, number = fields.get("group") or "", int(fields.get("number") or 0)
    group = _CALLED.get(group, group) + (f"_{number}" if number else "")
    world = fields.get("world")
    return RankFile(name, group, int(fields["rank"]), int(world) if world else None)


def _grouped(path: TreePath) -> dict[str, dict[int, RankFile]]:
    """Group the files in *path* by kind and rank."""
    groups: dict[str, dict[int, RankFile]] = {}
    for file in sorted(
        rank_files(Listing(path)), key=lambda found: (found.group, found.rank, found.name)
    ):
        twin = groups.setdefault(file.group, {}).setdefault(file.rank, file)
        if twin is not file:
            raise UnsupportedError(
                f"two files belong to rank {file.rank}",
                where=str(path),
                why=quote_names([twin.name, file.name]),
                hint="keep the files of one save (these belong to different saves)",
            )
    if not groups:
        raise FormatError(
            "no rank file was found",
            where=str(path),
            why="expected a name such as `model_world_size_2_rank_0.pt`",
        )
    for found in groups.values():
        worlds = sorted({file.world for file in found.values() if file.world is not None})
        if len(worlds) > 1:
            raise mixed_saves(path, f"world sizes {' and '.join(map(str, worlds))}")
        surplus = [file.name for rank, file in found.items() if worlds and rank >= worlds[0]]
        if surplus:
            raise UnsupportedError(
                f"found files of more than the {pluralize(worlds[0], 'rank')} of the save",
                where=str(path),
                why=quote_names(surplus),
                hint="remove files that were renamed or belong to another save",
            )
    return groups


def _joined(files: SourceFiles, groups: RankGroups, merger: RankMerger) -> Leaves:
    from ckptctl.formats.shared.rank_archive import read_rank_file

    for name, group in groups.items():
        _require(merger, name, group, max(max(group) + 1, _stated(group)))
    for name, group in groups.items():
        ranks = sorted(group.items())
        for rank, file in prefetch_items(files, ranks, lambda one: list_zip_ends(one[1].name)):
            leaves = _below(name, read_rank_file(files, file.name))
            merger.take(rank, _head(name), file.name, leaves)
    told = max(max(merger.ranks, default=-1) + 1, *map(_stated, groups.values()))
    world = max(told, *(max(group) + 1 for group in groups.values()))
    tensors = merger.heads()
    for name, group in groups.items():
        if not name or name in tensors or group.keys() != {0}:
            _require(merger, name, group, world)
    if (files.root / TRAINER).is_file() and "model" in groups:
        leaves = _below("trainer_state", read_rank_file(files, TRAINER))
        merger.take(0, _head("trainer_state"), TRAINER, leaves)
    if set(groups) == {""}:
        merger.refuse_unrelated(str(files.root))
    joined = merger.finish()
    if not told:
        joined.notes.append(
            f"found the files of {pluralize(world, 'rank')} (the world size is not recorded, so "
            "missing last ranks cannot be detected)"
        )
    return joined


def _head(group: str) -> KeyPath:
    return (group,) if group else ()


def _stated(group: RankGroup) -> int:
    """Return the world size according to the file names, or 0 if they do not contain it."""
    return max(file.world or 0 for file in group.values())


def _require(merger: RankMerger, name: str, group: RankGroup, world: int) -> None:
    """Raise, or add a finding, if a group does not have the files of all *world* ranks."""
    example = next(iter(group.values())).name
    at = example.rindex("rank") + len("rank") if "rank" in example else 0

    def named(rank: int) -> str:
        return example[:at] + re.sub(r"\d+", str(rank), example[at:], count=1)

    merger.require(_head(name), group, range(world), named)


def _below(
    group: str, leaves: Iterator[tuple[KeyPath, object]]
) -> Iterator[tuple[KeyPath, object]]:
    for path, leaf in leaves:
        yield (*_head(group), *path), leaf


FORMAT = RankFilesFormat()
