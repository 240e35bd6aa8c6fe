"""The command ``doctor``: what it finds when something is wrong, and that it leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.storage import crc, file_system
from ckptctl.verbs import doctor
from tests.unit.cli.conftest import environment


def found(run, *args: object) -> dict[str, dict[str, str]]:
    result = run("doctor", *args, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["healthy"] else 1), result.output
    return {check["name"]: check for check in document["checks"]}


def test_healthy_folder_has_no_failures_and_stays_unchanged(run, tmp_path):
    os.utime(tmp_path, ns=(1, 2))
    checks = found(run, tmp_path)
    assert not [one for one in checks.values() if one["status"] == "fail"]
    assert checks["torch"]["found"] == metadata.version("torch")
    assert checks["atomic rename"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == 2


def test_doctor_does_not_import_torch(tmp_path):
    code = (
        "import sys\nfrom ckptctl.cli.app import app\n"
        "try: app(['doctor', '-q'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'safetensors', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=60,
    )
    assert done.stdout.endswith("[]\n"), done.stderr


def test_doctor_on_terminal_lists_problems_with_hints(run, tmp_path, monkeypatch):
    from ckptctl.cli import output

    monkeypatch.setattr(output, "_is_terminal", lambda stream: True)
    monkeypatch.setattr(doctor, "find_lock_problem", lambda folder: "No locks available")
    result = run("doctor", tmp_path, NO_COLOR="1")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "installation" and lines[-1].startswith("1 problem")
    broken = next(n for n, line in enumerate(lines) if line.startswith("  fail  locks"))
    assert "No locks available" in lines[broken] and "enable file locks" in lines[broken + 1]
    assert "locks" in run("doctor", tmp_path, "-q").stdout.splitlines()


def test_missing_and_outdated_packages_are_reported(run, tmp_path, monkeypatch):
    versions = {"torch": "2.5.1+cu124", "isal": None, "typer": None}
    real = doctor._find_version
    monkeypatch.setattr(doctor, "_find_version", lambda name: versions.get(name, real(name)))
    needs = ["typer>=1", "isal>=1.7; platform_machine == 'x86_64'", "rich>=13.8"]
    needs += ["torch>=2.6; extra == 'torch'", "transformers>=5; extra == 'transformers'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    checks = found(run, tmp_path)
    assert checks["torch"]["status"] == checks["typer"]["status"] == "fail"
    assert checks["isal"]["status"] == "warn"
    assert checks["torch"]["found"] == "2.5.1+cu124, older than 2.6"
    assert checks["isal"]["hint"] == "`pip install 'isal>=1.7'`"
    assert checks["rich"]["status"] == "ok" and "transformers" not in checks


def test_missing_torch_is_only_a_warning(run, tmp_path, monkeypatch):
    real = doctor._find_version
    monkeypatch.setattr(
        doctor, "_find_version", lambda name: None if name == "torch" else real(name)
    )
    check = found(run, tmp_path)["torch"]
    assert (check["status"], check["found"]) == ("warn", "not installed")
    assert "merges" in check["hint"] and "`pip install torch`" in check["hint"]


def test_needed_packages_match_pyproject():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    names = [doctor._REQUIREMENT.match(text)[1] for text in project["dependencies"]]
    assert names == list(doctor.REQUIREMENTS)


def test_slow_checksums_are_a_warning(run, tmp_path, monkeypatch):
    import zlib

    monkeypatch.setattr(crc, "crc32", zlib.crc32)
    assert found(run, tmp_path)["checksums"]["status"] == "warn"


def test_slow_start_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "HEAVY_PACKAGES", ())
    assert doctor._check_startup_time(0.1).status == "ok"
    assert doctor._check_startup_time(0.9).status == "warn"


@pytest.mark.parametrize(
    ("name", "probe", "value", "status", "text"),
    [
        (
            "large files",
            doctor.find_large_file_problem,
            "File too large",
            "warn",
            "--max-shard-size",
        ),
        ("names", doctor.is_case_sensitive, False, "warn", "differ only in case"),
        ("clock", doctor.measure_clock_skew, 3600.0, "warn", "synchronize the clocks"),
        ("clock", doctor.measure_clock_skew, -3600.0, "warn", "synchronize the clocks"),
        ("sync", doctor.measure_sync_seconds, 2.0, "warn", "synced"),
        ("locks", doctor.find_lock_problem, "No locks available", "fail", "enable file locks"),
    ],
)
def test_file_system_limits_are_reported_with_hint(
    run, tmp_path, monkeypatch, name, probe, value, status, text
):
    monkeypatch.setattr(doctor, probe.__name__, lambda *_: value)
    check = found(run, tmp_path)[name]
    assert check["status"] == status and text in check["hint"]


def test_file_system_without_atomic_rename_is_a_warning(run, tmp_path, monkeypatch):
    def unsupported(*_):
        raise file_system.UnsupportedRenameError

    monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    check = found(run, tmp_path)["atomic rename"]
    assert check["found"] == "no rename without replacing and no exchange"
    assert check["status"] == "warn" and "--overwrite" in check["hint"]


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", "ok"), ("nfs4", "warn"), ("overlay", "warn"), ("tmpfs", "warn")]
)
def test_file_system_type_sets_status(run, tmp_path, monkeypatch, kind, status):
    monkeypatch.setattr(file_system, "find_type", lambda path: kind)
    check = found(run, tmp_path)["location"]
    assert check["status"] == status and check["found"].endswith(f" on {kind}")


def test_unwritable_folder_is_a_warning(run, tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(doctor, "TemporaryDirectory", refuse)
    check = found(run, tmp_path)["writing"]
    assert (check["status"], check["found"]) == ("warn", "Permission denied")


def test_low_disk_space_hints_at_prune(run, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 2**62)
    assert "prune" in found(run, tmp_path)["free space"]["hint"]


def add_package(folder: Path, monkeypatch, name: str, points: str) -> None:
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
    formats.get_entry_points_by_name.cache_clear()


@pytest.fixture
def clean():
    from ckptctl import families
    from ckptctl.conversion import steps

    added = (
        formats.get_entry_points_by_name,
        formats.load_plugin_format,
        steps.find_step_entry_points,
        steps.load_added_step,
    )
    caches = (*added, families._find_family_entry_points, families._load_family)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def test_broken_and_conflicting_plugins_are_reported(run, tmp_path, monkeypatch, clean):
    points = "[ckptctl.formats]\nbroken = nothing.at.all:FORMAT\ndcp = other:FORMAT\n"
    add_package(tmp_path, monkeypatch, "one", points + "[ckptctl.converters]\nllama3 = one:X\n")
    points = "[ckptctl.formats]\ntwice = two:A\n[ckptctl.steps]\ncut = nothing:STEP\n"
    add_package(tmp_path, monkeypatch, "two", points)
    add_package(tmp_path, monkeypatch, "three", "[ckptctl.formats]\ntwice = three:A\n")
    checks = found(run, tmp_path)
    assert checks["format broken"]["status"] == "fail"
    assert "No module named 'nothing'" in checks["format broken"]["hint"]
    assert checks["format dcp"]["status"] == "warn" and "ignored" in checks["format dcp"]["hint"]
    assert checks["format twice"]["status"] == "warn"
    assert checks["model type llama3"]["found"] == "added by one"
    assert checks["model type llama3"]["status"] == "warn"
    assert checks["step cut"]["found"] == "added by two, cannot be loaded"


def test_steps_are_omitted_without_plugin_steps(run, tmp_path):
    checks = found(run, tmp_path)
    assert "formats" in checks and "steps" not in checks


def test_hub_token_is_checked_but_never_printed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert found(run)["Hub token"]["found"].startswith("none")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_secret")
    (tmp_path / "home" / "token").chmod(0o644)
    check = found(run)["Hub token"]
    assert check["status"] == "warn" and "chmod 600" in check["hint"]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run("doctor")
    assert "from HF_TOKEN" in result.stdout and "secret" not in result.output


@pytest.mark.parametrize("where", ["set", "home", "cache"])
def test_hub_cache_paths_match_huggingface_hub(where, tmp_path):
    """Compared with what huggingface_hub itself says, in a process of its own."""
    given = {
        "set": {"HF_HUB_CACHE": "~/hub-cache"},
        "home": {"HF_HOME": "$HOME/hf"},
        "cache": {"XDG_CACHE_HOME": str(tmp_path)},
    }[where]
    code = (
        "from ckptctl.verbs import doctor as s\n"
        "from huggingface_hub import constants as c\n"
        f"cache, home = s.{doctor._check_hub_cache.__name__}(), "
        f"s.{doctor._find_hub_home.__name__}()\n"
        "assert cache.found.startswith(c.HF_HUB_CACHE), (cache, c.HF_HUB_CACHE)\n"
        "assert str(home / 'token') == c.HF_TOKEN_PATH"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_world_size_without_master_addr_is_a_warning(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check = found(run)["ranks"]
    assert check["status"] == "warn" and "MASTER_ADDR" in check["found"]


def test_file_system_type_is_read_from_mountinfo(monkeypatch, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /mnt/a\\040b rw shared:1 - nfs4 server:/ rw\n"
        "3 1 0:3 / /mnt/a\\040b rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(file_system, "_MOUNTS", table)
    assert file_system.find_type(Path("/mnt/a b/c")) == "tmpfs"
    assert file_system.find_type(Path("/mnt/a")) == "ext4"
    assert file_system.list_mounts_in(Path("/mnt")) == [Path("/mnt/a b")]
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "none")
    assert file_system.find_type(Path("/")) is None


def test_doctor_accepts_file_url_but_not_s3(run, tmp_path):
    assert found(run, f"file://{tmp_path}")["location"]["found"].startswith(str(tmp_path))
    result = run("doctor", "")
    assert result.exit_code == 2 and "`.` is the working directory" in result.stderr
    result = run("doctor", "s3://bucket/run")
    assert result.exit_code == 2 and "where: s3://bucket/run\n" in result.stderr
