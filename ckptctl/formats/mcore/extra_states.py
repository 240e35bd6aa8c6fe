"""The objects beside the weights that Megatron-Core asks for when it loads: ``_extra_state``.

Each module of Transformer Engine has one, for the scales of FP8; Megatron-Core's own linear layers
have one that is None. A load that misses one fails with ``Missing key in checkpoint state_dict``,
whereas one that nobody asks for is left alone, unless ``strict`` is ``raise_all``. So all that a
model of Transformer Engine or of the local specification asks for are written, each as
Megatron-Core writes one of a model without FP8: the list ``[None]``, which every version of
Transformer Engine takes for "no scales". Sources: ``megatron/core/transformer/utils.py``
(``make_sharded_object_for_checkpoint``), ``dist_checkpointing/mapping.py`` (``ShardedObject``),
``dist_checkpointing/strategies/torch.py`` (``mcore_to_pyt_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptctl.catalog import Blob
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.mcore.layers import Layers
from ckptctl.formats.mcore.objects import object_name
from ckptctl.planner.mapping.adapters import is_factor

EXTRA_STATE = "_extra_state"
EMPTY: list[object] = [None]
ATTENTION = "self_attention"
CORE = "core_attention"
_WITHOUT = frozenset({"output_layer", "router", "self_attention", "shared_experts"})
_CONVOLUTIONS = frozenset({"conv1d", "in_proj"})
"""Modules whose parameters are theirs alone: lookups, gates and sinks are not Transformer Engine's.

Nor are convolutions; what is stored in parts is no module.

Of the output layer, ``GPTModel.sharded_state_dict`` takes it out.
"""
_EXPERTS = ".mlp.experts.experts."


def extra_states(tensors: Iterable[OutputTensor], layers: Layers) -> Iterator[Blob]:
    """Yield the objects of the modules that *tensors* are parameters of.

    Args:
        tensors: The tensors of a model, by their names with each layer by itself.
        layers: How its layers are stored.
    """
    seen: set[str] = set()
    for tensor in tensors:
        for module in _modules(tensor.name):
            if module not in seen:
                seen.add(module)
                count = tensor.shape[0] if _EXPERTS in module else 0
                yield from _objects(module, count, layers)


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that a parameter tells of: its own, and the attention around it."""
    own = name.rpartition(".")[0]
    parts = own.split(".")
    convolution = parts[-1] == "weight" and not _CONVOLUTIONS.isdisjoint(parts[-2:-1])
    if own and "embedding" not in parts and parts[-1] not in _WITHOUT and not convolution:
        yield own
    attention, found, _ = name.partition(f".{ATTENTION}.linear_")
    if found and not is_factor(name):  # gated delta nets have no such layers
        yield f"{attention}.{ATTENTION}.{CORE}"


def _objects(module: str, experts: int, layers: Layers) -> Iterator[Blob]:
    """Yield the object of a module, or that of each of its experts."""
    stored, place = layers.place(f"{module}.{EXTRA_STATE}")
    offset, total = ([place], [layers.count]) if place is not None else ([], [])
    for expert in range(experts) if experts else [None]:
        at, of = [*offset], [*total]
        if expert is not None:
            at, of = [*at, expert], [*of, experts]
        name = object_name(stored, at, of)
        yield Blob(name, (name,), value=EMPTY)
