"""Float8 blocks that model-parallel ranks must not cut: one scale belongs to a whole block.

Source: DeepSeek-V3's ``inference/convert.py`` divides weights and scales by themselves, which is
right only where every rank's part of a weight consists of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, RefusedError, listed
from ckptctl.formats.base import OutputTensor
from ckptctl.ops.recognition.quantised import Pair, pairs
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.parallel.cuts import Share

Block = tuple[int, int]


class Divide(Protocol):
    """How ranks divide tensors."""

    def __call__(self, tensor: OutputTensor, ranks: int) -> Sequence[Share | None]:
        """Return what each of *ranks* ranks holds of *tensor*; None: nothing."""


def require_whole_blocks(
    catalog: Catalog,
    mapped: Sequence[MappedTensor],
    tensors: Sequence[OutputTensor],
    divide: Divide,
    ranks: int,
) -> None:
    """Refuse to divide a float8 weight inside of a block.

    Args:
        catalog: The source.
        mapped: What becomes what.
        tensors: The output's tensors.
        divide: How ranks divide them.
        ranks: How many there are.

    Raises:
        RefusedError: Naming the weights, their blocks and a number of ranks that fits.
    """
    found = {
        tensor: block
        for tensor, block in _blocks(pairs(catalog), mapped, tensors)
        if _cut(divide(tensor, ranks), tensor.shape, block)
    }
    if not found:
        return
    first, block = next(iter(found.items()))
    fits = next(count for count in range(ranks - 1, 0, -1) if _fit(found, divide, count))
    raise RefusedError(
        f"{ranks} ranks would cut float8 weights inside of blocks of {block[0]}x{block[1]}",
        where=f"tensor `{first.name}` {list(first.shape)}",
        why=f"{listed([tensor.name for tensor in found])}: a block has one scale, and another "
        "rank's would be used for a part of it",
        hint=f"--mp {fits} keeps blocks whole; --dequantize bf16 writes plain weights",
    )


def _blocks(
    quantised: Iterable[Pair], mapped: Sequence[MappedTensor], tensors: Sequence[OutputTensor]
) -> Iterable[tuple[OutputTensor, Block]]:
    by_name = {tensor.name: tensor for tensor in tensors}
    targets = {item.sources[0].key: item.targets[0].key for item in mapped}
    for pair in quantised:
        tensor = by_name.get(targets.get(pair.weight, ""))
        if tensor is not None and {"block_rows", "block_columns"} <= pair.parameters.keys():
            yield tensor, (pair.parameters["block_rows"], pair.parameters["block_columns"])


def _cut(shares: Sequence[Share | None], shape: tuple[int, ...], block: Block) -> bool:
    """Return whether a rank's part begins or ends inside of a block of a matrix of *shape*."""
    return any(
        offset % step or ((offset + size) % step and offset + size != whole)
        for share in shares
        if share is not None
        for piece in share.pieces
        for offset, size, whole, step in zip(
            piece.box.offsets[-2:], piece.box.sizes[-2:], shape[-2:], block, strict=True
        )
    )


def _fit(found: Mapping[OutputTensor, Block], divide: Divide, ranks: int) -> bool:
    try:
        return not any(
            _cut(divide(tensor, ranks), tensor.shape, block) for tensor, block in found.items()
        )
    except MappingError:
        return False
