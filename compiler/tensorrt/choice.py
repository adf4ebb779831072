"""Which package builds the segments of a target, and why none can."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.targets import cuda_target
from tapeout.plugins.cuda import TENSORRT
from tapeout.plugins.errors import UnsupportedError
from tapeout.runtime.tensorrt.package import FULL, KINDS, RTX, installed_version

#: Compute capabilities that TensorRT-RTX builds for, with or without a GPU.
RTX_SMS = (75, 80, 86, 89, 120, 121)
#: The first compute capability that has a dtype in its tensor cores.
LEAST_SM = {"float32": 70, "float16": 70, "bfloat16": 80}
_NATIVE = "or build with --tactics native"


@dataclass(frozen=True)
class KnownBad:
    """Versions of a builder that are known for something: `first` to `last`, both included.

    Attributes:
        symptom: what they do. source: where that is told.
        silent: nobody would notice, so such a version is refused; else it explains a builder that ended.
        sm: the compute capability that it happens on; 0 for any.
    """

    package: str
    first: str
    last: str
    symptom: str
    source: str
    silent: bool
    sm: int = 0

    def means(self, package: str, version: str, sm: int) -> bool:
        """Does it speak of this builder and target?"""
        if package != self.package or self.sm not in {0, sm}:
            return False
        return version_number(self.first) <= version_number(version) <= version_number(self.last)

    def text(self) -> str:
        """Symptom, versions and source, for an error."""
        return f"{self.symptom} (versions {self.first} to {self.last}: {self.source})"


#: None was met here: TensorRT-RTX 1.4 to 1.7 build the segments of the tests, and nothing is executed.
KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        FULL, "10.3", "10.3.99", "gives wrong results for transformers with dynamic shapes",
        "github.com/NVIDIA/TensorRT/issues/4419", silent=True,
    ),
    KnownBad(
        FULL, "11.0", "11.2.1.2", "may end its process while it compiles strongly typed bfloat16 networks",
        "github.com/NVIDIA/TensorRT/issues/4842", silent=False, sm=120,
    ),
)  # fmt: skip


def choose_package(sm: int, target: str, dtype: str, *, full: str | None, rtx: str | None, gpu: bool) -> str:
    """The name of the package for a target: full TensorRT where it can time its tactics, else TensorRT-RTX.

    Args:
        dtype: of the activations.
        full, rtx: installed versions of TensorRT and TensorRT-RTX, None where there is none.
        gpu: this machine has a GPU that the target means.

    Raises UnsupportedError, which says what to install or choose.
    """
    if sm < LEAST_SM.get(dtype, 1000):
        least = f"sm_{LEAST_SM[dtype]} has it first" if dtype in LEAST_SM else "segments have no such dtype"
        raise UnsupportedError(
            f"dtype {dtype!r} on {target}: {least}, this is sm_{sm}",
            hint=f"build with --dtype float32, {_NATIVE}",
        )
    if gpu and full is not None:
        _check_version(FULL, full, sm)
        return FULL
    if sm in RTX_SMS:
        if rtx is None:
            raise UnsupportedError(
                f"TensorRT segments for {target}: {KINDS[RTX].title} is not installed, which builds them "
                "without a GPU",
                hint=f"{KINDS[RTX].install}, {_NATIVE}",
            )
        _check_version(RTX, rtx, sm)
        return RTX
    served = ", ".join(f"sm_{n}" for n in RTX_SMS)
    have = "not installed" if full is None else f"{full} is installed"
    where = "this machine has none" if not gpu else "this machine has one"
    raise UnsupportedError(
        f"TensorRT segments for {target}: {KINDS[RTX].title} builds for {served}, not for sm_{sm}; "
        f"{KINDS[FULL].title} ({have}) builds on a GPU that the target means, and {where}",
        hint=f"build on a machine with that GPU ({KINDS[FULL].install}), {_NATIVE}",
    )


def check_segments(options: BuildOptions) -> None:
    """Refuse a build whose segments no package of this machine can make, before anything is traced.

    Raises UnsupportedError.
    """
    if options.tactics == TENSORRT:
        dtype = "float32" if options.dtype == "auto" else options.dtype
        package_for(cuda_target(options.target).sm, options.target, dtype)


def package_for(sm: int, target: str, dtype: str) -> tuple[str, str]:
    """The package that builds for a target here, and the name of the GPU that it times its tactics on."""
    here = local_gpu(target, sm)
    full, rtx = installed_version(FULL), installed_version(RTX)
    package = choose_package(sm, target, dtype, full=full, rtx=rtx, gpu=here is not None)
    return package, here.name if here is not None and package == FULL else ""


def crash_note(package: str, version: str, sm: int) -> str:
    """What is known of a builder that ended its process; "" for nothing."""
    known = [b.text() for b in KNOWN_BAD if not b.silent and b.means(package, version, sm)]
    return "".join(f"; {KINDS[package].title} {version} {text}" for text in known)


def _check_version(package: str, version: str, sm: int) -> None:
    for bad in KNOWN_BAD:
        if bad.silent and bad.means(package, version, sm):
            raise UnsupportedError(
                f"{KINDS[package].title} {version} {bad.text()}", hint=f"install a newer one, {_NATIVE}"
            )


def version_number(version: str) -> tuple[int, ...]:
    """ "10.13.3.9.post1" as (10, 13, 3, 9)."""
    return tuple(map(int, re.findall(r"\d+", version)[:4]))
