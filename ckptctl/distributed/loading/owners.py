"""Target of a load: a state dict with stateful objects, or a single object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ckptctl.catalog import Path as Keys
from ckptctl.distributed.state import is_stateful, plain_of
from ckptctl.distributed.values import put

Target = MutableMapping[str, Any] | Stateful
"""State dict, or an object with one."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Target of a load with its stateful objects, which take the loaded state."""

    target: Target
    objects: Mapping[str, Stateful]  # by key, which is empty for the target itself

    @classmethod
    def of(cls, target: Target) -> Owners:
        """Find the stateful objects in *target*."""
        if is_stateful(target):
            return cls(target, {"": target})
        if not isinstance(target, Mapping):
            return cls(target, {})  # rejected later, with the right error
        return cls(target, {k: one for k, one in target.items() if is_stateful(one)})

    @property
    def alone(self) -> bool:
        """Whether the target is a single object."""
        return "" in self.objects and self.objects[""] is self.target

    def plain(self) -> dict[str, Any]:
        """Return the state dict with objects replaced by their state dicts."""
        return dict(self.objects[""].state_dict()) if self.alone else plain_of(self._state_dict)

    @property
    def _state_dict(self) -> MutableMapping[str, Any]:
        return cast("MutableMapping[str, Any]", self.target)

    def owner(self, path: Keys) -> Stateful | None:
        """Return the object that owns the leaf at *path*, or None."""
        return self.objects.get("" if self.alone else str(path[0]))

    def take(
        self,
        plain: dict[str, Any],
        values: Mapping[Keys, object],
        made: Mapping[Keys, torch.Tensor],
    ) -> None:
        """Replace leaves in the state dict, and load the state of objects.

        Args:
            plain: State dict whose tensors are filled.
            values: Non-tensor values by path.
            made: New tensors that replace others, by path.
        """
        for path, leaf in (*values.items(), *made.items()):
            put(plain, path, leaf)
        parts = {"": plain} if self.alone else plain
        for key, found in parts.items():
            owner = self.objects.get(key)
            if owner is None:
                self._state_dict[key] = found
                continue
            inside = () if self.alone else (key,)
            own = {str(path[-1]): leaf for path, leaf in made.items() if path[:-1] == inside}
            if own and isinstance(owner, torch.nn.Module):
                assign(owner, found, own)
            else:
                owner.load_state_dict(found)

    def on_meta(self) -> Iterator[str]:
        """Yield the names of module tensors on the meta device."""
        for key, module in self.objects.items():
            if isinstance(module, torch.nn.Module):
                tensors = (
                    *module.named_parameters(remove_duplicate=False),
                    *module.named_buffers(remove_duplicate=False),
                )
                yield from (f"{key}.{n}" if key else n for n, one in tensors if one.is_meta)


def assign(
    module: torch.nn.Module, found: Mapping[str, object], made: Mapping[str, object]
) -> None:
    """Load a state dict into *module* and assign new tensors, keeping parameters tied.

    Args:
        module: Module to load.
        found: Filled state dict of the module.
        made: New tensors of it, which replace those of the module.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((owner, name))
    tied = [several for several in places.values() if len(several) > 1]
    kept = (
        name
        for name, leaf in found.items()
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and name not in made
    )
    if next(kept, None) is None:
        module.load_state_dict(dict(found), assign=True)
    else:
        module.load_state_dict(dict(made), strict=False, assign=True)
        module.load_state_dict(dict(found))
    for (owner, name), *others in tied:
        for other, its_name in others:
            setattr(other, its_name, getattr(owner, name))
