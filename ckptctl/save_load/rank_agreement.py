"""Agreement of all ranks before a save or a load: do they mean the same, and do plans hold?

A plan is used again only if every rank made it in the same planning (its *generation*) and has
found it by exactly what it holds: one exchange tells. Where a single rank has changed anything, all
of them plan anew. What ranks hold does not name a planning: those of two groups, with the same
boxes, can decide differently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptctl.errors import CkptError, RefusedError
from ckptctl.ranks.coordinator import RankError
from ckptctl.save_load.saving.local_shards import DIGEST, is_still_equal


class RankStatement(NamedTuple):
    """The statement of one rank before a save or a load.

    Attributes:
        target: Where it is to save, or what it is to load.
        how: Options that have to be the same everywhere, by name.
        nonce: Tells this call from all others; drawn anew each time.
        identity: Digest of what it says of its tensors and values.
        generation: Of the plan that it has for what it holds; empty: none.
        groups: Digests of its values, by the groups of that plan.
        problem: Why it cannot go on.
    """

    target: str
    how: Mapping[str, object] = {}
    nonce: bytes = b""
    identity: bytes = b""
    generation: bytes = b""
    groups: Mapping[int, bytes] = {}
    problem: CkptError | None = None


def new_nonce() -> bytes:
    """Return random bytes that tell this call from all others."""
    return os.urandom(16)


def require_agreement(
    said: Sequence[RankStatement], rank: int, places: str = "destinations"
) -> None:
    """Make sure that all ranks are about to do the same thing."""
    for other, one in enumerate(said):
        if one.problem and other != rank:
            raise RankError(other, one.problem)
    for other, one in enumerate(said):
        if one.target != said[0].target:
            raise RefusedError(
                f"the ranks have different {places}",
                where=one.target,
                why=f"rank 0: {said[0].target}, rank {other}: {one.target}",
                hint="pass the same absolute path on every rank",
            )
        if one.how != said[0].how:
            differing = [name for name in one.how if one.how[name] != said[0].how.get(name)]
            raise RefusedError(
                f"the ranks have different options: {', '.join(differing)}",
                where=one.target,
                why=f"rank 0: {dict(said[0].how)}, rank {other}: {dict(one.how)}",
            )


def name_generation(said: Sequence[RankStatement]) -> bytes:
    """Return the name of the plan that the ranks make now."""
    import hashlib  # with OpenSSL, which one process should not wait for

    found = hashlib.blake2b(digest_size=DIGEST)
    for one in said:
        found.update(one.nonce)
    return found.digest()


def is_unchanged(said: Sequence[RankStatement]) -> bool:
    """Return whether the plan of every rank still holds; the same on all ranks."""
    made = said[0].generation
    return (
        bool(made)
        and all(one.generation == made for one in said)
        and is_still_equal([one.groups for one in said])
    )


def is_first_to_say(said: Sequence[RankStatement], rank: int) -> bool:
    """Return whether no lower rank says the same of its tensors and values."""
    identity = said[rank].identity
    return all(one.identity != identity for one in said[:rank])
