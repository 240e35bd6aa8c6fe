"""Options are declared once; texts, flags and keyword arguments mean what is declared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import pytest
import torch

import ckptctl
from ckptctl.api.conversion import _Conversion, _Merge
from ckptctl.api.reading import _Report
from ckptctl.distributed.run.manager_options import FinalOptions, ManagerOptions
from ckptctl.errors import CkptError, UsageError, format_option
from ckptctl.keywords import accept_keywords, get_python_help
from ckptctl.options import Argument, Option, OptionConflict, Options, list_options
from ckptctl.run_options import PruneOptions
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.storage.threads import create_daemon, create_thread_pool
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.extraction.extract_options import ExtractOptions
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests.conftest import DATA


def even(value: int) -> int:
    if value % 2:
        raise UsageError("it is odd")
    return value


@dataclass(frozen=True, kw_only=True)
class Base(Options):
    jobs: Annotated[int | None, Option("Threads.", metavar="N", check=even)] = None


@dataclass(frozen=True, kw_only=True)
class Some(Base):
    """What something takes."""

    output: Annotated[str | None, Option("File.", flags="-o --output")] = field(
        default=None, kw_only=False
    )
    to: Annotated[str, Option("Where to. Repeatable.")]
    factor: Annotated[float | None, Option("Factor.")] = None
    size: Annotated[int | str, Option("Size.")] = "5GB"
    level: Annotated[Literal["fast", "full"], Option("fast or full.")] = "fast"
    include: Annotated[Sequence[str], Option("Globs. Repeatable.")] = ()
    sizes: Annotated[Mapping[str, int] | None, Option("Sizes.", parse=lambda t: {t[0]: 1})] = None
    checksum: Annotated[bool, Option("Leave sums out.", flags="--no-sum", python="Sums.")] = True
    resume: Annotated[bool, Option("Go on.")] = False
    inner: str = "not an option"


KNOWN = {one.name: one for one in list_options(Some)}


def test_options_are_declared_in_field_order():
    assert list(KNOWN) == [
        *("output", "jobs", "to", "factor", "size", "level", "include", "sizes"),
        *("checksum", "resume"),
    ]
    assert [name for name, one in KNOWN.items() if one.required] == ["to"]
    assert [name for name, one in KNOWN.items() if one.repeated] == ["include", "sizes"]
    assert [name for name, one in KNOWN.items() if one.flag] == ["checksum", "resume"]
    assert [KNOWN[name].display_name for name in ("output", "checksum")] == ["--output", "--no-sum"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("jobs", "4", 4),
        ("jobs", " +1_0 ", 10),
        ("jobs", "4.0", 4),
        ("factor", "1e-3", 0.001),
        ("factor", ".5", 0.5),
        ("size", "7", "7"),
        ("level", "full", "full"),
        ("include", ["a", "b"], ("a", "b")),
        ("include", None, ()),
        ("sizes", ["h"], {"h": 1}),
        ("jobs", None, None),
        ("checksum", True, False),
        ("checksum", False, True),
        ("resume", True, True),
    ],
)
def test_option_texts_are_parsed(name, text, value):
    found = KNOWN[name].parse_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("jobs", "two", "`two` is not an integer"),
        ("jobs", "²", "`²` is not an integer"),
        ("jobs", "1e3", "`1e3` is not an integer"),
        ("jobs", "4.5", "`4.5` is not an integer"),
        ("jobs", "3", "it is odd"),
        ("factor", "abc", "`abc` is not a number"),
        ("factor", "1e", "`1e` is not a number"),
        ("factor", "...", "`...` is not a number"),
        ("level", "ful", "unknown value `ful`"),
    ],
)
def test_invalid_option_texts_are_usage_errors(name, text, said):
    with pytest.raises(UsageError) as caught:
        KNOWN[name].parse_value(text)
    assert caught.value.what == said


def test_invalid_option_value_error_names_option():
    with pytest.raises(UsageError, match="it is odd") as caught:
        Some(to="x", jobs=3)
    assert caught.value.where == "jobs"
    with pytest.raises(UsageError, match="unknown value `ful`") as caught:
        Some(to="x", level="ful")
    assert (caught.value.where, caught.value.hint) == ("level", "did you mean `full`?")


@pytest.mark.parametrize("given", [{"to": None}, {"to": "x", "resume": None}])
def test_none_is_refused_for_non_optional_options(given):
    with pytest.raises(UsageError, match="it cannot be None"):
        Some(**given)
    assert Some(to="x", output=None).output is None


def test_numpy_and_torch_scalars_are_accepted():
    made = Some(to="x", jobs=np.int64(4), factor=np.float32(0.5), resume=np.bool_(True))
    assert [type(one) for one in (made.jobs, made.factor, made.resume)] == [int, float, bool]
    assert Some(to="x", resume=torch.tensor(True)).resume is True
    with pytest.raises(UsageError, match="is not True or False"):
        Some(to="x", resume=np.float64(0.5))
    with pytest.raises(UsageError, match="cannot be converted to a number"):
        Some(to="x", jobs=torch.ones((), device="meta", dtype=torch.int64))


@pytest.mark.parametrize("given", [True, 10**400, -1, float("nan"), float("inf"), "1"])
def test_invalid_tolerance_is_a_usage_error(given):
    with pytest.raises(UsageError, match="is not a non-negative number"):
        DiffOptions(atol=given)


@pytest.mark.parametrize("given", [2, 0.5, [], b"hf", None])
def test_invalid_format_name_is_a_usage_error(given, tmp_path):
    with pytest.raises(UsageError):
        ckptctl.plan_conversion(DATA / "tiny-llama3-hf", tmp_path / "o", to=given)


@accept_keywords(Some)
def act(src: str, options: Some) -> Some:
    """Do something.

    Args:
        src: A source.
        options: All others.

    Raises:
        UsageError: No.
    """
    return options


def test_keyword_arguments_become_options_with_docs():
    assert act("a", "out", to="b", include=["x"]) == Some("out", to="b", include=["x"])
    assert act(src="a", to="b").output is None
    found = inspect.signature(act)
    assert list(found.parameters) == ["src", *KNOWN]
    assert found.parameters["jobs"].annotation == int | None
    lines = (inspect.getdoc(act) or "").splitlines()
    assert lines[3:7] == [
        "    src: A source.",
        "    output: File.",
        "    jobs: Threads.",
        "    to: Where to.",
    ]
    assert "    level: ``fast`` or ``full``." in lines and "All others" not in lines


def test_option_help_is_used_as_python_docs():
    assert get_python_help(KNOWN["checksum"]) == "Sums."
    assert get_python_help(KNOWN["include"]) == "Globs."


@pytest.mark.parametrize("given", [{"jbos": 2, "to": "x"}, {"src": "a", "inner": "x"}])
def test_unknown_keyword_is_a_usage_error(given):
    with pytest.raises(UsageError, match="unknown option"):
        act(**{"src": "a", **given})


def test_missing_argument_is_a_type_error():
    with pytest.raises(TypeError, match="to"):
        act("a")


def test_errors_in_python_spell_options_as_keywords():
    @accept_keywords(Some)
    def run(path, options):
        raise CkptError(
            f"{format_option('--to dcp')} and {format_option('--jobs 3')} are odd",
            why=f"{format_option('--output')} is, too",
            hint=f"{format_option('--size SIZE', '--factor 2')} and {format_option('--no-sum')}",
        )

    with pytest.raises(CkptError) as caught:
        run("a", to="b")
    error = caught.value
    assert error.what == "`to='dcp'` and `jobs=3` are odd"
    assert (error.why, error.hint) == (
        "`output` is, too",
        "`size=SIZE, factor=2` and `checksum=False`",
    )


def test_threads_spell_options_like_their_parent():
    @accept_keywords(Some)
    def run(path, options):
        said = []
        thread = create_daemon(lambda: said.append(format_option("--jobs 3")))
        thread.start()
        thread.join()
        with create_thread_pool(1) as pool:
            return said, pool.submit(format_option, "--no-sum").result()

    assert run("a", to="b") == (["`jobs=3`"], "`checksum=False`")
    with create_thread_pool(1) as pool:
        assert pool.submit(format_option, "--no-sum").result() == "`--no-sum`"


def test_excluded_options_are_unknown_to_function():
    @accept_keywords(Some, excluded=("jobs",))
    def run(path, options):
        """Do it.

        Args:
            options: All.
        """
        return options

    assert "jobs" not in inspect.signature(run).parameters and "jobs:" not in run.__doc__
    assert run("a", to="b").jobs is None
    with pytest.raises(UsageError, match="unknown option `jobs`"):
        run("a", to="b", jobs=2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("output", 5, "5 is not a string"),
        ("to", b"x", "b'x' is not a string"),
        ("include", 7, "7 is not a list"),
        ("resume", "no", "'no' is not True or False"),
        ("resume", 1, "1 is not True or False"),
    ],
)
def test_option_of_wrong_type_is_a_usage_error(name, value, said):
    with pytest.raises(UsageError) as caught:
        Some(**{"to": "x", name: value})
    assert (caught.value.what, caught.value.where) == (said, name)


@dataclass(frozen=True, kw_only=True)
class Rules(Options):
    first: Annotated[bool, Option("A.", excludes=(OptionConflict("last", "both are it"),))] = False
    last: Annotated[int, Option("B.")] = 1
    untie: Annotated[
        bool,
        Option(
            "C.", excludes=(OptionConflict("tied=drop", why="{this} keeps it", hint="{other}"),)
        ),
    ] = False
    tied: Annotated[str | None, Option("D.", requires="elsewhere")] = None
    sum: Annotated[bool, Option("E.", flags="--no-sum", requires="tied=copy")] = True


@pytest.mark.parametrize(
    ("given", "what", "why", "hint"),
    [
        ({"first": True, "last": 2}, "`--first` conflicts with `--last` (both are it)", None, None),
        (
            {"untie": True, "tied": "drop"},
            "`--untie` conflicts with `--tied drop`",
            "`--untie` keeps it",
            "`--tied drop`",
        ),
        ({"sum": False}, "`--no-sum` requires `--tied copy`", None, "add `--tied copy`"),
    ],
)
def test_conflicting_or_dependent_options_are_usage_errors(given, what, why, hint):
    with pytest.raises(UsageError) as caught:
        Rules(**given)
    error = caught.value
    assert (error.what, error.why, error.hint, error.where) == (what, why, hint, None)


@pytest.mark.parametrize(
    "given", [{"first": True}, {"first": True, "last": 1}, {"untie": True, "tied": "copy"}]
)
def test_compatible_options_are_accepted(given):
    Rules(**given)


OPTIONS = (
    *(_Conversion, _Merge, _Report, DiffOptions, ExtractOptions, InspectOptions, VerifyOptions),
    *(LoadOptions, PruneOptions, ManagerOptions, FinalOptions),
)
STRANGE: tuple[object, ...] = (
    5,
    -1,
    1.5,
    10**30,
    True,
    b"x",
    "",
    "x\0y",
    [],
    [3],
    {},
    {3: "b"},
    object(),
)


@pytest.mark.parametrize("options", OPTIONS)
def test_strange_option_values_raise_only_usage_errors(options):
    needed = {one.name: "hf" for one in list_options(options) if one.required}
    for one in list_options(options):
        for value in STRANGE:
            with suppress(UsageError):
                options(**{**needed, one.name: value})


def test_argument_is_named_by_its_metavar():
    def command(path: Annotated[str, Argument("A path.", metavar="PATH")]) -> None: ...

    assert [one.display_name for one in list_options(command)] == ["PATH"]
