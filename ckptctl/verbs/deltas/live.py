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
from ckptctl.verbs.deltas.live_tensors import (
    CHECKPOINT_HINT,
    LiveNames,
    LiveTensor,
    find_live_tensors,
)

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

Check = Literal["all", "changed", "none"]


def apply_to_tensors(
    tensors: Mapping[str, Tensor],
    deltas: Sequence[str | TreePath],
    stated: LiveNames,
    *,
    check: Check,
) -> tuple[str, ...]:
    """Change *tensors* in place to the result of *deltas*.

    All requirements are checked before the first tensor is changed.

    Args:
        tensors: Tensors of the base, on any device.
        deltas: Deltas to apply in turn.
        stated: How the tensors differ from those of the deltas in name and layout.
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
    _require_same_tensors(chain)
    changed = {name: item for name, item in chain.tensors.items() if item.patches}
    required = chain.base.keys() if check == "all" else changed.keys()
    live = find_live_tensors(tensors, chain, stated, required)
    _require_live(chain, live, changed)
    distinct = _select_distinct(chain, live, changed)
    if check == "all":
        _require_all(chain, live)
        _require_base(chain, live)
    elif check == "changed":
        _require_base(chain, {name: live[name] for name in distinct})
    _apply_deltas(chain, {name: live[name] for name in distinct}, distinct)
    if check != "none":
        _require_result(chain, live, distinct)
    return tuple(changed)


def _apply_deltas(
    chain: Chain, live: Mapping[str, LiveTensor], distinct: Mapping[str, ResolvedTensor]
) -> None:
    """Apply all payloads of the tensors *distinct*, after all tables of payloads are read."""
    with ExitStack() as stack:
        roots: Mapping[TreePath, SourceFiles] = {
            delta.root: stack.enter_context(source_files(delta.root)) for delta in chain.deltas
        }
        opened = [
            (name, [PayloadReader(delta, roots[delta.root], key) for delta, key in item.patches])
            for name, item in distinct.items()
        ]
        for name, readers in opened:
            dense = live[name].gather(distinct[name].record.shape)
            _apply_payloads(dense, readers, chain.block_bytes)
            live[name].scatter(dense)
    for delta in chain.deltas:
        delta.require_unchanged()


def _require_result(
    chain: Chain, live: Mapping[str, LiveTensor], distinct: Mapping[str, ResolvedTensor]
) -> None:
    """Raise unless the tensors have the digests of the result."""
    wrong = [
        name
        for name, item in distinct.items()
        if _hash_tensor(live[name].gather(item.record.shape)) != item.record.sha256
    ]
    if wrong:
        raise DamagedError(
            f"{pluralize(len(wrong), 'tensor')} did not become the result of the delta",
            where=str(chain.deltas[-1].root),
            why=f"{quote_names(wrong)}; the tensors in memory are changed",
            hint=COPY_HINT,
        )


def _require_all(chain: Chain, live: Mapping[str, LiveTensor]) -> None:
    """Raise unless all tensors of the base are in memory. A tied one may be missing."""
    missing = [
        name
        for name, record in chain.base.items()
        if name not in live and (record.alias_of or name) not in live
    ]
    if missing:
        raise MappingError(
            f"{pluralize(len(missing), 'tensor')} of the base "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            where=str(chain.deltas[0].root),
            why=quote_names(missing),
            hint="pass all tensors, or check only those that change",
        )


def _require_same_tensors(chain: Chain) -> None:
    """Raise if the result has other tensors, dtypes, shapes or ties than the base."""
    where = str(chain.deltas[0].root)
    added = [name for name in chain.tensors if name not in chain.base]
    removed = [name for name in chain.base if name not in chain.tensors]
    if added or removed:
        raise MappingError(
            "the delta adds or removes tensors",
            where=where,
            why=quote_names([*added, *removed]),
            hint=CHECKPOINT_HINT,
        )
    if tied := [name for name, item in chain.tensors.items() if _is_newly_tied(name, item, chain)]:
        raise MappingError(
            "the delta ties tensors that differ in the base",
            where=where,
            why=quote_names(tied),
            hint=CHECKPOINT_HINT,
        )
    cast = [
        name
        for name, item in chain.tensors.items()
        if (item.record.dtype, item.record.shape)
        != (chain.base[name].dtype, chain.base[name].shape)
    ]
    if cast:
        raise MappingError(
            "the delta changes dtypes or shapes",
            where=where,
            why=quote_names(cast),
            hint=CHECKPOINT_HINT,
        )


def _require_live(
    chain: Chain, live: Mapping[str, LiveTensor], changed: Mapping[str, ResolvedTensor]
) -> None:
    """Raise if a changed tensor is not in memory.

    A tied tensor may be missing, as in ``named_parameters()`` of torch.
    """
    missing = [
        name
        for name, item in changed.items()
        if name not in live and (item.record.alias_of or name) not in live
    ]
    if missing:
        raise MappingError(
            f"{pluralize(len(missing), 'changed tensor')} of the delta "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            where=str(chain.deltas[0].root),
            why=quote_names(missing),
            hint="pass all tensors, and `names`, `fused` or `layout` if they differ from the delta",
        )


def _is_newly_tied(name: str, resolved: ResolvedTensor, chain: Chain) -> bool:
    """Return whether a tensor becomes a copy of another one, from which it differs in the base."""
    if resolved.base_name is None:
        return False
    return not chain.base[name].has_elements_of(chain.base[resolved.base_name])


def _select_distinct(
    chain: Chain, live: Mapping[str, LiveTensor], changed: Mapping[str, ResolvedTensor]
) -> dict[str, ResolvedTensor]:
    """Return the changed tensors, but only the first of those that share memory.

    An engine may tie tensors that the checkpoints store twice.

    Raises:
        MappingError: Tensors that share memory would differ in the result.
    """
    firsts: dict[tuple[object, ...], str] = {}
    distinct: dict[str, ResolvedTensor] = {}
    for name in dict.fromkeys([*changed, *chain.tensors]):
        tensor, resolved = live.get(name), chain.tensors[name]
        if tensor is None:
            continue
        has_memory = any(view.data_ptr() for view, _ in tensor.pieces)
        first = firsts.setdefault(tensor.memory_key, name) if has_memory else name
        if first == name:
            if name in changed:
                distinct[name] = resolved
        elif not resolved.record.has_elements_of(chain.tensors[first].record) and first in changed:
            raise MappingError(
                "tensors that share memory differ in the result",
                where=str(chain.deltas[0].root),
                why=quote_names([first, name]),
                hint="pass copies, or apply the delta to a checkpoint",
            )
    return distinct


def _require_base(chain: Chain, live: Mapping[str, LiveTensor]) -> None:
    """Raise unless the tensors have the digests of the base."""
    digests = {
        name: _hash_tensor(tensor.gather(chain.base[name].shape)) for name, tensor in live.items()
    }
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


def _apply_payloads(dense: Tensor, readers: Sequence[PayloadReader], block_bytes: int) -> None:
    """Change a contiguous tensor in place, a block at a time."""
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


def _hash_tensor(tensor: Tensor) -> str:
    """Compute SHA-256 of the elements in row-major order."""
    digest = hashlib.sha256()
    for piece in _iterate_words(tensor):
        content = bytearray(piece.nbytes)
        view_words(content, str(piece.dtype).removeprefix("torch.")).copy_(piece)
        digest.update(content)
    return digest.hexdigest()


def _iterate_words(tensor: Tensor) -> Iterator[Tensor]:
    words = view_tensor_as_words(tensor)
    step = (4 << 20) // words.element_size()
    for start in range(0, len(words), step):
        yield words[start : start + step]
