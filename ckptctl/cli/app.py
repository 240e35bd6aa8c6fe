"""The ``ckptctl`` program: command lookup, error messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ckptctl.cli import completion
from ckptctl.cli import output as printer
from ckptctl.cli.commands import COLOR, PlainText, commands, epilog
from ckptctl.cli.output import Printer, StoppedError, require_answer, wants_json
from ckptctl.cli.ranks import told
from ckptctl.cli.typed_paths import remember, typed_words
from ckptctl.errors import CkptError, DamagedError, StorageError
from ckptctl.option_checks import check_tolerance
from ckptctl.options import blame_option, parse_number
from ckptctl.storage.threads import exit_if_daemons_run, raise_on_sigterm
from ckptctl.version import __version__

HELP = ("-h", "--help")
EXAMPLES = (
    "ckptctl inspect llama-3-8b",
    "ckptctl convert llama-3-8b out-dcp --to dcp",
    "ckptctl convert out-dcp out-meta --to meta --dry-run",
)


class CkptGroup(PlainText, TyperGroup):
    """The command group, which turns every exception into a message and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program, or print completions if the shell requested them."""
        if completion.wanted():
            return completion.offer(lambda: super(CkptGroup, self).main(*args, **options))
        return super().main(*args, **options)

    # Typer's own context class is not public, hence Any.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse *args*, and remember them for hints that repeat the command line."""
        if args[:1] == ["help"]:  # `help CMD` is `CMD --help`
            args = [*args[1:], "--help"]
        remember(args)
        with _told(ctx, args):
            return super().parse_args(ctx, list(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or raise an error that suggests a similar one."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            from ckptctl.cli.usage import no_such_command

            raise no_such_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command and check that its output was written."""
        with _told(ctx, typed_words()), raise_on_sigterm():
            try:
                result = super().invoke(ctx)
            except typer.Exit:
                require_answer()
                raise
            # A closed pipe is noticed here, not while the interpreter shuts down.
            require_answer()
        return result


@contextmanager
def _told(ctx: Any, args: Sequence[str]) -> Iterator[None]:
    """Report exceptions raised while parsing or running *args*, and exit with their code."""
    machine = wants_json(args)
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        # Typer prints the help if no command was given.
        if ctx.resilient_parsing or type(error).__name__ == "NoArgsIsHelpError":
            raise
        if hasattr(error, "format_message"):
            from ckptctl.cli.usage import explained

            error = explained(error, ctx, args)
        shown, debug = _explain(error), bool(ctx.params.get("debug"))
        if debug or not told():
            trace = "".join(traceback.format_exception(error)) if debug else None
            Printer(machine).error(shown, trace)
        raise typer.Exit(shown.exit_code) from None


def _explain(error: BaseException) -> CkptError:
    if isinstance(error, DamagedError):
        error.hint = error.hint or "copy it again from its source, or use another checkpoint"
    if isinstance(error, CkptError):
        return error
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return StoppedError("interrupted")
    if isinstance(error, OSError):
        return StorageError.from_os_error(error, "access", str(error.filename or "unknown file"))
    return CkptError(
        f"{type(error).__name__}: {error}",
        why="this is a bug in ckptctl, please report it",
        hint="run it again with `ckptctl --debug ...` and include the traceback",
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        Printer().line(f"ckptctl {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="CKPTCTL_DEBUG", help="Show tracebacks of errors."),
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            envvar="CKPTCTL_TIMEOUT",
            help="Total time to retry an unresponsive URL.  [default: 30]",
        ),
    ] = None,
    color: Annotated[
        str | None,
        typer.Option("--color", metavar=COLOR.option.metavar, help=COLOR.option.help),
    ] = None,
) -> None:
    """Convert, inspect, verify, compare and prune deep-learning checkpoints."""
    del version, debug
    from ckptctl.remote.retries import patience

    with blame_option(COLOR.display_name):
        printer.WANTED.color = COLOR.parse_value(color) or "auto"
    printer.WANTED.form = None
    machine = wants_json(typed_words())
    with blame_option("--timeout"):
        patience.seconds = (
            None if timeout is None else check_tolerance(parse_number(float, timeout))
        )
    patience.tell = Printer(machine).note


def program(only: str = "", *, overview: bool = False) -> typer.Typer:
    """Build the Typer program.

    Args:
        only: Name of the only command to import. If it does not exist, all are imported.
        overview: Register only names and summaries. Parsing the options of all commands would
            take a third of the time of `--help`.
    """
    made = typer.Typer(
        name="ckptctl",
        cls=CkptGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": HELP, "max_content_width": sys.maxsize},
        epilog=epilog(EXAMPLES),
    )
    made.callback()(root)
    for one in commands(only):
        one.add_to(made, overview=overview)
    return made if made.registered_commands else program()


def __getattr__(name: str) -> typer.Typer:
    """Build ``app``, the program with all its commands, on first access."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = program()
    return found


def main() -> None:
    """Run the program with the arguments of the process."""
    # Python leaves None where a daemon's parent closed a stream.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    # torch warns at import if NumPy, which is not needed here, is not installed.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    words = [word for word in sys.argv[1:3] if word != "help"]  # `help CMD` is `CMD --help`
    overview = not completion.wanted() and set(words) <= {*HELP}
    try:
        program("".join(words[:1]), overview=overview)(prog_name="ckptctl")
    except SystemExit as end:
        exit_if_daemons_run(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
