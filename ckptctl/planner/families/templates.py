"""Key templates such as ``model.layers.{i}.self_attn.q_proj.weight``, and groups of similar keys.

An index is a dot-separated component of a key, or follows ``shard_`` in one. It is a decimal number
of at most five digits without leading zeros. The limit prevents very long loops if a key contains a
huge number. A template must match the complete key. Keys that differ only in numbers are processed
together, because a model with a hundred layers has only about fifteen such groups. One index of a
template may have words instead of numbers, as in ``experts.{c=gate_proj|up_proj}.weight``. A word
may consist of several parts and contain numbers, as in ``blocks.{n=1.0|1.2|2.1}.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from typing import Generic, TypeVar

_INDEX = re.compile(r"\{([a-z]+)\}\Z")
_WORD_CHOICES = re.compile(r"\{([a-z]+)=(\w+(?:\.\w+)*(?:\|\w+(?:\.\w+)*)+)\}")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,4})\Z")
_SHARD = "shard_"

MAX_CACHED_KEYS = 1 << 16
"""Maximum number of cached keys. Each key is looked up in several layouts."""
T = TypeVar("T")


@lru_cache(maxsize=MAX_CACHED_KEYS)
def split_numbers(key: str) -> tuple[str, tuple[int, ...]]:
    """Split a key into a skeleton, which has ``#`` in place of each number, and these numbers."""
    parts, numbers = key.split("."), []
    has_shards = _SHARD in key
    for place, part in enumerate(parts):
        before = _SHARD if has_shards and part.startswith(_SHARD) else ""
        number = part.removeprefix(before)
        # Few parts are numbers, so the cheap check comes first.
        if number.isdecimal() and _NUMBER.match(number):
            numbers.append(int(number))
            parts[place] = f"{before}#"
    return ".".join(parts), tuple(numbers)


@dataclass(frozen=True, slots=True)
class Template:
    """A key with placeholders for named indices.

    Attributes:
        text: The template as written in the table.
        skeleton: The text with ``#`` in place of each index and each literal number. An index with
            words is replaced by its first word.
        slots: Name of the index, or the literal number, for each ``#`` of the skeleton.
        indices: Names of the indices in order of appearance, without duplicates.
        word_index: Name of the index whose values are words, or empty.
        words: Words for the values 0, 1, and so on of *word_index*.
        fixed: Name and value of an index that a word in the text determines, or ``()``.
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
        parts = text
        if "=" in text:
            words = {match[1]: tuple(match[2].split("|")) for match in _WORD_CHOICES.finditer(text)}
            parts = _WORD_CHOICES.sub(r"{\1}", text)
        # Families have thousands of keys, and most parts are words, so cheap checks come first.
        for part in parts.split("."):
            if part.isidentifier() and not part.startswith(_SHARD):
                skeleton_parts.append(part)
                continue
            before = _SHARD if part.startswith(_SHARD) else ""
            part = part.removeprefix(before)
            index = _INDEX.match(part)
            if index:
                indices.append(index[1])
            if not index and ("{" in part or "}" in part or (part in ("", "#") and not before)):
                raise ValueError(f"invalid part `{part}` in the key template `{text}`")
            if index and index[1] not in words:
                slots.append(index[1])
                skeleton_parts.append(f"{before}#")
                continue
            for word in words[index[1]][0].split(".") if index else (part,):
                is_number = _NUMBER.match(word)
                slots += [word] if is_number else []
                skeleton_parts.append(before + ("#" if is_number else word))
        if len(words) > 1 or any(indices.count(index) > 1 for index in words):
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
        """Whether every slot is a different index, so that any numbers match."""
        return len(self.slots) == len(self.indices)

    @property
    def word_placeholder(self) -> str:
        """The placeholder in :attr:`text` that lists words, or an empty string."""
        return f"{{{self.word_index}={'|'.join(self.words)}}}" if self.words else ""

    @property
    def word_variants(self) -> tuple[Template, ...]:
        """One template for each word, or only this template if it has no words."""
        if not self.words:
            return (self,)
        templates = (
            Template.parse(self.text.replace(self.word_placeholder, word)) for word in self.words
        )
        return tuple(
            replace(template, fixed=((self.word_index, n),)) for n, template in enumerate(templates)
        )

    @property
    def skeletons(self) -> tuple[str, ...]:
        """The skeletons of all keys that the template matches, one for each word."""
        if not self.words:
            return (self.skeleton,)
        return tuple(variant.skeleton for variant in self.word_variants)

    def to_index_values(self, numbers: tuple[int, ...]) -> dict[str, int] | None:
        """Map index names to the numbers of a key, or return None if these do not match."""
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
        """Format a key with the given index values. A string value is inserted as a placeholder.

        If the value of :attr:`word_index` is missing, the placeholder is inserted.
        """
        if not self.words:
            return self.text.format_map(values)
        word_by_value: dict[int | str, str] = dict(enumerate(self.words))
        word = word_by_value.get(values.get(self.word_index, ""), self.word_placeholder)
        before, after = (part.format_map(values) for part in self.text.split(self.word_placeholder))
        return f"{before}{word}{after}"


def get_skeleton(key: str) -> str:
    """Return *key* with ``#`` in place of each number, as in :attr:`Template.skeleton`."""
    return split_numbers(key)[0]


