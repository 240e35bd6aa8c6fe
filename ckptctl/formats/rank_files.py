"""Directories with one ``torch.save`` file per rank, which contains DTensors or ShardedTensors.

Recognized file names are those of verl (``model_world_size_2_rank_0.pt``), accelerate with
``use_dcp=False`` (``pytorch_model_fsdp_0_rank0.bin``, ``utils/fsdp_utils.py``), torch's
``distributed/checkpoint/_experimental`` (``checkpoint_0.pt``) and custom scripts
(``rank_0_model_states.pt`` with ``trainer_state.pt``, or ``rank0.pt``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.shared.findings import FaultCollector, mixed_saves_error
from ckptctl.formats.sidecar_files import HF_CONFIG_FOLDER, scan_root_and_subfolder
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import list_zip_ends, prefetch_items
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.formats.shared.rank_merge import RankMerger
    from ckptctl.formats.shared.stored_leaves import Leaves

_RANK = r"(?P<rank>\d{1,7})"
FILE_NAME_PATTERNS = tuple(
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
TRAINER_STATE_FILE = "trainer_state.pt"
FSDP_CONFIG_FILE = "fsdp_config.json"
"""verl's description of the FSDP ranks, which is not copied to converted checkpoints."""
_GROUP_ALIASES = {"pytorch_model_fsdp": "model", "pytorch_model": "model"}


@dataclass(frozen=True, slots=True)
class RankFile:
    """File of one rank, with the fields parsed from its name.

    Attributes:
        name: Name of the file.
        group: Kind of state in the file, such as ``model``, which becomes the first key of its
            tensors, or ``""`` if the file contains all state of the rank.
        rank: Rank that wrote the file.
        world: World size, or None if the name does not contain it.
    """

    name: str
    group: str
    rank: int
    world: int | None


RankGroup = Mapping[int, RankFile]
RankGroups = Mapping[str, RankGroup]


class RankFilesFormat(Format):
    """A directory with one file per rank, or one file per rank and kind of state."""

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
        names = (
            []
            if listing.has_file(".metadata")
            else [file.name for file in list_rank_files(listing)]
        )
        return quote_names(names, 2) if names else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.shared.rank_merge import RankMerger

        groups = _group_rank_files(path)
        with source_files(path) as files:
            faults = FaultCollector(path, options.partial)
            merger = RankMerger(files, faults, list_replicas=options.replicas)
            leaves = _merge_groups(files, groups, merger)
            names = [file.name for group in groups.values() for file in group.values()]
            names += [TRAINER_STATE_FILE] * (
                "model" in groups and (path / TRAINER_STATE_FILE).is_file()
            )
            sizes = faults.read_sizes(files, names)
        sidecars = scan_root_and_subfolder(path, HF_CONFIG_FOLDER, {*names, FSDP_CONFIG_FILE})
        return replace(
            sidecars.start_catalog(path, self.name),
            files=sizes,
            tensors=leaves.tensors,
            blobs=leaves.blobs,
            notes=tuple(leaves.notes),
            replicas=merger.replicas,
            findings=tuple(faults.findings),
            lost=faults.lost,
        )


def list_rank_files(listing: Listing) -> Iterator[RankFile]:
    """Yield the files in a folder whose names match a known pattern of rank files."""
    for name in listing.names:
        rank_file = parse_rank_file_name(name)
        if rank_file and listing.has_file(name):
            yield rank_file


def parse_rank_file_name(name: str) -> RankFile | None:
    """Parse the name of a rank file, or return None if it matches no known pattern."""
    match = next((m for pattern in FILE_NAME_PATTERNS if (m := pattern.fullmatch(name))), None)
    if match is None:
        return None
    fields = match.groupdict()
    group, number = fields.get("group") or "", int(fields.get("number") or 0)
    group = _GROUP_ALIASES.get(group, group) + (f"_{number}" if number else "")
    world = fields.get("world")
    return RankFile(name, group, int(fields["rank"]), int(world) if world else None)


