"""Which files beside the weights belong to a model, and which are anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl.errors import RefusedError, UsageError
from ckptctl.formats import open_checkpoint
from ckptctl.formats.sidecar_files import (
    GLOBS_BY_KIND,
    _find_imports,
    find_file_kind,
    scan_sidecar_files,
)
from tests.contract.samples import SAMPLES, Sample

SECRET = ("id_rsa", "passwords.txt", "notes.txt", "p.py", ".env", "license.key", "data.json")
TRAINERS_OWN = {
    *("optimizer.bin", "optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json"),
    *("random_states_0.pkl", "random_states_1.pkl", "rng_state_0.pth", "rng_state_1.pth"),
}
CARRIED = (
    *("generation_config.json", "tokenizer.json", "qwen.tiktoken", "LICENSE", "LICENSE.txt"),
    *("README.md", "additional_chat_templates/rag.jinja", "1_Pooling/config.json"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights, with files that belong to them, and with others."""
    root = tmp_path / "downloads"
    for name in (*SECRET, *CARRIED, "onnx/model.onnx", "onnx/.hidden", "1_Pooling/more.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "modules.json").write_text(json.dumps([{"type": "x.Y", "path": "1_Pooling"}]))
    save_file({"w": torch.ones(3)}, root / "o.safetensors")
    return root


def outputs(root: Path) -> set[str]:
    weights = {"model.safetensors", "ckptctl.manifest.json"}
    return {str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()} - weights


def test_sidecar_files_of_single_file_are_not_copied(folder: Path, tmp_path: Path) -> None:
    done = ckptctl.convert(folder / "o.safetensors", tmp_path / "out", to="hf")
    assert not outputs(tmp_path / "out")
    assert {*SECRET, "README.md"} < done.plan.not_carried.keys()


def test_known_sidecar_files_of_folder_are_copied(folder: Path, tmp_path: Path) -> None:
    done = ckptctl.convert(folder, tmp_path / "out", to="hf")
    assert outputs(tmp_path / "out") == {*CARRIED, "modules.json"}
    assert done.plan.not_carried.keys() == {*SECRET, "onnx/", "1_Pooling/more.bin"}
    again = ckptctl.convert(folder, tmp_path / "out", to="hf", overwrite=True)
    assert again.plan.to_json()["not_carried"] == dict(done.plan.not_carried)


def test_single_file_next_to_config_copies_sidecar_files(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{}")
    ckptctl.convert(folder / "o.safetensors", tmp_path / "out", to="hf")
    assert outputs(tmp_path / "out") == {*CARRIED, "modules.json", "config.json"}


def test_carry_option_copies_additional_files(folder: Path, tmp_path: Path) -> None:
    one = folder / "o.safetensors"
    done = ckptctl.convert(one, tmp_path / "a", to="dcp", carry=["n*.txt", "onnx/*"])
    assert {"notes.txt", "onnx/model.onnx"} < outputs(tmp_path / "a")
    assert "notes.txt" not in done.plan.not_carried and "onnx/" in done.plan.not_carried
    ckptctl.convert(one, tmp_path / "b", to="hf", carry="*")
    assert outputs(tmp_path / "b") == outputs(folder) - {".env", "onnx/.hidden", "o.safetensors"}
    done = ckptctl.convert(folder, tmp_path / "c", to="hf", carry=["*", ".*", "*/.*"])
    assert outputs(tmp_path / "c") == outputs(folder) - {"o.safetensors"}
    assert not done.plan.not_carried
    with pytest.raises(UsageError, match="matches no file"):
        ckptctl.convert(one, tmp_path / "d", to="hf", carry="nothing*")
    with pytest.raises(UsageError, match="`carry` is not supported"):
        ckptctl.convert(one, tmp_path / "d.pt", to="torch", carry="notes.txt")


def test_link_outside_folder_is_not_copied(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "NOTICE").symlink_to(tmp_path / "secret")
    (folder / "linked.json").symlink_to("tokenizer.json")
    done = ckptctl.convert(folder, tmp_path / "out", to="hf", carry="linked*")
    assert outputs(tmp_path / "out") == {*CARRIED, "modules.json", "linked.json"}
    assert "not copied (link that points outside the folder): `NOTICE`" in done.plan.notes
    with pytest.raises(UsageError, match="matches no file"):
        ckptctl.convert(folder, tmp_path / "two", to="hf", carry="NOTIC*")


def test_sidecar_file_that_would_replace_output_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(RefusedError, match="would replace an output file"):
        ckptctl.convert(folder / "o.safetensors", tmp_path / "out", to="hf", carry="model.*")
    assert not (tmp_path / "out").exists()


def test_overwrite_replaces_copied_files_unless_changed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptctl.convert(folder, out, to="dcp", carry="*")
    ckptctl.convert(folder, out, to="hf", carry="*", overwrite=True)
    with (out / "notes.txt").open("a") as notes:
        notes.write("mine")
    (out / "onnx" / "mine").write_text("mine")
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(folder, out, to="hf", overwrite=True)
    assert caught.value.why == "`notes.txt`, `onnx/mine` would be lost"


def test_code_files_named_in_config_are_copied(tmp_path: Path) -> None:
    named = {"AutoModel": "modeling_x.Model", "AutoConfig": "else/where--configuration_y.Config"}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": named}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_x.Slow", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "processor_config.json").write_text("{ broken")
    code: dict[str, str | bytes] = {
        "modeling_x.py": "import os\nfrom .layers import (\n    A,\n)\nimport .more\n",
        "layers.py": "    from .deep import B\nfrom .modeling_x import C\n",
        "more.py": "from ..outside import x\nimport train",
        "deep.py": "raise SystemExit",
        "tokenization_x.py": b"\xff",
        "configuration_y.py": "",
        "train.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = scan_sidecar_files(tmp_path)
    assert found.assets.keys() - {"config.json", "tokenizer_config.json"} == {
        *("modeling_x.py", "layers.py", "more.py", "deep.py", "tokenization_x.py"),
        "processor_config.json",
    }
    assert found.others.keys() == {"configuration_y.py", "train.py"}


def test_sidecar_kinds_are_not_detected_by_extension_only() -> None:
    ends = [glob for globs in GLOBS_BY_KIND.values() for glob in globs if glob.startswith("*")]
    assert ends == ["*.tiktoken"]
    assert not any(
        map(find_file_kind, ("a.json", "a.txt", "a.py", "a.model", "LICENSE.key", "a.md"))
    )


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=list(SAMPLES))
def test_trainer_samples_have_no_unknown_sidecar_files(data: Path, sample: Sample) -> None:
    if sample.refused:
        pytest.skip("it cannot be read")
    found = open_checkpoint(sample.path(data)).others.keys()
    assert not found - {"sharded/"} - TRAINERS_OWN


def test_import_scan_of_blank_lines_finds_relative_modules() -> None:
    text = b"\n" * 900_000 + b"from .helper import x\n  import\t.other  \nfrom .\n\n a import y\n"
    assert [match[1] or match[2] for match in _find_imports(text)] == ["helper", "other"]
