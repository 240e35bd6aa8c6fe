"""Where the model lies and what it is, on checkpoints that other programs could have written."""

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError
from tests.checkpoints import save_hf, save_meta, save_torch, tiny_llama
from tests.checkpoints.golden import Golden


def convert(source, target, to, **options):
    return ckptctl.convert(source, target, to=to, **options)


def test_ambiguous_roots_are_both_named(tmp_path):
    state, _ = tiny_llama("llama3")
    torch.save({"model": state, "state_dict": state}, tmp_path / "both.pt")
    with pytest.raises(MappingError, match="`model` or `state_dict`"):
        convert(tmp_path / "both.pt", tmp_path / "out", "dcp")
    convert(tmp_path / "both.pt", tmp_path / "out", "dcp", root="state_dict")


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "Llama3.1"])
def test_model_type_accepts_aliases(tmp_path, name):
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", state, config, 1)
    assert ckptctl.inspect(source, model_type=name).model_type == "llama3"
    assert convert(source, tmp_path / "out", "meta", model_type=name).plan.tensors


def test_trainer_like_names_stay_in_model_only_format(tmp_path):
    from safetensors.torch import load_file, save_file

    state = {"opt.weight": torch.ones(2), "step": torch.ones(1), "enc.weight": torch.ones(3)}
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", "hf")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_tied_meta_checkpoint_is_ambiguous_without_model_type(tmp_path):
    state, config = tiny_llama("llama3_2")
    save_meta(tmp_path / "meta", state, config, 1)
    with pytest.raises(MappingError, match="model type or layout is ambiguous") as caught:
        convert(tmp_path / "meta", tmp_path / "out", "hf")
    assert "llama3_2" in (caught.value.why or "")
    convert(tmp_path / "meta", tmp_path / "out", "hf", model_type="llama3_2")


def test_untie_writes_missing_lm_head(tmp_path):
    from safetensors.torch import load_file

    state, config = tiny_llama("llama3_2")
    save_hf(tmp_path / "in", state, config, 1)
    convert(tmp_path / "in", tmp_path / "out", "hf", untie=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], state["model.embed_tokens.weight"])
    assert b'"tie_word_embeddings": false' in (tmp_path / "out" / "config.json").read_bytes()


def test_meta_names_convert_without_config(tmp_path):
    state, config = tiny_llama("llama3")
    save_meta(tmp_path / "meta", state, config, 1)
    named = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    save_torch(tmp_path / "plain.pt", named)
    result = convert(tmp_path / "plain.pt", tmp_path / "out", "dcp")
    assert result.plan.tensors == len(named)


def test_exclude_applies_to_only_all(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "step": 3},
        tmp_path / "train.pt",
    )
    convert(tmp_path / "train.pt", tmp_path / "out.pt", "torch", only="all", exclude="optimizer*")
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"model", "step"}


def test_misspelled_option_is_named(tmp_path):
    with pytest.raises(ckptctl.CkptError, match="dytpe"):
        ckptctl.plan_conversion(tmp_path, tmp_path / "out", to="dcp", dytpe="fp32")


def test_overwrite_replaces_only_checkpoints(tmp_path):
    import zipfile

    from safetensors.torch import save_file

    source, _ = tiny_llama("llama3")
    torch.save(source, tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "thesis.docx", "w") as document:
        document.writestr("word/document.xml", "text")
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    save_file({"probe": torch.ones(1)}, project / "probe.safetensors")
    for target, to in ((tmp_path / "thesis.docx", "torch"), (project, "hf")):
        with pytest.raises(ckptctl.CkptError, match="not a checkpoint"):
            convert(tmp_path / "in.pt", target, to, overwrite=True)
    torch.save({"old": torch.ones(1)}, tmp_path / "old.pt")
    convert(tmp_path / "in.pt", tmp_path / "old.pt", "torch", overwrite=True)


def test_ambiguous_model_type_hint_names_both_options(tmp_path):
    """The tensors of these two have the same names, ranks and relations of sizes."""
    source = Golden.read("mistral4").save(tmp_path / "hf")
    (source / "config.json").unlink()
    with pytest.raises(MappingError, match="model type or layout is ambiguous") as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", to_layout="mlx")
    for name in ("deepseek_v2", "mistral4"):
        assert f"`model_type='{name}'`" in str(caught.value.hint)
