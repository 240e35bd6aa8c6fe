"""Virtual files whose elements are those of strided tensors, row-major."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ckptctl.catalog import Computed, Input
from ckptctl.planner.copying.blocks import BlockReader, scatters_elements
from ckptctl.planner.copying.domains import domains
from ckptctl.planner.copying.tile import MIB
from ckptctl.planner.strided import Strided


@dataclass(frozen=True)
class Rearranged(Computed):
    """A virtual file with the elements of a strided tensor.

    Attributes:
        tensor: Its stored tensors are the entries in ``inputs``, all below one root.
    """

    tensor: Strided = field(kw_only=True)

    @classmethod
    def of(cls, root: str, tensor: Strided) -> Rearranged:
        """Return the virtual file of a tensor whose stored tensors lie below *root*."""
        entries = {id(part.of): part.of for part in tensor.parts}
        inputs = {str(number): Input(root, entry) for number, entry in enumerate(entries.values())}
        return cls("rearranged", tensor.dtype, tensor.shape, inputs, tensor=tensor)

    @cached_property
    def reader(self) -> BlockReader:
        """Return what finds its elements."""
        return BlockReader(self.tensor)

    @cached_property
    def permuted(self) -> bool:
        """Return whether single elements are moved: mostly, the first rows tell."""
        shape, item = self.shape, self.reader.item
        if 0 in shape:
            return False
        order = tuple(range(len(shape)))
        domain = next(domains((0,) * len(shape), shape, order, MIB // item))
        box = domain.first(domain.step)
        blocks, whole = self.reader.dense(box.lo, box.sizes), math.prod(shape) * item
        return scatters_elements(blocks, math.prod(box.sizes) * item, whole)
