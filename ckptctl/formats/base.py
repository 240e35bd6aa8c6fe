"""Base classes of formats, and the data types that formats read and lay out.

A format never copies tensor bytes. Reading returns a :class:`~ckptctl.catalog.Catalog`. Laying out
returns the place of every box of every tensor, and the other bytes of the files. The executor
copies the bytes in the same way for all formats.
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
from ckptctl.errors import FormatError, RefusedError, spell_option
from ckptctl.notes import Notes
from ckptctl.planner.plan import OutputFile
from ckptctl.storage.paths import is_present
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family
    from ckptctl.planner.mapping.detect import Candidate
    from ckptctl.planner.model_parallel import RankShard
    from ckptctl.planner.plan import CrcOf, Frame, RawCopy, Record

GB = 1_000_000_000
SPLIT_BYTES = 512 * 1024 * 1024
Weights = Literal["master", "module"]
"""The optimizer's fp32 copies (master), or the weights that the model computes with (module)."""


class Listing:
    """A path to recognize, with the names in it, which are read only once.

    Attributes:
        path: Absolute path of a folder or file.
        is_folder: Whether it is a folder.
        items: Direct children of the folder by name; empty for a file.
        names: Sorted names of the items; for a file, its name.
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

    def has(self, name: str) -> bool:
        """Return whether the folder has a file called *name* (see :func:`is_there`)."""
        return name in self.items and is_present(self.items[name])


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to lay out.

    Attributes:
        name: Fully qualified name.
        dtype: torch's name.
        shape: Global shape.
        path: Keys from the root of the saved object down to it.
        alias_of: Name of the output tensor that it shares all its memory with.
        requires_grad: Written if the format can store it.
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
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Everything that a format needs to lay out files.

    Attributes:
        name: File name of the output, for single-file formats.
        tensors: In the order in which to store them.
        blobs: Non-tensor values.
        max_shard_size: Bytes of tensors per file.
        mp: Number of model-parallel shards.
        rank_boxes: Function that returns the shard of a tensor on each model-parallel rank, None
            for a rank without one. If this is None, every rank stores every tensor in full.
        like: File index of each tensor, taken from a reference checkpoint.
        like_files: Names of these files, if the format keeps names.
        checksum: Whether the records will have checksums.
        metadata: Free-form strings, for formats that keep them.
        config: ``config.json`` of the model, for formats with a separate model description; None if
            there is none.
        family: Model family, or None if unknown.
        sizes: Axis sizes of the family.
        stack_layers: Whether to stack equal layers into one tensor, for formats that support this.
        extensions: Extensions of the source catalog.
        adapter: Content of ``adapter_config.json`` for the low-rank factors of an adapter; None if
            these are the tensors of a model.
        layout: Requested layout; None for the format's own, or the source's.
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
        start: Number of elements of the record before the box.
        strides: Elements between neighbors along each dimension; None for row-major.
    """

    box: Box
    record: int
    start: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Places of all output bytes.

    Attributes:
        files: Every file, with its frame.
        records: Byte ranges for tensor boxes.
        boxes: Places of each tensor's boxes.
        raw_copies: Byte ranges to copy unchanged.
        contents: Content of further files, which have no records.
        folder: Subfolder of the output for all of these files and for the sidecar files; empty for
            the output itself.
        outer_files: Content of files next to that subfolder.
        generated_files: Root-level names that this format always writes itself.
    """

    files: tuple[OutputFile, ...]
    records: tuple[Record, ...]
    boxes: Mapping[str, tuple[TensorPlace, ...]]
    raw_copies: tuple[RawCopy, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    folder: str = ""
    outer_files: Mapping[str, bytes] = field(default_factory=dict)
    generated_files: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Choices for checkpoints that can be read in more than one way.

    Attributes:
        model_type: Model family, for formats whose shards can only be joined with one.
        weights: ``master``: the optimizer's fp32 copies; ``module``: the weights that the model
            computes with; None for the format's default.
        tag: Save to read if the folder has several; None for the one in its pointer file.
        rules: Rules file with the division of tensors, for formats that do not record it.
        ranks: Number of ranks that saved it, for formats that do not record it.
        partial: Whether to read as much as possible of an incomplete checkpoint. Problems become
            :attr:`~ckptctl.catalog.Catalog.findings`, and tensors may have holes.
        replicas: Whether to list :attr:`~ckptctl.catalog.Catalog.replicas`.
        documents: ``config.json`` and ``params.json`` to join shards with; empty for those next to
            the shards.
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
    """Facts about a model that its trainer recorded in its own terms."""

    def find_candidates(
        self, known: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
    ) -> list[Candidate]:
        """Return the families that are described and have exactly the keys of *shapes*."""

    def contradicts_family(self, family: Family) -> bool:
        """Return whether the facts rule out every model of *family*."""

    def build_config(self, family: Family) -> Mapping[str, object] | None:
        """Return the facts as a ``config.json``, or None if there are none."""

    def confirms_padding(self, rows: int, size: int) -> bool:
        """Return whether only the first *size* of *rows* rows of a vocabulary are in use."""


class Format(ABC):
    """A checkpoint format, discovered in the modules and packages here.

    Attributes:
        name: Name for ``--from`` and ``--to``.
        other_names: Other names of it, or of the programs that read or write it, for hints.
        title: One line for ``--help`` and lists.
        recognized: Human-readable criteria of :meth:`sniff`.
        marks: Pattern for the start of names. :meth:`sniff` is only called for a file that matches,
            or a folder that contains a matching file or folder. None to call it always.
        specializes: More general formats that also match this format's files. A path that this
            format recognizes is not in one of them.
        yields_to: Formats that take precedence if a folder contains files of both.
        part_names: Pattern for files that are not a checkpoint on their own, or None.
        wholeness: Human-readable criteria for completeness. As in :attr:`recognized` and
            :attr:`proof`, facts are separated by ``"; "``.
        tested: Programs and settings that it was tested against, in one line.
        proof: Comparisons with other programs; each claim names its test.
        read_options: Fields of :class:`ReadOptions` that it supports, besides the family.
        layout: Layout of its tensors, or None for any.
        other_layouts: Whether the user can choose another layout.
        adapters: Whether it stores adapters only, not models.
        self_described: Whether its files contain the facts of the model themselves.
        training: Whether it stores training state with the model, which includes all non-tensor
            values; None if this depends on which non-tensor values it can store.
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

    def merged_parameters(self, names: Sequence[str]) -> dict[str, str]:
        """Map names of optimizer state to parameters that reading merged from several parts.

        Args:
            names: Names of tensors; those that are not state of a part are ignored.
        """
        return {}

    def recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """Interpret the :attr:`~ckptctl.catalog.Catalog.extensions` of a catalog of this format.

        Returns:
            Facts that the trainer recorded about the model, or None if there are none.
        """
        return None

    def resolve(self, catalog: Catalog) -> Catalog:
        """Locate the element bytes of every extent, so that its codec becomes ``raw``."""
        return catalog

    def find_inner_checkpoint(self, path: TreePath) -> TreePath | None:
        """Return the only checkpoint in the wrapper folder *path*, or None.

        None if *path* is the checkpoint itself, or contains anything else.
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
        keeps_metadata: Whether it can store free-form strings.
        records_ties: Whether it records the names of tensors skipped as shared.
        stacks_layers: Whether equal layers can be stacked into one tensor.
        adapter_layouts: Layouts of its adapters, the default first; empty if they have none.
        pads_vocabulary: Whether its programs expect a padded vocabulary.
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
        """Decide the place of each tensor, without I/O."""

    def can_store(self, dtype: str) -> bool:
        """Return whether the format can store elements of *dtype*."""
        return dtype in dtypes.BY_NAME

    @property
    def sharding_options(self) -> tuple[str, ...]:
        """Options that control the split into files, or none for single-file formats."""
        if self.parallel:
            return ("--mp", "--like")
        return ("--max-shard-size", "--like") if self.sharded else ()

    def check_dtypes(self, tensors: Sequence[OutputTensor]) -> None:
        """Raise RefusedError for the first tensor with a dtype that the format cannot store."""
        for tensor in tensors:
            if not self.can_store(tensor.dtype):
                raise RefusedError(
                    f"{self.name} cannot store {tensor.dtype}",
                    where=f"tensor `{tensor.name}`",
                    hint=f"skip the tensor with {spell_option('--exclude')}, or choose another "
                    f"{spell_option('--to')}",
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

    def yield_frame(_: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield 0, content

    return yield_frame


def make_content_file(path: str, content: bytes) -> OutputFile:
    """Make an output file with content that is known at planning time."""
    return OutputFile(path, len(content), make_constant_frame(content))


def make_copied_file(path: str, size: int) -> OutputFile:
    """Make an output file that is filled by one :class:`RawCopy`."""

    def yield_frame(_: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield from ()

    return OutputFile(path, size, yield_frame)
