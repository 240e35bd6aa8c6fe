"""All checks, one session each. ``nox -l`` lists them, and ``nox -s lint types`` runs two.

Each session creates its own environment; with ``--no-venv`` it uses the installed packages.
``.ci/run`` runs the sessions of one Python. ``.github/workflows/ci.yml`` runs those with the tag
``hosted``, one job each, and ``newest.yml`` those with the tag ``newest`` every week. The tests of
the lowest, the pinned and the newest versions are ``lowest``, ``tests`` and ``highest``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests"]

CONSTRAINTS = "tests/constraints.txt"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCHES = ["2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14"]
BENCHMARKS = (
    "convert --size 10MB --runs 1 --no-startup",
    "convert --size 5MB,10MB --runs 1 --only hf-dcp,meta-hf --no-checksum --json DIR/out.json",
    "convert --size 5MB --runs 1 --only dcp-hf --peers --peer-runs 1 --jobs 2 --disk --where DIR",
    "convert --tensors 50 --runs 1 --only consolidate-zero1 --trainers python --no-startup",
    "convert --size 5MB --runs 1 --only consolidate-hf-rank-shards-files --peers --no-startup",
    "cores --size 10MB --runs 1 --only hf-hf9 --threads 2,default --json DIR/out.json",
    "cores --size 10MB --runs 1 --only lora-merge --threads 1 --crc zlib --where DIR",
    "deltas --only speed --speed-bytes 5MB --runs 1 --where DIR --json DIR/out.json",
    "gpu",
    "gpu --size 10MB --runs 1 --device cpu --threads 2 --peers --disk DIR --json DIR/out.json",
    "indexes --runs 1 --ranks 4 --tensors 20 --boxes 16 --model 8B --saved-on 64 --where DIR"
    " --megatron-on 8 --expert-tensor 1 --layers 4",
    "quantized --size 10MB --runs 1 --only copy,quantize-nvfp4,dequantize-awq --where DIR",
    "training --size 10MB --runs 1 --ranks 2 --where DIR --json DIR/out.json",
    "training_plans --models 8B --ranks 8 --limit 20",
)
SERVERS = ("remote", "remote_writing", "remote_saving", "network_cut", "manager_urls")
AZURITE = "azurite@3.35.0"


def install(session: nox.Session, *what: str, tested: bool = True) -> None:
    """Install *what*, in the versions that the tests ran with unless *tested* is false."""
    if session.virtualenv.is_sandboxed:
        session.install(*(("-c", CONSTRAINTS) if tested else ()), *what)


@nox.session(tags=["hosted"])
def lint(session: nox.Session) -> None:
    """Run ruff: lint rules and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(tags=["hosted"])
def types(session: nox.Session) -> None:
    """Run mypy in strict mode on all code."""
    install(session, "-e", ".[dev]")
    session.run("mypy", *session.posargs)


