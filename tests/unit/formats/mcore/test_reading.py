"""Megatron-Core's distributed checkpoints: every spelling of a model is read as one."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Finding
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptctl.facts import MEGATRON
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp import locating
from ckptctl.planner.retention import Policy
from ckptctl.runs.removal import plan_prune
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.zips.items import read_item_by_pattern
from ckptctl.storage.zips.zip_reader import StoredTensor
from tests.checkpoints.mcore import write
from tests.checkpoints.readers import differences
from tests.sweeps import one_in

LAYERS, WIDTH, HIDDEN, EXPERTS = 4, 6, 8, 3
TOLD = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_experts": EXPERTS}
PREFIXES = ("", "optimizer.state.exp_avg.")


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    """Return a model, and a moment of each tensor, in the canonical spelling."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (10, WIDTH)}
    for layer in range(LAYERS):
        inside = f"decoder.layers.{layer}."
        shapes |= {
            f"{inside}input_layernorm.weight": (WIDTH,),
            f"{inside}self_attention.linear_qkv.weight": (12, WIDTH),
            f"{inside}mlp.shared_experts.linear_fc1.weight": (2 * HIDDEN, WIDTH),
            f"{inside}mlp.experts.experts.linear_fc1.weight": (EXPERTS, 2 * HIDDEN, WIDTH),
            f"{inside}mlp.experts.experts.linear_fc2.weight": (EXPERTS, WIDTH, HIDDEN),
        }
    return {f"{p}{name}": torch.randn(shape) for p in PREFIXES for name, shape in shapes.items()}


def test_stacked_mergers_are_read_like_layers(tmp_path: Path) -> None:
    """As Megatron-Bridge saves the vision tower of Qwen 3 VL."""
    prefix, suffix = "vision_model.decoder.deepstack_merger_list", "linear_fc2.weight"
    value = torch.randn(3, WIDTH, HIDDEN)
    write(tmp_path / "run", {f"{prefix}.{suffix}": value})
    catalog = formats.resolve_codecs(formats.open_checkpoint(tmp_path / "run"))
    assert {name: entry.shape for name, entry in catalog.tensors.items()} == {
        f"{prefix}.{place}.{suffix}": (WIDTH, HIDDEN) for place in range(3)
    }


