"""Base classes of checkpoint formats, and their argument and result types.

A format never copies tensor bytes. Its ``read`` method returns a
:class:`~ckptctl.catalog.Catalog`. Its ``lay_out`` method returns the file offset of every tensor
box, and all other bytes of the output files, such as headers. The executor then copies the tensor
bytes, with the same code for all formats.
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
from ckptctl.errors import CkptError, FormatError, RefusedError, format_option
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
"""``master`` for the optimizer's fp32 weights, ``module`` for the weights used in forward."""


class Listing:
    """A file, or a folder with a cached listing, whose format is to be detected.

    Attributes:
        path: Absolute path of a folder or file.
        is_folder: Whether *path* is a folder.
        items: Direct children of the folder by name, or empty if *path* is a file.
        names: Sorted names of the children, or only the name of the file.
    """

    def __init__(self, path: TreePath) -> None:
        self.path = path
        self.is_folder = path.is_dir()
        self.items = {item.name: item for item in path.iterdir()} if self.is_folder else {}
        self.names = sorted(self.items) if self.is_folder else [path.name]

    @cached_property
    def files(self) -> list[str]:
        """Sorted names of the files directly in the folder, or empty if *path* is a file."""
        return [name for name in sorted(self.items) if self.items[name].is_file()]

    def has_file(self, name: str) -> bool:
        """Return whether the folder contains the file *name*, according to :func:`is_present`."""
        return name in self.items and is_present(self.items[name])


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written.

    Attributes:
        name: Fully qualified name.
        dtype: Name of the torch dtype, such as ``bfloat16``.
        shape: Global shape.
        path: Keys from the root of the saved object down to the tensor.
        alias_of: Name of the output tensor that has the same storage and elements, or None.
        requires_grad: Whether the tensor requires gradients. Ignored if the format cannot store it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: KeyPath
    alias_of: str | None = None
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * dtypes.get_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Input of :meth:`WritableFormat.lay_out`, which describes the checkpoint to write.

    Attributes:
        name: File name of the output, for single-file formats.
        tensors: Tensors in the order in which to store them.
        blobs: Non-tensor values.
        max_shard_size: Maximum tensor bytes per file.
        mp: Number of model-parallel ranks.
        rank_boxes: Function that returns the shard of a tensor on each model-parallel rank, or None
            for a rank that does not store the tensor. If this field is None, every rank stores all
            tensors in full.
        like: File index of each tensor in the reference checkpoint, by tensor name.
        like_files: File names of the reference checkpoint, if the format keeps them.
        checksum: Whether the records will have checksums.
        metadata: Free-form strings to store, for formats with ``keeps_metadata``.
        config: ``config.json`` of the model, for formats that describe the model in another file.
            None if it is unknown.
        family: Model family, or None if unknown.
        sizes: Sizes of the family's axes, by axis name.
        stack_layers: Whether to stack the tensors of equal layers, if the format supports it.
        extensions: Model descriptions of the source catalog, in the config keys of trainers.
        adapter: Parsed ``adapter_config.json`` if the tensors are LoRA factors of an adapter, or
            None if they are the weights of a model.
        layout: Requested layout, or None for the format's own layout. A format that has no own
            layout then writes the layout of the source.
        notes: Collector of messages for the user, for example about values that are skipped because
            the format cannot store them.
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
    """Location of one box of a tensor in an output record.

    Attributes:
        box: Index ranges of the box in the tensor.
        record: Index of the record that contains the box.
        start: Offset of the first element of the box in the record, in elements.
        strides: Strides of the box in the record, in elements, or None for row-major order.
    """

    box: Box
    record: int
    start: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Locations of all bytes of a checkpoint to be written.

    Attributes:
        files: Files that contain tensors, each with its frame, such as headers and trailers.
        records: Byte ranges that contain tensor boxes.
        boxes: Locations of the boxes of each tensor, by tensor name.
        raw_copies: Byte ranges of the source that are copied unchanged.
        contents: Contents of files without tensors, by file name.
        folder: Subfolder of the output that contains all of these files and the sidecar files, or
            empty if they are directly in the output folder.
        outer_files: Contents of files next to *folder*, by file name.
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
    """Options for reading checkpoints.

    Attributes:
        model_type: Model family, for formats that do not record how tensors are sharded.
        weights: ``master`` for the optimizer's fp32 weights, ``module`` for the weights used in
            forward, or None for the format's default.
        tag: Name of the save to read if the folder contains several, or None for the save that the
            pointer file names.
        rules: Path of a file that declares how tensors are sharded, for formats that do not record
            it.
        ranks: Number of ranks that saved the checkpoint, for formats that do not record it.
        partial: Whether to read as much as possible of an incomplete checkpoint. Problems become
            :attr:`~ckptctl.catalog.Catalog.findings`, and tensors may have holes.
        replicas: Whether to list replicated boxes in :attr:`~ckptctl.catalog.Catalog.replicas`.
        documents: Parsed ``config.json`` and ``params.json`` of the model whose shards are joined.
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
    """Model hyperparameters that a trainer recorded in the checkpoint, such as Megatron's args."""

    def find_candidates(
        self, known: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
    ) -> list[Candidate]:
        """Return the families that match the recorded facts and have exactly the keys of *shapes*.

        Args:
            known: Families to choose from, by name.
            shapes: Shapes of the stored tensors, by key.
            root: Folder of the checkpoint, for error messages.
        """

    def can_describe(self, family: Family) -> bool:
        """Return whether the trainer has fields for all facts of *family*."""

    def contradicts_family(self, family: Family) -> bool:
        """Return whether no model of *family* can have the recorded facts."""

    def build_config(self, family: Family) -> Mapping[str, object] | None:
        """Build a ``config.json`` of *family* from the facts, or return None if it is empty."""

    def confirms_padding(self, rows: int, size: int) -> bool:
        """Return whether the facts confirm that *rows* is *size* tokens plus vocabulary padding."""


