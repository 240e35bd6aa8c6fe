"""Who writes what: replicated chunks are spread so that all ranks write about as many bytes.

Longest processing time first (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969):
the largest chunk goes to the candidate with the least to do so far, what only one rank has counted
from the start. Small chunks stay together on the first candidate that has room for them.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALL = 64 << 10


def assign(
    chunks: Sequence[tuple[int, Sequence[int]]], ranks: int, small: int = SMALL
) -> list[int]:
    """Return for each chunk the rank that writes it.

    Args:
        chunks: Bytes of each, and the ranks that hold it, in order.
        ranks: How many there are.
        small: Chunks below so many bytes stay together: what saves a file to be opened is worth
            more than what they weigh.
    """
    load = [0] * ranks
    chosen = [-1] * len(chunks)
    shared: list[int] = []
    for index, (nbytes, holders) in enumerate(chunks):
        if len(holders) == 1:
            chosen[index] = holders[0]
            load[holders[0]] += nbytes
        else:
            shared.append(index)
    shared.sort(key=lambda index: (-chunks[index][0], index))
    for index in shared:
        nbytes, holders = chunks[index]
        if nbytes < small:
            rank = min(holders)
        else:
            rank = min(holders, key=lambda holder: (load[holder], holder))
        chosen[index] = rank
        load[rank] += nbytes
    return chosen