@nox.session(python=PYTHONS, tags=["hosted"])
def tests(session: nox.Session) -> None:
    """Run the tests with the versions in tests/constraints.txt."""
    install(session, "-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(tags=["hosted"])
def bare(session: nox.Session) -> None:
    """Run the tests without torch: code that requires it names the command to install it."""
    install(session, ".", "pytest", "pytest-xdist", "hypothesis")
    if session.virtualenv.is_sandboxed:
        there = "importlib.util.find_spec('torch')"
        session.run("python", "-c", f"import importlib.util; assert not {there}")
    session.run("pytest", "tests/integration/test_without_torch.py", *session.posargs)


@nox.session(venv_backend="uv", tags=["hosted"])
def lowest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml allows."""
    install(session, "--resolution=lowest-direct", "-e", ".[test]", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(tags=["hosted", "newest"])
def highest(session: nox.Session) -> None:
    """Run the tests with the newest versions that pyproject.toml allows."""
    install(session, "--upgrade", "-e", ".[test]", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(python="3.12", tags=["hosted"])
@nox.parametrize("torch", TORCHES)
def torch(session: nox.Session, torch: str) -> None:
    """Run the tests with another version of torch."""
    install(session, "-e", ".[test]", f"torch=={torch}.*", tested=False)
    session.run("pytest", *session.posargs)


@nox.session(python="3.12", tags=["hosted"])
def newest_torch(session: nox.Session) -> None:
    """Run all tests of training, also slow ones, with the newest supported torch."""
    install(session, "-e", ".[test]", f"torch=={TORCHES[-1]}.*", tested=False)
    parts = ("tests/unit/distributed", "tests/unit/save_load", "tests/integration")
    session.run("pytest", "-m", "not oracle", *parts, *session.posargs)


@nox.session(tags=["hosted"])
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes or gigabytes."""
    install(session, "-e", ".[test]")
    session.run("pytest", "-m", "slow and not oracle", *session.posargs)


@nox.session(venv_backend="virtualenv", tags=["hosted"])
def oracles(session: nox.Session) -> None:
    """Compare with other programs on the same files; see tests/oracle/README.md."""
    install(session, "-e", ".[oracle]")
    if session.virtualenv.is_sandboxed:
        install_others(session)
    session.run("pytest", "-m", "oracle", *session.posargs)


@nox.session(venv_backend="virtualenv", python="3.12", tags=["newest"])
def newest_oracles(session: nox.Session) -> None:
    """Compare with the newest releases of other programs."""
    install(session, "--upgrade", "-e", ".[oracle]", tested=False)
    if session.virtualenv.is_sandboxed:
        install_others(session, tested=False)
    session.run("pytest", "-m", "oracle", *session.posargs)


def install_others(session: nox.Session, *, tested: bool = True) -> None:
    """Install programs whose own requirements would replace torch or bring CUDA.

    If *tested* is false, these are the newest releases instead of the pinned ones.
    """
    session.install("--no-deps", "wheel", "setuptools")
    uncompiled = {"DS_BUILD_OPS": "0"}
    for file in ("tests/oracle/requirements.txt", "tests/oracle/trainers/requirements.txt"):
        session.install("--no-deps", "--no-build-isolation", *read(file, tested), env=uncompiled)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    site = str(session.run("python", "-c", purelib, silent=True))
    # The last with Llama 4, beside the newest.
    session.install("--no-deps", "--target", f"{site}/torchtitan_0_2", "torchtitan==0.2.2")
    # Others look whether these are there, and would use them.
    quantizers = ("--target", f"{site}/quantizers", *read("tests/oracle/quantizers.txt", tested))
    session.install("--no-deps", *quantizers)
    # It asks for Python 3.12, which its reference in PyTorch does not need.
    wheels = session.create_tmp()
    download = ("pip", "download", "--no-deps", "--python-version", "3.12", "--dest", wheels)
    session.run(*download, "--only-binary=:all:", "gpt-oss==0.0.9", silent=True)
    (gpt_oss,) = Path(wheels).glob("gpt_oss-*.whl")
    session.run("python", "-m", "zipfile", "-e", str(gpt_oss), site)


def read(file: str, tested: bool) -> list[str]:
    """Return the requirements in *file*, without their versions unless *tested* is true."""
    lines = [line for line in Path(file).read_text().splitlines() if line and line[0] != "#"]
    return lines if tested else [line.partition("==")[0] for line in lines]


@nox.session(python="3.12", venv_backend="virtualenv", tags=["hosted"])
def megatron(session: nox.Session) -> None:
    """Compare with the newest Megatron-Core, which requires Python 3.12."""
    install(session, "-e", ".[oracle]")
    if session.virtualenv.is_sandboxed:
        session.install("--no-deps", "-r", "tests/oracle/megatron.txt")
    files = [str(file) for file in sorted(Path("tests/oracle").glob("test_mcore*.py"))]
    files = [file for file in files if "adapters" not in file]  # of another Megatron-Bridge
    session.run("pytest", "-m", "oracle", *files, *session.posargs)


@nox.session(tags=["hosted"])
def servers(session: nox.Session) -> None:
    """Test URLs with servers like S3, Google Cloud Storage and, with npm, Azure; takes minutes."""
    install(session, "-e", ".[servers]")
    path = os.environ["PATH"]
    if session.virtualenv.is_sandboxed and shutil.which("npm"):
        folder = session.create_tmp()
        npm = ("npm", "install", "--prefix", folder, "--no-audit", AZURITE)
        session.run(*npm, external=True, success_codes=range(256))  # what lacks it is skipped
        path = f"{folder}/node_modules/.bin:{path}"
    files = [f"tests/integration/test_{name}.py" for name in SERVERS]
    files.append("tests/contract/test_docs.py::test_bucket_page_runs_against_s3_server")
    pytest = ("pytest", "-n", "2", "-m", "not oracle")
    session.run(*pytest, *files, *session.posargs, env={"PATH": path})


@nox.session(tags=["hosted"])
def benchmarks(session: nox.Session) -> None:
    """Run every benchmark with each option on tiny data, only to check that it works."""
    install(session, "-e", ".[test]")
    for line in BENCHMARKS:
        module, *options = line.replace("DIR", session.create_tmp()).split()
        session.run("python", "-m", f"tests.benchmarks.{module}", *options)


@nox.session(tags=["hosted"])
def docs(session: nox.Session) -> None:
    """Build the site and fail on broken links. The tests run the code of the pages."""
    install(session, "zensical")
    session.run("python", "docs/build_site.py", *session.posargs)


@nox.session(tags=["hosted"])
def wheel(session: nox.Session) -> None:
    """Build the package twice, check it and install it outside of the checkout."""
    install(session, "build", "twine", ".[test]")
    root, python = Path.cwd(), "python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The wheel of the sdist, and that of the tree.
        for out, parts in (("dist", ()), ("again", ("--sdist", "--wheel"))):
            session.run(
                *(python, "-m", "build", *parts, "--outdir", str(folder / out), "."),
                env={"PIP_CONSTRAINT": str(root / CONSTRAINTS)},
                silent=True,
            )
        session.run("twine", "check", "--strict", *map(str, (folder / "dist").iterdir()))
        (built,) = (folder / "dist").glob("*.whl")
        site, away = folder / "site", folder / "run"
        session.run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), built)
        away.mkdir()
        (away / "tests").symlink_to(root / "tests")
        session.chdir(away)
        session.run(
            *(python, "-m", "pytest", "-p", "no:cacheprovider"),
            "tests/integration/test_installed.py",
            "tests/integration/test_packaging.py",
            *session.posargs,
            env={
                "PYTHONPATH": str(site),
                "CKPTCTL_INSTALLED": str(site),
                "CKPTCTL_BUILT": str(folder),
            },
        )
        session.chdir(root)
