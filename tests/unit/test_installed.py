"""Entry points are found wherever ``importlib.metadata`` finds them, and cost nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ckptctl import installed
from ckptctl.errors import MissingPackageError
from ckptctl.storage.arithmetic import import_torch

GROUP = "ckptctl.tests"
TEXT = f"[{GROUP}]\nmine = json:dumps\n"


@pytest.mark.parametrize(
    "place",
    ["mine-1.dist-info/", "Mine-1.DIST-INFO/", "mine.egg-info/", "mine.egg/EGG-INFO/", "zip"],
)
def test_entry_points_are_found_in_every_package_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "mine.egg" if place.startswith("mine.egg/") else tmp_path
    if place == "zip":
        folder = tmp_path / "packages.zip"
        with zipfile.ZipFile(folder, "w") as archive:
            archive.writestr("mine-1.dist-info/METADATA", "Name: mine\n")
            archive.writestr("mine-1.dist-info/entry_points.txt", TEXT)
    else:
        (tmp_path / place).mkdir(parents=True)
        name = "METADATA" if "dist" in place.lower() else "PKG-INFO"
        (tmp_path / place / name).write_text("Name: mine\n")
        (tmp_path / place / "entry_points.txt").write_text(TEXT)
    assert installed.find_entry_points(GROUP) == {}
    monkeypatch.syspath_prepend(str(folder))
    assert [point.value for point in installed.find_entry_points(GROUP).values()] == ["json:dumps"]
    assert not installed.may_have_entry_points(f"{GROUP}.others") or place == "zip"


def test_custom_distribution_finders_are_consulted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(*_: object) -> None: ...

        @staticmethod
        def find_distributions(*_: object) -> list[object]:
            return []

    assert not installed.may_have_entry_points(GROUP)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert installed.may_have_entry_points(GROUP)


def test_missing_entry_points_import_no_metadata_modules() -> None:
    code = (
        "import sys; from ckptctl import families, formats; families.load_families();"
        "from ckptctl import formats; assert not formats.get_entry_points_by_name();"
        "print([n for n in ('email', 'importlib.metadata') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folder_named_torch_is_not_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.has_torch()
    (tmp_path / "torch").mkdir()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not installed.has_torch()


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: no such file')", "ImportError('x')"])
def test_broken_torch_installation_is_missing_package_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match="cannot be imported") as told:
        import_torch()
    assert told.value.why and told.value.why in error
