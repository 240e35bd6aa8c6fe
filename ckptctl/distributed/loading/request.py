"""The request of one rank to load, and the agreement of all ranks on theirs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptctl import formats
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.loading.target_memory import sharing, steps_of
from ckptctl.distributed.state import LocalShard, State, plain_of, state_of
from ckptctl.errors import MappingError
from ckptctl.ops.loading.identity import Fingerprint, identity, require_same_checkpoint
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.ranks.agreement import RankStatement, new_nonce, require_agreement
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.saving.local_shards import TensorMeta, digest

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


def structure_of(state: State, places: Sequence[LocalShard]) -> bytes:
    """Return a digest of this rank's tensors and leaves, as a plan depends on them."""
    boxes = [
        (one.name, one.box.offsets, one.box.sizes, steps_of(one.tensor), one.tensor.device.type)
        for one in places
    ]
    return digest((state.meta, boxes, state.paths))


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


@dataclass(frozen=True, slots=True)
class LoadCall:
    """The arguments of a load."""

    options: LoadOptions
    broadcast: Broadcast = "auto"
    converter: str | Path | None = None

    def listed(self) -> dict[str, object]:
        """Return the arguments that have to be the same on all ranks, by name."""
        found = {one.name: getattr(self.options, one.name) for one in fields(self.options)}
        del found["jobs"]
        given = {"broadcast": self.broadcast, "converter": self.converter, **found}
        return {name: repr(value) for name, value in given.items()}

    def files(self) -> tuple[str | Path | None, ...]:
        """Return the files that are read beside the checkpoint."""
        return self.options.assets, self.options.rules, self.converter


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The request of one rank.

    Attributes:
        source: The checkpoint.
        plain: Its state dict, with what objects in it say of themselves.
        state: The same, flat.
        places: The boxes of its tensors.
        same: Of each of them the first one with the same memory.
        part: What it wants, as other ranks are told.
        structure: Digest of all that a plan depends on but the checkpoint; None: it has none.
        key: Digest of all that a plan depends on; None: it has none.
    """

    source: Path
    plain: dict[str, Any]
    state: State
    places: list[LocalShard]
    same: list[int]
    part: WantedLeaves
    structure: bytes | None
    key: bytes | None

    def statement(self, how: LoadCall, generation: bytes) -> RankStatement:
        """Return the statement on it for other ranks, with a digest of the arguments."""
        options = {"options": digest(how.listed())}
        return RankStatement(str(self.source), options, new_nonce(), self.part.digest, generation)


class RankView(NamedTuple):
    """A request as the other ranks are told of it.

    Attributes:
        statement: What it is about to do.
        host: Its machine.
        objects: Whether objects in its state take what is loaded.
        fingerprint: The checkpoint that it sees; None: none that it can read, or it loads alone.
    """

    statement: RankStatement
    host: str
    objects: bool
    fingerprint: Fingerprint | None


def request(
    state_dict: MutableMapping[str, Any], path: str | Path, how: LoadCall, here: object
) -> LoadRequest:
    """Return the request of this rank."""
    plain = plain_of(state_dict)
    state = state_of(plain)
    places = state.shards
    same, source = sharing(places), formats.existing(path)
    structure = key = None
    beside = [one for one in how.files() if one is not None]
    extra = identity(beside) if beside else b""
    if extra is not None:
        own = structure_of(state, places)
        structure = digest((VERSION, here, how.listed(), extra, same, own))
        found = identity([source])
        key = None if found is None else digest((structure, found))
    return LoadRequest(
        source, plain, state, places, same, WantedLeaves(state.meta, state.paths), structure, key
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
        statements = ranks.all_gather(own.statement._replace(how=how.listed()))
    require_agreement(statements, ranks.rank, "checkpoints")
    seen = [one.fingerprint for one in said if one.fingerprint]
    require_same_checkpoint(seen, own.statement.target)
    return said
