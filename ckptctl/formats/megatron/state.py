"""What one rank of Megatron wrote: the parts of the model it has, and the arguments it ran with.

Source: ``generate_state_dict`` in ``megatron/training/checkpointing.py``: ``args`` (an
``argparse.Namespace``), ``iteration``, ``model`` or, with virtual pipeline stages, ``model0``,
``model1``, ... Nothing of Megatron is imported: its classes become inert records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.catalog import Path
from ckptctl.errors import UnsupportedError, listed
from ckptctl.formats.shared.structure import flatten, join
from ckptctl.formats.torch_file import is_stored, refuse_hidden_tensors
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.zips.reader import StoredTensor, read_archive

MODEL, ARGUMENTS, ITERATION = "model", "args", "iteration"
EXTRA = "_extra_state"
MAX_CHUNKS = 1024


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of one rank.

    Attributes:
        path: Where it lies in the model's state dict.
        tensor: It.
    """

    path: Path
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class RankState:
    """The file of one rank.

    Attributes:
        file: Relative to the checkpoint's root.
        arguments: What the training was started with; empty where that is not recorded.
        iteration: As recorded.
        chunks: The tensors of each virtual pipeline stage, by name; of one without such.
        extra: Whether layers have kept state of their own, which is not read.
        content: All of it.
        checksums: Whether the file has checksums.
    """

    file: str
    arguments: Mapping[str, object]
    iteration: object
    chunks: tuple[Mapping[str, LocalTensor], ...]
    extra: bool
    content: Mapping[str, object]
    checksums: bool

    def argument(self, name: str) -> int | None:
        """Return an argument that is a number, None where there is none of that name."""
        value = self.arguments.get(name)
        return value if type(value) is int else None


def read_state(files: SourceFiles, name: str) -> RankState:
    """Return what one rank's file says.

    Raises:
        UnsupportedError: It is damaged, or has no model in it.
        FormatError: It is no zip.
    """
    archive = read_archive(files, name, unknown="inert")
    where = str(files.root / name)
    content = archive.root
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UnsupportedError("this is not a file of Megatron", where=where, why="it is no dict")
    models = _models(content, where)
    chunks = tuple(_tensors(content[key], where) for key in models)
    return RankState(
        name,
        _arguments(content.get(ARGUMENTS)),
        content.get(ITERATION),
        tuple(found for found, _ in chunks),
        any(extra for _, extra in chunks),
        content,
        archive.checksums,
    )


def _models(content: Mapping[str, object], where: str) -> tuple[str, ...]:
    """Return the keys of the model's parts in order."""
    if MODEL in content:
        return (MODEL,)
    numbers = range(min(len(content), MAX_CHUNKS))
    found = tuple(key for number in numbers if (key := f"{MODEL}{number}") in content)
    if not found or found[-1] != f"{MODEL}{len(found) - 1}":
        raise UnsupportedError(
            "there is no model in this file", where=where, why=f"it has {listed([*content])}"
        )
    return found


def is_model(key: str) -> bool:
    """Return whether a file's key is that of the model or of a part of it."""
    return key == MODEL or (key.startswith(MODEL) and key[len(MODEL) :].isdecimal())


def _arguments(record: object) -> Mapping[str, object]:
    state = record.state if isinstance(record, Inert) else record
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in state.items() if isinstance(key, str)}


def _tensors(model: object, where: str) -> tuple[dict[str, LocalTensor], bool]:
    """Return the tensors of a state dict, and whether there is extra state as well."""
    found: dict[str, LocalTensor] = {}
    extra = False
    for path, leaf in flatten(model, is_stored):
        name = join(path)
        if any(part.startswith(EXTRA) for part in name.split(".")):
            extra = extra or leaf is not None
        elif isinstance(leaf, StoredTensor):
            if found.setdefault(name, LocalTensor(path, leaf)).path != path:
                raise UnsupportedError(f"two leaves are both called `{name}`", where=where)
        else:
            refuse_hidden_tensors(leaf, name, where)
            _refuse_values(leaf, name, where)
    return found, extra


def _refuse_values(leaf: object, name: str, where: str) -> None:
    """Models have tensors, and None in place of those that a layer does without."""
    if leaf is not None and leaf != {}:
        raise UnsupportedError(
            f"`{name}` is in the model and is no tensor",
            where=where,
            why=f"a {type(leaf).__name__}",
        )
