import subprocess
import sys

import pytest

from ckptctl import families as module
from ckptctl.errors import CkptError, UsageError
from ckptctl.families import family, list_model_types, load_families


@pytest.fixture
def fresh(monkeypatch):
    caches = (module.list_built_in_types, module._find_family_entry_points, module._load_family)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


class Entry:
    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        return self.value


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("foo", "run `ckptctl models` to list the layouts of each model type"),
        ("mistral", "run `ckptctl models --layout mistral` to list the model types that have it"),
    ],
)
def test_unknown_layout_hint_depends_on_known_layouts(layout, hint):
    with pytest.raises(UsageError, match=f"has no layout `{layout}`") as caught:
        module.require_layout(family("llama3"), layout)
    assert caught.value.hint == hint


def test_builtin_llama_families_are_listed():
    assert {"llama2", "llama3", "llama3_2"} <= set(list_model_types())
    assert load_families()["llama3"] is family("llama3")


@pytest.mark.parametrize("said", ["llama3.2", "Llama3-2", "llama3_2", " llama3_2 "])
def test_family_name_spellings_are_normalized(said):
    assert family(said).name == "llama3_2"


def test_codellama_is_alias_of_llama2():
    assert family("codellama").name == "llama2"


def test_unknown_family_hints_at_nearest_name():
    with pytest.raises(UsageError) as caught:
        family("lama3")
    assert "`llama3`" in caught.value.hint and "`ckptctl models`" in caught.value.hint
    assert "llama2" not in str(caught.value.to_json())


@pytest.mark.parametrize("evil", ["../os", "os", "__init__", "json.decoder", ""])
def test_names_of_other_modules_are_usage_errors(evil):
    with pytest.raises(UsageError):
        family(evil)


def test_foreign_converters_package_is_not_imported(tmp_path):
    (tmp_path / "converters").mkdir()
    (tmp_path / "converters" / "__init__.py").write_text("raise SystemExit('foreign')\n")
    (tmp_path / "converters" / "llama3.py").write_text("raise SystemExit('foreign')\n")
    code = [sys.executable, "-m", "ckptctl", "models", "llama3", "-q"]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "model.norm.weight" in done.stdout, done.stderr


def test_entry_point_family_is_available(fresh):
    real = family("llama3")
    fresh.setattr(module, "_find_family_entry_points", lambda: {"mine": Entry("mine", real)})
    assert family("mine") is real
    assert "mine" in load_families()


def test_invalid_entry_point_family_is_an_error(fresh):
    fresh.setattr(module, "_find_family_entry_points", lambda: {"mine": Entry("mine", 3)})
    with pytest.raises(CkptError, match="mine"):
        family("mine")


def test_builtin_families_do_not_read_entry_points(fresh):
    fresh.setattr(module, "_find_family_entry_points", lambda: pytest.fail("read"))
    assert family("llama3").name == "llama3"


def test_importing_families_loads_no_heavy_modules():
    code = (
        "import sys, ckptctl.families; bad = {'torch', 'numpy', 'ckptctl.converters',"
        " 'importlib.metadata', 'ckptctl.planner.layouts'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
