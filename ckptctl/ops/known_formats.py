"""Say which formats are known: how each is recognised, what makes it whole, what proves it."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl import dtypes, formats
from ckptctl.formats import plugins
from ckptctl.formats.base import Format, WritableFormat

FAMILY = ("--model-type NAME", "the model type that joins the shards, where several fit")
OPTIONS = {
    "weights": (
        "--weights master|module",
        "the optimizer's fp32 copies, or the weights that the model computes with",
    ),
    "tag": ("--tag NAME", "another save than the one that the pointer file names"),
    "rules": (
        "--rules FILE|megatron-core",
        "how ranks divide tensors, which the files do not say",
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be chosen when a format is read.

    Attributes:
        option: As on the command line, with its value.
        meaning: What it decides.
    """

    option: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Written:
    """What a written checkpoint of a format is like.

    Attributes:
        directory: Whether it is a directory instead of one file.
        leaves: Whether leaves that are not tensors are kept.
        ties: What becomes of tensors that share memory.
        cut_by: The options that say how it is cut into files; empty: it is one file.
        side_files: Whether configuration and tokenizer are carried.
        lacks: dtypes that it cannot hold.
    """

    directory: bool
    leaves: bool
    ties: str
    cut_by: tuple[str, ...]
    side_files: bool
    lacks: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "directory": self.directory,
            "leaves": self.leaves,
            "ties": self.ties,
            "cut_by": list(self.cut_by),
            "side_files": self.side_files,
            "lacks": list(self.lacks),
        }


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A format.

    Attributes:
        format: What reads it, with its texts.
        package: The installed package that adds it; None: it is built in.
        choices: What can be chosen when it is read.
        written: What a written one is like; None: it is only read.
    """

    format: Format
    package: str | None
    choices: tuple[Choice, ...]
    written: Written | None

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        known = self.format
        return {
            "name": known.name,
            "title": known.title,
            "package": self.package,
            "layout": known.layout,
            "other_layouts": known.layout is None or known.other_layouts,
            "adapters": known.adapters,
            "recognised": known.recognised or None,
            "wholeness": known.wholeness or None,
            "proof": known.proof or None,
            "choices": [{"option": c.option, "meaning": c.meaning} for c in self.choices],
            "written": self.written.to_json() if self.written else None,
        }


def known_formats(name: str | None = None) -> tuple[KnownFormat, ...]:
    """Return all formats by name, or one of them; those of installed packages come last."""
    chosen = (formats.get(name),) if name is not None else formats.registered().values()
    return tuple(_described(one) for one in chosen)


def _described(known: Format) -> KnownFormat:
    written = _written(known) if isinstance(known, WritableFormat) else None
    package = None if known.name in formats.builtin() else plugins.package_of(known.name)
    return KnownFormat(known, package, _choices(known), written)


def _choices(known: Format) -> tuple[Choice, ...]:
    family = (FAMILY,) if isinstance(known, WritableFormat) and known.parallel else ()
    asked = (OPTIONS[name] for name in sorted(known.choices))
    return tuple(Choice(*texts) for texts in (*asked, *family))


def _written(known: WritableFormat) -> Written:
    return Written(
        directory=not known.single_file,
        leaves=known.nested,
        ties=known.ties,
        cut_by=known.cut_by,
        side_files=not known.single_file,
        lacks=tuple(name for name in dtypes.BY_NAME if not known.holds(name)),
    )
