"""Survey of a checkpoint's quantized weights, supported and unsupported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.numerics.quantization.statement import QUANTIZATION, QuantizationStatement

if TYPE_CHECKING:
    from ckptctl.numerics.quantization.scheme import Form, Group, QuantizedWeight, Scheme

Values = Callable[[TensorEntry], bytes]
Tensors = Mapping[str, TensorEntry]
PLAIN_NAMES = (".weight", ".bias")
PLAIN_DTYPES = ("bfloat16", "float16", "float32")
"""A tensor with such an ending and dtype never identifies a scheme."""


@dataclass(slots=True)
class Survey:
    """Quantized weights and other tensors of quantization schemes in a checkpoint.

    Attributes:
        weights: Supported weights, in the checkpoint's order.
        unfit: Errors that schemes found, by the name of the lead tensor.
        unknown: Tensors of unsupported schemes, and the names of these.
        bare: Quantized tensors without scales.
        lone: Scales without quantized tensors.
        dropped: Tensors that dequantized models do not need, with descriptions.
    """

    weights: list[QuantizedWeight] = field(default_factory=list)
    unfit: dict[str, CkptError] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    bare: list[str] = field(default_factory=list)
    lone: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all quantized tensors are supported and complete."""
        return not (self.unfit or self.unknown or self.bare or self.lone)

    @property
    def ways(self) -> dict[str, str]:
        """Descriptions of how tensors are quantized, by dequantized name."""
        unfit = {
            name: "mismatched scales" if isinstance(error, UnsupportedError) else error.what
            for name, error in self.unfit.items()
        }
        unfit |= {
            name: "a tensor is missing"
            for name, error in self.unfit.items()
            if isinstance(error, DamagedError)
        }
        return {**{weight.key: weight.how for weight in self.weights}, **unfit, **self.unknown}


def look_plain(tensors: Tensors) -> bool:
    """Return whether no tensor has a name or dtype of a quantization scheme."""
    return all(n.endswith(PLAIN_NAMES) and e.dtype in PLAIN_DTYPES for n, e in tensors.items())


def survey(tensors: Tensors, statement: QuantizationStatement, values: Values) -> Survey:
    """Detect quantized weights and their scales among *tensors*.

    Args:
        tensors: All tensors of a checkpoint.
        statement: Its quantization config.
        values: Reads the bytes of a small tensor, for schemes that shapes do not determine.
    """
    if not statement.method and look_plain(tensors):
        return Survey()
    chosen = [one for one in _schemes() if one.fits(statement)]
    chosen.sort(key=lambda one: statement.method not in one.methods)
    found = Survey()
    used = _weights(found, chosen, tensors, statement, values)
    endings = {ending: what for one in chosen for ending, what in one.dropped.items()}
    last = tuple(endings)
    for name in tensors:
        if name not in used and name.endswith(last):
            found.dropped[name] = next(w for end, w in endings.items() if name.endswith(end))
    _strange(found, chosen, tensors, used)
    known = any(statement.method in one.methods for one in chosen)
    if statement.method and not known and not found.unknown:
        found.unknown[QUANTIZATION] = f"`{statement.method}`"
    return found


def _schemes() -> tuple[Scheme, ...]:
    from ckptctl.numerics.quantization.scheme import schemes  # late: for a fast start

    return schemes()


def _weights(
    found: Survey,
    chosen: Iterable[Scheme],
    tensors: Tensors,
    statement: QuantizationStatement,
    values: Values,
) -> set[str]:
    """Add supported weights and errors, and return the names of their tensors."""
    by_dtype: dict[str, list[Form]] = {}
    for form in (form for one in chosen for form in one.forms if form.make):
        for dtype in form.dtypes:
            by_dtype.setdefault(dtype, []).append(form)
    from ckptctl.numerics.quantization.scheme import Group  # late: for a fast start

    used: set[str] = set()
    made: list[tuple[Form, Group]] = []
    for name, entry in tensors.items():
        found_form = _form(by_dtype.get(entry.dtype, ()), name, tensors)
        if found_form is None or (make := found_form[0].make) is None:
            continue
        form, parts = found_form
        used.add(name)
        used.update(part.name for part in parts.values())
        for role, part in parts.items():
            if form.parts[role].dropped:
                found.dropped[part.name] = form.parts[role].dropped
        parts = {role: part for role, part in parts.items() if not form.parts[role].dropped}
        key = f"{name.removesuffix(form.lead)}{form.plain}"
        group = Group(key, entry, parts, statement, values)
        try:
            form.require_parts(group)
            found.weights.append(make(group))
            made.append((form, group))
        except CkptError as error:
            found.unfit[name] = error
    _require_uniform(found, made)
    _add_unpaired(found, {id(form): form for form, _ in made}.values(), tensors, used)
    return used


