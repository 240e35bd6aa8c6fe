"""One changed bit of a source with checksums is noticed, however its bytes are read."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.conversion.convert import run_conversion
from ckptctl.errors import ChangedError, DamagedError
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from tests.checkpoints import load_any_reference, save_dcp, save_hf, tiny_llama
from tests.checkpoints.adapters import merged_by_hand, random_adapter, save_peft
from tests.checkpoints.golden import Golden
from tests.integration.test_ranks import meta
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", "float32")


def flip(file: Path, key: str) -> None:
    """Change the last bit of a tensor in a file of ``torch.save``, found with ``zipfile``."""
    storage = torch.load(file, weights_only=True)[key]
    held = bytes(storage.contiguous().view(torch.uint8).flatten().tolist())
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        found = next(i for i in archive.infolist() if archive.read(i) == held)
    names = struct.unpack_from("<HH", data, found.header_offset + 26)
    data[found.header_offset + 30 + sum(names) + len(held) - 1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "key",
    one_in(
        4,
        [
            "layers.0.attention.wqkv.weight",
            "layers.0.feed_forward.mlp.fc1_weight",
            "layers.1.feed_forward.experts.moe_w_out_eF_D",
            "layers.1.feed_forward.experts.moe_w_in_eD_F",
            "layers.0.attention.wo.weight",
        ],
    ),
)
@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_bit_in_rank_file_is_damage(tmp_path: Path, key: str, rank: int) -> None:
    given = meta(tmp_path / "meta", 2)
    flip(given / f"consolidated.{rank:02d}.pth", key)
    with pytest.raises(DamagedError, match=f"`{key}` does not match"):
        ckptctl.convert(given, tmp_path / "out.pt", to="torch", to_layout="hf")
    assert not (tmp_path / "out.pt").exists()
    ckptctl.convert(given, tmp_path / "out.pt", to="torch", to_layout="hf", checksum=False)


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_flipped_bit_in_split_tensor_is_damage(tmp_path: Path, name: str) -> None:
    hf = Golden.read("phi3").save(tmp_path / "hf")
    given = tmp_path / "phi3.pt"
    ckptctl.convert(hf, given, to="torch")
    key = f"model.layers.1.{name}.weight"
    options: dict[str, Any] = {"to": "torch", "to_layout": "torchtune", "assets": hf}
    ckptctl.convert(given, tmp_path / "sound.pt", model_type="phi3", **options)
    flip(given, key)
    with pytest.raises(DamagedError, match=f"`{key}` does not match"):
        ckptctl.convert(given, tmp_path / "out.pt", model_type="phi3", **options)


def test_flipped_bit_in_strided_tensor_is_damage(tmp_path: Path) -> None:
    whole = torch.arange(600.0).view(20, 30)
    torch.save({"a": whole.t(), "b": whole[5:9]}, tmp_path / "in.pt")
    ckptctl.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["a"], whole.t()) and torch.equal(found["b"], whole[5:9])
    plan = ckptctl.plan_conversion(tmp_path / "in.pt", tmp_path / "again.pt", to="torch").plan
    assert [check.recorded.nbytes for check in plan.checks] == [2400]
    data = bytearray((tmp_path / "in.pt").read_bytes())
    data[data.index(struct.pack("<2f", 300, 301))] ^= 1
    (tmp_path / "in.pt").write_bytes(data)
    with pytest.raises(DamagedError, match="checksum"):
        ckptctl.convert(tmp_path / "in.pt", tmp_path / "again.pt", to="torch")


@pytest.mark.parametrize("at", [5, 120, 300, 599, 740, 880, 999])
def test_partially_used_record_is_read_once_and_checked(tmp_path: Path, at: int) -> None:
    whole = torch.arange(1000.0)
    parts = {"a": whole[10:300], "b": whole[300:700], "c": whole[800:950], "d": whole[100:120]}
    torch.save(parts, tmp_path / "in.pt")
    plan = ckptctl.plan_conversion(tmp_path / "in.pt", tmp_path / "out.pt", to="torch").plan
    assert [check.gaps for check in plan.checks] == [((0, 40), (2800, 400), (3800, 200))]
    stage = tmp_path / "stage"
    stage.mkdir()
    done = execute_plan(plan, stage, ExecutionOptions(), lambda _: None)
    assert done.bytes_read == 4000 + 4 * 20
    data = bytearray((tmp_path / "in.pt").read_bytes())
    data[data.index(struct.pack("<2f", 0, 1)) + 4 * at] ^= 1
    (tmp_path / "in.pt").write_bytes(data)
    with pytest.raises(DamagedError, match="does not match"):
        ckptctl.convert(tmp_path / "in.pt", tmp_path / "again.pt", to="torch")


@pytest.mark.parametrize(("to", "options"), [("meta", {"mp": 2}), ("hf", {}), ("dcp", {})])
def test_flipped_bit_in_replicated_or_permuted_part_is_damage(
    tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    hf = save_hf(tmp_path / "hf", STATE, CONFIG)
    whole = torch.cat([*(value.flatten() for value in STATE.values()), torch.full((9,), 7.25)])
    parts = torch.split(whole, [*(value.numel() for value in STATE.values()), 9])
    state = {k: part.view(v.shape) for (k, v), part in zip(STATE.items(), parts, strict=False)}
    torch.save(state, tmp_path / "in.pt")
    options |= {"to": to, "model_type": "llama3", "assets": hf}
    ckptctl.convert(tmp_path / "in.pt", tmp_path / "sound", **options)
    held = (tmp_path / "in.pt").read_bytes()
    begin = held.index(struct.pack("<4f", *whole[:4].tolist()))
    starts = dict(zip(STATE, (part.storage_offset() for part in parts), strict=False))
    norm, query = starts["model.norm.weight"], starts["model.layers.0.self_attn.q_proj.weight"]
    for at in (norm, query, len(whole) - 1):
        data = bytearray(held)
        data[begin + 4 * at] ^= 1
        (tmp_path / "in.pt").write_bytes(data)
        with pytest.raises(DamagedError, match="does not match"):
            ckptctl.convert(tmp_path / "in.pt", tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_flipped_bit_in_merged_weight_is_damage(tmp_path: Path) -> None:
    hf = save_hf(tmp_path / "hf", STATE, CONFIG)
    given = tmp_path / "base.pt"
    ckptctl.convert(hf, given, to="torch")
    adapter = random_adapter(STATE)
    folder = save_peft(tmp_path / "adapter", adapter)
    ckptctl.merge(given, folder, tmp_path / "sound", to="hf", assets=hf)
    expected = merged_by_hand(STATE, adapter, 2.0)
    for name, value in load_any_reference(tmp_path / "sound").items():
        torch.testing.assert_close(value, expected[name])
    flip(given, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(DamagedError, match=r"up_proj.weight` does not match"):
        ckptctl.merge(given, folder, tmp_path / "out", to="hf", assets=hf)


def test_fully_read_records_need_no_extra_checks(tmp_path: Path) -> None:
    hf = save_hf(tmp_path / "hf", STATE, CONFIG)
    ckptctl.convert(hf, tmp_path / "base.pt", to="torch")
    for to in ("torch", "meta", "dcp"):
        found = ckptctl.plan_conversion(
            tmp_path / "base.pt", tmp_path / "out", to=to, model_type="llama3", assets=hf
        )
        assert not found.plan.checks


def test_resumed_run_keeps_source_checksums(tmp_path: Path) -> None:
    given = meta(tmp_path / "meta", 2)
    plan = ckptctl.plan_conversion(given, tmp_path / "out.pt", to="torch", to_layout="hf").plan
    assert len(plan.checks) == 8
    options = ExecutionOptions(journal_every=1, resume=True, jobs=1)
    stage = tmp_path / "stage"
    stage.mkdir()
    first = execute_plan(plan, stage, options, lambda _: None, tmp_path / "journal")
    again = execute_plan(plan, stage, options, lambda _: None, tmp_path / "journal")
    assert not first.resumed_bytes and again.resumed_bytes > 0
    assert first.crcs == again.crcs


def test_adapter_changed_after_planning_is_an_error(tmp_path: Path) -> None:
    hf = save_hf(tmp_path / "hf", STATE, CONFIG)
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    plan = ckptctl.plan_merge(hf, folder, tmp_path / "out")
    file = folder / "adapter_model.safetensors"
    held = file.read_bytes()
    file.unlink()
    file.write_bytes(held[:-1] + b"\x01")
    with pytest.raises(ChangedError, match="changed while it was being read"):
        run_conversion(plan.conversion)
    assert not (tmp_path / "out").exists()


def flip_byte(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_hint_names_manifest_only_if_it_records_checksum(tmp_path: Path) -> None:
    """The zips in a file of DCP record their own checksums, whatever lies next to them."""
    hf = save_hf(tmp_path / "hf", STATE, CONFIG)
    dcp, copy, stock = tmp_path / "dcp", tmp_path / "copy", tmp_path / "stock"
    ckptctl.convert(hf, dcp, to="dcp")
    ckptctl.convert(hf, copy, to="hf")
    save_dcp(stock, STATE)
    (data,) = stock.glob("*.distcp")
    for folder, file in ((dcp, next(dcp.glob("*.distcp"))), (stock, data)):
        flip_byte(file, file.stat().st_size // 3)
        with pytest.raises(DamagedError, match="does not match the one recorded") as caught:
            ckptctl.convert(folder, tmp_path / "out.pt", to="torch")
        assert caught.value.where == str(file)
        assert "manifest" not in str(caught.value.hint)
    flip_byte(copy / "model.safetensors", -1)
    manifest = copy / "ckptctl.manifest.json"
    with pytest.raises(DamagedError, match=r"recorded in `ckptctl\.manifest\.json`") as caught:
        ckptctl.convert(copy, tmp_path / "out.pt", to="torch")
    assert f"delete `{manifest}`" in str(caught.value.hint)
    manifest.unlink()
    ckptctl.convert(copy, tmp_path / "out.pt", to="torch")
