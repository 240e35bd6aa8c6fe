"""Find the files of one DeepSpeed save, and reject unsupported kinds of saves.

Source: ``deepspeed/runtime/engine.py`` (``_get_ckpt_name``, ``_get_zero_ckpt_prefix``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import DamagedError, FormatError, quote_names, spell_option
from ckptctl.formats.shared.findings import Faults, missing_error, mixed_saves
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally

FP32 = "fp32"
ZERO = "zero"
SCRIPTS = (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py")
MODEL = "mp_rank_00_model_states.pt"
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_SHARED = re.compile(r"mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_REFUSED = (
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
MAX_PARTIAL = 1 << 16
"""Maximum number of ranks for a partial read, which lists every missing rank."""
ADVICE = (
    "convert it with DeepSpeed's ds_to_universal.py, if that supports the model, and read the "
    "result"
)


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """Files of one save, relative to the checkpoint's root.

    Attributes:
        models: Files of model states, one for stages 0 to 2, one per rank for stage 3.
        optims: Files of optimizer states, one per rank; none for stage 0.
        partitioned: Whether the model's parameters are divided among ranks (stage 3).
    """

    models: tuple[str, ...]
    optims: tuple[str, ...]
    partitioned: bool


def evidence(folder: TreePath) -> str | None:
    """Return evidence that *folder* is one save, but not a universal one, or None."""
    try:
        if not folder.is_dir() or (folder / "zero").is_dir():
            return None
        names = [item.name for item in folder.iterdir() if item.name.endswith("_states.pt")]
    except PermissionError:  # such as `lost+found`
        return None
    known = [name for name in names if saved_name(name)]
    return f"{quote_names(sort_naturally(known), 1)}" if known else None


def saved_name(name: str) -> str | None:
    """Return *name* if it is a name that DeepSpeed gives to files of states, else None."""
    return name if _RANK.fullmatch(name) or _SHARED.fullmatch(name) else None


def model_files(root: TreePath, folder: str, faults: Faults) -> tuple[str, ...]:
    """Return the files of a universal checkpoint's model states, in natural order."""
    items = (item.name for item in (root / folder).iterdir())
    names = sort_naturally([n for n in items if n.endswith("_model_states.pt") and saved_name(n)])
    found = [match for name in names if (match := _RANK.fullmatch(name)) and not int(match[2])]
    if not found or len(found) < len(names):
        return tuple(f"{folder}/{name}" if folder else name for name in names)
    ranks = {int(match[1]): match[0] for match in found}
    return _complete(root, folder, ranks, "model", None, faults)


def rank_files(root: TreePath, folder: str, faults: Faults) -> SaveFiles:
    """Return the files of one save."""
    where = root / folder
    names = sort_naturally([item.name for item in where.iterdir()])
    _refuse(where, names)
    ranks: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in names:
        found = _RANK.fullmatch(name)
        if found:
            first = ranks[found[3]].setdefault(int(found[1]), name)
            if first != name:
                raise mixed_saves(where, f"`{first}` and `{name}` belong to the same rank")
    partitioned = bool(ranks["model"])
    if partitioned and MODEL in names:
        sharded = ranks["model"].popitem()[1]
        raise mixed_saves(where, f"`{MODEL}` belongs to ZeRO stages 0 to 2, `{sharded}` to stage 3")
    if not partitioned and MODEL not in names:
        raise DamagedError(
            f"`{MODEL}` is missing",
            where=str(where),
            why=f"found {quote_names(names)}" if names else "the folder is empty",
        )
    prefix = f"{folder}/" if folder else ""
    models, optims = (
        _complete(root, folder, ranks[kind], kind, None, faults) if ranks[kind] else ()
        for kind in ("model", "optim")
    )
    return SaveFiles(models or (prefix + MODEL,), optims, partitioned)


def _refuse(where: TreePath, names: Collection[str]) -> None:
    for pattern, kind, why in _REFUSED:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise FormatError(
                f"{kind} is not supported",
                where=str(where / found[0]),
                why=why,
                hint=ADVICE,
            )
    for name in names:
        ranked, shared = _RANK.fullmatch(name), _SHARED.fullmatch(name)
        rank = int(ranked[2]) if ranked else int(shared[1]) if shared else 0
        if rank:
            raise FormatError(
                "tensor parallelism is not supported",
                where=str(where / name),
                why="the dimension along which a parameter is divided is recorded at most in "
                "`universal_checkpoint_info`, as patterns for DeepSpeed's converter",
                hint=ADVICE,
            )
    if "offloaded_tensors" in names:
        raise FormatError(
            "partitions offloaded to NVMe are not supported",
            where=str(where / "offloaded_tensors"),
            why="the files are dumps of swap buffers without an index",
            hint="save without `offload_optimizer: nvme`",
        )


def _complete(
    root: TreePath,
    folder: str,
    found: Mapping[int, str],
    kind: str,
    world: int | None,
    faults: Faults,
) -> tuple[str, ...]:
    """Return the files of all ranks below *world* in order, or raise if one is missing.

    In a partial read, missing files become findings, and their names are included.
    """
    prefix = f"{folder}/" if folder else ""
    last = max(found) if world is None else world - 1
    beyond = [name for rank, name in sorted(found.items()) if rank > last]
    if beyond:
        raise mixed_saves(
            root / folder,
            f"the save has {pluralize(last + 1, 'rank')}, but {quote_names(beyond)} "
            f"{'is' if len(beyond) == 1 else 'are'} from a save with more ranks",
        )
    hint = f"copy the missing files, or choose another save with {spell_option('--tag')}"
    what = f"files of {kind} states"
    error = missing_error(
        root / folder, found.keys(), range(last + 1), lambda rank: _like(found, rank), what, hint
    )
    if error and faults.partial and last < MAX_PARTIAL:
        for rank in range(last + 1):
            if rank not in found:
                why = f"the {kind} states of rank {rank} of {pluralize(last + 1, 'rank')}"
                faults.missing(prefix + _like(found, rank), why)
        return tuple(prefix + (found.get(n) or _like(found, n)) for n in range(last + 1))
    if error:
        rank = next(rank for rank in range(last + 1) if rank not in found)
        elsewhere = _elsewhere(root, folder, _like(found, rank), set(found.values()))
        error.why = f"{error.why}{elsewhere}"
        raise error
    return tuple(prefix + name for _, name in sorted(found.items()))


def require_world(
    root: TreePath, names: tuple[str, ...], world: int, kind: str, faults: Faults
) -> tuple[str, ...]:
    """Return the files of all ranks, or raise if some are missing or from a larger world.

    In a partial read, the names of missing files are included.
    """
    folder = names[0].rpartition("/")[0]
    found = {rank: Path(name).name for rank, name in enumerate(names)}
    return _complete(root, folder, found, kind, world, faults)


def _like(found: Mapping[int, str], rank: int) -> str:
    some = next(iter(found.values()))
    return re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", some)


def _elsewhere(root: TreePath, folder: str, name: str, here: Collection[str]) -> str:
    """Mention another folder with file *name*, since metric-based names differ between ranks."""
    for sibling in sorted(root.parent.iterdir()):
        other = sibling / folder if folder else sibling
        has = sibling != root and other.is_dir() and (other / name).is_file()
        if has and not all((other / item).is_file() for item in here):
            return f"; `{other}` contains `{name}`, but not all files of this folder"
    return ""
