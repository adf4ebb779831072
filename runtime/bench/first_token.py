"""What `bench startup` runs in a fresh process: everything from nothing to the first token.

Run as `python -c BOOT SPEC`, where SPEC is JSON: {"engine", "input_len", "seed", "runtime"}. Prints one line
of JSON; moments are on the system's monotonic clock, which the parent process reads too.
"""

from __future__ import annotations

from typing import Any

from tapeout.plugins.errors import TapeoutError

#: First lines of the child: the clock is read before anything is imported.
BOOT = (
    "import time; started = time.perf_counter(); import sys; "
    "from tapeout.runtime.bench.first_token import main; main(started, sys.argv[1])"
)
#: None of these has a place in the process that runs a cuda engine.
_WATCHED = ("torch", "triton", "transformers", "tapeout.compiler")


def main(started: float, spec: str) -> None:
    import json
    import sys

    try:
        told = _run(started, **json.loads(spec))
    except TapeoutError as error:
        told = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    sys.stdout.write(json.dumps(told) + "\n")


def _run(started: float, engine: str, input_len: int, seed: int, runtime: dict[str, Any]) -> dict[str, Any]:
    import sys
    import time

    from tapeout.runtime import LLM, SamplingParams
    from tapeout.runtime.bench.prompts import prompt_ids

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    imported = time.perf_counter()
    with LLM(engine, **runtime) as llm:
        ready = time.perf_counter()
        vocab_size = llm.engine.manifest.model.vocab_size
        (output,) = llm.generate([prompt_ids(seed, input_len, 0, vocab_size)], params)
        ended = time.perf_counter()
        if len(output.outputs[0].token_ids) != 1:
            raise TapeoutError(f"no first token: {output.outputs[0].stop_reason}")
        return {
            "started": started,
            "ready": ready,
            "ended": ended,
            "load": ready - imported,
            "phases": {"imports": imported - started, **llm.load_seconds, "first_step": ended - ready},
            "tokenizer": llm.tokenizer is not None,
            "modules": [name for name in _WATCHED if name in sys.modules],
        }
