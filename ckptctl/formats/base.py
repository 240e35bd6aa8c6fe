"""What a format is: it sniffs, it reads an index, and some lay out files.

A format never moves tensor bytes. Reading returns a :class:`~ckptctl.catalog.Catalog`; laying out
returns where every box of every tensor goes and what else the files contain. The executor does
the rest, the same way for all of them.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Blob, Box, Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, RefusedError, spell_option
from ckptctl.notes import Notes
from ckptctl.planner.plan import OutputFile
from ckptctl.storage.paths import is_there
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family
    from ckptctl.planner.model_parallel import RankShard
    from ckptctl.planner.plan import CrcOf, Frame, RawCopy, Record

GB = 1_000_000_000
SPLIT_BYTES = 512 * 1024 * 1024
Weights = Literal["master", "module"]
"""The optimizer's fp32 copies, or the weights that the model computes with."""


class Listing:
    """A path that formats are asked about, and the names in it, which are read once.

    Attributes:
        path: Absolute path of a folder or file.
        is_folder: Whether it is a folder.
        items: What lies directly in the folder, by name; of a file nothing.
        names: Names of the items, sorted; of a file its own name.
    """

    def __init__(self, path: TreePath) -> None:
        self.path = path
        self.is_folder = path.is_dir()
        self.items = {item.name: item for item in path.iterdir()} if self.is_folder else {}
        self.names = sorted(self.items) if self.is_folder else [path.name]

    @cached_property
    def files(self) -> list[str]:
        """Names of the files directly in the folder, sorted; of a file none."""
        return [name for name in sorted(self.items) if self.items[name].is_file()]

    def has(self, name: str) -> bool:
        """Return whether the folder has a file of that name; see :func:`is_there`."""
        return name in self.items and is_there(self.items[name])


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor to be laid out.

    Attributes:
        name: Fully qualified name.
        dtype: torch's name.
        shape: Global shape.
        path: Keys from the root of the saved object down to it.
        alias_of: Name of the output tensor that it shares all its memory with.
        requires_grad: Carried where the format has a place for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: KeyPath
    alias_of: str | None = None
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """All that a format needs to know to lay files out.

    Attributes:
        name: File name of the output, for single-file formats.
        tensors: In the order in which they should lie.
        blobs: Leaves that are not tensors.
        max_shard_size: Bytes of tensors per file.
        mp: Number of model-parallel shards.
        rank_boxes: What each model-parallel rank keeps of a tensor, None where that is nothing;
            None: every rank keeps all of all of them.
        like: For each tensor the index of its file, taken from a reference checkpoint.
        like_files: Names of those files, where the format keeps names.
        checksum: Whether the records will have checksums.
        metadata: Free-form strings, for formats that keep them.
        config: ``config.json`` of the model, for formats that describe it in words of their own;
            None: there is none.
        family: The model's; None: it is not known.
        sizes: Its axis sizes.
        stack_layers: Whether equal layers become one tensor each, for formats that can do that.
        extensions: Those of the catalog that the tensors come from.
        adapter: What ``adapter_config.json`` says, or would say, of low-rank factors; None: these
            are the tensors of a model.
        layout: The layout that was asked for; None: it is the format's own, or the source's.
        notes: Told what the user should know, such as a tie written as two copies, and which leaves
            are skipped because the format has no place for them.
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
    """Where one box of a tensor goes.

    Attributes:
        box: The part of the tensor.
        record: Index of the record that holds it.
        start: Elements of the record before it.
        strides: Elements between neighbors along each dimension; None: row-major.
    """

    box: Box
    record: int
    start: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Where everything goes.

    Attributes:
        files: Every file, with its frame.
        records: Byte ranges for tensor boxes.
        boxes: For each tensor the places of its boxes.
        raw_copies: Byte ranges that travel unchanged.
        contents: Further files that hold no records, with what is in them.
        folder: Folder of the output in which all of these files lie, and what travels with them;
            empty: the output itself.
        above: Files of the output beside that folder, with what is in them.
        own: What this format writes anew, by the names at the root, whatever the source has there.
    """

    files: tuple[OutputFile, ...]
    records: tuple[Record, ...]
    boxes: Mapping[str, tuple[TensorPlace, ...]]
    raw_copies: tuple[RawCopy, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    folder: str = ""
    above: Mapping[str, bytes] = field(default_factory=dict)
    own: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read where a checkpoint holds more than one answer.

    Attributes:
        model_type: The family, for formats whose shards only a family can join.
        weights: ``master``: the optimizer's fp32 copies; ``module``: the weights that the model
            computes with; None: what the format prefers.
        tag: Which of several saves in one folder; None: the one that its pointer names.
        rules: A file that says how tensors are divided, for formats that do not say so.
        ranks: How many ranks saved it, likewise.
        partial: Read what there is of a checkpoint that is not whole: what cannot be read becomes
            :attr:`~ckptctl.catalog.Catalog.findings`. Tensors may have holes then.
        replicas: List :attr:`~ckptctl.catalog.Catalog.replicas`, too.
        documents: ``config.json`` and ``params.json`` by which shards are joined; empty: those
            beside them.
    """

    model_type: str | None = None
    weights: Weights | None = None
    tag: str | None = None
    rules: TreePath | None = None
    ranks: int | None = None
    partial: bool = False
    replicas: bool = False
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


AS_IT_IS = ReadOptions()


class Format(ABC):
    """One way in which bytes lie on disk; one module or package here, which is found by itself.

    Attributes:
        name: What ``--from`` and ``--to`` call it.
        title: One line for ``--help`` and lists.
        recognized: What :meth:`sniff` looks for, for people.
        marks: Matches the beginning of names: the format is asked about a file with such a name,
            and about a folder with such a file or folder in it; None: about all.
        specializes: Formats whose files its own look like as well: what it recognizes is none of
            them.
        yields_to: Formats that a folder is in its place if they recognize it: it holds files of
            both.
        parts: Matches names of files that are no checkpoint by themselves; None: there are none.
        wholeness: What a complete checkpoint has, for people. As in :attr:`recognized` and
            :attr:`proof`, facts are separated by ``"; "``.
        tested: Programs and settings that it was tested against, in one line.
        proof: What was compared with other programs; each claim names its test.
        choices: Fields of :class:`ReadOptions` that mean something to it, besides the family.
        layout: The layout that its tensors have; None: any.
        other_layouts: Whether they have another one where the user asks for it.
        adapters: Whether it holds adapters and no models.
        self_described: Whether its files state the facts of the model themselves.
        training: Whether a trainer's state lies beside the model, of which every leaf that is no
            tensor is a part; None: as the format has a place for leaves.
    """

    name: ClassVar[str]
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
    choices: ClassVar[frozenset[str]] = frozenset()
    other_layouts: ClassVar[bool] = False
    adapters: ClassVar[bool] = False
    self_described: ClassVar[bool] = False
    training: ClassVar[bool | None] = None

    @abstractmethod
    def sniff(self, listing: Listing) -> str | None:
        """Return the evidence that a path looks like this format, or None.

        It is for people, as in ``.metadata and 8 .distcp files``. No more than names and a few
        bytes are read.
        """

    def is_interrupted(self, listing: Listing) -> bool:
        """Return whether a save that was interrupted left *listing*, which no format recognizes.

        :meth:`read` says what is missing.
        """
        return False

    @abstractmethod
    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """Return the catalog of *path*.

        Args:
            path: Absolute path of a directory or file that :meth:`sniff` accepts.
            asked: Choices; what is not in :attr:`choices` is never set.

        Raises:
            CkptError: The index is missing, damaged or hostile.
        """

    def refine(self, catalog: Catalog, asked: ReadOptions) -> Catalog:
        """Return a catalog of a format that this one specializes with what this one knows of it."""
        return catalog

    def resolve(self, catalog: Catalog) -> Catalog:
        """Return *catalog* with every extent's codec ``raw``."""
        return catalog

    def only_part(self, path: TreePath) -> TreePath | None:
        """Return the one checkpoint in the folder *path*, which is there for that alone.

        None: *path* is the checkpoint, or holds more.
        """
        return None


class WritableFormat(Format):
    """A format that can be written.

    Attributes:
        single_file: Whether the output is one file instead of a directory.
        nested: Whether it keeps the structure of nested dictionaries and other leaves.
        verbatim: Whether leaves that have a ``torch.save`` zip of their own are copied as they are.
        parallel: Whether it has one file per model-parallel rank.
        sharded: Whether it is cut into files by size.
        one_file: Bytes of tensors up to which people expect one file; 0: they do not.
        described: Whether ``params.json`` describes the model in it.
        ties: What becomes of tensors that share memory, for people.
        keeps_metadata: Whether it has a place for free-form strings.
        records_ties: Whether a tensor that is left out as shared is recorded under its name.
        stacks: Whether equal layers can become one tensor each.
        adapter_layouts: Layouts that its adapters have, the usual one first; empty: none of their
            own.
        pads: Whether its programs expect a vocabulary to have rows that no token means.
    """

    single_file: ClassVar[bool] = False
    nested: ClassVar[bool] = False
    verbatim: ClassVar[bool] = False
    parallel: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    one_file: ClassVar[int] = 0
    described: ClassVar[bool] = False
    ties: ClassVar[str] = ""
    records_ties: ClassVar[bool] = False
    keeps_metadata: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    adapter_layouts: ClassVar[tuple[str, ...]] = ()
    pads: ClassVar[bool] = False

    @abstractmethod
    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """Decide where each tensor goes; touches no file."""

    def holds(self, dtype: str) -> bool:
        """Return whether the format can hold elements of *dtype*."""
        return dtype in dtypes.BY_NAME

    @property
    def cut_by(self) -> tuple[str, ...]:
        """Return the options that say how it is cut into files; empty: it is one file."""
        if self.parallel:
            return ("--mp", "--like")
        return ("--max-shard-size", "--like") if self.sharded else ()

    def refuse_unheld(self, tensors: Sequence[OutputTensor]) -> None:
        """Raise RefusedError for the first tensor whose dtype the format cannot hold."""
        for tensor in tensors:
            if not self.holds(tensor.dtype):
                raise RefusedError(
                    f"{self.name} cannot store {tensor.dtype}",
                    where=f"tensor `{tensor.name}`",
                    hint=f"skip the tensor with {spell_option('--exclude')}, or choose another "
                    f"{spell_option('--to')}",
                )


def require_folder(path: TreePath) -> None:
    """Refuse one of the files that the ranks of a save wrote, where all of them are needed."""
    if not path.is_dir():
        raise FormatError(
            "this is the file of a single rank",
            where=str(path),
            hint="pass the folder with the files of all ranks",
        )


def constant(content: bytes) -> Frame:
    """Return the frame of a file that begins with *content* and else holds records only."""

    def frame(_: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield 0, content

    return frame


def document(path: str, content: bytes) -> OutputFile:
    """Return an output file whose whole content is known when it is planned."""
    return OutputFile(path, len(content), constant(content))


def copied(path: str, size: int) -> OutputFile:
    """Return an output file that one :class:`RawCopy` fills."""

    def frame(_: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield from ()

    return OutputFile(path, size, frame)
