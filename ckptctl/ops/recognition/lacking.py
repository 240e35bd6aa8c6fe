"""What a model lacks of the tensors that its family's table and its configuration say it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckptctl import families
from ckptctl.errors import MappingError, UsageError, listed
from ckptctl.ops.recognition.quantised import plain_names
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.configs.stated import does_without, is_tied, read_sizes
from ckptctl.planner.layouts import BASE, Family
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.completeness import (
    Lacking,
    begins_only,
    lacking,
    require_whole,
)
from ckptctl.planner.mapping.detect import detect
from ckptctl.planner.mapping.matching import Matched, match
from ckptctl.planner.mapping.source import uncounted

TRANSFORMERS = "hf"
"""How the layouts of transformers begin."""
DO_WITHOUT = "`--allow-missing` writes what is there, `--include` or `--exclude` a part of it"
JOIN_STAGES = (
    "it looks like the first stage of a pipeline: to join all stages, write each with `--to hf "
    "--allow-missing`, put their files into one folder as `model-00001-of-0000N.safetensors`, ... "
    "and convert that folder"
)


@dataclass(frozen=True, slots=True)
class Lacks:
    """What a model lacks.

    Attributes:
        names: The tensors, by their names in the model; of very many the first ones.
        certain: Whether it is known to be such a model: a configuration or the user says so, or
            most of it is there and nothing else. If not, it may be a part of one, or another one.
        known: What the model was recognised as.
        unread: Why its configuration does not say what there has to be; empty: it does.
        strange: Names of its tensors that such a model does not have.
        more: How many tensors it lacks beside *names*.
        begins: Whether it is what a pipeline's first stage holds.
        surplus: What there is more of than its configuration says; empty: nothing.
    """

    names: tuple[str, ...]
    certain: bool
    known: Recognition
    unread: str = ""
    strange: tuple[str, ...] = ()
    more: int = 0
    begins: bool = False
    surplus: str = ""

    @property
    def missing(self) -> dict[str, str]:
        """Return what certainly lacks, by its name in the checkpoint, and why it is missed."""
        names = self.names if self.certain else ()
        one = self.known.model_type
        who = f"`{one}` has" if one else "all model types that it may be of have"
        why = f"{who} it, and the checkpoint does not"
        return {self.known.root + name: why for name in names}

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return what a reader should know of what may lack."""
        if self.unread:
            return (self.unread,)
        if self.names and self.certain and self.more:
            return (f"it lacks {self.more:,} more tensors that are not listed",)
        if not self.names or self.certain:
            return ()
        return (
            f"a part of {self.known.named}, or another model: it does not have "
            f"{listed(self.names, 1, number=len(self.names) + self.more)}",
        )

    def only(self, names: Collection[str]) -> Lacks:
        """Return the same of those alone of the tensors whose *names* are wanted."""
        kept = tuple(name for name in self.names if name in names)
        return replace(self, names=kept, more=self.more if kept == self.names else 0)

    def require_whole(self, where: str) -> None:
        """Refuse a model that certainly lacks something.

        Raises:
            RefusedError: It does.
        """
        if self.names and self.certain:
            name, layout = self.known.pairs[0]
            family = families.family(name)
            require_whole(
                self.names,
                len(self.names) + self.more,
                family,
                family.layout(layout),
                tied=is_tied(family, self.known.config, self.known.params),
                strange=self.strange,
                where=where,
                hint=JOIN_STAGES if self.begins else DO_WITHOUT,
            )


def described(known: Recognition, names: Collection[str]) -> Lacks:
    """Return what a model lacks, whatever its configuration says."""
    try:
        return lacks(known, names)
    except (MappingError, UsageError) as error:
        why = ": ".join(filter(None, (error.what, error.why)))
        return Lacks((), False, known, f"its configuration does not describe it: {why}")


def lacks(
    known: Recognition,
    names: Collection[str],
    given: Mapping[str, int] | None = None,
    target: str | None = None,
) -> Lacks:
    """Return what a model lacks.

    Args:
        known: What it was recognised as; where several families fit, what all of them have.
        names: Names of its tensors in the model; none: it is not asked.
        given: Axis sizes that the user states.
        target: The layout that is to be written; None: that of the model. Transformers has classes
            without a head; who reads another layout expects one.

    Raises:
        MappingError: A configuration states what is no size.
        UsageError: A given size has no such name, or contradicts a file.
    """
    if not names or is_adapter(names):
        return Lacks((), False, known)
    known, names = _unquantised(known, names)
    configured = known.config is not None or known.params is not None
    headless = target in (None, known.layout) or str(target).startswith(TRANSFORMERS)
    base = known.layout == BASE
    if known.exact and not configured and not given and (headless or not base):
        return Lacks((), False, known)
    found: dict[str, None] | None = None
    numbers: list[int] = []
    certain, begins, strange, surplus = True, True, tuple[str, ...](), ""
    for name, layout in known.pairs:
        family = families.family(name)
        matched = match(family, family.layout(layout), names)
        sizes = read_sizes(family, known.config, known.params, given, implied=False)
        less = lacking(
            family,
            family.layout(layout),
            matched,
            sizes,
            tied=is_tied(family, known.config, known.params),
            without=does_without(family, known.config, base=base) if headless else (),
        )
        keys = dict.fromkeys(absent.key for absent in less.listed)
        numbers.append(less.number - len(keys))
        strange = strange or tuple(matched.unmatched)
        found = keys if found is None else {key: None for key in found if key in keys}
        certain = certain and _certain(family, matched, known, less)
        begins = begins and begins_only(family, family.layout(layout), matched, keys)
        surplus = surplus or uncounted(family, matched.counts(), sizes)
    return Lacks(
        tuple(found or ()),
        certain,
        known,
        strange=strange,
        more=min(numbers, default=0),
        begins=begins,
        surplus=surplus,
    )


def _unquantised(known: Recognition, names: Collection[str]) -> tuple[Recognition, Collection[str]]:
    """Return a model that is quantised in a way that no table describes as if it were not.

    Its other tensors, and the layers that are quantised, are those of its family.
    """
    plain = plain_names(names)
    if known.exact or len(plain) == len(names):
        return known, names
    types = [known.asked] if known.asked else families.names()
    chosen = {name: families.family(name) for name in types}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(plain, ())
    seen = detect(
        shapes, chosen, known.config, known.params, named=bool(known.asked), root=known.root
    )
    pairs = tuple((one.family, one.layout) for one in seen.candidates)
    return replace(known, pairs=pairs, exact=seen.exact), plain


def _certain(family: Family, matched: Matched, known: Recognition, less: Lacking) -> bool:
    """Whether a checkpoint is of *family* although it lacks something."""
    config = known.config or {}
    if matched.unmatched:
        stated = config.get("architectures")
        named = isinstance(stated, list) and family.architecture in stated
        return named and "quantization_config" not in config
    if known.asked or known.config is not None or known.params is not None:
        return True
    most = less.number <= sum(len(group.keys) for group in matched.groups)
    return most and _has_ends(family, matched) and all(absent.shown for absent in less.listed)


def _has_ends(family: Family, matched: Matched) -> bool:
    """Whether there are layers, and something before or after them: a head alone is no model."""
    there = {bool(tensor.indices) for tensor in family.tensors.values() if matched.number(tensor)}
    return there == {bool(tensor.indices) for tensor in family.tensors.values()}
