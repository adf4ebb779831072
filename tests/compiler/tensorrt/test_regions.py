"""Dense regions of a module: where they begin and end, what crosses, which of them are one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from smollm2_shape import smollm2_module

from tapeout.compiler.ir import Module, parse
from tapeout.compiler.plan import plan_program
from tapeout.compiler.regions import distinct_bodies, find_regions
from tapeout.compiler.tensorrt.segment_plan import covered_signatures
from tapeout.compiler.tensorrt.segments import profiles_of
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import TacticRange

LIMITS = Limits(max_batch_size=8, max_num_tokens=256, max_seq_len=64, tokens_per_page=16)
LAYERS = 5


@pytest.fixture(scope="module")
def module() -> Module:
    return smollm2_module("bfloat16", layers=LAYERS)


def test_one_more_than_layers_and_three_shapes(module: Module) -> None:
    regions = find_regions(module)
    bodies = distinct_bodies(regions)
    assert len(regions) == LAYERS + 1
    uses = [sum(r.body.digest == digest for r in regions) for digest in bodies]
    assert uses == [1, LAYERS - 1, 1]
    first, middle, last = bodies.values()
    assert [n.op for n in first.nodes] == ["embedding", "rope_table", "norm_linear"]
    assert [n.op for n in middle.nodes] == ["linear_add", "norm_linear", "linear_add", "norm_linear"]
    assert [n.op for n in last.nodes][:2] == ["select_rows", "select_rows"]
    assert [(b.symbol, b.symbols) for b in (first, middle, last)] == [
        ("T", ("T",)), ("T", ("T",)), ("T", ("T", "R")),
    ]  # fmt: skip


def test_borders_name_the_module_s_values(module: Module) -> None:
    """Every region between two attention ops takes what attention and the residual stream gave it."""
    regions = find_regions(module)
    values = module.values()
    for before, region in pairwise(regions[:-1]):
        attention = module.nodes[before.last]
        assert region.inputs == (attention.outputs[0].name, before.outputs[0])
        assert region.weights == tuple(
            w for n in module.nodes[region.first : region.last] for w in n.weights if w
        )
        assert [values[n].shape[1] for n in region.outputs] == [576, 960]
    assert regions[-1].outputs == (module.logits.value,)


def test_names_and_layers_do_not_tell_bodies_apart_and_shapes_do(module: Module) -> None:
    renamed = parse(module.text().replace("layers.", "blocks."))
    wider = smollm2_module("bfloat16", layers=LAYERS, intermediate=1600)
    digests = [list(distinct_bodies(find_regions(m))) for m in (module, renamed, wider)]
    assert digests[0] == digests[1]
    assert [a == b for a, b in zip(digests[0], digests[2], strict=True)] == [True, False, False]


def test_what_another_op_cuts() -> None:
    """An op that has no form in ONNX stays outside: it cuts a run, and no count of regions is expected."""
    text = smollm2_module("bfloat16", layers=2).text()
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if "= linear_add(" in line) + 1
    result = lines[place - 1].split()[0]
    lines.insert(place, f"%90 bfloat16[T,576] = linear_int8({result}; s8, sc, -)")
    lines.insert(1, "weight s8 int8[576,576]")
    lines.insert(2, "weight sc float32[576]")
    regions = find_regions(parse("\n".join(lines) + "\n"))
    assert len(regions) == 4
    assert [len(r.body.nodes) for r in regions[1:3]] == [1, 3]


def test_a_count_that_is_off_is_an_error() -> None:
    """Two attention ops in a row have no dense region between them."""
    text = smollm2_module("bfloat16", layers=2).text().splitlines()
    place = next(i for i, line in enumerate(text) if "rope_attention(" in line)
    again = text[place].replace(text[place].split()[0], "%900", 1)
    text.insert(place + 1, again)
    with pytest.raises(TapeoutError, match="3 attention ops and 3 dense regions, expected 4"):
        find_regions(parse("\n".join(text) + "\n"))


def test_what_crosses_a_border_shares_no_byte(module: Module) -> None:
    """Nothing is known of the order inside a segment: its inputs live until it has written its outputs."""
    regions = find_regions(module)
    tactics = {n: (TacticRange(256, "x"),) for n in plan_program(module, LIMITS, {}).signatures}
    spans = [(r.first, r.last) for r in regions]
    plain = plan_program(module, LIMITS, tactics, row_multiple=16)
    program = plan_program(module, LIMITS, tactics, row_multiple=16, spans=spans)
    places = {b.name: (b.offset_bytes, b.offset_bytes + b.size_bytes) for b in program.buffers}
    for region in regions:
        inside = [places[n] for n in (*region.inputs, *region.outputs) if n in places]
        for i, (begin, end) in enumerate(inside):
            assert begin % 256 == 0
            assert all(end <= b or e <= begin for j, (b, e) in enumerate(inside) if i != j)
    loose = {b.name: (b.offset_bytes, b.offset_bytes + b.size_bytes) for b in plain.buffers}
    shared = [
        1 for r in regions for a in r.inputs for b in r.outputs
        if a in loose and loose[a][0] < loose[b][1] and loose[b][0] < loose[a][1]
    ]  # fmt: skip
    assert shared, "without spans some output takes the place of an input, or this test shows nothing"


def test_signatures_that_need_no_kernels(module: Module) -> None:
    covered = covered_signatures(module, find_regions(module))
    assert {key.partition("(")[0] for key in covered} == {
        "embedding", "rope_table", "norm_linear", "linear_add", "select_rows",
    }  # fmt: skip


def test_profiles_cover_every_row_count(module: Module) -> None:
    *_, last = distinct_bodies(find_regions(module)).values()
    few, many = profiles_of(last, LIMITS)
    assert (few.rows["T"].least, few.rows["T"].most) == (1, 64)
    assert (many.rows["T"].least, many.rows["T"].most) == (65, 256)
    assert all((p.rows["R"].least, p.rows["R"].most) == (1, 8) for p in (few, many))
    small = Limits(max_batch_size=4, max_num_tokens=16, max_seq_len=64, tokens_per_page=16)
    (only,) = profiles_of(last, small)
    assert (only.rows["T"].least, only.rows["T"].typical, only.rows["T"].most) == (1, 2, 16)
