"""What is written for Megatron-Core: there and back, whole or not there, and its vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, MappingError, RefusedError, UsageError
from tests.checkpoints import tiny_llama
from tests.checkpoints.readers import differences, load_any_reference
from tests.contract.support import build, message, place, read, refused, save_side_files, snapshot
from tests.sweeps import one_in

TRACKER = "latest_checkpointed_iteration.txt"
LLAMAS = ("llama2", "llama3", "llama3_2")
OTHERS = ("hf", "dcp", "meta", "torch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build("hf", tmp_path, *tiny_llama("llama3"))


@pytest.mark.parametrize("stack_layers", [False, True])
@pytest.mark.parametrize("kind", one_in(3, LLAMAS))
def test_hf_to_mcore_round_trip_preserves_tensors(
    tmp_path: Path, kind: Any, stack_layers: bool
) -> None:
    state, config = tiny_llama(kind)
    source, there = build("hf", tmp_path, state, config), tmp_path / "there"
    ckptctl.convert(source, there, to="mcore", stack_layers=stack_layers, verify=True)
    found = load_any_reference(there / "release")
    for a, b in ((there, source), (source, there)):
        assert ckptctl.diff(a, b).same
    layers = config["num_hidden_layers"]
    stacked = [name for name in found if name.startswith("decoder.layers.mlp.linear_fc1.weight")]
    assert bool(stacked) is stack_layers
    assert all(found[name].shape[0] == layers for name in stacked)
    for path in (there, there / "release"):
        back = tmp_path / f"back-{path.name}"
        ckptctl.convert(path, back, to="hf", verify=True)
        assert not differences(read(back, config), state)
        assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("other", one_in(3, OTHERS))
def test_other_formats_round_trip_through_mcore(tmp_path: Path, other: str) -> None:
    state, config = tiny_llama("llama3")
    papers = tmp_path / "papers"
    papers.mkdir()
    save_side_files(papers, config)
    source = build(other, tmp_path, state, config)
    ckptctl.convert(source, tmp_path / "there", to="mcore", assets=papers)
    back = place(tmp_path, other, "back")
    layout = None if other in ("hf", "meta") else "hf"
    ckptctl.convert(tmp_path / "there", back, to=other, to_layout=layout)
    assert not differences(read(back, config), state)


def test_mcore_output_is_detected_as_mcore_and_complete(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="mcore", max_shard_size="100KB")
    for path in (out, out / "release"):
        assert list(formats.sniff_formats(path)) == ["mcore"]
        found = ckptctl.inspect(path)
        assert (found.format, found.layout, found.verdict) == ("mcore", "mcore", "complete")
        assert found.notes == ()
        assert ckptctl.verify(path, level="full").verdict == "complete"
    catalog = formats.resolve_codecs(formats.open_checkpoint(out))
    assert all(one.crc32 is not None for t in catalog.tensors.values() for one in t.extents)


@pytest.mark.parametrize("to", one_in(3, OTHERS))
def test_diff_ignores_trainer_state_that_target_format_cannot_store(
    tmp_path: Path, source: Path, to: str
) -> None:
    run, other = tmp_path / "run", place(tmp_path, to)
    ckptctl.convert(source, run, to="mcore")
    ckptctl.convert(source, other, to=to)
    common = torch.load(run / "release" / "common.pt", weights_only=False)
    torch.save({**common, "rng_state": [torch.ones(3)]}, run / "release" / "common.pt")
    (run / "release" / "ckptctl.manifest.json").unlink()
    found = ckptctl.diff(run, other)
    assert found.same is (to in ("hf", "meta"))
    assert {"args", "rng_state.0"} <= {*found.a.left_out, *found.a.only, *found.a.only_leaves}
    assert ckptctl.diff(run, other, only="model").same


def test_mcore_plan_matches_written_files(tmp_path: Path, source: Path) -> None:
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="mcore")
    assert not (tmp_path / "out").exists()
    done = ckptctl.convert(source, tmp_path / "out", to="mcore")
    files = [item for item in done.target.rglob("*") if item.is_file()]
    found = {(str(item.relative_to(done.target)), item.stat().st_size) for item in files}
    assert found == set(plan.files)
    again = ckptctl.convert(source, tmp_path / "again", to="mcore")
    assert snapshot(again.target) == snapshot(done.target)


def test_partial_mcore_output_is_never_complete(tmp_path: Path, source: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    ckptctl.convert(source, out, to="mcore", max_shard_size="100KB")
    names = [".metadata", "common.pt", "metadata.json"]
    names += [item.name for item in (out / "release").glob("*.distcp")]
    assert len(names) > 5
    for name in names:
        for length in (None, 0, (out / "release" / name).stat().st_size - 1):
            shutil.copytree(out, copy)
            file = copy / "release" / name
            if length is None:
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:length])
            with pytest.raises(CkptError):
                _require_complete(copy)
            shutil.rmtree(copy)


def _require_complete(path: Path) -> None:
    found = ckptctl.verify(path)
    if found.verdict != "complete":
        raise CkptError(found.verdict)


def test_mcore_overwrite_is_refused_next_to_other_files(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="mcore")
    ckptctl.convert(source, out, to="mcore", stack_layers=True, overwrite=True)
    for stray in (out / "progress.txt", out / "release" / "thesis.tex"):
        stray.write_text("mine")
        with pytest.raises(RefusedError):
            ckptctl.convert(source, out, to="mcore", overwrite=True)
        stray.unlink()
    shutil.copytree(out / "release", out / "iter_0000010")
    with pytest.raises(RefusedError):
        ckptctl.convert(source, out, to="mcore", overwrite=True)
    shutil.rmtree(out / "release")
    (out / TRACKER).write_text("10")
    with pytest.raises(RefusedError):  # a run goes on there
        ckptctl.convert(source, out, to="mcore", overwrite=True)
    (out / "iter_0000010").rename(out / "release")
    ckptctl.convert(source, out, to="hf", overwrite=True)
    assert not (out / TRACKER).exists()


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_stack_layers_outside_mcore_is_a_usage_error(tmp_path: Path, source: Path, to: str) -> None:
    with pytest.raises(UsageError, match="stack"):
        ckptctl.convert(source, place(tmp_path, to), to=to, stack_layers=True)


def test_mcore_to_hf_layout_is_a_usage_error(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UsageError):
        ckptctl.convert(source, tmp_path / "out", to="mcore", to_layout="hf")


def test_mcore_arguments_match_hf_config(tmp_path: Path, source: Path) -> None:
    import yaml

    ckptctl.convert(source, tmp_path / "out", to="mcore")
    config = json.loads((source / "config.json").read_text())
    inner = tmp_path / "out" / "release"
    arguments = vars(torch.load(inner / "common.pt", weights_only=False)["args"])
    model = yaml.safe_load((inner / "run_config.yaml").read_text())["model"]
    for told in (arguments, model):
        assert told["num_layers"] == config["num_hidden_layers"]
        assert told["hidden_size"] == config["hidden_size"]
        assert told["num_query_groups"] == config["num_key_value_heads"]
    assert (arguments["no_save_optim"], arguments["no_save_rng"]) == (True, True)
    assert arguments["padded_vocab_size"] == arguments["vocab_size"] == model["vocab_size"] == 128
    assert model["should_pad_vocab"] is False
    assert arguments["bf16"] is True


def test_mcore_without_config_writes_no_arguments(tmp_path: Path) -> None:
    state, _ = tiny_llama("llama3")
    source = build("torch", tmp_path, state, None)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    done = ckptctl.convert(source, tmp_path / "out", to="mcore", model_type="llama3", sizes=sizes)
    assert sum(", because " in note for note in done.plan.notes) == 2
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=True)
    assert "args" not in common
    assert not (tmp_path / "out" / "release" / "run_config.yaml").exists()


# ----------------------------------------------------------------------------- vocabulary


def vocabulary(folder: Path, rows: int) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model with a vocabulary of so many rows."""
    state, config = tiny_llama("llama3")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:rows].clone()
    config = {**config, "vocab_size": rows}
    return build("hf", folder, state, config), state, config


