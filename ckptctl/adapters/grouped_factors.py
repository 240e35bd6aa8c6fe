"""Split the LoRA factors of experts that trainers store as three-dimensional tensors.

NeMo Automodel saves ``experts.lora_gate_and_up_A`` ``[E, in, R]``, ``experts.lora_gate_and_up_B``
``[E, R, 2 I]`` (gate before up, or ``[E, R, I]`` without a gate) and the same for ``lora_down``, if
its model has no conversion to PEFT's names. Megatron-Bridge and SGLang use
``experts.NAME.lora_A.weight`` ``[E, R, in]`` and ``lora_B`` ``[E, out, R]``. A factor that all
experts share has 1 instead of E; the other factor may then have per-expert names.

Each expert gets views of these tensors, under the names that PEFT uses for per-expert layers.

Sources: ``GroupedExpertsLoRA`` and ``MoESplitExpertsStateDictMixin`` in NeMo Automodel's
``components/moe``; ``peft_bridge.py`` in Megatron-Bridge, whose issues 3981 and 6075 describe the
shared factors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptctl.adapters.expert_columns import restore_column_order
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import UnsupportedError
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.strided import StridedTensor
from ckptctl.units import pluralize

GROUPED_FACTOR = re.compile(
    r"(?P<module>.*\bexperts)\.(?:lora_(?P<fused>gate_and_up|down)_(?P<side>[AB])"
    r"|(?P<leaf>[A-Za-z]\w*)\.lora_(?P<leaf_side>[AB])\.weight)"
)
FUSED_LAYERS = {
    "gate_and_up": ("gate_proj", "up_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Layers whose factors are joined under one name."""
UNGATED_LAYERS = ("up_proj",)
"""Layers of ``gate_and_up`` in models without a gate."""


