"""CUDA kernels compile for every SM without a GPU, reproducibly and within recorded resources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cuda_variants
from cuda_variants import LIMITS, SHARED_BYTES, SMS, launches, occupied, variants

from tapeout.plugins.case import signature
from tapeout.plugins.cpu import TensorType
from tapeout.plugins.cuda import kernels_of
from tapeout.plugins.errors import TapeoutError, UnsupportedError
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.triton_aot import SCRATCH_TYPES, compile_all, compile_kernel, kernel_digest
from tapeout.plugins.triton_aot.digest import _begun, _source_closure, kernel_function

_POINTER_KINDS = {"input", "output", "weight", "step", "workspace"}


@pytest.mark.parametrize("sm", SMS)
def test_kernels_compile_within_recorded_resources(sm: int) -> None:
    chosen = variants(sm)
    kernels = compile_all(list(chosen.values()), sm)
    recorded = json.loads(LIMITS.read_text())[str(sm)]
    grown = {
        name: (found, recorded.get(name))
        for name, found in occupied(list(chosen), kernels).items()
        if name not in recorded or any(found[what] > recorded[name][what] for what in found)
    }
    assert not grown, "more than recorded; if meant, run tests/plugins/cuda_variants.py"


def test_recorded_kernels_spill_little_and_fit_their_sm() -> None:
    for sm, kernels in json.loads(LIMITS.read_text()).items():
        assert set(kernels) == set(variants(int(sm))), f"sm_{sm}: run tests/plugins/cuda_variants.py"
        for name, found in kernels.items():
            assert found["stack_bytes"] <= 128, (sm, name)  # a few spills outside the loops
            assert found["registers"] <= 255, (sm, name)
            assert found["shared_bytes"] <= SHARED_BYTES[int(sm)], (sm, name)


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        ("sample.triton_inbox:receive", 80),
        ("sample.triton_inbox:receive", 120),  # with the wait for the launch ahead
        ("rms_norm.triton:", 89),
        ("linear.gluon_stream:", 90),  # Gluon's front end
    ],
)
def test_cubins_are_those_of_tritons_own_driver(
    name: str, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stages run without its cache; nothing else differs, nor what it tells about the kernel."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    spec = next(spec for key, spec in variants(sm).items() if key.startswith(name))
    function = kernel_function(spec)
    types, constants = dict(spec.signature), dict(spec.constants)
    if "OVERLAP" in function.arg_names:
        constants["OVERLAP"] = sm >= 90
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(
        function,
        {n: types.get(n, "constexpr") for n in function.arg_names},
        constants,
        {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in spec.divisible_by_16},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": spec.fp_fusion}
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "triton")
        knobs.compilation.disable_line_info = True
        theirs = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    ours = compile_kernel(spec, sm)
    assert ours.cubin == theirs.asm["cubin"]
    told = theirs.metadata
    assert (ours.symbol, ours.threads, ours.shared_bytes, ours.scratch_bytes, ours.scratch_alignment) == (
        told.name,
        32 * told.num_warps,
        told.shared,
        told.global_scratch_size,
        told.global_scratch_align,
    )


@pytest.mark.gpu_compile_all
@pytest.mark.parametrize("sm", SMS)
def test_every_launch_compiles(sm: int, request: pytest.FixtureRequest) -> None:
    if "gpu_compile_all" not in request.config.option.markexpr:
        pytest.skip("minutes of compiling: pytest -m gpu_compile_all")
    kernels = compile_all([launch.kernel for launch in launches(sm)], sm)
    assert all(k.shared_bytes <= SHARED_BYTES[sm] for k in kernels)


_DIGESTS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from cuda_variants import variants
from tapeout.plugins.triton_aot import compile_kernel, kernel_digest
for name in ("rms_norm.triton:rms_norm", "linear.triton_gemm:persistent"):
    spec = variants(90)[name]
    print(name, kernel_digest(spec), hashlib.sha256(compile_kernel(spec, 90).cubin).hexdigest())
"""


def test_cubins_repeat_in_other_processes_and_folders(tmp_path: Path) -> None:
    seen = []
    for name in ("a", "a_much_longer_name"):
        folder = tmp_path / name
        folder.mkdir()
        environment = os.environ | {
            "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": str(len(name)),
            "TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_DISABLE_LINE_INFO": "0",
        }  # fmt: skip
        command = [sys.executable, "-c", _DIGESTS, str(Path(cuda_variants.__file__).parent)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder, env=environment, timeout=300
        )
        seen.append(done.stdout)
        assert len(list((folder / "tapeout" / "triton").iterdir())) == 2
    assert seen[0].count("\n") == 2
    assert seen[0] == seen[1]
    spec = variants(90)["rms_norm.triton:rms_norm"]
    assert os.fsencode(Path(__file__).parents[2]) not in compile_kernel(spec, 90).cubin


def test_products_over_few_columns_compile() -> None:
    """Fewer than one fetch ahead of a kernel's turn brings."""
    x, out = TensorType("float32", ("T", 24)), TensorType("float32", ("T", 32))
    types = signature("linear", (x,), (out,), (TensorType("float32", (32, 24)),))
    found = []
    for tactic in cuda_tactics("linear"):
        if tactic.interpretable and tactic.unsupported(types, cuda_variants.target(90)) is None:
            found += kernels_of(tactic.launches(types, 4, cuda_variants.target(90)))
    functions = {spec.function: spec for spec in found}
    assert "skinny" in functions
    compile_all(list(functions.values()), 90)


