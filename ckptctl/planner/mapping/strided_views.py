"""Stored tensors of another layout as strided tensors: nothing is copied for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.strided import Part, Strided


def as_strided(
    tensors: Sequence[MappedTensor],
    key: str,
    entries: Mapping[str, TensorEntry],
    dtype: str | None = None,
) -> Strided:
    """Return a stored tensor of the target as elements of the source's stored tensors.

    Args:
        tensors: All that it holds; nothing is added to their elements.
        key: The target's tensor.
        entries: The source's tensors.
        dtype: The dtype to which elements are cast, or None to keep theirs.

    Raises:
        MappingError: They have different dtypes.
    """
    stored_dtype = entries[tensors[0].sources[0].key].dtype
    for entry in (entries[source.key] for mapped in tensors for source in mapped.sources):
        if entry.dtype != stored_dtype:
            raise MappingError(
                f"parts of one tensor have different dtypes: {stored_dtype} and {entry.dtype}",
                where=f"tensor `{entry.name}`",
                why=f"they are merged into one tensor, `{key}`",
            )
    parts: list[Part] = []
    for mapped in tensors:
        sources = [entries[source.key] for source in mapped.sources]
        for target in mapped.targets:
            if target.key == key:
                shape = target.tensor.shape
                parts += [
                    part._replace(of=sources[int(part.of.name)]) for part in target.tensor.parts
                ]
    return Strided(shape, stored_dtype, dtype or stored_dtype, tuple(parts))


def by_target(tensors: Iterable[MappedTensor]) -> dict[str, list[MappedTensor]]:
    """Return what each stored tensor of the target consists of, by its key.

    Of a logical tensor that several of them hold, each has its own part only.
    """
    found: dict[str, list[MappedTensor]] = {}
    for mapped in tensors:
        for target in mapped.targets:
            own = mapped if len(mapped.targets) == 1 else replace(mapped, targets=(target,))
            found.setdefault(target.key, []).append(own)
    return found
