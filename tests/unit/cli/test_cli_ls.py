"""What ``ls`` and ``latest`` say where there is no run."""

import pytest


@pytest.mark.parametrize("command", ["ls", "latest"])
@pytest.mark.parametrize("name", ["model", "two words"])
def test_what_is_no_run_can_be_looked_at(run, tiny_llama3_hf, tmp_path, command, name):
    (tmp_path / name).mkdir()
    for path in (tiny_llama3_hf, tmp_path / name):
        result = run(command, path)
        assert result.exit_code == 3
        quoted = f"'{path}'" if " " in str(path) else path
        assert f"hint: `ckptctl inspect {quoted}` shows what lies there\n" in result.stderr
