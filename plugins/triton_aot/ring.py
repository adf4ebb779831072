"""Rings of tiles in shared memory, for kernels in Gluon: slots, and waiting for their barriers by address."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def advance(slot, phase, RING: gl.constexpr):
    """The next slot of a ring, and the parity of its barriers."""
    last = slot == RING - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def wait(barriers, index, phase):
    """Wait for a phase of a barrier; `barriers` is the address of the first, 8 bytes each."""
    gl.inline_asm(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @!done bra again;
        }""",
        "r,r",
        [barriers + index * 8, phase],
    )
