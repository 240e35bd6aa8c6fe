"""Loading any checkpoint into a state dict whose tensors may be sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Catalog
from ckptctl.distributed.broadcast import exchange, share, wants_broadcast
from ckptctl.distributed.group import coordinator, threads
from ckptctl.distributed.state import State, plain_of, state_of
from ckptctl.distributed.targets import Everything, everything, places_of, wanted_of
from ckptctl.distributed.values import put, read_values
from ckptctl.errors import UsageError
from ckptctl.formats.dcp_rank_local import DcpRankLocalFormat, read_rank
from ckptctl.ops.coordinator import Alone, Coordinator, on_first, together
from ckptctl.ops.leftovers import Comparison, compare
from ckptctl.ops.load_options import LoadOptions, LoadReport
from ckptctl.ops.loading import Reading, prepare
from ckptctl.ops.nothing_lost import require_nothing_lost
from ckptctl.ops.state_mapping import map_state
from ckptctl.planner.plan import Plan
from ckptctl.storage.executor import ExecutionOptions, execute

Broadcast = bool | Literal["auto"]


def load(
    state_dict: MutableMapping[str, Any],
    path: str | Path,
    *,
    model_type: str | None = None,
    layout: str | None = None,
    from_layout: str | None = None,
    format: str | None = None,
    root: str | None = None,
    weights: Literal["master", "module"] | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    sizes: Mapping[str, int] | None = None,
    assets: str | Path | None = None,
    converter: str | Path | None = None,
    dequantize: str | None = None,
    strict: bool = True,
    cast: bool = False,
    trusted: bool = False,
    checksum: bool = False,
    jobs: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    broadcast: Broadcast = "auto",
    collectives: bool = True,
) -> LoadReport:
    """Fill *state_dict* from a checkpoint of any format; all ranks call it.

    Tensors are filled in place, sharded ones with their part alone. Other leaves are replaced, and
    objects with ``load_state_dict`` are given theirs. Until every rank has planned all of it
    nothing changes; when a read fails later, on any rank, the tensors hold some of each.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves.
        path: The checkpoint: a directory or a file.
        model_type: Model family, where names or axes change; None: detect it.
        layout: Layout of the state's names; None: detect it.
        from_layout: Layout of the checkpoint's; None: detect it.
        format: Format of the checkpoint; None: detect it.
        root: The model's prefix in the checkpoint; None: find it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which of several saves in it; None: the one that its pointer names.
        rules: TOML file that says how ranks divide tensors, where theirs do not.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        assets: Directory with configuration; None: the checkpoint's own.
        converter: Python file that defines one more family; it is run.
        dequantize: Turn quantised tensors into ``bf16`` or ``fp32``; None: take them as they are.
        strict: Whether names that are missing or left over are errors; else the report has them.
        cast: Whether floating tensors may get another dtype than the checkpoint's.
        trusted: Whether leaves that are no tensors may run code when they are unpickled.
        checksum: Whether to compare recorded checksums of what is read whole.
        jobs: Threads per rank; None: its part of the host's cores, at most four.
        process_group: The ranks; None: the default group, or this process alone.
        broadcast: Whether what several ranks want is read by one of them and sent to the others;
            ``auto``: where they sit on several machines, or storage is slow.
        collectives: Whether the ranks agree; without, each one loads for itself.

    Returns:
        What this rank loaded.

    Raises:
        CkptError: On every rank, whichever failed.
    """
    options = LoadOptions(
        format=format,
        model_type=model_type,
        layout=layout,
        from_layout=from_layout,
        root=root,
        weights=weights,
        tag=tag,
        rules=None if rules is None else Path(rules),
        sizes=sizes or {},
        assets=None if assets is None else Path(assets),
        dequantize=_floating(dequantize),
        strict=strict,
        cast=cast,
        trusted=trusted,
        checksum=checksum,
        jobs=jobs or 0,
    )
    if broadcast not in (True, False, "auto"):
        raise UsageError("`broadcast` is True, False or 'auto'", why=f"it is {broadcast!r}")
    group = coordinator(process_group)
    ranks = group if collectives else Alone()
    with families.using(converter):
        return _Load(ranks, group, options, broadcast).into(state_dict, path)


def _floating(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    name = dtypes.parse(dtype)
    if name is None or not dtypes.BY_NAME[name].floating:
        raise UsageError(f"`{dtype}` is not a floating dtype", where="dequantize")
    return name


@dataclass(frozen=True, slots=True)
class _Planned:
    """What one rank knows before a byte moves."""

    reading: Reading
    plan: Plan
    comparison: Comparison
    values: Mapping[str, object]


class _Load:
    """One call of :func:`load`."""

    def __init__(
        self, ranks: Coordinator, group: Coordinator, options: LoadOptions, broadcast: Broadcast
    ) -> None:
        self.ranks, self.options, self.broadcast = ranks, options, broadcast
        self.rank = group.rank
        self.every = ranks.world == group.world

    def into(self, state_dict: MutableMapping[str, Any], path: str | Path) -> LoadReport:
        """Load the checkpoint at *path*."""
        plain, state = together(self.ranks, lambda: _plain(state_dict))
        all_of_it = everything(state, self.ranks, self.broadcast)
        planned = together(self.ranks, lambda: self._planned(state, all_of_it, path))
        mapping = planned.reading.mapping
        if mapping.must_equal or mapping.must_be_zero or mapping.tilings:
            on_first(self.ranks, lambda: require_nothing_lost(mapping))
        read, received = self._filled(state, planned)
        together(self.ranks, lambda: _give(state_dict, plain, state, planned.values))
        return _report(state, planned, read, received)

    def _planned(self, state: State, all_of_it: Everything, path: str | Path) -> _Planned:
        own = self._of_this_rank(state, path)
        catalog = own or self.options.open(path)
        mapping = map_state(catalog, all_of_it.tensors, self.options)
        paths = {name: leaf.path for name, leaf in all_of_it.tensors.items()}
        found = compare(mapping, paths, all_of_it.values)
        if self.options.strict:
            # A rank by itself cannot know what the others take.
            seen = found if self.every else replace(found, unexpected=())
            seen.require_equal(mapping)
        wanted, _ = wanted_of(state, places_of(state))
        reading = prepare(mapping, wanted, cast=self.options.cast, whole=own is None)
        plan = reading.plan(wanted)
        values = read_values(mapping, state.values, self.rank, trusted=self.options.trusted)
        return _Planned(reading, plan, found, values)

    def _of_this_rank(self, state: State, path: str | Path) -> Catalog | None:
        """Return what this rank wrote for itself, if that is all that it wants."""
        source = formats.existing(path)
        if self.every or self.options != LoadOptions(
            strict=self.options.strict,
            cast=self.options.cast,
            trusted=self.options.trusted,
            checksum=self.options.checksum,
            jobs=self.options.jobs,
        ):
            return None
        if formats.detect(source).name != DcpRankLocalFormat.name:
            return None
        found = read_rank(source, self.rank)
        return found if found and _holds(found, state) else None

    def _filled(self, state: State, planned: _Planned) -> tuple[int, int]:
        """Read, and exchange with other ranks; return the bytes read and received."""
        places, reading = places_of(state), planned.reading
        if not wants_broadcast(self.broadcast, reading.mapping.catalog, self.ranks):
            views = wanted_of(state, places)[1]
            return together(self.ranks, lambda: self._read(planned.plan, views)), 0
        sharing = share(places, self.ranks)

        def part() -> int:
            wanted, views = wanted_of(state, sharing.reads)
            return self._read(reading.plan(wanted), views)

        read = together(self.ranks, part)
        return read, exchange(places, sharing.turns, self.ranks)

    def _read(self, plan: Plan, views: Mapping[str, memoryview]) -> int:
        jobs, checksum = threads(self.options.jobs), self.options.checksum
        how = ExecutionOptions(jobs=jobs, checksum=checksum, sync=False)
        return execute(plan, Path(plan.source_root), how, lambda _: None, memory=views).bytes_read


def _plain(state_dict: MutableMapping[str, Any]) -> tuple[dict[str, Any], State]:
    """Return *state_dict* with what its objects say of themselves, and what it holds."""
    plain = plain_of(state_dict)
    return plain, state_of(plain)


def _holds(catalog: Catalog, state: State) -> bool:
    """Whether the boxes of *catalog* are those that this rank holds."""
    for name, held in state.tensors.items():
        entry = catalog.tensors.get(name)
        if entry is None:
            return False
        boxes = {extent.box for extent in entry.extents}
        if not all(piece.box in boxes for piece in held.pieces):
            return False
    return all(name in catalog.blobs for name in state.values)


def _give(
    state_dict: MutableMapping[str, Any],
    plain: dict[str, Any],
    state: State,
    values: Mapping[str, object],
) -> None:
    """Put other leaves where they belong, and give objects their state."""
    for name, value in values.items():
        put(plain, state.values[name].path, value)
    for key, found in plain.items():
        own = state_dict[key]
        if isinstance(own, Stateful):
            own.load_state_dict(found)
        else:
            state_dict[key] = found


def _report(state: State, planned: _Planned, read: int, received: int) -> LoadReport:
    mapping = planned.reading.mapping
    tensors = (name for name in state.tensors if name in mapping.offered)
    return planned.comparison.report(
        mapping,
        (*tensors, *planned.values),
        planned.reading.cast,
        bytes_read=read,
        bytes_received=received,
    )
