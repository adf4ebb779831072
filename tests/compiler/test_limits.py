"""What the user left open: limits and dtype from the model, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapeout.compiler.limits import resolve_dtype, resolve_limits
from tapeout.compiler.options import BuildOptions
from tapeout.plugins.errors import UnsupportedError, UsageError
from tapeout.runtime.engine.manifest import Limits


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_position_embeddings": 2048, "dtype": None, **values})


@pytest.mark.parametrize(("positions", "length"), [(512, 512), (4096, 4096), (131_072, 4096)])
def test_defaults_follow_the_models_positions(positions: int, length: int) -> None:
    limits = resolve_limits(BuildOptions(), config(max_position_embeddings=positions))
    assert limits == Limits(max_batch_size=8, max_num_tokens=512, max_seq_len=length, tokens_per_page=32)


def test_a_gpu_has_larger_defaults() -> None:
    limits = resolve_limits(BuildOptions(target="cuda:sm_90"), config())
    assert (limits.max_batch_size, limits.max_num_tokens) == (64, 2048)


def test_a_gpu_refuses_float16_under_its_name() -> None:
    with pytest.raises(UnsupportedError, match="not supported on target cuda:h100"):
        resolve_dtype(BuildOptions(target="cuda:h100"), config(dtype=torch.float16))


def test_what_is_asked_for_counts() -> None:
    options = BuildOptions(max_batch_size=3, max_num_tokens=20, max_seq_len=100, tokens_per_page=16)
    assert resolve_limits(options, config()) == Limits(3, 20, 100, 16)


def test_a_large_batch_raises_the_default_tokens() -> None:
    assert resolve_limits(BuildOptions(max_batch_size=700), config()).max_num_tokens == 700


def test_every_bad_limit_is_listed() -> None:
    options = BuildOptions(max_seq_len=4096, max_num_tokens=4)
    with pytest.raises(UsageError) as caught:
        resolve_limits(options, config())
    assert caught.value.message.splitlines() == [
        "max_seq_len: 4096 is more than the model's 2048 positions",
        "max_num_tokens: 4 is less than max_batch_size 8",
    ]
    assert caught.value.hint == (
        "--max-seq-len is at most 2048 for this model; lower --max-batch-size or raise --max-num-tokens"
    )


@pytest.mark.parametrize(
    ("asked", "checkpoint", "dtype"),
    [
        ("auto", torch.bfloat16, "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", None, "float32"),
        ("float32", torch.bfloat16, "float32"),
        ("bf16", torch.float32, "bfloat16"),
        ("bfloat16", torch.float16, "bfloat16"),
    ],
)
def test_auto_takes_the_checkpoints_dtype_and_a_choice_wins(asked: str, checkpoint: Any, dtype: str) -> None:
    assert resolve_dtype(BuildOptions(dtype=asked), config(dtype=checkpoint)) == dtype


@pytest.mark.parametrize(
    ("asked", "checkpoint", "whose", "advice"),
    [
        ("fp16", torch.float32, "", "hint: pass --dtype bfloat16 or --dtype float32"),
        ("fp16", torch.float16, "", "or --dtype float32: every weight as it is"),
        ("auto", torch.float16, ", the checkpoint's,", "or --dtype float32: every weight as it is"),
        ("auto", torch.float64, ", the checkpoint's,", "hint: pass --dtype bfloat16 or --dtype float32"),
    ],
)
def test_a_dtype_the_target_cannot_compute_in(asked: str, checkpoint: Any, whose: str, advice: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolve_dtype(BuildOptions(dtype=asked), config(dtype=checkpoint))
    name = "float64" if checkpoint is torch.float64 else "float16"
    assert caught.value.message == (
        f"dtype '{name}'{whose} is not supported on target cpu, expected one of float32, bfloat16"
    )
    assert "--dtype bfloat16" in caught.value.render()
    assert advice in caught.value.render()
    assert caught.value.exit_code == 5
