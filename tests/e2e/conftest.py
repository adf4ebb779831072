"""Real engines for the end-to-end tests, made once a session: SmolLM2 in three precisions, and a tiny one.

The SmolLM2 builds run in the background from the session's first test on, so that tests that do
not need them fill the wait. Timings are kept in pytest's cache folder: a later session builds warm.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli

# Tests are imported by path (importlib mode), so their shared helpers need a place to be found.
sys.path.insert(0, str(Path(__file__).parent))

# Builds and tests share the cores: OpenMP threads that spin at barriers would slow each other down
# many times over. Read when torch is loaded, so it counts here unless another test was first.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

TAPEOUT = Path(sys.executable).with_name("tapeout")
#: Fixtures that need a SmolLM2 engine.
_ENGINES = {"smollm2_build", "smollm2_bf16", "smollm2_int8"}

# One process for both, because importing the compiler costs as much as tracing. Only the float32
# build is compared with HF while building; here tests compare more than that would. Which tactics win is
# nothing to them, so a few passes of each are enough.
_VARIANTS = """
import sys
from pathlib import Path
from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics import timing
timing._MIN_SECONDS = 0.0
model, folder, cache = sys.argv[1:]
common = {"timing_cache": Path(cache), "verify": False}
for name, options in (("bf16", {"dtype": "bfloat16"}), ("int8", {"quantize": "int8-dynamic"})):
    build(model, Path(folder) / f"{name}.engine", BuildOptions(**options, **common))
"""


@dataclass(frozen=True)
class Built:
    """An engine that was built by a real `tapeout build`, with what the user saw."""

    engine: Path
    code: int
    stdout: str
    stderr: str


def _run(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`tapeout ARGS` in a process of its own; text in, text out."""
    defaults = {"capture_output": True, "encoding": "utf-8", "timeout": 300}
    return subprocess.run([TAPEOUT, *map(str, args)], check=False, **{**defaults, **options})


def timing_folder(config: pytest.Config) -> Path:
    """Where timings outlive the session; another one when the cache's own code changes."""
    code = (Path(__file__).parents[2] / "compiler" / "tactics" / "cache.py").read_bytes()
    assert config.cache is not None
    return Path(config.cache.mkdir(f"tapeout-e2e-{hashlib.sha256(code).hexdigest()[:12]}"))


@pytest.fixture(scope="session")
def tapeout() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed command in a real process."""
    return _run


@pytest.fixture(scope="session")
def command() -> Path:
    """The installed command, for tests that talk to it while it runs."""
    return TAPEOUT


@pytest.fixture(scope="session")
def invoke() -> Callable[..., Result]:
    """Runs the command inside this process: for the many cases where starting one is the slow part."""

    def invoke(*args: str | Path, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, list(map(str, args)), input=stdin)

    return invoke


# ---- SmolLM2 ----------------------------------------------------------------------------------


def _fixtures_of(item: pytest.Item) -> set[str]:
    """Fixtures of a test, also those that its parameters name; `smollm2` is what `smollm2_build` built."""
    callspec = getattr(item, "callspec", None)
    named = {v for v in callspec.params.values() if isinstance(v, str)} if callspec else set()
    return {*getattr(item, "fixturenames", ()), *named, *({"smollm2_build"} if "smollm2" in named else ())}


@pytest.fixture(scope="session", autouse=True)
def smollm2_processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """The running builds by name, started only when some collected test needs an engine of them."""
    needed = {name for item in request.session.items for name in _fixtures_of(item)} & _ENGINES
    cache = timing_folder(request.config)
    folder = tmp_path_factory.mktemp("smollm2")
    started: dict[str, tuple[subprocess.Popen[str], Path]] = {}

    def start(name: str, *command: str | Path) -> None:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        started[name] = (subprocess.Popen([*map(str, command)], **pipes), folder)

    if needed:
        model = request.getfixturevalue("smollm2_gguf")
        if "smollm2_build" in needed:
            arguments = [model, "-o", folder / "fp32.engine", "--timing-cache", cache / "fp32.json"]
            start("fp32", TAPEOUT, "build", *arguments, "--dtype", "fp32")
        if needed - {"smollm2_build"}:
            start("variants", sys.executable, "-c", _VARIANTS, model, folder, cache / "variants.json")
    yield started
    for process, _ in started.values():
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def smollm2_build(smollm2_processes: dict[str, Any]) -> Built:
    """The finished float32 build, successful or not."""
    process, folder = smollm2_processes["fp32"]
    stdout, stderr = process.communicate(timeout=600)
    return Built(folder / "fp32.engine", process.returncode, stdout, stderr)


@pytest.fixture(scope="session")
def smollm2(smollm2_build: Built) -> Path:
    """The float32 engine."""
    assert smollm2_build.code == 0, smollm2_build.stderr
    return smollm2_build.engine


@pytest.fixture(scope="session")
def smollm2_variants(smollm2_processes: dict[str, Any]) -> Path:
    """The folder of the lower-precision engines, once both are built."""
    process, folder = smollm2_processes["variants"]
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return Path(folder)


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_variants: Path) -> Path:
    """The bfloat16 engine."""
    return smollm2_variants / "bf16.engine"


@pytest.fixture(scope="session")
def smollm2_int8(smollm2_variants: Path) -> Path:
    """The engine with int8 weights and dynamically quantized activations."""
    return smollm2_variants / "int8.engine"


@pytest.fixture(scope="session")
def reference(smollm2_gguf: Path, smollm2_processes: dict[str, Any]) -> Any:
    """HF's greedy answers; needs no engine, so it is computed while the builds run."""
    spec = importlib.util.spec_from_file_location(
        "tapeout_e2e_reference", Path(__file__).with_name("reference.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tapeout_e2e_reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.make_reference(str(smollm2_gguf))


@pytest.fixture(scope="session")
def steps() -> list[Any]:
    """Records of every step `llm` has run; tests clear it."""
    return []


@pytest.fixture(scope="module")
def llm(smollm2: Path, steps: list[Any]) -> Iterator[Any]:
    """The float32 engine, loaded; not for the whole session, since it holds half a gigabyte."""
    from tapeout.runtime import LLM

    with LLM(smollm2, on_step=steps.append) as loaded:
        yield loaded


# ---- a tiny model -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_checkpoint(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound tiny Llama checkpoint; tests that damage one copy it."""
    return Path(models.make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="session")
def tiny_cache(request: pytest.FixtureRequest) -> Path:
    """Timings of the tiny model's ops."""
    return timing_folder(request.config) / "tiny.json"


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_checkpoint: Path,
    tiny_cache: Path,
    invoke: Callable[..., Result],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An engine of the tiny checkpoint: 512 positions, 4 in flight, pages of 16 tokens."""
    engine = tmp_path_factory.mktemp("tiny-engine") / "tiny.engine"
    limits = ("--max-batch-size", "4", "--max-num-tokens", "64", "--tokens-per-page", "16")
    result = invoke("build", tiny_checkpoint, "-o", engine, "--timing-cache", tiny_cache, *limits)
    assert result.exit_code == 0, result.stderr
    return engine


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Sets keys of a JSON file."""

    def edit(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


# ---- bad input --------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def build(invoke: Callable[..., Result], tmp_path: Path) -> Callable[..., Result]:
    """Builds into a folder of its own that must stay empty."""
    target = tmp_path / "out"
    target.mkdir()

    def build(model: str | Path, *args: str | Path) -> Result:
        result = invoke("build", model, "-o", target / "m.engine", *args)
        assert list(target.iterdir()) == []
        return result

    return build
