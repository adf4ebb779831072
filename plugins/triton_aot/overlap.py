"""Starting a kernel before the launch ahead of it has ended (programmatic dependent launch).

A kernel that takes the constant OVERLAP waits on every path, also where it has nothing to do: the
launch after it waits for this one alone, and so relies on it having waited for those before. Until
then it may touch nothing but weights and what the host wrote for the step. `compile.py` beside this
file fills the constant in, true on SMs that can (sm_90 and later); no spec of a kernel names it.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next launch may begin as soon as every block of this one has come here."""
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Wait until all launches ahead are complete and what they wrote is visible."""
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def take_turn(counts, COUNT: tl.constexpr, OVERLAP: tl.constexpr):
    """What a kernel starts with that has nothing else to do ahead of its turn; returns its row count."""
    let_next_start(OVERLAP)
    rows = tl.load(counts + COUNT)
    wait_for_earlier(OVERLAP)
    return rows


@triton.jit
def fetch_to_l2(pointers):
    """Ask for the 128 bytes around each address; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
