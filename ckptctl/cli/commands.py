"""Typer commands, built from the options that functions and dataclasses declare.

To Typer, every parameter is text or a flag. The declarations (:mod:`ckptctl.options`) parse the
text. Typer therefore converts nothing: since 0.29 it would import pydantic and build a model for
each parameter, which takes longer than most commands.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from ckptctl import cli
from ckptctl.cli import output
from ckptctl.cli.typed_paths import typed_words
from ckptctl.errors import UsageError, find_nearest
from ckptctl.option_checks import list_readable_formats
from ckptctl.options import (
    Argument,
    DeclaredOption,
    Option,
    Options,
    Panel,
    list_options,
    require_compatible,
)

if TYPE_CHECKING:
    Base = TyperCommand
else:
    Base = object

FLAT = 12
"""Most arguments and options that the help shows without panels."""
MANY = 15
"""Most options that ``-h`` shows in full. If there are more, it shows the common ones."""
MOST_WIDE = 30
"""Most characters in the first column of the help."""
_ARGUMENT = re.compile(r"^\[?([A-Z]+)\]?( <\w+>)?$")
"""An argument in Typer's help: with brackets in 0.26, with its type in 0.29."""
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`\[])")
"""The space between sentences, or before ``[default: ...]``."""

HELP = "Show a summary (-h) or all options (--help)."
"""Help text of ``-h, --help`` if the two differ."""
FORMS = ("json", "quiet", "markdown")
"""Parameters that set the output format, at most one of which can be given.

``--format`` (:data:`FORM`) also sets it."""
Json = Annotated[bool, Option("Print one JSON document.", panel="Output", brief=True)]
Quiet = Annotated[
    bool,
    Option(
        "Print only names or paths, one per line.", flags="-q --quiet", panel="Output", brief=True
    ),
]
NoHeader = Annotated[bool, Option("Omit the header line of TSV output.", panel="Output")]
COLOR = DeclaredOption(
    "color",
    Option(
        "Color the output: auto, always or never.  [default: auto]", metavar="WHEN", panel="Output"
    ),
    output.When | None,
    None,
)
"""Option of every command and of the program itself."""


def _form(text: str) -> str:
    """Parse the value of ``--format``, with a hint if it is a checkpoint format."""
    if text not in get_args(output.Form):
        checkpoint = text in list_readable_formats({})
        close = find_nearest(text, get_args(output.Form))
        raise UsageError(
            f"unknown output format `{text}`",
            why=f"known: {', '.join(get_args(output.Form))}",
            hint="pass `--from` or `--to` to set the format of a checkpoint"
            if checkpoint
            else close and f"did you mean `{close}`?",
        )
    return text


FORM = DeclaredOption(
    "form",
    Option(
        "Output format: table, tsv or json. The short form of json is --json.  "
        "[default: table on a terminal, tsv in a pipe]",
        flags=output.FORMAT,
        metavar="FORMAT",
        parse=_form,
        panel="Output",
        brief=True,
    ),
    output.Form | None,
    None,
)
"""Option of every command that prints rows."""
SingleProcess = Annotated[
    bool,
    Option("Run as a single process, ignoring torchrun's environment variables.", panel="Advanced"),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of commands that execute or show a conversion plan."""

    dry_run: Annotated[
        bool, Option("Show the plan without reading or writing data.", flags="-n --dry-run")
    ] = False
    yes: Annotated[
        bool,
        Option(
            "Skip the confirmation before an upload to the Hub.", flags="-y --yes", panel="Safety"
        ),
    ] = False
    single_process: SingleProcess = False
    json: Json = False
    quiet: Quiet = False


def only_quiet(text: str) -> Option:
    """Return the option ``--quiet`` with *text* as its help."""
    return Option(text, flags="-q --quiet", panel="Output", brief=True)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program.

    Attributes:
        run: Function of the command. Its docstring is the help text. A parameter annotated with
            an :class:`Option` is an option; an options dataclass stands for all its fields.
        examples: Command lines for the help.
        prints: Types that ``--json`` prints; see :class:`ckptctl.documents.Document`.
        bare: Whether it runs without arguments instead of showing its help.
        without: Fields of the options dataclasses to leave out.
        rows: Whether the command prints rows and therefore takes ``--format``.
    """

    run: Callable[..., None]
    examples: tuple[str, ...]
    prints: str
    bare: bool = False
    without: tuple[str, ...] = ()
    rows: bool = True

    @property
    def name(self) -> str:
        """The command's name on the command line."""
        return self.run.__name__.strip("_").replace("_", "-")

    def add_to(self, app: typer.Typer, *, overview: bool = False) -> None:
        """Register the command with *app*.

        Args:
            app: The program.
            overview: Register only the name and the summary.
        """
        every = () if overview else self.every()
        function = _named(self.run) if overview else self._function(every)
        brief = frozenset(one.name for one in every if one.option.brief)
        kind = type(PlainCommand.__name__, (PlainCommand,), {"brief": brief})
        how = app.command(
            self.name, cls=kind, epilog=epilog(self.examples), no_args_is_help=not self.bare
        )
        how(function)

    def declared(self) -> tuple[DeclaredOption, ...]:
        """List the options that the function declares, in the order of its parameters."""
        own = {one.name: one for one in list_options(self.run)}
        options = (
            [own[name]] if name in own else list_options(hint)
            for name, hint in get_type_hints(self.run).items()
            if name != "return"
        )
        return tuple(one for some in options for one in some if one.name not in self.without)

    def every(self) -> tuple[DeclaredOption, ...]:
        """List all options of the command, including ``--format`` and ``--color``."""
        return (*self.declared(), *([FORM] if self.rows else []), COLOR)

    def _function(self, every: Sequence[DeclaredOption]) -> Callable[..., None]:
        """Build the function that Typer inspects and calls, with one parameter per option."""
        own = {one.name for one in list_options(self.run)}
        hints = {name: hint for name, hint in get_type_hints(self.run).items() if name != "return"}

        def run(**texts: Any) -> None:
            values: dict[str, Any] = {}
            try:
                for one in every:
                    values[one.name] = one.parse_value(texts[one.name])
            except UsageError as error:
                error.where = error.where or one.display_name
                raise
            _require_one_form(values)
            if when := values[COLOR.name]:
                output.WANTED.color = when
            output.WANTED.form = values.get(FORM.name)
            if values.get(FORM.name) == "json":
                values["json"] = True
            require_compatible(every, values)
            arguments = {
                name: values[name]
                if name in own
                else hint(
                    **{f.name: values[f.name] for f in list_options(hint) if f.name in values}
                )
                for name, hint in hints.items()
            }
            self.run(**arguments)

        run.__name__, run.__doc__ = self.run.__name__, self.run.__doc__
        made = [_parameter(one) for one in every]
        run.__annotations__ = {one.name: one.annotation for one in made}
        run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        return run


def command(
    *examples: str,
    prints: str,
    bare: bool = False,
    without: tuple[str, ...] = (),
    rows: bool = True,
) -> Callable[[Callable[..., None]], Command]:
    """Decorate a function as a :class:`Command`."""
    return lambda run: Command(run, examples, prints, bare, without, rows)


def epilog(examples: tuple[str, ...]) -> str:
    """Format *examples* as the epilog of a help text, without rewrapping."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in examples)))


def commands(only: str = "") -> Iterator[Command]:
    """Yield all commands, or only the one named *only* if it exists."""
    names = [module.name for module in pkgutil.iter_modules(cli.__path__)]
    module_of = only.replace("-", "_")
    for name in [module_of] if module_of in names else names:
        module = importlib.import_module(f"{cli.__name__}.{name}")
        yield from (one for one in vars(module).values() if isinstance(one, Command))


def _require_one_form(values: Mapping[str, object]) -> None:
    """Raise if more than one option sets the output format."""
    given = [f"`--{name}`" for name in FORMS if values.get(name)]
    form = values.get(FORM.name)
    if form and not (form == "json" and given == ["`--json`"]):
        given.append(f"`{output.FORMAT} {form}`")
    if given and given != [f"`{output.FORMAT} tsv`"] and values.get("no_header"):
        raise UsageError(
            f"{given[0]} conflicts with `--no-header`",
            why="`--no-header` only applies to TSV output",
            hint="omit one of them",
        )
    if len(given) > 1:
        raise UsageError(
            f"{given[0]} conflicts with {given[1]}",
            why="each of them sets the output format",
            hint="omit one of them",
        )


def _named(function: Callable[..., Any]) -> Callable[[], None]:
    def named() -> None:
        pass

    named.__name__, named.__doc__ = function.__name__, function.__doc__
    return named


def _parameter(one: DeclaredOption) -> inspect.Parameter:
    """Build the function parameter from which Typer derives the option *one*."""
    option = one.option
    argument = isinstance(option, Argument)
    more: dict[str, Any] = {
        "metavar": option.metavar or None,
        "help": option.help,
        "autocompletion": _completion(one) if one.words or option.offers else None,
        "show_default": not (argument or one.required),
        "rich_help_panel": option.panel,
    }
    info = typer.Argument(**more) if argument else typer.Option(*one.spellings, **more)
    several = list[str] if one.repeated else str
    text: Any = bool if one.flag else several if one.required else several | None
    default = False if one.flag else None if one.repeated else one.default
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[text, info],
        default=one.default if one.required else default,
    )


def _completion(one: DeclaredOption) -> Callable[[typer.Context], list[str]]:
    offers = one.option.offers

    def offered(context: typer.Context) -> list[str]:
        if offers is None:
            return list(one.words)
        arguments = (p for p in context.command.params if p.param_type_name == "argument")
        first = next(arguments, None)
        # If an option has no value yet, the parser moves the arguments before it to `args`.
        named = (first and context.params.get(str(first.name))) or next(iter(context.args), None)
        return list(offers({**context.params, "": named}))

    # Typer inspects the types of the parameters.
    offered.__annotations__ = {"context": typer.Context, "return": list[str]}
    return offered


class PlainText(Base):
    """Mixin that keeps parameters as text, for :meth:`Declared.read` to parse."""

    # Typer's own classes of contexts and parameters are not public, hence Any.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let Typer find the values, and convert only flags from the environment."""
        for one in self.get_params(ctx):
            if type(one.default) is not bool:
                vars(one).setdefault("process_value", partial(_take_text, one, one.process_value))
        return super().parse_args(ctx, args)


def _take_text(parameter: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return *value* as typed, and let Typer handle missing values and callbacks."""
    missing = value is None and parameter.required and not ctx.resilient_parsing
    triggers = value is not None and parameter.callback is not None
    return process(ctx, value) if missing or triggers else value


class PlainCommand(PlainText, TyperCommand):
    """A command whose usage line shows only argument names: ``convert [OPTIONS] SRC DST``.

    Attributes:
        brief: Options that a short ``-h`` shows in addition to those in *Common*.
    """

    brief: frozenset[str] = frozenset()
    _long = _summary = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short help for ``-h`` or the full help for ``--help``."""
        options = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
        self._long = len(options) > MANY
        self._summary = self._long and "--help" not in typed_words()
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Collect the parts of the usage line, without Typer's braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description of the command, or its first paragraph in the short help."""
        text = self.help
        try:
            if self._summary:
                self.help = (text or "").partition("\n\n")[0]
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options in panels, with the same column widths."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        params: list[Any] = self.get_params(ctx)
        many = len(params) > FLAT
        panels |= {panel: [] for panel in get_args(Panel) if many}
        for one in params:
            name, text = one.get_help_record(ctx)
            argument = one.param_type_name == "argument"
            panel = getattr(one, "rich_help_panel", None) or "Common"
            if self._summary:
                if not argument and panel != "Common" and one.name not in self.brief:
                    continue
                required = "  [required]" if one.required and not argument else ""
                text = first_sentence(text) + required
            if one.name == "help" and self._long:
                text = HELP
            title = "Arguments" if argument else panel if many else "Options"
            panels[title].append((_ARGUMENT.sub(r"\1", name), text))
        width = min(MOST_WIDE, max(len(name) for rows in panels.values() for name, _ in rows))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, and in the short help a reference to ``--help``."""
        super().format_epilog(ctx, formatter)
        if self._summary:
            count = sum(one.param_type_name == "option" for one in self.get_params(ctx))
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help` lists all {count} options")


def first_sentence(text: str) -> str:
    """Return the first sentence of an option's help text."""
    return _SENTENCE.split(text)[0]
