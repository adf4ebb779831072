"""Option files and values that Python itself stumbles over are usage errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.compiler.options import BuildOptions
from tapeout.compiler.options_file import load_options
from tapeout.plugins.errors import UsageError


@pytest.mark.parametrize(
    "text",
    [
        "dtype: 2001-99-99",
        "max-batch-size: 0x_",
        "max-batch-size: 0b_",
        "max-batch-size: " + "1" * 5000,
        "max-batch-size: 0x" + "f" * 5000,
        "0x" + "f" * 5000 + ": 1",
        "max-batch-size: " + "[" * 5000,
        "[" * 5000,
        'timing-cache: "\\ud800"',
        'revision: "\\ud800"',
        '"\\ud800": 1',
        "? [1]\n: 2",
        "dump: ~no-such-user-anywhere/x\nseed: no",
    ],
)
def test_a_file_that_cannot_be_understood(tmp_path: Path, text: str) -> None:
    (tmp_path / "build.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_options(tmp_path / "build.yaml", {})
    caught.value.render().encode()  # can be printed
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("name", "most"), [("max_batch_size", 2**20), ("max_num_tokens", 2**24), ("max_seq_len", 2**24)]
)
def test_limits_have_an_upper_bound(name: str, most: int) -> None:
    BuildOptions(**{name: most})
    for value in (most + 1, 10**30, 10**5000):
        with pytest.raises(UsageError, match=f"{name}: .*expected an integer from [12] to {most}"):
            BuildOptions(**{name: value})


def test_a_seed_fits_a_generator() -> None:
    with pytest.raises(UsageError, match="seed"):
        BuildOptions(seed=2**63)
