"""Meta's formula for the feed-forward size, and its inverse.

Source: ``FeedForward`` in ``llama/model.py`` and ``llama_models/llama3/model.py``.
"""

from __future__ import annotations

from ckptctl.errors import MappingError
from ckptctl.planner.configs.stated import Json, count, number

PARAMS = ("multiple_of", "ffn_dim_multiplier")
_FFN = ((256, 1.0), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))


def ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Return the feed-forward size that Meta's formula gives.

    Raises:
        MappingError: It is larger than a float can be.
    """
    try:
        hidden = int(2 * (4 * dim) / 3)
        if multiplier is not None:
            hidden = int(multiplier * hidden)
    except OverflowError as error:
        raise MappingError(
            "the feed-forward size is larger than a float can be",
            why=f"`ffn_dim_multiplier` is {multiplier!r}",
        ) from error
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def ffn_of(params: Json, dim: int) -> int:
    """Return the feed-forward size that params.json gives by the formula.

    Raises:
        MappingError: What it says of the formula is no number.
    """
    factor = params.get("ffn_dim_multiplier")
    multiple = count(params.get("multiple_of"), "multiple_of") or 256
    return ffn_size(dim, multiple, None if factor is None else number(factor, "ffn_dim_multiplier"))


def ffn_params(dim: int, size: int) -> tuple[int, float | None]:
    """Return ``multiple_of`` and ``ffn_dim_multiplier`` that give exactly *size*.

    Raises:
        MappingError: None do.
    """
    for multiple, factor in _FFN:
        if ffn_size(dim, multiple, factor) == size:
            return multiple, None if factor == 1.0 else factor
    factor = (size + 0.5) / max(int(8 * dim / 3), 1)
    if ffn_size(dim, 1, factor) != size:
        raise MappingError(f"params.json cannot express a feed-forward size of {size} for {dim}")
    return 1, factor
