"""Apply deltas to tensors in memory, such as the weights of an inference engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from ckptctl.errors import DamagedError, MappingError, RefusedError, quote_names
from ckptctl.formats.delta import TensorRecord
from ckptctl.installed import require_torch
from ckptctl.numerics.kinds.delta import (
    REPLACING_KINDS,
    BlockKind,
    view_tensor_as_words,
    view_words,
)
from ckptctl.storage.arithmetic import import_torch
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.deltas.chain import COPY_HINT, Chain, PayloadReader, ResolvedTensor, open_delta

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

Check = Literal["all", "changed", "none"]


def apply_to_tensors(
    tensors: Mapping[str, Tensor],
    deltas: Sequence[str | TreePath],
    names: Mapping[str, str],
    *,
    check: Check,
) -> tuple[str, ...]:
    """Change *tensors* in place to the result of *deltas*.

    All requirements are checked before the first tensor is changed.

    Args:
        tensors: Tensors of the base, on any device.
        deltas: Deltas to apply in turn.
        names: Name in *tensors* of each tensor that is called differently in the deltas.
        check: Tensors whose digests are compared with the base before, and with the result after
            the change: all, those that change, or none.

    Returns:
        Names, in the deltas, of the changed tensors.

    Raises:
        MappingError: A tensor is missing, or differs in dtype or shape.
        RefusedError: The tensors are not those of the base.
        DamagedError: A delta is damaged.
    """
    require_torch("applying a delta", "tensors are changed")
    import_torch()
    chain = Chain([open_delta(path) for path in deltas])
    for delta in chain.deltas:
        delta.check_files()
    changed = {name: item for name, item in chain.tensors.items() if item.patches}
    live = _select_tensors(tensors, chain, changed, names)
    distinct = _select_distinct(tensors, chain, live, names)
    if check == "all":
        _require_base(chain, _select_all(tensors, chain, names))
    elif check == "changed":
        _require_base(chain, {name: live[name] for name in distinct})
    with ExitStack() as stack:
        roots: Mapping[TreePath, SourceFiles] = {
            delta.root: stack.enter_context(source_files(delta.root)) for delta in chain.deltas
        }
        opened = [
            (name, [PayloadReader(delta, roots[delta.root], key) for delta, key in item.patches])
            for name, item in distinct.items()
        ]
        for name, readers in opened:
            _apply_payloads(live[name], readers, chain.block_bytes)
    for delta in chain.deltas:
        delta.require_unchanged()
    if check != "none":
        wrong = [
            name
            for name, item in distinct.items()
            if _hash_tensor(live[name]) != item.record.sha256
        ]
        if wrong:
            raise DamagedError(
                f"{pluralize(len(wrong), 'tensor')} did not become the result of the delta",
                where=str(chain.deltas[-1].root),
                why=f"{quote_names(wrong)}; the tensors in memory are changed",
                hint=COPY_HINT,
            )
    return tuple(changed)


def _select_all(
    tensors: Mapping[str, Tensor], chain: Chain, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return all tensors of the base, by their names in the deltas."""
    missing = [name for name in chain.base if names.get(name, name) not in tensors]
    if missing:
        raise MappingError(
            f"{pluralize(len(missing), 'tensor')} of the base "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            where=str(chain.deltas[0].root),
            why=quote_names(missing),
            hint="pass all tensors, or check only those that change",
        )
    return {name: tensors[names.get(name, name)] for name in chain.base}


def _select_tensors(
    tensors: Mapping[str, Tensor],
    chain: Chain,
    changed: Mapping[str, ResolvedTensor],
    names: Mapping[str, str],
) -> dict[str, Tensor]:
    """Return the tensors to change, by their names in the deltas."""
    where = str(chain.deltas[0].root)
    added = [name for name in chain.tensors if name not in chain.base]
    removed = [name for name in chain.base if name not in chain.tensors]
    if added or removed:
        raise MappingError(
            "the delta adds or removes tensors",
            where=where,
            why=quote_names([*added, *removed]),
            hint="apply it to a checkpoint, and load the result",
        )
    if tied := [name for name, item in chain.tensors.items() if _is_newly_tied(name, item, chain)]:
        raise MappingError(
            "the delta ties tensors that differ in the base",
            where=where,
            why=quote_names(tied),
            hint="apply it to a checkpoint, and load the result",
        )
    missing = [name for name in changed if names.get(name, name) not in tensors]
    if missing:
        raise MappingError(
            f"{pluralize(len(missing), 'changed tensor')} of the delta "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            where=where,
            why=quote_names(missing),
            hint="pass all tensors, and `names` for those with other names",
        )
    selected = {name: tensors[names.get(name, name)] for name in changed}
    for name, tensor in selected.items():
        if tensor.is_meta or hasattr(tensor, "to_local"):
            raise MappingError(
                f"`{name}` has no data" if tensor.is_meta else f"`{name}` is a DTensor",
                where=where,
                hint="pass complete tensors, or apply the delta to a checkpoint",
            )
        record = changed[name].record
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if (dtype, shape) != (record.dtype, record.shape):
            raise MappingError(
                f"`{name}` has another dtype or shape",
                where=where,
                why=f"{dtype} {list(shape)} in memory, {record.dtype} {list(record.shape)} in "
                "the delta",
                hint="apply it to a checkpoint, and load the result",
            )
    return selected


