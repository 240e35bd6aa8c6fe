"""Read and write scales and target modules in PEFT's ``adapter_config.json``.

Sources: peft's ``LoraConfig`` and ``LoraLayer.update_layer``, torchtune's
``tune_to_peft_adapter_config``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.recognition.roots import select_model
from ckptctl.conversion.sources import locate_tensors
from ckptctl.dtypes import LARGEST_FLOAT32, SMALLEST_FLOAT32
from ckptctl.errors import (
    CkptError,
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
    format_option,
    quote_names,
)
from ckptctl.formats.peft import CONFIG, read_adapter_config
from ckptctl.planner.config_facts import Json
from ckptctl.planner.copying.blocks import transpose_entry
from ckptctl.planner.families.templates import get_skeleton
from ckptctl.planner.mapping.adapters import (
    PEFT_PREFIX,
    get_module_name,
    has_adapter_factors,
    is_factor,
    to_linear_factor_name,
)
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Supported dtypes of LoRA factors and of the weights that they change."""
TARGET_PARAMETERS = "target_parameters"
EXPERT_LAYER_NAMES = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Module names that PEFT treats as layers of one expert (``_MOE_TARGET_MODULE_MAPPING``)."""
WEIGHT = ".weight"
MAMBA_TYPES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
UNSUPPORTED_MAMBA_LAYERS = frozenset({"conv1d", "out_proj"})
TRANSPOSED_TYPES = frozenset({"gpt2"})
"""Model types whose linear weights are stored as ``[in, out]``, which adapters do not support."""
"""Layers of Mamba models that PEFT rejects (``_check_lora_target_modules_mamba``)."""
BASE_LAYERS = re.compile(r"(?<!\.base_layer)(?:\.base_layer)++\Z")
"""Names of wrappers at the end of the name of a module that several adapters wrap."""
_REGEX_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!]|P<\w+>)|\(\??|\{\d*(?:,\d*)?\}|.", re.DOTALL
)
_RANK_FILE = re.compile(r"mp_rank_\d.*adapter\.pt\Z")
_ASSUMED_NAME_LENGTH = 64
_MAX_MATCH_PATHS = 1 << 20


def require_simple_patterns(patterns: Mapping[str, object], where: str) -> None:
    """Raise if a regex in *patterns* is malformed, or could take too long to match."""
    for text in patterns:
        try:
            re.compile(text)
            _compile_pattern(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedError(
                f"`{_shorten(text)}` is not a valid regex", where=where, why=str(error)
            ) from error
    match_paths = 0.0
    for text in patterns:
        match_paths += _estimate_match_paths(text)
        if match_paths > _MAX_MATCH_PATHS:
            raise RefusedError(
                f"`{_shorten(text)}` is too complex",
                where=where,
                why="nested repetitions and alternatives take too long to match",
                hint="list the module names explicitly",
            )


def match_pattern(
    patterns: Mapping[str, float], module: str, default: float | None
) -> float | None:
    """Return the value of the first pattern that matches the end of *module*, as PEFT does."""
    for key, value in patterns.items():
        if _compile_pattern(key).match(module):
            return value
    return default


@lru_cache(maxsize=1 << 14)
def _compile_pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({text})$")


def _estimate_match_paths(text: str) -> float:
    """Estimate in how many ways *text* can match, or return infinity if unknown.

    Nested repetitions, and groups that change how the regex is parsed, count as infinitely many.
    """
    paths, previous = 1.0, ""
    branch_counts = [1]
    for token in _REGEX_TOKEN.findall(text):
        repeats = token in ("*", "+") or (token[0] == "{" and len(token) > 1)
        if token == "(?" or (repeats and (previous == ")" or previous in ("*", "+", "?", "}"))):
            return math.inf
        if token[0] == "(":
            branch_counts.append(1)
        elif token == ")" and len(branch_counts) > 1:
            paths *= branch_counts.pop()
        elif token == "|":
            branch_counts[-1] += 1
        else:
            paths *= _ASSUMED_NAME_LENGTH if repeats else 2 if token == "?" else 1
        previous = "}" if repeats and token[0] == "{" else token
    return paths * math.prod(branch_counts)


def _shorten(text: str) -> str:
    return text if len(text) <= _ASSUMED_NAME_LENGTH else f"{text[:_ASSUMED_NAME_LENGTH]}…"


UNSUPPORTED_FIELDS = {
    "fan_in_fan_out": "weights stored as `[in, out]`",
    "lora_bias": "biases of B",
    "use_qalora": "QALoRA",
    TARGET_PARAMETERS: "parameter targets, such as fused experts",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA, which truncates the base weights",
    "megatron_config": "Megatron's parallel layers",
}
KNOWN_FIELDS = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "base_model_name_or_path",
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
"""PEFT config fields that are read, or that do not affect merges."""
BIAS_VALUES = ("lora_only", "all")
TRAINED_FIELDS = ("bias",)
"""PEFT config fields whose tensors are recognized by their names."""
MERGEABLE_FIELDS = (*TRAINED_FIELDS, TARGET_PARAMETERS)
"""PEFT config fields whose tensors ``merge`` supports."""
SAME_ADAPTER_HINT = "check that both files belong to the same adapter"
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Scale and rank settings of an adapter.

    Attributes:
        alpha: PEFT's ``lora_alpha``, or None if unknown.
        rank: The configured rank, or None if the shapes of the factors determine it.
        uses_rslora: Whether alpha is divided by the square root of the rank.
        rank_pattern: PEFT's ``rank_pattern``, which maps regexes of modules to their ranks.
        alpha_pattern: PEFT's ``alpha_pattern``, which maps regexes of modules to their alphas.
        scaling: Value of ``--scaling``, the factor of B A for all modules, or None if not set.
        uses_dora: Whether modules have DoRA magnitudes, or None if the config does not state it.
        parameter_suffixes: Name suffixes of weights in ``target_parameters``.
    """

    alpha: float | None = None
    rank: int | None = None
    uses_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    scaling: float | None = None
    uses_dora: bool | None = None
    parameter_suffixes: tuple[str, ...] = ()

    @property
    def has_uniform_scale(self) -> bool:
        """Whether all modules have the same alpha and rank, and the scale is alpha / rank."""
        return not (self.uses_rslora or self.rank_pattern or self.alpha_pattern)

    def compute_scale(self, key: str, rank: int) -> float:
        """Return the scale by which B A is multiplied for tensor *key* of rank *rank*.

        Raises:
            UnsupportedError: The rank differs from the config, or the scale is out of range.
            UsageError: Alpha is unknown.
        """
        module = self._get_target_name(get_module_name(key))
        if error := self.find_rank_error(key, rank):
            raise error
        if self.scaling is not None:
            return _require_float32_factor("scaling", self.scaling, self.scaling, key)
        alpha = match_pattern(self.alpha_pattern, module, self.alpha)
        if alpha is None:
            raise UsageError(
                "the scale of the adapter is unknown",
                why=f"there is no {CONFIG} with `lora_alpha` next to it",
                hint=f"pass {format_option('--lora-alpha')}, or {format_option('--scaling')} with "
                "the factor itself (only `merge`)",
            )
        return _require_float32_factor(
            "lora_alpha", alpha, alpha / self.get_alpha_divisor(rank), key
        )

    def find_rank_error(self, key: str, rank: int) -> UnsupportedError | None:
        """Build the error for tensor *key* of rank *rank*, or return None if the config agrees."""
        module = self._get_target_name(get_module_name(key))
        configured_rank = match_pattern(self.rank_pattern, module, self.rank)
        if configured_rank is None or configured_rank == rank:
            return None
        return UnsupportedError(
            f"the rank is {rank}, but {CONFIG} states {configured_rank}",
            where=f"tensor `{key}`",
            hint=SAME_ADAPTER_HINT,
        )

    def get_alpha_divisor(self, rank: int) -> float:
        """Return the divisor of alpha, which is the rank or, for rsLoRA, its square root."""
        return math.sqrt(rank) if self.uses_rslora else rank

    def _get_target_name(self, module: str) -> str:
        """Return the name that PEFT patterns match, which is the module or a target parameter."""
        weight = module + WEIGHT
        is_parameter = any(
            f".{weight}".endswith(f".{ending}") for ending in self.parameter_suffixes
        )
        return weight if is_parameter else module


