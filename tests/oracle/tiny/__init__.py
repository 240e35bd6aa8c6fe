"""Configurations of tiny models, one for each kind of layer and option that its family has.

``TINY`` maps ``family`` or ``family.variant`` to a function that returns transformers' config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tests.oracle.tiny import dense, encoders, gemma, llama, mistral, moe, others, phi, qwen

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TINY: dict[str, Callable[[], PretrainedConfig]] = {
    **llama.TINY,
    **mistral.TINY,
    **gemma.TINY,
    **qwen.TINY,
    **phi.TINY,
    **moe.TINY,
    **dense.TINY,
    **encoders.TINY,
    **others.TINY,
}


def family_of(name: str, known: Collection[str]) -> str:
    """Return the family of a key of ``TINY``.

    Args:
        name: The key.
        known: All families. Where text and pictures are two of them, one is ``…_text`` or the
            other ``…_vision``.
    """
    base = name.partition(".")[0]
    half = "vision" if hasattr(TINY[name](), "vision_config") else "text"
    return f"{base}_{half}" if f"{base}_{half}" in known else base
