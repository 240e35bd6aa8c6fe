"""Typer commands, built from the options that functions and dataclasses declare.

Typer sees every parameter as text or a flag. The option declarations (:mod:`ckptctl.options`) parse
the text. Typer therefore converts nothing. Since version 0.29, it would import pydantic and build a
model for each parameter, which takes longer than most commands.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from ckptctl import cli
from ckptctl.cli import output
from ckptctl.cli.typed_paths import get_typed_words
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

MAX_UNGROUPED_PARAMETERS = 12
"""Maximum number of arguments and options that the help shows without panels."""
MAX_SHORT_HELP_OPTIONS = 15
"""Maximum number of options that ``-h`` lists. If there are more, it lists common ones."""
MAX_NAME_COLUMNS = 30
"""Maximum width of the first column of the help, in characters."""
_ARGUMENT = re.compile(r"^[\[{]?([A-Z]+)[\]}]?(\.\.\.)?( <[\w\[\]]+>)?$")
"""Pattern of an argument in Typer's help. Typer 0.26 adds brackets, and 0.29 adds the type."""
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`\[])")
"""Pattern of the space between two sentences, or before ``[default: ...]``."""

HELP_OPTION_TEXT = "Show a summary (-h) or all options (--help)."
"""Help text of ``-h, --help`` for commands where the two flags print different help."""
FORM_PARAMETERS = ("json", "quiet", "markdown")
"""Names of the flags that set the output format.

At most one of them and ``--format`` (:data:`FORM`) can be given."""
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
"""Option ``--color``, which every command and the program itself accept."""


def _parse_output_form(text: str) -> str:
    """Parse the value of ``--format``. If it is a checkpoint format, raise an error with a hint."""
    if text not in get_args(output.Form):
        is_checkpoint_format = text in list_readable_formats({})
        suggestion = find_nearest(text, get_args(output.Form))
        raise UsageError(
            f"unknown output format `{text}`",
            why=f"known: {', '.join(get_args(output.Form))}",
            hint="pass `--from` or `--to` to set the format of a checkpoint"
            if is_checkpoint_format
            else suggestion and f"did you mean `{suggestion}`?",
        )
    return text


FORM = DeclaredOption(
    "form",
    Option(
        "Output format: table, tsv or json. The short form of json is --json.  "
        "[default: table on a terminal, tsv in a pipe]",
        flags=output.FORMAT_OPTION,
        metavar="FORMAT",
        parse=_parse_output_form,
        panel="Output",
        brief=True,
    ),
    output.Form | None,
    None,
)
"""Option ``--format``, which every command that prints rows accepts."""
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


@dataclass(frozen=True, slots=True)
class InPanel:
    """Panel of the help that shows the options of a dataclass, in the type of a parameter."""

    panel: Panel


def make_quiet_option(text: str) -> Option:
    """Return the option ``--quiet`` with *text* as its help."""
    return Option(text, flags="-q --quiet", panel="Output", brief=True)


@dataclass(frozen=True, slots=True)
class Command:
    """Command of the program, with the function that runs it.

    Attributes:
        run: Function of the command. Its docstring is the help text. A parameter annotated with
            an :class:`Option` is an option; an options dataclass stands for all its fields.
        examples: Command lines for the help.
        prints: Types that ``--json`` prints; see :class:`ckptctl.documents.Document`.
        runs_without_arguments: Whether the command runs if no arguments are given. Otherwise it
            then shows its help.
        omitted_fields: Fields of the options dataclasses that are not options of the command.
        has_rows: Whether the command prints rows and therefore takes ``--format``.
        group: First word of the name, if the name has two words.
    """

    run: Callable[..., None]
    examples: tuple[str, ...]
    prints: str
    runs_without_arguments: bool = False
    omitted_fields: tuple[str, ...] = ()
    has_rows: bool = True
    group: str = ""

    @property
    def name(self) -> str:
        """Name of the command on the command line."""
        return f"{self.group} {self.run.__name__.strip('_').replace('_', '-')}".strip()

    def add_to(self, app: typer.Typer, *, overview: bool = False) -> None:
        """Register the command with *app*.

        Args:
            app: The program.
            overview: Whether to register only the name and the summary.
        """
        declarations = () if overview else self.list_parameters()
        function = _make_stub(self.run) if overview else self._make_typer_function(declarations)
        brief = frozenset(
            declaration.name for declaration in declarations if declaration.option.brief
        )
        command_class = type(CkptCommand.__name__, (CkptCommand,), {"brief": brief})
        register = app.command(
            self.name,
            cls=command_class,
            epilog=format_examples(self.examples),
            no_args_is_help=not self.runs_without_arguments,
        )
        register(function)

    def list_declared_options(self) -> tuple[DeclaredOption, ...]:
        """List the options that the function declares, in the order of its parameters."""
        by_name = {declaration.name: declaration for declaration in list_options(self.run)}
        options = (
            [by_name[name]] if name in by_name else _list_group_options(hint)
            for name, hint in get_type_hints(self.run, include_extras=True).items()
            if name != "return"
        )
        return tuple(
            declaration
            for group in options
            for declaration in group
            if declaration.name not in self.omitted_fields
        )

    def list_parameters(self) -> tuple[DeclaredOption, ...]:
        """List all options of the command, including ``--format`` and ``--color``."""
        return (*self.list_declared_options(), *([FORM] if self.has_rows else []), COLOR)

    def _make_typer_function(self, declarations: Sequence[DeclaredOption]) -> Callable[..., None]:
        """Build the function that Typer inspects and calls, with one parameter per option."""
        annotated_names = {declaration.name for declaration in list_options(self.run)}
        hints = {name: hint for name, hint in get_type_hints(self.run).items() if name != "return"}

        def run_command(**texts: Any) -> None:
            values: dict[str, Any] = {}
            try:
                for declaration in declarations:
                    values[declaration.name] = declaration.parse_value(texts[declaration.name])
            except UsageError as error:
                error.where = error.where or declaration.display_name
                raise
            _require_one_output_form(values)
            if when := values[COLOR.name]:
                output.SETTINGS.color = when
            output.SETTINGS.form = values.get(FORM.name)
            if values.get(FORM.name) == "json":
                values["json"] = True
            require_compatible(declarations, values)
            arguments = {
                name: values[name]
                if name in annotated_names
                else hint(
                    **{f.name: values[f.name] for f in list_options(hint) if f.name in values}
                )
                for name, hint in hints.items()
            }
            self.run(**arguments)

        run_command.__name__, run_command.__doc__ = self.run.__name__, self.run.__doc__
        parameters = [_make_parameter(declaration) for declaration in declarations]
        run_command.__annotations__ = {
            declaration.name: declaration.annotation for declaration in parameters
        }
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run_command


def command(
    *examples: str,
    prints: str,
    runs_without_arguments: bool = False,
    omitted_fields: tuple[str, ...] = (),
    has_rows: bool = True,
    group: str = "",
) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that turns a function into a :class:`Command`.

    For the arguments, see the attributes of :class:`Command`.
    """
    return lambda run: Command(
        run, examples, prints, runs_without_arguments, omitted_fields, has_rows, group
    )


def format_examples(examples: tuple[str, ...]) -> str:
    """Format *examples* as the epilog of a help text, without rewrapping."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in examples)))


def iterate_commands(only_name: str = "") -> Iterator[Command]:
    """Yield all commands, or only the one named *only_name* if it exists."""
    names = [module.name for module in pkgutil.iter_modules(cli.__path__) if not module.ispkg]
    module_of = only_name.replace("-", "_")
    for name in [module_of] if module_of in names else names:
        module = importlib.import_module(f"{cli.__name__}.{name}")
        yield from (value for value in vars(module).values() if isinstance(value, Command))


def _list_group_options(hint: Any) -> Sequence[DeclaredOption]:
    """List the options of a dataclass, in the panel that its ``Annotated`` type names, if any."""
    panel = next((item.panel for item in get_args(hint)[1:] if isinstance(item, InPanel)), None)
    if panel is None:
        return list_options(hint)
    return [
        DeclaredOption(
            declaration.name,
            replace(declaration.option, panel=panel),
            declaration.type,
            declaration.default,
        )
        for declaration in list_options(get_args(hint)[0])
    ]


def _require_one_output_form(values: Mapping[str, object]) -> None:
    """Raise if more than one option sets the output format."""
    form_options = [f"`--{name}`" for name in FORM_PARAMETERS if values.get(name)]
    form = values.get(FORM.name)
    if form and not (form == "json" and form_options == ["`--json`"]):
        form_options.append(f"`{output.FORMAT_OPTION} {form}`")
    if (
        form_options
        and form_options != [f"`{output.FORMAT_OPTION} tsv`"]
        and values.get("no_header")
    ):
        raise UsageError(
            f"{form_options[0]} conflicts with `--no-header`",
            why="`--no-header` only applies to TSV output",
            hint="omit one of them",
        )
    if len(form_options) > 1:
        raise UsageError(
            f"{form_options[0]} conflicts with {form_options[1]}",
            why="each of them sets the output format",
            hint="omit one of them",
        )


def _make_stub(function: Callable[..., Any]) -> Callable[[], None]:
    def do_nothing() -> None:
        pass

    do_nothing.__name__, do_nothing.__doc__ = function.__name__, function.__doc__
    return do_nothing


def _make_parameter(declaration: DeclaredOption) -> inspect.Parameter:
    """Build the function parameter from which Typer creates the option of *declaration*."""
    option = declaration.option
    is_argument = isinstance(option, Argument)
    typer_arguments: dict[str, Any] = {
        "metavar": option.metavar or None,
        "help": option.help,
        "autocompletion": _make_completer(declaration)
        if declaration.words or option.offers
        else None,
        "show_default": not (is_argument or declaration.required),
        "rich_help_panel": option.panel,
    }
    info = (
        typer.Argument(**typer_arguments)
        if is_argument
        else typer.Option(*declaration.spellings, **typer_arguments)
    )
    value_type = list[str] if declaration.repeated else str
    parameter_type: Any = (
        bool if declaration.flag else value_type if declaration.required else value_type | None
    )
    default = False if declaration.flag else None if declaration.repeated else declaration.default
    return inspect.Parameter(
        declaration.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[parameter_type, info],
        default=declaration.default if declaration.required else default,
    )


def _make_completer(declaration: DeclaredOption) -> Callable[[typer.Context], list[str]]:
    offers = declaration.option.offers

    def complete_value(context: typer.Context) -> list[str]:
        if offers is None:
            return list(declaration.words)
        arguments = (p for p in context.command.params if p.param_type_name == "argument")
        first_argument = next(arguments, None)
        # If an option has no value yet, the parser moves the arguments before it to `args`.
        first_value = (first_argument and context.params.get(str(first_argument.name))) or next(
            iter(context.args), None
        )
        return list(offers({**context.params, "": first_value}))

    # Typer inspects the types of the parameters.
    complete_value.__annotations__ = {"context": typer.Context, "return": list[str]}
    return complete_value


class RawTextMixin(Base):
    """Mixin that keeps parameters as text, for `DeclaredOption.parse_value` to parse."""

    # Typer's own classes of contexts and parameters are not public, hence Any.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let Typer find the values as text, and convert only flags set by the environment."""
        for parameter in self.get_params(ctx):
            if type(parameter.default) is not bool:
                vars(parameter).setdefault(
                    "process_value", partial(_pass_text_through, parameter, parameter.process_value)
                )
        return super().parse_args(ctx, args)


def _pass_text_through(
    parameter: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any
) -> Any:
    """Return *value* as typed. Only missing values and callbacks are processed by Typer."""
    is_missing = value is None and parameter.required and not ctx.resilient_parsing
    has_callback = value is not None and parameter.callback is not None
    return process(ctx, value) if is_missing or has_callback else value


class CkptCommand(RawTextMixin, TyperCommand):
    """Typer command with a short usage line, such as ``convert [OPTIONS] SRC DST``.

    Attributes:
        brief: Options that a short ``-h`` shows in addition to those in the panel *Common*.
    """

    brief: frozenset[str] = frozenset()
    _is_long = _shows_summary = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short help for ``-h`` or the full help for ``--help``."""
        options = [
            parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "option"
        ]
        self._is_long = len(options) > MAX_SHORT_HELP_OPTIONS
        self._shows_summary = self._is_long and "--help" not in get_typed_words()
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Collect the parts of the usage line, without Typer's braces."""
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description of the command, or its first paragraph in the short help."""
        text = self.help
        try:
            if self._shows_summary:
                self.help = (text or "").partition("\n\n")[0]
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options in panels, with the same column widths."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters: list[Any] = self.get_params(ctx)
        uses_panels = len(parameters) > MAX_UNGROUPED_PARAMETERS
        panels |= {panel: [] for panel in get_args(Panel) if uses_panels}
        for parameter in parameters:
            name, text = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or "Common"
            if self._shows_summary:
                if not is_argument and panel != "Common" and parameter.name not in self.brief:
                    continue
                required = "  [required]" if parameter.required and not is_argument else ""
                text = get_first_sentence(text) + required
            if parameter.name == "help" and self._is_long:
                text = HELP_OPTION_TEXT
            title = "Arguments" if is_argument else panel if uses_panels else "Options"
            panels[title].append((_ARGUMENT.sub(r"\1\2", name), text))
        lengths = [len(name) for rows in panels.values() for name, _ in rows]
        # A longer name has a line of its own, so it does not widen the column.
        width = max((length for length in lengths if length <= MAX_NAME_COLUMNS), default=0)
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, and in the short help a reference to ``--help``."""
        super().format_epilog(ctx, formatter)
        if self._shows_summary:
            count = sum(parameter.param_type_name == "option" for parameter in self.get_params(ctx))
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help` lists all {count} options")


def get_first_sentence(text: str) -> str:
    """Return the first sentence of an option's help text."""
    return _SENTENCE.split(text)[0]