def _require_single_rank(path: TreePath) -> None:
    """Raise if the checkpoint is an adapter file that verl wrote for a single rank.

    Source: ``MegatronCheckpointManager`` in ``verl/utils/checkpoint``.
    """
    if _RANK_FILE.match(path.name):
        rank_files = [file.name for file in path.parent.iterdir() if _RANK_FILE.match(file.name)]
        if len(rank_files) > 1:
            raise RefusedError(
                "this is the part of one rank of an adapter that "
                f"{pluralize(len(rank_files), 'rank')} saved",
                where=str(path),
                why="the files do not state the layers of each pipeline stage or how rows are "
                "divided",
                hint="use verl's own export in `huggingface/adapter`, or `model/dist_ckpt` of "
                "later releases",
            )


def select_factors(catalog: Catalog) -> Catalog:
    """Return an adapter without the base model's weights, which torchtitan also saves."""
    _require_single_rank(catalog.path)
    names = [name for name in catalog.tensors if not is_factor(name)]
    if not has_adapter_factors(catalog.tensors) or any(
        name.startswith(PEFT_PREFIX) for name in catalog.tensors
    ):
        return catalog
    factors = {name: entry for name, entry in catalog.tensors.items() if is_factor(name)}
    note = f"skipped {pluralize(len(names), 'tensor')} of the model stored with the adapter"
    notes = (*catalog.notes, note) if names else catalog.notes
    return replace(catalog, tensors=factors, notes=notes)


