"""What a text that points at a checkpoint names, in whatever way it is written.

It may be a name, a path of this system or of Windows, a file inside of the checkpoint, quoted, a
line among others, a value in JSON, or a number alone.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ckptctl.ops.runs.names import is_last, parse, staged

ENDLESS = frozenset({"release"})
"""What Megatron writes in place of a step: the weights as they were published."""
PARTS = 256
"""How many parts of a text are looked up one by one."""
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BETWEEN = re.compile(r"[\\/\r\n]+")
_QUOTED = re.compile(r'"([^"\r\n]*)"')
_AROUND = " \t\"'`“”‘’«»{}[]()<>,;"
_NUMBER = re.compile(r"(?:^|:)\s*[\"']?(\d{1,18})[\"']?\s*(?:$|[,}])", re.ASCII | re.MULTILINE)
"""A line of its own, or a value in JSON."""
_LIKE_A_STEP = re.compile(r"[\w.=+-]*\d[\w.=+-]*", re.ASCII)

Alike = Callable[[str], str | None]


def decoded(data: bytes) -> str:
    """Return the text of a pointer: in UTF-8, or in UTF-16 as Windows writes it."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(name, "replace")
            break
    else:
        text = data.decode(errors="replace")
    return text.replace("\0", "").removeprefix("\ufeff").strip()


def mentioned(text: str, members: Sequence[str], alike: Alike) -> tuple[str, ...]:
    """Return the members that a text names anywhere.

    Args:
        text: What a pointer says.
        members: The names of the checkpoints of a run.
        alike: Returns the member that a name means that is spelt otherwise.
    """
    found = [name for name in members if name in text and _alone(name, text)]
    found += [known for part in _parts(text) if (known := alike(part))]
    if not found:
        steps = {int(digits) for digits in _NUMBER.findall(text)}
        found = [name for name in members if (one := parse(name)) and one.step in steps]
    return tuple(dict.fromkeys(found))


def understood(text: str, root: Path) -> bool:
    """Return whether a text that names no checkpoint of the run in *root* names something else.

    That is one that is gone, something else in the folder, or something elsewhere that is there.
    """
    if text in ENDLESS or _LIKE_A_STEP.fullmatch(text):
        return True
    if names_a_step(text):
        return True
    parts = [part for part in _parts(text) if part not in (os.curdir, os.pardir)]
    with suppress(ValueError):
        place = Path(text)
        return any(os.path.lexists(root / part) for part in parts) or (
            place.is_absolute() and os.path.lexists(place)
        )
    return False


def names_a_step(text: str) -> bool:
    """Return whether a text names something as checkpoints of runs are named, here or gone."""
    return any(parse(part) or staged(part) or is_last(part) for part in _parts(text))


def _alone(name: str, text: str) -> bool:
    """Return whether *name* stands in *text* as a word of its own: step-1 is not in step-10."""
    return re.search(rf"(?<![\w.=+-]){re.escape(name)}(?![\w=+-])", text) is not None


def _parts(text: str) -> list[str]:
    """Return the components of the paths in a text, and what is quoted in it, without quotes."""
    words = [text, *_QUOTED.findall(text)]
    parts = (part.strip(_AROUND) for word in words for part in _BETWEEN.split(word))
    return [part for part in dict.fromkeys(parts) if part][:PARTS]
