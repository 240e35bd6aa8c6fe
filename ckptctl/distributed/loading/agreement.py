"""What one rank has for a load, and what it tells the others first: do they mean the same?"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch.distributed.checkpoint.stateful import Stateful

from ckptctl import formats
from ckptctl.distributed.loading.targets import Everything, Place, own_part, places_of, structure_of
from ckptctl.distributed.loading.ties import sharing
from ckptctl.distributed.state import State, plain_of, state_of
from ckptctl.ops.loading.identity import identity
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.loading.sight import Sight, require_one_sight
from ckptctl.ops.ranks.agreement import Statement, new_nonce, require_agreement
from ckptctl.ops.ranks.coordinator import Coordinator, sendable
from ckptctl.ops.saving.holdings import digest

Broadcast = bool | Literal["auto"]
VERSION = 1
"""Of what the key of a plan is made of."""


@dataclass(frozen=True, slots=True)
class How:
    """What is asked for.

    Attributes:
        options: How the checkpoint is read.
        broadcast: See :func:`~ckptctl.distributed.loading.load.load`.
        converter: A file that defines one more family.
    """

    options: LoadOptions
    broadcast: Broadcast = "auto"
    converter: str | Path | None = None

    def listed(self) -> dict[str, object]:
        """Return what has to be the same on all ranks, by the names of the arguments."""
        found = {one.name: getattr(self.options, one.name) for one in fields(self.options)}
        del found["jobs"]
        given = {"broadcast": self.broadcast, "converter": self.converter, **found}
        return {name: repr(value) for name, value in given.items()}

    def files(self) -> tuple[str | Path | None, ...]:
        """Return what is read beside the checkpoint."""
        return self.options.assets, self.options.rules, self.converter


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank has, and wants.

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
    places: list[Place]
    same: list[int]
    part: Everything
    structure: bytes | None
    key: bytes | None


class Said(NamedTuple):
    """What one rank tells the others first.

    Attributes:
        statement: What it is about to do.
        host: Its machine.
        objects: Whether objects in its state take what is loaded.
        sight: The checkpoint that it sees; None: none that it can read, or it loads alone.
    """

    statement: Statement
    host: str
    objects: bool
    sight: Sight | None


def request(
    state_dict: MutableMapping[str, Any], path: str | Path, how: How, here: object
) -> Request:
    """Find out what this rank wants.

    Args:
        state_dict: See :func:`~ckptctl.distributed.loading.load.load`.
        path: See there.
        how: What is asked for.
        here: What tells ranks apart: its number, and what it is one of.

    Raises:
        CkptError: A leaf cannot be loaded, or there is no checkpoint.
    """
    plain = plain_of(state_dict)
    state = state_of(plain)
    places = places_of(state)
    same, source = sharing(places), formats.existing(path)
    structure = key = None
    beside = [one for one in how.files() if one is not None]
    extra = identity(beside) if beside else b""
    if extra is not None:
        own = structure_of(state, places)
        structure = digest((VERSION, here, how.listed(), extra, same, own))
        found = identity([source])
        key = None if found is None else digest((structure, found))
    return Request(source, plain, state, places, same, own_part(state), structure, key)


def statement_of(asked: Request, how: How, generation: bytes) -> Statement:
    """Return what a rank says of *asked*; of its options only what tells whether they differ.

    Args:
        asked: What it wants.
        how: What is asked for.
        generation: Of the plan that it has for this key; empty: none.
    """
    options = {"options": digest(how.listed())}
    return Statement(str(asked.source), options, new_nonce(), asked.part.digest, generation)


def agree(
    ranks: Coordinator,
    how: How,
    own: Request | None,
    sight: Sight | None,
    generation: bytes,
    objects: bool,
    error: BaseException | None,
) -> list[Said]:
    """Go on only if all ranks do, and mean the same.

    Args:
        ranks: The group.
        how: What is asked of this rank.
        own: What it wants; None: it cannot say.
        sight: See :class:`Said`.
        generation: See :func:`statement_of`.
        objects: Whether objects in its state take what is loaded.
        error: Why it cannot go on.

    Raises:
        CkptError: They do not; on every rank.
    """
    problem = Statement("", problem=sendable(error))
    statement = problem if own is None else statement_of(own, how, generation)
    said = ranks.all_gather(Said(statement, socket.gethostname(), objects, sight))
    if error is not None:
        raise error
    statements = [one.statement for one in said]
    alike = all(one.how == statements[0].how for one in statements)
    if not alike and not any(one.problem for one in statements):
        statements = ranks.all_gather(statement._replace(how=how.listed()))
    require_agreement(statements, ranks.rank, "checkpoints")
    require_one_sight([one.sight for one in said if one.sight], statement.target)
    return said


def has_objects(state_dict: object) -> bool:
    """Return whether *state_dict* has objects that take their state themselves."""
    return isinstance(state_dict, MutableMapping) and any(
        isinstance(one, Stateful) for one in state_dict.values()
    )
