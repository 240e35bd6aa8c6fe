"""PEFT's ``adapter_config.json``: an adapter's scale, and the layers that it changes.

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
    quote_names,
    spell_option,
)
from ckptctl.formats.peft import CONFIG, adapter_config
from ckptctl.planner.config_facts import Json
from ckptctl.planner.copying.blocks import transpose_entry
from ckptctl.planner.families.templates import get_skeleton
from ckptctl.planner.mapping.adapters import (
    PEFT_PREFIX,
    get_module_name,
    is_adapter,
    is_factor,
    to_linear_name,
)
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

FLOATING = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of factors, and of the weights that they change."""
TARGETS = "target_parameters"
OF_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Names by which PEFT recognizes layers of single experts (``_MOE_TARGET_MODULE_MAPPING``)."""
WEIGHT = ".weight"
MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
UNWRAPPED = frozenset({"conv1d", "out_proj"})
"""Layers of Mamba models that PEFT rejects (``_check_lora_target_modules_mamba``)."""
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!]|<[=!]|P<\w+>)|\(\??|\{\d*(?:,\d*)?\}|.", re.DOTALL
)
_RANK = re.compile(r"mp_rank_\d.*adapter\.pt\Z")
_LENGTH = 64
_MOST = 1 << 20


def check_expressions(patterns: Mapping[str, object], where: str) -> None:
    """Raise if a regex is malformed, or could take too long to match."""
    for text in patterns:
        try:
            re.compile(text)
            _compiled(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedError(
                f"`{_short(text)}` is not a valid regex", where=where, why=str(error)
            ) from error
    ways = 0.0
    for text in patterns:
        ways += _ways(text)
        if ways > _MOST:
            raise RefusedError(
                f"`{_short(text)}` is too complex",
                where=where,
                why="nested repetitions and alternatives take too long to match",
                hint="list the module names explicitly",
            )


def matching(patterns: Mapping[str, float], module: str, otherwise: float | None) -> float | None:
    """Return the value of the first pattern that matches the end of *module*, as PEFT does."""
    for key, value in patterns.items():
        if _compiled(key).match(module):
            return value
    return otherwise


@lru_cache(maxsize=1 << 14)
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({text})$")


def _ways(text: str) -> float:
    """Estimate in how many ways *text* can match, or return infinity if unknown.

    Nested repetitions, and groups that change how the rest is parsed, count as infinitely many.
    """
    ways, before = 1.0, ""
    alternatives = [1]
    for token in _TOKEN.findall(text):
        repeats = token in ("*", "+") or (token[0] == "{" and len(token) > 1)
        if token == "(?" or (repeats and (before == ")" or before in ("*", "+", "?", "}"))):
            return math.inf
        if token[0] == "(":
            alternatives.append(1)
        elif token == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif token == "|":
            alternatives[-1] += 1
        else:
            ways *= _LENGTH if repeats else 2 if token == "?" else 1
        before = "}" if repeats and token[0] == "{" else token
    return ways * math.prod(alternatives)


def _short(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


REFUSED = {
    "lora_bias": "biases of B",
    "use_qalora": "QALoRA",
    TARGETS: "parameter targets, such as fused experts",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron's parallel layers",
}
BIASES = ("lora_only", "all")
TRAINED = ("bias",)
SINGLE = (*TRAINED, TARGETS)
"""Fields whose tensors are recognized by name, and all fields that can be merged."""
MOVED = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True, slots=True)
class Settings:
    """Scale and rank settings of an adapter.

    Attributes:
        alpha: PEFT's ``lora_alpha``, or None if unknown.
        rank: The configured rank, or None if it follows from the shapes.
        rslora: Whether alpha is divided by the square root of the rank.
        ranks: ``rank_pattern``: ranks of modules that differ, by regex.
        alphas: ``alpha_pattern``: the same for alpha.
        scaling: The user's factor of B A for all modules, or None.
        dora: Whether there are DoRA magnitudes, or None if the config does not say.
        parameters: Endings of the names of weights adapted as parameters.
    """

    alpha: float | None = None
    rank: int | None = None
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    scaling: float | None = None
    dora: bool | None = None
    parameters: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether all modules have the same alpha and rank, with alpha / rank as the scale."""
        return not (self.rslora or self.ranks or self.alphas)

    def scale(self, key: str, rank: int) -> float:
        """Return the scale of B A for tensor *key*, which float32 can represent.

        Raises:
            UnsupportedError: The rank differs from the config, or the scale is out of range.
            UsageError: Alpha is unknown.
        """
        module = self._target(get_module_name(key))
        stated = matching(self.ranks, module, self.rank)
        if stated is not None and stated != rank:
            raise UnsupportedError(
                f"the rank is {rank}, but {CONFIG} states {stated}",
                where=f"tensor `{key}`",
                hint="check that both files belong to the same adapter",
            )
        if self.scaling is not None:
            return _factor("scaling", self.scaling, self.scaling, key)
        alpha = matching(self.alphas, module, self.alpha)
        if alpha is None:
            raise UsageError(
                "the scale of the adapter is unknown",
                why=f"there is no {CONFIG} with `lora_alpha` next to it",
                hint=f"pass {spell_option('--lora-alpha')}, or {spell_option('--scaling')} with "
                "the factor itself (only `merge`)",
            )
        return _factor("lora_alpha", alpha, alpha / self.divisor(rank), key)

    def divisor(self, rank: int) -> float:
        """Return the divisor of alpha, which is the rank or, for rsLoRA, its square root."""
        return math.sqrt(rank) if self.rslora else rank

    def _target(self, module: str) -> str:
        """Return PEFT's name of a layer, which is its weight if that is listed as a parameter."""
        weight = module + WEIGHT
        listed = any(f".{weight}".endswith(f".{one}") for one in self.parameters)
        return weight if listed else module


