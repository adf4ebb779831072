"""What a tactic on a CUDA target is: plain data that a build turns into cubins and launch records.

Nothing here runs at run time: the engine stores compiled kernels and launches, and the
executor replays them without knowing ops or tactics. Importing this module imports neither
torch nor Triton.

Every kernel reads the step's real counts from device memory (`counts`: int32 [T, B, max_q,
max_kv, R]) and must neither write nor fail for the padding rows of a bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tapeout.plugins.cpu import OpSignature

MAX_KV_HEADS = 256  # that `arrivals` has room for
#: Steps in flight: each has its own inbox and outbox in the host's memory. A power of two.
TURNS = 4
#: Who makes a tactic: our own kernels, or a library that an engine needs only where it chose one.
NATIVE, CUBLASLT = "native", "cublaslt"
#: Whole regions of dense ops by TensorRT: no tactic of an op, but the name of what runs the ops of a region.
TENSORRT = "tensorrt"
#: Arguments of a MatmulSpec, in this order; rows are elements between rows.
MATMUL_ARGS = ("x", "x_row", "weight", "out", "out_row", "addend", "addend_row", "bias", "workspace")

#: Step tensors a launch may name; all int32 on the device except kv_pool.
STEP_TENSORS = (
    "counts",  # [5] T, B, longest row run, longest cache, R
    "token_ids",  # [max_num_tokens]
    "positions",  # [max_num_tokens]
    "cu_q",  # [max_batch_size + 1]
    "kv_lens",  # [max_batch_size]
    "page_table",  # [max_batch_size, max_pages_per_seq]
    "row_ids",  # [max_batch_size]
    "row_seqs",  # [max_num_tokens] sequence of each packed row
    "arrivals",  # [max_batch_size, MAX_KV_HEADS] 0 between launches: blocks count themselves here
    "kv_pool",  # [num_pages, layers, 2, kv_heads, tokens_per_page, head_dim]
    "turns",  # [2] steps received, and blocks that have received the one on its way
    # In the host's memory:
    "inbox",  # [TURNS, inbox_words] a step's tensors from `counts` to `page_table` as the host wrote them
    "outbox",  # [TURNS, 2, max_batch_size] ids sampled; 0 where a row's logits held NaN or infinity, else 1
    # Sampling (plugins/sample/cuda.py); a slot is a running request's place in device state.
    "seq_slots",  # [max_batch_size] slot of each sequence of the step
    "last_ids",  # [slots] id sampled last for the slot; stays on the device from step to step
    "out_ids",  # [max_batch_size] ids sampled for the step's logit rows
    "sample_state",  # [slots, SAMPLE_STATE_WORDS] see plugins/sample/state.py
    "sample_bits",  # [slots, 2, bits_row(V)] sets of ids
    "output_counts",  # [slots, counts_row(V)] how often a slot sampled each id
    "out_logprobs",  # [max_batch_size, LOGPROB_WORDS] see plugins/sample/logprob_words.py
)


@dataclass(frozen=True)
class CudaTarget:
    """The device a kernel is compiled for."""

    sm: int  # 80, 89, 90, 100, 120
    sm_count: int
    shared_bytes_per_block: int
    #: Of the engine's cache: page size, and element type ("" = that of the keys).
    tokens_per_page: int = 32
    kv_dtype: str = ""


@dataclass(frozen=True)
class KernelSpec:
    """A Triton kernel and everything its cubin depends on beside the compiler and the SM.

    Attributes:
        module: import path of the file that defines it, for example `tapeout.plugins.linear.triton`.
        function: name of the `@triton.jit` function.
        signature: (argument name, Triton type) in order, for example ("x", "*bf16"), ("n", "i32").
        constants: constexpr arguments by name.
    """

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    #: pointer arguments that are 16-byte aligned and integers divisible by 16 (by name)
    divisible_by_16: tuple[str, ...] = ()
    #: False: every product and sum is rounded by itself, as in numpy
    fp_fusion: bool = True
    #: blocks a program is: a cluster of them, which share their shared memory (SM 90 and above)
    cluster: int = 1
    #: the kernel's loads on their way lie in the first level cache, which therefore gets all it can
    prefers_l1: bool = False

    def key(self) -> str:
        """Identity of the kernel for one compiler and SM."""
        constants = sorted((k, repr(v)) for k, v in self.constants.items())
        parts = (self.module, self.function, self.signature, constants, self.num_warps, self.num_stages)
        special = {"cluster": self.cluster} if self.cluster > 1 else {}
        special |= {"prefers_l1": 1} if self.prefers_l1 else {}
        return repr((*parts, self.divisible_by_16, self.fp_fusion, *special.items()))


@dataclass(frozen=True)
class Arg:
    """A kernel argument.

    kind: `input`, `output`, `weight` (pointer, `index` into the signature's operands), `step` (pointer,
    `name` from STEP_TENSORS), `workspace` (pointer, `value` bytes into the tactic's workspace),
    `input_stride`, `output_stride` (i32, elements between steps of dimension `value` of operand
    `index`; operands may be windows of wider rows), `i32`, `i64`, `f32` (`value`), `attr` (i32,
    the record's attribute `name`: what differs between layers, such as `layer`), `layers` (i32,
    layers in the pool), `max_pages` (i32, width of the page table), `inbox_words`, `outbox_words` (i32,
    int32 words from one turn's to the next's). Strides are multiples of 16
    elements and pointers 16-byte aligned; the planner asserts it.
    """

    kind: str
    index: int = 0
    name: str = ""
    value: int | float = 0


@dataclass(frozen=True)
class GridDim:
    """Blocks in one dimension: ceil(rows / per_block) * times, where rows is the bucket's padded
    row count (of the op's own leading symbol); `per_block` 0 means the constant `times`."""

    per_block: int = 0
    times: int = 1


@dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch of a tactic."""

    kernel: KernelSpec
    grid: tuple[GridDim, GridDim, GridDim]
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class MatmulAlgorithm:
    """How cuBLASLt is to compute a product: known only where the library and a GPU are.

    Attributes:
        data: the 64 bytes of its cublasLtMatmulAlgo_t, in hex.
        version: of the library that chose it, as it numbers itself: 131000 is 13.10.0.
        workspace_bytes: memory it wants.
    """

    data: str
    version: int
    workspace_bytes: int


@dataclass(frozen=True)
class MatmulSpec:
    """A call of cuBLASLt: out [rows, n] = x [rows, k] @ weight [n, k]^T + bias [n] + addend [rows, n].

    `rows` is the bucket's padded row count: the call reads and writes padding rows too, whatever x
    holds there; no row depends on another. Sums are float32 and rounded once.

    Attributes:
        dtype: of all operands.
        bias, addend: whether they are there; the arguments of those absent are never read.
        args: as MATMUL_ARGS names them.
        workspace_bytes: what the algorithm may take, until there is one.
    """

    dtype: str
    n: int
    k: int
    bias: bool
    addend: bool
    args: tuple[Arg, ...]
    workspace_bytes: int
    algorithm: MatmulAlgorithm | None = None


#: What a tactic is made of.
Launchable = LaunchSpec | MatmulSpec


def kernels_of(launches: Iterable[Launchable]) -> list[KernelSpec]:
    """The kernels among the launches, in their order."""
    return [item.kernel for item in launches if isinstance(item, LaunchSpec)]


class CudaTactic(ABC):
    """One way to run an op on a CUDA device."""

    op: str
    name: str
    #: A tactic of another provider than NATIVE needs its library, so it is never a default.
    provider: str = NATIVE
    batch_invariant: bool = False
    #: True: right only where every sequence of the step has one row (decode-only buckets).
    decode_only: bool = False
    #: False: Triton's interpreter cannot run its kernels, so that nothing but a GPU has checked them;
    #: such a tactic is never a default, only a winner of timings, which check it first.
    interpretable: bool = True
    #: Correct at any number of rows, but hopeless beyond this one: not worth timing (0: no bound).
    max_rows: int = 0

    def unsupported(self, signature: OpSignature, target: CudaTarget) -> str | None:
        """Why this tactic cannot run the signature on the target; None when it can."""
        return None

    def expected_us(self, signature: OpSignature, rows: int, target: CudaTarget) -> float:
        """A rough guess at the time, only to rank tactics where nothing was timed."""
        return 1.0

    def workspace_bytes(self, signature: OpSignature, rows: int, target: CudaTarget) -> int:
        """Scratch the launches share at a bucket of `rows` rows; contents need no initial value."""
        return 0

    @abstractmethod
    def launches(self, signature: OpSignature, rows: int, target: CudaTarget) -> tuple[Launchable, ...]:
        """The launches that run the op for a bucket padded to `rows` rows."""
