"""The optimizer of a save without ZeRO: its states by parameter, where the file names those.

torch numbers parameters in the order in which the training script gave them to the optimizer, which
need not be the module's. ``param_names`` in ``param_groups`` (``torch/optim/optimizer.py``) and
``param_shapes`` of DeepSpeed say which is which; without them nothing does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptctl.formats.deepspeed.partitions import Shapes
from ckptctl.storage.zips.reader import StoredTensor

INNER = "optimizer_state_dict"
NUMBERED = (
    "the optimizer's states have numbers: neither `param_names` nor `param_shapes` says which "
    "parameters they belong to"
)


def named_optimizer(
    optimizer: Mapping[str, object], groups: Sequence[Shapes] | None, module: Mapping[str, object]
) -> dict[str, object] | None:
    """Return the optimizer with names in place of numbers; None where nothing says them.

    Args:
        optimizer: The state dict of torch's optimizer, or of DeepSpeed's wrapper around it.
        groups: ``param_shapes``: the parameters of each group in their order.
        module: The module's state dict.
    """
    inner = optimizer.get(INNER, optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    settings = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(state, dict) or not isinstance(settings, list):
        return None
    names = dict(_names(settings, groups))
    numbers = [g.get("params") if isinstance(g, dict) else None for g in settings]
    count = sum(len(held) for held in numbers if isinstance(held, list))
    if None in numbers or not count == len(names) == len(set(names.values())):
        return None
    if not state.keys() <= names.keys():
        return None
    if not all(_fits(state[number], module.get(names[number])) for number in state):
        return None
    rest = {key: value for key, value in {**optimizer, **inner}.items() if key != INNER}
    return {
        **rest,
        "state": {names[number]: value for number, value in state.items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in settings
        ],
    }


def _names(
    settings: Sequence[object], groups: Sequence[Shapes] | None
) -> Iterator[tuple[object, str]]:
    """Yield number and name of every parameter that has both."""
    known = groups if groups is not None and len(groups) == len(settings) else [{}] * len(settings)
    for group, shapes in zip(settings, known, strict=True):
        numbers = group.get("params") if isinstance(group, dict) else None
        said = group.get("param_names") if isinstance(group, dict) else None
        names = said if isinstance(said, list) else [*shapes]
        if isinstance(numbers, list) and len(numbers) == len(names):
            pairs = zip(numbers, names, strict=True)
            yield from ((n, name) for n, name in pairs if type(n) is int and isinstance(name, str))


def _fits(state: object, parameter: object) -> bool:
    """Whether moments have the shape of the parameter; counters have none."""
    if not isinstance(state, dict) or not isinstance(parameter, StoredTensor):
        return False
    moments = (v for k, v in state.items() if isinstance(v, StoredTensor) and k != "step")
    return all(not value.shape or value.shape == parameter.shape for value in moments)
