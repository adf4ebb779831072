"""Regions in a pack: their computation as records, contents of what they read, how far results may differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.compiler.ir import Node, Value
from tapeout.compiler.plan import record_of, row_elements, signature_of
from tapeout.compiler.regions import Body
from tapeout.compiler.tactics.gpu_cases import (
    operands,
    plain_step,
    region_steps,
    stored_values,
)
from tapeout.compiler.tactics.gpu_regions import RegionContest
from tapeout.compiler.tactics.gpu_rivals import Rivals
from tapeout.compiler.tactics.gpu_steps import Place, place_of
from tapeout.plugins.case import tolerance
from tapeout.plugins.tactic_check.hashed import factor_of, seed_of
from tapeout.runtime.tactic_timer.pack import (
    Content,
    Operand,
    Output,
    Pack,
    RegionBody,
    RegionCase,
    RegionValue,
)

#: Adds float32 numbers to the pack; returns where they start.
PlaceNumbers = Callable[[np.ndarray], int]


def with_regions(
    pack: Pack,
    regions: Sequence[RegionContest],
    rivals: Rivals,
    places: Mapping[Place, int],
    place_numbers: PlaceNumbers,
) -> tuple[Pack, dict[str, bytes]]:
    """The pack with the regions' cases and the segments that compete for them; the segments' bytes by blob.

    Args:
        places: indices of entries; those of all ops are among them.
    """
    digests = list(dict.fromkeys(region.body.digest for region in regions))
    segments = [rivals.segments[digest] for digest in digests]
    numbers = {digest: number for number, digest in enumerate(digests)}
    bodies = tuple(_region_body(rivals.bodies[digest], numbers[digest], place_numbers) for digest in digests)
    cases = tuple(
        _region_case(region, numbers[region.body.digest], [places[place_of(c)] for c in region.contests])
        for region in regions
    )
    plans = {packed.segment.blob: rivals.plans[packed.segment.blob] for packed in segments}
    return replace(pack, segments=tuple(segments), regions=bodies, region_cases=cases), plans


def _region_case(region: RegionContest, number: int, ops: Sequence[int]) -> RegionCase:
    check, timing = region_steps(region.rows, region.logit_rows)
    return RegionCase(
        number, region.kind, region.conditions, region.rows, region.logit_rows, tuple(ops), check, timing
    )


def _region_body(body: Body, segment: int, place_numbers: PlaceNumbers) -> RegionBody:
    inputs, weights = _contents(body, place_numbers)
    values = body.values()
    limits = {name: _limits(body, values[name]) for name in body.outputs}
    return RegionBody(
        body.digest,
        segment,
        inputs,
        weights,
        tuple(RegionValue(v.name, v.dtype, v.shape, row_elements(v, ROW_MULTIPLE)) for v in values.values()),
        tuple(record_of(node, body.module, ROW_MULTIPLE) for node in body.nodes),
        tuple(Output(name, values[name].dtype, values[name].shape, *limits[name]) for name in body.outputs),
    )


def _contents(body: Body, place_numbers: PlaceNumbers) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """Inputs and weights by name, filled as for the first op that reads them, every one otherwise."""
    inputs: dict[str, Operand] = {}
    weights: dict[str, Operand] = {}
    outer = {value.name: value for value in body.inputs}
    for node in body.nodes:
        signature = signature_of(node, body.module)
        stored = {n: place_numbers(np.array(v, np.float32)) for n, v in stored_values(signature).items()}
        its_inputs, its_weights = operands(signature, plain_step(1, 1), stored)
        for operand, made in zip(node.inputs, its_inputs, strict=True):
            if operand.value in outer and operand.value not in inputs:
                inputs[operand.value] = _input(body, outer[operand.value], made)
        for name, made in zip([w for w in node.weights if w], its_weights, strict=True):
            weights.setdefault(name, _seeded(body, name, made))
    return inputs, weights


def _input(body: Body, value: Value, made: Operand) -> Operand:
    """The whole value; what is computed elsewhere is normal, ids and positions are as the op's."""
    content = made.content
    if content.kind == "normal":
        content = Content("normal", factor=factor_of(1.0))
    return _seeded(body, value.name, Operand(value.dtype, value.shape, content))


def _seeded(body: Body, name: str, made: Operand) -> Operand:
    return replace(made, content=replace(made.content, seed=seed_of(f"{body.digest} {name}")))


def _limits(body: Body, output: Value) -> tuple[float, float]:
    """How far a result may be from our kernels', absolute and relative: the sum of what each op on the way to
    it may be, since the rounding of one is the input of the next."""
    needed, on_the_way = {output.name}, list[Node]()
    for node in reversed(body.nodes):
        if any(value.name in needed for value in node.outputs):
            needed |= {operand.value for operand in node.inputs}
            on_the_way.append(node)
    limits = [tolerance(node.op, node.outputs[0].dtype) for node in on_the_way]
    return sum(limit.absolute for limit in limits), sum(limit.relative for limit in limits)
