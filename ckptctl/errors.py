"""Every error that ckptctl raises on purpose.

::

    CkptError                       70  a bug when raised bare
    ├── UsageError                   2  the call contradicts itself
    │   └── MissingPackageError      2  what is asked takes a package that is not installed
    ├── SourceNotFoundError          3  no such path
    ├── FormatError                  3  not recognized as a checkpoint
    ├── DamagedError                 4  damaged, with evidence: missing, cut off, a wrong checksum
    │   ├── CoverageError            4  chunks leave a hole
    │   └── MissingTensorsError      4  the model lacks tensors that its table requires
    ├── MappingError                 5  keys, shapes or configs that do not fit the model type
    │   └── HomelessError            5  tensors that no layout, or not the target's, has a place for
    ├── RefusedError                 6  nothing was changed: destination exists, disk too small, ...
    ├── PartialError                 7  some items failed; the report names each
    ├── StorageError                 8  the operating system failed a read or a write
    │   └── ChangedError             8  a file was written to while it was read
    └── UnsupportedError             9  unknown: may be complete, may be hostile
        ├── ForeignFileError         9  a file of another kind than the checkpoint has there
        └── UnsafePickleError        9  a pickle asks for something that is not on the allow-list
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

SHOWN = 5
ALTERNATIVES = 3
CLOSE = 0.8
"""How alike names are that begin differently and may be mistaken for each other."""


class Problem(Result):
    """What went wrong and the evidence for it: an error, or a finding of a check."""

    __slots__ = ()
    what: str
    why: str | None

    @property
    def summary(self) -> str:
        """Return the failure and its evidence in one line."""
        return ": ".join(filter(None, (self.what, self.why)))


class CkptError(Problem, Exception, order="code exit_code message"):
    """What went wrong, where, why, and what to do about it.

    Args:
        what: One line without a full stop: the failure itself.
        where: The file, tensor or option concerned.
        why: The evidence: sizes, names, offsets.
        hint: The next step, if there is one.
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
        """Return the failure, where it is and its evidence in one line."""
        return ": ".join(filter(None, (self.what, self.where, self.why)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle its attributes, whatever its class is made of: ranks tell each other of errors."""
        return __newobj__, (type(self), self.what), self.__dict__


class UsageError(CkptError):
    """The options contradict each other or the input."""

    exit_code = 2
    code = "usage"


class MissingPackageError(UsageError, ImportError):
    """What is asked takes a package that is not installed; nothing was read or begun."""

    code = "missing-package"


class SourceNotFoundError(CkptError):
    """The path does not exist or holds nothing."""

    exit_code = 3
    code = "not-found"


class FormatError(CkptError):
    """The path is not a checkpoint that ckptctl reads."""

    exit_code = 3
    code = "unrecognized-format"


class DamagedError(CkptError):
    """The checkpoint is damaged, and there is evidence.

    A file is missing, shorter than its index says or cut off, a checksum differs, a part of a
    tensor is nowhere, or a writer left its mark of an unfinished save.
    """

    exit_code = 4
    code = "damaged"


class CoverageError(DamagedError):
    """The chunks of a tensor do not tile it exactly."""

    code = "coverage"


class MissingTensorsError(DamagedError):
    """The table and the configuration of the model require tensors that are missing.

    No file shows a torn write: nothing is skipped or removed because of it.
    """

    code = "missing-tensors"


class MappingError(CkptError):
    """Keys, shapes or configuration do not fit the model type."""

    exit_code = 5
    code = "mapping"


class HomelessError(MappingError):
    """Tensors that no layout knows, or that the target's has no place for.

    Args:
        what: See :class:`CkptError`.
        where: See there.
        why: See there.
        hint: See there.
        keys: Their names in the model; none where the whole checkpoint is meant.
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
    """The operation would not be safe; nothing was changed."""

    exit_code = 6
    code = "refused"


class PartialError(CkptError):
    """Part of the work failed."""

    exit_code = 7
    code = "partial"


class StorageError(CkptError):
    """The operating system failed a read, a write or a sync."""

    exit_code = 8
    code = "storage"

    @classmethod
    def from_os_error(cls, error: OSError, doing: str, where: str | PathLike[str]) -> StorageError:
        """Wrap *error* so that its errno name is visible.

        Args:
            error: What the operating system said.
            doing: The verb of the failed call, as in ``"write"``.
            where: The file concerned.
        """
        import errno

        name = errno.errorcode.get(error.errno or 0, "unknown")
        return cls(f"cannot {doing}: {error.strerror or error} ({name})", where=where)


@contextmanager
def storage_errors(doing: str, where: object) -> Iterator[None]:
    """Turn an ``OSError`` within into a :class:`StorageError`.

    Args:
        doing: The verb of what fails, as in ``"write"``.
        where: The file concerned.
    """
    try:
        yield
    except OSError as error:
        raise StorageError.from_os_error(error, doing, str(where)) from error


class ChangedError(StorageError):
    """A file of the source was written to, or replaced, while it was read; nothing was published.

    Args:
        root: The checkpoint.
        name: Its file.
        why: How the file differs from before.
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
    """The checkpoint, or a part of it, is not understood; it may be whole all the same.

    A dtype, a class or a structure that is unknown, a feature that is not read, a link that leads
    outside.
    """

    exit_code = 9
    code = "unsupported"


class ForeignFileError(UnsupportedError, FormatError):
    """One file of a checkpoint is none that ckptctl reads.

    Among others it is not understood; where there is no other, there is no checkpoint.
    """


class UnsafePickleError(UnsupportedError):
    """A pickle names a global that is not on the allow-list; nothing was run."""

    code = "unsafe-pickle"


@dataclass(frozen=True, slots=True)
class Mention:
    """Options that a message names together.

    Attributes:
        options: Each as the command line spells it, with its value if it is given one.
        command: The command that takes them, where it is not the one that is running.
    """

    options: tuple[str, ...]
    command: str = ""

    def on_command_line(self) -> str:
        """Spell them for the terminal."""
        return f"`{' '.join(filter(None, (self.command, *self.options)))}`"


Spelling = Callable[[Mention], str]
_spelling: ContextVar[Spelling] = ContextVar("spelling", default=Mention.on_command_line)
"""How messages spell options: as the front end does that runs, see :mod:`ckptctl.keywords`."""


def spell_option(*options: str, of: str = "") -> str:
    """Return how who reads the message spells *options* of the command *of*; see `Mention`."""
    return _spelling.get()(Mention(options, of))


@contextmanager
def spelling(how: Callable[[Mention, Spelling], str]) -> Iterator[None]:
    """Spell options in messages as *how* does, which is passed the spelling so far."""
    before = _spelling.get()
    token = _spelling.set(lambda mention: how(mention, before))
    try:
        yield
    finally:
        _spelling.reset(token)


def renaming(names: Mapping[str, str]) -> AbstractContextManager[None]:
    """Let messages name the options of what is run that has others, as `--format-b` for `--from`.

    Args:
        names: What options are called, by what messages call them; with their dashes.
    """

    def renamed(mention: Mention, spell: Spelling) -> str:
        pairs = (one.partition(" ") for one in mention.options)
        options = tuple(names.get(name, name) + space + value for name, space, value in pairs)
        return spell(Mention(options, mention.command))

    return spelling(renamed)


def listed(
    names: Sequence[str], shown: int = SHOWN, *, number: int | None = None, quote: str = "`"
) -> str:
    """Return the first names, quoted, and how many more there are.

    Args:
        names: All of them, or the first of a *number* that is larger.
        shown: How many are named.
        number: How many there are; None: *names* are all.
        quote: What stands around each; nothing where they quote names themselves.
    """
    head = ", ".join(f"{quote}{name}{quote}" for name in names[:shown])
    more = (len(names) if number is None else number) - shown
    return f"{head} and {more:,} more" if more > 0 else head


def command(name: str, *arguments: object, options: Sequence[str] = ()) -> str:
    """Return a command of this program, quoted as a hint shows it.

    Args:
        name: The command.
        arguments: What it is asked about: paths that may begin with a dash.
        options: Options and their values.
    """
    import shlex

    texts = [str(argument) for argument in arguments]
    words = [*texts, *options]
    if any(text.startswith("-") for text in texts):
        words = [*options, "--", *texts]
    return f"`{shlex.join(['ckptctl', name, *words])}`"


def excluding(name: str) -> str:
    """Return the advice to leave out one thing that stands in the way."""
    return f"use {command('convert', 'SRC', 'DST', options=('--exclude', name))} to skip it"


def either(names: Sequence[str], word: str = "or") -> str:
    """Return the first names as alternatives, and how many more there are."""
    more = len(names) - ALTERNATIVES
    shown = [*names[:ALTERNATIVES], *([f"{more:,} others"] if more > 1 else names[ALTERNATIVES:])]
    return f" {word} ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def possible(model_types: Sequence[str]) -> str:
    """Return what a model may be: its types where they are few, or else their number."""
    count = len(model_types)
    return either(model_types) if count <= ALTERNATIVES else f"one of {count:,} model types"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name closest to *name*, or None when none is close.

    Few mistype the first letter: a name with another one has to be closer.
    """
    import difflib

    for close in difflib.get_close_matches(name, known, n=SHOWN, cutoff=0.6):
        alike = difflib.SequenceMatcher(None, close, name).ratio()
        if close[:1] == name[:1] or alike >= CLOSE:
            return close
    return None
