"""Make a delta: the difference between two checkpoints of one model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl import formats
from ckptctl.catalog import TensorEntry
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.dtypes import get_itemsize
from ckptctl.errors import MappingError, UsageError, format_option, quote_names
from ckptctl.formats.delta import (
    SCHEMA,
    DeltaManifest,
    TensorChange,
    TensorRecord,
    compute_digest,
)
from ckptctl.installed import require_torch
from ckptctl.numerics.kinds.delta import BLOCK_BYTES, BlockCodec, choose_codec, get_word_dtype
from ckptctl.storage.arithmetic import cast_elements, import_torch
from ckptctl.storage.computed import CatalogReader, open_catalog_reader
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.outcome import NO_LOSS, OutOfRange, require_in_range
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.verbs.deltas.canonical import (
    CanonicalCheckpoint,
    iterate_blocks,
    map_in_threads,
    open_canonical,
    select_stored,
)
from ckptctl.verbs.deltas.delta_destination import resolve_delta_destination, stage_delta
from ckptctl.verbs.deltas.delta_files import DeltaWriter, Payload
from ckptctl.verbs.deltas.delta_options import DeltaOptions
from ckptctl.verbs.deltas.delta_result import DeltaResult
from ckptctl.verbs.deltas.published import (
    PublishedWeights,
    PublishedWriter,
    XorPayload,
    is_weight_update,
    open_weight_update,
)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Digests, payload and losses of one tensor.

    Attributes:
        nbytes: Number of bytes that were read.
    """

    base: TensorRecord | None
    new: TensorRecord | None
    payload: Payload | None
    loss: OutOfRange
    nbytes: int


