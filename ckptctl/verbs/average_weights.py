"""Weights of averages: exponential moving averages, and merges with the effect of a decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ckptctl.conversion.conversion_options import Schedule

DECAYS: Mapping[Schedule, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Learning rate, relative to its peak, by the progress of the decay from 0 to 1."""


def compute_ema_weights(count: int, decay: float) -> tuple[float, ...]:
    """Return the weights of *count* checkpoints in an exponential moving average.

    The average is the first checkpoint at first, and ``decay * average + (1 - decay) * checkpoint``
    after each later one.
    """
    later = ((1 - decay) * decay ** (count - 1 - number) for number in range(1, count))
    return (decay ** (count - 1), *later)


def compute_schedule_weights(count: int, schedule: Schedule) -> tuple[float, ...]:
    """Return the weights with which a merge has the effect of decaying the learning rate.

    The update between two checkpoints counts as much as all checkpoints after it have in the sum of
    weights. The weights are such that this is the learning rate of *schedule*, which falls from 1
    at the first checkpoint to 0 one interval after the last. ``linear`` results in equal weights.

    Source: Tian et al., "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM
    Pre-training", arXiv:2507.17634, theorem 1.
    """
    decay = DECAYS[schedule]
    rates = [decay(number / count) for number in range(count)] + [0.0]
    return tuple(rates[number] - rates[number + 1] for number in range(count))