class Format(ABC):
    """Base class of checkpoint formats.

    Attributes:
        name: Name for ``--from`` and ``--to``.
        other_names: Aliases, such as names of programs that read or write the format, for hints.
        title: One-line description for ``--help`` and lists.
        recognized: Human-readable criteria of :meth:`sniff`.
        marks: Pattern that the start of a name must match. :meth:`sniff` is only called if the name
            of the file, or of an item directly in the folder, matches. None to call it always.
        specializes: Names of more general formats that also match this format's files. They are not
            tried for a path that this format recognizes.
        yields_to: Names of formats that take precedence if a folder contains files of both formats.
        part_names: Pattern for names of files that are not a checkpoint on their own, or None.
        data_folders: Pattern for names of folders that only contain data files of the checkpoint,
            or None if there are no such folders.
        stores_empty_dicts: Whether checkpoints contain empty dictionaries of the saved state.
        wholeness: Human-readable criteria for a complete checkpoint. As in :attr:`recognized` and
            :attr:`proof`, facts are separated by ``"; "``.
        tested: Programs and settings that the format was tested against, in one line.
        proof: Comparisons with other programs, each with the name of its test.
        read_options: Names of the :class:`ReadOptions` fields that the format supports, besides
            ``model_type``.
        layout: Layout of the tensors, or None if the format can store any layout.
        other_layouts: Whether the user can choose another layout.
        adapters: Whether the format stores only adapters, not models.
        self_described: Whether the files describe the model, so that no ``config.json`` is needed.
        training: Whether the format stores training state with the model, so that all non-tensor
            values are training state. None if this depends on whether it can store such values.
    """

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str]
    recognized: ClassVar[str] = ""
    marks: ClassVar[re.Pattern[str] | None] = None
    specializes: ClassVar[frozenset[str]] = frozenset()
    yields_to: ClassVar[frozenset[str]] = frozenset()
    part_names: ClassVar[re.Pattern[str] | None] = None
    data_folders: ClassVar[re.Pattern[str] | None] = None
    stores_empty_dicts: ClassVar[bool] = True
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
        """Describe why *listing* is in this format, or return None if it is not.

        The evidence is human-readable, as in ``.metadata and 8 .distcp files``. Only
        file names and a few bytes are read.
        """

    def is_interrupted(self, listing: Listing) -> bool:
        """Return whether *listing* is an interrupted save that :meth:`sniff` does not recognize.

        :meth:`read` then reports which files are missing.
        """
        return False

    @abstractmethod
    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """Read the catalog of a checkpoint, without the elements of its tensors.

        Args:
            path: Absolute path of a directory or file that :meth:`sniff` accepts.
            options: Options, of which only those in :attr:`read_options` are set.

        Raises:
            CkptError: The index is missing, damaged or malicious.
        """

    def refine(self, catalog: Catalog, options: ReadOptions) -> Catalog:
        """Add this format's information to a catalog that a format in :attr:`specializes` read."""
        return catalog

    def map_merged_parameters(self, names: Sequence[str]) -> dict[str, str]:
        """Map names of optimizer state of split parameters to the parameters :meth:`read` merged.

        Args:
            names: Tensor names. Names of tensors that are not such optimizer state are ignored.
        """
        return {}

    def parse_recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """Parse the model facts in the :attr:`~ckptctl.catalog.Catalog.extensions` of *catalog*.

        Returns:
            Facts that the trainer recorded about the model, or None if it recorded none.
        """
        return None

    def resolve_codecs(self, catalog: Catalog) -> Catalog:
        """Locate the raw tensor bytes of every extent, so that each codec is ``raw``."""
        return catalog

    def find_inner_checkpoint(self, path: TreePath) -> TreePath | None:
        """Return the checkpoint in *path* if the folder contains nothing else, or None.

        The result is also None if *path* is the checkpoint itself.
        """
        return None


