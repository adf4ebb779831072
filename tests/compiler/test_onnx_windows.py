"""Strided windows as reshapes, slices and transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tapeout.compiler.onnx_export.windows import Reshape, Slice, shape_after, window_steps


def test_slices_of_heads_take_one_step() -> None:
    assert window_steps((12, 64), (3, 64), (64, 1), 576) == (Slice(0, 9, 12),)
    assert window_steps((960,), (12, 64), (64, 1), 0) == (Slice(0, 0, 768), Reshape((12, 64)))
    assert window_steps((9, 64), (576,), (1,), 0) == (Reshape((576,)),)


@st.composite
def windows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A row and what is left of it after a few views, as traced models take them."""
    row = torch.arange(draw(st.sampled_from([1, 7, 24, 36, 100]))).reshape(
        draw(st.sampled_from([(-1,), (1, -1), (-1, 1)]))
    )
    view = row
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["narrow", "split", "merge", "transpose", "select"]))
        axis = draw(st.integers(0, view.dim() - 1)) if view.dim() else -1
        if kind == "narrow" and axis >= 0:
            start = draw(st.integers(0, view.shape[axis] - 1))
            view = view.narrow(axis, start, draw(st.integers(1, view.shape[axis] - start)))
        elif kind == "split" and axis >= 0:
            parts = [d for d in range(1, view.shape[axis] + 1) if view.shape[axis] % d == 0]
            view = view.unflatten(axis, (draw(st.sampled_from(parts)), -1))
        elif kind == "merge" and view.is_contiguous() and view.dim() > 1:
            view = view.flatten()
        elif kind == "transpose" and view.dim() > 1:
            view = view.transpose(axis, draw(st.integers(0, view.dim() - 1)))
        elif kind == "select" and view.dim() > 1:
            view = view.select(axis, draw(st.integers(0, view.shape[axis] - 1)))
    return row, view


@given(windows())
@example((torch.arange(100), torch.arange(100)[4:].view(4, 24)[:, 4:]))  # blocks that end with the row
def test_steps_give_exactly_the_window(window: tuple[torch.Tensor, torch.Tensor]) -> None:
    row, view = window
    steps = window_steps(tuple(row.shape), tuple(view.shape), view.stride(), int(view.storage_offset()))
    array, shape = row.numpy(), tuple(row.shape)
    for step in steps:
        shape = shape_after(step, shape)
        if isinstance(step, Reshape):
            array = array.reshape(step.shape)
        elif isinstance(step, Slice):
            array = array.take(range(step.start, step.stop), step.axis)
        else:
            array = array.transpose(step.order)
        assert array.shape == shape
    np.testing.assert_array_equal(array, view.numpy())


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((4, 4), (2, 1), 0),  # overlaps
        ((8, 2), (0, 1), 0),  # repeats
        ((3, 8), (8, 1), 4),  # straddles the end
        ((2, 2), (3, 2), 0),  # neither dimension is a multiple of the other
    ],
)
def test_windows_that_cannot_be_said_are_refused(shape: Any, strides: Any, offset: int) -> None:
    with pytest.raises(ValueError, match=r"stride|offset"):
        window_steps((24,), shape, strides, offset)
