"""Which errors are evidence of damage, where it comes from, and what follows from which."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.catalog import Finding
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    MappingError,
    MissingTensorsError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
)
from ckptctl.formats.shared.findings import downgrade_unproven_findings, finding_from_error
from ckptctl.verbs.verification.verify_result import Verification


@pytest.mark.parametrize(
    ("kind", "basis"),
    [
        (DamagedError, "files"),
        (SourceNotFoundError, "files"),
        (CoverageError, "index"),
        (MissingTensorsError, "model"),
    ],
)
def test_damage_and_missing_errors_have_error_severity(kind: type[CkptError], basis: str) -> None:
    found = finding_from_error(kind("x"))
    assert (found.severity, found.basis) == ("error", basis)


@pytest.mark.parametrize(
    "kind",
    [
        UnsupportedError,
        UnsafePickleError,
        StorageError,
        FormatError,
        MappingError,
    ],
)
def test_other_errors_have_unknown_severity(kind: type[CkptError]) -> None:
    assert finding_from_error(kind("x")).severity == "unknown"


def test_finding_includes_file_and_position() -> None:
    error = DamagedError("x", where="/a/b/f.pt, at byte 1,024", why="y")
    found = finding_from_error(error, Path("/a/b"))
    assert (found.file, found.why) == ("f.pt", "at byte 1,024: y")
    assert finding_from_error(error, Path("/a/b"), file="g").file == "g"


def test_missing_tensor_has_severity_of_its_file() -> None:
    torn, odd = Finding("cut", file="a"), Finding("odd", None, "unknown", "b")
    in_torn, in_odd = Finding("gone", file="a", tensor="x"), Finding("gone", file="b", tensor="y")
    elsewhere, nowhere = Finding("gone", file="c", tensor="z"), Finding("gone", tensor="w")
    found = downgrade_unproven_findings((torn, odd, in_torn, in_odd, elsewhere, nowhere))
    assert [one.severity for one in found] == [
        "error",
        "unknown",
        "error",
        "unknown",
        *["error"] * 2,
    ]
    assert [one.severity for one in downgrade_unproven_findings((odd, nowhere))] == [
        "unknown",
        "unknown",
    ]
    assert [(one.severity, one.basis) for one in downgrade_unproven_findings((nowhere,))] == [
        ("error", "index")
    ]
    assert [one.basis for one in downgrade_unproven_findings((torn, nowhere))] == ["files", "files"]


@pytest.mark.parametrize(
    ("severities", "verdict"),
    [
        ((), "complete"),
        (("warning",), "complete"),
        (("warning", "unknown"), "unknown"),
        (("unknown", "error"), "damaged"),
    ],
)
def test_error_finding_outweighs_unknown_in_verdict(severities, verdict) -> None:
    found = Verification(
        "p", "f", "fast", findings=tuple(Finding("x", None, s) for s in severities)
    )
    assert found.verdict == verdict
    assert found.complete is (None if verdict == "complete" else False)
    said = found.to_json()
    assert (said["verdict"], said["errors"]) == (verdict, severities.count("error"))
    assert (said["unknown"], said["warnings"]) == (
        severities.count("unknown"),
        severities.count("warning"),
    )