def _require_all_ranks(path: TreePath) -> None:
    """Raise if this is one of verl's per-rank adapter files.

    Source: ``MegatronCheckpointManager`` in ``verl/utils/checkpoint``.
    """
    if _RANK.match(path.name):
        others = [one.name for one in path.parent.iterdir() if _RANK.match(one.name)]
        if len(others) > 1:
            raise RefusedError(
                "this is the part of one rank of an adapter that "
                f"{pluralize(len(others), 'rank')} saved",
                where=str(path),
                why="the files do not state the layers of each pipeline stage or how rows are "
                "divided",
                hint="use verl's own export in `huggingface/adapter`, or `model/dist_ckpt` of "
                "later releases",
            )


def factors_only(catalog: Catalog) -> Catalog:
    """Return an adapter without its model's weights, which torchtitan saves with it."""
    _require_all_ranks(catalog.path)
    names = [name for name in catalog.tensors if not is_factor(name)]
    if not is_adapter(catalog.tensors) or any(
        name.startswith(PEFT_PREFIX) for name in catalog.tensors
    ):
        return catalog
    kept = {name: entry for name, entry in catalog.tensors.items() if is_factor(name)}
    note = f"skipped {pluralize(len(names), 'tensor')} of the model stored with the adapter"
    notes = (*catalog.notes, note) if names else catalog.notes
    return replace(catalog, tensors=kept, notes=notes)


def embeddings_as_linear(catalog: Catalog) -> Catalog:
    """Return an adapter with embedding factors in the form of linear layers' factors.

    PEFT looks tokens up in ``lora_embedding_A`` (R, tokens), and multiplies by ``lora_embedding_B``
    (width, R): their transposes are B and A of the embedding (tokens, width).
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        plain = to_linear_name(name)
        if plain != name and len(entry.shape) == 2:
            module = PEFT_PREFIX + get_module_name(name)
            if f"{module}.lora_magnitude_vector" in catalog.tensors:
                raise RefusedError("DoRA of embeddings is not supported", where=f"tensor `{name}`")
            entry = transpose_entry(entry, plain)
        tensors[plain] = entry
    return replace(catalog, tensors=tensors)


def readable_factors(catalog: Catalog, root: str) -> dict[str, TensorEntry]:
    """Return an adapter's tensors with their extents, by their keys below *root*."""
    adapter = embeddings_as_linear(catalog)
    for name, entry in adapter.tensors.items():
        if entry.dtype not in FLOATING:
            raise MappingError(
                f"cannot merge an adapter of dtype {entry.dtype}", where=f"tensor `{name}`"
            )
    found = locate_tensors(adapter, adapter.tensors).tensors
    return {key: found[one.name] for key, one in select_model(adapter, root).tensors.items()}


