"""What a rank does with Ministral 3 and its vision tower, put together as Megatron-Bridge does.

Bridge's ``Ministral3Model`` holds Megatron-Core's model beside modules of transformers, and itself
requires Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from transformers import AutoConfig, AutoModel
from transformers.models.mistral3.modeling_mistral3 import (
    Mistral3Model,
    Mistral3MultiModalProjector,
)

from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import VOCABULARY, Ranks, Recipe
from tests.oracle.mcore_ranks import change, load, save

Inputs = Mapping[str, torch.Tensor]


class Seeing(MegatronModule):  # type: ignore[misc]
    """A text model with transformers' vision tower and projector."""

    def __init__(self, language_model: Any, config: Any) -> None:
        super().__init__(config=language_model.config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = Mistral3MultiModalProjector(config)
        self.language_model = language_model
        self._seen = config

    def forward(self, input_ids: torch.Tensor, **picture: torch.Tensor) -> torch.Tensor:
        """Return logits of tokens, those of the picture replaced by what is seen."""
        parts = SimpleNamespace(
            vision_tower=self.vision_tower,
            multi_modal_projector=self.multi_modal_projector,
            config=self._seen,
        )
        found: Any = Mistral3Model.get_image_features(parts, **picture, return_dict=True)
        seen = torch.cat(tuple(found.pooler_output))
        embedded = self.language_model.embedding(input_ids=input_ids, position_ids=None)
        embedded = embedded.transpose(0, 1)
        places = (input_ids == self._seen.image_token_index).unsqueeze(-1).expand_as(embedded)
        embedded = embedded.masked_scatter(places, seen).transpose(0, 1).contiguous()
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        out: torch.Tensor = self.language_model(None, positions, None, decoder_input=embedded)
        return out[..., :VOCABULARY].clone()


def see(
    rank: int, world: int, out: Path, recipe: Recipe, hf: Path, folder: Path, inputs: Inputs
) -> None:
    """Load the run *folder*, run it, change it, run and save it again.

    Writes ``logits.pt``, ``changed.pt`` and ``saved/``.
    """
    model = Seeing(build(recipe, Ranks()), AutoConfig.from_pretrained(hf)).eval()
    load(model, folder)
    with torch.no_grad():
        torch.save(model(**inputs), out / "logits.pt")
        change(model)
        torch.save(model(**inputs), out / "changed.pt")
    save(model, out / "saved", "separate", recipe, Ranks())
