"""Leaves that are no tensors as they are saved: each is read again before it is."""

from __future__ import annotations

import datetime
import io
import pickle
from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from ckptctl.distributed.leaves.safe_reader import read_leaf
from ckptctl.errors import CkptError, RefusedError, listed

SHOWN = 100
SMALL = 1 << 12
"""Bytes of leaves that are kept to be known again."""
_READ_BY_ALL = frozenset({type(None), bool, int, float, str})


def pickled(values: Mapping[str, object], *, trusted: bool) -> dict[str, bytes]:
    """Return leaves as ``torch.save`` writes them, as DCP keeps them."""
    contents: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    lost = False
    for name, value in values.items():
        try:
            contents[name] = written(value)
        except Exception as error:  # what a leaf's own code raises
            refused[name] = f"{type(error).__name__}: {error}"
            lost = True
            continue
        why = None if trusted else _unreadable(value, contents[name])
        if why is not None:
            refused[name] = f"it could not be loaded again: {why}"
    if refused:
        raise _refusal(values, refused, lost=lost)
    return contents


def written(value: object) -> bytes:
    """Return one leaf as ``torch.save`` writes it, with what its protocol 2 would lose of times."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_PICKLE)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Keeps which of two equal times at the end of summer time is meant (``fold``)."""

    def reducer_override(self, value: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        folded = type(value) in (datetime.datetime, datetime.time) and value.fold
        return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if folded else NotImplemented


_PICKLE = SimpleNamespace(Pickler=_Pickler, __name__="pickle")
"""What ``torch.save`` asks of a module that pickles."""


def _unreadable(value: object, content: bytes) -> str | None:
    """Return why a leaf that was written cannot be read without trust, or comes back as another."""
    if type(value) in _READ_BY_ALL:
        return None
    prove = _proven if len(content) <= SMALL else _proven.__wrapped__
    kind: Any = type(value)
    return prove(kind, content)


@lru_cache(maxsize=1 << 12)
def _proven(kind: type, content: bytes) -> str | None:
    """Return why *content* cannot be read as a value of a class; None: it can.

    Leaves that come again at every save, as hyperparameters of each parameter do, are read once.
    """
    try:
        found = read_leaf(content, "the leaf")
    except CkptError as error:
        return error.what + (f": {error.why}" if error.why else "")
    return None if type(found) is kind else f"it would come back as a `{type(found).__name__}`"


def _refusal(
    values: Mapping[str, object], refused: Mapping[str, str], *, lost: bool
) -> RefusedError:
    named = [f"{name}: {_class(values[name])}" for name in refused]
    hint = "leave them out, or store what they are made of: numbers, texts, lists, dicts, tensors"
    if not lost:
        hint += "; `trusted=True` saves them all the same, and only `load(trusted=True)` reads them"
    return RefusedError(
        (listed(list(refused)) if len(refused) == 1 else f"{len(refused):,} leaves")
        + " cannot be saved",
        where=listed(named, SHOWN),
        why="; ".join(list(dict.fromkeys(refused.values()))[:SHOWN]),
        hint=hint,
    )


def _class(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
