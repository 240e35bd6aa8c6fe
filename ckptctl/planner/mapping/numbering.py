"""Conversion of layer numbers for layouts that number several kinds of layers together.

In Llama 3.2 Vision, Hugging Face numbers cross-attention layers together with the decoder layers
among which they are inserted. torchtune gives each of them the number of the decoder layer that
follows it. In DeepSeek-V3, Hugging Face numbers MTP layers after the decoder layers. In ERNIE 4.5
VL, it numbers the experts of pictures after those of text. Other layouts number each kind of layers
or experts from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckptctl.errors import MappingError, format_option
from ckptctl.planner.families.declarations import AFTER, SECOND_HALF
from ckptctl.planner.families.templates import KeyKind, TemplateTable
from ckptctl.planner.layouts import Family, Layout, Shift
from ckptctl.units import pluralize

OTHER_KIND = -1
"""Index value that marks the number of a layer of another kind than the index counts."""


@dataclass(frozen=True, slots=True)
class LayerNumbering:
    """Conversion between the layer numbers of one checkpoint and index values.

    Attributes:
        inserted: Numbers of the inserted layers of each index, in ascending order.
        into: For each index of inserted layers, the index of the layers among which they are
            inserted.
        words: For each word that depends on the kind of the layer, its number in each layer.
        word_indices: For each of these words, the index of the layers.
    """

    inserted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    into: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    word_indices: Mapping[str, str] = field(default_factory=dict)

    def to_logical(self, values: Mapping[str, int]) -> dict[str, int] | None:
        """Convert layer numbers to index values, or return None for layers of another kind.

        *values* maps each index of a key template to the number in the key.
        """
        if not self.inserted:
            return dict(values)
        indices = {index: self.to_index(index, number) for index, number in values.items()}
        return None if OTHER_KIND in indices.values() else indices

    def to_index(self, index: str, number: int) -> int:
        """Convert a layer number to a value of *index*, or to :data:`OTHER_KIND`."""
        own_numbers, inserted_numbers = self.inserted.get(index), self._list_inserted(index)
        if (own_numbers is not None and number not in own_numbers) or number in inserted_numbers:
            return OTHER_KIND
        count = sum(
            1 for n in (inserted_numbers if own_numbers is None else own_numbers) if n < number
        )
        return number - count if own_numbers is None else count

    def to_indices(self, index: str, numbers: Sequence[int]) -> list[int]:
        """Convert several layer numbers to values of *index*, as :meth:`to_index` does."""
        index_by_number = {number: self.to_index(index, number) for number in set(numbers)}
        return [index_by_number[number] for number in numbers]

    def to_stored(self, values: Mapping[str, int]) -> dict[str, int]:
        """Convert the value of each index to the number that a key of the checkpoint contains."""
        words = {
            word: numbers[values[index]]
            for word, numbers in self.words.items()
            for index in [self.word_indices[word]]
            if values.get(index) in numbers
        }
        if not self.inserted:
            return {**values, **words}
        numbers = {index: self._to_stored_number(index, value) for index, value in values.items()}
        return numbers | words

    def _to_stored_number(self, index: str, value: int) -> int:
        own_numbers = self.inserted.get(index)
        if own_numbers is not None:
            return (
                own_numbers[value]
                if value < len(own_numbers)
                else (own_numbers[-1] if own_numbers else -1) + 1 + value
            )
        for number in self._list_inserted(index):
            value += number <= value
        return value

    def _list_inserted(self, index: str) -> Sequence[int]:
        number_lists = (
            self.inserted[inserted_index]
            for inserted_index, outer_index in self.into.items()
            if outer_index == index
        )
        return sorted(number for numbers in number_lists for number in numbers)


def infer_numbering(family: Family, layout: str, kinds: Iterable[KeyKind]) -> LayerNumbering:
    """Infer the numbering of a checkpoint from its keys in *layout*."""
    shifts = family.list_shifts(layout)
    if family.list_layer_words(layout):
        return _infer_words(family, layout, kinds)
    if not shifts:
        return LayerNumbering()
    halves = [shift for shift in shifts if shift.place == SECOND_HALF]
    own_keys = [shift for shift in shifts if shift.place != SECOND_HALF]
    table = _build_inserted_table(family.get_layout(layout), tuple(own_keys))
    numbers_by_index: dict[str, set[int]] = {shift.index: set() for shift in own_keys}
    key_kinds = list(kinds) if halves else kinds
    for kind in key_kinds:
        for key in kind.keys if table.list_entries(kind.skeleton) else ():
            match = table.find_match(key)
            if match:
                numbers_by_index[match[0].index].add(match[1][match[0].index])
    inserted = {index: tuple(sorted(numbers)) for index, numbers in numbers_by_index.items()}
    for shift in halves:
        count = _count_entries(family.get_layout(layout), shift, key_kinds)
        inserted[shift.index] = tuple(range(count - count // 2, count))
    return LayerNumbering(inserted, _map_inserted_to_outer_indices(shifts))


def _infer_words(family: Family, layout: str, kinds: Iterable[KeyKind]) -> LayerNumbering:
    """Infer from keys the word of each layer. The first key of a layer determines it."""
    table = family.get_layout(layout).table
    indices = {word.name: word.index for word in family.list_layer_words(layout)}
    words: dict[str, dict[int, int]] = {name: {} for name in indices}
    for kind in kinds:
        for template, _ in table.list_entries(kind.skeleton):
            for name, number in template.fixed:
                for numbers in kind.numbers if name in indices else ():
                    values = template.to_index_values(numbers) or {}
                    if indices[name] in values:
                        words[name].setdefault(values[indices[name]], number)
    return LayerNumbering(words=words, word_indices=indices)


def _count_entries(layout: Layout, shift: Shift, kinds: Iterable[KeyKind]) -> int:
    """Return the highest number of the regular and inserted entries of *shift*, plus 1."""
    count = 0
    for kind in kinds:
        for template, _ in layout.table.list_entries(kind.skeleton):
            if shift.index in template.slots and len(template.slots) == len(kind.columns):
                column = kind.columns[template.slots.index(shift.index)]
                count = max(count, max(column) + 1)
    return count


@lru_cache(maxsize=64)
def _build_inserted_table(layout: Layout, shifts: tuple[Shift, ...]) -> TemplateTable[Shift]:
    """Build a lookup table from keys that only inserted layers have to their shift."""
    entries = []
    for shift in shifts:
        for template in (stored.template for stored in layout.stored):
            same_skeleton = [
                candidate for candidate, _ in layout.table.list_entries(template.skeleton)
            ]
            if shift.index in template.indices and not any(
                shift.into in t.indices for t in same_skeleton
            ):
                entries.append((template, shift))
    return TemplateTable(entries)


def compute_numbering(
    family: Family,
    layout: str,
    counts: Mapping[str, int],
    lists: Mapping[str, Sequence[int]],
) -> LayerNumbering:
    """Compute the numbering of a new checkpoint in *layout*.

    Args:
        family: The model type.
        layout: Layout of the new checkpoint.
        counts: Number of layers of each index, and of entries of each axis.
        lists: Lists of layer numbers from the config, by config field.

    Raises:
        MappingError: The config does not list the positions of inserted layers, or a layout that
            numbers two kinds of entries in halves has more of one kind.
    """
    numbers_by_index: dict[str, tuple[int, ...]] = {}
    shifts = family.list_shifts(layout)
    layer_words = family.list_layer_words(layout)
    for word in layer_words:
        layer_count = len(lists.get(word.name, ()))
        if layer_count < counts.get(word.index, 0):
            count_text = (
                f"it lists {pluralize(layer_count, 'layer')}" if layer_count else "it does not"
            )
            raise MappingError(
                f"layout `{layout}` requires the kind of every layer",
                why=f"names of tensors depend on it, and config.json must list it as "
                f"`{word.fact}`; {count_text}",
                hint=f"pass {format_option('--assets DIR')} with the model's config.json",
            )
    for shift in shifts:
        count = counts.get(shift.index, 0)
        first = counts.get(shift.into, 0)
        stated_numbers = lists.get(shift.place)
        if shift.place == SECOND_HALF and first != count:
            raise MappingError(
                f"layout `{layout}` requires as many of `{shift.index}` as of `{shift.into}`",
                why=f"the model has {count:,} and {first:,}, and the layout numbers them in halves",
            )
        if shift.place in (AFTER, SECOND_HALF):
            numbers_by_index[shift.index] = tuple(range(first, first + count))
        elif count == 0:
            numbers_by_index[shift.index] = ()
        elif stated_numbers is None or len(stated_numbers) != count:
            raise MappingError(
                f"layout `{layout}` requires the positions of {pluralize(count, 'inserted layer')}",
                why=f"config.json must list their numbers as `{shift.place}`",
                hint=f"pass {format_option('--assets DIR')} with the model's config.json",
            )
        else:
            before = range(count) if shift.nested else (0,) * count
            numbers_by_index[shift.index] = tuple(
                number - n for number, n in zip(sorted(stated_numbers), before, strict=True)
            )
    return LayerNumbering(
        numbers_by_index,
        _map_inserted_to_outer_indices(shifts),
        {word.name: dict(enumerate(lists.get(word.name, ()))) for word in layer_words},
        {word.name: word.index for word in layer_words},
    )


def require_numbering(
    family: Family, layout: str, numbering: LayerNumbering, lists: Mapping[str, Sequence[int]]
) -> None:
    """Require that the numbers of inserted layers agree with the *lists* of the config.

    Raises:
        MappingError: The keys and the config disagree.
    """
    for word in family.list_layer_words(layout):
        for layer, number in numbering.words.get(word.name, {}).items():
            listed = lists.get(word.name, ())
            if layer < len(listed) and listed[layer] != number:
                kinds = ["/".join(word.kinds[n]) for n in (listed[layer], number)]
                raise MappingError(
                    "config.json and the names of the tensors disagree on the kind of a layer",
                    where=word.fact,
                    why=f"layer {layer} is `{kinds[0]}` there, but `{kinds[1]}` by its names",
                    hint=f"pass {format_option('--assets DIR')} with the right config.json",
                )
    for shift in family.list_shifts(layout):
        inserted_numbers, stated_numbers = (
            numbering.inserted.get(shift.index, ()),
            lists.get(shift.place),
        )
        shifts_by_layer = (
            range(len(inserted_numbers)) if shift.nested else (0,) * len(inserted_numbers)
        )
        numbers = [number + n for number, n in zip(inserted_numbers, shifts_by_layer, strict=True)]
        if inserted_numbers and stated_numbers is not None and numbers != sorted(stated_numbers):
            raise MappingError(
                "config.json and the names of the tensors disagree on which layers are inserted",
                where=shift.place,
                why=f"it lists {sorted(stated_numbers)}, but the tensor names show {numbers}",
                hint=f"pass {format_option('--assets DIR')} with the right config.json",
            )


def _map_inserted_to_outer_indices(shifts: Iterable[Shift]) -> dict[str, str]:
    return {shift.index: shift.into for shift in shifts if not shift.nested}