def stacked(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return layers along dimension 0 of one tensor."""
    rows: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.items():
        before, dot, after = name.partition("decoder.layers.")
        rows.setdefault(before + dot + after.partition(".")[2], []).append(tensor)
    return {
        name: torch.stack(held) if "decoder.layers." in name else held[0]
        for name, held in rows.items()
    }


def halved(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gate and up by themselves, and each expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        above, experts, inside = name.partition("experts.experts.")
        alone = {f"{above}{experts}{n}.{inside}": t for n, t in enumerate(tensor)}
        for one, part in (alone if experts else {name: tensor}).items():
            if one.endswith("fc1.weight"):
                found |= {f"{one}_w": part[:HIDDEN], f"{one}_v": part[HIDDEN:]}
            else:
                found[one] = part
    return found


def below_module(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return names as NeMo has them, and the state of a chain of optimizers."""
    found = {}
    for name, tensor in model.items():
        optimizer, moment, parameter = name.rpartition(PREFIXES[1])
        chained = f"chained_0.{moment}" if moment else ""
        found[f"{optimizer}{chained}module.{parameter}"] = tensor
    return found


def both(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return stacked(halved(model))


def same(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return model


def values(path: Path, scratch: Path) -> dict[str, Any]:
    ckptctl.convert(path, scratch / "whole.pt", to="torch", only="all", exclude=["args*"])
    found = dict(torch.load(scratch / "whole.pt", weights_only=True))
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def wrong(folder: Path, level: Literal["fast", "full"] = "full") -> list[Finding]:
    """Return what is wrong, other than that these are no whole model of any type."""
    found = ckptctl.verify(folder, level=level).findings
    return [one for one in found if one.severity != "warning"]


SPELLED = [same, stacked, halved, both, below_module]


@pytest.mark.parametrize("cut", [(), (2,), (LAYERS, 2), (1, 1, 2)])
@pytest.mark.parametrize("spelled", one_in(7, SPELLED))
def test_every_spelling_and_sharding_reads_as_same_model(
    model: dict[str, torch.Tensor], tmp_path: Path, spelled: Any, cut: tuple[int, ...]
) -> None:
    saved = spelled(model)
    fits = {
        name: cut
        for name, tensor in saved.items()
        if all(n % c == 0 for n, c in zip(tensor.shape, cut, strict=False))
    }
    folder = write(tmp_path / "iter_0000010", saved, TOLD, cuts=fits)
    read = formats.open_checkpoint(folder)
    assert {name: one.shape for name, one in read.tensors.items()} == {
        name: tuple(one.shape) for name, one in model.items()
    }
    assert not differences(values(folder, tmp_path), model)
    assert not wrong(folder)


def test_stacked_item_is_read_once(
    model: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = stacked(model)
    catalog = formats.open_checkpoint(write(tmp_path / "run", held, TOLD))
    read: list[object] = []
    real = read_item_by_pattern

    def counted(files: SourceFiles, *place: Any, **how: Any) -> tuple[StoredTensor, int, int]:
        read.append(place)
        return real(files, *place, **how)

    monkeypatch.setattr(locating, "read_item_by_pattern", counted)
    formats.resolve_codecs(catalog)
    assert len(read) == len(set(read)) == len(held)


def test_strided_stacked_items_split_by_layer(tmp_path: Path) -> None:
    """An item may hold a transposed tensor; torch keeps its strides."""
    stack = torch.arange(24.0).reshape(3, 2, 4)
    names = "decoder.layers.mlp.linear_fc2.weight", "decoder.layers.mlp.experts.experts.0.x"
    folder = write(tmp_path / "one", dict.fromkeys(names, stack))
    content = io.BytesIO()
    described = pickle.loads((folder / ".metadata").read_bytes())
    for info in described.storage_data.values():
        info.offset = content.tell()
        torch.save(stack.permute(2, 0, 1).contiguous().permute(1, 2, 0), content)
        info.length = content.tell() - info.offset
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    found = values(folder, tmp_path)
    for layer, row in enumerate(stack):
        assert torch.equal(found[f"decoder.layers.{layer}.mlp.linear_fc2.weight"], row)
        assert torch.equal(found[f"decoder.layers.{layer}.mlp.experts.experts.x"], row[None])


def test_changed_byte_in_stacked_tensor_fails_checksum(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one", both(model), TOLD)
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    needle = model["decoder.layers.2.input_layernorm.weight"].numpy().tobytes()
    content[content.index(needle)] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    (finding,) = wrong(folder)
    assert "checksum" in finding.what
    assert finding.tensor
    assert finding.tensor.endswith("input_layernorm.weight")


ATTENTION = "decoder.layers.self_attention_"


def write_stacked_kinds(folder: Path, record: str) -> dict[str, torch.Tensor]:
    """Write three layers as Megatron-Bridge does those of Gemma 4, with a ``run_config.yaml``."""
    state = {
        "decoder.layers.input_layernorm.weight": torch.randn(3, WIDTH),
        f"{ATTENTION}sliding.linear_proj.weight": torch.randn(2, WIDTH, 4),
        f"{ATTENTION}global.linear_proj.weight": torch.randn(1, WIDTH, 8),
    }
    write(folder, state)
    (metadata,) = folder.rglob(".metadata")
    (metadata.parent / "run_config.yaml").write_text(record)
    return state


@pytest.mark.parametrize("pattern", ["[true, false, true]", "[1, 0, 1]", "2"])
def test_layers_stacked_by_kind_get_numbers_of_layers(pattern: str, tmp_path: Path) -> None:
    record = f"model: {{num_layers: 3, window_size: [15, 0], window_attn_skip_freq: {pattern}}}"
    state = write_stacked_kinds(tmp_path / "run", record)
    ckptctl.convert(tmp_path / "run", tmp_path / "out.pt", to="torch")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    found = {key: value for key, value in saved.items() if torch.is_tensor(value)}
    name = "decoder.layers.{}.self_attention_{}.linear_proj.weight"
    sliding = state[f"{ATTENTION}sliding.linear_proj.weight"]
    expected = {
        name.format(0, "sliding"): sliding[0],
        name.format(1, "global"): state[f"{ATTENTION}global.linear_proj.weight"][0],
        name.format(2, "sliding"): sliding[1],
    }
    norms = state["decoder.layers.input_layernorm.weight"]
    expected |= {f"decoder.layers.{n}.input_layernorm.weight": norms[n] for n in range(3)}
    assert not differences(found, expected)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("model: {}", "no file states"),
        ("model: {num_layers: 3, window_attn_skip_freq: 2}", "no file states"),
        (
            "model: {num_layers: 3, window_size: [15, 0], window_attn_skip_freq: [1, 0, 0]}",
            "states 1",
        ),
        ("model: {num_layers: 3, window_size: [15, 0], window_attn_skip_freq: [1, 0]}", "no file"),
    ],
)
def test_unknown_numbers_of_stacked_layers_are_unsupported(
    record: str, why: str, tmp_path: Path
) -> None:
    write_stacked_kinds(tmp_path / "run", record)
    with pytest.raises(UnsupportedError, match="numbers of stacked layers are unknown") as error:
        formats.open_checkpoint(tmp_path / "run")
    assert why in (error.value.why or "")


def test_run_opens_iteration_in_tracker_file(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for step in (10, 20):
        write(tmp_path / "run" / f"iter_{step:07d}", stacked(model), TOLD)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    run = tmp_path / "run"
    assert Path(formats.open_checkpoint(run).path).name == "iter_0000010"
    assert (
        Path(formats.open_checkpoint(run, options=ReadOptions(tag="iter_0000020")).path).name
        == "iter_0000020"
    )
    assert [one.name for one in ckptctl.ls(run).checkpoints] == ["iter_0000010", "iter_0000020"]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("step=9-last", "weights"), ("actor", "dist_ckpt"), ("global_step_9", "actor/dist_ckpt")],
)
def test_trainer_folders_around_mcore_are_opened(
    model: dict[str, torch.Tensor], tmp_path: Path, outer: str, inner: str
) -> None:
    write(tmp_path / outer / inner, stacked(model), TOLD)
    beside = (tmp_path / outer / inner).parent / "huggingface"
    beside.mkdir()
    (beside / "config.json").write_text('{"num_hidden_layers": 4}')
    read = formats.open_checkpoint(tmp_path / outer)
    assert read.documents == {"config.json": {"num_hidden_layers": 4}}
    assert read.format == "mcore"
    assert read.tensors.keys() == model.keys()
    assert read.notes == ()


def test_actor_is_read_and_critic_is_noted(model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        write(tmp_path / name / "dist_ckpt", stacked(model), TOLD)
    (note,) = formats.open_checkpoint(tmp_path).notes
    assert "this is the actor" in note and "`critic`" in note
    assert formats.open_checkpoint(tmp_path / "critic").notes == ()


@pytest.mark.parametrize("file", ["__0_0.distcp", "metadata.json", "common.pt"])
def test_damaged_critic_makes_step_damaged(
    file: str, model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The actor beside it can be converted; but no other step may be removed for this one."""
    for step, name in ((10, "actor"), (10, "critic"), (20, "actor"), (20, "critic")):
        write(tmp_path / f"global_step_{step}" / name / "dist_ckpt", model, TOLD)
    folder = tmp_path / "global_step_20"
    assert ckptctl.verify(folder).verdict == "complete"
    os.truncate(folder / "critic" / "dist_ckpt" / file, 1)
    found = ckptctl.verify(folder)
    assert found.verdict == "damaged"
    assert {one.file for one in found.findings} == {f"../../critic/dist_ckpt/{file}"}
    plan = plan_prune(tmp_path, Policy(last=1))
    assert not [one.name for one in plan.list_decisions("remove")]
    with pytest.raises(DamagedError) as caught:
        ckptctl.convert(folder, tmp_path / "never.pt", to="torch")
    assert "to read only the actor" in (caught.value.hint or "")
    ckptctl.convert(folder / "actor", tmp_path / "actor.pt", to="torch")


def test_mcore_folder_inside_hf_checkpoint_is_detected_as_hf(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "weights", stacked(model), TOLD)
    assert list(formats.sniff_formats(tmp_path)) == ["mcore"]
    save_file(model, tmp_path / "model.safetensors")
    assert list(formats.sniff_formats(tmp_path)) == ["hf"]


def without(model: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.items() if part not in name}


def test_missing_layers_parts_or_experts_are_named(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    cases = {
        "stage": (without(model, "layers.2."), "layers? of `decoder.layers` (is|are) missing", "2"),
        "last": (without(model, "layers.3."), "layers? of `decoder.layers` (is|are) missing", "3"),
        "up": (without(halved(model), "_v"), "a part of `.*` is missing", "`_v`"),
        "expert": (
            without(halved(model), "experts.experts.1."),
            "a part of `.*` is missing",
            "expert 1 of 3",
        ),
        "last expert": (
            without(halved(model), "experts.experts.2."),
            "a part of `.*` is missing",
            "expert 2 of 3",
        ),
    }
    for name, (saved, what, why) in cases.items():
        folder = write(tmp_path / name, saved, TOLD)
        with pytest.raises(CoverageError, match=what) as caught:
            formats.open_checkpoint(folder)
        assert why in (caught.value.why or "")
        assert "``" not in (caught.value.why or "")
        assert ckptctl.verify(folder).verdict != "complete"
        with pytest.raises(CkptError):
            ckptctl.convert(folder, tmp_path / f"{name}.out", to="dcp")
        assert not (tmp_path / f"{name}.out").exists()


def test_hole_in_layer_axis_names_missing_layers(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one", stacked(model), TOLD)
    described = pickle.loads((folder / ".metadata").read_bytes())
    name = "decoder.layers.self_attention.linear_qkv.weight"
    (chunk,) = described.state_dict_metadata[name].chunks
    chunk.sizes = torch.Size([2, *chunk.sizes[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    assert {one.tensor for one in wrong(folder, "fast")} == {
        f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in (2, 3)
    }
    with pytest.raises(CoverageError):
        ckptctl.convert(folder, tmp_path / "out", to="dcp")


def test_inconsistent_layer_stacks_are_unsupported(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    saved = stacked(model)
    norms = "decoder.layers.input_layernorm.weight"
    with pytest.raises(UnsupportedError, match=r"number of layers .* is ambiguous") as caught:
        formats.open_checkpoint(write(tmp_path / "a", {**saved, norms: saved[norms][:3]}))
    assert f"`{norms}` has 3" in (caught.value.why or "")
    with pytest.raises(UnsupportedError, match="is ambiguous") as caught:
        formats.open_checkpoint(write(tmp_path / "b", saved, {"num_layers": 8}))
    assert "the trainer's arguments specify 8" in (caught.value.why or "")
    twice = {**saved, "decoder.layers.0.input_layernorm.weight": saved[norms][0]}
    with pytest.raises(UnsupportedError, match="cannot be joined"):
        formats.open_checkpoint(write(tmp_path / "c", twice, TOLD))
    huge = {"decoder.layers.x": torch.zeros(1).expand(1 << 20)}
    with pytest.raises(UnsupportedError, match="more than"):
        formats.open_checkpoint(write(tmp_path / "d", huge))


def test_chunk_out_of_bounds_of_stack_is_unsupported(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one", stacked(model), TOLD)
    described = pickle.loads((folder / ".metadata").read_bytes())
    name = "decoder.layers.self_attention.linear_qkv.weight"
    (chunk,) = described.state_dict_metadata[name].chunks
    chunk.sizes = torch.Size([5, *chunk.sizes[1:]])
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(UnsupportedError, match="exceed its shape"):
        formats.open_checkpoint(folder)


def test_item_layer_count_mismatch_is_damaged(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one", stacked(model), cuts=dict.fromkeys(stacked(model), (2,)))
    described = pickle.loads((folder / ".metadata").read_bytes())
    name = "decoder.layers.input_layernorm.weight"
    first, second = described.state_dict_metadata[name].chunks
    first.sizes = torch.Size([1, WIDTH])
    second.sizes = torch.Size([3, WIDTH])
    second.offsets = torch.Size([1, 0])
    moved = {i: p for i, p in described.storage_data.items() if i.fqn == name}
    (late,) = (i for i in moved if i.offset[0] == 2)
    from torch.distributed.checkpoint.metadata import MetadataIndex

    described.storage_data[MetadataIndex(name, torch.Size([1, 0]))] = moved[late]
    del described.storage_data[late]
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(DamagedError, match="does not match the metadata"):
        ckptctl.convert(folder, tmp_path / "out", to="dcp")


class Hostile:
    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))

    def __init__(self, path: Path) -> None:
        self.path = str(path)


def test_hostile_common_pt_is_refused_without_execution(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = write(tmp_path / "one", stacked(model), TOLD)
    mark = tmp_path / "ran"
    torch.save({"args": Hostile(mark), "iteration": 1}, folder / "common.pt")
    for only in ("all", "model"):
        with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
            ckptctl.convert(folder, tmp_path / "out", to="dcp", only=only)
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_malformed_common_pt_is_unknown(model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The folder is a checkpoint: what is not understood is one file of it."""
    folder = write(tmp_path / "one", stacked(model), TOLD)
    common = folder / "common.pt"

    def refused(why: str) -> None:
        with pytest.raises(UnsupportedError, match=why):
            formats.open_checkpoint(folder)
        assert ckptctl.verify(folder).verdict == "unknown"

    common.write_bytes(b"no zip of torch")
    refused("not a `torch.save` file")
    with ZipFile(common, "w", ZIP_DEFLATED) as compressed:
        compressed.writestr("common/data.pkl", bytes(100))
    refused("is compressed")
    torch.save([{"iteration": 1}], common)
    refused("`common.pt` does not have the form that Megatron-Core writes")


@pytest.mark.parametrize(("count", "why"), [(1 << 17, "expands"), (1 << 20, "malformed zip")])
def test_oversized_common_pt_is_unsupported(
    model: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    why: str,
) -> None:
    monkeypatch.setattr("ckptctl.formats.mcore.mcore_reader.MAX_VALUES", 1 << 15)
    folder = write(tmp_path / "one", stacked(model), TOLD)
    with ZipFile(folder / "common.pt", "w") as large:
        large.writestr("common/data.pkl", b"\x80\x02](" + b"N" * count + b"e.")
    with pytest.raises(UnsupportedError, match=why):
        formats.open_checkpoint(folder)
    assert ckptctl.verify(folder).verdict == "unknown"


def test_zarr_backend_is_unsupported(model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000010"
    (folder / "embedding.word_embeddings.weight").mkdir(parents=True)
    said = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match="backend `zarr` is not supported") as caught:
        formats.open_checkpoint(folder)
    assert "torch_dist" in (caught.value.hint or "")


def test_missing_mcore_files_are_damaged(model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", stacked(model), TOLD)
    for file, what in {
        "metadata.json": "interrupted",
        "common.pt": "`common.pt` is missing",
        ".metadata": "`.metadata` is missing",
        "__0_0.distcp": "data files are missing",
    }.items():
        copy = tmp_path / file.strip("._")
        shutil.copytree(whole, copy)
        (copy / file).unlink()
        with pytest.raises(DamagedError, match=what):
            formats.open_checkpoint(copy)
        assert ckptctl.verify(copy).verdict == "damaged"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["shard_0.1_2.2", "shard_1.1_2.2"], "2 of 4 objects of `rng_state` are missing"),
        (["shard_0_2", "shard_1_3"], "1 of 2 objects of `rng_state` are missing"),
        (["shard_0_999999.999999"], "such as `rng_state/shard_0.0_999999.999999`"),
    ],
)
def test_missing_object_is_damage(
    tmp_path: Path, model: dict[str, torch.Tensor], names: list[str], why: str
) -> None:
    objects = {f"rng_state/{name}": [1] for name in names}
    source = write(tmp_path / "mcore", model, TOLD, objects=objects)
    finding = ckptctl.verify(source, level="fast").errors[0]
    assert (finding.what, finding.basis) == ("a part of `rng_state` is missing", "index")
    assert why in str(finding.why)
    with pytest.raises(CoverageError):
        formats.open_checkpoint(source)


def test_missing_extra_state_is_a_warning(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    key = "decoder.final_layernorm._extra_state"
    source = write(tmp_path / "mcore", model, TOLD, objects={f"{key}/shard_1_2": [None]})
    findings = ckptctl.verify(source, level="fast").findings
    (finding,) = (finding for finding in findings if finding.severity == "warning")
    assert f"1 of 2 objects of `{key}` are missing" in str(finding.why)


def test_common_state_object_replaces_common_pt(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Megatron-Core 0.19 has its content as an object, and goes on to name it in metadata.json."""
    common = {"args": Namespace(**TOLD), "iteration": 10}
    folder = write(tmp_path / "one", model, objects={"common_state/shard_0_1": common})
    (folder / "common.pt").unlink()
    read = formats.open_checkpoint(folder)
    assert TOLD.items() <= read.extensions[MEGATRON]["common_state"].items()
    assert read.blobs["iteration"].value == 10 and "common_state/shard_0_1" not in read.blobs
    assert ckptctl.verify(folder).verdict == "complete"
    ckptctl.convert(folder, tmp_path / "out", to="mcore")
    written = formats.open_checkpoint(tmp_path / "out").extensions[MEGATRON]["common.pt"]
    assert TOLD.items() <= written.items()
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-99])
    with pytest.raises(DamagedError):
        formats.open_checkpoint(folder)


def test_integrity_json_checksums_are_verified(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """``integrity.json`` has the SHA-256 of each file, ``.metadata`` too."""
    folder = write(tmp_path / "one", stacked(model), TOLD)
    sums = {one.name: sha256(one.read_bytes()).hexdigest() for one in sorted(folder.iterdir())}
    said = {"algorithm": "sha256", "files": sums}
    (folder / "integrity.json").write_text(json.dumps(said, indent=2))
    found = ckptctl.verify(folder, level="full")
    assert (found.verdict == "complete", found.structure_only_bytes) == (True, 0)
    said["files"] = {**sums, "common.pt": "0" * 64}
    (folder / "integrity.json").write_text(json.dumps(said))
    (finding,) = wrong(folder)
    assert (finding.file, finding.severity) == ("common.pt", "error")
    assert "integrity.json lists" in (finding.why or "")


def test_flattened_optimizer_tensors_are_unsupported(
    model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As Megatron-Core before 0.15 saved the moments of its distributed optimizer."""
    folder = write(tmp_path / "one", stacked(model), TOLD)
    described = pickle.loads((folder / ".metadata").read_bytes())
    facts = {
        name: {"nd_reformulated_orig_global_shape": tuple(entry.size)}
        for name, entry in described.state_dict_metadata.items()
        if name.startswith("optimizer.")
    }
    described.mcore_data = facts
    for name in facts:
        entry = described.state_dict_metadata[name]
        entry.size = torch.Size([1, entry.size.numel()])
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    read = formats.open_checkpoint(folder)
    unread = {name for name, entry in read.tensors.items() if entry.unsupported}
    assert unread == {name for name in model if name.startswith("optimizer.")}
    assert read.tensors.keys() == model.keys()
    ckptctl.convert(folder, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    weights = {name: tensor for name, tensor in model.items() if name not in unread}
    assert not differences({name: found[name] for name in weights}, weights)


def test_two_rank_sample_matches_reference(data: Path, tmp_path: Path) -> None:
    """What Megatron-Core 0.16.1 saved on two ranks, the layers in a stack."""
    sample = data / "wrappers" / "megatron"
    expected = load_file(sample / "expected.safetensors")
    found = values(sample / "ckpt", tmp_path)
    assert not differences({name: found[name] for name in expected}, expected)
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in expected


def test_megatron_fsdp_save_is_read_as_dcp(model: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """As ``fsdp_dtensor_checkpoint.py`` names it: experts and halves each by itself."""
    named: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        if name.startswith("optimizer."):
            continue
        grouped = name.replace("experts.experts.", "experts.")
        parts = (
            {name: tensor}
            if grouped == name
            else {f"{grouped}{n}": row for n, row in enumerate(tensor)}
        )
        for part, value in parts.items():
            halves = dict(zip("wv", value.chunk(2), strict=True)) if "linear_fc1" in part else {}
            named |= {f"{part}_{half}": row for half, row in halves.items()} or {part: value}
    folder = write(tmp_path / "one", {f"model.module.{n}": one for n, one in named.items()})
    for file in ("common.pt", "metadata.json"):
        (folder / file).unlink()
    assert formats.open_checkpoint(folder).format == "dcp"
    ckptctl.convert(folder, tmp_path / "out.pt", to="torch", root="model.module")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert not differences(found, {n: one for n, one in model.items() if not n.startswith("opt")})
