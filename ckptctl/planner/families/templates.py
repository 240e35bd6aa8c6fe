"""Key templates such as ``model.layers.{i}.self_attn.q_proj.weight``, and keys grouped by kind.

An index is a complete dot-separated part of a key, a decimal number of at most five digits without
leading zeros. No model counts further, and an absurd number would make loops endless. A template
matches a complete key. A model of a hundred layers has about fifteen kinds of keys. The values of
one index may have words as names, as in ``experts.{c=gate_proj|up_proj}.weight``.
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

MAX_CACHED_KEYS = 1 << 16
"""Number of cached keys. Each key is looked up in every layout that may match."""
T = TypeVar("T")


@lru_cache(maxsize=MAX_CACHED_KEYS)
def split_numbers(key: str) -> tuple[str, tuple[int, ...]]:
    """Split a key into its skeleton, with ``#`` for each number, and the numbers."""
    parts, numbers = key.split("."), []
    for place, part in enumerate(parts):
        # Few parts are numbers, so the cheap check comes first.
        if part.isdecimal() and _NUMBER.match(part):
            numbers.append(int(part))
            parts[place] = "#"
    return ".".join(parts), tuple(numbers)


@dataclass(frozen=True, slots=True)
class Template:
    """A key with named indices.

    Attributes:
        text: The template as written.
        skeleton: The text with ``#`` for every index and every literal number, and the first word
            for an index with words.
        slots: For each ``#`` the index's name, or the literal number.
        indices: The names of the indices, each once, in order of appearance.
        word_index: The index whose values are words, or empty.
        words: Words for the values of *word_index*, from 0 on.
        fixed: An index without a slot and its value, or ``()``.
    """

    text: str
    skeleton: str
    slots: tuple[str, ...]
    indices: tuple[str, ...]
    word_index: str = ""
    words: tuple[str, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    @staticmethod
    @lru_cache(maxsize=16384)
    def parse(text: str) -> Template:
        """Parse a template.

        Raises:
            ValueError: An index is not a complete part of the key.
        """
        slots, skeleton_parts, indices = [], [], []
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
            skeleton_parts.append(part)
        if len(words) > 1 or any(slot in words for slot in slots):
            raise ValueError(f"unsupported mix of indices and words in the key template `{text}`")
        index_names = tuple(dict.fromkeys(indices))
        return Template(
            text,
            ".".join(skeleton_parts),
            tuple(slots),
            index_names,
            *next(iter(words.items()), ()),
        )

    @property
    def has_distinct_slots(self) -> bool:
        """Whether any numbers match, because every slot is a different index."""
        return len(self.slots) == len(self.indices)

    @property
    def word_placeholder(self) -> str:
        """The part of the text that lists words, or empty."""
        return f"{{{self.word_index}={'|'.join(self.words)}}}" if self.words else ""

    @property
    def word_variants(self) -> tuple[Template, ...]:
        """One template per word, or the template itself if it has no words."""
        if not self.words:
            return (self,)
        templates = (
            Template.parse(self.text.replace(self.word_placeholder, word)) for word in self.words
        )
        return tuple(
            replace(template, fixed=((self.word_index, n),)) for n, template in enumerate(templates)
        )

    def to_index_values(self, numbers: tuple[int, ...]) -> dict[str, int] | None:
        """Convert the numbers of a key to index values, or return None if they do not match."""
        if len(numbers) != len(self.slots):
            return None
        if self.has_distinct_slots:
            return dict(zip(self.slots, numbers, strict=True), **dict(self.fixed))
        values: dict[str, int] = dict(self.fixed)
        for slot, number in zip(self.slots, numbers, strict=True):
            if (int(slot) if slot.isdigit() else values.setdefault(slot, number)) != number:
                return None
        return values

    def format_key(self, values: Mapping[str, int | str]) -> str:
        """Format the key with these index values. Strings may be placeholders."""
        if not self.words:
            return self.text.format_map(values)
        word_by_value: dict[int | str, str] = dict(enumerate(self.words))
        word = word_by_value.get(values[self.word_index], self.word_placeholder)
        before, after = (part.format_map(values) for part in self.text.split(self.word_placeholder))
        return f"{before}{word}{after}"


def get_skeleton(key: str) -> str:
    """Return *key* with ``#`` for each number, under which templates are indexed."""
    return split_numbers(key)[0]


class TemplateTable(Generic[T]):
    """Lookup table from keys to values, one value per template. The first match wins."""

    def __init__(self, entries: Iterable[tuple[Template, T]]) -> None:
        self._by_skeleton: dict[str, list[tuple[Template, T]]] = {}
        for template, meaning in entries:
            for variant in template.word_variants if template.words else (template,):
                self._by_skeleton.setdefault(variant.skeleton, []).append((variant, meaning))

    def list_entries(self, skeleton: str) -> Sequence[tuple[Template, T]]:
        """List the templates with *skeleton* and their values, in order of precedence."""
        return self._by_skeleton.get(skeleton, ())

    def find_match(self, key: str) -> tuple[T, dict[str, int]] | None:
        """Find the first value for *key*, with index values, or return None if nothing matches."""
        return next(self.iterate_matches(key), None)

    def iterate_matches(self, key: str) -> Iterator[tuple[T, dict[str, int]]]:
        """Yield the value of every template that matches *key*, with the index values, in order."""
        skeleton, numbers = split_numbers(key)
        for template, meaning in self.list_entries(skeleton):
            values = template.to_index_values(numbers)
            if values is not None:
                yield meaning, values


class KeyKind:
    """Keys that differ only in their numbers.

    Attributes:
        words: The parts of the keys that are not numbers.
    """

    def __init__(self, skeleton: str, keys: list[str], numbers: list[tuple[int, ...]]) -> None:
        self.skeleton, self.keys, self.numbers = skeleton, keys, numbers
        self.words = frozenset(skeleton.split(".")) - {"#"}

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The first number of each key, the second of each key, and so on."""
        return tuple(zip(*self.numbers, strict=True))

    def select_keys(self, chosen: Sequence[bool]) -> KeyKind:
        """Select the keys for which *chosen* is true."""
        keys, numbers = compress(self.keys, chosen), compress(self.numbers, chosen)
        return KeyKind(self.skeleton, list(keys), list(numbers))


def group_keys_by_kind(keys: Iterable[str]) -> list[KeyKind]:
    """Group *keys* by kind, in the order of their first keys."""
    kinds: dict[tuple[str, int], KeyKind] = {}
    for key in keys:
        skeleton, numbers = split_numbers(key)
        # A part may be a literal "#", which is not a number.
        kind = kinds.get((skeleton, len(numbers)))
        if kind is None:
            kind = kinds[skeleton, len(numbers)] = KeyKind(skeleton, [], [])
        kind.keys.append(key)
        kind.numbers.append(numbers)
    return list(kinds.values())
