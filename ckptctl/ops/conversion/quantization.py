"""What of an output is quantized, and what programs have to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.errors import MappingError, spell_option
from ckptctl.formats.base import OutputTensor
from ckptctl.planner.quantization.recipes import WEIGHT, Recipe
from ckptctl.planner.quantization.statement import QUANTIZATION

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What of an output is quantized, and how.

    Attributes:
        recipe: How.
        plain: The tensors that the output would have without.
        parts: For each quantized tensor, and each of its scales, the plain one it stands for.
    """

    recipe: Recipe
    plain: tuple[OutputTensor, ...]
    parts: Mapping[str, str]

    def described(self, config: Mapping[str, object] | None) -> Mapping[str, object]:
        """Return config.json with what programs have to know of it."""
        if config is None:
            raise MappingError(
                f"{spell_option('--quantize')} requires config.json, which is missing",
                why="loaders read the quantization scheme from it",
                hint=f"pass {spell_option('--assets DIR')} to copy it from the trained model's "
                "folder",
            )
        return {**config, QUANTIZATION: self.recipe.config(self.ignored)}

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the plain tensors that are quantized."""
        return tuple(dict.fromkeys(self.parts.values()))

    @property
    def left(self) -> tuple[OutputTensor, ...]:
        """Return the matrices, and stacks of such, that stay as they are."""
        made = set(self.weights)
        return tuple(one for one in self.plain if one.name not in made and len(one.shape) > 1)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the modules of these; stacked experts are parameters of one.

        A head that is tied to the embeddings is no tensor of its own, and stays as they do.
        """
        stacks = (one.name for one in self.left if len(one.shape) > 2)
        apart = {name: name.rpartition(".")[0] for name in stacks if not name.endswith(WEIGHT)}
        named = (apart.get(one.name, one.name) for one in self.left)
        found = (name for name in named if name.endswith(WEIGHT) or name in apart.values())
        tied = not any(one.name.endswith(f"{HEAD}{WEIGHT}") for one in self.plain)
        return tuple(dict.fromkeys((*(n.removesuffix(WEIGHT) for n in found), *[HEAD] * tied)))
