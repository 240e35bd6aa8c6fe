"""Check the tensors of an adapter for contradictions, among them and with its PEFT config.

``merge`` raises the error of the first problem, and ``verify`` reports all of them as findings.
Only ``merge`` finds problems that depend on the base model, such as missing biases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ckptctl.adapters.grouped_factors import normalize_factors
from ckptctl.adapters.peft import (
    BASE_LAYERS,
    MERGEABLE_FIELDS,
    SAME_ADAPTER_HINT,
    TARGET_PARAMETERS,
    AdapterSettings,
    find_adapter_config,
    is_in_target_module,
    parse_adapter_settings,
    select_factors,
)
from ckptctl.adapters.target_modules import TargetSelection
from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import (
    CkptError,
    MissingTensorsError,
    RefusedError,
    UnsupportedError,
    quote_names,
)
from ckptctl.formats.peft import CONFIG
from ckptctl.formats.shared.findings import classify_severity
from ckptctl.planner.config_facts import Json
from ckptctl.planner.families.templates import get_skeleton
from ckptctl.planner.mapping.adapters import (
    PEFT_PREFIX,
    get_module_name,
    is_factor,
    list_factor_pairs,
    list_unpaired_factors,
)
from ckptctl.units import pluralize

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


class AdapterProblem(NamedTuple):
    """Contradiction in an adapter.

    Attributes:
        error: Error that ``merge`` raises.
        tensor: Name of the affected tensor, or an empty string if the config is affected.
    """

    error: CkptError
    tensor: str = ""

    def to_finding(self) -> Finding:
        """Build the finding that ``verify`` reports."""
        return Finding(
            self.error.what,
            self.error.why,
            classify_severity(self.error),
            None if self.tensor else CONFIG,
            self.tensor or None,
            basis="model",
        )


def check_stored_adapter(catalog: Catalog) -> tuple[list[Finding], list[str]]:
    """Check the adapter in *catalog* without its base model.

    Returns:
        Findings and notes.
    """
    config = find_adapter_config(catalog)
    if (config or {}).get("peft_type", "LORA") != "LORA":
        return [], []
    problems: list[AdapterProblem] = []
    notes: list[str] = []
    try:
        adapter = select_factors(normalize_factors(catalog))
        problems += iterate_pair_problems(adapter)
        adapter_settings = parse_adapter_settings(config, supported=MERGEABLE_FIELDS)
        problems += iterate_config_problems(adapter, config, adapter_settings)
        selection = parse_selection(config, notes)
        modules = map_factor_modules(adapter, config, catalog.tensors)
        problems += iterate_selection_problems(selection, modules, notes)
        notes += iterate_uneven_layer_notes(selection, modules)
    except UnsupportedError as error:
        problems.append(AdapterProblem(error))
    except CkptError as error:
        # PEFT supports adapters that `merge` does not.
        notes.append(f"the factors were not compared with {CONFIG}: {error.what}")
    return [problem.to_finding() for problem in problems], notes


def iterate_pair_problems(adapter: Catalog) -> Iterator[AdapterProblem]:
    """Yield problems with pairs of factors, which any LoRA adapter has."""
    error: CkptError
    unpaired_factors = list_unpaired_factors(adapter.tensors)
    if unpaired_factors:
        error = MissingTensorsError(
            f"{pluralize(len(unpaired_factors), 'layer has', 'layers have')} only one LoRA factor",
            where=f"tensor `{unpaired_factors[0]}`",
            why="an adapter changes a layer by the product of two factors",
        )
        yield AdapterProblem(error, unpaired_factors[0])
    for pair in list_factor_pairs(adapter.tensors):
        shapes = adapter.tensors[pair.rank_first].shape, adapter.tensors[pair.rank_last].shape
        if len(shapes[0]) != 2 or len(shapes[1]) != 2:
            continue
        ranks = shapes[0][0], shapes[1][1]
        if ranks[0] != ranks[1] or not ranks[0]:
            error = UnsupportedError(
                f"A has rank {ranks[0]}, B has rank {ranks[1]}",
                where=f"tensors `{pair.rank_first}` and `{pair.rank_last}`",
            )
            yield AdapterProblem(error, pair.rank_first)
            return


def iterate_config_problems(
    adapter: Catalog, config: Json | None, adapter_settings: AdapterSettings
) -> Iterator[AdapterProblem]:
    """Yield contradictions between the tensors of an adapter and its PEFT config."""
    pairs = list_factor_pairs(adapter.tensors)
    for pair in pairs:
        key, shape = pair.rank_first, adapter.tensors[pair.rank_first].shape
        # Factors of a parameter are those of all its experts.
        is_of_parameter = _is_in_parameter(get_module_name(key), config)
        error = None if is_of_parameter else adapter_settings.find_rank_error(key, shape[0])
        if error and len(shape) == 2:
            yield AdapterProblem(error, key)
            break
    with_magnitude = [pair.rank_last for pair in pairs if pair.magnitude in adapter.tensors]
    without_magnitude = [pair.rank_last for pair in pairs if pair.magnitude not in adapter.tensors]
    yield from _iterate_magnitude_problems(adapter_settings, with_magnitude, without_magnitude)
    modules_to_save = (config or {}).get("modules_to_save")
    if isinstance(modules_to_save, list) and modules_to_save:
        ends = tuple(map(str, modules_to_save))
        modules = (
            parent
            for name in adapter.tensors
            if not is_factor(name)
            for parent in accumulate(name.split(".")[:-1], "{}.{}".format)
        )
        if not any(module.endswith(ends) for module in modules):
            error = UnsupportedError(
                "the adapter is missing its fully trained modules",
                where=f"`modules_to_save` in {CONFIG}",
                why=f"it lists {modules_to_save!r}, but no tensor belongs to such a module",
                hint="remove `modules_to_save` there to keep the modules of the model",
            )
            yield AdapterProblem(error)


def _iterate_magnitude_problems(
    adapter_settings: AdapterSettings,
    with_magnitude: Sequence[str],
    without_magnitude: Sequence[str],
) -> Iterator[AdapterProblem]:
    """Yield the problem if DoRA magnitudes contradict the config, or only some modules have them.

    Args:
        adapter_settings: Settings of the adapter's config.
        with_magnitude: Names of factors whose modules have DoRA magnitudes.
        without_magnitude: Names of factors whose modules have no DoRA magnitudes.
    """
    if with_magnitude and adapter_settings.uses_dora is False:
        what = f"{CONFIG} states `use_dora: false`, but the adapter has magnitudes"
        tensor = with_magnitude[0]
    elif with_magnitude and without_magnitude:
        what, tensor = "only some modules have a magnitude", without_magnitude[0]
    elif without_magnitude and adapter_settings.uses_dora:
        what = f"{CONFIG} states `use_dora: true`, but the adapter has no magnitudes"
        tensor = without_magnitude[0]
    else:
        return
    error = UnsupportedError(what, where=f"tensor `{tensor}`", hint=SAME_ADAPTER_HINT)
    yield AdapterProblem(error, tensor)


# ----------------------------------------------------------------------- modules in the PEFT config


def parse_selection(config: Json | None, notes: list[str]) -> TargetSelection | None:
    """Parse the modules that a PEFT config selects, or return None if they are unknown.

    A regex that could take too long to match is added to *notes*.
    """
    try:
        return TargetSelection.parse(config or {})
    except RefusedError as error:
        notes.append(f"the factors were not compared with {error.where}: {error.what}")
        return None


def map_factor_modules(
    adapter: Catalog, config: Json | None, stored_names: Collection[str]
) -> dict[str, str]:
    """Map the modules whose factors PEFT would load to the name of a factor.

    Modules of ``target_parameters`` and of single experts are excluded, because PEFT selects them
    by other names on transformers 5. Factors that are not among *stored_names* are excluded too,
    because PEFT does not load the tensors that they are a part of.
    """
    factors = {
        BASE_LAYERS.sub("", get_module_name(name)): name
        for name in adapter.tensors
        if name.startswith(PEFT_PREFIX) and is_factor(name) and name in stored_names
    }
    return {
        module: name
        for module, name in factors.items()
        if not _SINGLE_EXPERT.search(module) and not _is_in_parameter(module, config)
    }


def _is_in_parameter(module: str, config: Json | None) -> bool:
    """Return whether a parameter that the PEFT config lists may be in *module*."""
    parameters = (config or {}).get(TARGET_PARAMETERS)
    module = BASE_LAYERS.sub("", module)
    return isinstance(parameters, list) and any(
        is_in_target_module(module, str(parameter)) for parameter in parameters
    )


def iterate_selection_problems(
    selection: TargetSelection | None, modules: Mapping[str, str], notes: list[str]
) -> Iterator[AdapterProblem]:
    """Yield the problem if PEFT would ignore some factors, since the config excludes their modules.

    If it would ignore all factors, it loads no such adapter, which is added to *notes*.

    Args:
        selection: The modules that the PEFT config selects, or None if unknown.
        modules: Modules with factors, each with the name of a factor.
        notes: Notes about the adapter.
    """
    ignored = [module for module in modules if selection and not selection.has_module(module)]
    if not ignored:
        return
    if len(ignored) == len(modules):
        notes.append(f"{CONFIG} selects no layer that has factors, so PEFT would not load them")
        return
    error = UnsupportedError(
        f"{CONFIG} does not select {pluralize(len(ignored), 'layer')} with factors",
        where=f"tensor `{modules[ignored[0]]}`",
        why=f"PEFT would ignore the factors of {quote_names(ignored)}, because of "
        "`target_modules`, `exclude_modules`, `layers_to_transform` or `modules_to_save`",
        hint=SAME_ADAPTER_HINT,
    )
    yield AdapterProblem(error, modules[ignored[0]])


def iterate_uneven_layer_notes(
    selection: TargetSelection | None, modules: Collection[str]
) -> Iterator[str]:
    """Yield a note if selected modules of a single layer have no factors, unlike in other layers.

    This is no finding, because the base model may have them only in the other layers. If several
    layers differ, this is the structure of the model. Some models share keys and values between
    layers, for example.
    """
    names_by_parent: dict[str, set[str]] = {}
    for module in modules:
        parent, dot, name = module.rpartition(".")
        names_by_parent.setdefault(parent + dot, set()).add(name)
    parents_by_kind: dict[str, list[str]] = {}
    for parent in names_by_parent:
        parents_by_kind.setdefault(get_skeleton(parent), []).append(parent)
    missing: list[str] = []
    for parents in parents_by_kind.values():
        all_names = set[str]().union(*(names_by_parent[parent] for parent in parents))
        uneven = [parent for parent in parents if names_by_parent[parent] != all_names]
        if selection and len(uneven) == 1 and len(parents) > 1:
            candidates = (
                uneven[0] + name for name in sorted(all_names - names_by_parent[uneven[0]])
            )
            missing += [module for module in candidates if selection.has_module(module)]
    if missing:
        yield (
            f"{CONFIG} selects {quote_names(missing)}, but only other layers have such factors; "
            "`merge` with the base model shows if factors are missing"
        )
