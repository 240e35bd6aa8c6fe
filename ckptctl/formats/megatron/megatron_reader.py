"""Read Megatron-LM's legacy checkpoints, joining tensors according to rules.

The rules are checked against the files: replicated tensors must be equal on all ranks, shapes must
agree, and the sizes of divided dimensions must add up to those in the arguments.

Each rank numbers its layers and experts from 0; joined names have the numbers in the complete
model. Source: ``get_transformer_layer_offset`` in
``megatron/core/transformer/transformer_layer.py``. The first virtual stages of all pipeline stages
come first, then the second ones, and so on. The first layer of a virtual stage follows the last one
of the stage before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from ckptctl.catalog import Box, Catalog, Extent
from ckptctl.errors import (
    CkptError,
    FormatError,
    MappingError,
    UnsupportedError,
    quote_names,
    spell_option,
)
from ckptctl.facts.megatron_words import FIELD_BY_ARGUMENT
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.megatron.grid import Grid, GridPosition, read_grid
from ckptctl.formats.megatron.megatron_folder import (
    MODEL_KEY,
    OPTIMIZER,
    POINTER,
    LocalTensor,
    evidence,
    folder_named,
    is_model,
)
from ckptctl.formats.megatron.rules import (
    BUILT_IN,
    GATED,
    Division,
    DivisionRule,
    Rules,
    built_in,
    divide,
    load,
    partner_of,
)
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    part_extent,
    separate_entry,
    tensor_entries,
)
from ckptctl.formats.shared.leaves import join, unknown_notes
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, extent_of
from ckptctl.formats.shared.tags import tag_folder
from ckptctl.formats.sidecar_files import beside
from ckptctl.planner.families.facts import TRAINING_ARGUMENT_FACTS
from ckptctl.storage.compare import have_same_elements
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.schema import malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_ROTARY = "rope"
_LEFT_OUT = {
    "optimizer": "its state does not contain parameter names",
    "rng_state": "it differs between ranks",
    "rerun_state_machine": "it differs between ranks",
}


def read(path: TreePath, asked: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = tag_folder(path, asked.tag, POINTER, evidence, folder_named)
    rules = load(asked.rules) if asked.rules else None
    faults = Faults(path, asked.partial)
    with source_files(path) as files:
        grid = read_grid(files, folder, faults)
        model = JoinedModel(files, grid, rules, str(path / folder))
        others, first = Leaves(), grid.first  # the iteration, the scheduler, ...
        values = first.content.items()
        rest = {k: value for k, value in values if not is_model(k) and k not in _LEFT_OUT}
        others.add(rest, (), first.file, str(path / first.file))
        sizes = {state.file: files.size(state.file) for state in grid.states.values()}
    facts = dict(_facts(grid.first.arguments))
    own = {folder, POINTER, *(file.split("/")[0] for file in grid.files.values())}
    around = beside(path, own)
    return replace(
        around.catalog(path, name),
        files=sizes,
        tensors={**tensor_entries(model.joined), **others.tensors},
        blobs=others.blobs,
        stated={f"the trainer's arguments in {path}": facts} if facts else {},
        notes=(
            *_notes(grid, model, path),
            *others.notes,
            *unknown_notes(others.blobs.values()),
        ),
        replicas={
            name: tuple(tensor.copies)
            for name, tensor in model.joined.items()
            if tensor.copies and asked.replicas
        },
        findings=tuple(faults.findings),
        lost=model.lost,
    )


def _notes(grid: Grid, model: JoinedModel, root: TreePath) -> Iterator[str]:
    first = grid.first
    if not first.checksums:
        yield NO_CHECKSUMS
    for key, reason in _LEFT_OUT.items():
        if first.content.get(key) is not None:
            yield f"skipped `{key}`: {reason}"
    if any((root / file).with_name(OPTIMIZER).is_file() for file in grid.files.values()):
        yield f"skipped `{OPTIMIZER}`: flat buffers without parameter names"
    if any(state.extra for state in grid.states.values()):
        yield "skipped `_extra_state` of layers: it does not contain model tensors"
    yield from model.compared.notes()


def _facts(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the model facts in *arguments*, by their names in config.json."""
    rotary = arguments.get("position_embedding_type") == _ROTARY
    called = {field: name for name, field in FIELD_BY_ARGUMENT.items()}
    for fact in TRAINING_ARGUMENT_FACTS:
        value = arguments.get(called.get(fact.megatron, fact.megatron))
        if isinstance(value, (int, float)) and (rotary or fact.megatron != "rotary_base"):
            yield fact.config, value
    heads = arguments.get("num_query_groups")
    if arguments.get("group_query_attention") is True and isinstance(heads, int):
        yield "num_key_value_heads", heads
    untied = arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        yield "tie_word_embeddings", not untied


_WHOLE = DivisionRule((), None)