class DeltaMaker:
    """Comparison of two checkpoints, which are opened but not read.

    Attributes:
        nbytes: Total size of the tensors of both checkpoints in bytes.
    """

    def __init__(
        self,
        base: str | TreePath,
        new: str | TreePath,
        dst: str | TreePath,
        options: DeltaOptions,
    ) -> None:
        require_torch("making a delta", "differences of elements are computed")
        self._options = options
        self.sources = [formats.to_existing_path(path) for path in (base, new)]
        self.target = resolve_delta_destination(self.sources, dst, overwrite=options.overwrite)
        self._published: PublishedWeights | None = None
        self._base, self._new = self._open_checkpoints()
        self._require_same_model()
        self.nbytes = self._base.catalog.nbytes + (
            self._published.nbytes if self._published else self._new.catalog.nbytes
        )

    def _open_checkpoints(self) -> tuple[CanonicalCheckpoint, CanonicalCheckpoint]:
        """Open both checkpoints. If only one states its model, that applies to the other one.

        A trainer may save weights without a configuration.
        """
        base_path, new_path = self.sources
        if is_weight_update(new_path):
            if self._options.dtype is not None:
                raise UsageError(
                    f"{format_option('--dtype')} does not apply to a weight update",
                    where=str(new_path),
                    why="an update has the dtypes of its base",
                    hint="apply the delta with this option",
                )
            self._published = open_weight_update(new_path)
            base = open_canonical(
                base_path, self._options.to_conversion_options(base_path, is_new=False)
            )
            return base, base
        options = [
            self._options.to_conversion_options(path, is_new=number == 1)
            for number, path in enumerate(self.sources)
        ]
        base, new = (
            open_canonical(path, chosen) for path, chosen in zip(self.sources, options, strict=True)
        )
        if new.model_type is None and base.model_type is not None:
            new = open_canonical(new_path, _describe_like(options[1], new, base))
        elif base.model_type is None and new.model_type is not None:
            base = open_canonical(base_path, _describe_like(options[0], base, new))
        return base, new

    @property
    def statement(self) -> str:
        """One-line summary of the checkpoints."""
        new_format = "weight update" if self._published else self._new.draft.source.format
        both = dict.fromkeys((self._base.draft.source.format, new_format))
        model_type = self._new.model_type or "model without a table"
        return f"{' and '.join(both)} · {model_type} · layout {self._new.layout or 'unchanged'}"

    def _require_same_model(self) -> None:
        base, new = self._base, self._new
        if self._published:
            unknown = [name for name in self._published.spans if name not in base.catalog.tensors]
            if unknown:
                raise MappingError(
                    "the update changes tensors that the base has not",
                    where=f"{self.sources[0]} and {self.sources[1]}",
                    why=quote_names(unknown),
                )
            stored = {*select_stored(base.catalog.tensors)}
            if tied := [name for name in self._published.spans if name not in stored]:
                raise MappingError(
                    "the update changes tensors that are tied in the base",
                    where=f"{self.sources[0]} and {self.sources[1]}",
                    why=quote_names(tied),
                )
        if self._options.weight_version is not None:
            _require_same_shapes(base, new)
        both = f"{self.sources[0]} and {self.sources[1]}"
        if base.model_type != new.model_type:
            types = [item.model_type or "unknown" for item in (base, new)]
            raise MappingError(
                "the checkpoints have different model types",
                where=both,
                why=" and ".join(types),
                hint=f"pass {format_option('--model-type')} if both are the same model",
            )
        if not base.catalog.tensors.keys() & new.catalog.tensors.keys():
            raise MappingError(
                "the checkpoints have no tensor in common",
                where=both,
                why=f"{quote_names([*base.catalog.tensors])} and "
                f"{quote_names([*new.catalog.tensors])}",
            )

    def run(self, progress: Advance) -> DeltaResult:
        """Compare all tensors and write the delta.

        *progress* receives the number of bytes read.
        """
        start = time.monotonic()
        import_torch()
        for checkpoint in (self._base, self._new):
            checkpoint.require_nothing_lost()
        codec = BlockCodec.load(self._options.compression or choose_codec())
        version = self._options.weight_version
        left_out = {} if self._published else self._new.left_out  # opened as the base
        with ExitStack() as stack:
            stage = stack.enter_context(
                stage_delta(self.target, self._list_read_files(), overwrite=self._options.overwrite)
            )
            writer = DeltaWriter(stage.data) if version is None else PublishedWriter(stage.data)
            stack.callback(writer.close)
            changes, losses = self._add_payloads(writer, codec, stack, progress)
            writer.finish_payloads()
            for name, content in self._read_changed_assets().items():
                if version is None:
                    writer.add_asset(name, content)
                else:
                    left_out[name] = "a weight update has no such files"
            for checkpoint in (self._base, self._new):
                checkpoint.require_unchanged()
            manifest = build_manifest(
                changes, writer, codec.name, self._new.model_type, self._new.layout, left_out
            )
            if isinstance(writer, PublishedWriter):
                payloads = {name: item.file for name, item in changes.items() if item.file}
                nbytes = writer.finish_version(version or 0, payloads)
            else:
                nbytes = writer.finish(manifest)
            notes = stage.publish()
        return build_result(
            [str(path) for path in self.sources],
            self.target.path,
            manifest,
            nbytes,
            time.monotonic() - start,
            out_of_range=losses,
            notes=tuple(notes),
        )

    def _list_read_files(self) -> dict[TreePath, set[str]]:
        """Return the names of the source files, by folder."""
        read: dict[TreePath, set[str]] = {}
        for checkpoint in (self._base, self._new):
            for root, identities in checkpoint.identities.items():
                read.setdefault(root, set()).update(identities)
        if self._published:
            files = {file for file, _, _ in self._published.spans.values()}
            read.setdefault(self._published.root, set()).update(files)
        return read

    def _add_payloads(
        self, writer: DeltaWriter, codec: BlockCodec, stack: ExitStack, progress: Advance
    ) -> tuple[dict[str, TensorChange], dict[str, OutOfRange]]:
        """Compare all tensors, and add the payloads of those that differ to *writer*.

        Returns:
            State of all tensors before and after, and elements lost in casts, by tensor name.

        Raises:
            RefusedError: A cast loses elements, and that is not allowed.
        """
        base, new = self._base.catalog.tensors, self._new.catalog.tensors
        names = list(dict.fromkeys([*new, *base]))
        stored = {*select_stored(base), *select_stored(new)}
        readers = tuple(
            stack.enter_context(open_catalog_reader(item.catalog))
            for item in (self._base, self._new)
        )
        published = stack.enter_context(source_files(self.sources[1]))

        def compare(name: str) -> _Comparison:
            return self._compare(name, readers, published, writer.folder, codec, stack)

        losses: dict[str, OutOfRange] = {}
        changes: dict[str, TensorChange] = {}
        selected = [name for name in names if name in stored]
        for name, compared in map_in_threads(compare, selected, self._options.jobs):
            file = None
            if compared.payload is not None:
                if isinstance(compared.payload, XorPayload):
                    assert isinstance(writer, PublishedWriter)
                    writer.checksums[name] = compared.payload.checksum
                file = writer.add_payload(name, compared.payload.iterate_content())
            changes[name] = TensorChange(compared.base, compared.new, file)
            if compared.loss:
                losses[name] = compared.loss
            progress(compared.nbytes)
        if not self._options.allow_overflow:
            require_in_range(
                losses, f"pass {format_option('--allow-overflow')} to store them anyway"
            )
        self._add_tied(changes, names)
        return changes, losses

    def _compare(
        self,
        name: str,
        readers: tuple[CatalogReader, ...],
        published: SourceFiles,
        folder: Path,
        codec: BlockCodec,
        stack: ExitStack,
    ) -> _Comparison:
        """Read a tensor of both checkpoints, and encode its difference unless it is tied."""
        base, new = self._base.catalog.tensors.get(name), _find_stored(self._new, name)
        dtype = self._new.dtypes[name] if new else ""
        is_replaced = not base or not new or (base.dtype, base.shape) != (dtype, new.shape)
        digests = hashlib.sha256(), hashlib.sha256()
        loss, nbytes = NO_LOSS, 0
        payload: Payload | None = None
        if new:
            is_version = self._options.weight_version is not None
            payload = (
                XorPayload(folder, stack, new.nbytes) if is_version else Payload(folder, stack)
            )
        base_blocks = iterate_blocks(readers[0], base, BLOCK_BYTES) if base else iter(())
        if new:
            word = get_word_dtype(dtype)
            stored_bytes = BLOCK_BYTES // get_itemsize(dtype) * get_itemsize(new.dtype)
            assert payload is not None
            new_blocks = iterate_blocks(readers[1], new, stored_bytes)
            if self._published and name in self._published.spans:
                new_blocks = self._published.iterate_new_blocks(published, name, new_blocks)
            for block in new_blocks:
                nbytes += len(block)
                if new.dtype != dtype:
                    block, lost = _cast_block(block, new.dtype, dtype)
                    loss += lost
                digests[1].update(block)
                base_block = None
                if not is_replaced:
                    base_block = next(base_blocks)
                    nbytes += len(base_block)
                    digests[0].update(base_block)
                if isinstance(payload, XorPayload):
                    assert base_block is not None
                    payload.add_blocks(base_block, block)
                else:
                    payload.add(*codec.encode(base_block, block, word))
        for block in base_blocks:
            nbytes += len(block)
            digests[0].update(block)
        base_record = TensorRecord(base.dtype, base.shape, digests[0].hexdigest()) if base else None
        new_record = TensorRecord(dtype, new.shape, digests[1].hexdigest()) if new else None
        if (
            payload is not None
            and new_record is not None
            and new_record.has_elements_of(base_record)
        ):
            payload.close()
            payload = None
        return _Comparison(base_record, new_record, payload, loss, nbytes)

    def _add_tied(self, changes: dict[str, TensorChange], names: list[str]) -> None:
        """Add the records of tensors that share the memory of another tensor, in order."""
        base, new = self._base.catalog.tensors, self._new.catalog.tensors
        for name in names:
            change = changes.get(name, TensorChange())
            records = {"base": change.base, "result": change.result}
            for side, tensors in (("base", base), ("result", new)):
                alias = tensors[name].alias_of if name in tensors else None
                if alias is not None and alias in tensors:
                    original = getattr(changes[alias], side)
                    records[side] = TensorRecord(
                        original.dtype, original.shape, original.sha256, alias
                    )
            changes[name] = TensorChange(records["base"], records["result"], change.file)
        for name in names:
            changes[name] = changes.pop(name)

    def _read_changed_assets(self) -> dict[str, bytes]:
        """Read the sidecar files of the new checkpoint that the base has not, or not alike."""
        contents: dict[str, bytes] = {}
        base, new = (item.draft.assets for item in (self._base, self._new))
        for name in new.sizes:
            content = _read_file(new.roots[name], name)
            if name not in base.sizes or content != _read_file(base.roots[name], name):
                contents[name] = content
        return contents