def _form(forms: Iterable[Form], name: str, tensors: Tensors) -> tuple[Form, Tensors] | None:
    """Return the form of the quantized tensor *name*, and its other tensors by role.

    If no form is complete, the one with most of its tensors is returned, or None if none has any.
    """
    best: tuple[Form, Tensors] | None = None
    for form in forms:
        if not name.endswith(form.lead):
            continue
        stem = name.removesuffix(form.lead)
        names = {role: f"{stem}{part.ending}" for role, part in form.parts.items()}
        there = {role: tensors[part] for role, part in names.items() if part in tensors}
        needed = {role for role, part in form.parts.items() if part.essential}
        if needed <= there.keys() and (there or not form.parts):
            return form, there
        if there and (best is None or len(there) > len(best[1])):
            best = form, there
    return best


def _require_uniform(found: Survey, made: Sequence[tuple[Form, Group]]) -> None:
    """Turn weights without a part that others of the same form have into errors."""
    from ckptctl.numerics.quantization.scheme import missing_error

    places = {
        (id(form), role): (form, part)
        for form, _ in made
        for role, part in form.parts.items()
        if part.uniform is not None
    }
    wrong: dict[str, CkptError] = {}
    for (number, role), (form, part) in places.items():
        assert part.uniform is not None
        has = [(group, part.uniform(group)) for one, group in made if id(one) == number]
        full = next((group.parts[role].name for group, whole in has if whole), None)
        for group in (group for group, whole in has if full and whole is False):
            if role in group.parts:
                why = f"other weights have one element per block, such as `{full}`"
                wrong[group.lead.name] = group.unfit(why, role)
            else:
                name = f"{group.lead.name.removesuffix(form.lead)}{part.ending}"
                why = f"other weights have this tensor, for example `{full}`"
                wrong[group.lead.name] = missing_error(group, {name: why})
    found.unfit |= wrong
    found.weights = [weight for weight in found.weights if weight.lead not in wrong]


def _add_unpaired(found: Survey, forms: Iterable[Form], tensors: Tensors, used: set[str]) -> None:
    """Add unpaired quantized tensors and scales of forms that other weights have.

    Their names alone would not identify them.
    """
    for form in (form for form in forms if form.lead):
        ends = tuple(part.ending for part in form.parts.values() if part.essential)
        for name, entry in tensors.items():
            if name in used or entry.dtype in PLAIN_DTYPES:
                continue
            end = next((end for end in ends if name.endswith(end)), None)
            if name.endswith(form.lead) and entry.dtype in form.dtypes:
                found.bare.append(name)
                used.add(name)
            elif end and f"{name.removesuffix(end)}{form.lead}" not in tensors:
                found.lone.append(name)
                used.add(name)


def _strange(
    found: Survey, chosen: Collection[Scheme], tensors: Tensors, used: Collection[str]
) -> None:
    """Add tensors that look quantized but belong to no supported weight."""
    forms = [(one, form) for one in _schemes() for form in one.forms]
    told = [(end, dtypes) for _, form in forms for end, dtypes in form.tells.items()]
    last = tuple({end for end, dtypes in told if not dtypes})
    of_dtype = {dtype for _, dtypes in told for dtype in dtypes}
    for name, entry in tensors.items():
        if name in used or not (entry.dtype in of_dtype or name.endswith(last)):
            continue
        if name in found.dropped:
            continue
        telling = [(one, form, form.teller(name, entry.dtype)) for one, form in forms]
        telling = [told for told in telling if told[2] is not None]
        ours = [(form, ending) for one, form, ending in telling if one in chosen]
        if ours:
            led = any(ending == form.lead for form, ending in ours)
            (found.bare if led else found.lone).append(name)
        elif telling:
            found.unknown[name] = " or ".join(dict.fromkeys(one.name for one, _, _ in telling))


def plain_names(names: Collection[str]) -> Collection[str]:
    """Replace the names of each quantized weight's tensors by its dequantized name.

    *names* are returned unchanged if none belongs to a scheme outside the families' tables.
    """
    if all(name.endswith(PLAIN_NAMES) for name in names):
        return names
    every = _schemes()
    dropped = tuple(ending for one in every for ending in one.dropped)
    if not any(name.endswith((*dropped, *_telling())) for name in names):
        return names
    forms = [form for one in every for form in one.forms]
    endings = {end: form for form in forms for end in form.endings if end != form.plain}
    last, present = tuple(endings), frozenset(names)
    plain: dict[str, None] = {}
    for name in names:
        if name.endswith(last):
            plain[_plain_name(name, forms, present)] = None
        elif not name.endswith(dropped):
            plain[name] = None
    return list(plain)


@cache
def _telling() -> tuple[str, ...]:
    """Return the endings that identify schemes outside the families' tables."""
    forms = (form for one in _schemes() if not one.in_tables for form in one.forms)
    return tuple({end for form in forms for end in form.tells if end != form.plain})


def _plain_name(name: str, forms: Iterable[Form], present: Collection[str]) -> str:
    for form in forms:
        for ending in sorted(form.endings, key=len, reverse=True):
            stem = name.removesuffix(ending)
            if stem != name and f"{stem}{form.lead}" in present:
                return f"{stem}{form.plain}"
    return name
