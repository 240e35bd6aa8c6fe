"""Lazy state dicts, which read tensor elements only when a handle is sliced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Blob, Catalog
from ckptctl.conversion.contents import choose_cast_dtype
from ckptctl.conversion.recognition.roots import parse_root
from ckptctl.conversion.transfers import read_identities
from ckptctl.errors import (
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
    find_nearest,
    quote_names,
)
from ckptctl.installed import require_torch
from ckptctl.planner.boxes import check_coverage
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.save_load.loading.checks import find_casts
from ckptctl.save_load.loading.reading import PreparedRead, RequestedBox, fill_buffers
from ckptctl.save_load.loading.state_mapping import RequestedTensor
from ckptctl.storage.arithmetic import import_torch, view_as_tensor
from ckptctl.storage.outcome import require_in_range
from ckptctl.storage.paths import redact_path
from ckptctl.storage.pickles.inert import Global, Inert, walk_values
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import OpenOptions
from ckptctl.verbs.extraction.mapped_source import open_mapped_source
from ckptctl.verbs.extraction.slices import Part, Slice, apply_slice

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor


class NoSuchNameError(MappingError, KeyError):
    """Missing key in a checkpoint, which is also a ``KeyError``."""

    __str__ = Exception.__str__


class TensorHandle:
    """Handle of a tensor in an open checkpoint. Elements are read when the handle is sliced.

    ``handle[...]`` reads the whole tensor. ``handle[0:128]``, ``handle[:, 5]`` and
    ``handle[..., -1]`` read a slice. Indices and ``start:stop`` are supported, steps are not.

    Attributes:
        name: Its name, in the requested layout.
        dtype: Its dtype as named by torch, for example ``bfloat16``.
        shape: Its shape.
    """

    __slots__ = ("_composed", "_state", "dtype", "name", "shape")

    def __init__(
        self, state: LazyStateDict, name: str, composed: ComposedTensor, dtype: str
    ) -> None:
        self._state = state
        self._composed = composed
        self.name = name
        self.dtype = dtype
        self.shape = composed.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return dtypes.get_itemsize(self.dtype) * apply_slice((), self.shape, self.name).box.numel

    def __getitem__(self, key: Part | tuple[Part, ...]) -> Tensor:
        """Read a part into a new tensor in host memory.

        Args:
            key: An index, a slice or ``...``, or a tuple of these.

        Raises:
            CkptError: The part cannot be read, or the key is not valid. An index that is out of
                bounds is also an ``IndexError``.
        """
        parts = key if isinstance(key, tuple) else (key,)
        texts = [part for part in parts if isinstance(part, str)]
        if texts:
            raise UsageError(f"{texts[0]!r} is not a slice", where=f"`{self.name}`")
        return self._state._read_tensor(
            self, self._composed, apply_slice(parts, self.shape, self.name)
        )

    def __repr__(self) -> str:
        return f"TensorHandle({self.name!r}, {self.dtype}, {list(self.shape)})"


class LazyValues(Mapping[str, object]):
    """Lazy mapping from names to the non-tensor values of an open checkpoint."""

    def __init__(self, catalog: Catalog, prefix: str, require_open: Callable[[], None]) -> None:
        self._catalog = catalog
        self._require_open = require_open
        inner_blobs = {n: leaf for n, leaf in catalog.blobs.items() if n.startswith(prefix)}
        self._blobs = {name.removeprefix(prefix): blob for name, blob in inner_blobs.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._blobs)

    def __len__(self) -> int:
        return len(self._blobs)

    def __contains__(self, name: object) -> bool:
        return name in self._blobs

    def __getitem__(self, name: str) -> object:
        if name not in self._blobs:
            raise _missing_key_error(name, self._blobs, self._catalog.path, "leaves")
        self._require_open()
        blob = self._blobs[name]
        single_leaf = replace(self._catalog, tensors={}, replicas={}, blobs={blob.name: blob})
        value = formats.resolve_codecs(single_leaf).blobs[blob.name].value
        _require_plain_value(blob, value, self._catalog.path)
        return value


def _require_plain_value(blob: Blob, value: object, where: TreePath) -> None:
    """Raise if the non-tensor value contains tensors or objects of unknown classes."""
    kinds = (StoredTensor, Inert, Global)
    unsupported = next((part for part in walk_values(value) if isinstance(part, kinds)), None)
    if unsupported is None:
        return
    if isinstance(unsupported, StoredTensor):
        raise RefusedError(
            f"`{blob.name}` is an object that contains tensors",
            where=where,
            hint="use `ckptctl.load` with a state that contains it",
        )
    raise UnsupportedError(
        f"`{blob.name}` cannot be read as a plain value",
        where=where,
        why=f"it contains a `{unsupported.module}.{unsupported.name}`",
        hint="use `ckptctl.load` with a state that contains it, if its class is allowed",
    )


class LazyStateDict(Mapping[str, TensorHandle]):
    """Lazy mapping from names to tensors, returned by :func:`ckptctl.open`.

    Names, shapes and dtypes come from the index and do not require torch. Elements are read when a
    handle is sliced, and they are not cached. Several threads can read at the same time. The
    mapping is also a context manager. After its end, elements can no longer be read.

    Attributes:
        path: The checkpoint, as given, without the secrets of a URL.
        format: Name of its format, for example ``dcp``.
        metadata: Free-form strings stored by the format.
        leaves: Non-tensor values by name, each read on lookup. Only simple values are read, never
            classes.
        notes: Further notes.
    """

    def __init__(self, path: str | TreePath, options: OpenOptions) -> None:
        source = formats.to_existing_path(path)
        with families.use_converter_file(options.converter):
            catalog, self._mapping = open_mapped_source(source, options)
        self._options = options
        self._closed = False
        # Later reads must use the same files as the index.
        self._identities = read_identities(catalog.root, catalog.files)
        self._prefix = ""
        if options.root is not None and options.layout is None:
            self._prefix = parse_root(catalog, options.root)
        inner_keys = (key for key in self._mapping.tensors if key.startswith(self._prefix))
        self._tensors = {
            key.removeprefix(self._prefix): self._mapping.tensors[key] for key in inner_keys
        }
        self.path = redact_path(path)
        self.format = catalog.format
        self.metadata = catalog.metadata
        self.leaves = LazyValues(catalog, self._prefix, self._require_open)
        self.notes = (*catalog.notes, *self._mapping.notes.get_texts())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorHandle:
        """Return the handle of a tensor.

        Raises:
            CkptError: There is no tensor with that name; also a ``KeyError``.
        """
        composed = self._tensors.get(name)
        if composed is None:
            kind = "this is a non-tensor value; use `leaves`" if name in self.leaves else None
            raise _missing_key_error(
                name, self._tensors, self._mapping.catalog.path, "tensors", kind
            )
        entry = self._mapping.catalog.tensors[composed.sources[0].key]
        dtype = choose_cast_dtype(entry.dtype, self._options.dtype)
        return TensorHandle(self, self._prefix + name, composed, dtype)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the handle of a tensor, or *default* if the name does not exist."""
        return self[key] if key in self._tensors else default

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint. Names, shapes and dtypes stay available."""
        self._closed = True

    def __repr__(self) -> str:
        counts = (
            f"{pluralize(len(self), 'tensor')}, {pluralize(len(self.leaves), 'non-tensor value')}"
        )
        return f"<LazyStateDict {self.path!r}: {self.format}, {counts}>"

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpoint is closed", where=self.path)

    def _read_tensor(self, handle: TensorHandle, composed: ComposedTensor, part: Slice) -> Tensor:
        self._require_open()
        require_torch(
            "a slice of a tensor", alternative="`ckptctl.extract` writes files without torch"
        )
        import_torch()
        return view_as_tensor(self._read_bytes(handle, composed, part), handle.dtype, part.shape)

    def _read_bytes(self, handle: TensorHandle, composed: ComposedTensor, part: Slice) -> bytearray:
        """Read a slice of a tensor, and return its elements as row-major bytes."""
        content = bytearray(part.box.numel * dtypes.get_itemsize(handle.dtype))
        if not content:
            return content
        for key in composed.keys:
            check_coverage(self._mapping.catalog.tensors[key])
        box = RequestedBox(handle.name, handle.dtype, handle.shape, part.box)
        cast = find_casts(
            self._mapping, {box.name: RequestedTensor(box.dtype, box.shape, ())}, True
        )
        plan = PreparedRead(self._mapping, cast).plan_boxes([box])
        sources = {
            name: self._identities.get(name, identity) for name, identity in plan.sources.items()
        }
        execution = fill_buffers(replace(plan, sources=sources), [content], self._options.jobs)
        if not self._options.allow_overflow:
            require_in_range(execution.lost, "pass `allow_overflow=True` to return them anyway")
        return content


def _missing_key_error(
    name: str, names: Mapping[str, object], where: TreePath, kind: str, hint: str | None = None
) -> NoSuchNameError:
    close = find_nearest(name, list(names))
    return NoSuchNameError(
        f"no such key: `{name}`",
        where=where,
        why=f"there are {len(names):,} {kind}, such as {quote_names(list(names), 2)}"
        if names
        else None,
        hint=hint or (close and f"did you mean `{close}`?"),
    )
