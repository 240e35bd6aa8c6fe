"""What Megatron's programs are told of a model: the arguments of Megatron-LM, Bridge's YAML.

Both are made of config.json. Where there is none, or Megatron-Core has no words for it, the tensors
are written all the same: the programs take what they are told on their own command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptctl.errors import MappingError
from ckptctl.formats.base import OutputRequest
from ckptctl.formats.mcore.common_file import common_file, mark_file
from ckptctl.formats.mcore.files import COMMON, MARK, RUN_CONFIG
from ckptctl.planner.configs.facts import read_sizes
from ckptctl.planner.configs.megatron_files import arguments_of, run_config
from ckptctl.storage.yaml_text import dumped

EMBEDDING = "embedding.word_embeddings.weight"

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family

T = TypeVar("T")


class Described(NamedTuple):
    """The files without tensors, and what the user should know of them."""

    contents: Mapping[str, bytes]
    notes: tuple[str, ...]


def describe(request: OutputRequest) -> Described:
    """Return what describes the model of a request."""
    notes: list[str] = []
    arguments = _made(request, arguments_of, f"the arguments in {COMMON}", notes)
    yaml = _made(request, run_config, f"{RUN_CONFIG}, which Megatron-Bridge reads", notes)
    contents = {COMMON: common_file(arguments, stacked=request.stack_layers), MARK: mark_file()}
    if yaml is not None:
        contents[RUN_CONFIG] = dumped(yaml)
    return Described(contents, tuple(notes))


def _made(request: OutputRequest, make: Callable[..., T], what: str, notes: list[str]) -> T | None:
    """Return what *make* makes of the configuration; None, and a note, where it cannot."""
    if request.config is None or request.family is None:
        why = "there is no config.json" if request.family else "the model type is not known"
        notes.append(f"not written: {what}: {why}")
        return None
    try:
        return make(
            request.family,
            request.config,
            {**request.sizes, **_vocabulary(request.family, request.config)},
            padded=_rows(request),
            dtype=_dtype(request),
        )
    except MappingError as error:
        notes.append(f"not written: {what}: {error.what}")
        return None


def _vocabulary(family: Family, config: Mapping[str, object]) -> dict[str, int]:
    """Return the real size of the vocabulary, if *config* states it: the tensors may be padded."""
    return {axis: size for axis, size in read_sizes(family, config).items() if axis == "v"}


def _rows(request: OutputRequest) -> int | None:
    """Return the rows of the vocabulary, with padding."""
    found = (tensor.shape[0] for tensor in request.tensors if tensor.name == EMBEDDING)
    return next(found, None)


def _dtype(request: OutputRequest) -> str | None:
    """Return the dtype that most bytes are of."""
    total: dict[str, int] = {}
    for tensor in request.tensors:
        total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)
