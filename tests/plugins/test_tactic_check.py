"""Made-up operands and the comparison of results: on the GPU (interpreted here) and in numpy the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tapeout.plugins.tactic_check.hashed import factor_of, integers, normals, permutation, seed_of
from tapeout.plugins.tactic_check.tools import tool_name, tool_specs
from tapeout.plugins.triton_aot.digest import kernel_function


def test_the_kernels_do_what_numpy_does() -> None:
    command = [sys.executable, "-W", "ignore", "interpret_tools.py"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * (1 + 2 + 8 + 3) + 4 + 1
    assert not [r for r in rows if r["problem"] is not None]


def test_tools_fit_their_kernels() -> None:
    specs = dict(tool_specs(["float32", "bfloat16"]))
    assert len(specs) == 4 * 2 + 1 + 1
    for spec in specs.values():
        assert [*(name for name, _ in spec.signature), *spec.constants] == kernel_function(spec).arg_names
    assert tool_name("compare", "bfloat16") in specs
    assert tool_name("fill_integers") in specs


def test_elements_do_not_depend_on_what_is_asked_with_them() -> None:
    some = normals(5, np.array([7, 90_000]), np.array([3, 128_000]), 1.0)
    alone = normals(5, np.array([90_000]), np.array([128_000]), 1.0)
    assert some[1, 1] == alone[0, 0]


def test_values_look_random() -> None:
    many = normals(11, np.arange(400), np.arange(300), factor_of(0.02))
    assert abs(many.mean()) < 2e-4
    assert many.std() == pytest.approx(0.02, rel=0.01)
    for a, b in ((many[1:], many[:-1]), (many[:, 1:], many[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    other = normals(12, np.arange(400), np.arange(300), 1.0)
    assert abs(np.corrcoef(many.ravel(), other.ravel())[0, 1]) < 0.01
    ids = integers(3, np.zeros(1), np.arange(9000), 10)
    assert (ids.min(), ids.max()) == (0, 9)
    assert np.bincount(ids[0]).std() < 60
    assert sorted(permutation(4, 50).tolist()) == list(range(50))
    assert seed_of("a") == 0x68B7BE43  # the same on every machine
