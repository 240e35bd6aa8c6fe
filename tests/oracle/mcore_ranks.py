"""What ranks do with Megatron-Core's GPT models: run, save and load them as Megatron-LM does.

``save_checkpoint`` and ``load_checkpoint`` of ``megatron/training/checkpointing.py`` are not in the
package; the calls that they make of ``dist_checkpointing`` are made here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from tests.oracle.mcore_build import build, norms_of_transformer_engine
from tests.oracle.mcore_models import DIVISIBLE, VOCABULARY, Ranks, Recipe, padded
from tests.oracle.mcore_wrong import wrongs
from tests.oracle.models import tokens

SPELLINGS: Mapping[str, Mapping[str, bool]] = {
    "stacked": {"non_homogeneous_layers": False, "singleton_local_shards": False},
    "separate": {"non_homogeneous_layers": True, "singleton_local_shards": False},
    "singleton": {"non_homogeneous_layers": True, "singleton_local_shards": True},
}
ITERATION = "iter_0000010"


def prove(
    rank: int,
    world: int,
    out: Path,
    recipe: Recipe,
    how: Sequence[Ranks],
    given: Mapping[str, Path],
) -> None:
    """Load every checkpoint on every division of *world* ranks, run it, change it, save it.

    Writes ``logits-CHECKPOINT-RANKS.pt``, ``logits-changed-RANKS.pt`` of what is saved as
    ``saved-SPELLING-RANKS/``; on one rank also ``listed.pt``, ``norms.pt``, ``wrong.pt`` and
    ``live.pt``.

    Args:
        rank: This rank.
        world: World size.
        out: A folder.
        recipe: The model.
        how: Divisions; those of another world size are left out.
        given: Checkpoints of Megatron-Core by name.
    """
    for ranks in how:
        if ranks.world != world:
            continue
        for name, folder in given.items():
            model = build(recipe, ranks)
            load(model, folder)
            keep(logits(model), out / f"logits-{name}-{ranks}.pt")
        if world == 1:
            _alone(out, model, recipe)
        change(model)
        keep(logits(model), out / f"logits-changed-{ranks}.pt")
        for spelling in SPELLINGS:
            save(model, out / f"saved-{spelling}-{ranks}", spelling, recipe, ranks)
        if world == 1:
            torch.save(whole(model), out / "live.pt")
        if recipe.named_twice:
            _under_own_names(out, model, recipe, ranks)


def run_with_windows(
    rank: int, world: int, out: Path, recipe: Recipe, folder: Path, lefts: Sequence[int]
) -> None:
    """Load *folder* into models with windows of ``(left, 0)``: ``logits-left-LEFT.pt``."""
    for left in lefts:
        model = build(
            recipe._replace(options={**recipe.options, "window_size": (left, 0)}), Ranks()
        )
        load(model, folder)
        torch.save(logits(model), out / f"logits-left-{left}.pt")


def _under_own_names(out: Path, model: GPTModel, recipe: Recipe, ranks: Ranks) -> None:
    """Save the same with the names of the local specification: ``saved-local-RANKS/``."""
    local = build(recipe._replace(local=True), ranks)
    local.load_state_dict(model.state_dict())
    save(local, out / f"saved-local-{ranks}", "stacked", recipe, ranks)
    if ranks.world == 1:
        torch.save(whole(local), out / "live-local.pt")
        torch.save([*listed(local, "separate")], out / "local.pt")


def change(model: GPTModel) -> None:
    """Give *model* other values, the same however it is divided."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value is not None and weighs(name):
                value.copy_(0.8 * value + 0.2 * torch.sin(9 * value))


def _alone(out: Path, model: GPTModel, recipe: Recipe) -> None:
    """Write what one rank can say of the whole model."""
    torch.save({spelling: listed(model, spelling) for spelling in SPELLINGS}, out / "listed.pt")
    if not recipe.pattern:
        torch.save(norms_of_transformer_engine(model.config), out / "norms.pt")
    right = {key: value.clone() for key, value in model.state_dict().items() if value is not None}
    found = {}
    for name, state in wrongs(model.config, right):
        model.load_state_dict(state, strict=False)
        found[name] = logits(model)
    model.load_state_dict(right, strict=False)
    torch.save(found, out / "wrong.pt")


def keep(found: torch.Tensor | None, file: Path) -> None:
    """Write the logits of the last stage, which all its ranks have alike."""
    copies = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank
    if found is not None and not any(rank() for rank in copies):
        torch.save(found, file)


def logits(model: GPTModel) -> torch.Tensor | None:
    """Return the logits of :func:`tests.oracle.models.tokens` on the last stage, else ``None``."""
    ids = tokens()
    stages = parallel_state.get_pipeline_model_parallel_group()
    stage = stages.rank()
    if stage:
        hidden = torch.empty(ids.shape[1], ids.shape[0], model.config.hidden_size)
        dist.recv(hidden, group=stages, group_src=stage - 1)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        out: torch.Tensor = model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    if stage + 1 < stages.size():
        dist.send(out.contiguous(), group=stages, group_dst=stage + 1)
        return None
    return out[..., :VOCABULARY].clone()


