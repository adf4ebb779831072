"""Engine sets: the engines of one model for many machines, as one directory. See README.md."""

from tapeout.runtime.engine_set.entries import describe_engine
from tapeout.runtime.engine_set.index import (
    INDEX_FORMAT,
    INDEX_NAME,
    INDEX_VERSION,
    EngineEntry,
    EngineSetIndex,
    WeightsEntry,
    load_index,
    parse_index,
    save_index,
)

__all__ = [
    "EngineSetIndex",
    "EngineEntry",
    "WeightsEntry",
    "load_index",
    "parse_index",
    "save_index",
    "describe_engine",
    "INDEX_NAME",
    "INDEX_FORMAT",
    "INDEX_VERSION",
]
