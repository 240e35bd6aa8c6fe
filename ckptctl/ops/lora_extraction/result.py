"""What an extraction made, as people and programs see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.results import JsonField, Result


@dataclass(frozen=True, slots=True)
class ExtractedLayer(Result):
    """One layer whose change is written as two factors."""

    name: Annotated[str, JsonField("the weight's name, as PEFT knows it")]
    shape: Annotated[tuple[int, ...], JsonField("its shape")]
    rank: Annotated[int, JsonField("rank of the factors")]
    error: Annotated[
        float,
        JsonField(
            "what is lost: the Frobenius norm of the change without the product of the factors as "
            "they are written, divided by that of the change"
        ),
    ]
    change: Annotated[
        float,
        JsonField("the Frobenius norm of the change, divided by that of the base's weight"),
    ]


@dataclass(frozen=True, slots=True)
class LoraExtraction(Result):
    """An adapter that was made of two models."""

    base: Annotated[str, JsonField("absolute path of the base")]
    tuned: Annotated[str, JsonField("absolute path of the other model")]
    output: Annotated[str, JsonField("absolute path of the adapter")]
    model_type: Annotated[str, JsonField("[model type](models.md) of both")]
    layers: Annotated[tuple[ExtractedLayer, ...], JsonField("layers that have factors")]
    unchanged: Annotated[int, JsonField("tensors that both models have alike")]
    saved: Annotated[
        tuple[str, ...],
        JsonField("tensors of the modules that the adapter has as a whole (`modules_to_save`)"),
    ] = ()
    left_out: Annotated[
        Mapping[str, Annotated[str, JsonField("the reason")]],
        JsonField("tensors that differ and that the adapter does not have"),
    ] = field(default_factory=dict)
    nbytes: Annotated[int, JsonField("size of the adapter", name="bytes")] = 0
    seconds: Annotated[float, JsonField("time that it took")] = 0.0
    notes: Annotated[tuple[str, ...], JsonField("what the user should know")] = ()

    @property
    def worst(self) -> Annotated[float, JsonField(name="worst_error")]:
        """The largest error of a layer; 0: none has factors."""
        return max((layer.error for layer in self.layers), default=0.0)
