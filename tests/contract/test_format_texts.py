"""The description of every format: how it is detected, when it is complete, what proves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.cli.formats import split_facts
from ckptctl.errors import FormatError
from ckptctl.formats.base import Listing
from tests.checkpoints import differences, load_any_reference, save_hf, tiny_llama
from tests.contract.additions import FORMATS, PEERS, TEST, TEXTS, peers_of
from tests.contract.samples import write_checkpoint

REPOSITORY = Path(__file__).parents[2]
WORDS = 25
SAMPLES = (REPOSITORY / "tests/data/README.md").read_text()


@pytest.mark.parametrize("name", FORMATS)
def test_format_texts_end_without_period(name: str) -> None:
    known = formats.get_format(name)
    for text in TEXTS:
        assert not getattr(known, text).endswith((".", " "))
    assert not known.title.rstrip(")").endswith("read only")


@pytest.mark.parametrize("name", FORMATS)
def test_format_facts_are_short(name: str) -> None:
    for text in TEXTS:
        for fact in split_facts(TEST.sub("", getattr(formats.get_format(name), text))):
            assert len(fact.split()) <= WORDS, fact


@pytest.mark.parametrize("name", FORMATS)
def test_proof_tests_exist_and_use_named_peers(name: str) -> None:
    proof = formats.get_format(name).proof
    texts = [SAMPLES, *((REPOSITORY / test).read_text() for test in TEST.findall(proof))]
    for peer in peers_of(proof):
        assert any(PEERS[peer] in text for text in texts), peer


def test_files_named_like_other_formats_are_not_hf(tmp_path: Path) -> None:
    """The exceptions that the texts name: other formats' files are not ``hf``."""
    state, config = tiny_llama("llama3", layers=1)
    model = save_hf(tmp_path / "model", state, config) / "model.safetensors"
    for name, expected in (
        ("anything.safetensors", ["hf"]),
        ("adapter_model.safetensors", ["peft"]),
        ("consolidated.safetensors", ["mistral"]),
        ("model0-mp1.safetensors", ["deepseek"]),
        ("shard-00001-model-00001-of-00001.safetensors", ["hf-rank-shards"]),
    ):
        folder = tmp_path / name.partition(".")[0] / "in"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(model.read_bytes())
        assert list(formats.sniff_formats(folder)) == expected


STUBS = (
    *("model.safetensors", "x.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("pytorch_model-00001-of-00002.bin", "consolidated.safetensors", "consolidated.00.pt"),
    *(
        "consolidated.pth",
        "model0-mp2.safetensors",
        "adapter_model.bin",
        "adapter_model.safetensors",
    ),
    *("shard-00001-model-00001-of-00001.safetensors", ".metadata", "__0.metadata", "model_0.pt"),
    *(".snapshot_metadata", "rank0.pth", "checkpoint_3.pt", "extra_state_rank_0.pt", "x.ckpt"),
    *("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    *("new\nline.safetensors", "new\nline_rank_0.pt"),
    *("mp_rank_00/model_optim_rng.pt", "zero/layer.weight/fp32.pt", "model/.metadata"),
)


def test_sniff_agrees_with_every_builtin_format(data: Path, tmp_path: Path) -> None:
    for number, name in enumerate(STUBS):
        stub = tmp_path / f"{number}" / name
        stub.parent.mkdir(parents=True)
        stub.write_bytes(b"PK\x03\x04")
    (tmp_path / f"{len(STUBS) - 1}/optimizer/pp_0").mkdir(parents=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in FORMATS:
        (tmp_path / "of" / name).mkdir(parents=True)
        write_checkpoint(name, tmp_path / "of" / name)
    recognized: set[str] = set()
    for path in (*data.rglob("*"), *tmp_path.rglob("*")):
        assert formats.sniff_formats(path) == formats.sniff_by_precedence(
            formats.load_builtin_formats(), Listing(path)
        )
        recognized |= formats.sniff_formats(path).keys()
    assert recognized >= set(FORMATS)


def test_detect_names_nested_checkpoints(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", layers=1)
    for name in ("step-2", "step-10", "optimizer"):
        save_hf(tmp_path / "checkpoint" / name, state, config)
    with pytest.raises(FormatError) as caught:
        formats.detect_format(tmp_path)
    assert caught.value.why == "subfolders contain `checkpoint/step-2`, `checkpoint/step-10`"
    assert f"`{tmp_path / 'checkpoint' / 'step-10'}`" in str(caught.value.hint)


def test_torch_consolidated_hf_shards_are_noted_as_inexact(data: Path) -> None:
    """Its 0-d tensor is wrong in this sample; the shards beside it are right."""
    folder = data / "hf-rank-shards" / "hf_consolidated" / "ckpt"
    notes = formats.open_checkpoint(folder).notes
    assert [note for note in notes if "for exact values" in note]
    wrong, right = (
        load_any_reference(folder),
        load_any_reference(folder.parent / "expected.safetensors"),
    )
    assert differences(wrong, right) == ["scalar: other bytes"]
    assert not [n for n in formats.open_checkpoint(folder / "sharded").notes if "exact" in n]
