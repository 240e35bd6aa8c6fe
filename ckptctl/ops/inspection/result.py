"""What an inspection returns: frozen, torch-free, JSON-able."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from ckptctl.catalog import Finding
from ckptctl.results import JsonField, Result
from ckptctl.storage.statistics import Statistics
from ckptctl.units import natural
from ckptctl.verdict import COMPLETE, SCOPE, Scope, Verdict, is_complete, worst_verdict

if TYPE_CHECKING:
    from ckptctl.ops.runs.listing import RunFolder

MISSING = "lacks"
"""The field of what a model does not have."""


@dataclass(frozen=True, slots=True)
class TensorInfo(Result, order="name dtype shape bytes chunks alias_of unsupported stats"):
    """One tensor of a checkpoint."""

    name: Annotated[str, JsonField("as it is stored")]
    dtype: Annotated[str, JsonField("torch's name, as in `bfloat16`")]
    shape: Annotated[tuple[int, ...], JsonField("as torch counts it")]
    nbytes: Annotated[int, JsonField("its size; 0: its elements cannot be read", name="bytes")]
    chunks: Annotated[int, JsonField("boxes that it is stored in")]
    alias_of: Annotated[str | None, JsonField("the tensor whose memory it shares")] = None
    statistics: Annotated[
        Statistics | None,
        JsonField(
            "with `--stats` only, and not of dtypes without numbers", name="stats", optional=True
        ),
    ] = None
    unsupported: Annotated[str | None, JsonField("why its elements cannot be read")] = None


@dataclass(frozen=True, slots=True)
class DTypeUse:
    """How much of a checkpoint has one dtype; aliases have no elements of their own."""

    tensors: Annotated[int, JsonField("tensors of that dtype")]
    elements: Annotated[int, JsonField("their elements")]
    nbytes: Annotated[int, JsonField("their bytes", name="bytes")]


@dataclass(frozen=True, slots=True)
class FileSize:
    """A file of a checkpoint."""

    path: Annotated[str, JsonField("relative to the checkpoint")]
    nbytes: Annotated[int, JsonField("its size", name="bytes")]


def in_order(files: Mapping[str, int]) -> list[FileSize]:
    """Return files in natural order."""
    return [FileSize(name, files[name]) for name in natural(files)]


@dataclass(frozen=True, slots=True)
class Member(Result, order="path format tensors bytes verdict problems"):
    """One checkpoint of a run folder.

    Attributes:
        read_failed: Whether the operating system failed a read.
    """

    path: Annotated[str, JsonField("where it is")]
    format: Annotated[str | None, JsonField("null: it cannot be read")]
    tensors: Annotated[int, JsonField("how many it has")]
    nbytes: Annotated[int, JsonField("bytes of them", name="bytes")]
    problems: Annotated[tuple[str, ...], JsonField("why it is not complete")]
    verdict: Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")]
    read_failed: bool = False


@dataclass(frozen=True, slots=True)
class Inspection(
    Result,
    order="path format model_type candidates layout root parameters bytes verdict complete scope "
    f"problems {MISSING} dtypes files assets metadata notes quantized dequantizable",
):
    """What is known of a path.

    Attributes:
        findings: Where :attr:`problems` come from; of a folder of checkpoints none.
        read_failed: Whether the operating system failed a read.
        run: What ``ls`` says of a folder whose entries are named as checkpoints of a run are.
    """

    path: Annotated[str, JsonField("as given")]
    format: Annotated[str, JsonField("[format](formats.md); `run`: a folder of checkpoints")]
    model_type: Annotated[str | None, JsonField("[model type](models.md), if exactly one fits")] = (
        None
    )
    candidates: Annotated[tuple[str, ...], JsonField("model types that fit")] = ()
    layout: Annotated[str | None, JsonField("how the tensors are named")] = None
    root: Annotated[str, JsonField("prefix of the model's tensors, with its dot")] = ""
    parameters: Annotated[
        int,
        JsonField("elements of the model's tensors, without optimizer state and aliases"),
    ] = 0
    nbytes: Annotated[
        int, JsonField("bytes of all tensors, aliases counted once", name="bytes")
    ] = 0
    dtypes: Annotated[
        Mapping[str, DTypeUse], JsonField("by torch's name of the dtype, most bytes first")
    ] = field(default_factory=dict)
    files: Annotated[Mapping[str, int], JsonField("data files, in natural order", to=in_order)] = (
        field(default_factory=dict)
    )
    problems: Annotated[tuple[str, ...], JsonField("why it is not complete")] = ()
    verdict: Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")] = Verdict.COMPLETE
    scope: Annotated[Scope, JsonField(SCOPE)] = "structure"
    findings: tuple[Finding, ...] = ()
    read_failed: bool = False
    lacks: Annotated[
        tuple[str, ...],
        JsonField("[tensors that its model type has](../explanation/coverage.md) and it does not"),
    ] = ()
    tensors: Annotated[
        tuple[TensorInfo, ...],
        JsonField("in the checkpoint's own order; with `--include` those that match"),
    ] = ()
    blobs: Annotated[tuple[str, ...], JsonField("names of the leaves that are not tensors")] = ()
    values: Annotated[
        Mapping[str, Annotated[str, JsonField("as Python writes it")]],
        JsonField(
            "those of them that are numbers or short text; of many in files of their own those "
            "nearest to the root, behind a URL none of these"
        ),
    ] = field(default_factory=dict)
    assets: Annotated[
        Mapping[str, int],
        JsonField("side files: configuration, tokenizer, ...", to=in_order),
    ] = field(default_factory=dict)
    metadata: Annotated[
        Mapping[str, str],
        JsonField("what the format carries: `__metadata__`, the index's `metadata`"),
    ] = field(default_factory=dict)
    notes: Annotated[tuple[str, ...], JsonField("what a reader should know")] = ()
    quantized: Annotated[
        Mapping[str, Annotated[str, JsonField("how, for people")]],
        JsonField("tensors that are quantized, by the name of the plain one that each stands for"),
    ] = field(default_factory=dict)
    dequantizable: Annotated[
        bool,
        JsonField("whether something is quantized and `--dequantize` understands all of it"),
    ] = False
    checkpoints: Annotated[
        tuple[Member, ...], JsonField("members of a run folder, in natural order")
    ] = ()
    run: RunFolder | None = None

    @classmethod
    def of_members(
        cls, path: str, members: tuple[Member, ...], run: RunFolder | None = None
    ) -> Inspection:
        """Return what is known of a folder of checkpoints."""
        problems = tuple(f"`{one.path}`: {one.problems[0]}" for one in members if one.problems)
        verdict = worst_verdict(member.verdict for member in members)
        failed = any(one.read_failed for one in members)
        return cls(
            *(path, "run"),
            problems=problems,
            verdict=verdict,
            read_failed=failed,
            checkpoints=members,
            run=run,
        )

    @property
    def complete(self) -> Annotated[bool | None, JsonField(COMPLETE)]:
        """Return whether nothing is missing; None: what could be missing is not known."""
        return is_complete(self.verdict, self.scope)
