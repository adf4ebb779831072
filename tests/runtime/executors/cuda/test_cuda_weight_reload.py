"""Other weights on a GPU: copied to the places of the old ones, so that captured graphs read them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_cuda import FakeCuda
from next_token import NextToken

from tapeout.compiler.engine_writer import stage_engine
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime import LLM
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.executors.cuda import CudaExecutor
from tapeout.runtime.step import StepInputs

Step = Callable[..., StepInputs]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def other(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """The same program with every weight's values in another order."""

    def read(name: str) -> np.ndarray:
        weight = engine.weight(name)
        dtype = ml_dtypes.bfloat16 if weight.dtype == "bfloat16" else np.dtype(weight.dtype)
        return np.frombuffer(weight.data, dtype)[::-1].reshape(weight.shape).copy()

    with stage_engine(
        tmp_path / "other.engine",
        engine.manifest,
        engine.program,
        {n: WeightRef.of(TensorInfo(n, w.dtype, w.shape)) for n, w in engine.weights.items()},
        read,
        {name: engine.kernel(name) for name in engine.kernel_names},
        {name: engine.text(name) for name in engine.text_names},
        source_digest="other",
        launches=engine.launches,
    ) as staged:
        staged.commit(engine.manifest)
    with open_engine(tmp_path / "other.engine") as opened:
        yield opened


def on_device(executor: CudaExecutor, engine: Engine) -> dict[str, bytes]:
    address = executor._replay._memory.weights.address
    return {n: ctypes.string_at(address(n), w.size_bytes) for n, w in engine.weights.items()}


def in_file(engine: Engine) -> dict[str, bytes]:
    return {name: bytes(engine.weight(name).data) for name in engine.weights}


def test_they_take_the_places_of_the_old_ones(
    executor: CudaExecutor, engine: Engine, other: Engine, step: Step, cuda: FakeCuda
) -> None:
    assert in_file(other) != in_file(engine)
    executor.admit(0, GREEDY, np.array([5], np.int32))
    executor.submit(step((0, [5], 0, [1])))
    held = dict(cuda.open)
    pointers = [launched.values for launched in cuda.launched]
    executor.load_weights(other)
    assert on_device(executor, engine) == in_file(other)
    assert cuda.open == held, "neither memory nor a graph more"
    del cuda.launched[:]
    executor.submit(step((0, [6], 0, [1])))
    assert [launched.values for launched in cuda.launched] == pointers, "the captured graph runs as it was"


def test_a_copy_that_fails_leaves_nothing_that_runs_until_it_is_repeated(
    executor: CudaExecutor, engine: Engine, other: Engine, step: Step, cuda: FakeCuda
) -> None:
    executor.admit(0, GREEDY, np.array([5], np.int32))
    cuda.fail.add("cuMemcpyHtoDAsync")
    with pytest.raises(TapeoutError, match="copying to the device"):
        executor.load_weights(other)
    cuda.fail.clear()
    for call in (executor.submit, executor.forward):
        with pytest.raises(TapeoutError, match="weights on the GPU are of no use: replacing them failed"):
            call(step((0, [5], 0, [1])))
    executor.load_weights(other)
    assert on_device(executor, engine) == in_file(other)
    assert executor.submit(step((0, [5], 0, [1]))).result().token_ids.tolist() == [6]


def test_through_the_public_api(engine_path: Path, engine: Engine, other: Engine, cuda: FakeCuda) -> None:
    with LLM(str(engine_path), max_tokens_in_kv_cache=128) as llm:
        executor = llm._executor
        assert isinstance(executor, CudaExecutor)
        cuda.on_launch = NextToken(executor, engine)
        prompt = {"prompt_token_ids": list(range(9, 30))}

        def cached() -> int | None:
            (output,) = llm.generate(prompt, GREEDY)
            assert list(output.outputs[0].token_ids) == list(range(30, 35))
            return output.num_cached_tokens

        assert [cached(), cached()] == [0, 16]
        llm.reload_weights(other.path)
        assert on_device(executor, engine) == in_file(other)
        assert [cached(), cached()] == [0, 16], "no page of before was served"
        cuda.fail.add("cuMemcpyHtoDAsync")
        with pytest.raises(TapeoutError):
            llm.reload_weights(engine_path)
        cuda.fail.clear()
        (failed,) = llm.generate(prompt, GREEDY)
        assert failed.outputs[0].finish_reason == "error"
        assert "weights on the GPU are of no use" in str(failed.outputs[0].stop_reason)
        llm.reload_weights(engine_path)
        assert on_device(executor, engine) == in_file(engine)
        assert cached() == 0
    assert not any(cuda.open.values()), cuda.open