def convert_embedding_factors(catalog: Catalog) -> Catalog:
    """Return an adapter with embedding factors transposed to factors of linear layers.

    PEFT looks up tokens in ``lora_embedding_A`` ``[R, tokens]`` and multiplies the result by
    ``lora_embedding_B`` ``[width, R]``. The transposes of both are factors B and A of the embedding
    weight ``[tokens, width]``.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        linear_name = to_linear_factor_name(name)
        if linear_name != name and len(entry.shape) == 2:
            module = PEFT_PREFIX + get_module_name(name)
            if f"{module}.lora_magnitude_vector" in catalog.tensors:
                raise RefusedError("DoRA of embeddings is not supported", where=f"tensor `{name}`")
            entry = transpose_entry(entry, linear_name)
        tensors[linear_name] = entry
    return replace(catalog, tensors=tensors)


def locate_factors(catalog: Catalog, root: str) -> dict[str, TensorEntry]:
    """Map the keys of an adapter's tensors, relative to *root*, to entries with extents."""
    adapter = convert_embedding_factors(catalog)
    for name, entry in adapter.tensors.items():
        if entry.dtype not in FLOAT_DTYPES:
            raise MappingError(
                f"cannot merge an adapter of dtype {entry.dtype}", where=f"tensor `{name}`"
            )
    entries = locate_tensors(adapter, adapter.tensors).tensors
    return {
        key: entries[selected_entry.name]
        for key, selected_entry in select_model(adapter, root).tensors.items()
    }


def require_biases(config: Json | None, missing_biases: Collection[str]) -> None:
    """Raise if the adapter is missing biases that it trained, which older PEFT did not save."""
    bias_mode = (config or {}).get("bias")
    if bias_mode in BIAS_VALUES and missing_biases:
        raise UnsupportedError(
            "the adapter is missing biases that were trained with it",
            where=f"`bias: {bias_mode}` in {CONFIG}",
            why=f"{quote_names(list(missing_biases))} of the model have no counterpart in the "
            "adapter",
            hint='set `"bias": "none"` there to keep the biases of the model',
        )


def require_adapter(
    catalog: Catalog, error_class: type[CkptError], message: str, hint: str = ""
) -> None:
    """Raise *error_class* if a checkpoint contains no LoRA factors."""
    if not has_adapter_factors(catalog.tensors):
        names = quote_names(list(catalog.tensors), 2)
        why = "no lora_A/lora_B tensors found" + (f" among {names}" if names else "")
        raise error_class(message, where=catalog.path, why=why, hint=hint or None)


def find_adapter_config(catalog: Catalog) -> Json | None:
    """Return the adapter's PEFT config, or None if the checkpoint contains none."""
    stored_config = catalog.documents.get(CONFIG)
    return (
        stored_config
        if stored_config is not None
        else read_adapter_config(catalog.root).get(CONFIG)
    )


