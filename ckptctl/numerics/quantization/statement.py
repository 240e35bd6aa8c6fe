"""Read and compare the quantization configs in a checkpoint's files.

Sources: ``quantization_config`` of transformers' ``config.json``, nested in the text config of
newer multimodal models; ``compression_config`` of older compressed-tensors; ``quantization`` of
mlx-lm, repeated there as a ``quantization_config`` without a method; ``hf_quant_config.json`` of
ModelOpt (``modelopt/torch/export/convert_hf_config.py``); ``quantize_config.json`` of AutoGPTQ and
GPTQModel; ``quant_config.json`` of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptctl.errors import MappingError

Json: TypeAlias = Mapping[str, object]

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
CONFIG_KEYS: Mapping[str, str] = {
    "quantization": "mlx",
    QUANTIZATION: "fp8",
    "compression_config": "compressed-tensors",
}
"""Keys of config.json that contain a quantization config, and the default ``quant_method``."""
METHOD_KEY = "quant_method"
SIDECAR_METHODS: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that contain a quantization config, and the ``quant_method`` that each implies."""


COMPARED_KEYS = (
    *("bits", "group_size", "desc_act", "checkpoint_format", "quant_algo", "version"),
    *("mode", "weight_block_size", "sym", "zero_point"),
)
"""Keys on which two quantization configs must agree."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Quantization config of a checkpoint.

    Attributes:
        method: The ``quant_method``, or empty if the checkpoint has no quantization config.
        content: The config as the file contains it.
        where: Key and file that contain the config, for error messages.
    """

    method: str = ""
    content: Json = field(default_factory=dict)
    where: str = f"{QUANTIZATION} in {CONFIG}"

    @property
    def weight_settings(self) -> Json:
        """Quantization settings of weights, which hf_quant_config.json nests one level deeper."""
        part = self.content.get("quantization")
        return part if isinstance(part, Mapping) else self.content

    def read_number(self, key: str, least: int = 1) -> int | None:
        """Return the integer under *key*, or None if *key* is not set.

        Raises:
            MappingError: The value is not an integer, or is less than *least*.
        """
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.invalid_value_error(key, f"expected a number of at least {least}")
        return value

    def read_flag(self, key: str) -> bool | None:
        """Return the boolean under *key*, or None if *key* is not set.

        Raises:
            MappingError: The value is not a boolean.
        """
        value = self.content.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.invalid_value_error(key, "expected true or false")
        return value

    def invalid_value_error(self, key: str, why: str) -> MappingError:
        """Build the error for an invalid or missing value of *key*."""
        value_text = f"{self.content[key]!r}" if key in self.content else "missing"
        return MappingError(f"`{key}` is {value_text}", where=self.where, why=why)


def find_quantization_config(config: Json) -> QuantizationConfig | None:
    """Return the first quantization config in config.json, or None if it contains none."""
    return next(iterate_quantization_configs(config), None)


def iterate_quantization_configs(config: Json) -> Iterator[QuantizationConfig]:
    """Yield all quantization configs in config.json, including nested ones."""
    inner = {f"{key}.": part for key, part in config.items() if key.endswith("_config")}
    for name, part in {"": config, **inner}.items():
        if name.removesuffix(".") in CONFIG_KEYS or not isinstance(part, Mapping):
            continue
        for key, default in CONFIG_KEYS.items():
            content = part.get(key)
            if isinstance(content, Mapping):
                where = f"{name}{key} in {CONFIG}"
                yield QuantizationConfig(str(content.get(METHOD_KEY, default)), content, where)


def parse_sidecar_config(name: str, content: Json) -> QuantizationConfig:
    """Parse the quantization config in *content* of a file *name* of :data:`SIDECAR_METHODS`."""
    return QuantizationConfig(str(content.get(METHOD_KEY, SIDECAR_METHODS[name])), content, name)


def require_configs_agree(first: QuantizationConfig, second: QuantizationConfig) -> None:
    """Raise if two quantization configs contradict each other.

    Case is ignored, since AutoAWQ writes GEMM in one file and gemm in the other. Null values are
    not compared.

    Raises:
        MappingError: A key of :data:`COMPARED_KEYS` has different values.
    """
    for key in COMPARED_KEYS:
        values = [quant_config.weight_settings.get(key) for quant_config in (first, second)]
        if None not in values and _fold_case(values[0]) != _fold_case(values[1]):
            raise MappingError(
                f"`{key}` is {values[0]!r} and {values[1]!r}",
                where=f"{first.where}; {second.where}",
                why="both describe the quantization of the same weights",
            )


def _fold_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def strip_quantization_config(config: Json) -> dict[str, object]:
    """Return a copy of config.json with all quantization configs removed."""
    remaining = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    parts = {key: value for key, value in remaining.items() if key.endswith("_config")}
    return remaining | {
        key: strip_quantization_config(value)
        for key, value in parts.items()
        if isinstance(value, dict)
    }
