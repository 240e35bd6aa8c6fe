"""Find the files of a legacy Megatron save, and read the file of one rank.

Source: ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``read_metadata``):
``iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` contains the tensor-parallel rank TT. The
pipeline stage PPP and the expert-parallel rank EEE are omitted if there is only one. Each file has
(``generate_state_dict``) ``args`` (an ``argparse.Namespace``), ``iteration``, and ``model`` or,
with virtual pipeline stages, ``model0``, ``model1``, ... Nothing of Megatron is imported. Its
classes become inert records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import mixed_saves_error
from ckptctl.formats.shared.leaves import flatten_object, join_path
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.schema import read_as, wrap_malformed_errors
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.storage.zips.zip_reader import StoredTensor

MODEL_KEY, ARGUMENTS, ITERATION_KEY = "model", "args", "iteration"
EXTRA_STATE_KEY = "_extra_state"
MAX_CHUNKS = 1024
POINTER_FILE = "latest_checkpointed_iteration.txt"
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,7})((?:_\d{3,7}){0,2})", re.ASCII)
_ITERATION = re.compile(r"\d{1,15}", re.ASCII)
FolderNumbers = tuple[int, ...]
"""Numbers in the name of a rank folder.

The first is the tensor-parallel rank, and up to two are pipeline stage and expert-parallel rank.
"""


def find_evidence(folder: TreePath) -> str | None:
    """Return the number of rank files as evidence that *folder* is one save, or None."""
    if not folder.is_dir():
        return None
    folders = [
        item
        for item in folder.iterdir()
        if parse_rank_folder(item.name) is not None and (item / MODEL_FILE).is_file()
    ]
    return f"{len(folders)} of mp_rank_*/{MODEL_FILE}" if folders else None


def parse_rank_folder(name: str) -> FolderNumbers | None:
    """Parse the numbers in the name of a rank folder, or return None for other names."""
    match = _RANK.fullmatch(name)
    if match is None:
        return None
    return (int(match[1]), *map(int, match[2].split("_")[1:]))


def format_folder_name(text: str) -> str:
    """Return the folder that *text*, the content of the tracker file, refers to.

    *text* is an iteration number or ``release``.
    """
    return f"iter_{int(text):07d}" if _ITERATION.fullmatch(text) else text


def list_rank_folders(root: TreePath, folder: str) -> dict[FolderNumbers, str]:
    """Return the names of all rank folders by their numbers, even if a folder has no file."""
    names_by_numbers: dict[FolderNumbers, str] = {}
    items = ((item.name, parse_rank_folder(item.name), item) for item in (root / folder).iterdir())
    candidates = [
        (name, parsed_numbers)
        for name, parsed_numbers, item in items
        if parsed_numbers is not None and item.is_dir()
    ]
    for name, parsed in sorted(candidates):
        if names_by_numbers.setdefault(parsed, name) != name:
            raise mixed_saves_error(
                root / folder, f"`{names_by_numbers[parsed]}` and `{name}` belong to the same rank"
            )
    if len({len(parsed) for parsed in names_by_numbers}) > 1:
        examples = {len(parsed): name for parsed, name in names_by_numbers.items()}
        raise mixed_saves_error(
            root / folder, " and ".join(f"`{name}`" for name in examples.values())
        )
    if not names_by_numbers:
        raise FormatError(
            "no rank folder was found", where=str(root / folder), why="expected `mp_rank_00`"
        )
    return names_by_numbers


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Tensor in the file of one rank, with its key path in the model's state dict."""

    path: KeyPath
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class RankState:
    """Content of the file of one rank.

    Attributes:
        file: Path of the file, relative to the checkpoint's root.
        arguments: Training arguments. Empty if not recorded.
        iteration: Recorded iteration, which may have any type.
        model_chunks: Tensors of each virtual pipeline stage by name. One entry without virtual
            stages.
        has_extra_state: Whether layers have extra state, which is not read.
        content: Complete content of the file.
        has_checksums: Whether the file records checksums.
    """

    file: str
    arguments: Mapping[str, object]
    iteration: object
    model_chunks: tuple[Mapping[str, LocalTensor], ...]
    has_extra_state: bool
    content: Mapping[str, object]
    has_checksums: bool

    def find_argument(self, name: str) -> int | None:
        """Return the training argument *name*, or None if it is missing or not an integer."""
        value = self.arguments.get(name)
        return value if type(value) is int else None


def read_rank_state(files: SourceFiles, name: str) -> RankState:
    """Read the file *name* of one rank."""
    from ckptctl.storage.zips.zip_reader import read_archive  # not for detection

    archive = read_archive(files, name, unknown="inert")
    where = str(files.root / name)
    with wrap_malformed_errors("this is not a Megatron file", where):
        content = read_as(dict[str, object], archive.root)
    record = content.get(ARGUMENTS)
    arguments = record.state if isinstance(record, Inert) else record
    chunks = tuple(
        _extract_tensors(content[key], where) for key in _find_model_keys(content, where)
    )
    return RankState(
        name,
        {key: value for key, value in arguments.items() if isinstance(key, str)}
        if isinstance(arguments, dict)
        else {},
        content.get(ITERATION_KEY),
        tuple(tensors for tensors, _ in chunks),
        any(extra for _, extra in chunks),
        content,
        archive.checksums,
    )


def _find_model_keys(content: Mapping[str, object], where: str) -> tuple[str, ...]:
    """Return the keys of the model, which are several if it has virtual pipeline stages."""
    if MODEL_KEY in content:
        return (MODEL_KEY,)
    numbers = range(min(len(content), MAX_CHUNKS))
    keys = tuple(key for number in numbers if (key := f"{MODEL_KEY}{number}") in content)
    if not keys or keys[-1] != f"{MODEL_KEY}{len(keys) - 1}":
        raise UnsupportedError(
            "this file does not contain a model",
            where=where,
            why=f"it contains {quote_names([*content])}",
        )
    return keys


def is_model_key(key: str) -> bool:
    """Return whether *key* is a key of the model or of one of its virtual stages."""
    return key == MODEL_KEY or (key.startswith(MODEL_KEY) and key[len(MODEL_KEY) :].isdecimal())


def _extract_tensors(model: object, where: str) -> tuple[dict[str, LocalTensor], bool]:
    """Return the tensors of a model state dict by name, and whether it contains extra state."""
    from ckptctl.formats.shared.stored_leaves import is_stored_tensor, refuse_hidden_tensors
    from ckptctl.storage.zips.zip_reader import StoredTensor

    tensors: dict[str, LocalTensor] = {}
    extra = False
    for path, leaf in flatten_object(model, is_stored_tensor, where=where):
        name = join_path(path)
        if any(part.startswith(EXTRA_STATE_KEY) for part in name.split(".")):
            extra = extra or leaf is not None
        elif isinstance(leaf, StoredTensor):
            if tensors.setdefault(name, LocalTensor(path, leaf)).path != path:
                raise UnsupportedError(f"two values have the name `{name}`", where=where)
        else:
            refuse_hidden_tensors(leaf, name, where)
            # None is a placeholder for an absent optional tensor.
            if leaf is not None and leaf != {}:
                raise UnsupportedError(
                    f"`{name}` is part of the model but is not a tensor",
                    where=where,
                    why=f"it is a {type(leaf).__name__}",
                )
    return tensors, extra
