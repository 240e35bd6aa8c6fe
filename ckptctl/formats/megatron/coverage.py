"""Whether rules have something to say of every tensor, and what to tell where they have not."""

from __future__ import annotations

from ckptctl.errors import CkptError, MappingError, listed
from ckptctl.formats.megatron.grid import Grid
from ckptctl.formats.megatron.names import Names, anonymous
from ckptctl.formats.megatron.rules import BUILT_IN, Rules, built_in

_ADVICE = "write a rules file: docs/how-to/megatron.md"
SHOWN = 20


def require_rules(grid: Grid, rules: Rules | None, where: str) -> None:
    """Refuse to join the files of several ranks without a rule for every tensor.

    Args:
        grid: What the ranks wrote.
        rules: What there is; None: nothing.
        where: The save, for errors.

    Raises:
        MappingError: Rules are missing.
    """
    if rules is None:
        raise MappingError(
            "how the ranks divide the tensors is not recorded",
            where=where,
            why=f"there are files of {len(grid.files)} ranks",
            hint=f"`--rules {BUILT_IN}` has a rule for every tensor"
            if _built_in_fits(grid, where)
            else _ADVICE,
        )
    without = _without(grid, rules, where)
    lines = [f"{name} {shape}" for name, shape in anonymous(without).items()]
    if without:
        raise MappingError(
            f"no rule fits {len(without):,} of the tensors",
            where=rules.where,
            why=f"with the shapes that they have on each rank: {listed(lines, SHOWN)}",
            hint=_ADVICE,
        )


def _built_in_fits(grid: Grid, where: str) -> bool:
    try:
        return not _without(grid, built_in(), where)
    except CkptError:
        return False


def _without(grid: Grid, rules: Rules, where: str) -> dict[str, object]:
    """Return the tensors without a rule, each with its shape on one rank."""
    names = Names(grid, rules, where)
    found: dict[str, object] = {}
    for chunk, keys in names.chunks.items():
        for key in keys:
            name, _ = names.whole(chunk, key, 0)
            if rules.find(name) is None:
                held = grid.held(chunk, key).values()
                found[name] = next(list(one.tensor.shape) for one in held if one is not None)
    return found
