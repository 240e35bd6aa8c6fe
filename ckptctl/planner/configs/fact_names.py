"""What files call the facts of a model: which keys of config.json are compared, and params.json.

Facts have the names that config.json gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy

from ckptctl.errors import MappingError
from ckptctl.planner.configs.facts import Json
from ckptctl.planner.configs.kinds import count, number
from ckptctl.planner.configs.rope import MODULES
from ckptctl.planner.families.declarations import (
    ParamsStyle,
    Rule,
    holds,
    spellings,
)
from ckptctl.planner.families.facts import ARGUED, Fact
from ckptctl.planner.layouts import Family

SCALED = "use_scaled_rope"


def preset(family: Family, params: Json) -> dict[str, object]:
    """Return what config.json says beyond *params*, by the family's tables."""
    values: dict[str, object] = {}
    for signs, added in family.presets:
        if holds(signs, params):
            merge(values, added)
    return values


def facts_of(style: ParamsStyle) -> Iterator[tuple[str, Fact]]:
    """Yield all facts with their full names in config.json."""
    yield from ((style.prefix + fact.config, fact) for fact in style.text)
    yield from ((fact.config, fact) for fact in style.around)


def rules_of(style: ParamsStyle) -> Iterator[tuple[str, Rule]]:
    """Yield all rules with their full names in config.json."""
    yield from ((style.prefix + rule.config, rule) for rule in style.rules)
    yield from ((rule.config, rule) for rule in style.around_rules)


def merge(values: dict[str, object], added: Json) -> None:
    """Add *added* to *values*, inside of objects that both have."""
    for key, value in added.items():
        inner = values.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping) and key in MODULES:
            merge(inner, value)
        else:
            values[key] = deepcopy(value)


def walked(
    values: Json, enters: Callable[[str], bool], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield what *values* state by full names, object by object where *enters* says so."""
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, Mapping) and enters(name):
            yield from walked(value, enters, f"{name}.")
        else:
            yield name, value


def is_module(name: str) -> bool:
    """Whether *name* is that of an object which describes a model inside of the model."""
    return name.rpartition(".")[2] in MODULES


def named_in(family: Family) -> set[str]:
    """Return the names of params.json that mean something, or nothing of the model."""
    style = family.params
    known = {*style.silent, "tied_embeddings", *(fact.params for _, fact in facts_of(style))}
    known |= {one for names in family.sizes.values() for one in spellings(names[1])}
    return known | ({*PARAMS, SCALED} if style.derived else set())


PARAMS = ("multiple_of", "ffn_dim_multiplier")


def ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the feed-forward size that Meta's formula gives."""
    try:
        hidden = int(2 * (4 * dim) / 3)
        if multiplier is not None:
            hidden = int(multiplier * hidden)
    except OverflowError as error:
        raise MappingError(
            "the feed-forward size exceeds the range of a float",
            why=f"`ffn_dim_multiplier` is {multiplier!r}",
        ) from error
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def ffn_of(params: Json, dim: int) -> int:
    """Return the feed-forward size that params.json gives by the formula."""
    factor = params.get("ffn_dim_multiplier")
    multiple = count(params.get("multiple_of"), "multiple_of") or 256
    return ffn_size(dim, multiple, None if factor is None else number(factor, "ffn_dim_multiplier"))


IGNORED: Mapping[str, tuple[str, ...]] = {
    "origin of the model": ("architectures", "auto_map", "transformers_version"),
    "dtype, which the tensors themselves show": ("dtype", "torch_dtype", "use_bfloat16"),
    "tokenizer": ("model_max_length", "tokenizer_class"),
    "training": (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "aux_loss_alpha",
        "classifier_dropout",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "embedding_dropout",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_factor",
        "initializer_range",
        "pretraining_tp",
        "projector_dropout",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
    ),
    "output settings": (
        "id2label",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torchscript",
        "use_cache",
    ),
}
"""Keys of config.json that say nothing of what the tensors compute, by what they are about.

Whatever begins with an underscore belongs to them.
"""

NOTED = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "pad_token_id",
)
"""Keys of config.json that change no logits: that two files differ on them is said in a note."""

TOLD = frozenset(fact.config for fact in ARGUED) | {
    *("hidden_act", "num_key_value_heads", "tie_word_embeddings")
}
"""Keys of config.json that among the arguments of a training mean the model."""

PLACED = ("dynamic", "longrope", "su", "yarn")
"""Kinds of rotary scaling that ``max_position_embeddings`` takes part in."""

SILENT: Mapping[str, object] = {"rope.rope_type": "default", "quantization_config": None}
"""What a config.json means that does not say it, in every family."""

SAME_WORDS = {"swish": "silu"}
RENAMED = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rope.partial_rotary_factor": "partial_rotary_factor",
    "original_max_position_embeddings": "rope.original_max_position_embeddings",
}
"""Names of versions of transformers for the same fact."""
