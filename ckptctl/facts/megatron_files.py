"""Write a model's record for Megatron-based programs: ``args`` and ``run_config.yaml``.

Sources: ``load_args_from_checkpoint`` and ``check_checkpoint_args`` in Megatron-LM's
``checkpointing.py``; ``load_model_config`` and ``read_run_config`` in Megatron-Bridge 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.errors import MappingError
from ckptctl.facts.megatron import TARGET, config_to_fields, style_of
from ckptctl.facts.megatron_words import ACTIVATIONS, ARGUMENTS, FUNCTIONS, LENGTHS
from ckptctl.planner.config_facts import Json
from ckptctl.planner.layouts import Family

ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}
"""Sizes of model parallelism: outputs are written as by one rank."""

UNSAVED = {
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save": True,
    "no_save_optim": True,
    "no_save_rng": True,
}
"""Arguments by which Megatron-LM knows that there is no optimizer or RNG state."""

LAYERS_ALIKE = {
    "add_position_embedding": True,
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_PROVIDER = ("attention_dropout", "hidden_dropout")
_NOT_ARGUMENTS = ("activation_func", "gated_linear_unit", "heterogeneous_block_specs")
_GEMMA_ALONE = ("attn_logit_softcapping", "final_logit_softcapping")
_GPT = "megatron.bridge.models.gpt_provider."
PLAIN_LAYERS = {f"{_GPT}GPTModelProvider": f"{_GPT}default_layer_spec"}
"""Layer-spec function of a provider, unless the family has its own."""
EXPERTS_RUN = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
"""Default implementation of experts; results do not depend on it."""
BRIDGE = "megatron.bridge.training."


def arguments_of(
    family: Family,
    config: Json,
    sizes: Mapping[str, int] | None = None,
    *,
    padded: int | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build Megatron-LM's arguments for a config.json.

    Args:
        family: The model type.
        config: Content of config.json.
        sizes: Axis sizes solved from the tensors, which override *config*.
        padded: Rows of the stored embedding, or None for the vocabulary size.
        dtype: The element type of the weights.
    """
    fields = config_to_fields(family, config, sizes)
    own = {new: old for old, new in ARGUMENTS.items()}
    found: dict[str, object] = {
        own.get(name, name): value for name, value in fields.items() if name not in _NOT_ARGUMENTS
    }
    tied = found.pop("share_embeddings_and_output_weights")
    function, gated = fields["activation_func"], fields["gated_linear_unit"]
    # Models with other activations are not built from arguments.
    known = (function, gated) in ACTIVATIONS.values() or (function, gated) == ("gelu", False)
    chosen = {n: (function, gated) == one for n, one in ACTIVATIONS.items()} if known else {}
    grouped = fields.get("num_query_groups") != fields["num_attention_heads"]
    return {
        **LAYERS_ALIKE,
        **(EXPERTS_RUN if fields["num_moe_experts"] else {}),
        **found,
        **chosen,
        **ONE_RANK,
        **UNSAVED,
        **precision(dtype),
        "group_query_attention": grouped,
        "use_rotary_position_embeddings": True,
        "untie_embeddings_and_output_weights": not tied,
        "padded_vocab_size": fields["vocab_size"] if padded is None else padded,
    }


def precision(dtype: str | None) -> dict[str, bool]:
    """Return the flags for the two half-precision dtypes, which both programs require."""
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}


def run_config(
    family: Family,
    config: Json,
    sizes: Mapping[str, int] | None = None,
    *,
    padded: int | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Build ``run_config.yaml``, from which Megatron-Bridge builds the model.

    Parameters are those of :func:`arguments_of`.

    Raises:
        MappingError: Bridge has no provider for the family, or cannot express config.json.
    """
    style = style_of(family)
    if not style.provider:
        raise MappingError(
            f"Megatron-Bridge has no provider for `{family.name}`",
            why="run_config.yaml must name one",
        )
    fields = config_to_fields(family, config, sizes)
    left_out = {name for name in _GEMMA_ALONE if fields[name] is None} | {LENGTHS[0]}
    fields = {name: value for name, value in fields.items() if name not in left_out}
    model: dict[str, object] = {
        TARGET: style.provider,
        **(EXPERTS_RUN if fields["num_moe_experts"] else {}),
        **fields,
        **ONE_RANK,
        **precision(dtype),
        **{name: LAYERS_ALIKE[name] for name in _PROVIDER},
        "activation_func": _function(FUNCTIONS[str(fields["activation_func"])]),
        "params_dtype": dtype_of(dtype),
        **vocabulary(fields["vocab_size"], padded),
    }
    spec = style.layer_spec or PLAIN_LAYERS.get(style.provider)
    model |= {"transformer_layer_spec": _spec(spec)} if spec else {}
    return container(model)


def container(model: Json) -> dict[str, object]:
    """Build the ``run_config.yaml`` document around a *model* section."""
    checkpoint = {
        TARGET: f"{BRIDGE}config.CheckpointConfig",
        "ckpt_format": "torch_dist",
        "fully_parallel_save": True,
        "save_optim": False,
        "save_rng": False,
    }
    return {
        TARGET: f"{BRIDGE}config.ConfigContainer",
        "checkpoint": checkpoint,
        "model": model,
        "tokenizer": None,
    }


def vocabulary(size: object, padded: int | None) -> dict[str, object]:
    """Return Bridge's fields that pad a vocabulary of *size* to *padded* rows."""
    if padded is None or not isinstance(size, int) or size >= padded:
        return {"vocab_size": size, "should_pad_vocab": False}
    powers = (1 << n for n in range(padded.bit_length()))
    least = next((one for one in powers if -(-size // one) * one == padded), padded)
    return {"vocab_size": size, "should_pad_vocab": True, "make_vocab_size_divisible_by": least}


def dtype_of(dtype: str | None) -> dict[str, object]:
    """Return Bridge's reference to a *dtype*."""
    return _function(f"torch.{dtype or 'float32'}")


def _function(name: str) -> dict[str, object]:
    """Return Bridge's reference to an object that is not called."""
    return {TARGET: name, "_call_": False}


def _spec(name: str) -> dict[str, object]:
    """Return the layer-spec function, with arguments if it is Megatron-Core's own."""
    if name.startswith("megatron.bridge."):
        return _function(name)
    return {TARGET: name, "_partial_": True, "_args_": [], "use_transformer_engine": True}
