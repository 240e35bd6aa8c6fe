"""``--like``: take the distribution of keys over files from another checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, UsageError, listed


@dataclass(frozen=True, slots=True)
class Reference:
    """How a reference checkpoint is cut into files.

    Attributes:
        path: Where it is.
        files: Its data files, sorted by name.
        file_of: For each tensor the index of its file.
    """

    path: str
    files: tuple[str, ...]
    file_of: Mapping[str, int]


def reference(path: Path | None, to_format: str) -> Reference | None:
    """Read the reference that ``--like`` names; None without it.

    Raises:
        UsageError: It is of another format than the output, or cuts a tensor over several files.
    """
    if path is None:
        return None
    catalog = formats.open_checkpoint(path)
    if catalog.format != to_format:
        raise UsageError(
            f"`--like` names a checkpoint in format {catalog.format}, the output is {to_format}",
            where=str(path),
        )
    if not formats.target(to_format).parallel:
        _require_whole(catalog)
    files = tuple(sorted(catalog.files))
    index = {name: position for position, name in enumerate(files)}
    file_of = {name: index[t.extents[0].file] for name, t in catalog.tensors.items() if t.extents}
    return Reference(str(path), files, file_of)


def _require_whole(catalog: Catalog) -> None:
    for name, entry in catalog.tensors.items():
        files = sorted({extent.file for extent in entry.extents})
        if len(files) > 1:
            raise UsageError(
                "cannot copy how this reference is cut into files",
                where=catalog.path,
                why=f"`{name}` is spread over {listed(files)}",
                hint="convert the reference first, and name the result",
            )


def require_same_keys(found: Reference, names: Collection[str]) -> None:
    """Raise MappingError unless the output has exactly the keys of the reference."""
    known = set(names)
    missing = [name for name in found.file_of if name not in known]
    surplus = [name for name in names if name not in found.file_of]
    if missing or surplus:
        raise MappingError(
            "the output does not have the keys of the reference",
            where=found.path,
            why="; ".join(
                f"{len(keys):,} {kind}: {listed(keys)}"
                for kind, keys in (("missing", missing), ("not in it", surplus))
                if keys
            ),
        )
