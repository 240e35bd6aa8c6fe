"""Statements of two files about how the same weights are quantized."""

from __future__ import annotations

import pytest

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.statement import parse_sidecar_config, require_configs_agree


def test_equivalent_statements_agree() -> None:
    """AutoAWQ: ``version`` of ``AwqConfig.to_transformers_dict`` and of the quant_config given."""
    one = parse_sidecar_config(
        "quantize_config.json", {"quant_method": "awq", "version": "gemm", "group_size": None}
    )
    other = parse_sidecar_config(
        "quant_config.json", {"w_bit": 4, "version": "GEMM", "group_size": 128}
    )
    require_configs_agree(one, other)


@pytest.mark.parametrize(("key", "values"), [("version", ("gemm", "GEMV")), ("bits", (4, 8))])
def test_contradicting_statements_are_refused(key: str, values: tuple[object, object]) -> None:
    one, other = (parse_sidecar_config("quant_config.json", {key: value}) for value in values)
    with pytest.raises(MappingError, match=f"`{key}` is"):
        require_configs_agree(one, other)
