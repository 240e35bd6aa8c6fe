"""A tensor as :mod:`ckptctl.storage.pickles.writer` writes it."""

from __future__ import annotations

from dataclasses import dataclass


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
