"""The free-form strings of a safetensors file (``__metadata__``): which of them still hold.

Sources: the ``modelspec`` of Stability's model metadata standard, kohya's ``ss_`` and ``sshs_``
keys, torchao's ``prototype/safetensors``, which describes each quantised tensor under its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.catalog import Catalog
from ckptctl.errors import listed
from ckptctl.formats.base import Output, OutputTensor, WritableFormat
from ckptctl.planner.mapping.mapped import MappedTensor

DERIVED = ("format", "total_size", "total_parameters")
"""Keys whose values are written anew, or follow from the tensors."""
_HASH = re.compile(r"(?i)hash|sha256|md5")
_WORD = re.compile(r"[^\s\"'\[\]{}(),:]+")


@dataclass(frozen=True, slots=True)
class Strings:
    """What becomes of a checkpoint's strings.

    Attributes:
        kept: Those that the output carries.
        left_out: Those that it does not, as ``__metadata__.KEY``, and why.
    """

    kept: Mapping[str, str]
    left_out: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader of an output should know."""
        return (f"not carried: {listed(list(self.left_out))}",) * bool(self.left_out)

    def without_hashes(self) -> Strings:
        """Return the strings of a file whose bytes of tensors are not those of the source."""
        hashes = [key for key in self.kept if _HASH.search(key)]
        kept = {key: text for key, text in self.kept.items() if key not in hashes}
        why = "it is a hash of other bytes"
        return Strings(kept, {**self.left_out, **{f"__metadata__.{key}": why for key in hashes}})


def strings(catalog: Catalog, tensors: Sequence[OutputTensor], target: WritableFormat) -> Strings:
    """Decide which of the strings of *catalog* an output carries.

    A string that says something of single tensors, or of their bytes, holds only while names,
    shapes and dtypes are the same and nothing is computed.

    Args:
        catalog: The source.
        tensors: What is written.
        target: The format to write.
    """
    made = {one.name: (one.dtype, one.shape) for one in tensors}
    there = {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
    changed = made != there or bool(catalog.computed)
    kept: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for key, text in catalog.metadata.items():
        if key in DERIVED or (text in there and key in there):
            continue
        if not target.keeps_metadata:
            left_out[f"__metadata__.{key}"] = f"{target.name} has no place for metadata"
        elif changed and _tells_of_tensors(key, text, there):
            left_out[f"__metadata__.{key}"] = "it describes tensors that are changed"
        else:
            kept[key] = text
    return Strings(kept, left_out)


def same_data(catalog: Catalog, mapped: Sequence[MappedTensor], output: Output) -> bool:
    """Return whether the tensors of an output are one file's, byte for byte and in its order.

    Args:
        catalog: The source.
        mapped: How its tensors become those of the output.
        output: Where these go.
    """
    if any(one.sources != one.targets for one in mapped):
        return False
    held = sorted(
        (extent.file, extent.offset, name)
        for name, entry in catalog.tensors.items()
        for extent in entry.extents
        if entry.alias_of is None
    )
    made = sorted((record.file, record.offset, record.name) for record in output.records)
    one_file = len({file for file, *_ in held}) == len({file for file, *_ in made}) == 1
    return one_file and [name for *_, name in held] == [name for *_, name in made]


def _tells_of_tensors(key: str, text: str, names: Collection[str]) -> bool:
    return bool(_HASH.search(key)) or any(
        word in names or word.rpartition(".")[0] in names for word in (key, *_WORD.findall(text))
    )
