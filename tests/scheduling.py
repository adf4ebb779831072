"""Which tests stay together on one worker, and which of them begin first."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

#: Beginnings of tests' ids that share what takes long: engines, processes with imports done, traces.
TOGETHER = {
    "tests/e2e/": "smollm2",
    "tests/runtime/executors/cuda/": "cuda engine",
    "tests/compiler/tensorrt/": "tensorrt",
    **{
        f"tests/compiler/test_{name}.py": "families"
        for name in ("dummy_weights", "ir", "lower", "parity", "pipeline", "plan", "recipes", "trace")
    },
    "tests/ci/test_scripts.py": "preloaded",
    "tests/compiler/matrix/test_build_matrix": "preloaded",
    "tests/compiler/test_peak_memory.py": "preloaded",
    "tests/compiler/refit/": "refit",
}
#: CPU seconds of what takes more than a few, roughly: it begins first, so that no worker waits at the end.
SECONDS = {
    "smollm2": 400,
    "preloaded": 120,
    "tests/compiler/test_repeated_layers.py": 100,
    "tests/compiler/test_families.py": 90,
    "tests/plugins/test_cuda_numerics.py": 80,
    "families": 70,
    "tensorrt": 70,
    "tests/plugins/test_native.py": 57,
    "tests/compiler/test_config_use.py": 52,
    "tests/compiler/test_weight_file.py": 50,
    "refit": 45,
    "tests/compiler/test_gpu_cublaslt.py": 40,
    "tests/compiler/test_build.py": 36,
    "tests/compiler/test_gpu_build.py": 31,
    "cuda engine": 35,
    "tests/runtime/tactic_timer/test_interpreted.py": 30,
    "tests/runtime/tactic_timer/test_interpreted_region.py": 30,
    "tests/compiler/test_front_end.py": 25,
    "tests/plugins/test_cuda_compile.py": 25,
    "tests/compiler/test_cuda_plan.py": 22,
    "tests/cli/test_run_output.py": 25,
    "tests/cli/test_run.py": 18,
    "tests/runtime/tactic_timer/test_session.py": 13,
    "tests/model_defs/test_gguf.py": 10,
    "tests/runtime/test_loop_reuse.py": 10,
    "tests/test_repo_imports.py": 9,
    "tests/compiler/test_onnx_export.py": 12,
    "tests/test_repo_packaging.py": 12,
    "tests/plugins/test_tactics.py": 10,
}


class Scheduling(LoadFileScheduling):
    """Tests of one file go to one worker, so that what they share is made once; so do those of TOGETHER.

    A worker that wants more gets the longest that is left.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((TOGETHER[f] for f in TOGETHER if nodeid.startswith(f)), super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        queue = self.workqueue
        longest = max(queue, key=lambda scope: SECONDS.get(scope, 0.02 * len(queue[scope])))
        queue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
