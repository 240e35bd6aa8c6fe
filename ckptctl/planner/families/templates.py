"""Key templates: ``model.layers.{i}.self_attn.q_proj.weight`` and back; keys by kind.

An index stands for a whole dot-separated part of a key and is a decimal number of at most five
digits without leading zeros: no model counts further, and counting to an absurd one would not end.
A template matches a key entirely or not at all. A model of a hundred layers has some fifteen kinds
of keys. The values of one index may be called by words: ``experts.{c=gate_proj|up_proj}.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from typing import Generic, TypeVar

_INDEX = re.compile(r"\{([a-z]+)(?:=(\w+(?:\|\w+)+))?\}\Z")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,4})\Z")

KEYS = 1 << 16
"""Keys that are remembered: each is looked up in every layout that may be theirs."""
T = TypeVar("T")


@lru_cache(maxsize=KEYS)
def taken_apart(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the key with ``#`` for each number, and the numbers."""
    parts, numbers = key.split("."), []
    for place, part in enumerate(parts):
        # Few parts are numbers: the cheap question comes first.
        if part.isdecimal() and _NUMBER.match(part):
            numbers.append(int(part))
            parts[place] = "#"
    return ".".join(parts), tuple(numbers)


@dataclass(frozen=True, slots=True)
class Template:
    """A key with named indices.

    Attributes:
        skeleton: The same with ``#`` for every index and every literal number, and the first word
            where an index is called by words.
        slots: For each ``#`` the index's name, or the literal number.
        indices: The names of the indices, each once, in order of appearance.
        worded: The index that is called by words; empty: none is.
        words: What its values are called, from 0 on.
        fixed: An index and its value, where that is in no slot; ``()``: there is none.
    """

    text: str
    skeleton: str
    slots: tuple[str, ...]
    indices: tuple[str, ...]
    worded: str = ""
    words: tuple[str, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    @staticmethod
    @lru_cache(maxsize=16384)
    def parse(text: str) -> Template:
        """Return the template written as *text*.

        Raises:
            ValueError: An index does not fill a whole part of the key.
        """
        slots, shown, indices = [], [], []
        words: dict[str, tuple[str, ...]] = {}
        for part in text.split("."):
            index = _INDEX.match(part)
            if index:
                indices.append(index[1])
            if index and index[2]:
                words[index[1]] = tuple(index[2].split("|"))
                part = words[index[1]][0]
            elif index or _NUMBER.match(part):
                slots.append(index[1] if index else part)
                part = "#"
            elif "{" in part or "}" in part or part in ("", "#"):
                raise ValueError(f"invalid part `{part}` in the key template `{text}`")
            shown.append(part)
        if len(words) > 1 or any(slot in words for slot in slots):
            raise ValueError(f"unsupported mix of indices and words in the key template `{text}`")
        known = tuple(dict.fromkeys(indices))
        return Template(text, ".".join(shown), tuple(slots), known, *next(iter(words.items()), ()))

    @property
    def plain(self) -> bool:
        """Return whether any numbers fit: each stands for an index of its own."""
        return len(self.slots) == len(self.indices)

    @property
    def written(self) -> str:
        """Return the part of it that is one of several words; empty: there is none."""
        return f"{{{self.worded}={'|'.join(self.words)}}}" if self.words else ""

    @property
    def spellings(self) -> tuple[Template, ...]:
        """Return a template for each of its words; itself, where it has none."""
        if not self.words:
            return (self,)
        spelled = (Template.parse(self.text.replace(self.written, word)) for word in self.words)
        return tuple(replace(one, fixed=((self.worded, n),)) for n, one in enumerate(spelled))

    def read(self, numbers: tuple[int, ...]) -> dict[str, int] | None:
        """Return the indices that the numbers of a key stand for; None: they do not fit."""
        if len(numbers) != len(self.slots):
            return None
        if self.plain:
            return dict(zip(self.slots, numbers, strict=True), **dict(self.fixed))
        values: dict[str, int] = dict(self.fixed)
        for slot, number in zip(self.slots, numbers, strict=True):
            if (int(slot) if slot.isdigit() else values.setdefault(slot, number)) != number:
                return None
        return values

    def key(self, values: Mapping[str, int | str]) -> str:
        """Return the key with these indices filled in; texts stand for any value."""
        if not self.words:
            return self.text.format_map(values)
        known: dict[int | str, str] = dict(enumerate(self.words))
        word = known.get(values[self.worded], self.written)
        before, after = (part.format_map(values) for part in self.text.split(self.written))
        return f"{before}{word}{after}"


def skeleton(key: str) -> str:
    """Return *key* with ``#`` for each number in it: what a template is looked up by."""
    return taken_apart(key)[0]


class TemplateTable(Generic[T]):
    """Templates with what they stand for; of several that match the first wins."""

    def __init__(self, entries: Iterable[tuple[Template, T]]) -> None:
        self._by_skeleton: dict[str, list[tuple[Template, T]]] = {}
        for template, meaning in entries:
            for one in template.spellings if template.words else (template,):
                self._by_skeleton.setdefault(one.skeleton, []).append((one, meaning))

    def entries(self, skeleton: str) -> Sequence[tuple[Template, T]]:
        """Return the templates of this :func:`skeleton` and their meanings, the first to win."""
        return self._by_skeleton.get(skeleton, ())

    def find(self, key: str) -> tuple[T, dict[str, int]] | None:
        """Return what *key* stands for and its indices, or None."""
        return next(self.all(key), None)

    def all(self, key: str) -> Iterator[tuple[T, dict[str, int]]]:
        """Yield everything that *key* may stand for, with its indices."""
        skeleton, numbers = taken_apart(key)
        for template, meaning in self.entries(skeleton):
            values = template.read(numbers)
            if values is not None:
                yield meaning, values


class KeyKind:
    """Keys that differ in their numbers alone.

    Attributes:
        words: The parts of the keys that are no numbers.
    """

    def __init__(self, skeleton: str, keys: list[str], numbers: list[tuple[int, ...]]) -> None:
        self.skeleton, self.keys, self.numbers = skeleton, keys, numbers
        self.words = frozenset(skeleton.split(".")) - {"#"}

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Return the first number of each key, the second of each, and so on."""
        return tuple(zip(*self.numbers, strict=True))

    def only(self, chosen: Sequence[bool]) -> KeyKind:
        """Return the same of some keys alone; *chosen* says it of each."""
        keys, numbers = compress(self.keys, chosen), compress(self.numbers, chosen)
        return KeyKind(self.skeleton, list(keys), list(numbers))


def key_kinds(keys: Iterable[str]) -> list[KeyKind]:
    """Return *keys* by kind, in the order of their first keys."""
    found: dict[tuple[str, int], KeyKind] = {}
    for key in keys:
        skeleton, numbers = taken_apart(key)
        # A part may be "#" itself, which is no number.
        kind = found.get((skeleton, len(numbers)))
        if kind is None:
            kind = found[skeleton, len(numbers)] = KeyKind(skeleton, [], [])
        kind.keys.append(key)
        kind.numbers.append(numbers)
    return list(found.values())
