"""May this machine run this engine? Answered before anything is loaded."""

from __future__ import annotations

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.reader import Engine

#: Levels of one architecture, each able to run kernels of those before it.
CPU_LEVELS = (("x86_64", "x86_64_v2", "x86_64_v3", "x86_64_v4"), ("aarch64",))


def check_target(engine: Engine, host: HostCpu) -> None:
    """Raise EngineIncompatibleError, naming both targets, unless `host` can run `engine`."""
    target = engine.manifest.target
    kind, _, level = target.partition(":")
    here = f"cpu:{host.level}"
    if kind != "cpu":
        raise EngineIncompatibleError(
            f"{engine.path} was built for {target}; this runtime runs on {here} and has no {kind} executor",
            hint="build it for this machine: tapeout build MODEL --target cpu -o FILE",
        )
    family = next((f for f in CPU_LEVELS if level in f), ())
    if host.level not in family or family.index(host.level) < family.index(level):
        raise EngineIncompatibleError(
            f"{engine.path} was built for {target}, this machine is {here}",
            hint="an engine runs on the CPU level it was built on and on later ones: build it on the oldest",
        )