class JoinedModel:
    """The complete model, for which several ranks need *rules*.

    Attributes:
        joined: Tensors by name, with holes if a rank's file is unreadable.
        compared: Comparison of copies.
    """

    def __init__(self, files: SourceFiles, grid: Grid, rules: Rules | None, where: str) -> None:
        if len(grid.files) > 1:
            require_rules(grid, rules, where)
        self.grid, self.where = grid, where
        self.names = Names(grid, rules or Rules(where), where)
        self.compared = CopyComparison(files)
        self.joined: dict[str, JoinedTensor] = {}
        self._lost: dict[str, dict[Box, str]] = {}
        # Checksums of data that only one rank has: its parts of tensors and its experts. Parts are
        # those of the first expert-parallel ranks, as the others have the same.
        self._divided: dict[GridPosition, list[int | None]] = {}
        self._experts: dict[GridPosition, list[int | None]] = {}
        for chunk, keys in self.names.chunks.items():
            for key in keys:
                self._add(chunk, key)
        self._refuse_copied_files()

    def _add(self, chunk: VirtualStage, key: str) -> None:
        """Add a tensor, or one tensor for each expert-parallel rank."""
        held = self.grid.held(chunk, key)
        like = self._require_alike(key, held)
        for rank in range(self.grid.sizes.expert):
            name, is_expert = self.names.whole(chunk, key, rank)
            alone = len(self.grid.files) == 1
            rule = _WHOLE if alone else self.names.rules.find(name) or _WHOLE
            division = self._division(rule, chunk, key, like.tensor)
            said = self.grid.first.argument(rule.size) if rule.size else None
            if rule.dim is not None and said not in (None, division.shape[rule.dim]):
                raise self._wrong(
                    name,
                    f"dimension {rule.dim} adds up to {division.shape[rule.dim]:,}, but "
                    f"`{rule.size}` is {said:,}",
                )
            mine = {place: one for place, one in held.items() if place.expert == rank}
            self._join(name, division, like, mine if is_expert else held, is_expert)
            if not is_expert:
                return

    def _require_alike(
        self, key: str, held: Mapping[GridPosition, LocalTensor | None]
    ) -> LocalTensor:
        """Return one rank's tensor, or raise if another rank's is missing or different."""
        place, like = next((p, one) for p, one in held.items() if one is not None)
        file, known = self.grid.files[place], like.tensor
        for other in (other for other in held if other in self.grid.states):
            local = held[other]
            if local is None:
                raise self._wrong(
                    key, f"`{file}` contains it, but `{self.grid.files[other]}` does not"
                )
            if (local.tensor.dtype, local.tensor.shape) != (known.dtype, known.shape):
                raise self._wrong(
                    key,
                    f"it is {known.dtype} {list(known.shape)} in `{file}`, {local.tensor.dtype} "
                    f"{list(local.tensor.shape)} in `{self.grid.files[other]}`",
                )
        return like

    def _division(
        self, rule: DivisionRule, chunk: VirtualStage, key: str, like: StoredTensor
    ) -> Division:
        second = None
        if rule.parts == GATED and partner_of(key) in self.names.chunks[chunk]:
            partners = self.grid.held(chunk, partner_of(key)).values()
            second = next(one.tensor.shape for one in partners if one is not None)
        swiglu = self.grid.first.arguments.get("swiglu") is True
        ranks = self.grid.sizes.tensor
        what = f"the rule for `{key}` does not match the tensor"
        with malformed_errors(what, "--rules", error=MappingError):
            return divide(key, like.shape, rule, ranks, second, swiglu=swiglu)

    def _join(
        self,
        name: str,
        division: Division,
        like: LocalTensor,
        held: Mapping[GridPosition, LocalTensor | None],
        is_expert: bool,
    ) -> None:
        path = (MODEL_KEY, *(like.path if join(like.path) == name else (name,)))
        key, dtype, shape = join(path), like.tensor.dtype, division.shape
        file, grad = self.grid.first.file, like.tensor.requires_grad
        tensor = self.joined.setdefault(key, JoinedTensor(dtype, shape, path, file, grad))
        if (tensor.dtype, tensor.shape) != (dtype, shape):  # embeddings, in two pipeline stages
            raise UnsupportedError(
                f"two pipeline stages disagree on `{key}`",
                where=self.where,
                why=f"it is {tensor.dtype} {list(tensor.shape)} in one, "
                f"{dtype} {list(shape)} in the other",
            )
        divided = division.dim is not None
        for place, local in held.items():
            file = self.grid.files[place]
            for box, start in division.pieces(place.tensor):
                if local is None:
                    self._lost.setdefault(key, {}).setdefault(box, file)
                    continue
                extent = extent_of(local.tensor, file, box)
                extent = part_extent(extent, dtype, local.tensor.shape, start, box)
                before = tensor.add(extent)
                if before is not None:
                    self._require_same(key, dtype, before, extent, claimed=not divided)
            if local is not None and is_expert:
                self._experts.setdefault(place, []).append(local.tensor.crc32)
            elif local is not None and divided and place.expert == 0:
                self._divided.setdefault(place, []).append(local.tensor.crc32)

    def _require_same(
        self, name: str, dtype: str, one: Extent, other: Extent, *, claimed: bool
    ) -> None:
        """Raise if two extents have different values.

        If only a rule *claimed* that they are copies, they are always read. Otherwise, recorded
        checksums are compared, and copies without any are read if they are small.
        """
        first, second = (separate_entry(name, dtype, extent) for extent in (one, other))
        same = (
            have_same_elements(self.compared.files, first, second, of_any_size=True)
            if claimed
            else self.compared.is_same(first, second, name)
        )
        if not same:
            raise UnsupportedError(
                f"the copies of `{name}` differ",
                where=self.where,
                why=("according to the rules, every rank has a copy; " if claimed else "")
                + f"{one.box} differs between `{one.file}` "
                f"and `{other.file}`",
                hint="check for files of different saves, a damaged file, or a wrong rule",
            )

    def _refuse_copied_files(self) -> None:
        """Raise if the parts in two files are all equal, so one file is a copy."""
        for held in (self._divided, self._experts):
            seen: dict[tuple[int | None, ...], GridPosition] = {}
            for place, checksums in held.items():
                other = seen.setdefault(tuple(checksums), place)
                if other != place and None not in checksums:
                    raise UnsupportedError(
                        f"`{self.grid.files[place]}` records the same checksums as "
                        f"`{self.grid.files[other]}`",
                        where=self.where,
                        why="the checksums of all divided tensors are equal",
                        hint="restore the file that was overwritten by a copy of the other",
                    )

    @property
    def lost(self) -> dict[str, tuple[tuple[Box, str], ...]]:
        """Boxes of each tensor that are only in unreadable files."""
        lost = {
            name: tuple(pair for pair in boxes.items() if pair[0] not in self.joined[name].extents)
            for name, boxes in self._lost.items()
        }
        return {name: pairs for name, pairs in lost.items() if pairs}

    def _wrong(self, name: str, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"the ranks disagree on `{name}`",
            where=self.where,
            why=why,
            hint="check for files of different saves, or a wrong rule",
        )


