"""Agreement of all ranks before a save or load, on its target and on cached plans.

A cached plan is reused only if every rank made it in the same planning (its *generation*) and its
shards have not changed, which one exchange shows. If any rank has changed, all ranks plan again.
Shards alone do not identify a plan: two process groups with the same boxes can plan differently.
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
        target: Destination of the save, or checkpoint to load.
        how: Options that must be the same on all ranks, by name.
        nonce: Random bytes that identify this call.
        identity: Digest of the metadata of its tensors and values.
        generation: Generation of its cached plan, or empty if it has none.
        groups: Digests of its values, by the groups of that plan.
        problem: Error that keeps it from continuing.
    """

    target: str
    how: Mapping[str, object] = {}
    nonce: bytes = b""
    identity: bytes = b""
    generation: bytes = b""
    groups: Mapping[int, bytes] = {}
    problem: CkptError | None = None


def new_nonce() -> bytes:
    """Return random bytes that identify this call."""
    return os.urandom(16)


def require_agreement(
    said: Sequence[RankStatement], rank: int, places: str = "destinations"
) -> None:
    """Raise if the ranks have different targets or options, or another rank has failed."""
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
    """Return the generation of the plan that the ranks make now, from all their nonces."""
    import hashlib  # loads OpenSSL, which a single process does not need

    found = hashlib.blake2b(digest_size=DIGEST)
    for one in said:
        found.update(one.nonce)
    return found.digest()


def is_unchanged(said: Sequence[RankStatement]) -> bool:
    """Return whether the cached plans of all ranks are valid. All ranks get the same result."""
    made = said[0].generation
    return (
        bool(made)
        and all(one.generation == made for one in said)
        and is_still_equal([one.groups for one in said])
    )


def is_first_to_say(said: Sequence[RankStatement], rank: int) -> bool:
    """Return whether no lower rank has the same tensors and values as *rank*."""
    identity = said[rank].identity
    return all(one.identity != identity for one in said[:rank])
