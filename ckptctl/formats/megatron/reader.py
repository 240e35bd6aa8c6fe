"""What a checkpoint of Megatron-LM's legacy form holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.formats.assets import beside
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.megatron.files import OPTIMIZER, POINTER, evidence, folder_named, is_model
from ckptctl.formats.megatron.grid import Grid, read_grid
from ckptctl.formats.megatron.join import JoinedModel
from ckptctl.formats.megatron.rules import load
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.leaves import uncompared, unknown_notes
from ckptctl.formats.shared.tags import tag_folder
from ckptctl.formats.torch_file import NO_CHECKSUMS, Leaves
from ckptctl.storage.files import source_files

_SAME = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "kv_channels": ("head_dim",),
    "rotary_base": ("rope_theta",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
}
_ROTARY = "rope"
_LEFT_OUT = {
    "optimizer": "its state has no names of parameters",
    "rng_state": "each rank has its own",
    "rerun_state_machine": "each rank has its own",
}


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the folder *path*; see :meth:`Format.read`."""
    folder = tag_folder(path, asked.tag, POINTER, evidence, folder_named)
    rules = load(asked.rules) if asked.rules else None
    faults = Faults(path, asked.partial)
    with source_files(path) as files:
        grid = read_grid(files, folder, faults)
        model = JoinedModel(files, grid, rules, str(path / folder))
        others = _others(grid, path)
        sizes = {state.file: files.size(state.file) for state in grid.states.values()}
    own = {folder, POINTER, *(file.split("/")[0] for file in grid.files.values())}
    around = beside(path, own)
    return replace(
        around.catalog(path, name),
        files=sizes,
        tensors={**model.tensors, **others.tensors},
        blobs=others.blobs,
        arguments=dict(_facts(grid.first.arguments)),
        notes=(
            *_notes(grid, model, path),
            *others.notes,
            *unknown_notes(others.blobs.values()),
        ),
        replicas=model.replicas if asked.replicas else {},
        findings=tuple(faults.findings),
        lost=model.lost,
    )


def _others(grid: Grid, root: Path) -> Leaves:
    """Return what the first file has beside the model: the iteration, the scheduler, ..."""
    found, first = Leaves(), grid.first
    rest = {
        key: value
        for key, value in first.content.items()
        if not is_model(key) and key not in _LEFT_OUT
    }
    found.add(rest, (), first.file, str(root / first.file))
    return found


def _notes(grid: Grid, model: JoinedModel, root: Path) -> Iterator[str]:
    first = grid.first
    if not first.checksums:
        yield NO_CHECKSUMS
    for key, reason in _LEFT_OUT.items():
        if first.content.get(key) is not None:
            yield f"not carried along: `{key}`, {reason}"
    if any((root / file).with_name(OPTIMIZER).is_file() for file in grid.files.values()):
        yield f"not carried along: `{OPTIMIZER}`, flat buffers without names of parameters"
    if any(state.extra for state in grid.states.values()):
        yield "not carried along: `_extra_state` of layers, which has no tensors of the model"
    yield from uncompared(model.copies.uncompared)


def _facts(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the facts that *arguments* state, under each of the names that config.json may use."""
    rotary = arguments.get("position_embedding_type") == _ROTARY
    for name, called in _SAME.items():
        value = arguments.get(name)
        if isinstance(value, (int, float)) and (rotary or name != "rotary_base"):
            yield from ((one, value) for one in called)
    heads = arguments.get("num_query_groups")
    if arguments.get("group_query_attention") is True and isinstance(heads, int):
        yield "num_key_value_heads", heads
    untied = arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        yield "tie_word_embeddings", not untied
