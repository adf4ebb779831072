"""From a lowered module to segments: regions, their ONNX models, engines built in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import Module
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.regions import Body, distinct_bodies, find_regions
from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.choice import crash_note, package_for
from tapeout.compiler.tensorrt.region_onnx import region_onnx
from tapeout.compiler.tensorrt.segment_cache import SegmentCache, kept_folder
from tapeout.compiler.tensorrt.segment_plan import (
    BuiltBody,
    SegmentPlan,
    covered_signatures,
    segment_plan,
)
from tapeout.compiler.tensorrt.worker import REQUEST, RESULT
from tapeout.plugins import errors
from tapeout.plugins.cuda import TENSORRT
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.codec import encode
from tapeout.runtime.engine.launches import RowRange, SegmentProfile
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program_check import row_limits
from tapeout.runtime.tensorrt.package import FULL, installed_version

#: Steps of up to so many rows have a profile of their own: few rows, and weights are what takes the time.
FEW_ROWS = 64


def segments_for(
    module: Module,
    dtype: str,
    limits: Limits,
    sm: int,
    target: str,
    options: BuildOptions,
    progress: Callable[[str], None],
) -> SegmentPlan | None:
    """The segments of a build that asks for them; in a dry run what they would stand for.

    Raises as `choose_package` and `build_segments` do.
    """
    if options.tactics != TENSORRT:
        return None
    package, gpu = package_for(sm, target, dtype)
    if options.dry_run:
        return SegmentPlan((), (), {}, covered_signatures(module, find_regions(module)), ())
    kept, timings = cache_paths(options.timing_cache, package)
    return build_segments(module, limits, sm, package, timings, kept, gpu, progress)


def cache_paths(timing_cache: Path | None, package: str) -> tuple[Path | None, Path | None]:
    """What lies beside a timing cache: the folder of segments, and full TensorRT's own timings."""
    if timing_cache is None:
        return None, None
    own = timing_cache.with_name(f"{timing_cache.name}.{FULL}") if package == FULL else None
    return kept_folder(timing_cache), own


