"""The index of one checkpoint: which box of which tensor lies at which bytes.

A :class:`Catalog` is all that a command needs to answer questions about a checkpoint and to plan
a conversion. It holds no tensor data, imports no torch and is never changed after reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from ckptctl import dtypes
from ckptctl.errors import Problem
from ckptctl.file_identity import FileIdentity
from ckptctl.results import JsonField
from ckptctl.tree import TreePath
from ckptctl.verdict import Basis, Severity

Codec = Literal["raw", "torch"]
MANIFEST = "ckptctl.manifest.json"
"""What lies next to a checkpoint and records checksums for formats that carry none."""
VIRTUAL = "//"
MEMORY = "/memory/"


class Index(int):
    """A position in a list, as opposed to an integer key of a dictionary."""


class TupleIndex(Index):
    """A position in a tuple."""


Path = tuple[str | int | Index, ...]
"""Keys from the root of the saved object down to a leaf."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: DCP's chunk; of a 0-d tensor both are empty."""

    offsets: Annotated[tuple[int, ...], JsonField("first index in each dimension")]
    sizes: Annotated[tuple[int, ...], JsonField("length in each dimension")]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of *shape*."""
        return cls((0,) * len(shape), shape)

    def __str__(self) -> str:
        spans = (f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Checksum:
    """A range of a file, and the CRC-32 that the format records of it.

    Attributes:
        offset: First byte in the file.
        nbytes: Number of bytes from there.
        crc32: Their CRC-32.
    """

    offset: int
    nbytes: int
    crc32: int


class ItemPart(NamedTuple):
    """Which part an extent is of the tensor in a ``torch.save`` zip.

    Attributes:
        shape: Of that tensor.
        row: Its index along dimension 0; None: it is all of it, with as many elements as the box.
    """

    shape: tuple[int, ...]
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of a tensor and the bytes that hold it.

    Attributes:
        box: The part of the tensor.
        file: Path relative to the checkpoint's root, with ``/``; or the :func:`computed_name` of
            a virtual file.
        offset: First byte in the file.
        nbytes: Number of bytes from there.
        codec: ``raw``: the bytes are the elements. ``torch``: they are one ``torch.save`` zip that
            holds them (a write item of a ``.distcp`` file) and must be resolved before reading.
        strides: Distance between neighbors along each dimension, in elements; None: row-major.
        crc32: CRC-32 of the ``nbytes`` bytes where the format records one.
        within: What is recorded of a longer range that these bytes are part of.
        part: Of codec ``torch``, where the zip does not hold just a tensor of the box's sizes.
    """

    box: Box
    file: str
    offset: int
    nbytes: int
    codec: Codec = "raw"
    strides: tuple[int, ...] | None = None
    crc32: int | None = None
    within: Checksum | None = None
    part: ItemPart | None = None

    @property
    def recorded(self) -> Checksum | None:
        """Return the checksum that covers these bytes."""
        if self.crc32 is None:
            return self.within
        return Checksum(self.offset, self.nbytes, self.crc32)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: Fully qualified name: the parts of *path* joined by dots.
        dtype: torch's name of the dtype, as in ``bfloat16``.
        shape: Global shape, as torch counts it.
        extents: The boxes that tile it; a tuple, or columns that make objects on demand.
        path: Keys from the root of the saved object down to the tensor.
        alias_of: The tensor of the same checkpoint that this one shares all its memory with.
        requires_grad: What the checkpoint records; False where the format has no word for it.
        unsupported: Why its elements cannot be read, in a few words; nothing tiles it then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    extents: Sequence[Extent]
    path: Path
    alias_of: str | None = None
    requires_grad: bool = False
    unsupported: str | None = None

    @classmethod
    def unread(
        cls, name: str, dtype: str, shape: tuple[int, ...], path: Path, why: str
    ) -> TensorEntry:
        """Return the entry of a tensor whose elements cannot be read."""
        return cls(name, dtype, shape, (), path, unsupported=why)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the logical size in bytes, whatever its storage occupies; 0: it is not read."""
        return 0 if self.unsupported else self.numel * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that computed elements are made of.

    Attributes:
        root: Absolute path of the directory that the entry's files are relative to; another than
            the checkpoint's for an adapter.
        entry: Its extents are ``raw`` and tile it; they may be virtual themselves.
    """

    root: TreePath
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Computed:
    """A virtual file: the row-major elements of a tensor that is computed when it is read.

    Attributes:
        kind: How: a name in ``ckptctl/numerics/kinds``.
        dtype: torch's name of the dtype of its elements.
        shape: Their number along each dimension.
        inputs: What they are made of, in the order that the kind expects.
        arguments: What else the kind has to know; a type of the kind's own.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[Input, ...] = ()
    arguments: object = None

    def extent(self, name: str) -> Extent:
        """Return all of it as an extent of the virtual file called *name*."""
        whole = Box.whole(self.shape)
        return Extent(whole, name, 0, whole.numel * dtypes.itemsize(self.dtype))

    def entry(self, name: str, path: Path, file: str) -> TensorEntry:
        """Return the tensor called *name* that is all of the virtual file called *file*."""
        return TensorEntry(name, self.dtype, self.shape, (self.extent(file),), path)


def computed_name(key: str) -> str:
    """Return the name of the virtual file of the tensor called *key*; no real file has such."""
    return VIRTUAL + key


def is_computed(file: str) -> bool:
    """Return whether *file* is the name of a virtual file."""
    return file.startswith(VIRTUAL)


def memory_name(key: str) -> str:
    """Return the name under which a plan knows the memory called *key*; no real file has such."""
    return MEMORY + key


def memory_key(name: str) -> str:
    """Return the key that :func:`memory_name` made *name* of."""
    return name.removeprefix(MEMORY)


def made_of(computed: Mapping[str, Computed]) -> frozenset[tuple[TreePath, str]]:
    """Return ``(root, file)`` of every real file that virtual ones are made of."""
    return frozenset(
        (found.root, extent.file)
        for one in computed.values()
        for found in one.inputs
        for extent in found.entry.extents
        if extent.file not in computed
    )


def reached(computed: Mapping[str, Computed], files: Iterable[str]) -> dict[str, Computed]:
    """Return the virtual files among *files*, and those that these are made of, by name."""
    names = list(files)
    found: dict[str, Computed] = {}
    while names:
        name = names.pop()
        if name in computed and name not in found:
            found[name] = one = computed[name]
            names += [extent.file for item in one.inputs for extent in item.entry.extents]
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Blob:
    """A leaf that is not a tensor: a step counter, a random-number state, a data-loader state.

    Attributes:
        name: Fully qualified name.
        path: Keys from the root of the saved object down to the leaf.
        file: Where its own ``torch.save`` zip lies, for DCP byte items; None: *value* holds it.
        offset: First byte of that zip.
        nbytes: Length of that zip.
        value: The leaf itself as the restricted unpickler returned it, when *file* is None.
        extension: What that zip went through when it was written, as DCP names it; empty: nothing.
    """

    name: str
    path: Path
    file: str | None = None
    offset: int = 0
    nbytes: int = 0
    value: object = None
    extension: str = ""


@dataclass(frozen=True, slots=True)
class Finding(Problem, order="severity basis what where file tensor box why"):
    """One thing that is not as it should be.

    Attributes:
        read_failed: Whether the operating system failed a read: it says nothing of the content.
    """

    what: Annotated[str, JsonField("summary of the finding, one line")]
    why: Annotated[str | None, JsonField("evidence")] = None
    severity: Annotated[
        Severity,
        JsonField("`error` (evidence of damage), `unknown` (could not be determined) or `warning`"),
    ] = "error"
    file: Annotated[str | None, JsonField("affected file")] = None
    tensor: Annotated[str | None, JsonField("affected tensor or non-tensor value")] = None
    box: Annotated[Box | None, JsonField("affected box of the tensor")] = None
    basis: Annotated[
        Basis,
        JsonField(
            "source of the evidence: `files`, `index` or `model` (its table and "
            "configuration); `prune` removes a checkpoint only on evidence from "
            "`files`"
        ),
    ] = "files"
    read_failed: bool = False

    @property
    def where(self) -> Annotated[str, JsonField()]:
        """Tensor, box and file in one line; empty for the checkpoint itself."""
        tensor = f"`{self.tensor}`" if self.tensor else ""
        box = str(self.box) if self.box and self.box.sizes else ""
        parts = (" ".join(filter(None, (tensor, box))), self.file)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything one checkpoint holds.

    Attributes:
        root: Absolute path of the directory that all files are relative to.
        path: Absolute path that was read: the directory, or one file in it.
        format: Name of the format, as in ``dcp``.
        files: The data files that are part of the checkpoint, with their sizes in bytes.
        tensors: Tensors by name, in the checkpoint's own order.
        blobs: Other leaves by name.
        assets: Side files (configuration, tokenizer, ...) relative to *root*, with their sizes.
        others: What else lies in *root* and is no part of the checkpoint, folders with a slash
            behind them; and why it does not travel.
        documents: ``config.json`` and ``params.json`` where there are any, parsed; params as they
            hold for *tensors*, when shards repeat heads.
        extensions: What trainers recorded of the model in words of their own, by a name that those
            who read it know, and by file.
        stated: What else states facts of the model, such as a trainer's arguments or the metadata
            of weights: these facts by the names of config.json.
        metadata: Free-form strings that the format carries.
        notes: What a reader should know: disabled checksums, files that nothing refers to, ...
        computed: The virtual files that extents of *tensors* lie in, by name.
        replicas: Further copies of boxes that *tensors* have, by tensor: each has the box of one
            of its extents, and has to hold the same elements. Only where they were asked for.
        findings: What is wrong with what could not be read, where a part was asked for.
        lost: For each tensor the boxes in files that cannot be used, and those files; likewise.
        recorded_bytes: Bytes of all tensors by what the index says; None: it does not say.
        save_id: What no other save has, nor any part of one; empty: it does not say so.
        world: How many ranks saved it; 0: it does not say so.
        opened: The path that was opened, and its identity before anything of it was read.
    """

    root: TreePath
    path: TreePath
    format: str
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    assets: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    extensions: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    stated: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    computed: Mapping[str, Computed] = field(default_factory=dict)
    replicas: Mapping[str, Sequence[Extent]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    lost: Mapping[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)
    recorded_bytes: int | None = field(default=None, compare=False)
    save_id: str = ""
    world: int = 0
    opened: tuple[TreePath, FileIdentity] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Return the logical bytes of all tensors, aliases counted once."""
        return sum(t.nbytes for t in self.tensors.values() if t.alias_of is None)

    @property
    def numel(self) -> int:
        """Return the number of elements of all tensors, aliases counted once."""
        return sum(t.numel for t in self.tensors.values() if t.alias_of is None)
