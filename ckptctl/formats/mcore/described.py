"""What Megatron's programs are told of a model: the arguments of Megatron-LM, Bridge's YAML.

Both are made of config.json. Where there is none, or Megatron-Core has no words for it, the tensors
are written all the same: the programs take what they are told on their own command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.formats.base import OutputRequest
from ckptctl.formats.mcore.common_file import common_content, mark_file
from ckptctl.formats.mcore.factors import halved
from ckptctl.formats.mcore.files import COMMON, COMMON_STATE, MARK, RUN_CONFIG
from ckptctl.formats.mcore.training import is_state
from ckptctl.planner.configs import megatron_carried as carried
from ckptctl.planner.configs.facts import read_sizes
from ckptctl.planner.configs.megatron_adapter import SECTION, lacking, section
from ckptctl.planner.configs.megatron_carried import Carried
from ckptctl.planner.configs.megatron_files import ONE_RANK, arguments_of, container, run_config
from ckptctl.storage.yaml_text import dumped

EMBEDDING = "embedding.word_embeddings.weight"

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family

T = TypeVar("T")


class Described(NamedTuple):
    """What ``common.pt`` holds, and the other files without tensors."""

    common: Mapping[str, object]
    contents: Mapping[str, bytes]


def describe(request: OutputRequest, around: Mapping[str, object]) -> Described:
    """Return what describes the model of a request, and what is *around* it in ``common.pt``."""
    if request.adapter is not None:
        return _adapter(request, request.adapter)
    arguments = None
    if "args" not in around:
        what = f"the arguments in {COMMON}"
        said = COMMON_STATE if COMMON_STATE in request.records else COMMON
        arguments = _told(request, arguments_of, carried.arguments, said, what)
    what = f"{RUN_CONFIG} (for Megatron-Bridge)"
    yaml = _told(request, run_config, carried.run_config, RUN_CONFIG, what)
    if around:
        arguments = arguments and {**arguments, "no_save_optim": False}
        yaml = yaml and {**yaml, "checkpoint": {**_section(yaml), "save_optim": True}}
    common = common_content(arguments, stacked=request.stack_layers, around=around)
    contents = {MARK: mark_file()}
    if yaml is not None:
        contents[RUN_CONFIG] = dumped(yaml)
    return Described(common, contents)


def _adapter(request: OutputRequest, stated: Mapping[str, object]) -> Described:
    """Return what describes low-rank factors, and the model that they change where it is known."""
    what = f"the model section of {RUN_CONFIG} (Megatron-Bridge reads the model from elsewhere)"
    yaml = _told(request, run_config, carried.run_config, RUN_CONFIG, what)
    yaml = yaml or container(ONE_RANK)
    shapes = {tensor.name: tensor.shape for tensor in request.tensors}
    yaml[SECTION] = section(shapes, stated, request.sizes.get("i"))
    if layers := lacking(shapes):
        parts = "factors for query, key and value together, and for gate and up together"
        missing = f"some are missing in {listed(layers)}"
        request.notes.add(f"Megatron-Bridge 0.3 requires {parts}; {missing}")
    if exchanged := halved(shapes):
        request.notes.add(
            "with several tensor-parallel ranks, Megatron-Bridge 0.3 swaps rows of these "
            f"factors; load them on one rank: {listed(exchanged)}"
        )
    common = common_content(None, stacked=request.stack_layers)
    return Described(common, {MARK: mark_file(), RUN_CONFIG: dumped(yaml)})


def _section(yaml: Mapping[str, object]) -> Mapping[str, object]:
    """Return what ``run_config.yaml`` says of how the run was saved."""
    found = yaml["checkpoint"]
    return found if isinstance(found, Mapping) else {}


def _told(
    request: OutputRequest,
    make: Callable[..., dict[str, object]],
    carry: Callable[..., Carried],
    file: str,
    what: str,
) -> dict[str, object] | None:
    """Return what *make* makes, else what *carry* takes over of the source's *file*."""
    made, why_not = _made(request, make)
    if made is not None:
        return made
    if file not in request.records:
        request.notes.add(f"skipped {what}, because {why_not}")
        return None
    found = carry(request.records[file], _rows(request), _dtype(request))
    if found.left_out:
        request.notes.add(
            f"omitted from {what}, because they are not plain values: {listed(found.left_out)}"
        )
    return found.values


def _made(request: OutputRequest, make: Callable[..., T]) -> tuple[T | None, str]:
    """Return what *make* makes of the configuration, or None and the reason why it cannot."""
    if request.config is None or request.family is None:
        if request.family is None:
            return None, f"the model type is unknown (set {spell_option('--model-type')})"
        pointing = f"pass {spell_option('--assets DIR')} to copy it from the trained model's folder"
        return None, f"config.json is missing; {pointing}"
    try:
        made = make(
            request.family,
            request.config,
            {**request.sizes, **_vocabulary(request.family, request.config)},
            padded=_rows(request),
            dtype=_dtype(request),
        )
    except MappingError as error:
        return None, error.what
    return made, ""


def _vocabulary(family: Family, config: Mapping[str, object]) -> dict[str, int]:
    """Return the real size of the vocabulary, if *config* states it: the tensors may be padded."""
    return {axis: size for axis, size in read_sizes(family, config).items() if axis == "v"}


def _rows(request: OutputRequest) -> int | None:
    """Return the rows of the vocabulary, with padding."""
    found = (tensor.shape[0] for tensor in request.tensors if tensor.name == EMBEDDING)
    return next(found, None)


def _dtype(request: OutputRequest) -> str | None:
    """Return the dtype that most bytes of the model are of."""
    total: dict[str, int] = {}
    for tensor in request.tensors:
        if not is_state(tensor.name):
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)
