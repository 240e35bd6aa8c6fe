"""What is trained and saved with DeepSpeed; imports nothing of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        stage: Of ZeRO.
        dtype: ``fp32``, or that of the module, beside masters in fp32.
        tied: Whether the output layer is the embedding.
        frozen: Whether one parameter does not learn.
        groups: Number of parameter groups.
        config: Added to DeepSpeed's configuration.
        zero: Added to its section ``zero_optimization``.
    """

    stage: int
    dtype: str = "bf16"
    tied: bool = False
    frozen: bool = False
    groups: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


def _hard(case: Case) -> Case:
    return replace(case, tied=True, frozen=True, groups=2)


_BF16_OPTIMIZER = Case(1, config={"data_types": {"grad_accum_dtype": "fp32"}})
_ROUND_ROBIN = Case(2, groups=2, zero={"round_robin_gradients": True})

CASES = {
    **{f"z{n}_{dtype}": Case(n, dtype) for n in range(4) for dtype in ("bf16", "fp32")},
    **{f"z{n}_{dtype}_hard": _hard(Case(n, dtype)) for n in range(4) for dtype in ("bf16", "fp32")},
    **{f"z{n}_fp16": Case(n, "fp16") for n in (1, 2, 3)},
    "bf16_optimizer": _BF16_OPTIMIZER,
    "bf16_optimizer_hard": _hard(_BF16_OPTIMIZER),
    "z2_round_robin": _ROUND_ROBIN,
    "z2_fp32_round_robin": replace(_ROUND_ROBIN, dtype="fp32"),
    "z3_sub_groups": _hard(Case(3, zero={"sub_group_size": 100})),
}
ROUND_ROBIN = tuple(name for name in CASES if "round_robin" in name)