def test_arguments_are_what_the_launch_passes() -> None:
    for launch in launches(90):
        spec = launch.kernel
        assert len(spec.signature) == len(launch.args), spec.function
        for (name, kind), arg in zip(spec.signature, launch.args, strict=True):
            assert kind.startswith("*") == (arg.kind in _POINTER_KINDS), (spec.function, name)
            if not kind.startswith("*"):
                assert kind == {"f32": "fp32", "i64": "i64"}.get(arg.kind, "i32"), (spec.function, name)


def test_parameters_in_the_cubin(tmp_path: Path) -> None:
    """The ELF's own parameter table: as many as `arguments`, of their sizes."""
    from triton import knobs

    for name, spec in variants(90).items():
        if name not in {"rms_norm.triton:rms_norm", "linear.triton_gemm:persistent", "rope.triton:rope"}:
            continue
        kernel = compile_kernel(spec, 90)
        assert kernel.arguments[-2:] == SCRATCH_TYPES
        file = tmp_path / "kernel.cubin"
        file.write_bytes(kernel.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-elf", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Ordinal\s*:\s*(0x[0-9a-f]+).*?Size\s*:\s*(0x[0-9a-f]+)", text)
        sizes = [size for _, size in sorted((int(o, 16), int(s, 16)) for o, s in set(found))]
        assert sizes == [8 if kind.startswith("*") or kind == "i64" else 4 for kind in kernel.arguments], name


def test_rope_rounds_every_product_to_bfloat16(tmp_path: Path) -> None:
    """A fused multiply-add of bfloat16 would skip the rounding between product and sum.

    A multiplication is one with -RZ as its addend, an addition one with a factor of one.
    """
    from triton import knobs

    turned = TensorType("bfloat16", ("T", 12, 64))
    types = signature(
        "rope", (turned, TensorType("bfloat16", ("T", 64))), (turned,), (), {"interleaved": False}
    )
    fused = r"HFMA2\S*\.BF16\S* +R\d+\S*, R\d+\S*, R\d+\S*, -?R\d"
    for sm in SMS:
        (launch,) = cuda_tactics("rope")[0].launches(types, 64, cuda_variants.target(sm))
        found = []
        for fp_fusion in (launch.kernel.fp_fusion, True):
            file = tmp_path / "kernel.cubin"
            file.write_bytes(compile_kernel(replace(launch.kernel, fp_fusion=fp_fusion), sm).cubin)
            command = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert "BF16" in text
            found.append(len(re.findall(fused, text)))
        assert found[0] == 0, f"sm_{sm}"
        assert found[1] > 0, f"sm_{sm}: the pattern no longer knows a fused multiply-add"


def test_digest_follows_what_the_kernel_computes() -> None:
    spec = variants(90)["gated_activation.triton:gated_activation"]
    others = (
        replace(spec, num_warps=2 * spec.num_warps),
        replace(spec, constants={**spec.constants, "KIND": "relu"}),
        replace(spec, fp_fusion=False),
    )
    assert len({kernel_digest(s) for s in (spec, *others)}) == 4
    same = replace(spec, constants=dict(reversed(spec.constants.items())))
    assert kernel_digest(same) == kernel_digest(spec)


def test_digest_reaches_helpers_and_globals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in a helper of a helper counts; a comment or another line number does not."""
    source = (
        "import triton\nimport triton.language as tl\nSCALE: tl.constexpr = tl.constexpr(2.0)\n"
        "@triton.jit\ndef inner(x):\n    return x * SCALE\n"
        "@triton.jit\ndef outer(x):\n    return inner(x) + 1\n"
        "@triton.jit\ndef kernel(p):\n    tl.store(p, outer(tl.load(p)))\n"
    )
    edits = (source, "# moved\n\n" + source, source.replace("2.0", "3.0"), source.replace("+ 1", "+ 2"))
    digests = []
    for i, text in enumerate(edits):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "aot_probe.py").write_text(text)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "aot_probe", raising=False)
        _source_closure.cache_clear()
        _begun.cache_clear()
        spec = replace(
            variants(90)["rope.triton:rope"], module="aot_probe", function="kernel",
            signature=(("p", "*fp32"),), constants={}, divisible_by_16=(),
        )  # fmt: skip
        digests.append(kernel_digest(spec))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_spec_errors_are_all_named() -> None:
    spec = variants(90)["rope_table.triton:rope_table"]
    bad = replace(spec, signature=(("counts", "*i32"), ("positions", "*f8")), constants={"NOPE": 1})
    with pytest.raises(UnsupportedError) as caught:
        compile_kernel(bad, 91)
    for part in ("SM 91", "'inv_freq'", "'NOPE'", "*f8", "order"):
        assert part in str(caught.value)
    with pytest.raises(UnsupportedError, match="no Triton kernel 'nothing'"):
        compile_kernel(replace(spec, function="nothing"), 90)
    with pytest.raises(TapeoutError, match=r"rope_table.*sm_90"):
        compile_kernel(replace(spec, constants={**spec.constants, "BLOCK": 33}), 90)


def test_damaged_cache_entries_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = variants(90)["triton_aot.elementwise:copy"]
    kernel = compile_kernel(spec, 90)
    (entry,) = (tmp_path / "tapeout" / "triton").iterdir()
    for damage in (entry.read_bytes()[:-7], b"", b"{}\nrest"):
        entry.write_bytes(damage)
        assert compile_kernel(spec, 90) == kernel
    assert entry.read_bytes().endswith(kernel.cubin)
