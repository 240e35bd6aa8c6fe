"""Find the files of one DeepSpeed save, and reject unsupported kinds of saves.

Source: ``deepspeed/runtime/engine.py`` (``_get_ckpt_name``, ``_get_zero_ckpt_prefix``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import DamagedError, FormatError, format_option, quote_names
from ckptctl.formats.shared.findings import FaultCollector, missing_files_error, mixed_saves_error
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally

FP32 = "fp32"
ZERO = "zero"
ROOT_FILES = (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py")
MODEL_FILE = "mp_rank_00_model_states.pt"
_RANK_FILE = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt"
)
_MODEL_FILE = re.compile(r"mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_UNSUPPORTED_FILES = (
    (
        re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_(?:model|optim)_states\.pt"),
        "mixture of experts (a file per expert)",
        "DeepSpeed does not record which experts are in the optimizer partition of a rank",
    ),
    (
        re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"),
        "expert parallelism (a file per expert-parallel rank)",
        "DeepSpeed does not record which experts are in the optimizer partition of a rank",
    ),
    (
        re.compile(r"layer_\d+(?:-.+)?-model_states\.pt"),
        "pipeline parallelism (a file per layer)",
        "only the code of the pipeline knows the parameter names",
    ),
)
MAX_PARTIAL_RANKS = 1 << 16
"""Maximum number of ranks for a partial read, which lists every missing rank."""
CONVERSION_ADVICE = (
    "convert it with DeepSpeed's ds_to_universal.py, if that supports the model, and read the "
    "result"
)


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """Files of one save, relative to the checkpoint's root.

    Attributes:
        models: Model-state files. Stages 0 to 2 have one file, stage 3 has one file per rank.
        optims: Optimizer-state files, one per rank. Empty for stage 0.
        partitioned: Whether the model's parameters are divided among ranks (stage 3).
    """

    models: tuple[str, ...]
    optims: tuple[str, ...]
    partitioned: bool


def find_evidence(folder: TreePath) -> str | None:
    """Return the name of a state file that shows that *folder* is one save, or None.

    Universal checkpoints are not recognized.
    """
    try:
        if not folder.is_dir() or (folder / "zero").is_dir():
            return None
        names = [item.name for item in folder.iterdir() if item.name.endswith("_states.pt")]
    except PermissionError:  # such as `lost+found`
        return None
    state_files = [name for name in names if match_state_file_name(name)]
    return f"{quote_names(sort_naturally(state_files), 1)}" if state_files else None


def match_state_file_name(name: str) -> str | None:
    """Return *name* if it is a name of a DeepSpeed model-state or optimizer-state file, or None."""
    return name if _RANK_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name) else None


def find_model_files(root: TreePath, folder: str, faults: FaultCollector) -> tuple[str, ...]:
    """Return the model-state files of a universal checkpoint, in natural order of their names."""
    items = (item.name for item in (root / folder).iterdir())
    names = sort_naturally(
        [n for n in items if n.endswith("_model_states.pt") and match_state_file_name(n)]
    )
    matches = [
        match for name in names if (match := _RANK_FILE.fullmatch(name)) and not int(match[2])
    ]
    if not matches or len(matches) < len(names):
        return tuple(f"{folder}/{name}" if folder else name for name in names)
    ranks = {int(match[1]): match[0] for match in matches}
    return _list_complete_rank_files(root, folder, ranks, "model", None, faults)


def find_rank_files(root: TreePath, folder: str, faults: FaultCollector) -> SaveFiles:
    """Return the model-state and optimizer-state files of the save in *folder*.

    Raises if the save is incomplete, mixed with another save, or of an unsupported kind.
    """
    where = root / folder
    names = sort_naturally([item.name for item in where.iterdir()])
    _refuse_unsupported(where, names)
    ranks: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        if match:
            first = ranks[match[3]].setdefault(int(match[1]), name)
            if first != name:
                raise mixed_saves_error(where, f"`{first}` and `{name}` belong to the same rank")
    partitioned = bool(ranks["model"])
    if partitioned and MODEL_FILE in names:
        sharded = ranks["model"].popitem()[1]
        raise mixed_saves_error(
            where, f"`{MODEL_FILE}` belongs to ZeRO stages 0 to 2, `{sharded}` to stage 3"
        )
    if not partitioned and MODEL_FILE not in names:
        raise DamagedError(
            f"`{MODEL_FILE}` is missing",
            where=str(where),
            why=f"found {quote_names(names)}" if names else "the folder is empty",
        )
    prefix = f"{folder}/" if folder else ""
    models, optims = (
        _list_complete_rank_files(root, folder, ranks[kind], kind, None, faults)
        if ranks[kind]
        else ()
        for kind in ("model", "optim")
    )
    return SaveFiles(models or (prefix + MODEL_FILE,), optims, partitioned)


def _refuse_unsupported(where: TreePath, names: Collection[str]) -> None:
    for pattern, kind, why in _UNSUPPORTED_FILES:
        matching = [name for name in names if pattern.fullmatch(name)]
        if matching:
            raise FormatError(
                f"{kind} is not supported",
                where=str(where / matching[0]),
                why=why,
                hint=CONVERSION_ADVICE,
            )
    for name in names:
        ranked, shared = _RANK_FILE.fullmatch(name), _MODEL_FILE.fullmatch(name)
        rank = int(ranked[2]) if ranked else int(shared[1]) if shared else 0
        if rank:
            raise FormatError(
                "tensor parallelism is not supported",
                where=str(where / name),
                why="the dimension along which a parameter is divided is recorded at most in "
                "`universal_checkpoint_info`, as patterns for DeepSpeed's converter",
                hint=CONVERSION_ADVICE,
            )
    if "offloaded_tensors" in names:
        raise FormatError(
            "partitions offloaded to NVMe are not supported",
            where=str(where / "offloaded_tensors"),
            why="the files are dumps of swap buffers without an index",
            hint="save without `offload_optimizer: nvme`",
        )


def _list_complete_rank_files(
    root: TreePath,
    folder: str,
    files_by_rank: Mapping[int, str],
    kind: str,
    world: int | None,
    faults: FaultCollector,
) -> tuple[str, ...]:
    """Return the files of all ranks below *world* in order, or raise if one is missing.

    In a partial read, missing files become findings, and their names are included.
    """
    prefix = f"{folder}/" if folder else ""
    last = max(files_by_rank) if world is None else world - 1
    surplus = [name for rank, name in sorted(files_by_rank.items()) if rank > last]
    if surplus:
        raise mixed_saves_error(
            root / folder,
            f"the save has {pluralize(last + 1, 'rank')}, but {quote_names(surplus)} "
            f"{'is' if len(surplus) == 1 else 'are'} from a save with more ranks",
        )
    hint = f"copy the missing files, or choose another save with {format_option('--tag')}"
    noun = f"files of {kind} states"
    error = missing_files_error(
        root / folder,
        files_by_rank.keys(),
        range(last + 1),
        lambda rank: _format_rank_name(files_by_rank, rank),
        noun,
        hint,
    )
    if error and faults.partial and last < MAX_PARTIAL_RANKS:
        for rank in range(last + 1):
            if rank not in files_by_rank:
                why = f"the {kind} states of rank {rank} of {pluralize(last + 1, 'rank')}"
                faults.add_missing_file(prefix + _format_rank_name(files_by_rank, rank), why)
        return tuple(
            prefix + (files_by_rank.get(n) or _format_rank_name(files_by_rank, n))
            for n in range(last + 1)
        )
    if error:
        rank = next(rank for rank in range(last + 1) if rank not in files_by_rank)
        elsewhere = _describe_other_folder(
            root, folder, _format_rank_name(files_by_rank, rank), set(files_by_rank.values())
        )
        error.why = f"{error.why}{elsewhere}"
        raise error
    return tuple(prefix + name for _, name in sorted(files_by_rank.items()))


def require_files_of_all_ranks(
    root: TreePath, names: tuple[str, ...], world: int, kind: str, faults: FaultCollector
) -> tuple[str, ...]:
    """Return the files of all ranks, or raise if some are missing or from a larger world.

    In a partial read, the names of missing files are included.
    """
    folder = names[0].rpartition("/")[0]
    files_by_rank = {rank: Path(name).name for rank, name in enumerate(names)}
    return _list_complete_rank_files(root, folder, files_by_rank, kind, world, faults)


def _format_rank_name(files_by_rank: Mapping[int, str], rank: int) -> str:
    example = next(iter(files_by_rank.values()))
    return re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", example)


def _describe_other_folder(root: TreePath, folder: str, name: str, names: Collection[str]) -> str:
    """Describe another folder that contains the missing file *name*, or return an empty string.

    If folder names contain a metric, ranks may write the files of one save to different folders.
    """
    for sibling in sorted(root.parent.iterdir()):
        candidate = sibling / folder if folder else sibling
        has = sibling != root and candidate.is_dir() and (candidate / name).is_file()
        if has and not all((candidate / item).is_file() for item in names):
            return f"; `{candidate}` contains `{name}`, but not all files of this folder"
    return ""