def sharded(model: GPTModel, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what Megatron-Core is to save of *model*, or wants to load."""
    known = ensure_metadata_has_dp_cp_group(dict(metadata or {}))
    state: dict[str, Any] = model.sharded_state_dict(metadata=known)
    return state


def listed(model: GPTModel, spelling: str) -> dict[str, tuple[int, ...]]:
    """Return the key and the whole shape of every tensor that this rank would save."""
    state = sharded(model, SPELLINGS[spelling])
    apply_factories(state)
    return {piece.key: tuple(piece.global_shape) for piece in _pieces(state)}


def whole(model: GPTModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model on one rank under the names of the spelling ``separate``."""
    state = sharded(model, SPELLINGS["separate"])
    apply_factories(state)
    found: dict[str, torch.Tensor] = {}
    for piece in _pieces(state):
        target = found.setdefault(piece.key, torch.full(piece.global_shape, torch.nan))
        own = piece.prepend_axis_num
        place = *piece.global_offset[:own], *map(slice, piece.global_offset[own:], _ends(piece))
        target[place].copy_(piece.data)
    return found


def _ends(piece: ShardedTensor) -> list[int]:
    own = piece.prepend_axis_num
    sizes = piece.local_shape
    return [at + size for at, size in zip(piece.global_offset[own:], sizes, strict=True)]


def _pieces(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _pieces(value)


def load(model: GPTModel, folder: Path) -> None:
    """Fill *model* from the run *folder*, nothing missing and nothing left over.

    As ``load_checkpoint`` does: the tracker file names the iteration, the metadata of the content
    says which spelling to ask for. What may be left over is ``_extra_state``, of which Transformer
    Engine's modules have more.
    """
    target = str(inner(folder))
    wanted = {"model": sharded(model, dist_checkpointing.load_content_metadata(target))}
    state, missing, unexpected = dist_checkpointing.load(
        wanted, target, strict=StrictHandling.RETURN_ALL
    )
    problems = [*unexpected, *filter(weighs, missing)]
    assert not problems, problems
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    problems = [*filter(weighs, missing), *filter(weighs, unexpected)]
    assert not problems, problems


def inner(folder: Path) -> Path:
    """Return the folder of a run that its tracker file names."""
    named = (folder / "latest_checkpointed_iteration.txt").read_text()
    return folder / (named if named == "release" else f"iter_{int(named):07d}")


def weighs(key: str) -> bool:
    return "_extra_state" not in key


def save(model: GPTModel, folder: Path, spelling: str, recipe: Recipe, ranks: Ranks) -> None:
    """Write a run folder with one iteration, as ``save_checkpoint`` does."""
    target = folder / ITERATION
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    metadata = dict(SPELLINGS[spelling])
    content = {
        "args": arguments(recipe, ranks),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": sharded(model, metadata),
        "num_floating_point_operations_so_far": 123.0,
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 80},
    }
    dist_checkpointing.save(content, str(target), ("torch_dist", 1), content_metadata=metadata)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("10")


def arguments(recipe: Recipe, ranks: Ranks) -> Namespace:
    """Return the training program's arguments that make the model."""
    fields = {**recipe.model, **recipe.options, **recipe.extra}
    activation, gated = fields.pop("activation_func"), fields.pop("gated_linear_unit")
    tied = fields.pop("share_embeddings_and_output_weights")
    scaled = fields.pop("rope_scaling", False)
    fields["apply_layernorm_1p"] = fields.pop("layernorm_zero_centered_gamma", False)
    fields["norm_epsilon"] = fields.pop("layernorm_epsilon")
    fields["num_experts"] = fields.pop("num_moe_experts", None)
    return Namespace(
        **{"rotary_percent": 1.0, "expert_tensor_parallel_size": ranks.tensor, **fields},
        swiglu=gated and activation == "silu",
        quick_geglu=gated and activation == "quick_gelu",
        squared_relu=activation == "squared_relu",
        group_query_attention=not recipe.latent,
        multi_latent_attention=recipe.latent,
        use_rope_scaling=scaled,
        untie_embeddings_and_output_weights=not tied,
        max_position_embeddings=4096,
        seq_length=4096,
        vocab_size=VOCABULARY,
        padded_vocab_size=padded(VOCABULARY, ranks.tensor),
        make_vocab_size_divisible_by=DIVISIBLE,
        tensor_model_parallel_size=ranks.tensor,
        pipeline_model_parallel_size=ranks.pipeline,
        expert_model_parallel_size=ranks.expert,
        world_size=ranks.world,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.local,
    )