@dataclass(frozen=True, slots=True)
class _GroupedFactor:
    """A three-dimensional factor of the experts of one layer.

    Attributes:
        module: Name prefix up to ``experts``.
        leaf: Name of the layer, or of the layers that are joined.
        side: ``A`` or ``B``.
        entry: The stored tensor.
        is_transposed: Whether each matrix is the transpose of PEFT's factor.
    """

    module: str
    leaf: str
    side: str
    entry: TensorEntry
    is_transposed: bool

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of the factor of one expert, as in PEFT."""
        first, second = self.entry.shape[1:]
        return (second, first) if self.is_transposed else (first, second)

    @property
    def rank(self) -> int:
        """Rank of the factor."""
        return self.matrix_shape[0 if self.side == "A" else 1]


def normalize_factors(catalog: Catalog) -> Catalog:
    """Return an adapter whose experts' factors have PEFT's names, shapes and order of columns."""
    return split_grouped_factors(restore_column_order(catalog))


def split_grouped_factors(catalog: Catalog) -> Catalog:
    """Replace three-dimensional LoRA factors by per-expert factors, which are views of them.

    Raises:
        UnsupportedError: The other factor of a layer is missing or has a different shape, or the
            number of experts is unknown.
    """
    factors = dict(_iterate_factors(catalog))
    if not factors:
        return catalog
    located = locate_tensors(catalog, factors).tensors
    factors = {name: replace(factor, entry=located[name]) for name, factor in factors.items()}
    tensors = {name: entry for name, entry in catalog.tensors.items() if name not in factors}
    layers: dict[tuple[str, str], dict[str, _GroupedFactor]] = {}
    for factor in factors.values():
        layers.setdefault((factor.module, factor.leaf), {})[factor.side] = factor
    for sides in layers.values():
        down = layers.get((next(iter(sides.values())).module, "down"), {})
        for entry in _split_layer(sides, down, catalog.tensors):
            if entry.name in catalog.tensors:
                raise UnsupportedError(
                    "an expert has two factors of one layer", where=f"tensor `{entry.name}`"
                )
            tensors[entry.name] = entry
    note = f"split {pluralize(len(factors), 'grouped LoRA factor')} into factors of each expert"
    return replace(catalog, tensors=tensors, notes=(*catalog.notes, note))


def _iterate_factors(catalog: Catalog) -> Iterator[tuple[str, _GroupedFactor]]:
    for name, entry in catalog.tensors.items():
        match = GROUPED_FACTOR.fullmatch(name) if len(entry.shape) == 3 else None
        if match:
            fused = match["fused"]
            yield (
                name,
                _GroupedFactor(
                    match["module"],
                    fused or match["leaf"],
                    match["side"] or match["leaf_side"],
                    entry,
                    is_transposed=fused is not None,
                ),
            )


def _split_layer(
    sides: Mapping[str, _GroupedFactor],
    down: Mapping[str, _GroupedFactor],
    tensors: Mapping[str, TensorEntry],
) -> Iterator[TensorEntry]:
    """Yield the factors of each expert of one layer.

    Args:
        sides: The grouped factors of the layer, by side.
        down: The factors of the down projection in the same module, by side.
        tensors: All tensors of the adapter.
    """
    first = next(iter(sides.values()))
    layers = FUSED_LAYERS.get(first.leaf, (first.leaf,))
    experts = _count_experts(sides, layers, tensors)
    if len(sides) == 2 and sides["A"].rank != sides["B"].rank:
        raise UnsupportedError(
            f"factors A and B of `{first.leaf}` have different ranks",
            where=f"tensor `{first.entry.name}`",
            why=f"A is {list(sides['A'].entry.shape)}, B is {list(sides['B'].entry.shape)}",
        )
    if first.leaf == "gate_and_up" and _is_ungated(sides, down):
        layers = UNGATED_LAYERS
    for side, factor in sides.items():
        matrices = StridedTensor.from_entry(factor.entry)
        rows = factor.matrix_shape[0] // (len(layers) if side == "B" else 1)
        if side == "B" and rows * len(layers) != factor.matrix_shape[0]:
            raise UnsupportedError(
                f"{pluralize(factor.matrix_shape[0], 'row')} cannot be divided among "
                f"{' and '.join(layers)}",
                where=f"tensor `{factor.entry.name}`",
            )
        for expert in range(experts):
            matrix = matrices.select(0, expert if factor.entry.shape[0] > 1 else 0)
            matrix = matrix.permute((1, 0)) if factor.is_transposed else matrix
            for number, layer in enumerate(layers):
                part = matrix.narrow(0, number * rows, rows) if side == "B" else matrix
                name = f"{factor.module}.{expert}.{layer}.lora_{side}.weight"
                yield replace(build_view(factor.entry, part, name), alias_of=None)


def _is_ungated(sides: Mapping[str, _GroupedFactor], down: Mapping[str, _GroupedFactor]) -> bool:
    """Return whether factor B has as many outputs as the down projection has inputs."""
    if "B" not in sides or "A" not in down:
        return False
    return sides["B"].matrix_shape[0] == down["A"].matrix_shape[1]


def _count_experts(
    sides: Mapping[str, _GroupedFactor], layers: tuple[str, ...], tensors: Mapping[str, TensorEntry]
) -> int:
    """Return the number of experts of a layer, from both of its factors."""
    first = next(iter(sides.values()))
    counts = {factor.entry.shape[0] for factor in sides.values()}
    if len(sides) == 1:
        other = "B" if first.side == "A" else "A"
        pattern = re.compile(
            rf"{re.escape(first.module)}\.\d+\.{re.escape(layers[0])}\.lora_{other}\.weight"
        )
        experts = sum(bool(pattern.fullmatch(name)) for name in tensors)
        if not experts:
            raise UnsupportedError(
                f"factor {other} of `{first.leaf}` is missing",
                where=f"tensor `{first.entry.name}`",
            )
        counts.add(experts)
    shared_or_all = counts - {1}
    if len(shared_or_all) != 1:
        raise UnsupportedError(
            "the number of experts is unknown"
            if not shared_or_all
            else "the factors have different numbers of experts",
            where=f"tensor `{first.entry.name}`",
            why="all experts share both factors"
            if not shared_or_all
            else f"they have {' and '.join(map(str, sorted(counts)))}",
            hint="export the adapter with a factor for each expert",
        )
    return shared_or_all.pop()
