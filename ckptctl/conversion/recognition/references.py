"""References, which determine the tensors of models that no table describes.

A reference is an installed package that knows the tensors of a model from its config.json. Its
functions are imported when they are called, so the core does not depend on the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptctl.conversion.recognition.model import DEFAULT_REFERENCE
from ckptctl.errors import format_option
from ckptctl.installed import require_package
from ckptctl.options import require_choice
from ckptctl.planner.config_facts import Json

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shapes of tensors by name, or None if the shape of a tensor is unknown."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Result of comparing tensors with a reference.

    Attributes:
        source: Package, version and class of the reference, or an empty string if the package does
            not know the model, or if comparing failed.
        missing_names: Names of missing tensors, limited to the first ones if many are missing.
        more: Number of further missing tensors that *missing_names* does not include.
        unexpected_names: Names of tensors that the model does not have.
        shapes: Description of each shape that differs, by tensor name.
        failure: Reason why the tensors cannot be compared, or an empty string.
    """

    source: str = ""
    missing_names: tuple[str, ...] = ()
    more: int = 0
    unexpected_names: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Package that knows which tensors a model has.

    Attributes:
        name: Name of the reference, and of the optional dependencies that install it.
        packages: Names of the packages that must be installed.
        compare: Function that compares tensors with the model that a config.json describes.
    """

    name: str
    packages: tuple[str, ...]
    compare: Callable[[Json, Shapes], ReferenceResult]

    @property
    def is_installed(self) -> bool:
        """Whether all packages are installed, without importing them."""
        specs = map(find_spec, self.packages)
        return all(spec is not None and spec.origin is not None for spec in specs)


def _defer_import(target: str) -> Callable[..., Any]:
    """Return a wrapper that imports the function at *target* on the first call, and calls it."""

    def call_function(*arguments: object) -> Any:
        module, _, function = target.partition(":")
        return getattr(import_module(f"ckptctl.{module}"), function)(*arguments)

    return call_function


BUILT_IN = (
    Reference(
        "transformers",
        ("transformers", "torch"),
        _defer_import("references.transformers:compare_with_transformers"),
    ),
)


def select_reference(name: str) -> Reference | None:
    """Return the reference *name*, or the first installed one for ``default``, or None.

    Raises:
        MissingPackageError: The reference is not installed.
    """
    if name == DEFAULT_REFERENCE:
        return next((reference for reference in BUILT_IN if reference.is_installed), None)
    references = {reference.name: reference for reference in BUILT_IN}
    selected = references[require_choice(name, "reference", list(references))]
    for package in selected.packages:
        require_package(package, format_option(f"--reference {name}"))
    return selected