def require_biases(config: Json | None, lacking: Collection[str]) -> None:
    """Raise if biases that were trained with the adapter are missing (older PEFT lost them)."""
    stated = (config or {}).get("bias")
    if stated in BIASES and lacking:
        raise UnsupportedError(
            "the adapter is missing biases that were trained with it",
            where=f"`bias: {stated}` in {CONFIG}",
            why=f"{quote_names(list(lacking))} of the model have no counterpart in the adapter",
            hint='set `"bias": "none"` there to keep the biases of the model',
        )


def check_magnitudes(known: Settings, with_: Collection[str], without: Collection[str]) -> None:
    """Raise on magnitudes that contradict the config, or that only some modules have."""
    if known.dora is False and with_:
        problem, where = f"{CONFIG} states `use_dora: false`, but the adapter has magnitudes", with_
    elif without and (with_ or known.dora):
        problem, where = "only some modules have a magnitude", without
    else:
        return
    raise UnsupportedError(
        problem,
        where=f"tensor `{next(iter(where))}`",
        hint="check that both files belong to the same adapter",
    )


def require_saved(config: Json | None, saved: Collection[str]) -> None:
    """Raise if all modules that were trained in full are missing."""
    stated = (config or {}).get("modules_to_save")
    if stated and not saved:
        raise UnsupportedError(
            "the adapter is missing its fully trained modules",
            where=f"`modules_to_save` in {CONFIG}",
            why=f"it lists {stated!r}, but no tensor belongs to such a module",
            hint="remove `modules_to_save` there to keep the modules of the model",
        )


def require_adapter(catalog: Catalog, kind: type[CkptError], what: str, hint: str = "") -> None:
    """Raise if a checkpoint has no low-rank factors."""
    if not is_adapter(catalog.tensors):
        names = quote_names(list(catalog.tensors), 2)
        why = "no lora_A/lora_B tensors found" + (f" among {names}" if names else "")
        raise kind(what, where=catalog.path, why=why, hint=hint or None)


def described(catalog: Catalog) -> Json | None:
    """Return the adapter's PEFT config, or None if there is none."""
    own = catalog.documents.get(CONFIG)
    return own if own is not None else adapter_config(catalog.root).get(CONFIG)


def settings(
    config: Json | None,
    alpha: float | None = None,
    scaling: float | None = None,
    *,
    carries: Collection[str] = (),
) -> Settings:
    """Read an adapter's scale settings from its PEFT config.

    Args:
        config: adapter_config.json, or None.
        alpha: Overrides ``lora_alpha`` (``--lora-alpha``).
        scaling: Overrides alpha / rank (``--scaling``).
        carries: Fields that the caller supports, such as biases and single parameters. Other
            fields of :data:`REFUSED` are errors.
    """
    config = config or {}
    _refuse(config, carries)
    stated, rank = config.get("lora_alpha"), config.get("r")
    stated = None if stated is None else _number("lora_alpha", stated)
    if alpha is not None and stated not in (None, alpha):
        raise UsageError(
            f"{spell_option(f'--lora-alpha {alpha:g}')} contradicts {CONFIG}",
            why=f"it states {stated:g}",
        )
    return Settings(
        alpha=stated if alpha is None else alpha,
        rank=None if rank is None else _rank("r", _number("r", rank)),
        rslora=_stated(config, "use_rslora") is True,
        ranks={key: _rank(key, n) for key, n in _pattern(config, "rank_pattern").items()},
        alphas=_pattern(config, "alpha_pattern"),
        scaling=scaling,
        dora=_stated(config, "use_dora"),
        parameters=_weights(config.get(TARGETS)),
    )


def _factor(name: str, stated: float, factor: float, key: str) -> float:
    """Return *factor*, or raise if float32 cannot represent it."""
    if stated and not SMALLEST_FLOAT32 <= abs(factor) <= LARGEST_FLOAT32:
        raise UnsupportedError(
            f"`{name}` of {stated:g} is out of range",
            where=f"tensor `{key}`",
            why=f"the resulting factor {factor:g} cannot be represented in float32",
        )
    return factor


