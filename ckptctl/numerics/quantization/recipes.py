"""Ways of quantizing weights without data: a :class:`Recipe` each, a row of :data:`RECIPES`.

What computes the elements is a kind of ``ckptctl/numerics/kinds/quantizing.py``.

Sources: transformers' ``FineGrainedFP8Config`` and ``integrations/finegrained_fp8.py``; vLLM's
``layers/quantization/fp8.py``, which takes ``modules_to_not_convert`` for its ``ignored_layers``.
For ``quantization_config`` as compressed-tensors 0.20 writes it, which vLLM and transformers read:
``update_config`` in llm-compressor's ``entrypoints/model_free/save_utils.py``, and the presets in
compressed-tensors' ``quantization/quant_scheme.py``. OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WEIGHT, SCALE, PACKED = ".weight", ".weight_scale", ".weight_packed"
FP8, FP4 = "float8_e4m3fn", "uint8"
SIDE = 128
"""Rows and columns of a block of FP8, as DeepSeek-V3 is published."""
MX, NV = 32, 16
"""Elements that share a scale: a power of two in MX formats, an FP8 number in NVFP4."""
VERSION = "0.20.0"

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that a quantized weight is stored as.

    Attributes:
        ending: What stands in its name in place of ``.weight``.
        kind: What computes it: a kind in ``ckptctl/numerics/kinds``.
        dtype: torch's name; empty: that of the plain weight.
        block: Rows and columns of the weight that an element of it stands for, 0 for all of them;
            None: it is one number for the whole weight.
    """

    ending: str
    kind: str
    dtype: str
    block: tuple[int, int] | None

    def shape(self, weight: Sequence[int]) -> tuple[int, ...]:
        """Return its shape for a weight ``[rows, columns]``, or ``[experts, rows, columns]``."""
        if self.block is None:
            return (1,)
        (*stack, rows, columns), (down, across) = weight, self.block
        return (*stack, -(-rows // (down or rows or 1)), -(-columns // (across or columns or 1)))

    def name(self, weight: str) -> str:
        """Return its name for a weight, which in a stack of experts does not end in ``.weight``."""
        if weight.endswith(WEIGHT):
            return weight.removesuffix(WEIGHT) + self.ending
        return weight + self.ending.removeprefix(WEIGHT)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way of quantizing weights.

    Attributes:
        name: What ``--quantize`` calls it.
        title: For people.
        parts: What a weight is stored as; the first of them has its elements.
        config: Returns ``quantization_config`` of config.json for modules that stay as they are.
        columns: The number of columns of a weight has to be a multiple of it.
        shared: The part with one number for all weights that programs fuse; None: there is none.
        stack: Rows and columns of experts stacked in one tensor have to be multiples of these;
            None: programs read experts one by one.
    """

    name: str
    title: str
    parts: tuple[StoredPart, ...]
    config: Callable[[Sequence[str]], dict[str, object]]
    columns: int = 1
    shared: StoredPart | None = None
    stack: tuple[int, int] | None = None


def _fine_grained(ignored: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": list(ignored),
    }


def _floats(
    bits: int, strategy: str, group: int | None = None, scale: str = ""
) -> dict[str, object]:
    """Return how numbers are quantized: symmetric floats, of static scales.

    Args:
        bits: Of a number.
        strategy: What shares a scale, in compressed-tensors' words.
        group: How many elements of a row do, where groups do.
        scale: torch's name of the dtype of the scales; empty: that of the model.
    """
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "group_size": group,
        "strategy": strategy,
        "dynamic": False,
        **({"scale_dtype": f"torch.{scale}"} if scale else {}),
    }


def _compressed(
    layout: str, weights: Json, inputs: Json | None = None
) -> Callable[[Sequence[str]], dict[str, object]]:
    """Return what makes the configuration of a model whose linear layers are quantized.

    Args:
        layout: compressed-tensors' name of how the tensors are stored.
        weights: How weights are quantized.
        inputs: How programs quantize what layers take, as they go; None: not at all.
    """

    def made(ignored: Sequence[str]) -> dict[str, object]:
        group = {
            "targets": ["Linear"],
            "weights": dict(weights),
            "input_activations": None if inputs is None else {**inputs, "dynamic": True},
            "output_activations": None,
            "format": layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "version": VERSION,
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "transform_config": {},
        }

    return made


_MXFP8 = _floats(8, "group", MX, "uint8")
_GLOBAL = StoredPart(".weight_global_scale", "to_nvfp4_global", "float32", None)

RECIPES = (
    Recipe(
        name="fp8-block",
        title=f"FP8 with one scale per {SIDE}x{SIDE} block",
        parts=(
            StoredPart(WEIGHT, "to_fp8_block", FP8, (1, 1)),
            StoredPart(".weight_scale_inv", "to_fp8_block_scales", "float32", (SIDE, SIDE)),
        ),
        config=_fine_grained,
        # transformers' ``Fp8Quantize`` makes whole blocks of experts, which ``FP8Experts`` reads.
        stack=(SIDE, SIDE),
    ),
    Recipe(
        name="fp8-channel",
        title="FP8 with one scale per row",
        parts=(
            StoredPart(WEIGHT, "to_fp8_channel", FP8, (1, 1)),
            StoredPart(SCALE, "to_fp8_channel_scales", "", (1, 0)),
        ),
        config=_compressed("float-quantized", _floats(8, "channel"), _floats(8, "token")),
    ),
    Recipe(
        name="mxfp4",
        title=f"MXFP4: FP4 with a power-of-two scale per {MX} elements",
        parts=(
            StoredPart(PACKED, "to_mxfp4", FP4, (1, 2)),
            StoredPart(SCALE, "to_mxfp4_scales", "uint8", (1, MX)),
        ),
        config=_compressed("mxfp4-pack-quantized", _floats(4, "group", MX, "uint8")),
        columns=MX,
    ),
    Recipe(
        name="mxfp8",
        title=f"MXFP8: FP8 with a power-of-two scale per {MX} elements",
        parts=(
            StoredPart(WEIGHT, "to_mxfp8", FP8, (1, 1)),
            StoredPart(SCALE, "to_mxfp8_scales", "uint8", (1, MX)),
        ),
        config=_compressed("mxfp8-quantized", _MXFP8, _MXFP8),
        columns=MX,
    ),
    # Weights alone: to quantize what layers take as well takes data.
    Recipe(
        name="nvfp4",
        title=f"NVFP4: FP4 with an FP8 scale per {NV} elements",
        parts=(
            StoredPart(PACKED, "to_nvfp4", FP4, (1, 2)),
            StoredPart(SCALE, "to_nvfp4_scales", FP8, (1, NV)),
            _GLOBAL,
        ),
        config=_compressed("nvfp4-pack-quantized", _floats(4, "tensor_group", NV, FP8)),
        columns=NV,
        shared=_GLOBAL,
    ),
)


def recipes() -> Mapping[str, Recipe]:
    """Return the recipes by name."""
    return {recipe.name: recipe for recipe in RECIPES}