def _is_newly_tied(name: str, resolved: ResolvedTensor, chain: Chain) -> bool:
    """Return whether a tensor becomes a copy of another one, from which it differs in the base."""
    if resolved.base_name is None:
        return False
    return not chain.base[name].has_elements_of(chain.base[resolved.base_name])


def _select_distinct(
    tensors: Mapping[str, Tensor],
    chain: Chain,
    live: Mapping[str, Tensor],
    names: Mapping[str, str],
) -> dict[str, ResolvedTensor]:
    """Return the changed tensors, but only the first of those that share memory.

    An engine may tie tensors that the checkpoints store twice.

    Raises:
        MappingError: Tensors that share memory would differ in the result.
    """
    firsts: dict[tuple[object, ...], str] = {}
    distinct: dict[str, ResolvedTensor] = {}
    for name in dict.fromkeys([*live, *chain.tensors]):
        tensor, resolved = tensors.get(names.get(name, name)), chain.tensors[name]
        if tensor is None:
            continue
        first = firsts.setdefault(_get_memory_key(tensor), name) if tensor.data_ptr() else name
        if first == name:
            if name in live:
                distinct[name] = resolved
        elif not resolved.record.has_elements_of(chain.tensors[first].record) and first in live:
            raise MappingError(
                "tensors that share memory differ in the result",
                where=str(chain.deltas[0].root),
                why=quote_names([first, name]),
                hint="pass copies, or apply the delta to a checkpoint",
            )
    return distinct


def _get_memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors of the same elements in memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _require_base(chain: Chain, live: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors have the digests of the base."""
    digests = {name: _hash_tensor(tensor) for name, tensor in live.items()}
    wrong = [name for name, digest in digests.items() if digest != chain.base[name].sha256]
    if not wrong:
        return

    def matches(record: TensorRecord, name: str) -> bool:
        return digests[name] == record.sha256

    is_applied = all(matches(chain.tensors[name].record, name) for name in live)
    raise RefusedError(
        "the delta is already applied"
        if is_applied
        else "the tensors are not those that the delta was made from",
        where=str(chain.deltas[0].root),
        why="all tensors have the digests of its result"
        if is_applied
        else f"{pluralize(len(wrong), 'tensor')} differ: {quote_names(wrong)}",
        hint="nothing was changed",
    )


def _apply_payloads(tensor: Tensor, readers: Sequence[PayloadReader], block_bytes: int) -> None:
    """Change one tensor in place, a block at a time."""
    dense = tensor.detach().contiguous()
    words = view_tensor_as_words(dense)
    per_block = block_bytes // words.element_size()
    for number, start in enumerate(range(0, len(words), per_block)):
        target = words[start : start + per_block]
        for reader in readers:
            entry = reader.entries[number]
            if entry.kind is BlockKind.SAME:
                continue
            change = reader.read_block(number, entry).to(words.device)
            if entry.kind in REPLACING_KINDS:
                target.copy_(change)
            else:
                target.add_(change)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def _hash_tensor(tensor: Tensor) -> str:
    """Compute SHA-256 of the elements in row-major order."""
    digest = hashlib.sha256()
    for piece in _iterate_words(tensor):
        content = bytearray(piece.nbytes)
        view_words(content, str(piece.dtype).removeprefix("torch.")).copy_(piece)
        digest.update(content)
    return digest.hexdigest()


def _iterate_words(tensor: Tensor) -> Iterator[Tensor]:
    words = view_tensor_as_words(tensor.detach().contiguous())
    step = (4 << 20) // words.element_size()
    for start in range(0, len(words), step):
        yield words[start : start + step]
