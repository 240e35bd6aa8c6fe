"""What ranks tell each other before a save or a load: do they mean the same, and do plans hold?

A plan is used again only if every rank made it in the same planning (its *generation*) and holds
exactly what it did then (its *key*): one exchange tells. Where a single rank has changed anything,
all of them plan anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptctl.errors import CkptError, RefusedError
from ckptctl.ops.coordinator import RankError
from ckptctl.ops.holdings import DIGEST
from ckptctl.ops.save_values import still_equal


class Statement(NamedTuple):
    """What one rank says before a save or a load.

    Attributes:
        target: Where it is to save, or what it is to load.
        how: Options that have to be the same everywhere, by name.
        key: Digest of all that its part of a plan depends on.
        identity: Digest of what it says of its tensors and values.
        generation: Of the plan that it has for this key; empty: none.
        groups: Digests of its values, by the groups of that plan.
        problem: Why it cannot go on.
    """

    target: str
    how: Mapping[str, object] = {}
    key: bytes = b""
    identity: bytes = b""
    generation: bytes = b""
    groups: Mapping[int, bytes] = {}
    problem: CkptError | None = None


def require_agreement(said: Sequence[Statement], rank: int, places: str = "destinations") -> None:
    """Make sure that all ranks are about to do the same thing.

    Args:
        said: By all ranks, in order.
        rank: This one.
        places: What their targets are.

    Raises:
        RankError: Another rank cannot go on.
        RefusedError: They differ in where or how they are to save or load.
    """
    for other, one in enumerate(said):
        if one.problem and other != rank:
            raise RankError(other, one.problem)
    for other, one in enumerate(said):
        if one.target != said[0].target:
            raise RefusedError(
                f"the ranks were told different {places}",
                where=one.target,
                why=f"rank 0: {said[0].target}, rank {other}: {one.target}",
                hint="pass the same absolute path on every rank",
            )
        if one.how != said[0].how:
            differing = [name for name in one.how if one.how[name] != said[0].how.get(name)]
            raise RefusedError(
                f"the ranks were told different options: {', '.join(differing)}",
                where=one.target,
                why=f"rank 0: {dict(said[0].how)}, rank {other}: {dict(one.how)}",
            )


def generation(said: Sequence[Statement]) -> bytes:
    """Return the name of the plan that the ranks make, or have made, of what they hold."""
    found = hashlib.blake2b(digest_size=DIGEST)
    for one in said:
        found.update(one.key)
    return found.digest()


def unchanged(said: Sequence[Statement]) -> bool:
    """Return whether every rank has the plan for what all of them hold; the same on all ranks."""
    current = generation(said)
    return all(one.generation == current for one in said) and still_equal(
        [one.groups for one in said]
    )


def first_to_say(said: Sequence[Statement], rank: int) -> bool:
    """Return whether no lower rank says the same of its tensors and values."""
    identity = said[rank].identity
    return all(one.identity != identity for one in said[:rank])
