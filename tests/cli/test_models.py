"""`tapeout models` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapeout.cli.main import cli
from tapeout.model_defs.families import families


def test_the_table_is_of_recorded_results() -> None:
    result = CliRunner().invoke(cli, ["models"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == len(families()) + 1
    assert any(line.split()[:3] == ["DeepseekV3ForCausalLM", "deepseek_v3", "exact"] for line in lines)
    assert "transformers" in lines[-1]


def test_json_is_a_list_of_rows() -> None:
    rows = json.loads(CliRunner().invoke(cli, ["models", "--json"]).stdout)
    keys = {"architecture", "model_type", "traced", "parity", "max_abs_logit_diff", "notes"}
    assert all(row.keys() == keys for row in rows)
    assert sum(row["parity"] == "exact" for row in rows) >= 70


def test_verify_makes_the_family_afresh(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = ["models", "--verify", "gpt2", "--seed", "9", "--json", "--output", str(record)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert (row["architecture"], row["model_type"], row["parity"]) == ("GPT2LMHeadModel", "gpt2", "exact")
    data = json.loads(record.read_text())
    assert (data["seed"], data["results"][0]["family"]) == (9, "gpt2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--verify", "gpt3"], "unknown model family 'gpt3'"),
        (["--seed", "1"], "--seed is of --verify"),
        (["--output", "x.json"], "--output writes what --verify finds"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["models", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
