"""Leaves that are no tensors, of many ranks: which of them differ, and who writes them.

The lowest rank that has one writes it; others write theirs only where it differs, below
``rank_N.``. Which ones differ (random-number states do at every save) is found out once; from then
on ranks compare digests of *groups*: values that the same ranks have and that are equal there make
one group together, with a positive number; each one that differs is a group of its own, with a
negative number.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.catalog import Path
from ckptctl.errors import MappingError, listed
from ckptctl.formats.shared.own_values import below_rank
from ckptctl.formats.shared.structure import join
from ckptctl.ops.saving.holdings import DIGEST, Packed, Structure

Groups = Mapping[int, Sequence[str]]
"""Names of the values of each group."""


@dataclass(frozen=True, slots=True)
class DividedValues:
    """Who writes which value.

    Attributes:
        written: For each rank what it writes, with the names under which it does.
        paths: Keys of everything that is written, by the name that it gets.
        groups: For each rank the group of each of its values, compressed.
    """

    written: Sequence[Mapping[str, str]]
    paths: Mapping[str, Path]
    groups: Sequence[bytes]


def divide_values(held: Sequence[Packed], structures: Mapping[bytes, Structure]) -> DividedValues:
    """Say who writes which value.

    Args:
        held: By all ranks, in order.
        structures: What the ranks say alike, by its digest.

    Raises:
        MappingError: A value has the name under which another rank's is kept.
    """
    first: dict[str, bytes] = {}
    written: list[dict[str, str]] = []
    paths: dict[str, Path] = {}
    differing: dict[tuple[bytes, bytes], list[str]] = {}
    for rank, one in enumerate(held):
        known = structures[one.identity].paths
        key = (one.identity, one.values)
        own: dict[str, str] = {}
        if key not in differing:
            for name, value in zip(known, _digests(one.values), strict=True):
                if name not in first:
                    first[name], own[name], paths[name] = value, name, known[name]
                elif first[name] != value:
                    differing.setdefault(key, []).append(name)
            differing.setdefault(key, [])
        for name in differing[key]:
            own[name] = name_apart(rank, known[name])
            paths[own[name]] = below_rank(rank, known[name])
        written.append(own)
    apart = {name for names in differing.values() for name in names}
    _require_free(first, written)
    groups = _groups(structures, apart)
    return DividedValues(written, paths, [groups[one.identity] for one in held])


def _require_free(first: Mapping[str, bytes], written: Sequence[Mapping[str, str]]) -> None:
    """Make sure that no value is called what another one is called that is kept apart."""
    for rank, own in enumerate(written):
        taken = [under for name, under in own.items() if name != under and under in first]
        if taken:
            raise MappingError(
                f"the state has {listed(taken)} of its own",
                why=f"that is the name of what rank {rank} has there and other ranks differ in",
                hint="give it a name that does not begin with `rank_N.`",
            )


def path_of(rank: int, name: str, under: str, paths: Mapping[str, Path]) -> Path:
    """Return the keys of a value as it is written.

    Args:
        rank: Who writes it.
        name: Its name there.
        under: The name that it gets.
        paths: Keys of that rank's values.
    """
    return paths[name] if under == name else below_rank(rank, paths[name])


def name_apart(rank: int, path: Path) -> str:
    """Return the name under which *rank* writes a value that differs from the lowest rank's."""
    return join(below_rank(rank, path))


def _digests(values: bytes) -> Iterator[bytes]:
    return (values[start : start + DIGEST] for start in range(0, len(values), DIGEST))


def _groups(structures: Mapping[bytes, Structure], apart: set[str]) -> dict[bytes, bytes]:
    holders: dict[str, list[bytes]] = {}
    for identity, structure in structures.items():
        for name in structure.paths:
            holders.setdefault(name, []).append(identity)
    numbers: dict[tuple[bytes, ...], int] = {}
    number = {
        name: numbers.setdefault(tuple(found), len(numbers) + 1) for name, found in holders.items()
    }
    number |= {name: -1 - index for index, name in enumerate(sorted(apart))}
    return {
        identity: zlib.compress(array("i", [number[name] for name in one.paths]).tobytes())
        for identity, one in structures.items()
    }


def unpack_groups(names: Sequence[str], groups: bytes) -> Groups:
    """Return a rank's values by group.

    Args:
        names: Of its values, in order.
        groups: See :class:`DividedValues`.
    """
    found: dict[int, list[str]] = {}
    for name, number in zip(sorted(names), _sorted(names, groups), strict=True):
        found.setdefault(number, []).append(name)
    return found


def _sorted(names: Sequence[str], groups: bytes) -> Iterator[int]:
    numbers = array("i", zlib.decompress(groups)) if groups else array("i")
    return (number for _, number in sorted(zip(names, numbers, strict=True)))


def group_digests(groups: Groups, values: Mapping[str, bytes]) -> dict[int, bytes]:
    """Return one digest for each group.

    Args:
        groups: The names.
        values: Digest of each value, by name.
    """
    return {
        number: hashlib.blake2b(
            b"".join([values[name] for name in names]), digest_size=DIGEST
        ).digest()
        for number, names in groups.items()
    }


def still_equal(said: Sequence[Mapping[int, bytes]]) -> bool:
    """Return whether ranks still agree on all values on which they did.

    Args:
        said: The digests of all ranks' groups.
    """
    first: dict[int, bytes] = {}
    return all(
        number < 0 or first.setdefault(number, found) == found
        for groups in said
        for number, found in groups.items()
    )


def written_now(
    rank: int, groups: Groups, paths: Mapping[str, Path], said: Sequence[Mapping[int, bytes]]
) -> dict[str, str]:
    """Return what *rank* writes, with the names under which it does.

    Args:
        rank: The rank.
        groups: Its groups.
        paths: Keys of its values.
        said: See :func:`still_equal`, which has to hold.
    """
    written: dict[str, str] = {}
    for number, names in groups.items():
        lowest = next(index for index, digests in enumerate(said) if number in digests)
        if lowest == rank:
            written |= {name: name for name in names}
        elif said[lowest][number] != said[rank][number]:
            written |= {name: name_apart(rank, paths[name]) for name in names}
    return written
