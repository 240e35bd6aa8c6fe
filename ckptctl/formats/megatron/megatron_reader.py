"""Read Megatron-LM's legacy checkpoints, joining tensors according to rules.

The rules are checked against the files: replicated tensors must be equal on all ranks, shapes must
agree, and the sizes of divided dimensions must add up to those in the arguments.

Each rank numbers its layers and experts from 0. Joined names have the numbers in the complete
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
    format_option,
    quote_names,
)
from ckptctl.facts import MEGATRON
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.megatron.grid import Grid, GridPosition, read_grid
from ckptctl.formats.megatron.megatron_folder import (
    MODEL_KEY,
    OPTIMIZER_FILE,
    POINTER_FILE,
    LocalTensor,
    find_evidence,
    format_folder_name,
    is_model_key,
)
from ckptctl.formats.megatron.rules import (
    BUILT_IN_RULES_NAME,
    GATED,
    DivisionRule,
    Rules,
    TensorDivision,
    divide_tensor,
    get_second_layer_name,
    load_built_in_rules,
    load_rules,
)
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.joined_tensors import (
    JoinedTensor,
    make_standalone_entry,
    make_tensor_entries,
    slice_extent,
)
from ckptctl.formats.shared.leaves import join_path, list_unknown_class_notes
from ckptctl.formats.shared.replicas import CopyComparison
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, make_extent
from ckptctl.formats.shared.tags import find_tag_folder
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.storage.compare import have_same_elements
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.schema import wrap_malformed_errors
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_SKIPPED_KEYS = {
    "optimizer": "its state does not contain parameter names",
    "rng_state": "it differs between ranks",
    "rerun_state_machine": "it differs between ranks",
}


def read_catalog(path: TreePath, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = find_tag_folder(path, options.tag, POINTER_FILE, find_evidence, format_folder_name)
    rules = load_rules(options.rules) if options.rules else None
    faults = FaultCollector(path, options.partial)
    with source_files(path) as files:
        grid = read_grid(files, folder, faults)
        joiner = ModelJoiner(files, grid, rules, str(path / folder))
        other_leaves, first = Leaves(), grid.first_state  # the iteration, the scheduler, ...
        values = first.content.items()
        rest = {k: value for k, value in values if not is_model_key(k) and k not in _SKIPPED_KEYS}
        other_leaves.add_object(rest, (), first.file, str(path / first.file))
        sizes = {state.file: files.size(state.file) for state in grid.states.values()}
    weight_files = {folder, POINTER_FILE, *(file.split("/")[0] for file in grid.files.values())}
    sidecars = scan_sidecar_files(path, weight_files)
    return replace(
        sidecars.start_catalog(path, name),
        files=sizes,
        tensors={**make_tensor_entries(joiner.joined_tensors), **other_leaves.tensors},
        blobs=other_leaves.blobs,
        extensions={MEGATRON: {first.file: first.arguments}} if first.arguments else {},
        notes=(
            *_list_notes(grid, joiner, path),
            *other_leaves.notes,
            *list_unknown_class_notes(other_leaves.blobs.values()),
        ),
        replicas={
            name: tuple(tensor.copies)
            for name, tensor in joiner.joined_tensors.items()
            if tensor.copies and options.replicas
        },
        findings=tuple(faults.findings),
        lost=joiner.lost,
    )


def _list_notes(grid: Grid, model: ModelJoiner, root: TreePath) -> Iterator[str]:
    first = grid.first_state
    if not first.has_checksums:
        yield NO_CHECKSUMS
    for key, reason in _SKIPPED_KEYS.items():
        if first.content.get(key) is not None:
            yield f"skipped `{key}`: {reason}"
    if any((root / file).with_name(OPTIMIZER_FILE).is_file() for file in grid.files.values()):
        yield f"skipped `{OPTIMIZER_FILE}`: flat buffers without parameter names"
    if any(state.has_extra_state for state in grid.states.values()):
        yield "skipped `_extra_state` of layers: it does not contain model tensors"
    yield from model.comparison.list_notes()


_REPLICATED_RULE = DivisionRule((), None)


class ModelJoiner:
    """Joiner of the tensors of all ranks into the complete model.

    *rules* must not be None if the save has several ranks.

    Attributes:
        joined_tensors: Tensors of the complete model by name, without chunks in unreadable files.
        comparison: Comparison of tensors that several ranks store.
    """

    def __init__(self, files: SourceFiles, grid: Grid, rules: Rules | None, where: str) -> None:
        if len(grid.files) > 1:
            require_rules(grid, rules, where)
        self.grid, self.where = grid, where
        self.names = GlobalNameMapping(grid, rules or Rules(where), where)
        self.comparison = CopyComparison(files)
        self.joined_tensors: dict[str, JoinedTensor] = {}
        self._lost: dict[str, dict[Box, str]] = {}
        # Checksums of the data that only one rank has: parts of divided tensors, and experts. Only
        # parts on the first expert-parallel ranks count, since all others have the same.
        self._divided_checksums: dict[GridPosition, list[int | None]] = {}
        self._expert_checksums: dict[GridPosition, list[int | None]] = {}
        for chunk, keys in self.names.names_by_stage.items():
            for key in keys:
                self._add_tensor(chunk, key)
        self._refuse_copied_files()

    def _add_tensor(self, chunk: VirtualStage, key: str) -> None:
        """Join the tensor *key* of all ranks. Each expert-parallel rank has a different expert."""
        tensors_by_position = self.grid.get_tensors_by_position(chunk, key)
        template = self._require_equal_tensors(key, tensors_by_position)
        for rank in range(self.grid.sizes.expert):
            name, is_expert = self.names.to_global_name(chunk, key, rank)
            is_single_rank = len(self.grid.files) == 1
            rule = (
                _REPLICATED_RULE
                if is_single_rank
                else self.names.rules.find_rule(name) or _REPLICATED_RULE
            )
            division = self._make_division(rule, chunk, key, template.tensor)
            expected_size = self.grid.first_state.find_argument(rule.size) if rule.size else None
            if rule.dim is not None and expected_size not in (None, division.shape[rule.dim]):
                raise self._disagreement_error(
                    name,
                    f"dimension {rule.dim} adds up to {division.shape[rule.dim]:,}, but "
                    f"`{rule.size}` is {expected_size:,}",
                )
            own_tensors = {
                place: local_tensor
                for place, local_tensor in tensors_by_position.items()
                if place.expert == rank
            }
            self._join_tensor(
                name,
                division,
                template,
                own_tensors if is_expert else tensors_by_position,
                is_expert,
            )
            if not is_expert:
                return

    def _require_equal_tensors(
        self, key: str, tensors_by_position: Mapping[GridPosition, LocalTensor | None]
    ) -> LocalTensor:
        """Check that all ranks have the tensor *key* with equal dtype and shape, and return one."""
        place, template = next(
            (p, candidate) for p, candidate in tensors_by_position.items() if candidate is not None
        )
        file, tensor = self.grid.files[place], template.tensor
        for other_place in (
            other_place for other_place in tensors_by_position if other_place in self.grid.states
        ):
            local = tensors_by_position[other_place]
            if local is None:
                raise self._disagreement_error(
                    key, f"`{file}` contains it, but `{self.grid.files[other_place]}` does not"
                )
            if (local.tensor.dtype, local.tensor.shape) != (tensor.dtype, tensor.shape):
                raise self._disagreement_error(
                    key,
                    f"it is {tensor.dtype} {list(tensor.shape)} in `{file}`, {local.tensor.dtype} "
                    f"{list(local.tensor.shape)} in `{self.grid.files[other_place]}`",
                )
        return template

    def _make_division(
        self, rule: DivisionRule, chunk: VirtualStage, key: str, template: StoredTensor
    ) -> TensorDivision:
        partner_shape = None
        if rule.parts == GATED and get_second_layer_name(key) in self.names.names_by_stage[chunk]:
            partners = self.grid.get_tensors_by_position(chunk, get_second_layer_name(key)).values()
            partner_shape = next(
                partner.tensor.shape for partner in partners if partner is not None
            )
        swiglu = self.grid.first_state.arguments.get("swiglu") is True
        ranks = self.grid.sizes.tensor
        message = f"the rule for `{key}` does not match the tensor"
        with wrap_malformed_errors(message, "--rules", error=MappingError):
            return divide_tensor(key, template.shape, rule, ranks, partner_shape, swiglu=swiglu)

    def _join_tensor(
        self,
        name: str,
        division: TensorDivision,
        template: LocalTensor,
        tensors_by_position: Mapping[GridPosition, LocalTensor | None],
        is_expert: bool,
    ) -> None:
        path = (MODEL_KEY, *(template.path if join_path(template.path) == name else (name,)))
        key, dtype, shape = join_path(path), template.tensor.dtype, division.shape
        file, grad = self.grid.first_state.file, template.tensor.requires_grad
        tensor = self.joined_tensors.setdefault(key, JoinedTensor(dtype, shape, path, file, grad))
        if (tensor.dtype, tensor.shape) != (dtype, shape):  # embeddings, in two pipeline stages
            raise UnsupportedError(
                f"two pipeline stages disagree on `{key}`",
                where=self.where,
                why=f"it is {tensor.dtype} {list(tensor.shape)} in one, "
                f"{dtype} {list(shape)} in the other",
            )
        divided = division.dim is not None
        for place, local in tensors_by_position.items():
            file = self.grid.files[place]
            for box, start in division.iterate_pieces(place.tensor):
                if local is None:
                    self._lost.setdefault(key, {}).setdefault(box, file)
                    continue
                extent = make_extent(local.tensor, file, box)
                extent = slice_extent(extent, dtype, local.tensor.shape, start, box)
                earlier = tensor.add_extent(extent)
                if earlier is not None:
                    self._require_equal_copies(key, dtype, earlier, extent, by_rule=not divided)
            if local is not None and is_expert:
                self._expert_checksums.setdefault(place, []).append(local.tensor.crc32)
            elif local is not None and divided and place.expert == 0:
                self._divided_checksums.setdefault(place, []).append(local.tensor.crc32)

    def _require_equal_copies(
        self, name: str, dtype: str, first_extent: Extent, second_extent: Extent, *, by_rule: bool
    ) -> None:
        """Raise if two extents that should be copies have different values.

        If only a rule states that they are copies (*by_rule*), the values are always compared.
        Otherwise, recorded checksums are compared, or the values if they are small.
        """
        first, second = (
            make_standalone_entry(name, dtype, extent) for extent in (first_extent, second_extent)
        )
        same = (
            have_same_elements(self.comparison.files, first, second, of_any_size=True)
            if by_rule
            else self.comparison.is_same(first, second, name)
        )
        if not same:
            raise UnsupportedError(
                f"the copies of `{name}` differ",
                where=self.where,
                why=("according to the rules, every rank has a copy; " if by_rule else "")
                + f"{first_extent.box} differs between `{first_extent.file}` "
                f"and `{second_extent.file}`",
                hint="check for files of different saves, a damaged file, or a wrong rule",
            )

    def _refuse_copied_files(self) -> None:
        """Raise if two ranks have equal checksums for all divided tensors or all experts."""
        for checksums_by_place in (self._divided_checksums, self._expert_checksums):
            seen: dict[tuple[int | None, ...], GridPosition] = {}
            for place, checksums in checksums_by_place.items():
                twin = seen.setdefault(tuple(checksums), place)
                if twin != place and None not in checksums:
                    raise UnsupportedError(
                        f"`{self.grid.files[place]}` records the same checksums as "
                        f"`{self.grid.files[twin]}`",
                        where=self.where,
                        why="the checksums of all divided tensors are equal",
                        hint="restore the file that was overwritten by a copy of the other",
                    )

    @property
    def lost(self) -> dict[str, tuple[tuple[Box, str], ...]]:
        """``(box, file)`` of each chunk that only unreadable files contain, by tensor name."""
        lost = {
            name: tuple(
                pair for pair in boxes.items() if pair[0] not in self.joined_tensors[name].extents
            )
            for name, boxes in self._lost.items()
        }
        return {name: pairs for name, pairs in lost.items() if pairs}

    def _disagreement_error(self, name: str, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"the ranks disagree on `{name}`",
            where=self.where,
            why=why,
            hint="check for files of different saves, or a wrong rule",
        )


_RULES_ADVICE = "write a rules file (see docs/how-to/megatron.md)"
MAX_SHOWN_SHAPES = 20
VirtualStage = tuple[int, int]
"""``(virtual stage, pipeline stage)``, which sorts in the order of the model's layers."""


