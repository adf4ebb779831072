"""The engine file: format, reading and checking. See README.md."""

from tapeout.runtime.engine.manifest import (
    FORMAT_VERSION,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    TokenizerFacts,
)
from tapeout.runtime.engine.program import Buffer, Program, Record, TacticRange, View
from tapeout.runtime.engine.reader import Engine, TensorInfo, WeightData, open_engine
from tapeout.runtime.engine.target import check_target

__all__ = [
    "open_engine",
    "check_target",
    "Engine",
    "TensorInfo",
    "WeightData",
    "Manifest",
    "ModelFacts",
    "TokenizerFacts",
    "Limits",
    "KvCacheLayout",
    "Program",
    "Record",
    "Buffer",
    "View",
    "TacticRange",
    "FORMAT_VERSION",
]
