"""The public Python functions: the same operations as the commands, with typed results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from ckptctl import dtypes
from ckptctl.errors import UsageError, nearest
from ckptctl.units import parse_bytes

if TYPE_CHECKING:
    from ckptctl.ops.convert import ConversionOptions, ConversionPlan, ConversionResult
    from ckptctl.ops.difference import Difference
    from ckptctl.ops.extract import Extraction
    from ckptctl.ops.inspection import Inspection
    from ckptctl.ops.merge import MergePlan
    from ckptctl.ops.report_data import Report
    from ckptctl.ops.verification import Level, Verification
    from ckptctl.ops.watch import Watch
    from ckptctl.storage.errors_between import Tolerance

AnyPath = str | Path
MAX_SHARD_SIZE = "5GB"


class Options(TypedDict, total=False):
    """What :func:`convert` and :func:`plan_conversion` accept beside ``to``.

    Keys:
        from_format: Format of the source; None: detect it.
        weights: ``master`` (the optimizer's fp32 copies) or ``module`` (what the model computes
            with), where the source holds both; None: what its format prefers.
        tag: Which of several saves in the source; None: the one that its pointer names.
        rules: TOML file that says how ranks divide tensors, or ``megatron-core``, where the
            ranks' own files do not say so.
        model_type: Model family; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        from_layout: Layout of the source's tensors; None: detect it.
        to_layout: Layout to write; None: what the target format implies, else the source's.
        dtype: Cast floating tensors to this dtype; None: keep theirs.
        dequantize: Turn quantised tensors into ``bf16`` or ``fp32``; None: keep them.
        include: Globs; only tensors that match one.
        exclude: Globs; no tensor that matches one.
        only: ``model``, or ``all`` for training state too.
        root: Prefix of the model inside the source; None: find it.
        max_shard_size: Bytes of tensors per output file: a number, or text such as ``5GB``.
        mp: Number of model-parallel files, in ``meta`` and ``deepseek``.
        assets: Directory with configuration and tokenizer; None: the source's own.
        like: Checkpoint whose distribution of keys over files is copied.
        overwrite: Replace the destination if it is a checkpoint.
        resume: Go on with an interrupted run.
        verify: Read the result again and compare its checksums.
        checksum: Compute checksums on the way.
        jobs: Threads that copy; None: its part of the cores, at most four.
        memory: Budget for buffers: bytes, or text such as ``256MiB``; None: the default.
        untie: Write both of two tied tensors.
        tied: ``drop`` all but one of the tensors that share memory, or ``copy`` each in full; None:
            as the target format does.
        allow_missing: Write what is whole of a source that is not; the result says what is missing.
        verify_replicas: Compare every copy of the same elements before anything is written.
        vocab_size: Pad the vocabulary with zeros, or cut it, to so many rows.
        lora_alpha: Strength of an adapter, where no adapter_config.json says so.
    """

    from_format: str | None
    weights: Literal["master", "module"] | None
    tag: str | None
    rules: AnyPath | None
    model_type: str | None
    converter: AnyPath | None
    sizes: Mapping[str, int]
    from_layout: str | None
    to_layout: str | None
    dtype: str | None
    dequantize: str | None
    include: Sequence[str]
    exclude: Sequence[str]
    only: Literal["model", "all"]
    root: str | None
    max_shard_size: int | str
    mp: int
    assets: AnyPath | None
    like: AnyPath | None
    overwrite: bool
    resume: bool
    verify: bool
    checksum: bool
    jobs: int | None
    memory: int | str | None
    untie: bool
    tied: Literal["drop", "copy"] | None
    allow_missing: bool
    verify_replicas: bool
    vocab_size: int | None
    lora_alpha: float | None


def inspect(
    path: AnyPath,
    *,
    format: str | None = None,
    stats: bool = False,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    rules: AnyPath | None = None,
) -> Inspection:
    """Say what the checkpoint at *path* holds and whether it is whole.

    Args:
        path: A directory or a file; a folder of checkpoints lists its members.
        format: Its format; None: detect it.
        stats: Read the data too and add statistics of every tensor; imports torch.
        model_type: Model family; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        rules: See :class:`Options`.

    Raises:
        CkptError: It is missing, not recognised, or its index is damaged.
    """
    from ckptctl import families
    from ckptctl.ops.inspect import inspect as run

    with families.using(converter):
        return run(path, format, stats, model_type=model_type, rules=_path(rules))


def verify(
    path: AnyPath,
    *,
    level: Level = "headers",
    nan: bool = False,
    manifest: bool = False,
    format: str | None = None,
    model_type: str | None = None,
    weights: Literal["master", "module"] | None = None,
    tag: str | None = None,
    rules: AnyPath | None = None,
    jobs: int | None = None,
) -> Verification:
    """Say whether the checkpoint at *path* is whole, and list everything that is wrong with it.

    Args:
        path: A directory or a file; it is never changed.
        level: ``fast`` reads the index, ``headers`` also what each item says of itself, ``full``
            also every byte that a checksum covers.
        nan: Search floating values for NaN and Inf; imports torch.
        manifest: Add ``SHA256SUMS`` when nothing is wrong; goes with ``full``.
        format: Its format; None: detect it.
        model_type: Model family; None: detect it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which of several saves in it; None: the one that its pointer names.
        rules: See :class:`Options`.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: It does not exist or is not recognised. What is damaged is a finding.
    """
    from ckptctl.ops.verify import VerifyOptions
    from ckptctl.ops.verify import verify as run

    chosen = VerifyOptions(
        format=format,
        level=level,
        nan=nan,
        manifest=manifest,
        model_type=model_type,
        weights=_weights(weights),
        tag=tag,
        rules=_path(rules),
        jobs=_positive("jobs", jobs),
    )
    return run(path, chosen)


def diff(
    a: AnyPath,
    b: AnyPath,
    *,
    structure: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    ignore_dtype: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    only: Literal["model", "all"] = "all",
    checksums: bool = True,
    format_a: str | None = None,
    format_b: str | None = None,
    layout_a: str | None = None,
    layout_b: str | None = None,
    weights_a: str | None = None,
    weights_b: str | None = None,
    tag_a: str | None = None,
    tag_b: str | None = None,
    root_a: str | None = None,
    root_b: str | None = None,
    rules: AnyPath | None = None,
    dequantize: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    sizes: Mapping[str, int] | None = None,
    jobs: int | None = None,
) -> Difference:
    """Say how the checkpoints *a* and *b* differ, across formats and layouts.

    Elements are equal when their bits are, NaN included; with a tolerance also when
    ``|a - b| <= atol + rtol * |b|``. torch is imported only where numbers have to be compared.

    Args:
        a: The first checkpoint; the result has its names.
        b: The second one.
        structure: Compare names, shapes and dtypes alone.
        atol: Absolute tolerance.
        rtol: Tolerance relative to *b*.
        ignore_dtype: Take equal numbers of another dtype for the same.
        include: Globs of names in *a*: only these.
        exclude: Globs of names in *a*: not these.
        only: ``model``, or ``all`` that they hold.
        checksums: Believe recorded checksums that are equal.
        format_a: Format of *a*; None: detect it.
        format_b: Format of *b*; None: detect it.
        layout_a: Layout of *a*; None: detect it.
        layout_b: Layout of *b*; None: detect it.
        weights_a: ``master`` or ``module``, where *a* holds both; None: what its format prefers.
        weights_b: Likewise of *b*.
        tag_a: Which save, where *a* holds several; None: the one that its pointer names.
        tag_b: Likewise of *b*.
        root_a: What stands before the model's names in *a*; None: find it.
        root_b: Likewise in *b*.
        rules: TOML that says how ranks divide tensors, or ``megatron-core``, for whichever of the
            two does not say so itself.
        dequantize: Turn the quantised tensors of either into this dtype: ``bf16``, ``fp32``.
        model_type: Family of both; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: One is missing, not recognised or damaged, or named layouts do not fit.
    """
    from ckptctl import families
    from ckptctl.ops.diff import DiffOptions
    from ckptctl.ops.diff import diff as run

    chosen = DiffOptions(
        structure=structure,
        tolerance=_tolerance(atol, rtol),
        ignore_dtype=ignore_dtype,
        include=_globs(include),
        exclude=_globs(exclude),
        only=_only(only),
        checksums=checksums,
        format_a=format_a,
        format_b=format_b,
        layout_a=layout_a,
        layout_b=layout_b,
        weights_a=_weights(weights_a),
        weights_b=_weights(weights_b),
        tag_a=tag_a,
        tag_b=tag_b,
        root_a=root_a,
        root_b=root_b,
        rules=_path(rules),
        dequantize=_floating(dequantize, "dequantize"),
        model_type=model_type,
        sizes=_sizes(sizes or {}),
        jobs=_positive("jobs", jobs) or 0,
    )
    with families.using(converter):
        return run(a, b, chosen)


def extract(
    path: AnyPath,
    tensor: str,
    output: AnyPath | None = None,
    *,
    slice: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    from_layout: str | None = None,
    format: str | None = None,
    weights: str | None = None,
    tag: str | None = None,
    rules: AnyPath | None = None,
    dequantize: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    sizes: Mapping[str, int] | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
) -> Extraction:
    """Take tensors, or slices of them, out of the checkpoint at *path*; read nothing else.

    Args:
        path: The checkpoint; it is never changed.
        tensor: A name, or a glob; a slice such as ``[0:128]`` may follow.
        output: ``.safetensors``, ``.pt`` or ``.npy``; None: write nothing, show the first values.
        slice: The slice, where it does not follow the name.
        dtype: Cast floating tensors to this dtype.
        layout: The layout whose names and axes are meant; None: the checkpoint's own.
        from_layout: Layout of the checkpoint; None: detect it.
        format: Format of the checkpoint; None: detect it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which save, where it holds several; None: the one that its pointer names.
        rules: TOML that says how ranks divide tensors, or ``megatron-core``.
        dequantize: Turn quantised tensors into this dtype: ``bf16``, ``fp32``.
        model_type: Family; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        overwrite: Replace *output* if it is a file of tensors.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: Nothing was written.
    """
    from ckptctl import families
    from ckptctl.ops.extract import ExtractOptions
    from ckptctl.ops.extract import extract as run

    chosen = ExtractOptions(
        slice=slice,
        dtype=_floating(dtype),
        layout=layout,
        from_layout=from_layout,
        format=format,
        weights=_weights(weights),
        tag=tag,
        rules=_path(rules),
        dequantize=_floating(dequantize, "dequantize"),
        model_type=model_type,
        sizes=_sizes(sizes or {}),
        overwrite=overwrite,
        jobs=_positive("jobs", jobs) or 0,
    )
    with families.using(converter):
        return run(path, tensor, _path(output), chosen)


def report(
    path: AnyPath,
    output: AnyPath | None = None,
    *,
    other: AnyPath | None = None,
    stats: bool = False,
    structure: bool = False,
    include: Sequence[str] = (),
    max_tensors: int = 20_000,
    format: str | None = None,
    format_other: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    rules: AnyPath | None = None,
    overwrite: bool = False,
    progress: Watch | None = None,
) -> Report:
    """Write one HTML page about the checkpoint at *path*, and return what is in it.

    A checkpoint that is not whole has a page, too: see
    :attr:`~ckptctl.ops.report_data.Report.readable`.

    Args:
        path: A directory or a file; it is never changed.
        output: The page; None: write none.
        other: A second checkpoint: the page shows where it differs.
        stats: Read the data too and add statistics of every tensor; imports torch.
        structure: Compare names, shapes and dtypes alone.
        include: Globs; list only tensors that match one.
        max_tensors: List so many at most: those with findings, then the largest.
        format: Format of *path*; None: detect it.
        format_other: Format of *other*; None: detect it.
        model_type: Family of both; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        rules: See :class:`Options`.
        overwrite: Replace *output* if it is such a page.
        progress: Called with the bytes that are going to be read; its context yields what is
            called with bytes done.

    Raises:
        CkptError: One of them is missing or not recognised, or the page exists; none was written.
    """
    from ckptctl import families
    from ckptctl.ops.report import ReportOptions
    from ckptctl.ops.report import report as run
    from ckptctl.ops.watch import unwatched

    chosen = ReportOptions(
        stats=stats,
        structure=structure,
        include=_globs(include),
        max_tensors=_positive("max_tensors", max_tensors) or max_tensors,
        format=format,
        format_other=format_other,
        model_type=model_type,
        rules=_path(rules),
        overwrite=overwrite,
    )
    with families.using(converter):
        return run(path, _path(output), other, chosen, progress or unwatched)


def plan_conversion(
    src: AnyPath, dst: AnyPath, *, to: str, **options: Unpack[Options]
) -> ConversionPlan:
    """Decide everything about a conversion without writing a byte.

    Args:
        src: The checkpoint.
        dst: Where the result would appear.
        to: Format to write: ``dcp``, ``hf``, ``meta`` or ``torch``.
        options: See :class:`Options`.

    Raises:
        CkptError: The conversion would fail or would not be safe.
    """
    from ckptctl.ops.convert import plan_conversion as plan

    return plan(src, dst, conversion_options(to, **options))


def convert(
    src: AnyPath,
    dst: AnyPath,
    *,
    to: str,
    progress: Callable[[int], None] | None = None,
    **options: Unpack[Options],
) -> ConversionResult:
    """Convert *src* and publish the result as *dst*, whole or not at all.

    Args:
        src: The checkpoint; it is never changed.
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        to: Format to write: ``dcp``, ``hf``, ``meta`` or ``torch``.
        progress: Called with the bytes done since the last call, from this thread.
        options: See :class:`Options`.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed; the source is unchanged.
    """
    from ckptctl.ops.convert import run_conversion

    return run_conversion(plan_conversion(src, dst, to=to, **options), progress)


def plan_merge(
    base: AnyPath,
    adapter: AnyPath,
    dst: AnyPath,
    *,
    to: str | None = None,
    scaling: float | None = None,
    **options: Unpack[Options],
) -> MergePlan:
    """Decide everything about merging an adapter into its model, without writing a byte.

    Args:
        base: The model's checkpoint.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Where the merged model would appear.
        to: Format to write; None: that of *base*.
        scaling: The factor of B A, where it does not follow from an adapter_config.json.
        options: See :class:`Options`; they are those of the model.

    Raises:
        CkptError: The merge would fail or would not be safe.
    """
    from ckptctl.ops.merge import plan_merge as plan

    asked = conversion_options(to or "", **options)
    return plan(base, adapter, dst, asked, _factor("scaling", scaling))


def merge(
    base: AnyPath,
    adapter: AnyPath,
    dst: AnyPath,
    *,
    to: str | None = None,
    scaling: float | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Unpack[Options],
) -> ConversionResult:
    """Merge a LoRA or DoRA adapter into its model and publish the result as *dst*.

    Args:
        base: The model's checkpoint; it is never changed.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        to: Format to write; None: that of *base*.
        scaling: The factor of B A, where it does not follow from an adapter_config.json.
        progress: Called with the bytes done since the last call, from this thread.
        options: See :class:`Options`; they are those of the model.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed.
    """
    from ckptctl.ops.merge import run_merge

    plan = plan_merge(base, adapter, dst, to=to, scaling=scaling, **options)
    return run_merge(plan, progress)


def conversion_options(to: str, **options: Unpack[Options]) -> ConversionOptions:
    """Return *options* checked and in the form that the operation takes.

    Raises:
        UsageError: One of them makes no sense.
    """
    from ckptctl.ops.convert import ConversionOptions

    for name in options.keys() - Options.__annotations__.keys():
        close = nearest(name, list(Options.__annotations__))
        raise UsageError(
            f"unknown option `{name}`", hint=f"did you mean `{close}`?" if close else None
        )
    memory = options.get("memory")
    return ConversionOptions(
        to=to,
        from_format=options.get("from_format"),
        weights=_weights(options.get("weights")),
        tag=options.get("tag"),
        rules=_path(options.get("rules")),
        model_type=options.get("model_type"),
        converter=_path(options.get("converter")),
        sizes=_sizes(options.get("sizes", {})),
        from_layout=options.get("from_layout"),
        to_layout=options.get("to_layout"),
        dtype=_floating(options.get("dtype")),
        dequantize=_floating(options.get("dequantize"), "dequantize"),
        include=_globs(options.get("include", ())),
        exclude=_globs(options.get("exclude", ())),
        only=_only(options.get("only", "model")),
        root=options.get("root"),
        max_shard_size=parse_bytes(options.get("max_shard_size", MAX_SHARD_SIZE)),
        mp=_positive("mp", options.get("mp", 1)) or 1,
        assets=_path(options.get("assets")),
        like=_path(options.get("like")),
        overwrite=options.get("overwrite", False),
        resume=options.get("resume", False),
        verify=options.get("verify", False),
        checksum=options.get("checksum", True),
        jobs=_positive("jobs", options.get("jobs")),
        memory=None if memory is None else parse_bytes(memory),
        untie=options.get("untie", False),
        tied=_tied(options.get("tied")),
        allow_missing=options.get("allow_missing", False),
        verify_replicas=options.get("verify_replicas", False),
        vocab_size=options.get("vocab_size"),
        lora_alpha=_factor("lora_alpha", options.get("lora_alpha")),
    )


def _floating(dtype: str | None, option: str = "dtype") -> str | None:
    if dtype is None:
        return None
    name = dtypes.parse(str(dtype))
    if name is None or not dtypes.BY_NAME[name].floating:
        known = ", ".join(found.name for found in dtypes.BY_NAME.values() if found.floating)
        raise UsageError(f"`{dtype}` is not a floating dtype", where=option, why=f"known: {known}")
    return name


def _sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    for name, size in sizes.items():
        _positive(f"sizes: {name}", size)
    return dict(sizes)


def _globs(globs: Sequence[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def _only(value: str) -> Literal["model", "all"]:
    if value == "model":
        return "model"
    if value == "all":
        return "all"
    raise UsageError(f"`{value}` is neither `model` nor `all`", where="only")


def _weights(value: str | None) -> Literal["master", "module"] | None:
    if value is None:
        return None
    if value == "master":
        return "master"
    if value == "module":
        return "module"
    raise UsageError(f"`{value}` is neither `master` nor `module`", where="weights")


def _tied(value: str | None) -> Literal["drop", "copy"] | None:
    if value is None:
        return None
    if value == "drop":
        return "drop"
    if value == "copy":
        return "copy"
    raise UsageError(f"`{value}` is neither `drop` nor `copy`", where="tied")


def _tolerance(atol: float | None, rtol: float | None) -> Tolerance | None:
    from ckptctl.storage.errors_between import Tolerance

    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{value} is not a tolerance", where=name)
    return None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)


def _factor(name: str, value: float | None) -> float | None:
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise UsageError(f"{value} is not a positive number", where=name)
    return value


def _path(path: AnyPath | None) -> Path | None:
    return None if path is None else Path(path)


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{value} is not a positive number", where=name)
    return value
