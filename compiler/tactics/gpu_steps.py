"""Whole steps: which ops run after each other at a bucket, and what timing them together has told.

A kernel that is fastest alone may be slow among its neighbours, so the best candidates of each op are
timed again in a step of a few layers. An answer stands for the candidates it was found among: where
another has become as fast alone, or a kernel has changed, it is silent and the fastest alone win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapeout.compiler.cuda_plan import decode_buckets
from tapeout.compiler.plan import buckets
from tapeout.compiler.tactics.gpu_contests import Contest
from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.registry import OPS
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import DECODE, MIXED

#: Layers of a kind in a step that is timed: enough that neighbours are like a model's, few enough that a
#: graph takes milliseconds. With the layer that ends a model an op occurs four times.
_LAYERS_OF_A_KIND = 3
#: Above it launches take long beside what they do to each other, and a replay takes long.
_MOST_ROWS = 2048
#: Logit rows of a mixed step that is timed: few sequences end their prompt in it.
LOGIT_ROWS = 4

#: Where a contest is: key of the signature, kind, rows.
Place = tuple[str, str, int]


@dataclass(frozen=True)
class StepContest:
    """One decision on a whole step: the tactics of its ops at one bucket.

    Attributes:
        kind: `mixed` or `decode`. rows: of the bucket. conditions: of the engine, that shape it.
        contests: of its ops, in the order of the program.
        fixed: keys of ops that are part of it and decided elsewhere.
    """

    kind: str
    rows: int
    conditions: str
    contests: tuple[Contest, ...]
    fixed: frozenset[str]

    @property
    def order(self) -> tuple[str, ...]:
        """Keys of the signatures."""
        return tuple(contest.key for contest in self.contests)

    def distinct(self) -> dict[str, Contest]:
        """Its contests by signature."""
        return {contest.key: contest for contest in self.contests}


def place_of(contest: Contest) -> Place:
    return contest.key, contest.kind, contest.rows


def step_contests(
    signatures: Mapping[str, OpSignature],
    order: Sequence[str],
    decisions: Sequence[Contest],
    limits: Limits,
) -> tuple[StepContest, ...]:
    """Whole steps at every decode bucket, then at mixed ones up to 2048 rows.

    Args:
        order: keys of the program's ops; of its layers a few stay. Without one there are no steps.
        decisions: `contests` of the same signatures.
    """
    if not order:
        return ()
    few = _few_layers(order, {key for key, s in signatures.items() if OPS[s.op].reads_cache})
    places = {place_of(contest): contest for contest in decisions}
    steps = [_step(few, DECODE, rows, rows, places) for rows in decode_buckets(limits)]
    logit_rows = min(LOGIT_ROWS, limits.max_batch_size)
    for rows in buckets(limits.max_num_tokens):
        if rows <= _MOST_ROWS:
            steps.append(_step(few, MIXED, rows, min(rows, logit_rows), places))
    return tuple(step for step in steps if step is not None)


def _few_layers(order: Sequence[str], attention: set[str]) -> list[str]:
    """The order with a few of its layers.

    It is cut ahead of every op that reads the KV cache, so that pieces hold all that is between two of
    these; of equal pieces a few stay, and so every op keeps its neighbours.
    """
    pieces: list[tuple[str, ...]] = []
    start = 0
    for index, key in enumerate(order):
        if key in attention:
            pieces.append(tuple(order[start:index]))
            start = index
    pieces.append(tuple(order[start:]))
    seen: Counter[tuple[str, ...]] = Counter()
    few: list[str] = []
    for piece in pieces:
        seen[piece] += 1
        if seen[piece] <= _LAYERS_OF_A_KIND:
            few += piece
    return few


def _step(
    order: Sequence[str], kind: str, rows: int, logit_rows: int, places: Mapping[Place, Contest]
) -> StepContest | None:
    """None where an op has no tactics."""
    found = {key: contest_at(key, kind, rows, logit_rows, places) for key in dict.fromkeys(order)}
    contests = [contest for key in order if (contest := found[key]) is not None]
    if len(contests) < len(order):
        return None
    fixed = {c.key for c in contests if kind == MIXED and _counts_logit_rows(c)}
    limits = sorted({c.conditions for c in contests if c.conditions})
    conditions = "; ".join([*limits, f"{logit_rows} logit rows"])
    return StepContest(kind, rows, conditions, tuple(contests), frozenset(fixed))


def contest_at(
    key: str, kind: str, rows: int, logit_rows: int, places: Mapping[Place, Contest]
) -> Contest | None:
    """The contest that decides on an op in a step: of its kind, or for steps of any; at its bucket."""
    if (key, kind, rows) in places and not _counts_logit_rows(places[key, kind, rows]):
        return places[key, kind, rows]
    ranked = sorted((p for p in places if p[:2] == (key, MIXED)), key=lambda p: p[2])
    if not ranked:
        return None
    wanted = logit_rows if _counts_logit_rows(places[ranked[0]]) else rows
    return places[next((p for p in ranked if p[2] >= wanted), ranked[-1])]


def _counts_logit_rows(contest: Contest) -> bool:
    return contest.signature.outputs[0].shape[0] == "R"
