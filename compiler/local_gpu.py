"""Is there a GPU in this machine that a target means?"""

from __future__ import annotations

from tapeout.compiler.targets import SKUS
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.target import GpuFacts, is_model


def local_gpu(target: str, sm: int) -> GpuFacts | None:
    """The first GPU of this machine, if it is one that the target means; nothing is allocated on it."""
    try:
        from tapeout.runtime.executors.cuda.driver import open_device

        facts = open_device().facts
    except (ImportError, EngineIncompatibleError):
        return None
    sku = target.removeprefix("cuda:")
    meant = facts.sm == sm and (sku not in SKUS or is_model(facts.name, sku))
    return facts if meant else None
