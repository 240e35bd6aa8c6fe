"""Recipes of ``--quantize``: weight-only quantization without calibration data.

The elements are computed by kinds in ``ckptctl/numerics/kinds/quantizing.py``.

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
SHAPE = ".weight_shape"
FP8, FP4, INT8, WORDS = "float8_e4m3fn", "uint8", "int8", "int32"
FP8_BLOCK_SIZE = 128
"""Number of rows, and of columns, in an FP8 block, as in DeepSeek-V3."""
MX_GROUP_SIZE, NVFP4_GROUP_SIZE, INTEGER_GROUP_SIZE = 32, 16, 128
"""Number of consecutive elements that share a scale.

Scales are powers of two (E8M0) in MX formats, and FP8 in NVFP4. Scales of integers have the dtype
of the weight.
"""
WORD_BITS = 32
COMPRESSED_TENSORS_VERSION = "0.20.1"

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the stored tensors of a quantized weight, such as the elements or the scales.

    Attributes:
        suffix: Name suffix that replaces ``.weight``.
        kind: The kind in ``ckptctl/numerics/kinds`` that computes the tensor.
        dtype: Name of the torch dtype, or empty for the dtype of the weight.
        block: Numbers of rows and columns of the weight (0 for all) that one element of the tensor
            covers, or None if the tensor is a single number.
        is_shape: Whether the tensor is the shape of the weight.
    """

    suffix: str
    kind: str
    dtype: str
    block: tuple[int, int] | None
    is_shape: bool = False

    def compute_stored_shape(self, weight_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this tensor, given the shape of the weight.

        *weight_shape* is ``[rows, columns]`` or ``[experts, rows, columns]``.
        """
        if self.block is None:
            return (len(weight_shape) if self.is_shape else 1,)
        (*stack, rows, columns), (block_rows, block_columns) = weight_shape, self.block
        return (
            *stack,
            -(-rows // (block_rows or rows or 1)),
            -(-columns // (block_columns or columns or 1)),
        )

    def build_stored_name(self, weight_name: str) -> str:
        """Return the name of this tensor for the weight *weight_name*.

        Names of expert stacks do not end in ``.weight``.
        """
        if weight_name.endswith(WEIGHT):
            return weight_name.removesuffix(WEIGHT) + self.suffix
        return weight_name + self.suffix.removeprefix(WEIGHT)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A quantization method of ``--quantize``.

    Attributes:
        name: Value of ``--quantize``.
        title: Description for messages.
        parts: Tensors in which a weight is stored, the quantized elements first.
        build_config: Builds ``quantization_config`` of config.json, given the unquantized modules.
        column_multiple: Required divisor of the number of columns of a weight.
        shared_part: The stored tensor that fused weights share, such as the global scale, or None.
        stack_multiples: Numbers by which rows and columns of stacked experts must be divisible, or
            None if no program reads stacked experts with this quantization.
    """

    name: str
    title: str
    parts: tuple[StoredPart, ...]
    build_config: Callable[[Sequence[str]], dict[str, object]]
    column_multiple: int = 1
    shared_part: StoredPart | None = None
    stack_multiples: tuple[int, int] | None = None

    @property
    def is_compressed_tensors(self) -> bool:
        """Whether the config states a scheme of compressed-tensors."""
        return self.build_config(())["quant_method"] == "compressed-tensors"


def _build_fine_grained_config(ignored: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE],
        "modules_to_not_convert": list(ignored),
    }


def build_weight_settings(
    number_type: str, bits: int, strategy: str, group: int | None = None, scale: str = ""
) -> dict[str, object]:
    """Build the compressed-tensors settings of symmetric weights with static scales.

    Args:
        number_type: ``float`` or ``int``.
        bits: Bits of an element.
        strategy: Value of ``strategy``, which states the elements that share a scale.
        group: Number of consecutive elements in a group, or None if the strategy has no groups.
        scale: Name of the torch dtype of the scales, or empty for the dtype of the model.
    """
    return {
        "num_bits": bits,
        "type": number_type,
        "symmetric": True,
        "group_size": group,
        "strategy": strategy,
        **({"scale_dtype": f"torch.{scale}"} if scale else {}),
    }


def make_config_builder(
    layout: str, weights: Json, inputs: Json | None = None, cache: Json | None = None
) -> Callable[[Sequence[str]], dict[str, object]]:
    """Return a function that builds a compressed-tensors config for linear layers.

    Args:
        layout: Name of the storage format in compressed-tensors.
        weights: Quantization settings of the weights.
        inputs: Quantization settings of the activations, or None if they are not quantized.
        cache: Quantization settings of the KV cache, or None if it is not quantized.
    """

    def build_config(ignored: Sequence[str]) -> dict[str, object]:
        group_settings = {
            "targets": ["Linear"],
            "weights": {**weights, "dynamic": False},
            "input_activations": None if inputs is None else {"dynamic": True, **inputs},
            "output_activations": None,
            "format": layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "version": COMPRESSED_TENSORS_VERSION,
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group_settings},
            "ignore": list(ignored),
            "kv_cache_scheme": None if cache is None else dict(cache),
            "global_compression_ratio": None,
            "transform_config": {},
        }

    return build_config