def _require_same_shapes(base: CanonicalCheckpoint, new: CanonicalCheckpoint) -> None:
    """Raise unless both checkpoints have tensors of the same names, dtypes and shapes."""
    before, after = (
        {name: (item.dtypes[name], entry.shape) for name, entry in item.catalog.tensors.items()}
        for item in (base, new)
    )
    different = [
        name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)
    ]
    if different:
        raise MappingError(
            "a weight update for inference engines requires the same tensors in both checkpoints",
            where=f"{base.draft.source.path} and {new.draft.source.path}",
            why=f"names, dtypes or shapes differ: {quote_names(different)}",
            hint="make a delta instead, which can add, remove and cast tensors",
        )


def _describe_like(
    options: ConversionOptions, checkpoint: CanonicalCheckpoint, other: CanonicalCheckpoint
) -> ConversionOptions:
    """Return *options* for a checkpoint of the model type of *other*.

    If only *other* has a configuration, that applies, too.
    """
    source, described = checkpoint.draft.source, other.draft.source
    assets = str(described.root) if described.documents and not source.documents else None
    return replace(options, model_type=other.model_type, assets=assets)


def _find_stored(checkpoint: CanonicalCheckpoint, name: str) -> TensorEntry | None:
    tensors = checkpoint.catalog.tensors
    entry = tensors.get(name)
    return None if entry is None or entry.alias_of in tensors else entry


