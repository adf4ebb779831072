"""May this machine run this engine? Answered before anything is loaded, and without a driver."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import pairwise

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.reader import Engine

#: Levels of one architecture, each able to run kernels of those before it.
CPU_LEVELS = (("x86_64", "x86_64_v2", "x86_64_v3", "x86_64_v4"), ("aarch64",))
#: Key of `Manifest.versions`: the assembler that made an engine's cubins, by its CUDA version.
PTXAS = "ptxas"

logger = logging.getLogger("tapeout")


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as its driver describes it.

    Attributes:
        name: the vendor's, for example "NVIDIA H200".
        sm: compute capability times ten.
        driver_version: CUDA version of the driver, 13000 for 13.0.
    """

    name: str
    sm: int
    sm_count: int
    total_bytes: int
    driver_version: int


def check_target(engine: Engine, host: HostCpu, *, strict_sku: bool = False) -> None:
    """Raise EngineIncompatibleError, naming both targets, unless `host` can run `engine`.

    A CPU engine's level is what a GPU engine's model is: a later level runs it, unless `strict_sku`.
    """
    target = engine.manifest.target
    kind, _, level = target.partition(":")
    here = f"cpu:{host.level}"
    if kind != "cpu":
        raise not_for(engine, f"this machine is {here}")
    family = next((f for f in CPU_LEVELS if level in f), ())
    if host.level not in family or family.index(host.level) < family.index(level):
        raise EngineIncompatibleError(
            f"{engine.path} was built for {target}, this machine is {here}",
            hint="an engine runs on the CPU level it was built on and on later ones: build it on the oldest",
        )
    if strict_sku and host.level != level:
        raise EngineIncompatibleError(
            f"{engine.path} was built for {target}, this machine is {here}: a later level, which "
            "--strict-sku refuses",
            hint="build it on this machine, or leave out --strict-sku: it runs, with its level's tactics",
        )


def check_gpu(engine: Engine, gpu: GpuFacts) -> None:
    """Raise EngineIncompatibleError unless `gpu` and its driver can run `engine`'s kernels."""
    table = engine.launches
    if table is None:
        raise not_for(engine, "but holds no launches for a GPU")
    if gpu.sm != table.sm:
        raise not_for(engine, f"whose kernels are for sm_{table.sm}; this GPU is {gpu.name}, sm_{gpu.sm}")
    needed = engine.manifest.versions.get(PTXAS, "")
    # Minor versions of CUDA are compatible: a driver loads what a newer toolkit of its major version made.
    if needed and gpu.driver_version // 1000 < int(needed.partition(".")[0]):
        have = f"{gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
        raise EngineIncompatibleError(
            f"{engine.path} holds kernels made with CUDA {needed}, this machine's driver is for CUDA {have}",
            hint=f"install a driver for CUDA {needed.partition('.')[0]}.0 or newer",
        )


def check_sku(engine: Engine, gpu: GpuFacts, *, strict: bool) -> None:
    """Is `gpu` of the model that `engine`'s tactics were chosen for?

    Another model of the same compute capability runs the kernels, but they were chosen for another
    number of multiprocessors. That is a warning in the log; with `strict` it is an
    EngineIncompatibleError, and so is an engine that names no model.
    """
    target = engine.manifest.target
    sku = target.removeprefix("cuda:")
    if sku.startswith("sm_"):
        if strict:
            raise EngineIncompatibleError(
                f"{engine.path} was built for {target}, which is every GPU of that compute capability: "
                f"it names no model that --strict-sku could compare with this GPU, {gpu.name}",
                hint="build it for a model, tapeout build MODEL --target cuda:SKU, or leave out --strict-sku",
            )
        return
    if is_model(gpu.name, sku):
        return
    if strict:
        raise EngineIncompatibleError(
            f"{engine.path} was built for {target}, this GPU is {gpu.name}: another model of sm_{gpu.sm}, "
            "which --strict-sku refuses",
            hint="build it for this GPU's model (tapeout build MODEL --target cuda:SKU), or leave out "
            f"--strict-sku: it runs, with tactics chosen for {target}",
        )
    logger.warning(
        "%s was built for %s, this GPU is %s: it runs, with tactics chosen for another model",
        engine.path, target, gpu.name,
    )  # fmt: skip


def is_model(name: str, sku: str) -> bool:
    """Is a GPU of this name of the model `sku`? "NVIDIA GeForce RTX 5090" is an rtx5090.

    A MIG slice ("NVIDIA H200 MIG 1g.18gb") is of no model: it has a part of the multiprocessors.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "mig" not in words and (sku in words or any(a + b == sku for a, b in pairwise(words)))


def not_for(engine: Engine, why: str) -> EngineIncompatibleError:
    """The error that `engine` was built for another machine than this one."""
    return EngineIncompatibleError(
        f"{engine.path} was built for {engine.manifest.target}, {why}",
        hint="build it for this machine: tapeout build MODEL --target TARGET -o FILE",
    )