class WritableFormat(Format):
    """Base class of formats that ckptctl can write.

    Attributes:
        single_file: Whether the output is one file instead of a directory.
        nested: Whether it stores nested dictionaries and non-tensor values.
        verbatim: Whether values in a separate ``torch.save`` zip are copied unchanged.
        parallel: Whether it has one file per model-parallel rank.
        sharded: Whether tensors are split into files by size.
        single_file_bytes: Maximum size in bytes for which users expect one file, or 0 if never.
        has_params_json: Whether ``params.json`` describes the model.
        ties: Human-readable description of how tensors that share memory are stored.
        keeps_metadata: Whether it can store free-form metadata strings.
        records_ties: Whether it records the names of tensors skipped because they share memory.
        stacks_layers: Whether the tensors of equal layers can be stacked into one tensor.
        adapter_layouts: Layouts in which it can store adapters, with the default first.
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
        """Assign file offsets to all tensors in *request*, without any I/O."""

    def can_store(self, dtype: str) -> bool:
        """Return whether the format can store tensors of *dtype*, a name such as ``bfloat16``."""
        return dtype in dtypes.BY_NAME

    @property
    def sharding_options(self) -> tuple[str, ...]:
        """Command-line options that control sharding, or empty for single-file formats."""
        if self.parallel:
            return ("--mp", "--like")
        return ("--max-shard-size", "--like") if self.sharded else ()

    def require_storable_dtypes(self, tensors: Sequence[OutputTensor]) -> None:
        """Raise RefusedError if the format cannot store the dtype of a tensor in *tensors*."""
        for tensor in tensors:
            if not self.can_store(tensor.dtype):
                raise RefusedError(
                    f"{self.name} cannot store {tensor.dtype}",
                    where=f"tensor `{tensor.name}`",
                    hint=f"skip the tensor with {format_option('--exclude')}, or choose another "
                    f"{format_option('--to')}",
                )


@dataclass(frozen=True, slots=True)
class OtherFolder:
    """Kind of folder that ckptctl writes and that is not a checkpoint.

    Such a folder is not listed as a checkpoint, and opening it as one is an error, although its
    files may look like weights.

    Attributes:
        marker: Name of the file that identifies the folder.
        part_names: Pattern for the names of its other files.
        build_error: Returns the error for the path of such a folder, or of such a file in it.
    """

    marker: str
    part_names: re.Pattern[str]
    build_error: Callable[[TreePath], CkptError]

    def matches(self, listing: Listing) -> bool:
        """Return whether *listing* is such a folder, or one of its files."""
        if listing.is_folder:
            return self.marker in listing.items
        path = listing.path
        is_part = self.part_names.fullmatch(path.name) is not None
        return is_part and (path.parent / self.marker).is_file()


def require_folder(path: TreePath) -> None:
    """Raise FormatError if *path* is a single file of a format that has one file per rank."""
    if not path.is_dir():
        raise FormatError(
            "this is the file of a single rank",
            where=str(path),
            hint="pass the folder with the files of all ranks",
        )


def make_constant_frame(content: bytes) -> Frame:
    """Return the frame of a file that consists of *content*, as its header, and of records."""

    def yield_frame(_: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield 0, content

    return yield_frame


def make_content_file(path: str, content: bytes) -> OutputFile:
    """Return an output file without tensors, whose *content* is known at planning time."""
    return OutputFile(path, len(content), make_constant_frame(content))


def make_copied_file(path: str, size: int) -> OutputFile:
    """Return an output file of *size* bytes that is filled by one :class:`RawCopy`."""

    def yield_frame(_: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield from ()

    return OutputFile(path, size, yield_frame)
