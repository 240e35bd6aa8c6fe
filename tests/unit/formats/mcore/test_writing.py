"""What is written for Megatron-Core, as torch's own readers see it."""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ckptctl.errors import RefusedError
from ckptctl.formats.base import SPLIT_BYTES, OutputTensor
from ckptctl.formats.mcore.layers import LayerStorage
from ckptctl.formats.mcore.mcore_writing import build_common_content, lay_out_common_file
from ckptctl.formats.mcore.objects import make_extra_states
from tests.unit.formats.mcore.written import laid_out, write

LAYERS = 3
NAMES = {
    "self_attention.linear_qkv.weight": (8, 4),
    "self_attention.linear_qkv.layer_norm_weight": (4,),
    "self_attention.linear_proj.weight": (4, 4),
    "mlp.router.weight": (2, 4),
    "mlp.experts.experts.linear_fc1.weight": (2, 6, 4),
    "mlp.experts.experts.linear_fc2.weight": (2, 4, 3),
}
MODEL = {
    "embedding.word_embeddings.weight": torch.randn(8, 4),
    **{
        f"decoder.layers.{layer}.{name}": torch.randn(shape).bfloat16()
        for layer in range(LAYERS)
        for name, shape in NAMES.items()
    },
    "decoder.final_layernorm.weight": torch.randn(4),
    "output_layer.weight": torch.randn(8, 4),
}