def parse_adapter_settings(
    config: Json | None,
    alpha: float | None = None,
    scaling: float | None = None,
    *,
    supported: Collection[str] = (),
) -> AdapterSettings:
    """Parse an adapter's scale settings in its PEFT config.

    Args:
        config: Content of adapter_config.json, or None if it is missing.
        alpha: Value of ``--lora-alpha``, which overrides ``lora_alpha``, or None.
        scaling: Value of ``--scaling``, which overrides alpha / rank, or None.
        supported: Fields that the caller supports, such as biases and single parameters. Other
            fields of :data:`UNSUPPORTED_FIELDS` are errors.
    """
    config = config or {}
    _require_supported(config, supported)
    configured_alpha, rank = config.get("lora_alpha"), config.get("r")
    configured_alpha = (
        None if configured_alpha is None else _require_positive("lora_alpha", configured_alpha)
    )
    if alpha is not None and configured_alpha not in (None, alpha):
        raise UsageError(
            f"{format_option(f'--lora-alpha {alpha:g}')} contradicts {CONFIG}",
            why=f"it states {configured_alpha:g}",
        )
    return AdapterSettings(
        alpha=configured_alpha if alpha is None else alpha,
        rank=None if rank is None else _require_integer_rank("r", _require_positive("r", rank)),
        uses_rslora=_read_flag(config, "use_rslora") is True,
        rank_pattern={
            key: _require_integer_rank(key, n)
            for key, n in _read_pattern(config, "rank_pattern").items()
        },
        alpha_pattern=_read_pattern(config, "alpha_pattern"),
        scaling=scaling,
        uses_dora=_read_flag(config, "use_dora"),
        parameter_suffixes=_list_weights(config.get(TARGET_PARAMETERS)),
    )


def _require_float32_factor(name: str, configured_value: float, factor: float, key: str) -> float:
    """Return *factor*, or raise if float32 cannot represent it."""
    if configured_value and not SMALLEST_FLOAT32 <= abs(factor) <= LARGEST_FLOAT32:
        raise UnsupportedError(
            f"`{name}` of {configured_value:g} is out of range",
            where=f"tensor `{key}`",
            why=f"the resulting factor {factor:g} cannot be represented in float32",
        )
    return factor


def _list_weights(target_parameters: object) -> tuple[str, ...]:
    names = map(str, target_parameters) if isinstance(target_parameters, list) else ()
    return tuple(name for name in names if f".{name}".endswith(WEIGHT))


def _require_supported(config: Json, supported: Collection[str]) -> None:
    peft_type = config.get("peft_type", "LORA")
    if peft_type != "LORA":
        raise RefusedError(f"this adapter is {peft_type}, not LoRA", where=CONFIG)
    unsupported = {
        n: description
        for n, description in UNSUPPORTED_FIELDS.items()
        if config.get(n) and n not in supported
    }
    if config.get("bias") not in (None, "none", *BIAS_VALUES):
        raise invalid_field_error(
            "bias", config["bias"], f"it must be none, {' or '.join(BIAS_VALUES)}"
        )
    if "bias" not in supported and config.get("bias") in BIAS_VALUES:
        unsupported = {"bias": f"biases (`bias: {config['bias']}`)", **unsupported}
    for name, description in unsupported.items():
        raise RefusedError(
            f"not supported in adapters: {description}", where=f"`{name}` in {CONFIG}"
        )
    init_method = config.get("init_lora_weights")
    if isinstance(init_method, str) and init_method.lower().startswith(BASE_CHANGING_INITS):
        raise RefusedError(
            f"`init_lora_weights: {init_method}` changes the base model before training",
            where=CONFIG,
            why="the factors are relative to a base that is not stored",
            hint="save it as regular LoRA with `save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)`",
        )


def list_unknown_fields(config: Json | None) -> list[str]:
    """List the fields of a PEFT config that are set and not known to this version."""
    known = KNOWN_FIELDS | UNSUPPORTED_FIELDS.keys()
    return [name for name, value in (config or {}).items() if value and name not in known]


