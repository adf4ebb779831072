"""`tapeout build --pack`: the tactics of a model for a GPU, compiled to be timed where the GPU is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapeout.compiler.files import check_output
from tapeout.compiler.front_end import FrontEnd, Stages
from tapeout.compiler.limits import target_kind
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.outputs import check_apart
from tapeout.compiler.plan import order_of, signatures_of
from tapeout.compiler.progress import Progress, SilentProgress
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_decide import open_contests
from tapeout.compiler.tactics.gpu_pack import make_pack, write_pack
from tapeout.compiler.targets import cuda_target
from tapeout.compiler.tensorrt.choice import check_segments
from tapeout.compiler.tensorrt.competition import rivals_of
from tapeout.plugins.errors import UsageError


@dataclass(frozen=True)
class PackReport:
    """What was packed.

    Attributes:
        entries: decisions to take: an op at a bucket of rows in one kind of step.
        candidates: tactics that compete for them. kernels: distinct cubins.
        segments: of TensorRT's, that compete for whole regions. no_segments: why there are none.
        stage_seconds: stage name to wall seconds, in order.
    """

    pack: Path
    target: str
    dtype: str
    entries: int
    candidates: int
    kernels: int
    segments: int
    no_segments: str
    file_bytes: int
    stage_seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "pack": str(self.pack)}


def build_pack(
    model: str,
    options: BuildOptions,
    progress: Progress | None = None,
    inputs: tuple[Path, ...] = (),
    *,
    front_end: FrontEnd | None = None,
) -> PackReport:
    """Write the pack `options.pack`: every tactic that the timing cache, if one is given, does not know, and
    all of a bucket whose whole step it does not know.

    Args: as `build`'s.

    Raises:
        TapeoutError: see its subclasses; nothing appears under the pack's name then.
    """
    path = options.pack
    if path is None:
        raise UsageError("no pack is named", hint="tapeout build MODEL --target cuda:SKU --pack FILE")
    if target_kind(options) != "cuda":
        raise UsageError(
            f"pack: tactics for {options.target} are timed while building, expected a GPU as target",
            hint="--target cuda:sm_NN or cuda:SKU (for example cuda:h200)",
        )
    check_output(path, "pack")
    check_segments(options)
    check_apart(None, options, inputs)
    cache = TimingCache.load(options.timing_cache)
    stages = Stages(progress or SilentProgress())
    front_end = front_end or FrontEnd(model)
    lowered = front_end.lower(options, stages, lambda s: check_apart(None, options, s.files))
    limits, signatures = lowered.limits, signatures_of(lowered.module)
    target = replace(cuda_target(options.target), tokens_per_page=limits.tokens_per_page)
    with stages("pack", options.target) as stage:
        order = order_of(lowered.module)
        rivals = rivals_of(lowered.module, lowered.dtype, limits, target.sm, options, stage.update)
        open_ = open_contests(signatures, order, limits, target, options.target, options, cache, rivals)
        file = make_pack(
            open_.contests, limits, target, options.target, stage.update, open_.steps, open_.regions, rivals
        )
        size = write_pack(file, path)
        stage.update(
            f"{file.pack.num_candidates} candidates at {len(file.pack.entries)} places, "
            f"{len(file.pack.steps)} whole steps, {len(file.pack.region_cases)} regions"
        )
    return PackReport(
        path,
        options.target,
        lowered.dtype,
        len(file.pack.entries),
        file.pack.num_candidates,
        len(file.cubins),
        len(file.plans),
        rivals.absent,
        size,
        dict(stages.seconds),
    )
