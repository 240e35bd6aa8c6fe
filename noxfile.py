"""Every check, a session each: ``nox -l`` lists them, ``nox -s lint types`` runs two.

Each makes an environment of its own; with ``--no-venv`` it takes what is installed, as ``.ci/run``
has it. ``.github/workflows/ci.yml`` runs those with the tag ``hosted``, one job each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

CONSTRAINTS = "tests/constraints.txt"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCHES = ["2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13"]
SERVERS = ("remote", "remote_writing", "remote_saving", "network_cut")


def install(session: nox.Session, *what: str, tested: bool = True) -> None:
    """Install *what*, in the versions that the tests ran with unless *tested* is false."""
    if session.virtualenv.is_sandboxed:
        session.install(*(("-c", CONSTRAINTS) if tested else ()), *what)


@nox.session(tags=["hosted"])
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(tags=["hosted"])
def types(session: nox.Session) -> None:
    """mypy, strict, over everything."""
    install(session, "-e", ".[dev]")
    session.run("mypy", *session.posargs)


@nox.session(python=PYTHONS, tags=["hosted"])
def tests(session: nox.Session) -> None:
    """The tests, in the versions of tests/constraints.txt."""
    install(session, "-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(venv_backend="uv", tags=["hosted"])
def lowest(session: nox.Session) -> None:
    """The tests, in the lowest versions that pyproject.toml admits."""
    install(session, "--resolution=lowest-direct", "-e", ".[test]", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(tags=["hosted"])
def highest(session: nox.Session) -> None:
    """The tests, in the newest versions that pyproject.toml admits."""
    install(session, "--upgrade", "-e", ".[test]", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(python="3.12", tags=["hosted"])
@nox.parametrize("torch", TORCHES)
def torch(session: nox.Session, torch: str) -> None:
    """The tests, with another torch."""
    install(session, "-e", ".[test]", f"torch=={torch}.*", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(tags=["hosted"])
def slow(session: nox.Session) -> None:
    """The tests that take minutes or gigabytes."""
    install(session, "-e", ".[test]")
    session.run("pytest", "-m", "slow and not oracle", *session.posargs)


@nox.session(tags=["hosted"])
def oracles(session: nox.Session) -> None:
    """What other people's programs make of the same files; see tests/oracle/README.md."""
    install(session, "-e", ".[oracle]")
    session.run("pytest", "-m", "oracle", *session.posargs)


@nox.session(tags=["hosted"])
def servers(session: nox.Session) -> None:
    """URLs, against a server that speaks S3."""
    install(session, "-e", ".[servers]")
    files = [f"tests/integration/test_{name}.py" for name in SERVERS]
    session.run("pytest", *files, *session.posargs)


@nox.session(tags=["hosted"])
def docs(session: nox.Session) -> None:
    """The site; a link that leads nowhere fails it. The pages themselves run in the tests."""
    install(session, "zensical")
    session.run("python", "docs/build_site.py", *session.posargs)


@nox.session(tags=["hosted"])
def wheel(session: nox.Session) -> None:
    """The package as it is published, installed far from the checkout."""
    install(session, "build", ".[test]")
    root, python = Path.cwd(), "python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        session.run(python, "-m", "build", "--outdir", str(folder / "dist"), ".", silent=True)
        (built,) = (folder / "dist").glob("*.whl")
        site, away = folder / "site", folder / "run"
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), built)
        away.mkdir()
        (away / "tests").symlink_to(root / "tests")
        session.chdir(away)
        session.run(
            *(python, "-m", "pytest", "-p", "no:cacheprovider"),
            "tests/integration/test_installed.py",
            *session.posargs,
            env={"PYTHONPATH": str(site), "CKPTCTL_INSTALLED": str(site)},
        )
        session.chdir(root)
