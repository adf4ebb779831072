"""Matrix files: which engines they ask for, and everything that is wrong with them at once."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.matrix.plan import select
from tapeout.compiler.matrix.schema import EngineSpec, load_matrix
from tapeout.plugins.errors import UsageError

FULL = """
    defaults:
      dtype: bf16
      max-batch-size: 4
    models:
      small: org/small
      large: {model: ./large, max-batch-size: 2, revision: v1}
    targets:
      cpu: {dtype: float32, max-seq-len: 128}
      cuda:h200: {max-batch-size: 64}
      cuda:sm_80:
    exclude:
      - {model: large, target: cpu}
      - target: cuda:sm_80
    include:
      - {model: small, target: cuda:h200, max_batch_size: 128}
      - {model: small, target: cpu, name: cpu-int8, quantize: int8-dynamic}
      - {model: large, target: cuda:l4, max-seq-len: 64}
"""


def load(tmp_path: Path, text: str, **flags: Any) -> dict[str, EngineSpec]:
    path = tmp_path / "engines.yaml"
    path.write_text(textwrap.dedent(text))
    specs = load_matrix(path, flags)
    assert len({s.title for s in specs}) == len(specs)
    return {spec.title: spec for spec in specs}


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    caught.value.render().encode()
    return [line.removeprefix(f"{tmp_path}/") for line in caught.value.message.splitlines()]


class TestEngines:
    def test_product_exclude_include(self, tmp_path: Path) -> None:
        specs = load(tmp_path, FULL)
        assert list(specs) == ["small/cpu", "small/h200", "small/cpu-int8", "large/h200", "large/l4"]
        assert {t: s.options.target for t, s in specs.items()} == {
            "small/cpu": "cpu", "small/h200": "cuda:h200", "small/cpu-int8": "cpu",
            "large/h200": "cuda:h200", "large/l4": "cuda:l4",
        }  # fmt: skip
        assert {s.source for t, s in specs.items() if t.startswith("large")} == {"./large"}
        assert specs["small/cpu-int8"].file == "cpu-int8.engine"

    def test_pair_over_model_over_target_over_default(self, tmp_path: Path) -> None:
        options = {title: spec.options for title, spec in load(tmp_path, FULL).items()}
        assert {t: o.max_batch_size for t, o in options.items()} == {
            "small/cpu": 4, "small/h200": 128, "small/cpu-int8": 4, "large/h200": 2, "large/l4": 2
        }  # fmt: skip
        assert {t: o.dtype for t, o in options.items()} == {
            "small/cpu": "float32", "small/h200": "bfloat16", "small/cpu-int8": "float32",
            "large/h200": "bfloat16", "large/l4": "bfloat16",
        }  # fmt: skip
        # A further engine of a pair gets what the pair's target says, not what another engine was given.
        assert options["small/cpu-int8"].max_seq_len == 128
        assert options["small/cpu"].quantize == "none"
        assert options["large/l4"].revision == options["large/h200"].revision == "v1"

    def test_weights_are_shared_unless_the_file_says_otherwise(self, tmp_path: Path) -> None:
        text = "models: {m: ./m}\ntargets: {cpu: , 'cuda:a100': {weights: embedded}}"
        assert [s.options.weights for s in load(tmp_path, text).values()] == ["shared", "embedded"]

    def test_targets_as_a_list(self, tmp_path: Path) -> None:
        specs = load(tmp_path, "models: {m: ./m}\ntargets: [cpu, 'cuda:sm_90']")
        assert list(specs) == ["m/cpu", "m/sm_90"]

    def test_include_alone_is_a_matrix(self, tmp_path: Path) -> None:
        specs = load(tmp_path, "models: {m: ./m}\ninclude: [{model: m, target: cuda:h100}]")
        assert list(specs) == ["m/h100"]

    def test_flags_stand_over_the_file(self, tmp_path: Path) -> None:
        specs = load(tmp_path, FULL, max_batch_size=7, verify=False)
        assert {(s.options.max_batch_size, s.options.verify) for s in specs.values()} == {(7, False)}

    def test_aliases_of_yaml_are_values(self, tmp_path: Path) -> None:
        text = "models: {m: ./m}\ntargets: {cpu: &o {seed: 3}, 'cuda:l4': *o}"
        assert [s.options.seed for s in load(tmp_path, text).values()] == [3, 3]


class TestSelection:
    def test_patterns(self, tmp_path: Path) -> None:
        specs = list(load(tmp_path, FULL).values())
        assert [s.title for s in select(specs, ["*/h200"])] == ["small/h200", "large/h200"]
        assert [s.title for s in select(specs, ["large/l4", "small/cpu*"])] == [
            "small/cpu", "small/cpu-int8", "large/l4"
        ]  # fmt: skip
        assert len(select(specs, [])) == 5

    def test_a_pattern_that_matches_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no engine is called 'x/\*', 'small/h100'") as caught:
            select(list(load(tmp_path, FULL).values()), ["x/*", "small/cpu", "small/h100"])
        assert "small/cpu-int8" in str(caught.value.hint)


class TestProblems:
    def test_all_are_listed_at_once(self, tmp_path: Path) -> None:
        found = problems(
            tmp_path,
            """
            default: {dtype: bf16}
            models:
              a/b: ./x
              m: {modle: ./m}
              n: {model: ./n, max-batch-sise: 3, target: cpu}
              N: ./n
              t: 7
            targets:
              cpu: {dtype: fp8, revision: main, pack: x}
              auto:
              cuda:h300:
              gpu:
            exclude: [{modell: m}, 3, {}]
            include:
              - {model: nn, target: cpu}
              - {model: n}
              - {model: n, target: cuda:l4, name: ../x}
            """,
        )
        expected = {
            2: "default: unknown key, did you mean defaults?",
            4: "a/b: is no name of a folder",
            5: "m: expected a directory, a .gguf file or a hub id",
            6: "max-batch-sise: unknown key, did you mean max-batch-size?",
            7: "N: differs from 'n' in case alone",
            8: "t: 7 is of type int, expected a directory",
            10: "dtype: 'fp8' is unknown, expected one of auto",
            11: "auto: depends on the machine",
            12: "cuda:h300: target 'cuda:h300' is unknown, expected cuda: and one of a100",
            13: "gpu: is no target, expected cpu, cuda:sm_NN or cuda:SKU",
            14: "modell: unknown key, did you mean model?",
            16: "model: 'nn' is none of the models, did you mean n?",
            17: "expected a `model` and a `target`",
            18: "name: '../x' is no name of a file",
        }
        for line, text in expected.items():
            assert any(p.startswith(f"engines.yaml:{line}: {text}") for p in found), (line, text, found)
        assert any("target: not in a matrix: targets are the keys" in p for p in found)
        assert any("revision: belongs to a model" in p for p in found)
        assert any("pack: not in a matrix: `--stage compile` writes packs" in p for p in found)
        assert any("modle: unknown key, did you mean model?" in p for p in found)

    def test_what_is_repeated_is_told_once(self, tmp_path: Path) -> None:
        assert problems(tmp_path, "models: {m: ./m}\ntargets: [cpu, cpu]") == [
            "engines.yaml:2: cpu: given twice"
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "holds nothing, expected the keys defaults, models, targets, include, exclude"),
            ("[1]", "holds a list"),
            ("models: {m: ./m}", "no 'targets', expected at least one"),
            ("models: [m]\ntargets: [cpu]", "models are of type list"),
            (
                "models: {m: ./m}\ntargets: cpu",
                "targets are of type str, expected a list, or a mapping to opt",
            ),
            ("models: {Packs: ./m}\ntargets: [cpu]", "Packs: is the folder of packs"),
            ("models: {m: ./m, m: ./n}\ntargets: [cpu]", "m: given twice"),
            ("models: {m: ./m}\nmodels: {m: ./m}\ntargets: [cpu]", "models: given twice"),
            ("models: {m: ./m}\ntargets: {cpu: 3}", "3 is of type int, expected options"),
            ("models: {m: ./m}\ntargets: [cpu]\nexclude: [{model: m}]", "asks for no engine"),
            ("models: {m: ./m}\ntargets: [cpu]\nexclude: {model: m}", "expected a list"),
            ("models: {m: ./m}\ntargets: [cpu]\nexclude: [{target: cpu}, {model: m}]", "not there"),
            ("models: {m: ./m}\ntargets: [cpu]\nexclude: [{}]", "excludes everything"),
            (
                "models: {m: ./m}\ntargets: [cpu]\ninclude: [{model: m, target: 'cuda:l4', name: cpu}]",
                "m/cpu is there already, for cpu",
            ),
            (
                "models: {m: ./m}\ntargets: [cpu]\ninclude: [&e {model: m, target: cpu}, *e]",
                "m/cpu is given in line 3 already",
            ),
            ("models: {m: ./m}\ntargets: {'cuda:l4': {quantize: int8-dynamic}}", "has no kernels on cuda:l4"),
            ("defaults: {<<: {seed: 1}}\nmodels: {m: ./m}\ntargets: [cpu]", "<<: unknown key"),
            ("models: &m [*m]\ntargets: [cpu]", "is not valid YAML"),
            ("models: {m: ./m}\ntargets: {cpu: {max-batch-size: 8, max-num-tokens: 4}}", "m/cpu: max_num"),
        ],
    )
    def test_a_file_that_cannot_be_meant(self, tmp_path: Path, text: str, message: str) -> None:
        assert any(message in line for line in problems(tmp_path, text)), problems(tmp_path, text)
