"""What is loaded into, as the caller has it: a state dict with objects in it, or one object."""

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
"""A state dict, or an object that has one."""


@dataclass(frozen=True, slots=True)
class Owners:
    """The objects that take what is loaded, and the state dict that they are in."""

    target: Target
    objects: Mapping[str, Stateful]  # by their keys; an empty one: the target itself

    @classmethod
    def of(cls, target: Target) -> Owners:
        """Return those of *target*."""
        if is_stateful(target):
            return cls(target, {"": target})
        if not isinstance(target, Mapping):
            return cls(target, {})  # which is refused for what it is
        return cls(target, {k: one for k, one in target.items() if is_stateful(one)})

    @property
    def alone(self) -> bool:
        """Return whether the target is one object."""
        return "" in self.objects and self.objects[""] is self.target

    def plain(self) -> dict[str, Any]:
        """Return the state dict, with those of the objects in it."""
        return dict(self.objects[""].state_dict()) if self.alone else plain_of(self._state_dict)

    @property
    def _state_dict(self) -> MutableMapping[str, Any]:
        return cast("MutableMapping[str, Any]", self.target)

    def owner(self, path: Keys) -> Stateful | None:
        """Return the object whose leaf lies at *path*, if it is one's."""
        return self.objects.get("" if self.alone else str(path[0]))

    def take(
        self,
        plain: dict[str, Any],
        values: Mapping[Keys, object],
        made: Mapping[Keys, torch.Tensor],
    ) -> None:
        """Put leaves where they belong, and give objects their state.

        Args:
            plain: The state dict, whose tensors are filled.
            values: The leaves that are no tensors.
            made: The tensors that take the place of others.
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
        """Yield the tensors of modules that are on the meta device."""
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
    """Let *module* have what was loaded; parameters that were one stay one.

    Args:
        module: The module.
        found: Its state dict, filled.
        made: What of it takes the place of what the module has.
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