def test_mcore_vocabulary_is_padded_and_trimmed_on_return(tmp_path: Path) -> None:
    source, state, config = vocabulary(tmp_path, 100)
    done = ckptctl.convert(source, tmp_path / "out", to="mcore")
    assert any("padded with zeros to 128" in note for note in done.plan.notes)
    found = load_any_reference(tmp_path / "out" / "release")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert found[name].shape[0] == 128
        assert not found[name][100:].any()
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)
    assert (common["args"].padded_vocab_size, common["args"].vocab_size) == (128, 100)
    yaml = (tmp_path / "out" / "release" / "run_config.yaml").read_text()
    assert "should_pad_vocab: true" in yaml and "vocab_size: 100" in yaml
    back = ckptctl.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert any("the last 28 rows" in note for note in back.plan.notes)
    assert not differences(read(tmp_path / "back", config), state)


@pytest.mark.parametrize("size", [96, 112, 256])
def test_mcore_vocab_size_option_sets_row_count(tmp_path: Path, size: int) -> None:
    source, _, _ = vocabulary(tmp_path, 100)
    ckptctl.convert(source, tmp_path / "out", to="mcore", vocab_size=size)
    found = load_any_reference(tmp_path / "out" / "release")
    assert found["output_layer.weight"].shape[0] == size


