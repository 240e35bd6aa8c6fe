"""Result of ``extract-lora``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.results import JsonField, Result


@dataclass(frozen=True, slots=True)
class ExtractedLayer(Result):
    """Layer whose change is stored as two factors."""

    name: Annotated[str, JsonField("name of the weight in PEFT")]
    shape: Annotated[tuple[int, ...], JsonField("shape of the weight")]
    rank: Annotated[int, JsonField("rank of the factors")]
    error: Annotated[
        float,
        JsonField(
            "relative error: Frobenius norm of the change minus the product of the "
            "stored factors, divided by the norm of the change"
        ),
    ]
    change: Annotated[
        float, JsonField("Frobenius norm of the change, divided by that of the base weight")
    ]


@dataclass(frozen=True, slots=True)
class LoraExtraction(Result):
    """Result of extracting an adapter."""

    base: Annotated[str, JsonField("absolute path of the base")]
    tuned: Annotated[str, JsonField("absolute path of the tuned model")]
    output: Annotated[str, JsonField("absolute path of the adapter")]
    model_type: Annotated[str, JsonField("[model type](models.md) of both models")]
    layers: Annotated[tuple[ExtractedLayer, ...], JsonField("layers with factors")]
    unchanged: Annotated[int, JsonField("number of equal tensors")]
    saved: Annotated[
        tuple[str, ...],
        JsonField("tensors of modules that the adapter stores in full (`modules_to_save`)"),
    ] = ()
    left_out: Annotated[
        Mapping[str, Annotated[str, JsonField("reason")]],
        JsonField("tensors that differ, but are not in the adapter"),
    ] = field(default_factory=dict)
    nbytes: Annotated[int, JsonField("size of the adapter", name="bytes")] = 0
    seconds: Annotated[float, JsonField("elapsed time")] = 0.0
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()

    @property
    def worst(self) -> Annotated[float, JsonField(name="worst_error")]:
        """Largest error of a layer; 0 if no layer has factors."""
        return max((layer.error for layer in self.layers), default=0.0)
