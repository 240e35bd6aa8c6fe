"""Loading any checkpoint into a state dict that may be sharded over ranks: ``ckptctl.load``."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch.distributed as dist

from ckptctl import families
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.collective import CollectiveLoad
from ckptctl.distributed.loading.request import Broadcast, LoadCall
from ckptctl.errors import UsageError, listed
from ckptctl.ops.loading.options import LoadOptions, LoadReport
from ckptctl.ops.ranks.coordinator import Alone


class ReadKeywords(TypedDict, total=False):
    """The options of :func:`load` that describe the checkpoint and the state."""

    model_type: str | None
    layout: str | None
    from_layout: str | None
    format: str | None
    root: str | None
    weights: Literal["master", "module"] | None
    tag: str | None
    rules: str | Path | None
    sizes: Mapping[str, int] | None
    assets: str | Path | None
    trust_assets: bool
    dequantize: str | None
    cast: bool
    allow_overflow: bool
    trusted: bool
    checksum: bool
    jobs: int | None


def load_options(**given: Unpack[ReadKeywords]) -> LoadOptions:
    """Return the options of a load, checked."""
    unknown = given.keys() - ReadKeywords.__annotations__.keys()
    if unknown:
        raise UsageError(f"there is no option {listed(sorted(unknown))}")
    asked: dict[str, Any] = {**given, "jobs": given.get("jobs") or 0}
    return LoadOptions(**asked)


def load(
    state_dict: MutableMapping[str, Any],
    path: str | Path,
    *,
    model_type: str | None = None,
    layout: str | None = None,
    from_layout: str | None = None,
    format: str | None = None,
    root: str | None = None,
    weights: Literal["master", "module"] | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    sizes: Mapping[str, int] | None = None,
    assets: str | Path | None = None,
    trust_assets: bool = False,
    converter: str | Path | None = None,
    dequantize: str | None = None,
    strict: bool = True,
    cast: bool = False,
    allow_overflow: bool = False,
    trusted: bool = False,
    checksum: bool = False,
    jobs: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    broadcast: Broadcast = "auto",
    collectives: bool = True,
) -> LoadReport:
    """Fill *state_dict* from a checkpoint of any format; all ranks call it.

    Tensors are filled in place, sharded ones with their part alone. Other leaves are replaced, and
    objects with ``load_state_dict`` are given theirs. Until every rank has planned all of it
    nothing changes; when a read fails later, on any rank, the tensors hold some of each.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves.
        path: The checkpoint: a directory or a file.
        model_type: Model family, where names or axes change; None: detect it.
        layout: Layout of the state's names; None: detect it.
        from_layout: Layout of the checkpoint's; None: detect it.
        format: Format of the checkpoint; None: detect it.
        root: The model's prefix in the checkpoint; None: find it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which of several saves in it; None: the one that its pointer names.
        rules: TOML file that says how ranks divide tensors, where theirs do not.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        assets: Directory with configuration; None: the checkpoint's own.
        trust_assets: Take what *assets* say where the checkpoint's own files contradict them.
        converter: Python file that defines one more family; it is run.
        dequantize: Turn quantised tensors into ``bf16`` or ``fp32``; None: take them as they are.
        strict: Whether names that are missing or left over are errors; else the report has them.
        cast: Whether floating tensors may get another dtype than the checkpoint's.
        allow_overflow: Whether elements may become infinite, NaN or saturated by that or by
            *dequantize*; else the load fails, after it has filled the tensors.
        trusted: Whether leaves that are no tensors may run code when they are unpickled.
        checksum: Whether to compare recorded checksums of what is read whole.
        jobs: Threads per rank; None: its part of the host's cores, at most four.
        process_group: The ranks; None: the default group, or this process alone.
        broadcast: Whether what several ranks want is read by one of them and sent to the others;
            ``auto``: where they sit on several machines, or storage is slow.
        collectives: Whether the ranks agree; without, each one loads for itself.

    Returns:
        What this rank loaded.

    Raises:
        CkptError: On every rank, whichever failed.
    """
    options = load_options(
        format=format,
        model_type=model_type,
        layout=layout,
        from_layout=from_layout,
        root=root,
        weights=weights,
        tag=tag,
        rules=rules,
        sizes=sizes,
        assets=assets,
        trust_assets=trust_assets,
        dequantize=dequantize,
        cast=cast,
        allow_overflow=allow_overflow,
        trusted=trusted,
        checksum=checksum,
        jobs=jobs,
    )
    if broadcast not in (True, False, "auto"):
        raise UsageError("`broadcast` is True, False or 'auto'", why=f"it is {broadcast!r}")
    group = coordinator(process_group)
    ranks = group if collectives else Alone()
    error: BaseException | None = None
    with ExitStack() as stack:
        try:
            stack.enter_context(families.using(converter))
        except BaseException as failure:  # the other ranks wait to be told
            error = failure
        how = LoadCall(replace(options, strict=strict), broadcast, converter)
        return CollectiveLoad(ranks, group, how).into(state_dict, path, error)
