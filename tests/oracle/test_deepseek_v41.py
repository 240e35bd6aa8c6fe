"""DeepSeek-V4.1: mlx-vlm loads the published names strictly, and ckptctl requires them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ckptctl

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

from tests.oracle import deepseek_v41
from tests.oracle.models import tokens

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def test_mlx_vlm_loads_published_names_strictly(tmp_path: Path) -> None:
    """It reads all tensors but those of MTP layers, and refuses a folder without one of them."""
    import mlx.core as mx
    from mlx_vlm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    folder = deepseek_v41.save(tmp_path / "published")
    found = utils.load_model(folder)(mx.array(tokens().numpy())).logits
    assert mx.all(mx.isfinite(found))
    state = load_file(folder / "model.safetensors")
    del state["layers.1.attn.compressor.wgate.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="wgate"):
        utils.load_model(folder)


def test_every_missing_tensor_is_noticed(tmp_path: Path) -> None:
    folder = deepseek_v41.save(tmp_path / "published")
    assert ckptctl.inspect(folder).verdict == "complete"
    state = load_file(folder / "model.safetensors")
    for name in state:
        rest = {key: value for key, value in state.items() if key != name}
        save_file(rest, folder / "model.safetensors", {"format": "pt"})
        assert ckptctl.inspect(folder).verdict == "damaged", name
