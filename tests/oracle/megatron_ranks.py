"""GPT models of Megatron-Core on gloo ranks, saved as Megatron-LM's legacy format is.

``save_checkpoint`` and ``generate_state_dict`` of ``megatron/training/checkpointing.py`` are not in
the package; what they write is written here: the models' own ``state_dict_for_save_checkpoint()``,
beside what surrounds it. What the whole tensors are is left to Megatron-Core's
``sharded_state_dict``, the basis of its newer format.
"""

from __future__ import annotations

import random
import zlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

VOCABULARY, WIDTH, HIDDEN, LENGTH = 48, 16, 24, 8


NONE: Mapping[str, Any] = {}


class Case(NamedTuple):
    """A model and how ranks divide it.

    Attributes:
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline stages.
        virtual: Parts of the model in each stage.
        expert: Expert-parallel ranks.
        layers: Transformer layers.
        options: Fields of ``TransformerConfig``.
        tied: Whether the output layer is the embedding.
        context: Context-parallel ranks, which have the same parameters.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    layers: int = 4
    options: Mapping[str, Any] = NONE
    tied: bool = False
    context: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.expert * self.context


GATED = {"gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {**GATED, "num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2}
CASES = {
    "tp2": Case(2, options=GATED),
    "tp4_biases": Case(
        4, options={"num_query_groups": 4, "add_qkv_bias": True, "qk_layernorm": True}
    ),
    "pp2": Case(1, 2, options=GATED),
    "tp2_pp2": Case(2, 2, options={**GATED, "normalization": "RMSNorm"}, tied=True),
    "tp2_pp2_vp2": Case(2, 2, 2, options=GATED),
    "pp4_uneven": Case(1, 4, layers=5, options={**GATED, "num_layers_in_first_pipeline_stage": 2}),
    "ep2": Case(1, 1, 1, 2, 2, EXPERTS),
    "tp2_ep2": Case(
        2,
        1,
        1,
        2,
        2,
        {**EXPERTS, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    ),
    "tp2_pp2_ep2": Case(2, 2, 1, 2, 4, {**EXPERTS, "moe_layer_freq": [0, 1, 0, 1]}),
}


def save(rank: int, world: int, folder: Path, case: Case) -> None:
    """Write ``checkpoint/`` as Megatron does, and ``expected.pt``, the whole tensors."""
    models = _models(case)
    _fill(models, case)
    _write(folder / "checkpoint", models, rank, world, case)
    pieces = [piece for number, model in enumerate(models) for piece in _pieces(model, number)]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, pieces)
    if rank == 0:
        torch.save(_whole([piece for found in gathered for piece in found]), folder / "expected.pt")


def load(rank: int, world: int, file: Path, case: Case) -> None:
    """Load whole tensors, strictly, into the same model on one rank."""
    alone = case._replace(tensor=1, pipeline=1, virtual=1, expert=1)
    uneven = "num_layers_in_first_pipeline_stage"
    options = {key: value for key, value in case.options.items() if key != uneven}
    (model,) = _models(alone._replace(options=options))
    found = torch.load(file, weights_only=True)
    if case.tied and case.pipeline > 1:  # the last stage has a copy of the embedding
        copy = found.pop("output_layer.weight")
        assert torch.equal(copy, found["embedding.word_embeddings.weight"])
    wanted = {key for key, value in model.state_dict().items() if value is not None}
    assert wanted == found.keys(), wanted ^ found.keys()
    model.load_state_dict(found, strict=False)
    assert all(torch.equal(model.state_dict()[key], found[key]) for key in found)


def _models(case: Case) -> list[Any]:
    import os
    import warnings

    warnings.simplefilter("ignore")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual if case.virtual > 1 else None,
        expert_model_parallel_size=case.expert,
        context_parallel_size=case.context,
    )
    # Of several context-parallel ranks attention without Transformer Engine must not know.
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=WIDTH,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual if case.virtual > 1 else None,
        expert_model_parallel_size=case.expert,
        pipeline_dtype=torch.float32,
        **{"num_query_groups": 2, **case.options},
    )
    found = []
    for stage in range(case.virtual):
        virtual = stage if case.virtual > 1 else None
        experts = case.options.get("num_moe_experts")
        if experts:
            spec: Any = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        else:
            spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
        found.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCABULARY,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(
                    ignore_virtual=False, vp_stage=virtual
                ),
                post_process=parallel_state.is_pipeline_last_stage(
                    ignore_virtual=False, vp_stage=virtual
                ),
                share_embeddings_and_output_weights=case.tied,
                vp_stage=virtual,
            )
        )
    return found


def _fill(models: list[Any], case: Case) -> None:
    """Give every parameter values that no other rank's or parameter's has, copies the same."""
    from megatron.core import parallel_state as at

    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            divided = getattr(parameter, "tensor_model_parallel", False)
            expert = not getattr(parameter, "allreduce", True)
            who = (
                number,
                at.get_pipeline_model_parallel_rank(),
                at.get_tensor_model_parallel_rank() if divided else -1,
                at.get_expert_model_parallel_rank() if expert else -1,
            )
            if case.tied and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                name, who = "tied", (0, 0, who[2], -1)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {who}".encode()))
            parameter.data = torch.randn(parameter.shape, generator=generator)


def _write(folder: Path, models: list[Any], rank: int, world: int, case: Case) -> None:
    from megatron.core import parallel_state as at
    from megatron.core.transformer.enums import AttnBackend

    states = [model.state_dict_for_save_checkpoint() for model in models]
    keys = [f"model{number}" for number in range(len(models))] if len(models) > 1 else ["model"]
    arguments = Namespace(
        rank=rank,
        world_size=world,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual if case.virtual > 1 else None,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.tensor,
        num_layers=case.layers,
        num_experts=case.options.get("num_moe_experts"),
        padded_vocab_size=VOCABULARY,
        swiglu=case.options.get("gated_linear_unit", False),
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
    )
    random_state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    content = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 10,
        **dict(zip(keys, states, strict=True)),
        "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}},
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 80},
        "rng_state": [random_state],
        "num_floating_point_operations_so_far": 123.0,
    }
    stage = f"_{at.get_pipeline_model_parallel_rank():03d}" if case.pipeline > 1 else ""
    expert = f"_{at.get_expert_model_parallel_rank():03d}" if case.expert > 1 else ""
    name = f"mp_rank_{at.get_tensor_model_parallel_rank():02d}{stage}{expert}"
    target = folder / "iter_0000010" / name
    target.mkdir(parents=True)
    torch.save(content, target / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


def _pieces(model: Any, number: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """What Megatron-Core says of the tensors of one model: name, whole shape, place, values."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group({"non_homogeneous_layers": True})
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    found: list[Any] = []
    pending = list(state.values())
    while pending:
        value = pending.pop()
        if isinstance(value, ShardedTensor):
            stacked = value.prepend_axis_num  # experts, along a dimension of their own
            name = _own_name(value.key, *value.global_offset[:stacked])
            shape, place = value.global_shape[stacked:], value.global_offset[stacked:]
            found.append((name, shape, place, value.data.clone()))
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
    return found


def _own_name(key: str, *expert: int) -> str:
    """The module's own name: the sharded one is that of modules with fused norms."""
    key = key.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
    key = key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")
    return key.replace(".experts.experts.", f".experts.local_experts.{expert}.".translate(_BARE))


_BARE = str.maketrans("", "", "(),")


def _whole(pieces: list[Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, shape, offset, data in pieces:
        whole = found.setdefault(key, torch.full(shape, float("nan")))
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, data.shape, strict=True))]
        assert torch.equal(part, data) or part.isnan().all(), key
        part.copy_(data)
    assert not any(whole.isnan().any() for whole in found.values())
    return found
