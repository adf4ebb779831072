"""What a build is asked to do: one frozen object, from flags, a YAML file and defaults.

Flag over file over default. A field's metadata is the one place that says what the option
means, which values it takes and whether it changes the engine; the command line is generated
from it, so that flag and file can never differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from tapeout.plugins.cuda import CUBLASLT, NATIVE, TENSORRT
from tapeout.plugins.errors import UnsupportedError, UsageError
from tapeout.plugins.sample.params import shown

DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = ("auto", "float32", "bfloat16")
#: Understood, so that the build can say what to take instead; no help names it.
REFUSED_DTYPES = ("float16",)
#: Whose tactics: everybody's that was timed, or those of a provider (plugins/cuda.py), which then wins.
AUTO = "auto"
TACTICS = (AUTO, NATIVE, CUBLASLT, TENSORRT)
MAX_TOKENS_PER_PAGE = 512
MAX_REQUESTS = 2**20  # far above any machine, and far below what overflows an int32 in a kernel
MAX_TOKENS = 2**24
MAX_SEED = 2**63 - 1
_TARGET = re.compile(r"auto|cpu|cuda:(sm_\d{2,3}|[a-z][a-z0-9]+)")
_HINT = "`tapeout build --help` lists the options; a file takes the same names"

Check = Callable[[Any], str | None]


def _option(
    default: Any,
    kind: type,
    help_text: str,
    *,
    identity: bool,
    check: Check | None = None,
    choices: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A field of BuildOptions.

    `kind` is the value's type (None is allowed where it is the default); `identity` says whether
    the option can change the engine's bytes. Timings are an input beside the options: the path of
    the timing cache is no identity, its content decides which tactics win. `refused` values pass here:
    the compiler knows more about why.
    """
    metadata = {
        "kind": kind,
        "help": help_text,
        "identity": identity,
        "check": check,
        "choices": choices,
        "refused": refused,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


def _between(low: int, high: int) -> Check:
    return lambda value: None if low <= value <= high else f"expected an integer from {low} to {high}"


def _page_size(value: int) -> str | None:
    fits = 1 <= value <= MAX_TOKENS_PER_PAGE and value & (value - 1) == 0
    return None if fits else f"expected a power of two from 1 to {MAX_TOKENS_PER_PAGE}"


def _target(value: str) -> str | None:
    if value == "cuda":
        return "expected a GPU with it: cuda:sm_NN or cuda:SKU (for example cuda:sm_90 or cuda:h100)"
    return (
        None if _TARGET.fullmatch(value) else "expected auto, cpu, cuda:sm_NN or cuda:SKU (for example h100)"
    )


def _file(value: Path) -> str | None:
    try:
        if value.is_dir():
            return "expected a file, this is a directory"
        if value.exists() and not value.is_file():
            return "expected a file, this is a device, pipe or socket"
        return None if value.parent.is_dir() else f"expected an existing directory, {value.parent} is none"
    except OSError as error:
        return f"expected a path that can be opened: {error.strerror}"


def _directory(value: Path) -> str | None:
    try:
        if value.is_file():
            return "expected a directory, this is a file"
        return "expected a directory" if value.exists() and not value.is_dir() else None
    except OSError as error:
        return f"expected a path that can be opened: {error.strerror}"


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Everything a build can be told, validated.

    Invalid values raise one UsageError with a line for each. A limit of None is derived from
    model and target by the compiler: `max_seq_len` is the smaller of the model's maximum and
    4096; `max_batch_size` and `max_num_tokens` are 8 and 512 on `cpu`, 64 and 2048 on `cuda`.

    Raises:
        UsageError: a value is invalid (all of them are listed).
        UnsupportedError: a GPU that is not known, or an option that has no kernels on it.
    """

    target: str = _option(
        "auto",
        str,
        "Machine the engine is for: auto (this one), cpu, cuda:sm_NN or cuda:SKU.",
        identity=True,
        check=_target,
        metavar="TARGET",
    )
    dtype: str = _option(
        "auto",
        str,
        "Precision of weights, activations and KV cache; auto takes the checkpoint's, and of a float16 "
        "checkpoint one of the others must be named.",
        identity=True,
        choices=DTYPES,
        refused=REFUSED_DTYPES,
    )
    max_batch_size: int | None = _option(
        None,
        int,
        "Most requests in flight. [default: 8 on cpu, 64 on cuda]",
        identity=True,
        check=_between(1, MAX_REQUESTS),
    )
    max_num_tokens: int | None = _option(
        None,
        int,
        "Most tokens packed into one step. [default: 512 on cpu, 2048 on cuda]",
        identity=True,
        check=_between(1, MAX_TOKENS),
    )
    max_seq_len: int | None = _option(
        None,
        int,
        "Most tokens of one request, prompt and answer. [default: the model's maximum, at most 4096]",
        identity=True,
        check=_between(2, MAX_TOKENS),
    )
    tokens_per_page: int = _option(
        32, int, "Tokens in one page of the KV cache; a power of two.", identity=True, check=_page_size
    )
    timing_cache: Path | None = _option(
        None,
        Path,
        "Read tactic timings from FILE and add new ones to it.",
        identity=False,
        check=_file,
        metavar="FILE",
    )
    require_timed: bool = _option(
        False,
        bool,
        "Fail, before anything is written, where tactics of a cuda target have no times.",
        identity=False,
    )
    pack: Path | None = _option(
        None,
        Path,
        "Write the tactics of a cuda target to FILE, for `tapeout time`; no engine is written.",
        identity=False,
        check=_file,
        metavar="FILE",
    )
    weights: str = _option(
        "embedded",
        str,
        "Keep weights inside the engine, or in a file beside it that engines share.",
        identity=True,
        choices=("embedded", "shared"),
    )
    quantize: str = _option(
        "none",
        str,
        "Quantize linear weights while building.",
        identity=True,
        choices=("none", "int8-dynamic"),
    )
    batch_invariant: bool = _option(
        False,
        bool,
        "Only tactics whose result for a row does not depend on what shares its step.",
        identity=True,
    )
    tactics: str = _option(
        "auto",
        str,
        "Whose tactics a cuda target may have: auto: all that were timed, TensorRT's segments where they "
        "were faster; native: our own kernels; cublaslt: cuBLASLt for every product it was timed for; "
        "tensorrt: TensorRT for all between two attention ops.",
        identity=True,
        choices=TACTICS,
    )
    keep_onnx: Path | None = _option(
        None,
        Path,
        "Write the dense regions of a cuda target, which TensorRT gets, as ONNX files into DIR.",
        identity=False,
        check=_directory,
        metavar="DIR",
    )
    verify: bool = _option(
        True, bool, "Compare the engine with Hugging Face on short prompts.", identity=True
    )
    seed: int = _option(
        0,
        int,
        "Seed of the inputs that tactics are checked and timed with.",
        identity=True,
        check=_between(0, MAX_SEED),
    )
    trust_remote_code: bool = _option(
        False, bool, "Run Python code that comes with the model.", identity=True
    )
    revision: str | None = _option(
        None, str, "Branch, tag or commit of a hub id.", identity=False, metavar="REV"
    )
    dump: Path | None = _option(
        None,
        Path,
        "Write the graph after every pass as text into DIR.",
        identity=False,
        check=_directory,
        metavar="DIR",
    )
    dry_run: bool = _option(
        False, bool, "Print limits, memory and file sizes; write nothing.", identity=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if problems := [p for name, value in values.items() if (p := problem(name, value, name))]:
            raise UsageError("\n".join(problems), hint=_HINT)
        if cross := _cross_problems(self):
            raise UsageError("\n".join(cross), hint=_HINT)
        if self.target.startswith("cuda:"):
            _check_cuda(self)

    @property
    def providers(self) -> frozenset[str]:
        """Whose tactics of single ops compete on a cuda target."""
        return frozenset({NATIVE, *((CUBLASLT,) if self.tactics in {AUTO, CUBLASLT} else ())})

    @property
    def segments_compete(self) -> bool:
        """May TensorRT segments run regions? Not those of batch invariance, nor where others were named."""
        return self.tactics in {AUTO, TENSORRT} and not self.batch_invariant

    def effective(self) -> dict[str, Any]:
        """All options as plain data (paths as text), for printing and reports."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: str(value) if isinstance(value, Path) else value for name, value in values}

    def identity(self) -> dict[str, Any]:
        """The options that can change the engine's bytes: what a manifest or cache key holds.

        `revision` is not among them: the checkpoint's own digest says more.
        """
        return {name: value for name, value in self.effective().items() if FIELDS[name].metadata["identity"]}


FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(BuildOptions)}


