"""Index of one checkpoint, with the boxes of its tensors and the byte ranges that store them.

A :class:`Catalog` contains everything that a command needs to inspect a checkpoint or to plan a
conversion. It contains no tensor data, and is never changed after reading.
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
"""Name of the file that stores checksums next to a checkpoint whose format stores none."""
INCONSISTENT_INDEX = "the index is inconsistent"
"""Start of notes on an inconsistent index, which verification reports as warnings."""
VIRTUAL_PREFIX = "//"
MEMORY_PREFIX = "/memory/"


class Index(int):
    """Position of an element in a list, distinct from an integer key of a dictionary."""


class TupleIndex(Index):
    """Position of an element in a tuple."""


Path = tuple[str | int | Index, ...]
"""Keys from the root of the saved object down to a leaf."""


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangular region of a tensor, like a chunk in DCP.

    Offsets and sizes have one number per dimension, so they are empty for a 0-d tensor.
    """

    offsets: Annotated[tuple[int, ...], JsonField("first index in each dimension")]
    sizes: Annotated[tuple[int, ...], JsonField("length in each dimension")]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers all elements of a tensor of *shape*."""
        return cls((0,) * len(shape), shape)

    def __str__(self) -> str:
        spans = (f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


@lru_cache(maxsize=4096)
def compute_row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a contiguous tensor of *shape*."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Checksum:
    """Byte range of a file with the CRC-32 that the format records for it.

    Attributes:
        offset: Offset of the first byte in the file.
        nbytes: Length of the range in bytes.
        crc32: CRC-32 of the range.
    """

    offset: int
    nbytes: int
    crc32: int


class ItemPart(NamedTuple):
    """Selection of the tensor stored in a ``torch.save`` zip that an extent refers to.

    Attributes:
        shape: Shape of the tensor in the zip.
        row: Index along dimension 0 that is selected, or None to select the entire tensor.
        first: Index of the first selected element of a tensor with one dimension. The selected
            elements fill the box in row-major order. None if *row* defines the selection.
    """

    shape: tuple[int, ...]
    row: int | None = None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Box of a tensor and the byte range that stores it.

    Attributes:
        box: Region of the tensor.
        file: Path relative to the checkpoint's root, with ``/``, or the :func:`build_computed_name`
            of a virtual file.
        offset: Offset of the first byte in the file.
        nbytes: Number of bytes in the file.
        codec: ``raw`` if the bytes are the elements. ``torch`` if they are a ``torch.save`` zip
            (write item of a ``.distcp`` file), which must be resolved before reading.
        strides: Strides in elements, or None for row-major order.
        crc32: CRC-32 of the bytes, or None if the format records none.
        within: Recorded checksum of a longer byte range that contains the extent, or None.
        part: For codec ``torch``, the part of the tensor in the zip that fills the box, or None if
            the zip contains exactly the box.
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
    def recorded_checksum(self) -> Checksum | None:
        """Recorded checksum that covers the extent, or None if the format records none."""
        if self.crc32 is None:
            return self.within
        return Checksum(self.offset, self.nbytes, self.crc32)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: Fully qualified name, which joins the keys in *path* with dots.
        dtype: torch's name of the dtype, as in ``bfloat16``.
        shape: Global shape.
        extents: Extents that tile the tensor; a tuple, or columns that create objects on demand.
        path: Keys from the root of the saved object down to the tensor.
        alias_of: Name of another tensor that shares exactly the same memory, or None.
        requires_grad: Value of ``requires_grad`` that the format records, or False if none.
        unsupported: Short reason why the elements cannot be read, or None. Such a tensor has no
            extents.
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
    def build_unreadable(
        cls, name: str, dtype: str, shape: tuple[int, ...], path: Path, why: str
    ) -> TensorEntry:
        """Build an entry without extents for a tensor whose elements cannot be read."""
        return cls(name, dtype, shape, (), path, unsupported=why)

    @property
    def numel(self) -> int:
        """Number of elements of the complete tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes, or 0 if they cannot be read."""
        return 0 if self.unsupported else self.numel * dtypes.get_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ComputeInput:
    """Input tensor of a computed tensor.

    Attributes:
        root: Absolute path of the directory that the entry's files are relative to. The root of an
            adapter's tensors differs from the root of the checkpoint.
        entry: Entry of the tensor. The extents have codec ``raw``, tile the tensor, and may be in
            virtual files.
    """

    root: TreePath
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """Virtual file with the row-major elements of a tensor that is computed when it is read.

    Attributes:
        kind: Kind of the computation: a name in ``ckptctl/numerics/kinds``.
        dtype: torch's name of the dtype.
        shape: Shape of the tensor.
        inputs: Input tensors, in the order that the kind expects.
        arguments: Further arguments of the computation, whose type depends on *kind*.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[ComputeInput, ...] = ()
    arguments: object = None

    def to_extent(self, name: str) -> Extent:
        """Return the extent that covers the entire virtual file called *name*."""
        box = Box.whole(self.shape)
        return Extent(box, name, 0, box.numel * dtypes.get_itemsize(self.dtype))

    def to_entry(self, name: str, path: Path, file: str) -> TensorEntry:
        """Return the entry of a tensor called *name* that fills the virtual file *file*."""
        return TensorEntry(name, self.dtype, self.shape, (self.to_extent(file),), path)


