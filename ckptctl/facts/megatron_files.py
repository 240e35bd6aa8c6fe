"""Build the model records of Megatron-based programs, ``args`` and ``run_config.yaml``.

Sources: ``load_args_from_checkpoint`` and ``check_checkpoint_args`` in Megatron-LM's
``checkpointing.py``; ``load_model_config`` and ``read_run_config`` in Megatron-Bridge 0.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptctl.errors import MappingError
from ckptctl.facts.kinds import inexpressible_error
from ckptctl.facts.megatron import (
    CONFIG_NAME,
    TARGET_KEY,
    config_to_megatron_fields,
    require_megatron_style,
)
from ckptctl.facts.megatron_words import (
    ACTIVATION_ARGUMENTS,
    FIELD_BY_ARGUMENT,
    FUNCTION_PATHS,
    LENGTH_FIELDS,
)
from ckptctl.planner.config_facts import Json
from ckptctl.planner.families.declarations import MegatronStyle, get_nested
from ckptctl.planner.layouts import Family

ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}
"""Model-parallel sizes of outputs, which are written as if by a single rank."""

NO_TRAINING_STATE = {
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save": True,
    "no_save_optim": True,
    "no_save_rng": True,
}
"""Arguments that tell Megatron-LM that a checkpoint has no optimizer or RNG state."""

COMMON_LAYER_FIELDS = {
    "add_position_embedding": True,
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_PROVIDER_FIELDS = ("attention_dropout", "hidden_dropout")
_NOT_ARGUMENTS = ("activation_func", "gated_linear_unit", "heterogeneous_block_specs")
_GEMMA_FIELDS = ("attn_logit_softcapping", "final_logit_softcapping")
_BLOCK_SPEC = ".get_gpt_decoder_block_spec"
_GPT_MODULE = "megatron.bridge.models.gpt_provider."
DEFAULT_SPECS = {f"{_GPT_MODULE}GPTModelProvider": f"{_GPT_MODULE}default_layer_spec"}
"""Default layer-spec function of each provider, used unless the family has its own."""
EXPERT_IMPLEMENTATION = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
"""Fields that select the implementation of experts, which does not affect results."""
STATED_BY_CLASS = ("model_type", "transformers_version")
"""Keys of config.json that are no fields of transformers' configuration class."""
BRIDGE_MODULE = "megatron.bridge.training."
OBJECT_KEY = re.compile(r"_[a-z]+_")
"""Keys such as ``_target_`` and ``_call_``, with which Bridge's YAML describes objects."""


