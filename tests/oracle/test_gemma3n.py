"""Gemma 3n's MobileNet-V5 in mlx-vlm, compared with timm's in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

from tests.oracle import hf_models
from tests.oracle.models import distance
from tests.oracle.peers import mlx, mlx_vlm
from tests.oracle.tiny import TINY

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
NEAR, WRONG = 1e-3, 0.05
"""Differences of features, the largest of which is near 4. The 84 blocks enlarge that of a sum."""


def test_mlx_vlm_sees_what_timm_sees(tmp_path: Path) -> None:
    config = TINY["gemma3n.unshared"]()
    model = hf_models.random_model(config)
    folder = hf_models.save(model, tmp_path / "hf")
    ckptctl.convert(folder, tmp_path / "mlx.pt", to="torch", to_layout="mlx")
    state = torch.load(tmp_path / "mlx.pt", weights_only=True)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        expected = model.model.vision_tower(pixel_values=pixels).last_hidden_state

    def see(tensors: hf_models.State) -> torch.Tensor:
        run = mlx_vlm.built(config)
        run.load_weights([(name, mlx._mlx(value)) for name, value in tensors.items()], strict=True)
        columns = mlx._torch(run.vision_tower(mlx._mlx(pixels)))
        return columns.permute(0, 3, 2, 1)

    assert distance(see(state), expected) < NEAR
    for name in ("0.1.conv_exp", "1.1.dw_start.conv", "2.9.attn.key.down_conv", "3.0.dw_mid.conv"):
        key = f"vision_tower.timm_model.blocks.{name}.weight"
        turned = state | {key: state[key].transpose(1, 2).contiguous()}
        assert distance(see(turned), expected) > WRONG, name
