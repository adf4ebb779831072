"""Build options: validation, YAML files, precedence, identity."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.compiler.options import FIELDS, BuildOptions
from tapeout.compiler.options_file import load_options
from tapeout.plugins.errors import UnsupportedError, UsageError

# A valid value that differs from the default, for every option.
OTHER: dict[str, Any] = {
    "target": "cpu",
    "dtype": "bfloat16",
    "max_batch_size": 3,
    "max_num_tokens": 100,
    "max_seq_len": 64,
    "tokens_per_page": 16,
    "timing_cache": Path("cache.json"),
    "require_timed": True,
    "pack": Path("tactics.pack"),
    "weights": "shared",
    "quantize": "int8-dynamic",
    "batch_invariant": True,
    "tactics": "native",
    "verify": False,
    "seed": 7,
    "trust_remote_code": True,
    "revision": "main",
    "keep_onnx": Path("regions"),
    "dump": Path("graphs"),
    "dry_run": True,
}


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "build.yaml"
    path.write_text(text)
    return path


def test_every_option_has_a_value_in_these_tests() -> None:
    assert set(OTHER) == set(FIELDS)


def test_defaults_leave_the_limits_to_the_model() -> None:
    options = BuildOptions()
    assert (options.max_batch_size, options.max_num_tokens, options.max_seq_len) == (None, None, None)
    assert options.tokens_per_page == 32
    assert options.verify


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BuildOptions().dtype = "float16"  # type: ignore[misc]


@pytest.mark.parametrize(("alias", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtype_aliases(alias: str, dtype: str, tmp_path: Path) -> None:
    assert BuildOptions(dtype=alias).dtype == dtype
    assert load_options(config(tmp_path, f"dtype: {alias}"), {}).dtype == dtype


def test_all_invalid_values_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        BuildOptions(
            target="gpu", dtype="int4", max_batch_size=0, max_seq_len=1, tokens_per_page=33, weights="else"
        )
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "target",
        "dtype",
        "max_batch_size",
        "max_seq_len",
        "tokens_per_page",
        "weights",
    ]
    assert "'33'" in lines[4]
    assert "power of two" in lines[4]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_batch_size", True, "an integer"),
        ("max_batch_size", "8", "an integer"),
        ("max_seq_len", 12.0, "an integer"),
        ("verify", 1, "true or false"),
        ("target", 3, "text"),
        ("dump", "somewhere", "a path"),
        ("tokens_per_page", None, "an integer"),
    ],
)
def test_wrong_types_are_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{type(value).__name__}.*expected {expected}"):
        BuildOptions(**{name: value})


def test_paths_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError) as caught:
        BuildOptions(timing_cache=tmp_path, dump=file)
    assert "timing_cache" in caught.value.message
    assert "dump" in caught.value.message
    with pytest.raises(UsageError, match="missing is none"):
        BuildOptions(timing_cache=tmp_path / "missing" / "cache.json")


def test_a_step_must_hold_a_token_of_every_request() -> None:
    with pytest.raises(UsageError, match="max_num_tokens: 4 is less than max_batch_size 8"):
        BuildOptions(max_batch_size=8, max_num_tokens=4)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:h100", "cuda:rtx5090"])
def test_known_gpus_are_targets(target: str) -> None:
    assert BuildOptions(target=target).target == target


@pytest.mark.parametrize("target", ["cuda:sm_91", "cuda:h1000"])
def test_an_unknown_gpu_is_refused_with_what_there_is(target: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{target}.*h100.*sm_90"):
        BuildOptions(target=target)


def test_cuda_alone_names_no_gpu() -> None:
    with pytest.raises(UsageError, match="target: 'cuda' is invalid, expected a GPU with it"):
        BuildOptions(target="cuda")


def test_an_invalid_value_is_told_before_an_unsupported_target() -> None:
    with pytest.raises(UsageError, match="max_batch_size"):
        BuildOptions(target="cuda:sm_91", max_batch_size=0)


def test_flag_over_file_over_default(tmp_path: Path) -> None:
    path = config(tmp_path, "max-batch-size: 16\nmax_num_tokens: 256\n")
    options = load_options(path, {"max_batch_size": 4})
    assert (options.max_batch_size, options.max_num_tokens, options.tokens_per_page) == (4, 256, 32)


def test_a_file_sets_every_option(tmp_path: Path) -> None:
    values = {name: str(v) if isinstance(v, Path) else v for name, v in OTHER.items()}
    text = "".join(f"{name.replace('_', '-')}: {str(v).lower()}\n" for name, v in values.items())
    assert load_options(config(tmp_path, text), {}) == BuildOptions(**OTHER)


def test_unknown_keys_name_the_nearest_and_all_problems_come_at_once(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        """\
max-batchsize: 2
no-verify: true
quantise: none
seed: no
weights: here
xyzzy: 1
""",
    )
    with pytest.raises(UsageError) as caught:
        load_options(path, {})
    lines = caught.value.message.splitlines()
    assert len(lines) == 6
    assert lines[0] == f"{path}:1: max-batchsize: unknown key, did you mean max-batch-size?"
    assert lines[1].endswith("did you mean verify?")
    assert lines[2].endswith("did you mean quantize?")
    assert "build.yaml:4: seed: False is of type bool, expected an integer" in lines[3]
    assert "expected one of embedded, shared" in lines[4]
    assert lines[5].endswith("xyzzy: unknown key")


@pytest.mark.parametrize("second", ["seed: 2", "'seed': 2"])
def test_a_key_given_twice_is_an_error(tmp_path: Path, second: str) -> None:
    with pytest.raises(UsageError, match=r"build\.yaml:2: seed: given twice"):
        load_options(config(tmp_path, f"seed: 1\n{second}\n"), {})
    with pytest.raises(UsageError, match="max_seq_len: given twice"):
        load_options(config(tmp_path, "max-seq-len: 64\nmax_seq_len: 64\n"), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("- a\n", "holds a list"), ("a: [", "not valid YAML"), ("just text", "holds a str"), ("\xff", "YAML")],
)
def test_files_that_hold_no_options(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "build.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=expected):
        load_options(path, {})


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_options(config(tmp_path, "# nothing\n"), {}) == BuildOptions()


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_options(tmp_path / "none.yaml", {})


def test_effective_is_plain_data() -> None:
    effective = BuildOptions(**OTHER).effective()
    assert effective["timing_cache"] == "cache.json"
    assert all(isinstance(v, (str, int, bool)) for v in effective.values())


@pytest.mark.parametrize("name", sorted(OTHER))
def test_identity_follows_exactly_the_options_that_change_the_engine(name: str) -> None:
    cosmetic = {"timing_cache", "require_timed", "pack", "revision", "keep_onnx", "dump", "dry_run"}
    changed = BuildOptions(**{name: OTHER[name]})
    assert (changed.identity() == BuildOptions().identity()) == (name in cosmetic)


VALUES = st.none() | st.integers() | st.text() | st.booleans()


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES))
def test_any_values_give_options_or_a_usage_error_that_names_them(values: dict[str, Any]) -> None:
    try:
        options = BuildOptions(**values)
    except UnsupportedError:
        assert values["target"].startswith("cuda")
    except UsageError as error:
        assert all(line.split(":")[0] in values for line in error.message.splitlines())
    else:
        assert options.effective().keys() == FIELDS.keys()