def write_region_models(module: Module, folder: Path) -> tuple[Path, ...]:
    """Write the ONNX model of every distinct region into `folder`, which is made; their paths.

    Raises UsageError where the folder cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, body in enumerate(distinct_bodies(find_regions(module)).values()):
            paths.append(folder / f"region-{place}-{body.digest[:8]}.onnx")
            paths[-1].write_bytes(_model(body))
    except OSError as error:
        raise UsageError(f"keep_onnx: {folder} cannot be written: {error.strerror or error}") from None
    return tuple(paths)


def build_segments(
    module: Module,
    limits: Limits,
    sm: int,
    package: str,
    timing_cache: Path | None = None,
    kept: Path | None = None,
    gpu: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> SegmentPlan:
    """Build a segment for every distinct region of a module.

    Args:
        sm: compute capability to build for. package: as `choose_package` names it.
        timing_cache: of full TensorRT's tactics; made where there is none.
        kept: folder of segments built before, which is added to; None to build all of them.
        gpu: name of the GPU that full TensorRT times its tactics on.

    Raises:
        UnsupportedError: a region cannot be written in ONNX.
        TapeoutError: a segment could not be built.
    """
    regions = find_regions(module)
    bodies = distinct_bodies(regions)
    version = installed_version(package) or ""
    cache = SegmentCache(kept, package, version, sm, gpu)
    built = build_bodies(bodies, limits, cache, timing_cache, progress)
    return segment_plan(module, regions, built, package, version)


def build_bodies(
    bodies: Mapping[str, Body],
    limits: Limits,
    cache: SegmentCache,
    timing_cache: Path | None,
    progress: Callable[[str], None],
) -> dict[str, BuiltBody]:
    """A segment for every body, by digest: kept ones, and others built and kept by a package of this machine.

    Args:
        cache: names package, version and target. timing_cache: as `build_segments`'s.

    Raises as `build_segments` does.
    """
    models = {digest: _model(body) for digest, body in bodies.items()}
    profiles = {digest: profiles_of(body, limits) for digest, body in bodies.items()}
    built = {digest: found for digest in bodies if (found := cache.get(models[digest], profiles[digest]))}
    if missing := {digest: model for digest, model in models.items() if digest not in built}:
        progress(f"{len(missing)} of {len(bodies)} segments to build")
        fresh = _build(missing, profiles, cache.sm, cache.package, timing_cache)
        for digest, segment in fresh.items():
            cache.put(models[digest], profiles[digest], segment)
        built |= fresh
    keys = {digest: cache.key(models[digest], profiles[digest]) for digest in bodies}
    return {d: BuiltBody(b, built[d], profiles[d], len(models[d]), keys[d]) for d, b in bodies.items()}


def kept_bodies(
    bodies: Mapping[str, Body], limits: Limits, cache: SegmentCache, wanted: Mapping[str, Sequence[str]]
) -> dict[str, BuiltBody]:
    """Of `build_bodies` those that are kept: no package is needed.

    wanted: by digest SHA-256s of segments, as `SegmentCache.get` takes them.
    """
    found = {}
    for digest, body in bodies.items():
        model, profiles = _model(body), profiles_of(body, limits)
        if built := cache.get(model, profiles, wanted.get(digest, ())):
            found[digest] = BuiltBody(body, built, profiles, len(model), cache.key(model, profiles))
    return found


def profiles_of(body: Body, limits: Limits) -> tuple[SegmentProfile, ...]:
    """Few rows and many rows of the body's symbol; any rows of another that crosses its border.

    The first is tuned for an eighth of its limit, the second for the limit, as a long prompt has it.
    """
    most = row_limits(limits)
    few = RowRange(1, max(1, min(FEW_ROWS, most[body.symbol]) // 8), min(FEW_ROWS, most[body.symbol]))
    ranges = [few]
    if most[body.symbol] > FEW_ROWS:
        ranges.append(RowRange(FEW_ROWS + 1, most[body.symbol], most[body.symbol]))
    others = {s: RowRange(1, most[s], most[s]) for s in body.symbols if s != body.symbol}
    return tuple(SegmentProfile({body.symbol: rows, **others}) for rows in ranges)


def _model(body: Body) -> bytes:
    serialized: bytes = region_onnx(body, ROW_MULTIPLE).SerializeToString(deterministic=True)
    return serialized


def _build(
    models: Mapping[str, bytes],
    profiles: Mapping[str, Sequence[SegmentProfile]],
    sm: int,
    package: str,
    timing_cache: Path | None,
) -> dict[str, Built]:
    """Have a process build the models; what was built by name."""
    request = {
        "package": package,
        "sm": sm,
        "timing_cache": None if timing_cache is None else str(timing_cache.resolve()),
        "segments": {name: encode(list(profiles[name])) for name in models},
    }
    with tempfile.TemporaryDirectory(prefix="tapeout-") as name:
        folder = Path(name)
        for key, model in models.items():
            (folder / f"{key}.onnx").write_bytes(model)
        (folder / REQUEST).write_text(json.dumps(request))
        command = [sys.executable, "-m", "tapeout.compiler.tensorrt.worker", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not (folder / RESULT).is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise TapeoutError(
                f"the process that builds TensorRT segments ended with {done.returncode}"
                + "".join(f": {line.strip()}" for line in said)
                + crash_note(package, installed_version(package) or "", sm),
                hint="build with --tactics native; --keep-onnx DIR leaves the ONNX files to try by hand",
            )
        result = json.loads((folder / RESULT).read_text())
        if "error" in result:
            raise getattr(errors, result["kind"])(result["error"], hint=result["hint"])
        return {
            key: Built((folder / f"{key}.plan").read_bytes(), tuple(told["layers"]), told["seconds"])
            for key, told in result["segments"].items()
        }
