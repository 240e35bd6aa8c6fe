"""``quantization_config`` as compressed-tensors 0.20 writes it; vLLM and transformers read it.

Source: ``update_config`` in llm-compressor's ``entrypoints/model_free/save_utils.py``, and the
presets in compressed-tensors' ``quantization/quant_scheme.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

VERSION = "0.20.0"

Json = Mapping[str, object]


def floats(
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


def config(
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
