"""Modules that an adapter has as a whole: PEFT's ``modules_to_save``.

PEFT looks for every tensor of such a module in the adapter, those of the modules inside of it
included (``AuxiliaryTrainingWrapper.adapter_state_dict_load_map``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckptctl.errors import RefusedError, spell_option

_NUMBERED = re.compile(r"\.\d+\.")


def module_of(key: str) -> str:
    """Return the module of a parameter."""
    return key.rpartition(".")[0]


def outermost(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of *modules* that are in none of the others."""
    found = dict.fromkeys(modules)
    return tuple(one for one in found if not is_inside(one, found))


def is_inside(key: str, modules: Collection[str]) -> bool:
    """Return whether a tensor, or a module, is part of one of *modules*."""
    steps = key.split(".")
    return any(".".join(steps[:end]) in modules for end in range(1, len(steps)))


def require_module(
    name: str, names: Iterable[str], linear: Collection[str], tied: Collection[str], where: str
) -> None:
    """Refuse a tensor that PEFT cannot save: it has no module that could be saved as a whole."""
    module = module_of(name)
    what = f"`{name}` differs, but PEFT can only save whole modules"
    hint = f"pass {spell_option('--others leave-out')} to keep the tensor of the base"
    if name in tied:
        what = f"`{name}` differs, and other tensors are tied to it"
        why = "PEFT unties them when it saves one, and the others keep the values of the base"
        hint = f"convert both models with {spell_option('--untie')} first, or {hint}"
    elif not module:
        why = "it belongs to the model itself, not to a module"
    elif f"{module}.weight" in linear:
        why = f"`{module}.weight` of the same module has factors"
    elif any(
        _NUMBERED.search(one.removeprefix(module)) for one in names if is_inside(one, {module})
    ):
        why = f"`{module}` contains whole layers"
    else:
        return
    raise RefusedError(what, where=where, why=why, hint=hint)
