"""The request of one rank to load, and the agreement of all ranks on theirs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from ckptctl import formats
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.group import ProcessGroup
from ckptctl.distributed.loading.overlaps import overlapping
from ckptctl.distributed.loading.target_memory import sharing, steps_of
from ckptctl.distributed.state import HeldShard, State, plain_of, state_of
from ckptctl.errors import MappingError, UsageError
from ckptctl.ops import options as opt
from ckptctl.ops.loading.identity import Fingerprint, identity, require_same_checkpoint
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.ranks.agreement import RankStatement, require_agreement
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.saving.local_shards import TensorMeta, digest
from ckptctl.options import Option

Broadcast = bool | Literal["auto"]
VERSION = 1
"""Of what the key of a plan is made of."""


@dataclass(frozen=True, slots=True)
class WantedLeaves:
    """The leaves that ranks want of a checkpoint."""

    tensors: Mapping[str, TensorMeta]
    values: Mapping[str, Keys]

    @property
    def digest(self) -> bytes:
        """Return a digest of all of it."""
        leaves = [(n, one.dtype, one.shape, one.path) for n, one in self.tensors.items()]
        return digest((leaves, list(self.values.items())))


def wanted_by_all(own: WantedLeaves, ranks: Coordinator) -> WantedLeaves:
    """Return the leaves of all ranks, where they do not want the same."""
    tensors: dict[str, TensorMeta] = {}
    values: dict[str, Keys] = {}
    for rank, one in enumerate(ranks.all_gather(own)):
        for name, leaf in one.tensors.items():
            known = tensors.setdefault(name, leaf)
            if (known.dtype, known.shape) != (leaf.dtype, leaf.shape):
                raise MappingError(
                    f"ranks disagree on `{name}`",
                    where=f"rank {rank}",
                    why=f"{leaf.dtype} {list(leaf.shape)} there, "
                    f"{known.dtype} {list(known.shape)} on an earlier one",
                )
        values |= one.values
    return WantedLeaves(tensors, values)


def _broadcast(value: Broadcast) -> Broadcast:
    if value not in (True, False, "auto"):
        raise UsageError("`broadcast` is True, False or 'auto'", why=f"it is {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class LoadCall(LoadOptions):
    """The options of a load of all ranks."""

    converter: opt.Converter = None
    strict: Annotated[
        bool,
        Option("Whether names that are missing or left over are errors; else the report has them."),
    ] = True
    process_group: ProcessGroup = None
    broadcast: Annotated[
        Broadcast,
        Option(
            "Whether what several ranks want is read by one of them and sent to the others; "
            "``auto``: where they sit on several machines, or storage is slow.",
            check=_broadcast,
        ),
    ] = "auto"
    collectives: Annotated[
        bool, Option("Whether the ranks agree; without, each one loads for itself.")
    ] = True

    def shared(self) -> dict[str, object]:
        """Return the options that have to be the same on all ranks, by name."""
        own = ("jobs", "process_group", "collectives")
        names = (field.name for field in fields(self) if field.name not in own)
        return {name: repr(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The request of one rank."""

    source: Path
    plain: dict[str, Any]  # its state dict, with what objects in it say of themselves
    state: State
    places: list[HeldShard]
    same: list[int]  # of each of them the first one with the same memory
    meeting: dict[int, int]  # those that have a part of their memory in common with another one
    part: WantedLeaves  # what it wants, as other ranks are told
    # Digest of all that a plan depends on but the checkpoint; None: it has none.
    structure: bytes | None
    key: bytes | None  # digest of all that a plan depends on; None: it has none


class RankView(NamedTuple):
    """A request as the other ranks are told of it."""

    statement: RankStatement
    host: str
    objects: bool  # whether objects in its state take what is loaded
    # The checkpoint that it sees; None: none that it can read, or it loads alone.
    fingerprint: Fingerprint | None


def request(
    state_dict: MutableMapping[str, Any], path: str | Path, how: LoadCall, here: object
) -> LoadRequest:
    """Return the request of this rank."""
    plain = plain_of(state_dict)
    state = state_of(plain)
    places = state.shards
    same, source = sharing(places), formats.existing(path)
    meeting = overlapping(places, same)
    structure = key = None
    beside = [file for file in (how.assets, how.rules, how.converter) if file is not None]
    extra = identity(beside) if beside else b""
    if extra is not None:
        boxes = [
            (one.name, one.box.offsets, one.box.sizes, steps_of(one.tensor), one.tensor.device.type)
            for one in places
        ]
        own = digest((state.meta, boxes, state.paths))
        memory = (same, sorted(meeting.items()))
        structure = digest((VERSION, here, how.shared(), extra, memory, own))
        files = identity([source])
        key = None if files is None else digest((structure, files))
    return LoadRequest(
        source,
        plain,
        state,
        places,
        same,
        meeting,
        WantedLeaves(state.meta, state.paths),
        structure,
        key,
    )


def agree(
    ranks: Coordinator, how: LoadCall, own: RankView, error: BaseException | None
) -> list[RankView]:
    """Go on only if all ranks do, and mean the same; *error* is why this one cannot."""
    said = ranks.all_gather(own)
    if error is not None:
        raise error
    statements = [one.statement for one in said]
    alike = all(one.how == statements[0].how for one in statements)
    if not alike and not any(one.problem for one in statements):
        statements = ranks.all_gather(own.statement._replace(how=how.shared()))
    require_agreement(statements, ranks.rank, "checkpoints")
    seen = [one.fingerprint for one in said if one.fingerprint]
    require_same_checkpoint(seen, own.statement.target)
    return said
