"""Where the model lies and what it is, on checkpoints that other programs could have written."""

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError
from tests.checkpoints import save_hf, save_meta, save_torch, tiny_llama
from tests.checkpoints.golden import Golden


def convert(source, target, to, **options):
    return ckptctl.convert(source, target, to=to, **options)


def test_two_containers_that_fit_alike_are_both_named(tmp_path):
    state, _ = tiny_llama("llama3")
    torch.save({"model": state, "state_dict": state}, tmp_path / "both.pt")
    with pytest.raises(MappingError, match="`model` or `state_dict`"):
        convert(tmp_path / "both.pt", tmp_path / "out", "dcp")
    convert(tmp_path / "both.pt", tmp_path / "out", "dcp", root="state_dict")


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "Llama3.1"])
def test_a_family_may_be_named_by_any_of_its_names(tmp_path, name):
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", state, config, 1)
    assert ckptctl.inspect(source, model_type=name).model_type == "llama3"
    assert convert(source, tmp_path / "out", "meta", model_type=name).plan.tensors


def test_names_that_look_like_trainer_state_stay_in_a_model_only_format(tmp_path):
    from safetensors.torch import load_file, save_file

    state = {"opt.weight": torch.ones(2), "step": torch.ones(1), "enc.weight": torch.ones(3)}
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", "hf")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_equal_embeddings_in_meta_files_may_be_tied(tmp_path):
    state, config = tiny_llama("llama3_2")
    save_meta(tmp_path / "meta", state, config, 1)
    with pytest.raises(MappingError, match="model type or layout is ambiguous") as caught:
        convert(tmp_path / "meta", tmp_path / "out", "hf")
    assert "llama3_2" in (caught.value.why or "")
    convert(tmp_path / "meta", tmp_path / "out", "hf", model_type="llama3_2")


def test_untie_writes_what_the_source_leaves_out(tmp_path):
    from safetensors.torch import load_file

    state, config = tiny_llama("llama3_2")
    save_hf(tmp_path / "in", state, config, 1)
    convert(tmp_path / "in", tmp_path / "out", "hf", untie=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], state["model.embed_tokens.weight"])
    assert b'"tie_word_embeddings": false' in (tmp_path / "out" / "config.json").read_bytes()


def test_metas_names_keep_without_a_configuration(tmp_path):
    state, config = tiny_llama("llama3")
    save_meta(tmp_path / "meta", state, config, 1)
    named = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    save_torch(tmp_path / "plain.pt", named)
    result = convert(tmp_path / "plain.pt", tmp_path / "out", "dcp")
    assert result.plan.tensors == len(named)


def test_exclude_reaches_what_only_all_adds(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "step": 3},
        tmp_path / "train.pt",
    )
    convert(tmp_path / "train.pt", tmp_path / "out.pt", "torch", only="all", exclude="optimizer*")
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"model", "step"}


def test_a_misspelt_option_is_named(tmp_path):
    with pytest.raises(ckptctl.CkptError, match="dytpe"):
        ckptctl.plan_conversion(tmp_path, tmp_path / "out", to="dcp", dytpe="fp32")


def test_overwrite_replaces_checkpoints_only(tmp_path):
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


def test_what_decides_between_a_few_is_named_in_full(tmp_path):
    """The tensors of these two have the same names, ranks and relations of sizes."""
    source = Golden.read("mistral4").save(tmp_path / "hf")
    (source / "config.json").unlink()
    with pytest.raises(MappingError, match="model type or layout is ambiguous") as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", to_layout="mlx")
    for name in ("deepseek_v2", "mistral4"):
        assert f"`model_type='{name}'`" in str(caught.value.hint)