def problem(name: str, value: Any, label: str) -> str | None:
    """What is wrong with one option's value, or None; `label` is how the user wrote the option."""
    option = FIELDS[name]
    kind, choices, check = (option.metadata[key] for key in ("kind", "choices", "check"))
    if value is None and option.default is None:
        return None
    # An exact comparison: True is an int to isinstance. Path is an abstract front of its subclasses.
    if not (isinstance(value, Path) if kind is Path else type(value) is kind):
        names = {int: "an integer", str: "text", bool: "true or false", Path: "a path"}
        return f"{label}: {shown(value)} is of type {type(value).__name__}, expected {names[kind]}"
    if choices and value not in (*choices, *option.metadata["refused"]):
        return f"{label}: {shown(value)} is unknown, expected one of {', '.join(choices)}"
    complaint = check(value) if check else None
    text = shown(str(value)) if isinstance(value, (str, Path)) else f"'{shown(value)}'"
    return f"{label}: {text} is invalid, {complaint}" if complaint else None


def _check_cuda(options: BuildOptions) -> None:
    """Refuse what no cuda engine can be, before anything is traced."""
    from tapeout.compiler.targets import cuda_target

    cuda_target(options.target)
    if options.quantize != "none":
        raise UnsupportedError(
            f"quantize: {options.quantize!r} has no kernels on {options.target}, expected none",
            hint="build with --dtype bfloat16; int8-dynamic is there on --target cpu",
        )


#: Libraries that run a row otherwise in another bucket.
_BY_BUCKET = {
    CUBLASLT: "its algorithms differ from bucket to bucket",
    TENSORRT: "its kernels differ from one range of rows to the next",
}


def _cross_problems(options: BuildOptions) -> list[str]:
    """Combinations that no engine can have."""
    problems = []
    tactics, on_cuda = options.tactics, options.target.startswith("cuda:")
    if tactics in _BY_BUCKET and options.batch_invariant:
        problems.append(f"tactics: {tactics!r} goes against batch_invariant: {_BY_BUCKET[tactics]}")
    if tactics in _BY_BUCKET and not on_cuda:
        problems.append(f"tactics: {tactics!r} is for cuda targets, got target {options.target!r}")
    batch, tokens = options.max_batch_size, options.max_num_tokens
    if batch is not None and tokens is not None and tokens < batch:
        problems.append(
            f"max_num_tokens: {tokens} is less than max_batch_size {batch}, "
            "expected at least one token for each request in flight"
        )
    return problems
