"""What :func:`ckptctl.extract` took out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ckptctl.storage.out_of_range import OutOfRange


@dataclass(frozen=True, slots=True)
class Extracted:
    """One tensor, or a slice of it.

    Attributes:
        name: Its name, in the layout that was asked for.
        sources: Names in the checkpoint of the tensors that hold it.
        dtype: torch's name of its dtype, after a cast.
        shape: The shape of what was taken.
        whole: The shape of the tensor.
        nbytes: Bytes of what was taken.
        preview: Its first and last values, where nothing was written and few were asked for.
    """

    name: str
    sources: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    nbytes: int
    preview: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "name": self.name,
            "sources": list(self.sources),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "whole": list(self.whole),
            "bytes": self.nbytes,
            "preview": self.preview,
        }


@dataclass(frozen=True, slots=True)
class Extraction:
    """What was taken out of a checkpoint.

    Attributes:
        source: The checkpoint, as it was named.
        output: The file that was written; None: none.
        tensors: What was taken.
        nbytes: Size of the file; 0 without one.
        bytes_read: Bytes of elements that were read.
        notes: What the user should know.
        out_of_range: What became infinite, NaN or saturated in the file, by tensor.
    """

    source: str
    output: str | None
    tensors: tuple[Extracted, ...]
    nbytes: int
    bytes_read: int
    notes: tuple[str, ...] = ()
    out_of_range: Mapping[str, OutOfRange] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "source": self.source,
            "output": self.output,
            "tensors": [one.to_json() for one in self.tensors],
            "bytes": self.nbytes,
            "bytes_read": self.bytes_read,
            "notes": list(self.notes),
            "out_of_range": {name: asdict(lost) for name, lost in self.out_of_range.items()},
        }
