"""Check a base and a chain of deltas by their digests, without writing anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, RefusedError, quote_names
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
    select_stored,
)
from ckptctl.verbs.deltas.chain import COPY_HINT, Chain, iterate_result_blocks


@dataclass(frozen=True, slots=True)
class _Digests:
    """Digests of one name in base and result, or None where there is nothing to read."""

    base: str | None = None
    result: str | None = None
    nbytes: int = 0


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
    tensors = base.catalog.tensors
    stored = dict.fromkeys(select_stored(tensors))
    changed = {
        name: resolved
        for name, resolved in chain.tensors.items()
        if resolved.patches and resolved.record.alias_of is None
    }
    with ExitStack() as stack:
        reader = stack.enter_context(open_catalog_reader(base.catalog))
        roots: Mapping[TreePath, SourceFiles] = {
            delta.root: stack.enter_context(source_files(delta.root)) for delta in chain.deltas
        }

        def hash_name(name: str) -> _Digests:
            resolved, entry = changed.get(name), tensors.get(name)
            digests, nbytes = (hashlib.sha256(), hashlib.sha256()), 0
            is_changed_here = (
                resolved is not None
                and resolved.base_name == name
                and is_like_record(entry, resolved.record)
            )
            if name in stored and not is_changed_here:
                assert entry is not None
                for block in iterate_blocks(reader, entry, chain.block_bytes):
                    digests[0].update(block)
                    nbytes += len(block)
            if resolved is not None:
                blocks: Iterator[bytearray] | None = None
                if resolved.base_name is not None:
                    base_entry = tensors.get(resolved.base_name)
                    if not is_like_record(base_entry, resolved.record):
                        # Another base, which is refused below.
                        return _Digests(digests[0].hexdigest() if name in stored else None)
                    assert base_entry is not None
                    blocks = iterate_blocks(reader, base_entry, chain.block_bytes)
                    if is_changed_here:
                        blocks = _hash_blocks(blocks, digests[0])
                for block in iterate_result_blocks(resolved, blocks, roots.__getitem__):
                    digests[1].update(block)
                    nbytes += len(block)
            return _Digests(
                digests[0].hexdigest() if name in stored else None,
                digests[1].hexdigest() if resolved is not None else None,
                nbytes,
            )

        names = list(dict.fromkeys([*stored, *changed]))
        hashed: dict[str, _Digests] = {}
        for name, found in map_in_threads(hash_name, names, jobs):
            hashed[name] = found
            progress(found.nbytes)
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
