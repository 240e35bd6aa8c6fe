"""Descriptions of known formats, such as how they are detected and were tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckptctl import dtypes, formats
from ckptctl.formats.base import Format, WritableFormat
from ckptctl.results import JsonField, Result, empty_to_none

MODEL_TYPE_CHOICE = ("--model-type NAME", "model type used to join the shards, if several match")
READ_CHOICES = {
    "weights": (
        "--weights master|module",
        "the optimizer's fp32 copies, or the weights that the model computes with",
    ),
    "tag": ("--tag NAME", "save to read instead of the one in the pointer file"),
    "ranks": ("--ranks N", "number of ranks that saved it, which the files do not record"),
    "rules": (
        "--rules FILE|megatron-core",
        "division of tensors among ranks, which the files do not record",
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Option that applies to reading a format, with its meaning."""

    option: Annotated[str, JsonField("name on the command line")]
    meaning: Annotated[str, JsonField("human-readable description")]


@dataclass(frozen=True, slots=True)
class WrittenFormat:
    """Properties of checkpoints that ckptctl writes in a format."""

    directory: Annotated[bool, JsonField("whether it is a directory rather than one file")]
    leaves: Annotated[bool, JsonField("whether non-tensor values are kept")]
    ties: Annotated[str, JsonField("human-readable handling of tensors that share memory")]
    cut_by: Annotated[tuple[str, ...], JsonField("options that control the split into files")]
    side_files: Annotated[
        bool, JsonField("whether sidecar files such as configuration and tokenizer are copied")
    ]
    lacks: Annotated[tuple[str, ...], JsonField("unsupported dtypes")]


@dataclass(frozen=True, slots=True)
class KnownFormat(
    Result, order="name title package layout other_layouts adapters recognized wholeness proof"
):
    """Known format."""

    format: Annotated[
        Format,
        JsonField("name of the [format](formats.md)", of="name"),
        JsonField("human-readable description", of="title"),
        JsonField("layout of its tensors; null for any", of="layout"),
        JsonField("whether it stores only adapters", of="adapters"),
        JsonField(
            "human-readable criteria for detection; null if its package does not state them",
            of="recognized",
            to=empty_to_none,
        ),
        JsonField("human-readable criteria for completeness", of="wholeness", to=empty_to_none),
        JsonField(
            "programs that the format was tested against, and the tests",
            of="proof",
            to=empty_to_none,
        ),
    ]
    package: Annotated[str | None, JsonField("package that adds it; null if built in")]
    choices: Annotated[tuple[Choice, ...], JsonField("options for reading")]
    written: Annotated[
        WrittenFormat | None, JsonField("properties of the written format; null if it is read-only")
    ]

    @property
    def other_layouts(self) -> Annotated[bool, JsonField()]:
        """Whether other layouts are possible."""
        return self.format.layout is None or self.format.other_layouts


@dataclass(frozen=True, slots=True)
class KnownFormats(Result):
    """All known formats, or one."""

    formats: Annotated[
        tuple[KnownFormat, ...],
        JsonField(
            "formats sorted by name, those of other packages last; only one if a name was given"
        ),
    ]


def list_known_formats(name: str | None = None) -> tuple[KnownFormat, ...]:
    """List all formats, or only the format *name*. Formats from plug-ins come last."""
    selected_formats = (
        (formats.get_format(name),) if name is not None else formats.load_all_formats().values()
    )
    return tuple(_describe_format(known_format) for known_format in selected_formats)


def _describe_format(known_format: Format) -> KnownFormat:
    package = (
        None
        if known_format.name in formats.load_builtin_formats()
        else formats.find_plugin_package(known_format.name)
    )
    choices = [READ_CHOICES[name] for name in sorted(known_format.read_options)]
    written = None
    if isinstance(known_format, WritableFormat):
        choices += [MODEL_TYPE_CHOICE] if known_format.parallel else []
        written = WrittenFormat(
            directory=not known_format.single_file,
            leaves=known_format.nested,
            ties=known_format.ties,
            cut_by=known_format.sharding_options,
            side_files=not known_format.single_file,
            lacks=tuple(name for name in dtypes.BY_NAME if not known_format.can_store(name)),
        )
    return KnownFormat(known_format, package, tuple(Choice(*texts) for texts in choices), written)
