"""What :mod:`ckptctl.storage.pickle_writer` writes besides plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptctl.storage.inert import Global


@dataclass(frozen=True, slots=True, eq=False)
class Reduce:
    """A call: ``target(*args)`` when the pickle is loaded."""

    target: Global
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NewObject:
    """An instance: ``cls.__new__(cls, *args)``, then *state* unless it is None."""

    cls: Global
    args: tuple[object, ...] = ()
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to an object outside of the pickle."""

    pid: object


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A dict that is written pair by pair and never held in memory as a whole.

    Its keys need not be hashable here.

    Attributes:
        items: The pairs; taken once.
        shared: Objects inside several pairs; everything else is forgotten after its pair.
    """

    items: Iterable[tuple[object, object]]
    shared: Sequence[object] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StorageTensor:
    """A tensor over a storage of the same ``torch.save`` zip.

    The same object at two places is one tensor after loading.

    Attributes:
        storage_key: Name of the storage's record below ``data/``.
        storage_nbytes: Bytes of the whole storage.
        dtype: torch's name.
        offset: First element, in elements.
        shape: Sizes.
        strides: In elements.
        requires_grad: Whether autograd tracks it.
    """

    storage_key: str
    storage_nbytes: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