def metadata(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stack_layers", [False, True])
def test_written_mcore_checkpoint_loads_in_torch(stack_layers: bool, tmp_path: Path) -> None:
    inner = write(tmp_path, MODEL, stack_layers=stack_layers, max_shard_size=100)
    assert len(list(inner.glob("*.distcp"))) > 2
    held = {
        name: torch.zeros(one.size, dtype=one.properties.dtype)
        for name, one in metadata(inner).state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(held, checkpoint_id=inner)
    for name, value in MODEL.items():
        if stack_layers and ".layers." in name:
            _, _, layer, rest = name.split(".", 3)
            assert torch.equal(held[f"decoder.layers.{rest}"][int(layer)], value)
        else:
            assert torch.equal(held[name], value)
    assert len(held) == (len(NAMES) + 3 if stack_layers else len(MODEL))


def test_stacked_tensor_has_one_chunk_per_layer(tmp_path: Path) -> None:
    inner = write(tmp_path, MODEL, stack_layers=True)
    found = metadata(inner).state_dict_metadata[
        "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    ]
    assert isinstance(found, TensorStorageMetadata)
    assert [(tuple(one.offsets), tuple(one.sizes)) for one in found.chunks] == [
        ((layer, 0, 0, 0), (1, 2, 6, 4)) for layer in range(LAYERS)
    ]


EXPECTED = {
    False: [
        *(
            f"decoder.layers.{layer}.{module}._extra_state/shard_0_1"
            for layer in range(LAYERS)
            for module in (
                *("self_attention.linear_qkv", "self_attention.core_attention"),
                "self_attention.linear_proj",
            )
        ),
        *(
            f"decoder.layers.{layer}.mlp.experts.experts.{module}._extra_state/shard_{expert}_2"
            for layer in range(LAYERS)
            for module in ("linear_fc1", "linear_fc2")
            for expert in range(2)
        ),
        "decoder.final_layernorm._extra_state/shard_0_1",
    ],
    True: [
        *(
            f"decoder.layers.{module}._extra_state/shard_{layer}_3"
            for layer in range(LAYERS)
            for module in (
                *("self_attention.linear_qkv", "self_attention.core_attention"),
                "self_attention.linear_proj",
            )
        ),
        *(
            f"decoder.layers.mlp.experts.experts.{module}._extra_state/shard_{layer}.{expert}_3.2"
            for layer in range(LAYERS)
            for module in ("linear_fc1", "linear_fc2")
            for expert in range(2)
        ),
        "decoder.final_layernorm._extra_state/shard_0_1",
    ],
}


def test_gated_delta_net_parts_have_no_extra_state() -> None:
    attention = "decoder.layers.0.self_attention"
    parts = ("in_proj.weight.query", "in_proj.layer_norm_weight", "conv1d.weight.key", "A_log")
    names = [f"{attention}.{part}" for part in (*parts, "out_norm.weight", "out_proj.weight")]
    tensors = [OutputTensor(name, "float32", (4,), (name,)) for name in names]
    expected = [f"{attention}.{part}" for part in ("in_proj", "out_norm", "out_proj")]
    found = [
        blob.name.partition("._extra_state")[0]
        for blob in make_extra_states(tensors, LayerStorage())
    ]
    assert found == expected


def test_output_layer_of_hybrid_model_has_extra_state() -> None:
    """``HybridModel`` requires it, ``GPTModel`` does not."""
    mixer = "decoder.layers.0.mixer"
    parts = ("in_proj.weight.z", "in_proj.layer_norm_weight", "conv1d.bias.x", "D", "norm.weight")
    names = [f"{mixer}.{part}" for part in (*parts, "out_proj.weight")]
    names += ["decoder.final_norm.weight", "output_layer.weight"]
    tensors = [OutputTensor(name, "float32", (4,), (name,)) for name in names]
    found = [
        blob.name.partition("._extra_state")[0]
        for blob in make_extra_states(tensors, LayerStorage())
    ]
    modules = [f"{mixer}.in_proj", f"{mixer}.out_proj", "decoder.final_norm", "output_layer"]
    assert found == modules


@pytest.mark.parametrize("stack_layers", [False, True])
def test_modules_get_empty_extra_states(stack_layers: bool, tmp_path: Path) -> None:
    inner = write(tmp_path, MODEL, stack_layers=stack_layers)
    content = metadata(inner)
    found = {
        name
        for name, one in content.state_dict_metadata.items()
        if isinstance(one, BytesStorageMetadata)
    }
    assert found == set(EXPECTED[stack_layers])
    for index, place in content.storage_data.items():
        if index.fqn in found:
            with (inner / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                item = io.BytesIO(file.read(place.length))
            assert torch.load(item, weights_only=True) == [None]


@pytest.mark.parametrize("stack_layers", [False, True])
def test_tracker_metadata_and_common_files_are_written(stack_layers: bool, tmp_path: Path) -> None:
    inner = write(tmp_path, MODEL, stack_layers=stack_layers)
    assert inner == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((inner / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = torch.load(inner / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    apart = common["content_metadata"].get("non_homogeneous_layers", False)
    assert apart is not stack_layers
    assert common["content_metadata"]["singleton_local_shards"] is False


def test_common_pt_args_are_a_namespace(tmp_path: Path) -> None:
    told = {"num_layers": 2, "rotary_base": 1e6, "swiglu": True}
    layout = lay_out_common_file(build_common_content(told, stacked=False))
    file = tmp_path / "common.pt"
    file.write_bytes(b"".join(piece for _, piece in layout.iterate_frame([])))
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        pickle = archive.read("common/data.pkl")
    named = [arg for op, arg, _ in pickletools.genops(pickle) if op.name == "GLOBAL"]
    assert named == ["argparse Namespace"]
    with pytest.raises(Exception, match=r"argparse\.Namespace"):
        torch.load(file, weights_only=True)  # unless it is named as safe, as Megatron-Core does
    found = torch.load(file, weights_only=False)["args"]
    assert vars(found) == told


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.bias", torch.zeros(8), "layer 1 differs from"),
        ("decoder.layers.2.mlp.router.weight", torch.zeros(3, 4), "layer 2 differs from"),
        ("decoder.layers.4.mlp.router.weight", torch.zeros(2, 4), "some layers are missing"),
    ],
)
def test_inhomogeneous_layers_cannot_be_stacked(name: str, value: torch.Tensor, why: str) -> None:
    with pytest.raises(RefusedError, match="cannot be stacked") as caught:
        laid_out({**MODEL, name: value}, stack_layers=True)
    assert why in str(caught.value.why)
    laid_out({**MODEL, name: value})


def test_large_stacked_tensors_are_split_into_boxes() -> None:
    rows = SPLIT_BYTES // 4 + 2
    large = {
        f"decoder.layers.{layer}.mlp.linear_fc2.weight": torch.empty(rows, 2, device="meta")
        for layer in range(2)
    }
    output = laid_out(large, stack_layers=True)
    for places in output.boxes.values():
        assert len(places) == 3
        assert sum(place.box.sizes[0] for place in places) == rows
