"""Which tensor goes into which output file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def fill(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Group names into shards of at most *limit* bytes, in order.

    The rule of ``huggingface_hub.split_torch_state_dict_into_shards``: a shard is closed by the
    first tensor that does not fit; a tensor above the limit gets a shard of its own.

    Args:
        sizes: Names with their bytes, in output order.
        limit: Bytes per shard.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, nbytes in sizes:
        if nbytes > limit:
            shards.append([name])
            continue
        if current and used + nbytes > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += nbytes
    if current:
        shards.append(current)
    return shards or [[]]


def grouped(names: Iterable[str], file_of: Mapping[str, int], files: int) -> list[list[str]]:
    """Group *names* by the file index that *file_of* gives, keeping their order."""
    shards: list[list[str]] = [[] for _ in range(files)]
    for name in names:
        shards[file_of[name]].append(name)
    return shards