class GlobalNameMapping:
    """Mapping from tensor names on one rank to tensor names in the complete model.

    Attributes:
        names_by_stage: Tensor names in the files of each virtual stage, in the order of the model.
    """

    def __init__(self, grid: Grid, rules: Rules, where: str) -> None:
        self.grid, self.rules, self.where = grid, rules, where
        self.names_by_stage: dict[VirtualStage, tuple[str, ...]] = dict(
            sorted(self._group_names_by_stage().items())
        )
        self.expert_counts: dict[tuple[VirtualStage, str, str], int] = {}
        self.first_layers: dict[tuple[VirtualStage, str], int] = {}
        for container, argument in rules.layers.items():
            self._count_layers(container, argument)
        for chunk in self.names_by_stage:
            self._count_experts(chunk)

    def _group_names_by_stage(self) -> dict[VirtualStage, tuple[str, ...]]:
        first = self.grid.first_state
        parts = len(first.model_chunks)
        argument_count = first.find_argument("virtual_pipeline_model_parallel_size")
        other_state = next(
            (s for s in self.grid.states.values() if len(s.model_chunks) != parts), None
        )
        if other_state is not None or (argument_count is not None and argument_count != parts):
            raise UnsupportedError(
                "the ranks disagree on the number of virtual pipeline stages",
                where=self.where,
                why=f"`{first.file}` has {parts}, "
                + (
                    f"`{other_state.file}` has {len(other_state.model_chunks)}"
                    if other_state
                    else f"its arguments specify {argument_count}"
                ),
            )
        names_by_stage: dict[VirtualStage, dict[str, None]] = {}
        for place, state in self.grid.states.items():
            for virtual, chunk in enumerate(state.model_chunks):
                names_by_stage.setdefault((virtual, place.pipeline), {}).update(
                    dict.fromkeys(chunk)
                )
        return {chunk: tuple(names) for chunk, names in names_by_stage.items()}

    def _count_layers(self, container: str, argument: str) -> None:
        total = 0
        order = product(
            range(len(self.grid.first_state.model_chunks)), range(self.grid.sizes.pipeline)
        )
        lost: VirtualStage | None = None
        for chunk in order:
            names = self.names_by_stage.get(chunk)
            if names is None:
                lost = chunk
                continue
            prefix = f"{container}."
            layer_names = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
            numbers = {_parse_number(name.partition(".")[0]) for name in layer_names}
            self._require_contiguous_numbers(numbers, prefix)
            if lost and numbers:
                raise UnsupportedError(
                    "the number of layers is unknown",
                    where=self.where,
                    why=f"all files of pipeline stage {lost[1]} are missing, and only they record "
                    "its number of layers",
                )
            self.first_layers[chunk, container] = total
            total += len(numbers)
        expected_total = self.grid.first_state.find_argument(argument)
        if total and not lost and expected_total is not None and expected_total != total:
            raise UnsupportedError(
                "layers are missing, or there are too many",
                where=self.where,
                why=f"`{container}` has {pluralize(total, 'layer')}, but the argument `{argument}` "
                f"is {expected_total:,}",
            )

    def _count_experts(self, chunk: VirtualStage) -> None:
        groups: dict[tuple[str, str], set[int]] = {}
        for name in self.names_by_stage[chunk]:
            match = self.rules.match_expert_number(name)
            if match:
                key = (name[: match.start(1)], name[match.end(1) :])
                groups.setdefault(key, set()).add(_parse_number(match[1]))
        first, ranks = self.grid.first_state, self.grid.sizes.expert
        expected_count = first.find_argument(self.rules.experts_count or "")
        for (prefix, suffix), numbers in groups.items():
            self._require_contiguous_numbers(numbers, prefix)
            self.expert_counts[chunk, prefix, suffix] = len(numbers)
            if expected_count is not None and expected_count != len(numbers) * ranks:
                raise UnsupportedError(
                    "experts are missing, or there are too many",
                    where=self.where,
                    why=f"`{prefix}*{suffix}` has {pluralize(len(numbers), 'expert')} on each of "
                    f"{pluralize(ranks, 'rank')}, but the argument `{self.rules.experts_count}` is "
                    f"{expected_count:,}",
                )
        sizes, experts = self.grid.sizes, first.find_argument("expert_tensor_parallel_size")
        if groups and experts not in (None, sizes.tensor):
            raise FormatError(
                "experts are divided among a different number of ranks than the other layers",
                where=self.where,
                why=f"expert_tensor_parallel_size is {experts}, tensor_model_parallel_size "
                f"{sizes.tensor}; folder names do not show which part a rank has",
                hint="save it as `torch_dist` with Megatron",
            )

    def to_global_name(self, chunk: VirtualStage, name: str, expert_rank: int) -> tuple[str, bool]:
        """Return the tensor name in the complete model, and whether it has an expert number."""
        match = self.rules.match_expert_number(name)
        if match:
            prefix, suffix = name[: match.start(1)], name[match.end(1) :]
            number = expert_rank * self.expert_counts[chunk, prefix, suffix] + _parse_number(
                match[1]
            )
            name = f"{prefix}{number}{suffix}"
        container = next(
            (candidate for candidate in self.rules.layers if name.startswith(f"{candidate}.")), None
        )
        if container is not None:
            digits, dot, rest = name[len(container) + 1 :].partition(".")
            number = self.first_layers[chunk, container] + _parse_number(digits)
            name = f"{container}.{number}{dot}{rest}"
        return name, match is not None

    def _require_contiguous_numbers(self, numbers: Iterable[int], prefix: str) -> None:
        unique_numbers = set(numbers)
        if unique_numbers and max(unique_numbers) != len(unique_numbers) - 1:
            missing = next(n for n in range(len(unique_numbers)) if n not in unique_numbers)
            raise UnsupportedError(
                "the layer or expert numbers of a rank have a gap",
                where=self.where,
                why=f"`{prefix}{missing}` is missing, but `{prefix}{max(unique_numbers)}` exists",
            )


