"""`tapeout time`: time a pack on a GPU of this machine, keep the outcomes in a timing cache and TensorRT's
segments beside it.

Nothing here needs torch or Triton: it runs where only the runtime is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tapeout.compiler.files import check_output
from tapeout.compiler.tactics.cache import TimingCache
from tapeout.compiler.tactics.gpu_cache import Gpu, gpus_meant
from tapeout.compiler.tactics.gpu_timed_pack import TimedPack, record
from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.segment_cache import SegmentCache, kept_folder, take_over
from tapeout.plugins.errors import UsageError
from tapeout.runtime.tactic_timer.pack import Pack
from tapeout.runtime.tactic_timer.pack_file import PackFile, read_pack
from tapeout.runtime.tactic_timer.results import PackTimes
from tapeout.runtime.tactic_timer.session import time_pack


def time_into_cache(
    pack_path: Path,
    cache_path: Path,
    *,
    earlier_path: Path | None = None,
    device: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> TimedPack:
    """Time a pack; add what was found to the cache file, which is made when there is none.

    Args:
        earlier_path: a timing cache whose timings the written one gets where it has none of its own.

    Raises:
        UsageError: the pack or a cache cannot be read, the cache cannot be written, the earlier timings
            are of another GPU that the pack's target could mean; told before anything is timed.
        EngineCorruptError: the pack is damaged. EngineIncompatibleError: the GPU cannot run it.
    """
    if cache_path.exists() and cache_path.samefile(pack_path):
        raise UsageError(f"{cache_path} is the pack, which would be lost", hint="name another file with -o")
    check_output(cache_path, "timing cache")
    cache = TimingCache.load(cache_path)
    file = read_pack(pack_path)
    earlier = TimingCache.load(earlier_path)
    cache.add_missing(earlier)
    times = time_pack(
        pack_path,
        file.pack,
        device=device,
        progress=progress,
        check_gpu=lambda facts: _check_same(Gpu.of(facts), earlier, file.pack),
    )
    done = record(file.pack, times, cache)
    # Segments first: a cache never speaks of one that is lost.
    _keep_segments(file, times, cache_path)
    if earlier_path is not None:
        take_over(earlier_path, cache_path)
    cache.save()
    return done


def _check_same(gpu: Gpu, earlier: TimingCache, pack: Pack) -> None:
    """Raise UsageError where no engine of the pack's target could be built from both: times of two GPUs."""
    others = [other.text() for other in gpus_meant(earlier, pack.target, pack.sm) if other != gpu]
    if others:
        raise UsageError(
            f"{earlier.path} holds timings of {', '.join(others)}, this GPU is {gpu.text()}: {pack.target} "
            "could mean both, and an engine takes times of one",
            hint="time on the same model, or remove that file and pack again, so that all is timed anew",
        )


def _keep_segments(file: PackFile, times: PackTimes, cache_path: Path) -> None:
    """Put segments that were timed beside the cache, where a build finds them."""
    regions, cases = file.pack.regions, file.pack.region_cases
    timed = {regions[cases[i].region].segment for i, r in times.regions.items() if r.time_us is not None}
    for number in sorted(timed):
        packed = file.pack.segments[number]
        segment = packed.segment
        cache = SegmentCache(
            kept_folder(cache_path), segment.package, segment.version, file.pack.sm, packed.gpu
        )
        cache.put_as(packed.key, Built(file.plans[segment.blob], segment.layers, packed.seconds))
