"""Which package builds for a target, and what is said where none can."""

from __future__ import annotations

import pytest

from tapeout.compiler.tensorrt import choice
from tapeout.compiler.tensorrt.choice import KnownBad, choose_package, crash_note
from tapeout.plugins.errors import UnsupportedError
from tapeout.runtime.tensorrt.package import FULL, RTX

FULL_VERSION, RTX_VERSION = "11.4.0.106", "1.7.1.116"


@pytest.mark.parametrize(
    ("sm", "full", "rtx", "gpu", "expected"),
    [
        (89, None, RTX_VERSION, False, RTX),
        (120, FULL_VERSION, RTX_VERSION, False, RTX),  # full TensorRT needs the GPU
        (89, FULL_VERSION, RTX_VERSION, True, FULL),  # it times its tactics there
        (89, None, RTX_VERSION, True, RTX),
        (90, FULL_VERSION, None, True, FULL),
        (100, FULL_VERSION, RTX_VERSION, True, FULL),
    ],
)
def test_the_package(sm: int, full: str | None, rtx: str | None, gpu: bool, expected: str) -> None:
    assert choose_package(sm, f"cuda:sm_{sm}", "bfloat16", full=full, rtx=rtx, gpu=gpu) == expected


@pytest.mark.parametrize(
    ("sm", "full", "rtx", "gpu", "message", "hint"),
    [
        (89, None, None, False, "TensorRT-RTX is not installed", r"pip install 'tapeout\[tensorrt-rtx\]'"),
        (89, FULL_VERSION, None, False, "TensorRT-RTX is not installed", "--tactics native"),
        (
            90,
            None,
            RTX_VERSION,
            False,
            r"not for sm_90; TensorRT \(not installed\)",
            "a machine with that GPU",
        ),
        (100, FULL_VERSION, RTX_VERSION, False, "11.4.0.106 is installed.*this machine has none", "that GPU"),
        (90, None, RTX_VERSION, True, "this machine has one", r"tapeout\[tensorrt\]"),
    ],
)
def test_what_is_said_where_none_can(
    sm: int, full: str | None, rtx: str | None, gpu: bool, message: str, hint: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as told:
        choose_package(sm, f"cuda:sm_{sm}", "bfloat16", full=full, rtx=rtx, gpu=gpu)
    assert f"cuda:sm_{sm}" in told.value.message
    with pytest.raises(UnsupportedError, match=hint):
        raise UnsupportedError(str(told.value.hint))


def test_a_dtype_that_the_gpu_lacks() -> None:
    with pytest.raises(
        UnsupportedError, match="'bfloat16' on cuda:sm_75: sm_80 has it first, this is sm_75"
    ) as told:
        choose_package(75, "cuda:sm_75", "bfloat16", full=None, rtx=RTX_VERSION, gpu=False)
    assert "--dtype float32" in str(told.value.hint)
    assert choose_package(75, "cuda:sm_75", "float16", full=None, rtx=RTX_VERSION, gpu=False) == RTX
    with pytest.raises(UnsupportedError, match="'float64' on cuda:sm_89: segments have no such dtype"):
        choose_package(89, "cuda:sm_89", "float64", full=None, rtx=RTX_VERSION, gpu=False)


@pytest.mark.parametrize(
    ("version", "bad"), [("1.3", False), ("1.4.0.76", True), ("1.6.9.9", True), ("1.10.0.1", False)]
)
def test_versions_whose_results_are_wrong_are_refused(
    version: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are compared as numbers; the error tells the symptom and where it is told."""
    row = KnownBad(RTX, "1.4.0.0", "1.6.9.9", "writes what this test made up", "a test", silent=True)
    monkeypatch.setattr(choice, "KNOWN_BAD", (row,))
    if not bad:
        assert choose_package(89, "cuda:sm_89", "float16", full=None, rtx=version, gpu=False) == RTX
        return
    with pytest.raises(
        UnsupportedError, match=f"TensorRT-RTX {version} writes what this test made up .*: a test"
    ):
        choose_package(89, "cuda:sm_89", "float16", full=None, rtx=version, gpu=False)


def test_the_table_of_known_versions() -> None:
    """10.3 is refused; 11.1 is not, and explains a builder that ended on an sm_120."""
    with pytest.raises(UnsupportedError, match=r"TensorRT 10.3.0 gives wrong results for transformers"):
        choose_package(89, "cuda:sm_89", "bfloat16", full="10.3.0", rtx=None, gpu=True)
    assert choose_package(120, "cuda:rtx5090", "bfloat16", full="11.1.0.106", rtx=None, gpu=True) == FULL
    assert "may end its process" in crash_note(FULL, "11.1.0.106", 120)
    assert crash_note(FULL, "11.1.0.106", 89) == crash_note(FULL, FULL_VERSION, 120) == ""