def _cast_block(block: bytearray, source: str, target: str) -> tuple[bytearray, OutOfRange]:
    result = bytearray(len(block) // get_itemsize(source) * get_itemsize(target))
    return result, cast_elements(memoryview(block), source, memoryview(result), target)


def _read_file(root: TreePath, name: str) -> bytes:
    with source_files(root) as files:
        return files.read(name, 0, files.size(name))


def build_manifest(
    changes: Mapping[str, TensorChange],
    writer: DeltaWriter,
    codec: str,
    model_type: str | None,
    layout: str | None,
    left_out: Mapping[str, str],
) -> DeltaManifest:
    """Build the manifest of the delta whose payloads and assets *writer* has written.

    *left_out* are the values and files that it does not include, with reasons.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names_by_reason.setdefault(why, []).append(name)
    sides = (
        [(name, item.base) for name, item in changes.items() if item.base],
        [(name, item.result) for name, item in changes.items() if item.result],
    )
    return DeltaManifest(
        schema=SCHEMA,
        codec="zstd" if codec == "zstd" else "deflate",
        block_bytes=BLOCK_BYTES,
        base_sha256=compute_digest(sides[0]),
        result_sha256=compute_digest(sides[1]),
        tensors=dict(changes),
        files=dict(writer.files),
        model_type=model_type,
        layout=layout,
        left_out={why: tuple(names) for why, names in names_by_reason.items()},
    )


def build_result(
    sources: list[str],
    target: TreePath,
    manifest: DeltaManifest,
    nbytes: int,
    seconds: float,
    *,
    out_of_range: Mapping[str, OutOfRange] | None = None,
    notes: tuple[str, ...] = (),
) -> DeltaResult:
    """Build the result of making or squashing a delta."""
    results = {name: item.result for name, item in manifest.tensors.items() if item.result}
    return DeltaResult(
        sources=tuple(sources),
        output=str(target),
        model_type=manifest.model_type,
        layout=manifest.layout,
        tensors=len(results),
        changed=tuple(manifest.changed),
        added=tuple(name for name, item in manifest.tensors.items() if item.base is None),
        removed=tuple(name for name, item in manifest.tensors.items() if item.result is None),
        assets=tuple(manifest.assets),
        base_sha256=manifest.base_sha256,
        result_sha256=manifest.result_sha256,
        compression=manifest.codec,
        nbytes=nbytes,
        full_bytes=sum(item.nbytes for item in results.values() if item.alias_of is None),
        left_out=manifest.left_out_reasons,
        seconds=seconds,
        out_of_range=out_of_range or {},
        notes=notes,
    )
