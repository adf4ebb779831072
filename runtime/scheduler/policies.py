"""The policies a user chooses, with the names TensorRT-LLM's users know."""

from __future__ import annotations

from enum import StrEnum

#: What a level of priority is worth: a request is served as if it had come so many steps earlier. So it
#: overtakes all that came within that time, and one that waited longer is not overtaken any more.
PRIORITY_STEPS = 1_000
#: Levels on either side of 0; the outermost are, for every practical purpose, strict.
MAX_PRIORITY = 1_000_000


class CapacityPolicy(StrEnum):
    """When a waiting request gets a slot and may hold pages."""

    #: When its worst case fits beside the worst cases of those that run: nobody is ever paused.
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    #: When its present need fits. Pages may run out later: then the newest running requests are paused,
    #: and run again before newer ones do.
    MAX_UTILIZATION = "max_utilization"
    #: Only when nothing runs: a batch is filled and runs to its end.
    STATIC_BATCH = "static_batch"


class ChunkingPolicy(StrEnum):
    """How the tokens of a step that generation leaves are shared by requests in context."""

    #: Each gets as much as it can take, in order.
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    #: All get the same number of pages' worth.
    EQUAL_PROGRESS = "equal_progress"
    #: Each gets exactly `chunk_tokens` (a page's worth by default), in order, while there are enough.
    FORCE_CHUNK = "force_chunk"
