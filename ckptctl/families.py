"""Registry of model families, from built-in modules, entry points and converter files.

Built-in families are the modules of :data:`PACKAGE`. A wheel contains the package in ``ckptctl/``.
In the repository, its folder is ``converters/``, next to ``ckptctl/``. Other packages add families
with entry points in the group ``ckptctl.converters``. The name of an entry point is the model type,
and the object is a :class:`~ckptctl.planner.layouts.Family`. A family in a converter file is only
known within :func:`use_converter_file`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ckptctl import installed
from ckptctl.errors import SourceNotFoundError, UsageError, find_nearest, format_option
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckptctl.planner.layouts import Family

PACKAGE = "ckptctl.converters"
ENTRY_POINT_GROUP = "ckptctl.converters"
CONVERTER_MODULE = "ckptctl_converter_file"
"""Name of the module as which a ``--converter`` file is executed."""

_CONVERTER_FILE_FAMILY: ContextVar[Family | None] = ContextVar("user", default=None)


@cache
def list_built_in_types() -> tuple[str, ...]:
    """List the built-in model types, and import the package of their families."""
    home = Path(__file__).parent
    bundled_folder, repository_folder = home / "converters", home.parent / "converters"
    folder = bundled_folder if bundled_folder.is_dir() else repository_folder
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[PACKAGE] = module
    return tuple(sorted(file.stem for file in folder.glob("[!_]*.py")))


@cache
def _find_family_entry_points() -> dict[str, EntryPoint]:
    return installed.find_entry_points(ENTRY_POINT_GROUP)


@cache
def _load_family(name: str) -> Family:
    """Load the model family called *name*, which must exist.

    The tables of a built-in family are parsed on first use.
    """
    from ckptctl.planner.layouts import Family

    try:
        if name in list_built_in_types():
            loaded_family = importlib.import_module(f"{PACKAGE}.{name}").FAMILY
        else:
            loaded_family = _find_family_entry_points()[name].load()
        if not isinstance(loaded_family, Family):
            raise TypeError(f"{loaded_family!r} is not a Family")
        if name not in list_built_in_types():
            from ckptctl.planner.families.validation import iterate_contradictions

            if flaw := next(iterate_contradictions(loaded_family), None):
                raise ValueError(flaw)
    except Exception as error:
        raise UsageError(
            f"cannot load model type `{name}`",
            why=f"{type(error).__name__}: {error}",
            hint="fix its tables, or uninstall the package that adds it",
        ) from error
    return loaded_family


@contextmanager
def use_converter_file(file: str | TreePath | None) -> Iterator[None]:
    """Register the family defined in *file* for the duration of the block.

    The file is executed. No other function executes code from a path that the user passes.
    """
    if file is None:
        yield
        return
    token = _CONVERTER_FILE_FAMILY.set(None)
    try:
        loaded_family = _load_converter_file(Path(file))
        _require_unused_names(loaded_family, Path(file))
        _CONVERTER_FILE_FAMILY.set(loaded_family)
        yield
    finally:
        _CONVERTER_FILE_FAMILY.reset(token)


def _require_unused_names(loaded_family: Family, file: Path) -> None:
    taken = {
        name: other.name
        for key, other in load_families().items()
        for name in (key, other.name, *other.aliases)
    }
    for name in (loaded_family.name, *loaded_family.aliases):
        if name in taken:
            raise UsageError(
                f"the name `{name}` is already used",
                where=str(file),
                why=f"model type `{taken[name]}` has that name",
                hint="change `name` and `aliases` of the family in your file",
            )


def list_model_types() -> tuple[str, ...]:
    """Return the names of all known model types, without loading the families."""
    user = _CONVERTER_FILE_FAMILY.get()
    return tuple(
        sorted(
            {*list_built_in_types(), *_find_family_entry_points(), *([user.name] if user else [])}
        )
    )


def load_families() -> dict[str, Family]:
    """Load all model families, by name."""
    user = _CONVERTER_FILE_FAMILY.get()
    return {
        name: user if user and user.name == name else _load_family(name)
        for name in list_model_types()
    }


def list_layouts(family_list: Iterable[Family]) -> list[str]:
    """List the names of all layouts of the families in *family_list*, without duplicates."""
    return sorted({name for member in family_list for name in member.layouts})


def require_layout(family: Family, name: str) -> None:
    """Raise UsageError if *family* has no layout called *name*.

    The error hints at families that have such a layout.
    """
    from ckptctl.planner.layouts import LIST_LAYOUTS

    try:
        family.get_layout(name)
    except UsageError as error:
        if error.hint == LIST_LAYOUTS and name in list_layouts(load_families().values()):
            error.hint = (
                f"run `ckptctl models --layout {name}` to list the model types that have it"
            )
        raise


def build_adapter_families(family_list: Iterable[Family]) -> dict[str, Family]:
    """Build the adapter family of each family in *family_list*, by name of the adapter family."""
    from ckptctl.planner.mapping.adapters import derive_adapter_family

    adapter_families = (
        member if member.partial else derive_adapter_family(member) for member in family_list
    )
    return {member.name: member for member in adapter_families if member.layouts}


def family(name: str) -> Family:
    """Return the family of the model type *name*, which may be an alias.

    If *name* ends with ``-lora``, return the family of adapters for the model type.

    Raises:
        UsageError: The name is unknown.
    """
    from ckptctl.planner.mapping.adapters import ADAPTER_SUFFIX, derive_adapter_family

    if name.endswith(ADAPTER_SUFFIX):
        return derive_adapter_family(family(name.removesuffix(ADAPTER_SUFFIX)))
    normalized = name.strip().lower().replace("-", "_").replace(".", "_")
    for exact in (name, normalized):
        if exact in list_built_in_types():
            return _load_family(exact)
    candidates = load_families()
    for spelling in (name, normalized):
        if spelling in candidates:
            return candidates[spelling]
        for candidate in candidates.values():
            if spelling in candidate.aliases:
                return candidate
    close = find_nearest(
        normalized, [*candidates, *(alias for f in candidates.values() for alias in f.aliases)]
    )
    raise UsageError(
        f"unknown model type `{name}`",
        why=f"none of the {len(candidates)} known model types has that name",
        hint=(f"did you mean `{close}`? " if close else "")
        + "`ckptctl models` lists all model types",
    )


def _load_converter_file(file: Path) -> Family:
    """Execute *file* and return its ``FAMILY``.

    *file* is always named on the command line or by the calling program, never by a checkpoint, and
    no folder is searched.
    """
    from ckptctl.planner.layouts import Family

    if not file.is_file():
        raise SourceNotFoundError(
            "no such converter file",
            where=str(file),
            hint=f"pass {format_option('--converter FILE.py')}",
        )
    loaded_family = getattr(_execute_converter_file(file), "FAMILY", None)
    if not isinstance(loaded_family, Family):
        why = (
            "`FAMILY` is missing"
            if loaded_family is None
            else f"`FAMILY` is {type(loaded_family).__name__}"
        )
        raise UsageError(
            "the converter file does not define a model family",
            where=str(file),
            why=why,
            hint="define `FAMILY = Family(...)` with `Family` from `ckptctl.plugins.families`",
        )
    _require_valid_tables(loaded_family, file)
    return loaded_family


def _execute_converter_file(file: Path) -> ModuleType:
    """Execute the Python file *file* as a module, without writing byte code."""
    module = ModuleType(CONVERTER_MODULE)
    module.__file__ = str(file)
    previous = sys.modules.get(CONVERTER_MODULE)
    sys.modules[CONVERTER_MODULE] = module
    try:
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including SystemExit, which must not end the program
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            "cannot run the converter file",
            where=f"{file}, line {_find_error_line(error, file)}",
            why=f"{type(error).__name__}: {message}",
        ) from error
    finally:
        if previous is None:
            del sys.modules[CONVERTER_MODULE]
        else:
            sys.modules[CONVERTER_MODULE] = previous
    return module


def _find_error_line(error: BaseException, file: Path) -> int:
    """Return the line of *file* where *error* was raised."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return (lines[-1] if lines else None) or 1


def _require_valid_tables(loaded_family: Family, file: Path) -> None:
    from ckptctl.planner.families.tables import TableError
    from ckptctl.planner.families.validation import iterate_contradictions, iterate_type_errors

    where = str(file)
    try:
        flaw = next(
            chain(iterate_type_errors(loaded_family), iterate_contradictions(loaded_family)), None
        )
    except TableError as error:
        lines = [line.strip() for line in file.read_text("utf-8", "replace").splitlines()]
        number = lines.index(error.line) + 1 if error.line in lines else 1
        flaw, where = str(error), f"{file}, line {number}"
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        flaw = f"{type(error).__name__}: {error}"
    if flaw:
        raise UsageError("the tables of the converter file are malformed", where=where, why=flaw)
