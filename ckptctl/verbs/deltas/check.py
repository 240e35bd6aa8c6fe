"""Check a base and a chain of deltas by their digests, without writing anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ckptctl.catalog import TensorEntry
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import DamagedError, MappingError, RefusedError, format_option, quote_names
from ckptctl.formats.delta import TensorRecord, compute_digest
from ckptctl.installed import require_torch
from ckptctl.storage.arithmetic import import_torch
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.deltas.canonical import (
    CanonicalCheckpoint,
    iterate_blocks,
    map_in_threads,
    open_canonical,
    select_stored,
)
from ckptctl.verbs.deltas.chain import COPY_HINT, Chain, ResolvedTensor, iterate_result_blocks


@dataclass(frozen=True, slots=True)
class _Digests:
    """Digests of one name in base and result, or None where there is nothing to read."""

    base: str | None = None
    result: str | None = None
    nbytes: int = 0


def open_base(path: TreePath, options: ConversionOptions, chain: Chain) -> CanonicalCheckpoint:
    """Open the base of *chain*, with *options* of a conversion to the canonical layout.

    A base that does not describe its model has the model type of the delta.
    """
    stated = options.model_type or chain.deltas[0].manifest.model_type
    with_stated_type = replace(options, model_type=stated)
    try:
        base = open_canonical(path, options)
    except MappingError:  # names of tensors alone may not determine the model type
        return open_canonical(path, with_stated_type)
    is_described = base.draft.change.family is not None and base.draft.source.documents
    if is_described or base.model_type == stated:
        return base
    return open_canonical(path, with_stated_type)


def require_same_model(chain: Chain, base: CanonicalCheckpoint, jobs: int | None) -> None:
    """Raise if the base has another model type or other tensors than the deltas.

    Raises:
        MappingError: The model types differ.
        RefusedError: The tensors differ.
    """
    manifest = chain.deltas[0].manifest
    where = f"{base.draft.source.path} and {chain.deltas[0].root}"
    if manifest.model_type != base.model_type:
        raise MappingError(
            "the delta belongs to another model type",
            where=where,
            why=f"the base is {base.model_type or 'unknown'}, the delta is for "
            f"{manifest.model_type or 'an unknown type'}",
            hint=f"pass {format_option(f'--model-type {manifest.model_type}')} if this is wrong"
            if manifest.model_type
            else f"make the delta again with {format_option(f'--model-type {base.model_type}')}",
        )
    tensors = base.catalog.tensors
    names = (item.base_name for item in chain.tensors.values() if item.base_name is not None)
    if not all(
        name in tensors and is_like_record(tensors[name], chain.base[name]) for name in names
    ):
        # This raises, because the digests differ, and describes the difference.
        check_chain(chain, base, lambda _: None, jobs)


def check_chain(
    chain: Chain, base: CanonicalCheckpoint, progress: Advance, jobs: int | None
) -> None:
    """Read all data of *base* and *chain*, and compare the digests of base and result.

    Raises:
        DamagedError: A delta is damaged.
        RefusedError: *base* is not the checkpoint that the first delta was made from.
    """
    require_torch("applying a delta", "differences of elements are added")
    import_torch()
    for delta in chain.deltas:
        delta.check_files()
    base.require_nothing_lost()
    changed = {
        name: resolved
        for name, resolved in chain.tensors.items()
        if resolved.patches and resolved.record.alias_of is None
    }
    names = list(dict.fromkeys([*select_stored(base.catalog.tensors), *changed]))
    hashed: dict[str, _Digests] = {}
    with ExitStack() as stack:
        hasher = _TensorHasher(chain, base, changed, stack)
        for name, digests in map_in_threads(hasher.hash_tensor, names, jobs):
            hashed[name] = digests
            progress(digests.nbytes)
    for delta in chain.deltas:
        delta.require_unchanged()
    base.require_unchanged()
    _require_base(chain, base, {name: item.base for name, item in hashed.items() if item.base})
    wrong = [name for name, item in changed.items() if hashed[name].result != item.record.sha256]
    if wrong:
        raise DamagedError(
            f"{pluralize(len(wrong), 'tensor')} of the result would not match "
            f"{'its digest' if len(wrong) == 1 else 'their digests'}",
            where=str(chain.deltas[-1].root),
            why=quote_names(wrong),
            hint=COPY_HINT,
        )


class _TensorHasher:
    """Computation of digests of the tensors of base and result.

    Args:
        chain: The deltas.
        base: The base.
        changed: Tensors of the result that the deltas change and that are not tied, by name.
        stack: Stack that closes the files.
    """

    def __init__(
        self,
        chain: Chain,
        base: CanonicalCheckpoint,
        changed: Mapping[str, ResolvedTensor],
        stack: ExitStack,
    ) -> None:
        self._changed, self._block_bytes = changed, chain.block_bytes
        self._tensors = base.catalog.tensors
        self._stored = frozenset(select_stored(self._tensors))
        self._reader = stack.enter_context(open_catalog_reader(base.catalog))
        self._roots: Mapping[TreePath, SourceFiles] = {
            delta.root: stack.enter_context(source_files(delta.root)) for delta in chain.deltas
        }

    def hash_tensor(self, name: str) -> _Digests:
        """Hash what base and result store under *name*. The base is read once if possible."""
        resolved = self._changed.get(name)
        if resolved is None:
            base = self._hash_base(name)
            return _Digests(base[0], None, base[1])
        if resolved.base_name == name and is_like_record(self._tensors.get(name), resolved.record):
            digest = hashlib.sha256()
            hashed = _hash_blocks(self._iterate_base_blocks(name), digest)
            result, nbytes = self._hash_result(resolved, hashed)
            return _Digests(digest.hexdigest() if name in self._stored else None, result, nbytes)
        base_digest, base_bytes = self._hash_base(name) if name in self._stored else (None, 0)
        origin = resolved.base_name
        if origin is not None and not is_like_record(self._tensors.get(origin), resolved.record):
            return _Digests(base_digest)  # another base, which is refused later
        blocks = None if origin is None else self._iterate_base_blocks(origin)
        result, nbytes = self._hash_result(resolved, blocks)
        return _Digests(base_digest, result, base_bytes + nbytes)

    def _hash_base(self, name: str) -> tuple[str, int]:
        digest, nbytes = hashlib.sha256(), 0
        for block in self._iterate_base_blocks(name):
            digest.update(block)
            nbytes += len(block)
        return digest.hexdigest(), nbytes

    def _hash_result(
        self, resolved: ResolvedTensor, base_blocks: Iterator[bytearray] | None
    ) -> tuple[str, int]:
        digest, nbytes = hashlib.sha256(), 0
        for block in iterate_result_blocks(resolved, base_blocks, self._roots.__getitem__):
            digest.update(block)
            nbytes += len(block)
        return digest.hexdigest(), nbytes

    def _iterate_base_blocks(self, name: str) -> Iterator[bytearray]:
        return iterate_blocks(self._reader, self._tensors[name], self._block_bytes)


def is_like_record(entry: TensorEntry | None, record: TensorRecord) -> bool:
    """Return whether a tensor has the dtype and shape of *record*."""
    return entry is not None and (entry.dtype, entry.shape) == (record.dtype, record.shape)


def _hash_blocks(blocks: Iterable[bytearray], digest: hashlib._Hash) -> Iterator[bytearray]:
    """Yield *blocks*, after *digest* is updated with each of them."""
    for block in blocks:
        digest.update(block)
        yield block


def _require_base(chain: Chain, base: CanonicalCheckpoint, digests: Mapping[str, str]) -> None:
    """Raise unless the digests of all tensors are those of the base of the chain."""
    tensors = base.catalog.tensors
    records: dict[str, TensorRecord] = {}
    for name, entry in tensors.items():
        stored_name = name if name in digests else entry.alias_of or ""
        records[name] = TensorRecord(entry.dtype, entry.shape, digests[stored_name])
    actual = compute_digest(records.items())
    expected = chain.deltas[0].manifest.base_sha256
    if actual == expected:
        return
    path = base.draft.source.path
    for number, delta in enumerate(chain.deltas):
        if actual == delta.manifest.result_sha256:
            is_last = number == len(chain.deltas) - 1
            raise RefusedError(
                "the delta is already applied"
                if len(chain.deltas) == 1
                else "the deltas are already applied"
                if is_last
                else "the first delta is already applied"
                if number == 0
                else f"the first {pluralize(number + 1, 'delta')} are already applied",
                where=str(path),
                why=f"its tensors are the result of `{delta.root.name}` ({actual[:12]})",
                hint="use this checkpoint as it is"
                if is_last
                else f"omit the deltas up to `{delta.root.name}`",
            )
    missing = sorted(chain.base.keys() - records.keys())
    extra = sorted(records.keys() - chain.base.keys())
    different = [
        name
        for name, record in chain.base.items()
        if name in records and not record.has_elements_of(records[name])
    ]
    problems = {"differ": different, "are missing": missing, "are not in that base": extra}
    raise RefusedError(
        "the base is not the checkpoint that the delta was made from",
        where=f"{path} and {chain.deltas[0].root}",
        why="; ".join(
            f"{pluralize(len(names), 'tensor')} {verb}: {quote_names(names, 3)}"
            for verb, names in problems.items()
            if names
        ),
        hint=f"pass the checkpoint with the digest {expected[:12]}",
    )