def _group_rank_files(path: TreePath) -> dict[str, dict[int, RankFile]]:
    """Map each kind of state, such as ``model``, to the rank files in *path* by rank."""
    groups: dict[str, dict[int, RankFile]] = {}
    for file in sorted(
        list_rank_files(Listing(path)), key=lambda group: (group.group, group.rank, group.name)
    ):
        existing = groups.setdefault(file.group, {}).setdefault(file.rank, file)
        if existing is not file:
            raise UnsupportedError(
                f"two files belong to rank {file.rank}",
                where=str(path),
                why=quote_names([existing.name, file.name]),
                hint="keep the files of one save (these belong to different saves)",
            )
    if not groups:
        raise FormatError(
            "no rank file was found",
            where=str(path),
            why="expected a name such as `model_world_size_2_rank_0.pt`",
        )
    for group in groups.values():
        worlds = sorted({file.world for file in group.values() if file.world is not None})
        if len(worlds) > 1:
            raise mixed_saves_error(path, f"world sizes {' and '.join(map(str, worlds))}")
        surplus = [file.name for rank, file in group.items() if worlds and rank >= worlds[0]]
        if surplus:
            raise UnsupportedError(
                f"found files of more than the {pluralize(worlds[0], 'rank')} of the save",
                where=str(path),
                why=quote_names(surplus),
                hint="remove files that were renamed or belong to another save",
            )
    return groups


def _merge_groups(files: SourceFiles, groups: RankGroups, merger: RankMerger) -> Leaves:
    from ckptctl.formats.shared.rank_archive import read_rank_file

    for name, group in groups.items():
        _check_rank_files(merger, name, group, max(max(group) + 1, _get_world_size_in_names(group)))
    for name, group in groups.items():
        ranks = sorted(group.items())
        for rank, file in prefetch_items(
            files, ranks, lambda rank_and_file: list_zip_ends(rank_and_file[1].name)
        ):
            leaves = _prefix_leaves(name, read_rank_file(files, file.name))
            merger.add_file(rank, _get_group_prefix(name), file.name, leaves)
    recorded_world = max(
        max(merger.ranks, default=-1) + 1, *map(_get_world_size_in_names, groups.values())
    )
    world = max(recorded_world, *(max(group) + 1 for group in groups.values()))
    tensors = merger.get_first_keys()
    for name, group in groups.items():
        if not name or name in tensors or group.keys() != {0}:
            _check_rank_files(merger, name, group, world)
    if (files.root / TRAINER_STATE_FILE).is_file() and "model" in groups:
        leaves = _prefix_leaves("trainer_state", read_rank_file(files, TRAINER_STATE_FILE))
        merger.add_file(0, _get_group_prefix("trainer_state"), TRAINER_STATE_FILE, leaves)
    if set(groups) == {""}:
        merger.require_related_files(str(files.root))
    merged = merger.merge_leaves()
    if not recorded_world:
        merged.notes.append(
            f"found the files of {pluralize(world, 'rank')} (the world size is not recorded, so "
            "missing last ranks cannot be detected)"
        )
    return merged


def _get_group_prefix(group: str) -> KeyPath:
    return (group,) if group else ()


def _get_world_size_in_names(group: RankGroup) -> int:
    """Return the world size in the file names of *group*, or 0 if they do not contain it."""
    return max(file.world or 0 for file in group.values())


def _check_rank_files(merger: RankMerger, name: str, group: RankGroup, world: int) -> None:
    """Raise an error if a rank has no file in *group*, or add a finding in a partial read."""
    example = next(iter(group.values())).name
    digits_start = example.rindex("rank") + len("rank") if "rank" in example else 0

    def format_name(rank: int) -> str:
        return example[:digits_start] + re.sub(r"\d+", str(rank), example[digits_start:], count=1)

    merger.check_rank_files(_get_group_prefix(name), group, range(world), format_name)


def _prefix_leaves(
    group: str, leaves: Iterator[tuple[KeyPath, object]]
) -> Iterator[tuple[KeyPath, object]]:
    for path, leaf in leaves:
        yield (*_get_group_prefix(group), *path), leaf


FORMAT = RankFilesFormat()
