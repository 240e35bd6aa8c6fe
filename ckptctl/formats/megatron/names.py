"""Numbers of layers and experts in the whole model, which ranks count from 0 for themselves.

Source: ``get_transformer_layer_offset`` in ``megatron/core/transformer/transformer_layer.py``: the
first parts of all pipeline stages come first, then the second parts, ... (virtual stages); a part's
first layer follows the last one of the part before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from ckptctl.errors import (
    CkptError,
    FormatError,
    MappingError,
    UnsupportedError,
    listed,
    spell_option,
)
from ckptctl.formats.megatron.grid import Grid
from ckptctl.formats.megatron.rules import BUILT_IN, Rules, built_in
from ckptctl.units import counted

_ADVICE = "write a rules file (see docs/how-to/megatron.md)"
SHOWN = 20
VirtualStage = tuple[int, int]
"""A virtual stage and a pipeline stage; chunks sort as the model computes them."""


class Names:
    """Knows the names that ranks' tensors have in the whole model.

    Attributes:
        chunks: The names of each chunk's tensors on its ranks, in the order of the model.
    """

    def __init__(self, grid: Grid, rules: Rules, where: str) -> None:
        self.grid, self.rules, self.where = grid, rules, where
        self.chunks: dict[VirtualStage, tuple[str, ...]] = dict(sorted(self._chunks().items()))
        self.experts: dict[tuple[VirtualStage, str, str], int] = {}
        self.first: dict[tuple[VirtualStage, str], int] = {}
        for container, argument in rules.layers.items():
            self._count_layers(container, argument)
        for chunk in self.chunks:
            self._count_experts(chunk)

    def _chunks(self) -> dict[VirtualStage, tuple[str, ...]]:
        first = self.grid.first
        parts = len(first.chunks)
        said = first.argument("virtual_pipeline_model_parallel_size")
        odd = next((s for s in self.grid.states.values() if len(s.chunks) != parts), None)
        if odd is not None or (said is not None and said != parts):
            raise self._wrong(
                "the ranks disagree on the number of virtual pipeline stages",
                f"`{first.file}` has {parts}, "
                + (
                    f"`{odd.file}` has {len(odd.chunks)}"
                    if odd
                    else f"its arguments specify {said}"
                ),
            )
        found: dict[VirtualStage, dict[str, None]] = {}
        for place, state in self.grid.states.items():
            for virtual, chunk in enumerate(state.chunks):
                found.setdefault((virtual, place.pipeline), {}).update(dict.fromkeys(chunk))
        return {chunk: tuple(names) for chunk, names in found.items()}

    def _count_layers(self, container: str, argument: str) -> None:
        total = 0
        order = product(range(len(self.grid.first.chunks)), range(self.grid.sizes.pipeline))
        lost: VirtualStage | None = None
        for chunk in order:
            names = self.chunks.get(chunk)
            if names is None:
                lost = chunk
                continue
            numbers = _numbers(names, f"{container}.")
            self._require_from_zero(numbers, f"{container}.")
            if lost and numbers:
                raise self._wrong(
                    "the number of layers is unknown",
                    f"all files of pipeline stage {lost[1]} are missing, and only they record its "
                    "number of layers",
                )
            self.first[chunk, container] = total
            total += len(numbers)
        said = self.grid.first.argument(argument)
        if total and not lost and said is not None and said != total:
            raise self._wrong(
                "layers are missing, or there are too many",
                f"`{container}` has {counted(total, 'layer')}, but the argument `{argument}` is "
                f"{said:,}",
            )

    def _count_experts(self, chunk: VirtualStage) -> None:
        groups: dict[tuple[str, str], set[int]] = {}
        for name in self.chunks[chunk]:
            match = self.rules.expert(name)
            if match:
                key = (name[: match.start(1)], name[match.end(1) :])
                groups.setdefault(key, set()).add(_number(match[1]))
        first, ranks = self.grid.first, self.grid.sizes.expert
        said = first.argument(self.rules.experts_count or "")
        for (before, after), numbers in groups.items():
            self._require_from_zero(numbers, before)
            self.experts[chunk, before, after] = len(numbers)
            if said is not None and said != len(numbers) * ranks:
                raise self._wrong(
                    "experts are missing, or there are too many",
                    f"`{before}*{after}` has {counted(len(numbers), 'expert')} on each of "
                    f"{counted(ranks, 'rank')}, but the argument `{self.rules.experts_count}` is "
                    f"{said:,}",
                )
        sizes, experts = self.grid.sizes, first.argument("expert_tensor_parallel_size")
        if groups and experts not in (None, sizes.tensor):
            raise FormatError(
                "experts are divided among a different number of ranks than the other layers",
                where=self.where,
                why=f"expert_tensor_parallel_size is {experts}, tensor_model_parallel_size "
                f"{sizes.tensor}; folder names do not show which part a rank has",
                hint="save it as `torch_dist` with Megatron",
            )

    def whole(self, chunk: VirtualStage, name: str, expert_rank: int) -> tuple[str, bool]:
        """Return a tensor's name in the whole model, and whether an expert's number is in it."""
        match = self.rules.expert(name)
        if match:
            before, after = name[: match.start(1)], name[match.end(1) :]
            number = expert_rank * self.experts[chunk, before, after] + _number(match[1])
            name = f"{before}{number}{after}"
        container = next((one for one in self.rules.layers if name.startswith(f"{one}.")), None)
        if container is not None:
            digits, dot, rest = name[len(container) + 1 :].partition(".")
            number = self.first[chunk, container] + _number(digits)
            name = f"{container}.{number}{dot}{rest}"
        return name, match is not None

    def _require_from_zero(self, numbers: Iterable[int], what: str) -> None:
        found = set(numbers)
        if found and max(found) != len(found) - 1:
            missing = next(n for n in range(len(found)) if n not in found)
            raise self._wrong(
                "the layer or expert numbers of a rank have a gap",
                f"`{what}{missing}` is missing, but `{what}{max(found)}` exists",
            )

    def _wrong(self, what: str, why: str) -> UnsupportedError:
        return UnsupportedError(what, where=self.where, why=why)


def _numbers(names: Iterable[str], prefix: str) -> set[int]:
    parts = (n[len(prefix) :].partition(".")[0] for n in names if n.startswith(prefix))
    return {_number(part) for part in parts}


def _number(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise UnsupportedError(f"`{digits[:40]}` is not a valid layer or expert number")
    return int(digits)


def require_rules(grid: Grid, rules: Rules | None, where: str) -> None:
    """Refuse to join the files of several ranks without a rule for every tensor."""
    if rules is None:
        try:
            fits = not _without(grid, built_in(), where)
        except CkptError:
            fits = False
        raise MappingError(
            "the division of tensors among ranks is not recorded",
            where=where,
            why=f"found files of {counted(len(grid.files), 'rank')}",
            hint=f"pass {spell_option(f'--rules {BUILT_IN}')}, which has a rule for every tensor"
            if fits
            else _ADVICE,
        )
    without = _without(grid, rules, where)
    if without:
        alike: dict[str, object] = {}  # with `*` for every number between dots
        for name, shape in without.items():
            parts = ("*" if part.isdecimal() else part for part in name.split("."))
            alike.setdefault(".".join(parts), shape)
        lines = [f"{name} {shape}" for name, shape in alike.items()]
        raise MappingError(
            f"no rule matches {counted(len(without), 'tensor')}",
            where=rules.where,
            why=f"with the shapes on each rank: {listed(lines, SHOWN)}",
            hint=_ADVICE,
        )


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
