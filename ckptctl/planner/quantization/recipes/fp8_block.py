"""FP8 with a scale for each block of 128 x 128, as DeepSeek-V3 is published.

Sources: transformers' ``FineGrainedFP8Config`` and ``integrations/finegrained_fp8.py``; vLLM's
``layers/quantization/fp8.py``, which takes ``modules_to_not_convert`` for its ``ignored_layers``.
transformers' ``Fp8Quantize`` makes whole blocks of stacked experts, which ``FP8Experts`` reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptctl.planner.quantization.recipes import WEIGHT, Recipe, StoredPart

SIDE = 128


def _config(ignored: Sequence[str]) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": list(ignored),
    }


RECIPE = Recipe(
    name="fp8-block",
    title=f"FP8 with one scale per {SIDE}x{SIDE} block",
    parts=(
        StoredPart(WEIGHT, "to_fp8_block", "float8_e4m3fn", (1, 1)),
        StoredPart(".weight_scale_inv", "to_fp8_block_scales", "float32", (SIDE, SIDE)),
    ),
    config=_config,
    stack=(SIDE, SIDE),
)