class TemplateTable(Generic[T]):
    """Lookup table that maps each key to the value of the first template that matches it."""

    def __init__(self, entries: Iterable[tuple[Template, T]]) -> None:
        self._by_skeleton: dict[str, list[tuple[Template, T]]] = {}
        for template, meaning in entries:
            for variant in template.word_variants if template.words else (template,):
                self._by_skeleton.setdefault(variant.skeleton, []).append((variant, meaning))

    @property
    def skeletons(self) -> Collection[str]:
        """The skeletons of all keys that a template matches."""
        return self._by_skeleton.keys()

    def list_entries(self, skeleton: str) -> Sequence[tuple[Template, T]]:
        """List each template that has *skeleton*, with its value, in order of precedence."""
        return self._by_skeleton.get(skeleton, ())

    def find_match(self, key: str) -> tuple[T, dict[str, int]] | None:
        """Find the first template that matches *key*.

        Returns:
            The value of the template and the index values, or None if no template matches.
        """
        return next(self.iterate_matches(key), None)

    def iterate_matches(self, key: str) -> Iterator[tuple[T, dict[str, int]]]:
        """Yield the value and the index values of every template that matches *key*."""
        skeleton, numbers = split_numbers(key)
        for template, meaning in self.list_entries(skeleton):
            values = template.to_index_values(numbers)
            if values is not None:
                yield meaning, values


class KeyKind:
    """Group of keys that differ only in numbers, such as layer numbers.

    Attributes:
        words: Dot-separated components that all keys share, which are not numbers.
    """

    def __init__(self, skeleton: str, keys: list[str], numbers: list[tuple[int, ...]]) -> None:
        self.skeleton, self.keys, self.numbers = skeleton, keys, numbers
        parts = frozenset(skeleton.split(".")) - {"#"}
        self.words = frozenset(_SHARD if part == f"{_SHARD}#" else part for part in parts)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of all keys, transposed to one tuple for each position in the skeleton."""
        return tuple(zip(*self.numbers, strict=True))

    def select_keys(self, chosen: Sequence[bool]) -> KeyKind:
        """Return only the keys at positions where *chosen* is true."""
        keys, numbers = compress(self.keys, chosen), compress(self.numbers, chosen)
        return KeyKind(self.skeleton, list(keys), list(numbers))


def group_keys_by_kind(keys: Iterable[str]) -> list[KeyKind]:
    """Group keys that differ only in numbers, in the order in which the groups first occur."""
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
