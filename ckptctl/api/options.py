"""What the Python functions take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights

AnyPath = str | Path


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
        trust_assets: Take what *assets* say where the source's own files contradict them.
        carry: Globs; files of whatever kind beside the weights that are to travel with them.
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
        allow_overflow: Publish elements that became infinite, NaN or saturated; else they are
            refused. Needed for a float8 ``dtype``, which has no scales.
        allow_missing: Write what is whole of a source that is not, or what there is of a model that
            lacks tensors; the result says what is missing.
        verify_replicas: Compare every copy of the same elements before anything is written.
        vocab_size: Pad the vocabulary with zeros, or cut it, to so many rows.
        lora_alpha: Strength of an adapter, where no adapter_config.json says so.
    """

    from_format: str | None
    weights: Weights | None
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
    trust_assets: bool
    carry: Sequence[str]
    like: AnyPath | None
    overwrite: bool
    resume: bool
    verify: bool
    checksum: bool
    jobs: int | None
    memory: int | str | None
    untie: bool
    tied: Literal["drop", "copy"] | None
    allow_overflow: bool
    allow_missing: bool
    verify_replicas: bool
    vocab_size: int | None
    lora_alpha: float | None
