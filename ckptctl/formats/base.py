"""Base classes of formats, and the data types that formats read and lay out.

A format never copies tensor bytes. Its ``read`` returns a :class:`~ckptctl.catalog.Catalog`. Its
``lay_out`` returns the location of every box of every tensor, and all other bytes of the files. The
executor copies the bytes in the same way for all formats.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from ckptctl import dtypes
from ckptctl.catalog import Blob, Box, Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, RefusedError, format_option
from ckptctl.notes import Notes
from ckptctl.planner.plan import OutputFile
from ckptctl.storage.paths import is_present
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family
    from ckptctl.planner.mapping.detect import Candidate
    from ckptctl.planner.model_parallel import RankShard
    from ckptctl.planner.plan import CrcLookup, Frame, RawCopy, Record

GB = 1_000_000_000
SPLIT_BYTES = 512 * 1024 * 1024
Weights = Literal["master", "module"]
"""The optimizer's fp32 copies (master), or the weights that the model computes with (module)."""


class Listing:
    """File or folder whose format is to be detected, with a listing that is read only once.

    Attributes:
        path: Absolute path of a folder or file.
        is_folder: Whether *path* is a folder.
        items: Direct children of the folder by name; empty for a file.
        names: Sorted names of the items, or only the name of the file.
    """

    def __init__(self, path: TreePath) -> None:
        self.path = path
        self.is_folder = path.is_dir()
        self.items = {item.name: item for item in path.iterdir()} if self.is_folder else {}
        self.names = sorted(self.items) if self.is_folder else [path.name]

    @cached_property
    def files(self) -> list[str]:
        """Sorted names of the files directly in the folder, or an empty list for a file."""
        return [name for name in sorted(self.items) if self.items[name].is_file()]

    def has_file(self, name: str) -> bool:
        """Return whether the folder has a file called *name* (see :func:`is_present`)."""
        return name in self.items and is_present(self.items[name])


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to lay out.

    Attributes:
        name: Fully qualified name.
        dtype: Name of the dtype in torch, such as ``bfloat16``.
        shape: Global shape.
        path: Keys from the root of the saved object down to the tensor.
        alias_of: Name of the output tensor with which this one shares all its memory, or None.
        requires_grad: Whether the tensor requires gradients; written if the format can store it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: KeyPath
    alias_of: str | None = None
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtypes.get_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Everything that a format needs to lay out files.

    Attributes:
        name: File name of the output, for single-file formats.
        tensors: Tensors in the order in which to store them.
        blobs: Non-tensor values.
        max_shard_size: Maximum tensor bytes per file.
        mp: Number of model-parallel shards.
        rank_boxes: Function that returns the shard of a tensor on each model-parallel rank, or None
            for a rank that stores no part of it. Without a function, every rank stores every tensor
            in full.
        like: File index of each tensor, taken from a reference checkpoint.
        like_files: File names of the reference checkpoint, if the format keeps them.
        checksum: Whether the records will have checksums.
        metadata: Free-form strings to store, for formats with ``keeps_metadata``.
        config: ``config.json`` of the model, for formats with a separate model description; None if
            there is none.
        family: Model family, or None if unknown.
        sizes: Sizes of the family's axes, by name of the axis.
        stack_layers: Whether to stack equal layers into one tensor, for formats that support this.
        extensions: Extensions of the source catalog.
        adapter: Content of ``adapter_config.json`` for the low-rank factors of an adapter; None if
            these are the tensors of a model.
        layout: Requested layout; None for the format's own layout, or else that of the source.
        notes: Collects messages for the user, such as ties written as two copies, and values
            skipped because the format cannot store them.
    """

    name: str
    tensors: Sequence[OutputTensor]
    blobs: Sequence[Blob] = ()
    max_shard_size: int = 5 * GB
    mp: int = 1
    rank_boxes: Callable[[OutputTensor], Sequence[RankShard | None]] | None = None
    like: Mapping[str, int] | None = None
    like_files: tuple[str, ...] = ()
    checksum: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    family: Family | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    stack_layers: bool = False
    extensions: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, object] | None = None
    layout: str | None = None
    notes: Notes = field(default_factory=Notes)


class TensorPlace(NamedTuple):
    """Record and offset of one box of a tensor.

    Attributes:
        box: Index range in the tensor.
        record: Index of the record that contains the box.
        start: Offset of the box in the record, in elements.
        strides: Strides of the box in the record, in elements; None for row-major order.
    """

    box: Box
    record: int
    start: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Locations of all output bytes.

    Attributes:
        files: Every file with tensors, with its frame (the bytes outside of records).
        records: Byte ranges for tensor boxes.
        boxes: Locations of each tensor's boxes, by name of the tensor.
        raw_copies: Byte ranges to copy unchanged.
        contents: Contents of further files, which have no records, by name.
        folder: Subfolder of the output for all of these files and for the sidecar files; empty for
            the output itself.
        outer_files: Contents of files next to that subfolder, by name.
        generated_keys: Top-level keys of values that the format always writes itself.
    """

    files: tuple[OutputFile, ...]
    records: tuple[Record, ...]
    boxes: Mapping[str, tuple[TensorPlace, ...]]
    raw_copies: tuple[RawCopy, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    folder: str = ""
    outer_files: Mapping[str, bytes] = field(default_factory=dict)
    generated_keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Choices for checkpoints that can be read in more than one way.

    Attributes:
        model_type: Model family, for formats whose shards cannot be joined without it.
        weights: ``master``: the optimizer's fp32 copies; ``module``: the weights that the model
            computes with; None for the format's default.
        tag: Name of the save to read if the folder has several; None for the save that the pointer
            file names.
        rules: Path of a file that declares how tensors are sharded, for formats that do not record
            it.
        ranks: Number of ranks that saved the checkpoint, for formats that do not record it.
        partial: Whether to read as much as possible of an incomplete checkpoint. Problems become
            :attr:`~ckptctl.catalog.Catalog.findings`, and tensors may have holes.
        replicas: Whether to list :attr:`~ckptctl.catalog.Catalog.replicas`.
        documents: Contents of ``config.json`` and ``params.json`` that describe the model to join.
            If empty, the files next to the shards are read.
    """

    model_type: str | None = None
    weights: Weights | None = None
    tag: str | None = None
    rules: TreePath | None = None
    ranks: int | None = None
    partial: bool = False
    replicas: bool = False
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


DEFAULT_READ_OPTIONS = ReadOptions()


class RecordedFacts(Protocol):
    """Facts about a model, recorded by its trainer (such as Megatron's arguments)."""

    def find_candidates(
        self, known: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
    ) -> list[Candidate]:
        """Return the families of *known* that fit the facts, with exactly the keys of *shapes*."""

    def contradicts_family(self, family: Family) -> bool:
        """Return whether the facts rule out every model of *family*."""

    def build_config(self, family: Family) -> Mapping[str, object] | None:
        """Return the facts as a ``config.json``, or None if there are none."""

    def confirms_padding(self, rows: int, size: int) -> bool:
        """Return whether only the first *size* of *rows* rows of a vocabulary are in use."""


class Format(ABC):
    """Base class of checkpoint formats.

    Attributes:
        name: Name for ``--from`` and ``--to``.
        other_names: Aliases, such as names of programs that read or write the format, for hints.
        title: One-line description for ``--help`` and lists.
        recognized: Human-readable criteria of :meth:`sniff`.
        marks: Pattern for the start of names. :meth:`sniff` is only called for a file that matches,
            or a folder that contains a matching file or folder. None to call it always.
        specializes: Names of more general formats that also match this format's files. They are not
            tried for a path that this format recognizes.
        yields_to: Names of formats that take precedence if a folder contains files of both.
        part_names: Pattern for names of files that are not a checkpoint on their own, or None.
        wholeness: Human-readable criteria for completeness. As in :attr:`recognized` and
            :attr:`proof`, facts are separated by ``"; "``.
        tested: Programs and settings that the format was tested against, in one line.
        proof: Comparisons with other programs; each claim names its test.
        read_options: Names of the :class:`ReadOptions` fields that the format supports, besides
            ``model_type``.
        layout: Layout of its tensors, or None if it can store any layout.
        other_layouts: Whether the user can choose another layout.
        adapters: Whether it stores only adapters, not models.
        self_described: Whether its files describe the model, so that no ``config.json`` is needed.
        training: Whether it stores training state with the model; all non-tensor values are then
            training state. None to decide by whether it can store non-tensor values.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str]
    recognized: ClassVar[str] = ""
    marks: ClassVar[re.Pattern[str] | None] = None
    specializes: ClassVar[frozenset[str]] = frozenset()
    yields_to: ClassVar[frozenset[str]] = frozenset()
    part_names: ClassVar[re.Pattern[str] | None] = None
    wholeness: ClassVar[str] = ""
    tested: ClassVar[str] = ""
    proof: ClassVar[str] = ""
    layout: ClassVar[str | None] = None
    read_options: ClassVar[frozenset[str]] = frozenset()
    other_layouts: ClassVar[bool] = False
    adapters: ClassVar[bool] = False
    self_described: ClassVar[bool] = False
    training: ClassVar[bool | None] = None

    @abstractmethod
    def sniff(self, listing: Listing) -> str | None:
        """Return evidence that a path is in this format, or None.

        The evidence is human-readable, as in ``.metadata and 8 .distcp files``. Only names and a
        few bytes are read.
        """

    def is_interrupted(self, listing: Listing) -> bool:
        """Return whether *listing* is an interrupted save that no format recognizes.

        :meth:`read` reports the missing files.
        """
        return False

    @abstractmethod
    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """Read the index of a checkpoint.

        Args:
            path: Absolute path of a directory or file that :meth:`sniff` accepts.
            options: Options; only those in :attr:`read_options` are ever set.

        Raises:
            CkptError: The index is missing, damaged or malicious.
        """

    def refine(self, catalog: Catalog, options: ReadOptions) -> Catalog:
        """Add this format's knowledge to the catalog of a format that it specializes."""
        return catalog

    def map_merged_parameters(self, names: Sequence[str]) -> dict[str, str]:
        """Map optimizer state of split parameters to the parameters that :meth:`read` merged.

        Args:
            names: Names of tensors; names of other tensors than such state are ignored.
        """
        return {}

    def parse_recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """Interpret the :attr:`~ckptctl.catalog.Catalog.extensions` of a catalog of this format.

        Returns:
            Facts that the trainer recorded about the model, or None if there are none.
        """
        return None

    def resolve_codecs(self, catalog: Catalog) -> Catalog:
        """Locate the element bytes of every extent, so that its codec becomes ``raw``."""
        return catalog

    def find_inner_checkpoint(self, path: TreePath) -> TreePath | None:
        """Return the only checkpoint in the wrapper folder *path*, or None.

        The result is also None if *path* is the checkpoint itself, or contains anything else.
        """
        return None


class WritableFormat(Format):
    """A format that ckptctl can write.

    Attributes:
        single_file: Whether the output is one file instead of a directory.
        nested: Whether it keeps nested dictionaries and non-tensor values.
        verbatim: Whether values in a separate ``torch.save`` zip are copied unchanged.
        parallel: Whether it has one file per model-parallel rank.
        sharded: Whether tensors are split into files by size.
        single_file_bytes: Maximum tensor bytes for which users expect a single file; 0 if never.
        has_params_json: Whether ``params.json`` describes the model.
        ties: Human-readable handling of tensors that share memory.
        keeps_metadata: Whether it can store free-form metadata strings.
        records_ties: Whether it records the names of tensors skipped as shared.
        stacks_layers: Whether equal layers can be stacked into one tensor.
        adapter_layouts: Layouts in which it can store adapters, the default first; empty if none.
        pads_vocabulary: Whether programs that read the format expect a padded vocabulary.
    """

    single_file: ClassVar[bool] = False
    nested: ClassVar[bool] = False
    verbatim: ClassVar[bool] = False
    parallel: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    single_file_bytes: ClassVar[int] = 0
    has_params_json: ClassVar[bool] = False
    ties: ClassVar[str] = ""
    records_ties: ClassVar[bool] = False
    keeps_metadata: ClassVar[bool] = False
    stacks_layers: ClassVar[bool] = False
    adapter_layouts: ClassVar[tuple[str, ...]] = ()
    pads_vocabulary: ClassVar[bool] = False

    @abstractmethod
    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """Assign a location to each tensor, without I/O."""

    def can_store(self, dtype: str) -> bool:
        """Return whether the format can store elements of *dtype*."""
        return dtype in dtypes.BY_NAME

    @property
    def sharding_options(self) -> tuple[str, ...]:
        """Options that control the split into files, or none for single-file formats."""
        if self.parallel:
            return ("--mp", "--like")
        return ("--max-shard-size", "--like") if self.sharded else ()

    def require_storable_dtypes(self, tensors: Sequence[OutputTensor]) -> None:
        """Raise RefusedError for the first tensor with a dtype that the format cannot store."""
        for tensor in tensors:
            if not self.can_store(tensor.dtype):
                raise RefusedError(
                    f"{self.name} cannot store {tensor.dtype}",
                    where=f"tensor `{tensor.name}`",
                    hint=f"skip the tensor with {format_option('--exclude')}, or choose another "
                    f"{format_option('--to')}",
                )


def require_folder(path: TreePath) -> None:
    """Raise FormatError if *path* is a file, for formats with one file per rank."""
    if not path.is_dir():
        raise FormatError(
            "this is the file of a single rank",
            where=str(path),
            hint="pass the folder with the files of all ranks",
        )


def make_constant_frame(content: bytes) -> Frame:
    """Make the frame of a file that starts with *content*, followed only by records."""

    def yield_frame(_: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield 0, content

    return yield_frame


def make_content_file(path: str, content: bytes) -> OutputFile:
    """Make an output file with content that is known at planning time."""
    return OutputFile(path, len(content), make_constant_frame(content))


def make_copied_file(path: str, size: int) -> OutputFile:
    """Make an output file that is filled by one :class:`RawCopy`."""

    def yield_frame(_: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield from ()

    return OutputFile(path, size, yield_frame)
