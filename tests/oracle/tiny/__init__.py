"""Configurations of tiny models, one for each kind of layer and option that its family has.

``TINY`` maps ``family`` or ``family.variant`` to a function that returns transformers' config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.oracle.tiny import (
    classic,
    dense,
    encoders,
    gemma,
    hybrid,
    latest,
    llama,
    minimax_step,
    mistral,
    moe,
    others,
    phi,
    qwen,
    qwen_vl,
    seeing,
    sparse,
    vision,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TINY: dict[str, Callable[[], PretrainedConfig]] = {
    **llama.TINY,
    **mistral.TINY,
    **gemma.TINY,
    **qwen.TINY,
    **qwen_vl.TINY,
    **phi.TINY,
    **moe.TINY,
    **dense.TINY,
    **encoders.TINY,
    **others.TINY,
    **seeing.TINY,
    **sparse.TINY,
    **hybrid.TINY,
    **vision.TINY,
    **classic.TINY,
    **latest.TINY,
    **minimax_step.TINY,
}


def family_of(name: str) -> str:
    """Return the family of a key of ``TINY``."""
    return name.partition(".")[0]
