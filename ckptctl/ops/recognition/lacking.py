"""What a model lacks of the tensors that its family's table and its configuration say it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptctl import families
from ckptctl.errors import MappingError, UsageError, listed
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.configs.stated import does_without, is_tied, read_sizes
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.completeness import Absent, lacking, require_whole
from ckptctl.planner.mapping.matching import Matched, match

TRANSFORMERS = "hf"
"""How the layouts of transformers begin."""


@dataclass(frozen=True, slots=True)
class Lacks:
    """What a model lacks.

    Attributes:
        names: The tensors, by their names in the model.
        certain: Whether it is known to be such a model: a configuration or the user says so, or
            most of it is there and nothing else. If not, it may be a part of one, or another one.
        known: What the model was recognised as.
        unread: Why its configuration does not say what there has to be; empty: it does.
        strange: Names of its tensors that such a model does not have.
    """

    names: tuple[str, ...]
    certain: bool
    known: Recognition
    unread: str = ""
    strange: tuple[str, ...] = ()

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
        if self.unread or not self.names or self.certain:
            return (self.unread,) if self.unread else ()
        return (
            f"a part of {self.known.named}, or another model: it does not have "
            f"{listed(self.names, 1)}",
        )

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
                family,
                family.layout(layout),
                tied=is_tied(family, self.known.config, self.known.params),
                strange=self.strange,
                where=where,
                hint="`--allow-missing` writes what is there, "
                "`--include` or `--exclude` a part of it",
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
    configured = known.config is not None or known.params is not None
    if not names or is_adapter(names) or (known.exact and not configured and not given):
        return Lacks((), False, known)
    found: list[str] | None = None
    certain, strange = True, tuple[str, ...]()
    for name, layout in known.pairs:
        family = families.family(name)
        matched = match(family, family.layout(layout), names)
        headless = target in (None, layout) or str(target).startswith(TRANSFORMERS)
        lacking = _lacking(family, layout, matched, known, given, headless)
        keys = [one.key for one in lacking]
        strange = strange or tuple(matched.unmatched)
        found = keys if found is None else [key for key in found if key in set(keys)]
        certain = certain and _certain(family, matched, known, lacking)
    return Lacks(tuple(found or ()), certain, known, strange=strange)


def _lacking(
    family: Family,
    layout: str,
    matched: Matched,
    known: Recognition,
    given: Mapping[str, int] | None,
    headless: bool,
) -> list[Absent]:
    return lacking(
        family,
        family.layout(layout),
        matched,
        read_sizes(family, known.config, known.params, given, implied=False),
        tied=is_tied(family, known.config, known.params),
        without=does_without(family, known.config) if headless else (),
    )


def _certain(
    family: Family, matched: Matched, known: Recognition, lacking: Collection[Absent]
) -> bool:
    """Whether a checkpoint is of *family* although it lacks something."""
    config = known.config or {}
    if matched.unmatched:
        stated = config.get("architectures")
        named = isinstance(stated, list) and family.architecture in stated
        return named and "quantization_config" not in config
    if known.asked or known.config is not None or known.params is not None:
        return True
    most = len(lacking) <= sum(len(group.keys) for group in matched.groups)
    return most and _has_ends(family, matched) and all(one.shown for one in lacking)


def _has_ends(family: Family, matched: Matched) -> bool:
    """Whether there are layers, and something before or after them: a head alone is no model."""
    there = {bool(tensor.indices) for tensor in family.tensors.values() if matched.number(tensor)}
    return there == {bool(tensor.indices) for tensor in family.tensors.values()}
