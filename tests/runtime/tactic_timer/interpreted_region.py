"""A region by our kernels in Triton's interpreter, against its segment in ONNX Runtime: `python
interpreted_region.py KIND HOW...`

KIND is `mixed` or `decode`. For each HOW the region is checked and timed once, with a segment that is
`right`, or after which an element is `wrong`, `unwritten`, or written `outside` of its rows. Prints what the
worker tells, a message a line. Other folders are found as by interpreted_gpu.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import interpreted_gpu as base
import torch
from fake_cuda import Launched
from fake_tensorrt import SYMBOL, FakeTensorRt
from interpret_cuda import patch_once, teach_bfloat16

from tapeout.compiler.ir import parse
from tapeout.compiler.plan import signature_of
from tapeout.compiler.regions import Body
from tapeout.compiler.tactics import gpu_pack
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.compiler.tactics.gpu_rivals import Rivals
from tapeout.compiler.tensorrt.builder import Built
from tapeout.compiler.tensorrt.region_onnx import region_onnx
from tapeout.compiler.tensorrt.segment_plan import BuiltBody
from tapeout.runtime.engine.launches import RowRange, SegmentProfile
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer import device, timing, worker
from tapeout.runtime.tactic_timer.pack import PackedSegment
from tapeout.runtime.tensorrt import segments
from tapeout.runtime.tensorrt.package import KINDS, RTX, Package

#: As a model's last region: rows are selected, the result is 40 wide in rows of 48.
TEXT = """tapeout-ir 1
input x0 float32[T,64]
input x1 float32[T,64]
input x2 int32[R]
weight w0 float32[64,64]
weight w1 float32[64]
weight w2 float32[96,64]
weight w3 float32[64,48]
weight w4 float32[64]
weight w5 float32[40,64]
x3 float32[R,64] = select_rows(x0, x2)
x4 float32[R,64] = select_rows(x1, x2)
x5 float32[R,64] = linear_add(x3, x4; w0, -)
x6 float32[R,48] = norm_linear(x5; w1, w2, -) {activation="silu", cast_before_weight=true, eps=1e-05, weight_offset=0.0}
x7 float32[R,64] = linear_add(x6, x5; w3, -)
x8 float32[R,40] = norm_linear(x7; w4, w5, -) {activation="", cast_before_weight=true, eps=1e-05, weight_offset=0.0}
logits x8
"""  # noqa: E501
VERSION, SEGMENT_US = "1.7.1.116", 50.0


class RegionCuda(base.InterpretedCuda):
    def __init__(self) -> None:
        super().__init__()
        self.tensorrt, self.how = FakeTensorRt(self), "right"

    def _run(self, launched: Launched) -> None:
        if launched.symbol != SYMBOL:
            super()._run(launched)
            return
        call = self.tensorrt.run(launched)
        self.spend(SEGMENT_US)
        out, row = call.addresses["x8"], 4 * 48
        at = {"wrong": (out + 4, 5.0), "unwritten": (out, float("nan")), "outside": (out - row, 0.0)}
        if self.how in at:
            address, value = at[self.how]
            ctypes.c_float.from_address(address).value = value


def main() -> None:
    kind, hows = sys.argv[1], sys.argv[2:]
    torch.set_num_threads(1)
    teach_bfloat16()
    patch_once()
    gpu_pack.compile_all = base.described
    fake = RegionCuda()
    driver.cu = device.cu = fake
    segments.installed_version = {RTX: VERSION}.get
    segments.load = lambda name: Package(KINDS[name], VERSION, fake.tensorrt.module)
    timing._MAX_COPIES, timing._ROUNDS, timing._MIN_ROUNDS, timing._GRAPH_US = 2, 1, 1, 0.0

    module = parse(TEXT)
    body = Body(module.inputs, module.weights, module.nodes, ("x8",))
    profile = SegmentProfile({"T": RowRange(1, 4, 8), "R": RowRange(1, 4, 4)})
    model = region_onnx(body, 16).SerializeToString(deterministic=True)
    built = BuiltBody(body, Built(model, (), 0.0), (profile,), len(model), "kept")
    packed = PackedSegment(built.segment(RTX, VERSION), hashlib.sha256(model).hexdigest(), built.key, "", 0.0)
    rivals = Rivals({body.digest: body}, {body.digest: packed}, {built.blob: model})

    signatures = {s.key(): s for s in (signature_of(node, module) for node in module.nodes)}
    found = contests(signatures, base.LIMITS, base.TARGET)
    rows = {"mixed": 8, "decode": 4}[kind]
    region = next(r for r in rivals.contests(found, base.LIMITS) if (r.kind, r.rows) == (kind, rows))
    plain = {}
    for c in region.contests:
        able = tuple(x for x in c.contenders if x.chosen.tactic.interpretable)
        plain[c.key] = replace(c, contenders=able[:1])
    region = replace(region, contests=tuple(plain[c.key] for c in region.contests))
    decisions = list(plain.values())
    file = gpu_pack.make_pack(
        decisions, base.LIMITS, base.TARGET, "cuda:sm_90", regions=[region], rivals=rivals
    )
    timer = worker.Worker(file, driver.Device(0), device.l2_bytes(0), base._tell)
    for index, entry in enumerate(file.pack.entries):
        timer.known[index] = {0: worker.Timed.of(entry.candidates[0], 1.0, None)}
    for fake.how in hows:
        timer.run_region(0)
    timer.close()
    base._tell({"event": "end", "open": fake.open})


if __name__ == "__main__":
    main()
