"""Reads device memory as fast as it goes: a kernel in PTX, which the driver itself compiles."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, closing

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.executors.cuda import driver

_THREADS, _BLOCKS_PER_SM = 512, 4
#: Every thread reads 16 bytes at four places far apart, again and again, and keeps only their xor, which
#: is written where it has a value that zeros never give: so that the reads cannot be left out.
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry read_all(.param .u64 source, .param .u64 words, .param .u64 out)
{
  .reg .pred %p<2>;
  .reg .b32 %r<28>;
  .reg .b64 %d<12>;
  ld.param.u64 %d0, [source];
  ld.param.u64 %d1, [words];
  ld.param.u64 %d2, [out];
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ntid.x;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r0, %r1, %r2;
  cvt.u64.u32 %d3, %r4;
  mul.wide.u32 %d4, %r1, %r3;
  shl.b64 %d5, %d4, 4;
  shl.b64 %d6, %d3, 4;
  add.u64 %d7, %d0, %d6;
  mov.u32 %r5, 0;
AGAIN:
  setp.ge.u64 %p0, %d3, %d1;
  @%p0 bra DONE;
  add.u64 %d8, %d7, %d5;
  add.u64 %d9, %d8, %d5;
  add.u64 %d10, %d9, %d5;
  ld.global.nc.v4.u32 {%r8, %r9, %r10, %r11}, [%d7];
  ld.global.nc.v4.u32 {%r12, %r13, %r14, %r15}, [%d8];
  ld.global.nc.v4.u32 {%r16, %r17, %r18, %r19}, [%d9];
  ld.global.nc.v4.u32 {%r20, %r21, %r22, %r23}, [%d10];
  xor.b32 %r8, %r8, %r9;
  xor.b32 %r10, %r10, %r11;
  xor.b32 %r12, %r12, %r13;
  xor.b32 %r14, %r14, %r15;
  xor.b32 %r16, %r16, %r17;
  xor.b32 %r18, %r18, %r19;
  xor.b32 %r20, %r20, %r21;
  xor.b32 %r22, %r22, %r23;
  xor.b32 %r8, %r8, %r10;
  xor.b32 %r12, %r12, %r14;
  xor.b32 %r16, %r16, %r18;
  xor.b32 %r20, %r20, %r22;
  xor.b32 %r8, %r8, %r12;
  xor.b32 %r16, %r16, %r20;
  xor.b32 %r5, %r5, %r8;
  xor.b32 %r5, %r5, %r16;
  add.u64 %d7, %d10, %d5;
  shl.b64 %d11, %d4, 2;
  add.u64 %d3, %d3, %d11;
  bra AGAIN;
DONE:
  setp.eq.u32 %p1, %r5, 2654435769;
  @%p1 st.global.u32 [%d2], %r5;
  ret;
}
"""


def _kernel() -> driver.Function:
    try:
        return driver.Function(_PTX + b"\0", "read_all", 0)
    except TapeoutError as error:
        error.hint = "the driver's PTX compiler is needed to measure bandwidth; --no-roofline does without"
        raise


class DeviceReader:
    """A buffer on the device and the kernel that reads all of it.

    `size_bytes` is rounded down to what all threads read together. Raises TapeoutError where the driver
    cannot compile the kernel, CapacityError where the buffer does not fit.
    """

    def __init__(self, size_bytes: int) -> None:
        self._device = driver.open_device()
        self._device.make_current()
        self._blocks = _BLOCKS_PER_SM * self._device.facts.sm_count
        at_once = 4 * 16 * _THREADS * self._blocks
        self.size_bytes = size_bytes // at_once * at_once
        with ExitStack() as stack:
            self._memory = stack.enter_context(closing(driver.DeviceMemory(self.size_bytes, "measuring")))
            self._out = stack.enter_context(closing(driver.DeviceMemory(256, "measuring")))
            self._stream = stack.enter_context(closing(driver.Stream()))
            self._kernel = stack.enter_context(closing(_kernel()))
            self._memory.zero()
            self._resources = stack.pop_all()

    def read(self, times: int) -> None:
        """Read the whole buffer so many times; waits for the end."""
        values = (self._memory.address, self.size_bytes // 16, self._out.address)
        for _ in range(times):
            driver.launch(
                self._kernel, (self._blocks, 1, 1), _THREADS, 0, self._stream, values, (ctypes.c_uint64,) * 3
            )
        self._stream.wait()

    def close(self) -> None:
        self._resources.close()
