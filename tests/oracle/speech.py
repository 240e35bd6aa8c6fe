"""What tiny models that speak are asked, part by part, and their answers in one tensor."""

from __future__ import annotations

from typing import Any

import torch

FRAMES = 100
"""Frames of sound in each sequence: the window of the audio tower, which becomes 13 tokens."""


def random_numbers(*shape: int, seed: int = 11) -> torch.Tensor:
    """Return the same numbers at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_codes(size: int, *shape: int) -> torch.Tensor:
    """Return entries of a codebook of *size*."""
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(13))


def thinker_inputs(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Add sound to the tokens and pictures that the thinker is *given*."""
    ids, bins = given["input_ids"], config.audio_config.num_mel_bins
    ids[:, 19] = config.audio_start_token_id
    ids[:, 20:33] = config.audio_token_id
    given.pop("mm_token_type_ids")
    return given | {
        "input_features": random_numbers(len(ids), bins, FRAMES),
        "feature_attention_mask": torch.ones(len(ids), FRAMES, dtype=torch.long),
        "attention_mask": torch.ones_like(ids),
    }


def talker_inputs(config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states of text and of the thinker, and codes, of 24 steps."""
    hidden = random_numbers(2, 2, 24, config.thinker_hidden_size)
    return hidden[0], hidden[1], random_codes(config.text_config.vocab_size, 2, 24)


def predictor_inputs(config: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return hidden states and codes for each codebook that the code predictor writes."""
    steps = config.num_code_groups - 1
    return [
        (
            random_numbers(2, step + 2, config.hidden_size, seed=step),
            random_codes(config.vocab_size, 2, step + 2),
        )
        for step in range(steps)
    ]


def decoder_inputs(config: Any) -> torch.Tensor:
    """Return codes of every codebook for eight steps."""
    return random_codes(config.codebook_size, 2, config.num_quantizers, 8)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all *parts*."""
    return torch.cat([part.float().flatten() for part in parts])


def answers(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return the thinker's logits, the talker's, those of all codebooks, and the sound.

    The sound is taken before it is limited to the range of samples, which loses it.
    """
    parts = [model.thinker(**given).logits]
    if not model.has_talker:
        return joined(parts)
    talker, predictor = model.talker, model.talker.code_predictor
    text, hidden, codes = talker_inputs(talker.config)
    embeds = talker.text_projection(text) + talker.hidden_projection(hidden)
    embeds = embeds + talker.model.codec_embedding(codes)
    parts.append(talker(inputs_embeds=embeds).logits)
    for step, (states, codes) in enumerate(predictor_inputs(predictor.config)):
        embeds = states + predictor.model.codec_embedding[step](codes)
        parts.append(predictor(inputs_embeds=embeds).logits)
    sound = model.code2wav.decoder[-1]
    hook = sound.register_forward_hook(lambda *call: parts.append(call[-1]))
    model.code2wav(decoder_inputs(model.code2wav.config))
    hook.remove()
    return joined(parts)
