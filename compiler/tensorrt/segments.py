"""From a lowered module to segments: regions, their ONNX models, engines built in a process of their own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import Module, Value
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.plan import signature_of
from tapeout.compiler.regions import Body, Region, distinct_bodies, find_regions
from tapeout.compiler.report import SegmentReport
from tapeout.compiler.tactics.gpu_decide import local_gpu
from tapeout.compiler.targets import cuda_target
from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.choice import choose_package, crash_note
from tapeout.compiler.tensorrt.region_onnx import border_shape, region_onnx
from tapeout.compiler.tensorrt.segment_cache import SegmentCache
from tapeout.compiler.tensorrt.worker import REQUEST, RESULT
from tapeout.plugins import errors
from tapeout.plugins.cuda import TENSORRT
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine import launches
from tapeout.runtime.engine.codec import encode
from tapeout.runtime.engine.launches import (
    LaunchTable,
    RegionRange,
    RowRange,
    Segment,
    SegmentProfile,
    SegmentTensor,
)
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program_check import row_limits
from tapeout.runtime.tensorrt.package import FULL, KINDS, RTX, installed_version

#: Steps of up to so many rows have a profile of their own: few rows, and weights are what takes the time.
FEW_ROWS = 64


@dataclass(frozen=True)
class SegmentPlan:
    """The segments of an engine.

    Attributes:
        segments, regions: for the launch table. blobs: engines by name.
        covered: keys of signatures all of whose ops run within segments.
        reports: in the order of `segments`.
    """

    segments: tuple[Segment, ...]
    regions: tuple[launches.Region, ...]
    blobs: Mapping[str, bytes]
    covered: frozenset[str]
    reports: tuple[SegmentReport, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        packages = sorted({f"{KINDS[s.package].title} {s.version}" for s in self.segments})
        fate = "were built and not executed: none was timed or compared"
        return tuple(f"segments by {package} {fate}" for package in packages)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Runs of records that run as one."""
        return tuple((region.first, region.last) for region in self.regions)

    def added_to(self, table: LaunchTable) -> LaunchTable:
        """A table of the other ops' launches, completed."""
        return replace(table, segments=self.segments, regions=self.regions)


def check_segments(options: BuildOptions) -> None:
    """Refuse a build whose segments no package of this machine can make, before anything is traced.

    Raises UnsupportedError.
    """
    if options.tactics == TENSORRT:
        dtype = "float32" if options.dtype == "auto" else options.dtype
        _package_for(cuda_target(options.target).sm, options.target, dtype)


def _package_for(sm: int, target: str, dtype: str) -> tuple[str, str]:
    """The package that builds for a target here, and the name of the GPU that it times its tactics on."""
    here = local_gpu(target, sm)
    full, rtx = installed_version(FULL), installed_version(RTX)
    package = choose_package(sm, target, dtype, full=full, rtx=rtx, gpu=here is not None)
    return package, here.name if here is not None and package == FULL else ""


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
    package, gpu = _package_for(sm, target, dtype)
    if options.dry_run:
        return SegmentPlan((), (), {}, covered_signatures(module, find_regions(module)), ())
    timings = kept = None
    if (cache := options.timing_cache) is not None:
        kept = cache.with_name(f"{cache.name}.segments")
        timings = cache.with_name(f"{cache.name}.{FULL}") if package == FULL else None
    return build_segments(module, limits, sm, package, timings, kept, gpu, progress)


def covered_signatures(module: Module, regions: Sequence[Region]) -> frozenset[str]:
    """Keys of the signatures that occur in regions and nowhere else."""
    inside = {index for region in regions for index in range(region.first, region.last)}
    keys = [signature_of(node, module).key() for node in module.nodes]
    outside = {key for index, key in enumerate(keys) if index not in inside}
    return frozenset(keys) - outside


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
    models = {digest: _model(body) for digest, body in bodies.items()}
    profiles = {digest: profiles_of(body, limits) for digest, body in bodies.items()}
    version = installed_version(package) or ""
    cache = SegmentCache(kept, package, version, sm, gpu)
    built = {digest: found for digest in bodies if (found := cache.get(models[digest], profiles[digest]))}
    if missing := {digest: model for digest, model in models.items() if digest not in built}:
        progress(f"{len(missing)} of {len(bodies)} segments to build for {len(regions)} regions")
        fresh = _build(missing, profiles, sm, package, timing_cache)
        for digest, segment in fresh.items():
            cache.put(models[digest], profiles[digest], segment)
        built |= fresh
    segments, blobs, reports = [], {}, []
    for digest, body in bodies.items():
        plan = built[digest].plan
        blob = f"{hashlib.sha256(plan).hexdigest()[:24]}.plan"
        blobs[blob] = plan
        segments.append(_segment(body, blob, package, version, profiles[digest], built[digest].layers))
        uses = sum(region.body.digest == digest for region in regions)
        ops = tuple(node.op for node in body.nodes)
        reports.append(
            SegmentReport(blob, uses, ops, len(models[digest]), len(plan), round(built[digest].seconds, 3))
        )
    numbers = {digest: number for number, digest in enumerate(bodies)}
    placed = tuple(_placed(region, numbers[region.body.digest], profiles) for region in regions)
    return SegmentPlan(tuple(segments), placed, blobs, covered_signatures(module, regions), tuple(reports))


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


def _segment(
    body: Body,
    blob: str,
    package: str,
    version: str,
    profiles: tuple[SegmentProfile, ...],
    layers: tuple[str, ...],
) -> Segment:
    values = body.values()

    def tensor(value: Value) -> SegmentTensor:
        return SegmentTensor(value.name, value.dtype, border_shape(value, ROW_MULTIPLE))

    return Segment(
        blob,
        package,
        version,
        inputs=tuple(map(tensor, body.inputs)),
        weights=tuple(SegmentTensor(n, w.dtype, w.shape) for n, w in body.weights.items()),
        outputs=tuple(tensor(values[name]) for name in body.outputs),
        profiles=profiles,
        layers=layers,
    )


def _placed(
    region: Region, number: int, profiles: Mapping[str, tuple[SegmentProfile, ...]]
) -> launches.Region:
    symbol = region.body.symbol
    ranges = tuple(
        RegionRange(profile.rows[symbol].most, place)
        for place, profile in enumerate(profiles[region.body.digest])
    )
    return launches.Region(
        region.first, region.last, number, symbol, region.inputs, region.weights, region.outputs, ranges
    )


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
