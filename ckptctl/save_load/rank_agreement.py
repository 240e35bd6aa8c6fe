"""Agreement of all ranks, before a save or load, on its target and on cached plans.

Cached plans are reused only if all ranks made them in the same round of planning, which means that
the plans have the same *generation*, and if no rank's shards have changed. The ranks determine this
in one exchange. If the shards of any rank have changed, all ranks plan again. Shards alone do not
identify a plan, because two process groups with the same boxes can plan differently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptctl.errors import CkptError, RefusedError
from ckptctl.ranks.coordinator import RankError
from ckptctl.save_load.saving.local_shards import DIGEST_BYTES, is_still_equal


class RankStatement(NamedTuple):
    """Information that a rank sends to all other ranks before a save or a load.

    Attributes:
        target: Destination of the save, or checkpoint to load.
        options: Options that must be the same on all ranks, by name.
        nonce: Random bytes that identify this call.
        identity: Digest of the metadata of the rank's tensors and values.
        generation: Generation of the rank's cached plan, or empty if there is none.
        groups: Digests of the rank's values, by the groups of the cached plan.
        problem: Error that prevents the rank from continuing, if any.
    """

    target: str
    options: Mapping[str, object] = {}
    nonce: bytes = b""
    identity: bytes = b""
    generation: bytes = b""
    groups: Mapping[int, bytes] = {}
    problem: CkptError | None = None


def make_nonce() -> bytes:
    """Return random bytes that identify one call of a save or a load."""
    return os.urandom(16)


def require_agreement(
    replies: Sequence[RankStatement], rank: int, places: str = "destinations"
) -> None:
    """Raise if the ranks have different targets or options, or another rank has failed."""
    for other_rank, reply in enumerate(replies):
        if reply.problem and other_rank != rank:
            raise RankError(other_rank, reply.problem)
    for other_rank, reply in enumerate(replies):
        if reply.target != replies[0].target:
            raise RefusedError(
                f"the ranks have different {places}",
                where=reply.target,
                why=f"rank 0: {replies[0].target}, rank {other_rank}: {reply.target}",
                hint="pass the same absolute path on every rank",
            )
        if reply.options != replies[0].options:
            differing = [
                name
                for name in reply.options
                if reply.options[name] != replies[0].options.get(name)
            ]
            raise RefusedError(
                f"the ranks have different options: {', '.join(differing)}",
                where=reply.target,
                why=f"rank 0: {dict(replies[0].options)}, rank {other_rank}: {dict(reply.options)}",
            )


def compute_generation(statements: Sequence[RankStatement]) -> bytes:
    """Compute the generation of the plan that the ranks make now, from the nonces of all ranks."""
    import hashlib  # loads OpenSSL, which a single process does not need

    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for statement in statements:
        hasher.update(statement.nonce)
    return hasher.digest()


def are_cached_plans_valid(statements: Sequence[RankStatement]) -> bool:
    """Return whether the cached plans of all ranks are valid. All ranks get the same result."""
    generation = statements[0].generation
    return (
        bool(generation)
        and all(statement.generation == generation for statement in statements)
        and is_still_equal([statement.groups for statement in statements])
    )


def is_first_with_identity(statements: Sequence[RankStatement], rank: int) -> bool:
    """Return whether no lower rank has the same tensors and values as *rank*."""
    identity = statements[rank].identity
    return all(statement.identity != identity for statement in statements[:rank])
