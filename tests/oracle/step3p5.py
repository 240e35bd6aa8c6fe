"""Step 3.5: transformers' text model of Step 3.7 with a head, for which transformers has no class.

Names in files follow from those parts of its table for Step 3.7 that do not concern prefixes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import GenerationMixin, Step3p7TextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The text model with a head that is not tied."""

    config_class = Step3p7TextConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


MAPPING = [
    one
    for one in get_checkpoint_conversion_mapping("step3p7")
    if not one.source_patterns[0].startswith("^")
]
register_checkpoint_conversion_mapping("Step3p5ForCausalLM", MAPPING, overwrite=True)
