"""What a run goes on from, beside the model: the optimizer's state, and what goes with it.

Megatron-Core asks for the tensors by their parameters' names, ``optimizer.state.exp_avg.NAME``,
where its optimizer is saved in the form that any number of ranks loads (``fully_reshardable``; the
other forms have the ranges of elements that ranks had). The optimizer's settings, the schedule and
the counters are in ``common.pt``. It looks for none of it in a folder called ``release``.
Sources: ``megatron/core/optimizer/distrib_optimizer.py`` (``sharded_state_dict``) and
``load_checkpoint`` of Megatron-LM and Megatron-Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from ckptctl.catalog import Blob, Index, Path
from ckptctl.errors import RefusedError, spell_option
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.mcore.files import RELEASE
from ckptctl.formats.mcore.objects import is_object
from ckptctl.formats.shared.leaves import nest
from ckptctl.formats.shared.stored_leaves import stored_leaf
from ckptctl.notes import Notes

STATE = re.compile(r"optimizer\.state\.\w+\.(.+)")
OPTIMIZER, SETTINGS, ITERATION = "optimizer", "param_groups", "iteration"
MAX_ITERATION = 10**12


class Training(NamedTuple):
    """What travels beside the model.

    Attributes:
        objects: Items of the DCP directory.
        tensors: What of the tensors is in ``common.pt``; the others are in the DCP directory.
        common: What ``common.pt`` holds; empty: no run goes on from here.
    """

    objects: tuple[Blob, ...]
    tensors: tuple[OutputTensor, ...]
    common: Mapping[str, object]

    @property
    def folder(self) -> str:
        """Return the name of the save."""
        return f"iter_{self.common[ITERATION]:07d}" if self.common else RELEASE

    @property
    def pointer(self) -> str:
        """Return what the tracker file says of it."""
        return str(self.common[ITERATION]) if self.common else RELEASE


def training(tensors: Sequence[OutputTensor], blobs: Iterable[Blob], notes: Notes) -> Training:
    """Return what travels beside the model of *tensors*, among which are the optimizer's.

    Raises:
        RefusedError: There is an optimizer that Megatron-Core cannot load.
    """
    objects, leaves = list[Blob](), list[Blob]()
    for blob in blobs:
        (objects if is_object(blob.name) else leaves).append(blob)
    if not any(is_state(tensor.name) for tensor in tensors):
        why = "mcore can only store it together with an optimizer state"
        notes.explain("skipped", {blob.name: why for blob in leaves})
        return Training(tuple(objects), (), {})
    inside = tuple(tensor for tensor in tensors if _is_common(tensor))
    model = {tensor.name for tensor in tensors if not is_state(tensor.name)}
    for tensor in tensors:
        found = STATE.fullmatch(tensor.name)
        named = found is not None and found[1] in model
        if is_state(tensor.name) and tensor not in inside and not named:
            raise RefusedError(
                "Megatron-Core cannot load this optimizer state",
                where=f"tensor `{tensor.name}`",
                why="it requires names such as `optimizer.state.exp_avg.` followed by a parameter "
                "name",
                hint=f"pass {spell_option('--only model')} to write only the weights",
            )
    return Training(tuple(objects), inside, _common(leaves, inside))


def is_state(name: str) -> bool:
    """Return whether a tensor is the optimizer's."""
    return name.startswith(f"{OPTIMIZER}.")


def _is_common(tensor: OutputTensor) -> bool:
    """Return whether a tensor is a leaf of ``common.pt``, as the scale of a loss is.

    It lies in dictionaries, whereas those of a model and its moments have whole names as keys.
    """
    plain = not any("." in str(key) for key in tensor.path)
    return len(tensor.path) > 1 and plain and not STATE.fullmatch(tensor.name)


def _common(leaves: Sequence[Blob], tensors: Sequence[OutputTensor]) -> Mapping[str, object]:
    stored = ((one.path, stored_leaf(one, str(key))) for key, one in enumerate(tensors))
    found = (*((one.path, one.value) for one in leaves), *stored)
    content = cast("dict[str, object]", nest((_numbered(path), leaf) for path, leaf in found))
    held = [blob.name for blob in leaves if SETTINGS in blob.path]
    iteration = content.get(ITERATION)
    if not held or type(iteration) is not int or not 0 < iteration < MAX_ITERATION:
        lacking = "the iteration number" if held else "the settings of the parameter groups"
        raise RefusedError(
            "Megatron-Core cannot resume with this optimizer state",
            where=f"`{ITERATION if held else SETTINGS}`",
            why=f"`common.pt` must contain {lacking}, but the source does not",
            hint=f"pass {spell_option('--only model')} to write only the weights",
        )
    return content


def _numbered(path: Path) -> Path:
    """Return *path* with the number of one of several optimizers, which DCP makes a string."""
    head, *rest = path
    if head == OPTIMIZER and rest and str(rest[0]).isdecimal() and not isinstance(rest[0], Index):
        return (head, int(rest[0]), *rest[1:])
    return path
