"""Recipes: what they compute, how much memory they take, and how they fail."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import Step, WeightRef, recipe_digest, run_recipe
from tapeout.plugins.errors import TapeoutError, UnsupportedError


class Store:
    """A checkpoint in memory that counts reads."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.reads: list[str] = []
        self.infos = {n: TensorInfo(n, a.dtype.name, a.shape) for n, a in arrays.items()}

    def __call__(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.arrays[name].copy()

    def ref(self, name: str) -> WeightRef:
        return WeightRef.of(self.infos[name])


@pytest.fixture
def store() -> Store:
    rng = np.random.default_rng(0)
    return Store(
        q=rng.standard_normal((6, 4), np.float32),
        k=rng.standard_normal((2, 4), np.float32),
        v=rng.standard_normal((2, 4), np.float32),
        norm=rng.standard_normal(4, np.float32),
        half=rng.standard_normal((3, 4)).astype(np.float16),
    )


def test_concat_of_casts_equals_cast_of_concat(store: Store) -> None:
    ref = WeightRef.concat([store.ref(n) for n in "qkv"]).cast("bfloat16")
    whole = np.concatenate([store.arrays[n] for n in "qkv"]).astype(ml_dtypes.bfloat16)
    assert (ref.dtype, ref.shape) == ("bfloat16", (10, 4))
    assert (
        ref.text()
        == "concat(cast(q; dtype=bfloat16), cast(k; dtype=bfloat16), cast(v; dtype=bfloat16); dim=0)"
    )
    np.testing.assert_array_equal(run_recipe(ref, store), whole)


def test_steps_nest_and_chain(store: Store) -> None:
    joined = WeightRef.concat([store.ref("q").transpose(), store.ref("k").transpose()], dim=1)
    ref = joined.slice(1, 2, 7).transpose().cast("float16")
    expected = np.concatenate([store.arrays["q"].T, store.arrays["k"].T], 1)[:, 2:7].T.astype(np.float16)
    result = run_recipe(ref, store)
    np.testing.assert_array_equal(result, expected)
    assert result.flags.c_contiguous
    assert list(ref.source_names()) == ["q", "k"]


def test_recipes_of_bare_names_run_too(store: Store) -> None:
    ref = WeightRef(
        ("q", "k"), (Step("concat", (("dim", 0),)), Step("cast", (("dtype", "float16"),))), "float16", (8, 4)
    )
    expected = np.concatenate([store.arrays["q"], store.arrays["k"]]).astype(np.float16)
    np.testing.assert_array_equal(run_recipe(ref, store), expected)


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=3, max_side=5),
        elements=st.floats(-1e4, 1e4, width=32),
    ),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_casts_round_to_nearest_even(x: np.ndarray, dtype: str) -> None:
    ref = WeightRef.of(TensorInfo("x", "float32", x.shape)).cast(dtype)
    result = run_recipe(ref, lambda _: x)
    expected = torch.from_numpy(x.copy()).to(getattr(torch, dtype))
    np.testing.assert_array_equal(result.view(np.int16), expected.view(torch.int16).numpy())


def test_overflowing_cast_names_the_tensor() -> None:
    x = np.array([[1.0, 7e4]], np.float32)
    ref = WeightRef.of(TensorInfo("model.norm.weight", "float32", (1, 2))).cast("float16")
    with pytest.raises(TapeoutError, match=r"model\.norm\.weight.*70000") as error:
        run_recipe(ref, lambda _: x)
    assert "bfloat16" in (error.value.hint or "")


@given(hnp.arrays(np.float32, (5, 7), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_quantized_rows_are_within_half_a_step(x: np.ndarray) -> None:
    x[2] = 0
    plain = WeightRef.of(TensorInfo("x", "float32", x.shape))
    values = run_recipe(plain.quantize_rows("values"), lambda _: x)
    scales = run_recipe(plain.quantize_rows("scales"), lambda _: x)
    assert (values.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (5,))
    assert scales[2] == 1.0
    assert values.min() >= -127
    error = np.abs(values.astype(np.float64) * scales[:, None].astype(np.float64) - x)
    assert (error <= 0.5001 * scales[:, None].astype(np.float64) + 1e-36).all()


def test_quantization_rounds_half_to_even() -> None:
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    values = run_recipe(
        WeightRef.of(TensorInfo("x", "float32", x.shape)).quantize_rows("values"), lambda _: x
    )
    assert values.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_quantizing_a_concat_equals_quantizing_the_whole(store: Store) -> None:
    fused = WeightRef.concat([store.ref(n) for n in "qkv"])
    whole = np.concatenate([store.arrays[n] for n in "qkv"])
    plain = WeightRef.of(TensorInfo("whole", "float32", whole.shape))
    for part in ("values", "scales"):
        expected = run_recipe(plain.quantize_rows(part), lambda _: whole)
        np.testing.assert_array_equal(run_recipe(fused.quantize_rows(part), store), expected)


def test_impossible_recipes_are_refused_with_names(store: Store) -> None:
    with pytest.raises(UnsupportedError, match=r"q: float32\[6, 4\]\n.*half: float16\[3, 4\]"):
        WeightRef.concat([store.ref("q"), store.ref("half")])
    with pytest.raises(UnsupportedError, match="norm: transpose needs 2"):
        store.ref("norm").transpose()
    with pytest.raises(UnsupportedError, match=r"slice \[3, 9\)"):
        store.ref("q").slice(0, 3, 9)
    with pytest.raises(UnsupportedError, match="cannot cast float32 to int4"):
        store.ref("q").cast("int4")


def test_a_source_of_another_shape_is_named(store: Store) -> None:
    ref = WeightRef.concat([store.ref("q"), store.ref("k")])
    store.arrays["k"] = np.zeros((3, 4), np.float32)
    with pytest.raises(TapeoutError, match=r"weight k is float32\[3, 4\], expected float32\[2, 4\]"):
        run_recipe(ref, store)


def test_digest_changes_with_everything_that_changes_bytes(store: Store) -> None:
    store.arrays["const:freq"] = np.ones(2, np.float32)
    weights = {"a": store.ref("q"), "freq": WeightRef.const("freq", "float32", (2,))}
    digest = recipe_digest(weights, "source", store)
    assert store.reads == ["const:freq"]  # known before any weight is read
    assert digest == recipe_digest(dict(weights), "source", store)
    changed = [
        recipe_digest(weights, "other source", store),
        recipe_digest({**weights, "a": store.ref("q").cast("bfloat16")}, "source", store),
        recipe_digest({"b": weights["a"], "freq": weights["freq"]}, "source", store),
        recipe_digest(weights, "source", lambda _: np.zeros(2, np.float32)),
    ]
    assert len({digest, *changed}) == 5


def test_peak_memory_is_result_plus_largest_source() -> None:
    rows, columns, parts = 4096, 512, 4
    infos = [TensorInfo(str(i), "float32", (rows, columns)) for i in range(parts)]
    fused_bytes = parts * rows * columns * 4
    for ref in (
        WeightRef.concat([WeightRef.of(i) for i in infos]),
        WeightRef.concat([WeightRef.of(i) for i in infos]).cast("bfloat16"),
        WeightRef.concat([WeightRef.of(i).transpose() for i in infos]),
    ):
        tracemalloc.start()
        result = run_recipe(ref, lambda _: np.ones((rows, columns), np.float32))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= result.nbytes + fused_bytes // parts + (16 << 20)
        assert peak < 2 * fused_bytes