def _parse_number(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise UnsupportedError(f"`{digits[:40]}` is not a valid layer or expert number")
    return int(digits)


def require_rules(grid: Grid, rules: Rules | None, where: str) -> None:
    """Raise unless *rules* has a rule for every tensor."""
    if rules is None:
        try:
            has_built_in_rules = not _find_tensors_without_rule(grid, load_built_in_rules(), where)
        except CkptError:
            has_built_in_rules = False
        raise MappingError(
            "the division of tensors among ranks is not recorded",
            where=where,
            why=f"found files of {pluralize(len(grid.files), 'rank')}",
            hint=f"pass {format_option(f'--rules {BUILT_IN_RULES_NAME}')}, which has a rule "
            "for every tensor"
            if has_built_in_rules
            else _RULES_ADVICE,
        )
    unmatched = _find_tensors_without_rule(grid, rules, where)
    if unmatched:
        shapes_by_pattern: dict[str, object] = {}  # with `*` for every number between dots
        for name, shape in unmatched.items():
            parts = ("*" if part.isdecimal() else part for part in name.split("."))
            shapes_by_pattern.setdefault(".".join(parts), shape)
        lines = [f"{name} {shape}" for name, shape in shapes_by_pattern.items()]
        raise MappingError(
            f"no rule matches {pluralize(len(unmatched), 'tensor')}",
            where=rules.where,
            why=f"with the shapes on each rank: {quote_names(lines, MAX_SHOWN_SHAPES)}",
            hint=_RULES_ADVICE,
        )


def _find_tensors_without_rule(grid: Grid, rules: Rules, where: str) -> dict[str, object]:
    """Map the names of tensors that no rule matches to their shapes on one rank."""
    names = GlobalNameMapping(grid, rules, where)
    unmatched: dict[str, object] = {}
    for chunk, keys in names.names_by_stage.items():
        for key in keys:
            name, _ = names.to_global_name(chunk, key, 0)
            if rules.find_rule(name) is None:
                tensors = grid.get_tensors_by_position(chunk, key).values()
                unmatched[name] = next(
                    list(local_tensor.tensor.shape)
                    for local_tensor in tensors
                    if local_tensor is not None
                )
    return unmatched
