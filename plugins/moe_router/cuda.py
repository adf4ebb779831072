"""CUDA tactics of moe_router."""

from __future__ import annotations

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import Arg, CudaTactic, CudaTarget, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.tactic import Argument, TritonTactic, launch, pointer, power_of_two, step


class Router(TritonTactic):
    """One block per row, all experts in it."""

    op = "moe_router"

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        (logits,) = signature.inputs
        if len(logits.shape) != 2:
            return f"logits have shape {list(logits.shape)}, expected [T, E]"
        if any(w.dtype != "float32" for w in signature.weights):
            return "the bias is not float32"
        return super().unsupported(signature, target)

    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[LaunchSpec, ...]:
        (logits,), attrs = signature.inputs, signature.attrs
        experts, chosen, groups = int(logits.shape[1]), int(attrs["chosen"]), int(attrs["groups"])
        bias = pointer("bias", "float32", Arg("weight", 0))
        absent = pointer("bias", logits.dtype, Arg("input", 0))  # never read
        arguments = [
            pointer("logits", logits.dtype, Arg("input", 0)),
            bias if signature.weights else absent,
            pointer("ids", "int32", Arg("output", 0)),
            pointer("weights", "float32", Arg("output", 1)),
            step("counts"),
            Argument("scale", "fp32", Arg("f32", value=float(attrs["scale"]))),
            Argument("logits_row", "i32", Arg("input_stride", 0, value=0)),
            Argument("ids_row", "i32", Arg("output_stride", 0, value=0)),
            Argument("weights_row", "i32", Arg("output_stride", 1, value=0)),
        ]
        constants: dict[str, int | float | bool | str] = {
            "EXPERTS": experts, "BLOCK": power_of_two(experts), "CHOSEN": chosen,
            "CHOSEN_BLOCK": power_of_two(chosen), "SCORING": str(attrs["scoring"]), "GROUPS": groups,
            "GROUPS_BLOCK": power_of_two(groups), "CHOSEN_GROUPS": int(attrs["chosen_groups"]),
            "BEST_TWO": attrs["group_by"] == "best_two", "NORMALIZE": bool(attrs["normalize"]),
            "HAS_BIAS": bool(signature.weights),
        }  # fmt: skip
        return (launch("moe_router.triton:route", arguments, constants, (GridDim(1),), 1),)


TACTICS: tuple[CudaTactic, ...] = (Router(),)
