"""Storage of transformer layers as separate tensors or stacked along a new first dimension.

Megatron-Core calls a model *homogeneous* if it saves ``decoder.layers.mlp.linear_fc2.weight`` of
shape ``[L, ...]`` for all ``L`` layers. Otherwise, ``decoder.layers.3.mlp.linear_fc2.weight`` is a
separate tensor. The elements of one layer are one chunk of the stacked tensor. Source:
``TransformerBlock.sharded_state_dict`` in ``megatron/core/transformer/transformer_block.py``; MTP
layers, ``mtp.layers.N``, are never stacked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptctl.errors import RefusedError, format_option, quote_names
from ckptctl.formats.base import OutputTensor

_LAYER = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers)\.([0-9]+)\.(.+)")


@dataclass(frozen=True, slots=True)
class LayerStorage:
    """How a checkpoint stores transformer layers, either stacked or as separate tensors.

    Attributes:
        count: Number of stacked layers, or 0 if layers are separate tensors.
    """

    count: int = 0

    def locate_leaf(self, name: str) -> tuple[str, int | None]:
        """Return the stored name of the leaf *name*, and its layer index in the stacked tensor.

        The index is None if the leaf is not stacked.
        """
        match = _LAYER.fullmatch(name) if self.count else None
        return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, None)

    def to_stored_tensor(self, tensor: OutputTensor) -> OutputTensor:
        """Return the tensor to store for *tensor*, which is the stack of all layers if stacked."""
        name, place = self.locate_leaf(tensor.name)
        if place is None:
            return replace(tensor, path=(name,))
        return replace(tensor, name=name, path=(name,), shape=(self.count, *tensor.shape))


def build_stacked_storage(tensors: Iterable[OutputTensor]) -> LayerStorage:
    """Check that all layers of a model have equal tensors, and return their stacked storage.

    Raises:
        RefusedError: Layers differ, or the model has no layers.
    """
    layers: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for tensor in tensors:
        if match := _LAYER.fullmatch(tensor.name):
            layers[int(match[2])][f"{match[1]}.{match[3]}"] = (tensor.dtype, tensor.shape)
    if problem := _describe_difference(layers):
        raise RefusedError(
            "these layers cannot be stacked",
            why=problem,
            hint=f"omit {format_option('--stack-layers')} to write each layer separately, as "
            "Megatron-Core does for such a model",
        )
    return LayerStorage(len(layers))


def _describe_difference(layers: Mapping[int, Mapping[str, object]]) -> str | None:
    if sorted(layers) != list(range(len(layers))):
        return "some layers are missing"
    for number, layer in layers.items():
        names = [name for name in {**layers[0], **layer} if layers[0].get(name) != layer.get(name)]
        if names:
            return f"layer {number} differs from layer 0: {quote_names(names)}"
    return None if layers else "there are no decoder layers"
