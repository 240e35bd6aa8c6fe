"""DeepSeek-V4.1: mlx-vlm loads published names strictly, and converts to the layout ``mlx``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

from tests.oracle import deepseek_v41
from tests.oracle.models import tokens

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def load_model(folder: Path) -> Any:
    """Return mlx-vlm's model of *folder*, uncompiled."""
    import mlx.core as mx
    from mlx_vlm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    return utils.load_model(folder)


def logits(folder: Path) -> Any:
    """Return what mlx-vlm's model of *folder* says to some text."""
    import mlx.core as mx

    return np.array(load_model(folder)(mx.array(tokens().numpy())).logits)


def test_mlx_vlm_loads_published_names_strictly(tmp_path: Path) -> None:
    """It reads all tensors but those of MTP layers, and refuses a folder without one of them."""
    folder = deepseek_v41.save(tmp_path / "published")
    assert np.isfinite(logits(folder)).all()
    state = load_file(folder / "model.safetensors")
    del state["layers.1.attn.compressor.wgate.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="wgate"):
        load_model(folder)


def test_hf_to_mlx_keeps_logits(tmp_path: Path) -> None:
    """A wrong name is refused, and norms in each other's place change the logits."""
    folder = deepseek_v41.save(tmp_path / "published")
    expected = logits(folder)
    ckptctl.convert(folder, tmp_path / "mlx", to="hf", to_layout="mlx", exclude=["mtp.*"])
    assert np.array_equal(logits(tmp_path / "mlx"), expected)
    state = load_file(tmp_path / "mlx" / "model.safetensors")
    names = [f"language_model.layers.0.{one}_norm.weight" for one in ("attn", "ffn")]
    state |= dict(zip(names, [state[name] for name in reversed(names)], strict=True))
    save_file(state, tmp_path / "mlx" / "model.safetensors", {"format": "pt"})
    assert abs(logits(tmp_path / "mlx") - expected).max() > 0.05


def test_mlx_as_saved_by_mlx_vlm_to_hf_keeps_all_values(tmp_path: Path) -> None:
    from mlx_vlm import utils

    folder = deepseek_v41.save(tmp_path / "published")
    saved = tmp_path / "saved"
    saved.mkdir()
    utils.save_weights(saved, load_model(folder))
    (saved / "config.json").write_text((folder / "config.json").read_text())
    assert ckptctl.inspect(saved).verdict == "complete"
    done = ckptctl.convert(saved, tmp_path / "out", to="hf", to_layout="hf")
    assert done.plan.model_type == "deepseek_v41"
    expected = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {name for name in expected if not name.startswith("mtp.")}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_every_missing_tensor_is_noticed(tmp_path: Path) -> None:
    folder = deepseek_v41.save(tmp_path / "published")
    assert ckptctl.inspect(folder).verdict == "complete"
    state = load_file(folder / "model.safetensors")
    for name in state:
        rest = {key: value for key, value in state.items() if key != name}
        save_file(rest, folder / "model.safetensors", {"format": "pt"})
        assert ckptctl.inspect(folder).verdict == "damaged", name
