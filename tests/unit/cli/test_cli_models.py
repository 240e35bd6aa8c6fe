import json
import subprocess
import sys

import pytest

from ckptctl.families import load_families


def document(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["models"]


def test_models_lists_all_families(run):
    found = document(run("models", "--json"))
    assert [model["name"] for model in found] == sorted(load_families())
    assert run("models", "-q").stdout.split() == sorted(load_families())


def test_models_in_pipe_prints_row_per_layout(run):
    rows = [line.split("\t") for line in run("models", "--no-header").stdout.splitlines()]
    assert len(rows) == sum(len(family.layouts) for family in load_families().values())
    shown = {(row[0], row[1]): row for row in rows}
    assert shown["phi3", "hf"][2] == load_families()["phi3"].proofs["hf"]
    assert shown["llama3", "meta"][5].startswith("config.json: model_type llama, rope_theta")


def test_unproven_layouts_are_marked_not_validated(run):
    for model in document(run("models", "--json")):
        for layout in model["layouts"]:
            family = load_families()[model["name"]]
            assert layout["proof"] == family.proofs.get(layout["name"])
            if not layout["proof"]:
                assert layout["sources"] == family.sources.get(layout["name"])
            assert not (layout["proof"] and layout["sources"])
    rows = [line.split("\t") for line in run("models", "--no-header").stdout.splitlines()]
    unproven = [row for row in rows if row[1] not in load_families()[row[0]].proofs]
    assert all(row[2].startswith("not validated by logits") for row in unproven)
    (said,) = [row[2] for row in unproven if row[:2] == ["gemma2", "mcore"]]
    assert said == "not validated by logits; names and axes are from the sources of Megatron-Bridge"


def test_untranslated_families_are_marked_as_copied(run, terminal):
    found = {model["name"]: model["translated"] for model in document(run("models", "--json"))}
    assert found["llama3"] and found["qwen3_5"]
    assert not found["falcon_h1"] and not found["olmo"]
    assert "copied, not translated: hf" in terminal("models", COLUMNS="120")
    assert "copied, not translated" in terminal("models", "falcon_h1", COLUMNS="120")
    assert "copied, not translated" not in terminal("models", "qwen3_5", COLUMNS="120")


def test_layout_option_filters_models(run):
    found = document(run("models", "--layout", "torchtune", "--json"))
    assert found and all([x["name"] for x in m["layouts"]] == ["torchtune"] for m in found)
    assert "cohere2" not in {model["name"] for model in found}
    (one,) = document(run("models", "llama3", "--layout", "meta", "--json"))
    assert [table["name"] for table in one["tables"]] == ["meta"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama3"], "did you mean `llama3`?"),
        (["--layout", "torchtun"], "did you mean `torchtune`?"),
        (["llama3", "--layout", "mistral"], "its layouts are `hf`, `meta`"),
    ],
)
def test_unknown_model_or_layout_is_a_usage_error(run, arguments, said):
    result = run("models", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_json_tables_show_parts_axes_and_sizes(run):
    (mixtral,) = document(run("models", "mixtral", "--json"))
    rows = {
        (table["name"], row["tensor"]): row for table in mixtral["tables"] for row in table["rows"]
    }
    w3 = rows["hf-v5", "w3"]
    assert (w3["part"], w3["parts"], w3["along"], w3["axes"]) == (1, ["w1", "w3"], 1, "x f d")
    spread = rows["mistral", "w3"]
    assert (spread["spread"], spread["axes"], spread["part"]) == (["x"], "f d", None)
    assert mixtral["ties"][0]["of"] == "embed"
    assert {"axis": "x", "config": "num_local_experts", "params": "moe.num_experts"} in mixtral[
        "sizes"
    ]


def test_own_keys_match_only_their_family(run):
    (found,) = document(run("models", "mixtral", "--layout", "mistral", "--json"))
    for template in found["tables"][0]["own_keys"]:
        key = template.format(i=0, x=0)
        knowing = {
            name
            for name, family in load_families().items()
            for layout in family.layouts
            if family.get_layout(layout).table.find_match(key)
        }
        assert knowing == {"mixtral"}
    assert found["tables"][0]["own_keys"]


def test_identical_layouts_are_not_repeated(run):
    (found,) = document(run("models", "llama2", "--json"))
    alike = {table["name"]: table["same_as"] for table in found["tables"]}
    assert alike["torchtitan@0.2"] == "meta" and alike["meta"] is None


def test_models_on_terminal_shows_parts_and_size_sources(terminal):
    shown = terminal("models", "mixtral", "--layout", "hf-v5", COLUMNS="120")
    assert "part 1 of w1 + w3 along dimension 1" in shown
    assert "num_local_experts (config.json)" in shown


def test_models_list_fits_terminal(terminal):
    wide = terminal("models", COLUMNS="160").splitlines()
    assert any(line.startswith("deepseek_v3") and line.endswith("mcore-local") for line in wide)
    narrow = terminal("models", COLUMNS="80", NO_COLOR="1").splitlines()
    assert max(map(len, narrow)) <= 80
    assert [line.split()[0] for line in narrow[1:-1]] == sorted(load_families())


def test_listing_models_parses_no_tables():
    code = (
        "from ckptctl import models; from ckptctl.planner.families import tables;"
        "tables.parse_tables = None; import sys; models();"
        "import ckptctl.planner.layouts as l; l.parse_tables = None; models();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
