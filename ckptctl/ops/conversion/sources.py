"""Which files transfers read, and what those files are before they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptctl.catalog import Computed, is_computed, is_memory, made_of, reached
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.plan import RawCopy, Transfer
from ckptctl.storage.files import source_files


def sources_of(
    root: str,
    transfers: Sequence[Transfer],
    virtual: Mapping[str, Computed],
    raw: Sequence[RawCopy] = (),
) -> tuple[dict[str, Computed], dict[str, FileIdentity]]:
    """Return the virtual files that are read, and the identities of the real ones below *root*.

    Args:
        root: The directory of the source.
        transfers: What reads; memory that they read has no identity.
        virtual: All virtual files of the source.
        raw: What is copied from *root* unchanged.

    Returns:
        The virtual files, those that they are made of included, and the identity of each file.
    """
    read = dict.fromkeys(o.file for transfer in transfers for o in transfer.source.operands)
    computed = reached(virtual, read)
    names = {name: None for name in read if not (is_computed(name) or is_memory(name))}
    names |= dict.fromkeys(sorted(file for place, file in made_of(computed) if place == root))
    names |= dict.fromkeys(item.source for item in raw)
    return computed, identities(root, names)


def identities(root: str, names: Iterable[str]) -> dict[str, FileIdentity]:
    """Return what must stay the same of each of the files called *names* while it is read."""
    with source_files(root) as files:
        return {name: files.identity(name) for name in names}
