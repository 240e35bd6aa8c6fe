"""Which part of a training checkpoint a leaf belongs to.

People look at the model; what else a trainer saved is shown as one line, or one area, each.
"""

from __future__ import annotations

import re
from typing import Literal

from ckptctl.ops.recognition.roots import ROOTS, has_room, is_training

Part = Literal["model", "optimizer", "scheduler", "loader", "rest"]
FOLDED: tuple[Part, ...] = ("optimizer", "scheduler", "loader")
"""Those that are one line each, in this order, behind the model."""
_WORDS: dict[Part, re.Pattern[str]] = {
    "optimizer": re.compile(r"optim|opt(_\d+)?$"),
    "scheduler": re.compile(r".*scheduler"),
    "loader": re.compile(r".*(loader|sampler)"),
}
_CONTAINER = re.compile(r"extra_state|rank_\d+")


def part_of(name: str, root: str, format: str) -> Part:
    """Return the part of a checkpoint in *format* whose model lies under *root*.

    ``rest`` is what is none of the others: random states, callbacks, a second model.
    """
    if name.startswith(root) and (root or not (has_room(format) and is_training(name))):
        return "model"
    words = name.lower().split(".")
    word = next((w for w in words if w not in ROOTS and not _CONTAINER.fullmatch(w)), "")
    return next((part for part, pattern in _WORDS.items() if pattern.match(word)), "rest")
