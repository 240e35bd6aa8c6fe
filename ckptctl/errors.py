"""Errors that ckptctl raises, and helpers for their messages.

::

    CkptError                       70  a bug when raised bare
    ├── UsageError                   2  the call contradicts itself
    │   └── MissingPackageError      2  a required package is not installed
    ├── SourceNotFoundError          3  no such path
    ├── FormatError                  3  not recognized as a checkpoint
    ├── DamagedError                 4  damaged, with evidence: missing, truncated, wrong checksum
    │   ├── CoverageError            4  chunks leave a hole
    │   └── MissingTensorsError      4  tensors that the table of the model requires are missing
    ├── MappingError                 5  keys, shapes or configs that do not fit the model type
    │   └── UnmappedTensorError      5  tensors that a layout does not know or cannot store
    ├── RefusedError                 6  nothing was changed: destination exists, disk too small, ...
    ├── PartialError                 7  some items failed; the report names each
    ├── StorageError                 8  the operating system failed a read or a write
    │   └── ChangedError             8  a file was modified while it was read
    └── UnsupportedError             9  unknown: may be complete, may be hostile
        ├── ForeignFileError         9  a file of a checkpoint has an unsupported format
        └── UnsafePickleError        9  a pickle names a global that is not on the allow-list
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copyreg import __newobj__  # type: ignore[attr-defined]
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Annotated

from ckptctl.results import JsonField, Result

MAX_LISTED_NAMES = 5
MAX_ALTERNATIVES = 3
MIN_SIMILARITY = 0.8
"""Minimum similarity, from 0 to 1, of a suggestion whose first letter differs."""


class Problem(Result):
    """Failure and its evidence, as an error or as a finding of a check."""

    __slots__ = ()
    what: str
    why: str | None

    @property
    def summary(self) -> str:
        """One line with the failure and its evidence."""
        return ": ".join(filter(None, (self.what, self.why)))


class CkptError(Problem, Exception, order="code exit_code message"):
    """Base class of errors, with the failure, its place, the evidence and a hint.

    Args:
        what: Failure in one line, without a full stop.
        where: Affected file, tensor or option.
        why: Evidence, such as sizes, names and offsets.
        hint: Suggested next step, if any.
    """

    code: Annotated[str, JsonField("[error code](exit-codes.md)")] = "internal"
    exit_code: Annotated[int, JsonField("exit code of the program")] = 70
    what: Annotated[str, JsonField("error message", name="message")]
    where: Annotated[str | None, JsonField("affected file, tensor or option")]
    why: Annotated[str | None, JsonField("evidence")]
    hint: Annotated[str | None, JsonField("suggested next step")]

    def __init__(
        self,
        what: str,
        *,
        where: str | PathLike[str] | None = None,
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else fspath(where)
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return self.what

    @property
    def line(self) -> str:
        """One line with the failure, the affected file or tensor, and the evidence."""
        return ": ".join(filter(None, (self.what, self.where, self.why)))

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling of all error classes, so that ranks can exchange errors."""
        return __newobj__, (type(self), self.what), self.__dict__


class UsageError(CkptError):
    """The options contradict each other or the input."""

    exit_code = 2
    code = "usage"


class MissingPackageError(UsageError, ImportError):
    """The operation requires a package that is not installed. Nothing was read or written."""

    code = "missing-package"


class SourceNotFoundError(CkptError):
    """The path does not exist or is empty."""

    exit_code = 3
    code = "not-found"


class FormatError(CkptError):
    """The path is not a checkpoint that ckptctl reads."""

    exit_code = 3
    code = "unrecognized-format"


class DamagedError(CkptError):
    """The checkpoint is damaged, and the error states the evidence.

    A file is missing, truncated or shorter than its index states, a checksum differs, a chunk of a
    tensor is missing, or a marker of an unfinished save exists.
    """

    exit_code = 4
    code = "damaged"


class CoverageError(DamagedError):
    """The chunks of a tensor do not tile it exactly."""

    code = "coverage"