def invalid_field_error(name: str, value: object, why: str | None = None) -> UnsupportedError:
    """Build the error for a field of the PEFT config that has an invalid value."""
    return UnsupportedError(f"invalid `{name}`: {value!r}", where=CONFIG, why=why)


def _read_flag(config: Json, name: str) -> bool | None:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise invalid_field_error(name, value, "it must be true or false")


def _require_positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise invalid_field_error(name, value, "it must be a positive number")
    return float(value)


def _read_pattern(config: Json, name: str) -> dict[str, float]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise invalid_field_error(name, patterns)
    values = {str(key): value for key, value in patterns.items()}
    require_simple_patterns(values, f"`{name}` in {CONFIG}")
    return {key: _require_positive(key, value) for key, value in values.items()}


def _require_integer_rank(name: str, value: float) -> int:
    if value != int(value):
        raise invalid_field_error(name, value, "it must be an integer")
    return int(value)


# ------------------------------------------------------------------ target modules of PEFT
#
# On transformers 5, PEFT treats every target with the name of an expert's layer as the expert
# stack, even in dense and shared layers. A weight listed in `target_parameters` is taken
# literally, and its tensors have the same names.
#
# Source: peft's ``utils/transformers_weight_conversion.py`` (``_convert_peft_config_moe``) and
# ``tuners/tuners_utils.py`` (``_inject_parameters``).

RankAndAlpha = tuple[int, float]
"""Rank and alpha of a module."""


def is_in_target_module(module: str, target: str) -> bool:
    """Return whether *module* may be the module of the parameter *target*."""
    target_module = target.rpartition(".")[0]
    return f".{module}".endswith(f".{target_module}") if target_module else True


def needs_parameter_target(module: str) -> bool:
    """Return whether PEFT must target the weight of *module* as a parameter, due to its name."""
    return module.rpartition(".")[2] in EXPERT_LAYER_NAMES


def is_unsupported_layer(model_type: str, module: str) -> bool:
    """Return whether factors of the linear layer *module* are rejected by PEFT or transposed."""
    if model_type in TRANSPOSED_TYPES:
        return True
    return model_type in MAMBA_TYPES and module.rpartition(".")[2] in UNSUPPORTED_MAMBA_LAYERS


def build_target_modules(selected: Collection[str], keys: Iterable[str]) -> list[str]:
    """Build PEFT's ``target_modules``.

    A module is listed by its last name component if that matches only *selected* modules.

    Args:
        selected: Full names of the target modules.
        keys: Tensor names of the model.
    """
    steps = {tuple(key.split(".")) for key in keys}
    modules = {step[:end] for step in steps for end in range(1, len(step))}
    counts = Counter(step[-1] for step in modules)
    chosen_counts = Counter(module.rpartition(".")[2] for module in selected)
    last_names = ((module, module.rpartition(".")[2]) for module in selected)
    return sorted(
        {name if chosen_counts[name] == counts[name] else module for module, name in last_names}
    )


def build_layer_targets(modules: list[str], layer_count: int | None) -> list[str]:
    """Build PEFT's ``target_modules`` if the model's tensor names are unknown.

    Modules are listed by their last name component if one module in each layer has it, or only one
    module in total. *layer_count* is None if the number of layers is unknown too.
    """
    by_last_name: dict[str, list[str]] = {}
    for module in modules:
        by_last_name.setdefault(module.rpartition(".")[2], []).append(module)
    targets: list[str] = []
    for name, modules_of_name in by_last_name.items():
        templates = {get_skeleton(module) for module in modules_of_name}
        numbered = any(module != get_skeleton(module) for module in modules_of_name)
        in_every_layer = len(modules_of_name) == (layer_count if numbered else 1)
        targets += [name] if len(templates) == 1 and in_every_layer else modules_of_name
    return sorted(targets)


def build_patterns(
    rank_and_alpha: Mapping[str, RankAndAlpha], default: tuple[object, object]
) -> dict[str, dict[str, float]]:
    """Build PEFT's rank and alpha patterns for modules that differ from the *default*."""
    exceptions = {
        re.escape(name): value for name, value in rank_and_alpha.items() if value != default
    }
    return {
        "rank_pattern": {name: rank for name, (rank, _) in exceptions.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in exceptions.items()},
    }
