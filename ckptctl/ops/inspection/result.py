"""What an inspection returns: frozen, torch-free, JSON-able."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.planner.retention import NOT_UNDERSTOOD, State
from ckptctl.units import natural

if TYPE_CHECKING:
    from ckptctl.storage.statistics import Statistics


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: Fully qualified name.
        dtype: torch's name of the dtype.
        shape: As torch counts it.
        nbytes: Bytes of its elements.
        chunks: Number of boxes that it is stored in.
        alias_of: The tensor whose memory it shares, if any.
        statistics: Its values, when they were asked for.
        unsupported: Why its elements cannot be read; None: they can.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: int
    alias_of: str | None = None
    statistics: Statistics | None = None
    unsupported: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        found: dict[str, object] = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.nbytes,
            "chunks": self.chunks,
            "alias_of": self.alias_of,
            "unsupported": self.unsupported,
        }
        if self.statistics:
            found["stats"] = self.statistics.to_json()
        return found


@dataclass(frozen=True, slots=True)
class DTypeUse:
    """How much of a checkpoint has one dtype.

    Attributes:
        tensors: Number of tensors.
        elements: Their elements; aliases count nothing.
        nbytes: Their bytes; aliases count nothing.
    """

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """One checkpoint of a run folder.

    Attributes:
        path: Where it is.
        format: Its format; None: it could not be read.
        tensors: Number of tensors.
        nbytes: Bytes of all tensors.
        problems: Why it is not complete; empty: it is.
        torn: Whether that is evidence; if not, it may be complete.
    """

    path: str
    format: str | None
    tensors: int
    nbytes: int
    problems: tuple[str, ...]
    torn: bool

    @property
    def complete(self) -> bool:
        """Return whether nothing is missing."""
        return not self.problems

    @property
    def state(self) -> State:
        """Return the answer in the words of ``ls``."""
        return state_of(self.problems, self.torn)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "path": self.path,
            "format": self.format,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "complete": self.complete,
            "state": self.state,
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a path.

    Attributes:
        path: What was inspected.
        format: Its format; ``run``: a folder of checkpoints.
        model_type: The family, if exactly one fits.
        candidates: The families that fit.
        layout: How its tensors are named.
        root: Prefix of the model's tensors inside the checkpoint.
        parameters: Elements of the model's tensors, without optimizer state and aliases.
        nbytes: Bytes of all tensors, aliases counted once.
        dtypes: Use of each dtype, most bytes first.
        files: Data files with their sizes in bytes.
        problems: Why it is not complete; empty: it is.
        torn: Whether one of these is evidence; if not, it may be complete.
        lacks: Tensors that its model type has and it does not, by their names in the checkpoint.
        tensors: In the checkpoint's own order.
        blobs: Names of the leaves that are not tensors.
        values: What those of them are that are numbers or short text, as Python writes it.
        assets: Side files with their sizes in bytes.
        metadata: Free-form strings that the format carries.
        notes: What a reader should know.
        quantised: How tensors are quantised, by the name of the plain tensor that each stands for.
        dequantisable: Whether ``--dequantize`` understands all of them, and there are any.
        checkpoints: The members of a run folder.
    """

    path: str
    format: str
    model_type: str | None = None
    candidates: tuple[str, ...] = ()
    layout: str | None = None
    root: str = ""
    parameters: int = 0
    nbytes: int = 0
    dtypes: Mapping[str, DTypeUse] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    torn: bool = False
    lacks: tuple[str, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    blobs: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    assets: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantised: Mapping[str, str] = field(default_factory=dict)
    dequantisable: bool = False
    checkpoints: tuple[Member, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether every byte of every tensor of the index is there, once."""
        return not self.problems

    @property
    def state(self) -> State:
        """Return the answer in the words of ``ls``."""
        return state_of(self.problems, self.torn)

    def to_json(self) -> dict[str, object]:
        """Return the published document without its envelope (``docs/reference/json.md``)."""
        return {
            "path": self.path,
            "format": self.format,
            "model_type": self.model_type,
            "candidates": list(self.candidates),
            "layout": self.layout,
            "root": self.root,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "complete": self.complete,
            "state": self.state,
            "problems": list(self.problems),
            "lacks": list(self.lacks),
            "dtypes": {
                name: {"tensors": use.tensors, "elements": use.elements, "bytes": use.nbytes}
                for name, use in self.dtypes.items()
            },
            "files": _sized(self.files),
            "assets": _sized(self.assets),
            "metadata": dict(self.metadata),
            "notes": list(self.notes),
            "quantised": dict(self.quantised),
            "dequantisable": self.dequantisable,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "blobs": list(self.blobs),
            "values": dict(self.values),
            "checkpoints": [member.to_json() for member in self.checkpoints],
        }


def state_of(problems: Sequence[str], torn: bool) -> State:
    """Return what a checkpoint with these problems is called."""
    return "complete" if not problems else "incomplete" if torn else NOT_UNDERSTOOD


def _sized(files: Mapping[str, int]) -> list[dict[str, object]]:
    return [{"path": name, "bytes": files[name]} for name in natural(files)]