def _build_packed_parts(name: str, bits: int) -> tuple[StoredPart, ...]:
    """Build the stored parts of integers in int32 words, computed by the kinds of *name*."""
    return (
        StoredPart(PACKED, f"to_{name}", WORDS, (1, WORD_BITS // bits)),
        StoredPart(SCALE, f"to_{name}_scales", "", (1, INTEGER_GROUP_SIZE)),
        StoredPart(SHAPE, "to_weight_shape", "int64", None, is_shape=True),
    )


_MXFP8 = build_weight_settings("float", 8, "group", MX_GROUP_SIZE, "uint8")
_GLOBAL = StoredPart(".weight_global_scale", "to_nvfp4_global", "float32", None)

RECIPES = (
    Recipe(
        name="fp8-block",
        title=f"FP8 with one scale per {FP8_BLOCK_SIZE}x{FP8_BLOCK_SIZE} block",
        parts=(
            StoredPart(WEIGHT, "to_fp8_block", FP8, (1, 1)),
            StoredPart(
                ".weight_scale_inv",
                "to_fp8_block_scales",
                "float32",
                (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE),
            ),
        ),
        build_config=_build_fine_grained_config,
        # transformers' ``FP8Experts`` reads stacks whose experts consist of complete blocks.
        stack_multiples=(FP8_BLOCK_SIZE, FP8_BLOCK_SIZE),
    ),
    Recipe(
        name="fp8-channel",
        title="FP8 with one scale per row",
        parts=(
            StoredPart(WEIGHT, "to_fp8_channel", FP8, (1, 1)),
            StoredPart(SCALE, "to_fp8_channel_scales", "", (1, 0)),
        ),
        build_config=make_config_builder(
            "float-quantized",
            build_weight_settings("float", 8, "channel"),
            build_weight_settings("float", 8, "token"),
        ),
    ),
    Recipe(
        name="int4",
        title=f"INT4 with one scale per {INTEGER_GROUP_SIZE} elements",
        parts=_build_packed_parts("int4", 4),
        build_config=make_config_builder(
            "pack-quantized", build_weight_settings("int", 4, "group", INTEGER_GROUP_SIZE)
        ),
        column_multiple=INTEGER_GROUP_SIZE,
    ),
    Recipe(
        name="int8",
        title=f"INT8 with one scale per {INTEGER_GROUP_SIZE} elements",
        parts=_build_packed_parts("int8", 8),
        build_config=make_config_builder(
            "pack-quantized", build_weight_settings("int", 8, "group", INTEGER_GROUP_SIZE)
        ),
        column_multiple=INTEGER_GROUP_SIZE,
    ),
    Recipe(
        name="int8-channel",
        title="INT8 with one scale per row",
        parts=(
            StoredPart(WEIGHT, "to_int8_channel", INT8, (1, 1)),
            StoredPart(SCALE, "to_int8_channel_scales", "", (1, 0)),
        ),
        build_config=make_config_builder(
            "int-quantized",
            build_weight_settings("int", 8, "channel"),
            build_weight_settings("int", 8, "token"),
        ),
    ),
    Recipe(
        name="mxfp4",
        title=f"MXFP4: FP4 with a power-of-two scale per {MX_GROUP_SIZE} elements",
        parts=(
            StoredPart(PACKED, "to_mxfp4", FP4, (1, 2)),
            StoredPart(SCALE, "to_mxfp4_scales", "uint8", (1, MX_GROUP_SIZE)),
        ),
        build_config=make_config_builder(
            "mxfp4-pack-quantized",
            build_weight_settings("float", 4, "group", MX_GROUP_SIZE, "uint8"),
        ),
        column_multiple=MX_GROUP_SIZE,
    ),
    Recipe(
        name="mxfp8",
        title=f"MXFP8: FP8 with a power-of-two scale per {MX_GROUP_SIZE} elements",
        parts=(
            StoredPart(WEIGHT, "to_mxfp8", FP8, (1, 1)),
            StoredPart(SCALE, "to_mxfp8_scales", "uint8", (1, MX_GROUP_SIZE)),
        ),
        build_config=make_config_builder("mxfp8-quantized", _MXFP8, _MXFP8),
        column_multiple=MX_GROUP_SIZE,
    ),
    # Weights only: quantizing activations to FP4 requires calibration data.
    Recipe(
        name="nvfp4",
        title=f"NVFP4: FP4 with an FP8 scale per {NVFP4_GROUP_SIZE} elements",
        parts=(
            StoredPart(PACKED, "to_nvfp4", FP4, (1, 2)),
            StoredPart(SCALE, "to_nvfp4_scales", FP8, (1, NVFP4_GROUP_SIZE)),
            _GLOBAL,
        ),
        build_config=make_config_builder(
            "nvfp4-pack-quantized",
            build_weight_settings("float", 4, "tensor_group", NVFP4_GROUP_SIZE, FP8),
        ),
        column_multiple=NVFP4_GROUP_SIZE,
        shared_part=_GLOBAL,
    ),
)


def get_recipes_by_name() -> Mapping[str, Recipe]:
    """Return all recipes, keyed by the value of ``--quantize``."""
    return {recipe.name: recipe for recipe in RECIPES}
