from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import SourceNotFoundError, UsageError
from ckptctl.families import family, list_model_types, load_families, use_converter_file

GOOD = '''
from ckptctl.planner.layouts import Family

TABLE = """
logical  axes   hf                       own
embed    v d    model.embed.weight       wte
q        (h e) d  model.q.weight         q d (h e)
"""

FAMILY = Family(
    name="mine",
    title="Mine",
    aliases=("my_own",),
    layouts=("hf", "own"),
    tables=(TABLE,),
    architecture="MineForCausalLM",
    sizes={"h": ("num_heads", "text.n_heads"), "e": ("head_dim", "")},
)
'''


@pytest.fixture
def file(tmp_path):
    def write(*changes):
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


def test_converter_is_registered_only_inside_block(file):
    with use_converter_file(file()):
        assert "mine" in list_model_types()
        assert family("My-Own").title == "Mine"
        assert load_families()["mine"].get_layout("own")
    assert "mine" not in list_model_types()


def test_using_converter_leaves_no_files(file):
    before = set(file().parent.iterdir())
    with use_converter_file(file()):
        pass
    assert set(file().parent.iterdir()) == before


def test_no_converter_file_changes_nothing():
    before = list_model_types()
    with use_converter_file(None):
        assert list_model_types() == before


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        (("FAMILY =", "FAMLY ="), "mine.py", "`FAMILY` is missing"),
        (("FAMILY = Family(", "FAMILY = dict("), "mine.py", "`FAMILY` is dict"),
        (("title=", "titel="), "line 10", "titel"),
        (("from ckptctl", "import nothing_here\nfrom ckptctl"), "line 2", "nothing_here"),
        (('name="mine"', 'name="mine'), "line 11", "SyntaxError"),
        (("q d (h e)", "q  d (h e)"), "line 7", "5 cells instead of 4"),
        (("q d (h e)", "q d (h e"), "line 7", "axes"),
        (("q d (h e)", "{q d (h e)"), "line 7", "key template"),
        (("q d (h e)", "q d (k e)"), "mine.py", "axes d e k in layout `own`"),
        (
            ('("hf", "own")', '("hf", "own", "none")'),
            "mine.py",
            "`none`, which is not in any table",
        ),
        (('name="mine"', 'name="Mine!"'), "mine.py", "lower-case"),
        (("(TABLE,)", "()"), "mine.py", "empty"),
    ],
)
def test_malformed_converter_is_a_usage_error(file, change, where, why):
    with pytest.raises(UsageError) as caught, use_converter_file(file(change)):
        pass
    assert where in caught.value.where
    assert why in caught.value.why


@pytest.mark.parametrize(
    "change", [('name="mine"', 'name="llama3"'), ('("my_own",)', '("codellama",)')]
)
def test_converter_with_taken_name_is_refused(file, change):
    with pytest.raises(UsageError, match="is already used"), use_converter_file(file(change)):
        pass


def test_missing_converter_file_is_an_error(tmp_path):
    with pytest.raises(SourceNotFoundError), use_converter_file(tmp_path / "none.py"):
        pass


def test_converter_next_to_checkpoint_is_not_run(tmp_path, tiny_llama3_hf):
    """The control: a file of that name beside the checkpoint is not run."""
    (tmp_path / "llama9.py").write_text("raise SystemExit('was run')")
    (tmp_path / "config.json").write_text('{"model_type": "llama9"}')
    weights = next(tiny_llama3_hf.glob("*.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    assert ckptctl.inspect(tmp_path).format == "hf"


def test_converter_option_works_in_python(file, tmp_path, tiny_llama3_hf):
    found = ckptctl.inspect(tiny_llama3_hf, converter=file(), model_type="mine")
    assert found.model_type is None and "no layout of `mine`" in found.notes[-1]
    ckptctl.plan_conversion(tiny_llama3_hf, tmp_path / "o", to="dcp", converter=str(file()))


def test_converter_option_works_in_any_order(file, run):
    path = str(Path(file()))
    for options in (["-m", "mine", "--converter", path], ["--converter", path, "-m", "mine"]):
        result = run("map", "wte", "--to-layout", "hf", "--no-header", *options)
        assert result.stdout.startswith("model.embed.weight\t"), result.stderr
    assert run("models", "mine").exit_code == 2


@pytest.mark.parametrize(
    "line", ["raise SystemExit(0)", "import sys; sys.exit()", "raise GeneratorExit"]
)
def test_converter_that_exits_is_a_usage_error(file, line):
    with (
        pytest.raises(UsageError, match="cannot run"),
        use_converter_file(file(("TABLE = ", f"{line}\nTABLE = "))),
    ):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shifts", "(5,)"),
        ("free", "5"),
        ("pinned", "'ab'"),
        ("constants", "{'p': '2'}"),
        ("drops", "(1,)"),
        ("composite", "{'e': ('r', 2)}"),
    ],
)
def test_converter_field_of_wrong_type_is_a_usage_error(file, field, value):
    changed = ('title="Mine"', f'title="Mine", {field}={value}')
    with pytest.raises(UsageError, match="malformed") as caught, use_converter_file(file(changed)):
        pass
    assert f"`{field}` is" in str(caught.value.why)