def test_nonzero_rows_beyond_vocab_size_are_refused(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="mcore")
    _forget_arguments(out / "release")
    file = out / "release" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": 100}))
    with refused(out, tmp_path / "back", 5) as caught:
        ckptctl.convert(out, tmp_path / "back", to="hf")
    assert isinstance(caught.value, MappingError)
    assert "rows beyond the vocabulary size of 100 are not zero" in message(caught.value)
    ckptctl.convert(out, tmp_path / "cut", to="hf", vocab_size=100)
    ckptctl.convert(out, tmp_path / "kept", to="hf", vocab_size=128)
    weights = load_file(next((tmp_path / "kept").glob("*.safetensors")))
    assert weights["lm_head.weight"].shape[0] == 128


@pytest.mark.parametrize(("vocab_size", "stated"), [(100, True), (1, False)])
def test_extra_rows_stated_as_padding_are_trimmed(
    tmp_path: Path, source: Path, vocab_size: int, stated: bool
) -> None:
    """Padding of less than one step; what no step explains is not padding."""
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="mcore")
    file = out / "release" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": vocab_size}))
    (out / "release" / "run_config.yaml").unlink()
    _argue(out / "release", vocab_size=vocab_size)
    if stated:
        done = ckptctl.convert(out, tmp_path / "back", to="hf")
        assert any("arguments state that they are padding" in note for note in done.plan.notes)
        return
    _argue(out / "release", padded_vocab_size=512)
    with pytest.raises(MappingError):
        ckptctl.convert(out, tmp_path / "back", to="hf")


def _forget_arguments(inner: Path) -> None:
    common = torch.load(inner / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, inner / "common.pt")
    (inner / "run_config.yaml").unlink()


def _argue(inner: Path, **told: object) -> None:
    common = torch.load(inner / "common.pt", weights_only=False)
    vars(common["args"]).update(told)
    torch.save(common, inner / "common.pt")


def test_padded_rows_keep_hf_vocab_size(source: Path, tmp_path: Path) -> None:
    ckptctl.convert(source, tmp_path / "there", to="mcore", vocab_size=300)
    ckptctl.convert(tmp_path / "there", tmp_path / "back", to="hf", assets=source)
    assert ckptctl.diff(tmp_path / "back", source).same
    again = tmp_path / "again"
    ckptctl.convert(tmp_path / "there", again, to="mcore", assets=source, stack_layers=True)
    ckptctl.convert(again, tmp_path / "back-again", to="hf")
    assert ckptctl.diff(tmp_path / "back-again", source).same


@pytest.mark.parametrize("wrong", [{"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}])
def test_config_contradicting_mcore_arguments_is_refused(
    source: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    ckptctl.convert(source, tmp_path / "there", to="mcore")
    (tmp_path / "wrong").mkdir()
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(MappingError, match="contradict each other"):
        ckptctl.convert(tmp_path / "there", tmp_path / "never", to="hf", assets=tmp_path / "wrong")