class MissingTensorsError(DamagedError):
    """The table and the configuration of the model require tensors that are missing.

    This is not evidence of an interrupted write, so nothing is skipped or removed because of it.
    """

    code = "missing-tensors"


class MappingError(CkptError):
    """Keys, shapes or configuration do not fit the model type."""

    exit_code = 5
    code = "mapping"


class UnmappedTensorError(MappingError):
    """Tensors that are unknown to all layouts, or cannot be stored in the target layout.

    Args:
        what: See :class:`CkptError`.
        where: See :class:`CkptError`.
        why: See :class:`CkptError`.
        hint: See :class:`CkptError`.
        keys: Names of the tensors in the model, or an empty tuple for the entire checkpoint.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | PathLike[str] | None = None,
        why: str | None = None,
        hint: str | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        super().__init__(what, where=where, why=why, hint=hint)
        self.keys = keys


class RefusedError(CkptError):
    """The operation would not be safe. Nothing was changed."""

    exit_code = 6
    code = "refused"


class PartialError(CkptError):
    """Some of the requested items failed, and others succeeded."""

    exit_code = 7
    code = "partial"


class StorageError(CkptError):
    """The operating system failed a read, a write or a sync."""

    exit_code = 8
    code = "storage"

    @classmethod
    def from_os_error(cls, error: OSError, verb: str, where: str | PathLike[str]) -> StorageError:
        """Convert *error* to a StorageError whose message contains the name of its errno.

        Args:
            error: Error of the operating system.
            verb: Verb of the failed call, as in ``"write"``.
            where: Affected file.
        """
        import errno

        name = errno.errorcode.get(error.errno or 0, "unknown")
        return cls(f"cannot {verb}: {error.strerror or error} ({name})", where=where)


@contextmanager
def wrap_os_errors(verb: str, where: object) -> Iterator[None]:
    """Convert an ``OSError`` in the block to a :class:`StorageError`.

    Args:
        verb: Verb of the failing call, as in ``"write"``.
        where: Affected file.
    """
    try:
        yield
    except OSError as error:
        raise StorageError.from_os_error(error, verb, str(where)) from error


class ChangedError(StorageError):
    """A source file was modified or replaced while it was read. Nothing was published.

    Args:
        root: Root of the checkpoint.
        name: Name of the file.
        why: Evidence of the change, such as a different size.
    """

    code = "changed"

    def __init__(self, root: str | PathLike[str], name: str, why: str | None = None) -> None:
        super().__init__(
            f"`{name}` changed while it was being read",
            where=root,
            why=why,
            hint="try again when no process is writing to it",
        )


class UnsupportedError(CkptError):
    """The checkpoint, or a file or tensor in it, is unsupported. It may be undamaged.

    Examples are unknown dtypes, classes or structures, unsupported features, and links that lead
    outside the checkpoint.
    """

    exit_code = 9
    code = "unsupported"


class ForeignFileError(UnsupportedError, FormatError):
    """A file of a checkpoint has an unsupported format.

    It is an UnsupportedError because the other files may be supported, and a FormatError because
    a folder that contains only this file is not a checkpoint.
    """


class UnsafePickleError(UnsupportedError):
    """A pickle names a global that is not on the allow-list. Nothing was executed."""

    code = "unsafe-pickle"


@dataclass(frozen=True, slots=True)
class OptionMention:
    """Options that appear together in a message.

    Attributes:
        options: Options as on the command line, each with its value if there is one.
        command: Command that has these options, if it is not the running command.
    """

    options: tuple[str, ...]
    command: str = ""

    def format_for_command_line(self) -> str:
        """Format the options as on the command line."""
        return f"`{' '.join(filter(None, (self.command, *self.options)))}`"


FormatMention = Callable[[OptionMention], str]
_SPELL_MENTION: ContextVar[FormatMention] = ContextVar(
    "spelling", default=OptionMention.format_for_command_line
)
"""Function that formats options in messages, set by the front end (:mod:`ckptctl.keywords`)."""


def format_option(*options: str, command: str = "") -> str:
    """Format *options* for a message, as the front end that shows the message writes options.

    Args:
        options: Options as on the command line, each with its value if there is one.
        command: Command that has these options, if it is not the running command.
    """
    return _SPELL_MENTION.get()(OptionMention(options, command))


@contextmanager
def override_option_format(spell: Callable[[OptionMention, FormatMention], str]) -> Iterator[None]:
    """Use *spell* to format all options that appear in messages within the block.

    Args:
        spell: Function that formats the options of its first argument. Its second argument is the
            function that was used before, which it may call.
    """
    previous = _SPELL_MENTION.get()
    token = _SPELL_MENTION.set(lambda mention: spell(mention, previous))
    try:
        yield
    finally:
        _SPELL_MENTION.reset(token)


def rename_options_in_messages(names: Mapping[str, str]) -> AbstractContextManager[None]:
    """Rename options in messages within the block, e.g. ``--from`` to ``--format-b``.

    Args:
        names: Mapping of the option names in messages to the names to show, both with leading
            dashes.
    """

    def spell_renamed(mention: OptionMention, spell: FormatMention) -> str:
        pairs = (option.partition(" ") for option in mention.options)
        options = tuple(names.get(name, name) + space + value for name, space, value in pairs)
        return spell(OptionMention(options, mention.command))

    return override_option_format(spell_renamed)


def quote_names(
    names: Sequence[str],
    limit: int = MAX_LISTED_NAMES,
    *,
    total: int | None = None,
    quote: str = "`",
) -> str:
    """Quote the first names, and append the number of names that are not shown.

    Args:
        names: All names, or the first of a larger *total*.
        limit: Maximum number of names to show.
        total: Total number of names, or None if *names* are all.
        quote: Quotation mark around each name.
    """
    head = ", ".join(f"{quote}{name}{quote}" for name in names[:limit])
    hidden_count = (len(names) if total is None else total) - limit
    return f"{head} and {hidden_count:,} more" if hidden_count > 0 else head


def format_command(name: str, *arguments: object, options: Sequence[str] = ()) -> str:
    """Format a command of this program for a hint, quoted for a shell.

    Args:
        name: Name of the command.
        arguments: Positional arguments, such as paths, which may begin with a dash.
        options: Options with values, such as ``--to hf``.
    """
    import shlex

    texts = [str(argument) for argument in arguments]
    words = [*texts, *options]
    if any(text.startswith("-") for text in texts):
        words = [*options, "--", *texts]
    return f"`{shlex.join(['ckptctl', name, *words])}`"


def exclude_hint(name: str) -> str:
    """Return a hint to exclude the item *name*, which cannot be converted."""
    return f"use {format_command('convert', 'SRC', 'DST', options=('--exclude', name))} to skip it"


def format_alternatives(names: Sequence[str], word: str = "or") -> str:
    """Join the first names with commas and *word*, and append the number of names not shown."""
    more = len(names) - MAX_ALTERNATIVES
    shown = [
        *names[:MAX_ALTERNATIVES],
        *([f"{more:,} others"] if more > 1 else names[MAX_ALTERNATIVES:]),
    ]
    return f" {word} ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def format_model_types(model_types: Sequence[str]) -> str:
    """Join model types with "or", or return only their number if there are many."""
    count = len(model_types)
    return (
        format_alternatives(model_types)
        if count <= MAX_ALTERNATIVES
        else f"one of {count:,} model types"
    )


def find_nearest(name: str, candidates: Sequence[str]) -> str | None:
    """Return the known name most similar to *name*, or None if none is similar.

    A candidate whose first letter differs must be more similar, because users rarely mistype the
    first letter.
    """
    import difflib

    for close in difflib.get_close_matches(name, candidates, n=MAX_LISTED_NAMES, cutoff=0.6):
        similarity = difflib.SequenceMatcher(None, close, name).ratio()
        if close[:1] == name[:1] or similarity >= MIN_SIMILARITY:
            return close
    return None
