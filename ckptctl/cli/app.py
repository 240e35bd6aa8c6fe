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
from ckptctl.cli.commands import COLOR, RawTextMixin, format_examples, iterate_commands
from ckptctl.cli.output import Printer, StoppedError, is_json_requested, require_output_written
from ckptctl.cli.ranks import is_reported_by_rank_zero
from ckptctl.cli.typed_paths import get_typed_words, remember_command_line
from ckptctl.errors import CkptError, DamagedError, StorageError
from ckptctl.option_checks import check_tolerance
from ckptctl.options import name_option_in_errors, parse_number
from ckptctl.storage.threads import exit_if_daemons_run, raise_on_sigterm
from ckptctl.version import __version__

HELP = ("-h", "--help")
EXAMPLES = (
    "ckptctl inspect llama-3-8b",
    "ckptctl convert llama-3-8b out-dcp --to dcp",
    "ckptctl convert out-dcp out-meta --to meta --dry-run",
)


class CkptGroup(RawTextMixin, TyperGroup):
    """Typer group of all commands, which turns every exception into a message and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program, or print completions if the shell requested them."""
        if completion.is_completion_request():
            return completion.print_completions(
                lambda: super(CkptGroup, self).main(*args, **options)
            )
        return super().main(*args, **options)

    # Typer's own context class is not public, hence Any.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse *args*, and store them for hints that repeat the command line."""
        if args[:1] == ["help"]:  # `help CMD` is `CMD --help`
            args = [*args[1:], "--help"]
        remember_command_line(args)
        with _report_errors(ctx, args):
            return super().parse_args(ctx, self._join_name(ctx, args))

    def _join_name(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the two words of the name of a command such as ``delta make``."""
        name = " ".join(args[:2])
        return [name, *args[2:]] if " " in name and name in self.list_commands(ctx) else [*args]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or raise an error that suggests a similar one."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            if args[1:2] and args[1] in HELP and self._list_second_words(ctx, args[0]):
                self._print_group_help(ctx, args[0])
                raise typer.Exit
            from ckptctl.cli.views.usage_errors import unknown_command_error

            raise unknown_command_error(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Offer commands, or after ``delta`` the second words of its commands."""
        first = next(iter(get_typed_words()[-1:]), "")
        if not self._list_second_words(ctx, first):
            return super().shell_complete(ctx, incomplete)
        items = super().shell_complete(ctx, f"{first} {incomplete}")
        for item in items:
            item.value = item.value.removeprefix(f"{first} ")
        return items

    def _list_second_words(self, ctx: Any, first: str) -> list[str]:
        """Return the second words of the commands whose first word is *first*."""
        names = (name.partition(" ") for name in self.list_commands(ctx))
        return [second for word, _, second in names if second and word == first]

    def _print_group_help(self, ctx: Any, first: str) -> None:
        """Print the commands whose first word is *first*."""
        formatter = ctx.make_formatter()
        formatter.write_usage(f"{ctx.command_path} {first}", "COMMAND ...")
        names = [f"{first} {second}" for second in self._list_second_words(ctx, first)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(80))
                    for name in names
                    if (command := self.get_command(ctx, name))
                ]
            )
        typer.echo(formatter.getvalue(), nl=False)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and raise if its output could not be written."""
        with _report_errors(ctx, get_typed_words()), raise_on_sigterm():
            try:
                result = super().invoke(ctx)
            except typer.Exit:
                require_output_written()
                raise
            # A closed pipe is noticed here, not while the interpreter shuts down.
            require_output_written()
        return result


@contextmanager
def _report_errors(ctx: Any, args: Sequence[str]) -> Iterator[None]:
    """Report exceptions raised while parsing or running *args*, and exit with their code."""
    machine = is_json_requested(args)
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        # Typer prints the help if no command was given.
        if ctx.resilient_parsing or type(error).__name__ == "NoArgsIsHelpError":
            raise
        if hasattr(error, "format_message"):
            from ckptctl.cli.views.usage_errors import to_usage_error

            error = to_usage_error(error, ctx, args)
        ckpt_error, debug = _to_ckpt_error(error), bool(ctx.params.get("debug"))
        if debug or not is_reported_by_rank_zero():
            trace = "".join(traceback.format_exception(error)) if debug else None
            Printer(machine).print_error(ckpt_error, trace)
        raise typer.Exit(ckpt_error.exit_code) from None


def _to_ckpt_error(error: BaseException) -> CkptError:
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


def _print_version(requested: bool) -> None:
    if requested:
        Printer().print_line(f"ckptctl {__version__}")
        raise typer.Exit


def set_global_options(
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
    from ckptctl.remote.retries import retry_policy

    with name_option_in_errors(COLOR.display_name):
        printer.SETTINGS.color = COLOR.parse_value(color) or "auto"
    printer.SETTINGS.form = None
    machine = is_json_requested(get_typed_words())
    with name_option_in_errors("--timeout"):
        retry_policy.timeout_seconds = (
            None if timeout is None else check_tolerance(parse_number(float, timeout))
        )
    retry_policy.notify = Printer(machine).print_note


def build_program(only_name: str = "", *, overview: bool = False) -> typer.Typer:
    """Build the Typer program.

    Args:
        only_name: Name of the only command to import. If no such command exists, all commands are
            imported.
        overview: Whether to register only names and summaries. Parsing the options of all commands
            would take a third of the run time of `--help`.
    """
    typer_app = typer.Typer(
        name="ckptctl",
        cls=CkptGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": HELP, "max_content_width": sys.maxsize},
        epilog=format_examples(EXAMPLES),
    )
    typer_app.callback()(set_global_options)
    for command in iterate_commands(only_name):
        command.add_to(typer_app, overview=overview)
    return typer_app if typer_app.registered_commands else build_program()


def __getattr__(name: str) -> typer.Typer:
    """Build ``app``, the program with all its commands, on first access."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    typer_app = globals()[name] = build_program()
    return typer_app


def main() -> None:
    """Run the program with the arguments in ``sys.argv``."""
    # Python leaves None where a daemon's parent closed a stream.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    # torch warns at import if NumPy, which is not needed here, is not installed.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    words = [word for word in sys.argv[1:3] if word != "help"]  # `help CMD` is `CMD --help`
    overview = not completion.is_completion_request() and set(words) <= {*HELP}
    try:
        build_program("".join(words[:1]), overview=overview)(prog_name="ckptctl")
    except SystemExit as stop:
        exit_if_daemons_run(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        raise
