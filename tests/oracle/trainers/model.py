"""A tiny model with all that makes shards hard: uneven and small sizes, buffers, ties, frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN = 37, 13, 17
FROZEN = "frozen.weight"
TIED = "head.weight"


class Norm(nn.Module):
    """Centers, and counts as batch norm does, in whatever dtypes a trainer left it."""

    mean: Tensor
    batches: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return *hidden* centred; remember the mean."""
        now = hidden.detach().mean(0)
        self.mean.mul_(0.9).add_(now.to(self.mean.dtype), alpha=0.1)
        self.batches.add_(1)
        return (hidden - now) * self.weight + self.bias


class Model(nn.Module):
    """Sizes that two, three and four ranks do not divide.

    Args:
        tied: The output layer is the embedding.
        frozen: The parameter :data:`FROZEN` does not learn.
        scalar: One parameter has no dimension.
    """

    mask: Tensor
    counter: Tensor

    def __init__(self, tied: bool = False, frozen: bool = False, scalar: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = Norm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.few = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5) if scalar else torch.tensor([1.5]))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True, False]))
        self.register_buffer("counter", torch.tensor(2**40 + 3))
        if tied:
            self.head.weight = self.emb.weight
        if frozen:
            self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one number for *tokens*, to which every parameter contributes."""
        hidden = self.emb(tokens).flatten(0, -2)
        hidden = hidden + self.down(self.norm(self.up(hidden)).relu())
        hidden = hidden + self.frozen(hidden) * self.scale
        loss: Tensor = self.head(hidden).float().logsumexp(-1).mean()
        spread: Tensor = self.few(hidden).float().var()
        return loss + spread


def tokens(rank: int, step: int) -> Tensor:
    """Return other tokens for every rank and step, the same ones in every run."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (4, 5), generator=generator)


def learned(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train *model*, whose wrapper reduces the gradients, for some steps."""
    for step in range(steps):
        model(tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
