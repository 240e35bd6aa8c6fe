"""What a rank does with a model of Megatron-Core that predicts further tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import Ranks, Recipe
from tests.oracle.mcore_ranks import listed, load, save


def further(
    rank: int, world: int, out: Path, recipe: Recipe, folder: Path, both: torch.Tensor
) -> None:
    """Load the run *folder*, save it in another spelling, and join an embedding and a state.

    Writes ``saved/`` and ``joined.pt``.

    Args:
        rank: This rank.
        world: World size.
        out: A folder.
        recipe: The model.
        folder: Of Megatron-Core.
        both: An embedding and a hidden state of some tokens.
    """
    ranks = Ranks()
    model = build(recipe, ranks)
    load(model, folder)
    save(model, out / "saved", "singleton", recipe, ranks)
    embedded, hidden = both
    with torch.no_grad():
        joined = model.mtp.layers[0]._concat_embeddings(hidden, embedded)
    torch.save(joined, out / "joined.pt")


def names(rank: int, world: int, out: Path, recipe: Recipe) -> None:
    """Write the keys of every tensor that the model saves: ``names.pt``."""
    torch.save([*listed(build(recipe, Ranks()), "separate")], out / "names.pt")
