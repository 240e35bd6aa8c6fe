"""Targets of a load, which are state dicts with stateful objects or single objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ckptctl.catalog import Path as Keys
from ckptctl.distributed.state import expand_stateful, is_stateful
from ckptctl.distributed.values import replace_leaf

LoadTarget = MutableMapping[str, Any] | Stateful
"""State dict to fill, or a stateful object such as a module."""


@dataclass(frozen=True, slots=True)
class StateOwners:
    """Target of a load, and its stateful objects, whose ``load_state_dict`` is called."""

    target: LoadTarget
    objects: Mapping[str, Stateful]  # by key, which is empty for the target itself

    @classmethod
    def from_target(cls, target: LoadTarget) -> StateOwners:
        """Find the stateful objects in *target*."""
        if is_stateful(target):
            return cls(target, {"": target})
        if not isinstance(target, Mapping):
            return cls(target, {})  # rejected later, with the right error
        return cls(target, {key: value for key, value in target.items() if is_stateful(value)})

    @property
    def is_single_object(self) -> bool:
        """Whether the target is a single stateful object instead of a state dict."""
        return "" in self.objects and self.objects[""] is self.target

    def build_state_dict(self) -> dict[str, Any]:
        """Return the target's state dict, in which state dicts replace stateful objects."""
        return (
            dict(self.objects[""].state_dict())
            if self.is_single_object
            else expand_stateful(self._state_dict)
        )

    @property
    def _state_dict(self) -> MutableMapping[str, Any]:
        return cast("MutableMapping[str, Any]", self.target)

    def find_owner(self, path: Keys) -> Stateful | None:
        """Return the stateful object that contains the leaf at *path*, or None if none does."""
        return self.objects.get("" if self.is_single_object else str(path[0]))

    def apply_loaded(
        self,
        state_dict: dict[str, Any],
        values: Mapping[Keys, object],
        new_tensors: Mapping[Keys, torch.Tensor],
    ) -> None:
        """Replace leaves in the state dict, and call ``load_state_dict`` of stateful objects.

        Args:
            state_dict: State dict whose tensors are filled.
            values: Non-tensor values by path.
            new_tensors: New tensors that replace others, by path.
        """
        for path, leaf in (*values.items(), *new_tensors.items()):
            replace_leaf(state_dict, path, leaf)
        parts = {"": state_dict} if self.is_single_object else state_dict
        for key, loaded in parts.items():
            owner = self.objects.get(key)
            if owner is None:
                self._state_dict[key] = loaded
                continue
            prefix = () if self.is_single_object else (key,)
            owner_tensors = {
                str(path[-1]): leaf for path, leaf in new_tensors.items() if path[:-1] == prefix
            }
            if owner_tensors and isinstance(owner, torch.nn.Module):
                load_and_assign(owner, loaded, owner_tensors)
            else:
                owner.load_state_dict(loaded)

    def list_meta_tensors(self) -> Iterator[str]:
        """Yield the names of module tensors on the meta device."""
        for key, module in self.objects.items():
            if isinstance(module, torch.nn.Module):
                tensors = (
                    *module.named_parameters(remove_duplicate=False),
                    *module.named_buffers(remove_duplicate=False),
                )
                yield from (
                    f"{key}.{name}" if key else name for name, tensor in tensors if tensor.is_meta
                )


def load_and_assign(
    module: torch.nn.Module, loaded: Mapping[str, object], new_tensors: Mapping[str, object]
) -> None:
    """Load a state dict into *module* and assign new tensors, keeping parameters tied.

    Args:
        module: Module to load.
        loaded: Filled state dict of the module.
        new_tensors: Tensors that replace those of the module, by name.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, name))
    tied = [shared_places for shared_places in places.values() if len(shared_places) > 1]
    filled = (
        name
        for name, leaf in loaded.items()
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and name not in new_tensors
    )
    if next(filled, None) is None:
        module.load_state_dict(dict(loaded), assign=True)
    else:
        module.load_state_dict(dict(new_tensors), strict=False, assign=True)
        module.load_state_dict(dict(loaded))
    for (owner, name), *other_places in tied:
        for other, its_name in other_places:
            setattr(other, its_name, getattr(owner, name))