def build_megatron_arguments(
    family: Family,
    config: Json,
    sizes: Mapping[str, int] | None = None,
    *,
    padded_rows: int | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build Megatron-LM's arguments for a config.json.

    Args:
        family: The model type.
        config: Content of config.json.
        sizes: Axis sizes solved from the tensors, which override *config*.
        padded_rows: Rows of the stored embedding, or None for the vocabulary size.
        dtype: The element type of the weights.

    Raises:
        MappingError: Megatron-LM cannot build the family, or cannot express config.json.
    """
    if not require_megatron_style(family).has_arguments:
        raise MappingError(
            f"Megatron-LM has no arguments for `{family.name}`",
            why="only Megatron-Bridge builds its attention, from config.json",
        )
    fields = config_to_megatron_fields(family, config, sizes)
    argument_by_field = {field_name: argument for argument, field_name in FIELD_BY_ARGUMENT.items()}
    arguments: dict[str, object] = {
        argument_by_field.get(name, name): value
        for name, value in fields.items()
        if name not in _NOT_ARGUMENTS
    }
    is_tied = arguments.pop("share_embeddings_and_output_weights")
    function, is_gated = fields["activation_func"], fields["gated_linear_unit"]
    # Models with other activations are not built from arguments.
    is_known_activation = (function, is_gated) in ACTIVATION_ARGUMENTS.values() or (
        function,
        is_gated,
    ) == ("gelu", False)
    activation_arguments = (
        {n: (function, is_gated) == activation for n, activation in ACTIVATION_ARGUMENTS.items()}
        if is_known_activation
        else {}
    )
    is_grouped = fields.get("num_query_groups") != fields["num_attention_heads"]
    return {
        **COMMON_LAYER_FIELDS,
        **(EXPERT_IMPLEMENTATION if fields["num_moe_experts"] else {}),
        **arguments,
        **activation_arguments,
        **ONE_RANK,
        **NO_TRAINING_STATE,
        **build_precision_flags(dtype),
        "group_query_attention": is_grouped,
        "use_rotary_position_embeddings": fields["position_embedding_type"] != "none",
        "untie_embeddings_and_output_weights": not is_tied,
        "padded_vocab_size": fields["vocab_size"] if padded_rows is None else padded_rows,
    }


def build_precision_flags(dtype: str | None) -> dict[str, bool]:
    """Return the flags ``bf16`` and ``fp16``, which Megatron-LM and Megatron-Bridge require."""
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}


def build_run_config(
    family: Family,
    config: Json,
    sizes: Mapping[str, int] | None = None,
    *,
    padded_rows: int | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build ``run_config.yaml``, from which Megatron-Bridge builds the model.

    See :func:`build_megatron_arguments` for the parameters.

    Raises:
        MappingError: Bridge has no provider for the family, or cannot express config.json.
    """
    style = require_megatron_style(family)
    if not style.provider:
        raise MappingError(
            f"Megatron-Bridge has no provider for `{family.name}`",
            why="run_config.yaml must name one",
        )
    fields = config_to_megatron_fields(family, config, sizes)
    omitted = {name for name in _GEMMA_FIELDS if fields[name] is None} | {LENGTH_FIELDS[0]}
    fields = {name: value for name, value in fields.items() if name not in omitted}
    model: dict[str, object] = {
        TARGET_KEY: style.provider,
        **(EXPERT_IMPLEMENTATION if fields["num_moe_experts"] else {}),
        **fields,
        **ONE_RANK,
        **build_precision_flags(dtype),
        **{name: COMMON_LAYER_FIELDS[name] for name in _PROVIDER_FIELDS},
        "activation_func": _build_object_reference(FUNCTION_PATHS[str(fields["activation_func"])]),
        "params_dtype": to_dtype_reference(dtype),
        **build_vocabulary_fields(fields["vocab_size"], padded_rows),
        **_build_nested_configs(style, config),
    }
    spec = style.layer_spec or DEFAULT_SPECS.get(style.provider)
    model |= {"transformer_layer_spec": _build_layer_spec(spec)} if spec else {}
    return build_config_container(model)


def _build_nested_configs(style: MegatronStyle, config: Json) -> dict[str, object]:
    """Return the YAML of transformers' configurations that the provider contains.

    Raises:
        MappingError: config.json has no such section, or names an object, which Bridge would
            import and call.
    """
    nested: dict[str, object] = {}
    for name, (class_path, section) in style.nested_configs.items():
        values = get_nested(config, section) if section else config
        if not isinstance(values, Mapping):
            raise MappingError(
                f"{CONFIG_NAME} requires `{section}`", where="config.json", why="it is not set"
            )
        if _has_target(values):
            why = "Megatron-Bridge would import and call the object that it names"
            raise inexpressible_error(CONFIG_NAME, section, {TARGET_KEY: "..."}, why)
        stated = {key: value for key, value in values.items() if key not in STATED_BY_CLASS}
        nested[name] = {TARGET_KEY: class_path, **_state_rope_parameters(stated)}
    return nested


def _state_rope_parameters(values: Json) -> dict[str, object]:
    """Replace RoPE fields of transformers 4 in *values*, which Bridge would ignore."""
    scaling = values.get("rope_scaling")
    old_fields = {
        **({"rope_theta": values["rope_theta"]} if "rope_theta" in values else {}),
        **(scaling if isinstance(scaling, Mapping) else {}),
    }
    if not old_fields or values.get("rope_parameters") is not None:
        return dict(values)
    rope_type = old_fields.pop("type", "default")
    kept = {name: v for name, v in values.items() if name not in ("rope_theta", "rope_scaling")}
    return {**kept, "rope_parameters": {"rope_type": rope_type, **old_fields}}


def _has_target(value: object) -> bool:
    """Return whether *value* contains a key that has a meaning in Bridge's YAML."""
    if isinstance(value, Mapping):
        keys = (key for key in value if isinstance(key, str))
        return any(OBJECT_KEY.fullmatch(key) for key in keys) or any(
            _has_target(inner) for inner in value.values()
        )
    return isinstance(value, (list, tuple)) and any(map(_has_target, value))


def build_config_container(model: Json) -> dict[str, object]:
    """Build the ``run_config.yaml`` document around a *model* section."""
    checkpoint = {
        TARGET_KEY: f"{BRIDGE_MODULE}config.CheckpointConfig",
        "ckpt_format": "torch_dist",
        "fully_parallel_save": True,
        "save_optim": False,
        "save_rng": False,
    }
    return {
        TARGET_KEY: f"{BRIDGE_MODULE}config.ConfigContainer",
        "checkpoint": checkpoint,
        "model": model,
        "tokenizer": None,
    }


def build_vocabulary_fields(size: object, padded_rows: int | None) -> dict[str, object]:
    """Return Megatron-Bridge's fields that pad a vocabulary of *size* to *padded_rows* rows."""
    if padded_rows is None or not isinstance(size, int) or size >= padded_rows:
        return {"vocab_size": size, "should_pad_vocab": False}
    powers = (1 << n for n in range(padded_rows.bit_length()))
    divisor = next(
        (power for power in powers if -(-size // power) * power == padded_rows), padded_rows
    )
    return {"vocab_size": size, "should_pad_vocab": True, "make_vocab_size_divisible_by": divisor}


def to_dtype_reference(dtype: str | None) -> dict[str, object]:
    """Return Megatron-Bridge's YAML reference to a torch *dtype*."""
    return _build_object_reference(f"torch.{dtype or 'float32'}")


def _build_object_reference(name: str) -> dict[str, object]:
    """Return Megatron-Bridge's YAML reference to an object that is imported but not called."""
    return {TARGET_KEY: name, "_call_": False}


def _build_layer_spec(name: str) -> dict[str, object]:
    """Return the YAML of a layer-spec function, with the argument of Megatron-Core's block."""
    if not name.endswith(_BLOCK_SPEC):
        return _build_object_reference(name)
    return {TARGET_KEY: name, "_partial_": True, "_args_": [], "use_transformer_engine": True}