def build_computed_name(key: str) -> str:
    """Return the name of the virtual file for tensor *key*, which no real file can have."""
    return VIRTUAL_PREFIX + key


def is_computed(file: str) -> bool:
    """Return whether *file* is the name of a virtual file."""
    return file.startswith(VIRTUAL_PREFIX)


def build_memory_name(key: str) -> str:
    """Return the file name that represents memory *key* in a plan, which no real file can have."""
    return MEMORY_PREFIX + key


def parse_memory_key(name: str) -> str:
    """Return the key from which :func:`build_memory_name` built *name*."""
    return name.removeprefix(MEMORY_PREFIX)


def list_input_files(computed: Mapping[str, ComputedTensor]) -> frozenset[tuple[TreePath, str]]:
    """List the real files that virtual files are computed from, as ``(root, file)`` pairs."""
    return frozenset(
        (item.root, extent.file)
        for virtual in computed.values()
        for item in virtual.inputs
        for extent in item.entry.extents
        if extent.file not in computed
    )


def find_reachable_files(
    computed: Mapping[str, ComputedTensor], files: Iterable[str]
) -> dict[str, ComputedTensor]:
    """Find the virtual files among *files* and, recursively, among the inputs of virtual files."""
    names = list(files)
    reachable: dict[str, ComputedTensor] = {}
    while names:
        name = names.pop()
        if name in computed and name not in reachable:
            reachable[name] = virtual = computed[name]
            names += [extent.file for item in virtual.inputs for extent in item.entry.extents]
    return dict(sorted(reachable.items()))


@dataclass(frozen=True, slots=True)
class Blob:
    """Leaf that is not a tensor, such as a step counter, random-number state or data-loader state.

    Attributes:
        name: Fully qualified name.
        path: Keys from the root of the saved object down to the leaf.
        file: File with its ``torch.save`` zip, for DCP byte items, or None if *value* is set.
        offset: Offset in *file* of the first byte of the zip.
        nbytes: Length of the zip in bytes.
        value: Value from the restricted unpickler, if *file* is None.
        extension: DCP's name of the stream transformation applied to the zip, or an empty string.
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
    """Problem found in a checkpoint.

    Attributes:
        read_failed: Whether a read failed in the operating system, so the content is unknown.
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
    """Contents of one checkpoint.

    Attributes:
        root: Absolute path of the directory that all files are relative to.
        path: Absolute path that was read: the directory, or one file in it.
        format: Name of the format, as in ``dcp``.
        files: Data files of the checkpoint, with their sizes in bytes.
        tensors: Tensors by name, in the order of the checkpoint.
        blobs: Non-tensor values by name.
        assets: Sidecar files (configuration, tokenizer, ...) relative to *root*, with their sizes.
        others: Other files in *root*, and other folders with a trailing slash, with the reasons why
            conversions do not copy them.
        documents: Parsed ``config.json`` and ``params.json``, if any. Sizes in ``params.json``
            match *tensors*, even if shards repeat heads.
        extensions: Descriptions of the model under a trainer's own keys, by name of the extension
            and by file.
        stated: Facts about the model under the keys of config.json, by source, such as trainer
            arguments or metadata of weights.
        metadata: Free-form strings that the format stores.
        notes: Notes for the user, such as disabled checksums or unreferenced files.
        computed: Virtual files that contain extents of *tensors*, by name.
        replicas: Further copies of extents of *tensors*, by tensor name. Each has the same box and
            must have the same elements as one of the tensor's extents. Only set on request.
        findings: Findings about unreadable parts, if a partial read was requested.
        lost: Boxes in unusable files, each with its file, by tensor name; only in a partial read.
        recorded_bytes: Total size of all tensors according to the index, or None if not recorded.
        save_id: Unique identifier of the save, or an empty string if not recorded.
        world: Number of ranks that saved the checkpoint, or 0 if not recorded.
        opened: Path that was opened, and its identity before it was read.
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
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    replicas: Mapping[str, Sequence[Extent]] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    lost: Mapping[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)
    recorded_bytes: int | None = field(default=None, compare=False)
    save_id: str = ""
    world: int = 0
    opened: tuple[TreePath, FileIdentity] | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes. Aliases count once."""
        return sum(t.nbytes for t in self.tensors.values() if t.alias_of is None)

    @property
    def numel(self) -> int:
        """Number of elements of all tensors. Aliases count once."""
        return sum(t.numel for t in self.tensors.values() if t.alias_of is None)
