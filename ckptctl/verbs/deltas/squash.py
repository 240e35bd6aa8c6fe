"""Squash a chain of deltas into one delta, without reading the base.

Differences are added. So the result of the squashed delta equals that of the chain bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckptctl.errors import UnsupportedError, UsageError
from ckptctl.formats.delta import TensorChange
from ckptctl.installed import require_torch
from ckptctl.numerics.kinds.delta import (
    REPLACING_KINDS,
    BlockCodec,
    BlockKind,
    choose_codec,
    get_word_dtype,
    view_words,
)
from ckptctl.storage.arithmetic import import_torch
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.verbs.deltas.canonical import map_in_threads
from ckptctl.verbs.deltas.chain import (
    Chain,
    PayloadReader,
    ResolvedTensor,
    iterate_result_blocks,
    open_delta,
)
from ckptctl.verbs.deltas.delta_destination import resolve_delta_destination, stage_delta
from ckptctl.verbs.deltas.delta_files import DeltaWriter, Payload
from ckptctl.verbs.deltas.delta_options import DeltaSquashOptions
from ckptctl.verbs.deltas.delta_result import DeltaResult
from ckptctl.verbs.deltas.make import (
    build_manifest,
    build_result,
)


class DeltaSquash:
    """Chain of deltas to squash, which is opened but not read.

    Attributes:
        nbytes: Total size of the deltas in bytes.
    """

    def __init__(
        self,
        deltas: Sequence[str | TreePath],
        dst: str | TreePath,
        options: DeltaSquashOptions,
    ) -> None:
        require_torch("squashing deltas", "differences of elements are computed")
        if len(deltas) < 2:
            raise UsageError("squashing needs at least two deltas")
        self._options = options
        self.chain = Chain([open_delta(path) for path in deltas])
        roots = [delta.root for delta in self.chain.deltas]
        self.target = resolve_delta_destination(roots, dst, overwrite=options.overwrite)
        self.nbytes = sum(delta.manifest.nbytes for delta in self.chain.deltas)
        self._changes = self._plan_changes()

    def _plan_changes(self) -> dict[str, TensorChange]:
        """Return the records of all tensors, without the files of payloads."""
        base, result = self.chain.base, self.chain.tensors
        for name, resolved in result.items():
            if resolved.record.alias_of is None and resolved.base_name not in (None, name):
                raise UnsupportedError(
                    "this chain cannot be squashed",
                    where=f"tensor `{name}`",
                    why=f"one delta ties it to `{resolved.base_name}`, and a later one unties it",
                    hint="apply the deltas, and make a delta from base and result",
                )
        return {
            name: TensorChange(base.get(name), result[name].record if name in result else None)
            for name in dict.fromkeys([*result, *base])
        }

    def run(self, progress: Advance) -> DeltaResult:
        """Compose all payloads and write the delta. *progress* receives bytes of payloads."""
        start = time.monotonic()
        import_torch()
        for delta in self.chain.deltas:
            delta.check_files()
        codec = BlockCodec.load(self._options.compression or choose_codec())
        changes = self._changes
        names = [name for name, change in changes.items() if _needs_payload(change)]
        with ExitStack() as stack:
            stage = stack.enter_context(
                stage_delta(
                    self.target,
                    {delta.root: delta.identities.keys() for delta in self.chain.deltas},
                    overwrite=self._options.overwrite,
                )
            )
            roots: Mapping[TreePath, SourceFiles] = {
                delta.root: stack.enter_context(source_files(delta.root))
                for delta in self.chain.deltas
            }
            writer = DeltaWriter(stage.data)
            stack.callback(writer.close)

            def compose(name: str) -> Payload:
                return self._compose(name, roots, stage.data, codec, stack)

            for name, payload in map_in_threads(compose, names, self._options.jobs):
                file = writer.add_payload(name, payload.iterate_content())
                changes[name] = TensorChange(changes[name].base, changes[name].result, file)
                patches = self.chain.tensors[name].patches
                progress(sum(delta.payloads[key].nbytes for delta, key in patches))
            writer.finish_payloads()
            for name, content in self._read_assets(roots).items():
                writer.add_asset(name, content)
            last = self.chain.deltas[-1].manifest
            manifest = build_manifest(
                changes,
                writer,
                codec.name,
                last.model_type,
                last.layout,
                last.left_out_reasons,
            )
            nbytes = writer.finish(manifest)
            for delta in self.chain.deltas:
                delta.require_unchanged()
            notes = stage.publish()
        return build_result(
            [str(delta.root) for delta in self.chain.deltas],
            self.target.path,
            manifest,
            nbytes,
            time.monotonic() - start,
            notes=tuple(notes),
        )

    def _compose(
        self,
        name: str,
        roots: Mapping[TreePath, SourceFiles],
        folder: Path,
        codec: BlockCodec,
        stack: ExitStack,
    ) -> Payload:
        resolved = self.chain.tensors[name]
        payload = Payload(folder, stack)
        word = get_word_dtype(resolved.record.dtype)
        if resolved.base_name is None:
            for block in iterate_result_blocks(resolved, None, roots.__getitem__):
                payload.add(*codec.encode_new(block, word))
            return payload
        for kind, content in _add_changes(resolved, roots, codec, word):
            payload.add(kind, content)
        return payload

    def _read_assets(self, roots: Mapping[TreePath, SourceFiles]) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for delta in self.chain.deltas:
            for name in delta.manifest.assets:
                contents[name] = delta.read_asset(roots[delta.root], name)
        return contents


def _needs_payload(change: TensorChange) -> bool:
    result = change.result
    return (
        result is not None and result.alias_of is None and not result.has_elements_of(change.base)
    )


def _add_changes(
    resolved: ResolvedTensor,
    roots: Mapping[TreePath, SourceFiles],
    codec: BlockCodec,
    word: str,
) -> Iterator[tuple[BlockKind, bytes]]:
    """Yield the encoded sum of the changes of each block."""
    readers = [PayloadReader(delta, roots[delta.root], name) for delta, name in resolved.patches]
    for number in range(len(readers[0].entries)):
        total, is_new = None, False
        for reader in readers:
            entry = reader.entries[number]
            if entry.kind is BlockKind.SAME:
                continue
            change = reader.read_block(number, entry)
            if entry.kind in REPLACING_KINDS:
                total, is_new = change, True
            else:
                total = change if total is None else total + change
        if total is None:
            yield BlockKind.SAME, b""
        elif is_new:
            block = bytearray(total.nbytes)
            view_words(block, word).copy_(total)
            yield codec.encode_new(block, word)
        else:
            yield codec.encode_difference(total)