def _weights(stated: object) -> tuple[str, ...]:
    names = map(str, stated) if isinstance(stated, list) else ()
    return tuple(name for name in names if f".{name}".endswith(WEIGHT))


def _refuse(config: Json, carries: Collection[str]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise RefusedError(f"this adapter is {kind}, not LoRA", where=CONFIG)
    unsupported = {n: what for n, what in REFUSED.items() if config.get(n) and n not in carries}
    if config.get("bias") not in (None, "none", *(BIASES if "bias" in carries else ())):
        unsupported = {"bias": f"biases (`bias: {config['bias']}`)", **unsupported}
    for name, what in unsupported.items():
        raise RefusedError(f"not supported in adapters: {what}", where=f"`{name}` in {CONFIG}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(MOVED):
        raise RefusedError(
            f"`init_lora_weights: {start}` changes the base model before training",
            where=CONFIG,
            why="the factors are relative to a base that is not stored",
            hint="save it as regular LoRA with `save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)`",
        )


def _invalid(name: str, value: object, why: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"invalid `{name}`: {value!r}", where=CONFIG, why=why)


def _stated(config: Json, name: str) -> bool | None:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise _invalid(name, value, "it must be true or false")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _invalid(name, value, "it must be a positive number")
    return float(value)


def _pattern(config: Json, name: str) -> dict[str, float]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise _invalid(name, found)
    values = {str(key): value for key, value in found.items()}
    check_expressions(values, f"`{name}` in {CONFIG}")
    return {key: _number(key, value) for key, value in values.items()}


def _rank(name: str, value: float) -> int:
    if value != int(value):
        raise _invalid(name, value, "it must be an integer")
    return int(value)


# ------------------------------------------------------------------ target modules of PEFT
#
# On transformers 5, PEFT treats every target with the name of an expert's layer as the expert
# stack, even in dense and shared layers. A weight listed in `target_parameters` is taken
# literally, and its tensors have the same names.
#
# Source: peft's ``utils/transformers_weight_conversion.py`` (``_convert_peft_config_moe``) and
# ``tuners/tuners_utils.py`` (``_inject_parameters``).

Strength = tuple[int, float]
"""Rank and alpha."""


def as_parameter(module: str) -> bool:
    """Return whether PEFT must target a layer's weight instead of the layer."""
    return module.rpartition(".")[2] in OF_EXPERTS


def is_refused(model_type: str, module: str) -> bool:
    """Return whether PEFT gives this linear layer no factors."""
    return model_type in MAMBA and module.rpartition(".")[2] in UNWRAPPED


def target_modules(chosen: Collection[str], keys: Iterable[str]) -> list[str]:
    """Build PEFT's ``target_modules``, using last names where they match only *chosen*.

    Args:
        chosen: Full names of the target modules.
        keys: Tensor names of the model.
    """
    steps = {tuple(key.split(".")) for key in keys}
    modules = {one[:end] for one in steps for end in range(1, len(one))}
    number = Counter(one[-1] for one in modules)
    meant = Counter(module.rpartition(".")[2] for module in chosen)
    last = ((module, module.rpartition(".")[2]) for module in chosen)
    return sorted({name if meant[name] == number[name] else module for module, name in last})


def target_modules_of_layers(modules: list[str], layers: int | None) -> list[str]:
    """Build PEFT's ``target_modules`` if only the model's number of layers is known.

    A last name is used if it stands for one module in each layer, or for a single module.
    """
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(module.rpartition(".")[2], []).append(module)
    targets: list[str] = []
    for name, same_name in kinds.items():
        templates = {get_skeleton(module) for module in same_name}
        numbered = any(module != get_skeleton(module) for module in same_name)
        in_every_layer = len(same_name) == (layers if numbered else 1)
        targets += [name] if len(templates) == 1 and in_every_layer else same_name
    return sorted(targets)


def patterns(
    strengths: Mapping[str, Strength], usual: tuple[object, object]
) -> dict[str, dict[str, float]]:
    """Build the rank and alpha patterns of targets that differ from the *usual* rank and alpha."""
    odd = {re.escape(name): one for name, one in strengths.items() if one != usual}
    return {
        "rank_pattern": {name: rank for name, (rank, _) in odd.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in odd.items()},
    }