_ADVICE = "write a rules file (see docs/how-to/megatron.md)"
SHOWN = 20
VirtualStage = tuple[int, int]
"""Numbers of a virtual stage and a pipeline stage, which sort in the order of the model."""


class Names:
    """Mapping of the ranks' tensor names to those of the complete model.

    Attributes:
        chunks: Local tensor names of each virtual stage, in the order of the model.
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
            raise UnsupportedError(
                "the ranks disagree on the number of virtual pipeline stages",
                where=self.where,
                why=f"`{first.file}` has {parts}, "
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
            prefix = f"{container}."
            inside = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
            numbers = {_number(name.partition(".")[0]) for name in inside}
            self._require_from_zero(numbers, prefix)
            if lost and numbers:
                raise UnsupportedError(
                    "the number of layers is unknown",
                    where=self.where,
                    why=f"all files of pipeline stage {lost[1]} are missing, and only they record "
                    "its number of layers",
                )
            self.first[chunk, container] = total
            total += len(numbers)
        said = self.grid.first.argument(argument)
        if total and not lost and said is not None and said != total:
            raise UnsupportedError(
                "layers are missing, or there are too many",
                where=self.where,
                why=f"`{container}` has {pluralize(total, 'layer')}, but the argument `{argument}` "
                f"is {said:,}",
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
                raise UnsupportedError(
                    "experts are missing, or there are too many",
                    where=self.where,
                    why=f"`{before}*{after}` has {pluralize(len(numbers), 'expert')} on each of "
                    f"{pluralize(ranks, 'rank')}, but the argument `{self.rules.experts_count}` is "
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
        """Return a tensor's name in the complete model, and whether an expert number is in it."""
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
            raise UnsupportedError(
                "the layer or expert numbers of a rank have a gap",
                where=self.where,
                why=f"`{what}{missing}` is missing, but `{what}{max(found)}` exists",
            )


def _number(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise UnsupportedError(f"`{digits[:40]}` is not a valid layer or expert number")
    return int(digits)


def require_rules(grid: Grid, rules: Rules | None, where: str) -> None:
    """Raise unless there is a rule for every tensor, to join the files of several ranks."""
    if rules is None:
        try:
            fits = not _without(grid, built_in(), where)
        except CkptError:
            fits = False
        raise MappingError(
            "the division of tensors among ranks is not recorded",
            where=where,
            why=f"found files of {pluralize(len(grid.files), 'rank')}",
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
            f"no rule matches {pluralize(len(without), 'tensor')}",
            where=rules.where,
            why=f"with the shapes on each rank: {quote_names(lines, SHOWN)}",
            hint=_ADVICE,
        )


def _without(grid: Grid, rules: Rules, where: str) -> dict[str, object]:
    """Return the tensors without a rule, with their shapes on one rank."""
    names = Names(grid, rules, where)
    found: dict[str, object] = {}
    for chunk, keys in names.chunks.items():
        for key in keys:
            name, _ = names.whole(chunk, key, 0)
            if rules.find(name) is None:
                held = grid.held(chunk, key).values()
                found[name] = next(list(one.tensor.shape) for one in held if one is not None)
    return found
