"""`tapeout run`: generate text with an engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapeout.cli import run_options
from tapeout.cli.engine_argument import chooses_engine, engine_argument
from tapeout.cli.paths import check_output
from tapeout.cli.streams import is_terminal, read_standard_input, standard_output, writing
from tapeout.plugins.errors import TapeoutError

if TYPE_CHECKING:
    from tapeout.cli.generate import Generation
    from tapeout.cli.requests import ChatStyle, MakeParams, Request
    from tapeout.runtime import RequestOutput

FILE = click.Path(path_type=Path)
STDIN, STDIN_FILE = Path("-"), Path("/dev/stdin")


@click.command("run", short_help="Generate text with an engine.")
@engine_argument
@click.option(
    "-p",
    "--prompt",
    "prompts",
    type=run_options.TEXT,
    multiple=True,
    metavar="TEXT",
    help="A prompt. Repeatable.",
)
@click.option("--input", "source", type=FILE, metavar="FILE", help="Requests as JSON lines; - for stdin.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write results as JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON lines, nothing else.")
@click.option("--chat", is_flag=True, help="A prompt is a user's message; use the model's chat template.")
@click.option(
    "--system",
    type=run_options.TEXT,
    metavar="TEXT",
    help="System message before each prompt; needs --chat.",
)
@run_options.apply(run_options.SAMPLING)
@chooses_engine
@run_options.apply(run_options.RUNTIME)
@run_options.apply(run_options.PREFIX_CACHE)
@click.option(
    "--trace", type=FILE, metavar="FILE", help="Write every scheduling decision as JSON lines, for `explain`."
)
@click.option("--stats", is_flag=True, help="Print times and speeds on stderr.")
def command(
    engine: Path,
    prompts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
    as_json: bool,
    chat: bool,
    system: str | None,
    trace: Path | None,
    stats: bool,
    **flags: Any,
) -> None:
    """Generate text with ENGINE, a file or an engine set. One prompt streams; several run in flight
    together, printed in order.

    A line of --input is an object with `prompt`, `messages` or `prompt_token_ids`, and optionally `id`,
    `priority` and sampling fields. Without --prompt and --input, standard input is the prompt.

    \b
    tapeout run smollm2.engine --chat --prompt "What is the capital of France?" --stats
    tapeout run smollm2.engine --input prompts.jsonl --output answers.jsonl --temperature 0
    """
    from tapeout.cli.requests import ChatStyle, params_maker

    _check_combinations(prompts, source, output, as_json, chat, system)
    generation_defaults = _open(engine, prompts, source, output, trace)
    make = params_maker(generation_defaults, _given(flags, run_options.SAMPLING_NAMES))
    requests = _requests(prompts, source, ChatStyle(chat, system), make)

    from tapeout.cli.generate import Generation
    from tapeout.cli.results import stats_lines
    from tapeout.runtime import LLM

    start = time.perf_counter()
    options = _given(flags, run_options.RUNTIME_NAMES | run_options.PREFIX_CACHE_NAMES)
    with LLM(engine, trace=trace, **options) as llm:
        load_seconds = time.perf_counter() - start
        generation = Generation(llm, requests)
        start = time.perf_counter()
        try:
            if as_json or source is not None or output is not None:
                _write_json_lines(generation, requests, output)
            else:
                _print_text(generation, requests)
        finally:
            if stats:
                seconds = time.perf_counter() - start
                click.echo("\n".join(stats_lines(generation.outputs, load_seconds, seconds)), err=True)
    _raise_failures(generation.outputs)


def _given(flags: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The flags among `names` that the user gave; an option that may be repeated is () when absent."""
    return {name: value for name, value in flags.items() if name in names and value not in (None, ())}


def _check_combinations(
    prompts: tuple[str, ...],
    source: Path | None,
    output: Path | None,
    as_json: bool,
    chat: bool,
    system: str | None,
) -> None:
    problems = []
    if prompts and source is not None:
        problems.append("--prompt and --input exclude each other: give prompts or a file of requests.")
    if as_json and output is not None:
        problems.append("--json and --output exclude each other: a file always holds JSON lines.")
    if system is not None and not chat:
        problems.append("--system needs --chat: only a chat template has a place for it.")
    if not prompts and source is None and is_terminal(sys.stdin):
        problems.append("Missing prompt: give --prompt TEXT, --input FILE, or text on standard input.")
    if problems:
        raise click.UsageError("\n".join(problems))


def _open(
    engine: Path, prompts: tuple[str, ...], source: Path | None, output: Path | None, trace: Path | None
) -> dict[str, Any]:
    """The engine's generation defaults; what is written is checked against everything that is read."""
    from tapeout.runtime.engine import open_engine

    if output is None:
        standard_output()
    with open_engine(engine, verify=False) as opened:
        reads_stdin = source == STDIN or (source is None and not prompts)
        read = STDIN_FILE if reads_stdin else source
        inputs = [*opened.files, *([] if read is None else [read])]
        for path, option in ((output, "--output"), (trace, "--trace")):
            if path is not None:
                check_output(path, option, inputs=inputs, stream=True)
        return dict(opened.manifest.generation)


def _requests(
    prompts: tuple[str, ...], source: Path | None, style: ChatStyle, make: MakeParams
) -> list[Request]:
    """Everything to run, checked before the weights are loaded."""
    from tapeout.cli.requests import requests_from_jsonl, requests_from_prompts

    if source is not None:
        return requests_from_jsonl(_read(source), str(source), style, make)
    if not prompts:
        text = _read(STDIN)
        if not text.strip():
            raise click.UsageError("Missing prompt: standard input is empty; give --prompt or --input.")
        prompts = (text,)
    return requests_from_prompts(prompts, style, make)


def _read(source: Path) -> str:
    try:
        data = read_standard_input() if source == STDIN else source.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise click.UsageError(f"--input: cannot read {str(source)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source}: not UTF-8 text at byte {error.start}.") from error


def _write_json_lines(generation: Generation, requests: list[Request], output: Path | None) -> None:
    from tapeout.cli.results import open_output, result_object, write_json_line

    with open_output(output) as stream:
        for index, result in generation.run(lambda index, text: None):
            request = requests[index]
            write_json_line(stream, result_object(result, request.id, request.prompt))
            stream.flush()


def _print_text(generation: Generation, requests: list[Request]) -> None:
    """Text as it comes; with several requests each under its header, in order."""
    stdout = standard_output()
    begun: set[int] = set()

    def show(index: int, text: str) -> None:
        if index not in begun:
            begun.add(index)
            if len(requests) > 1:
                stdout.write(f"--- {index + 1} of {len(requests)}: {requests[index].title()} ---\n")
        stdout.write(text)
        stdout.flush()

    try:
        with writing():
            for index, result in generation.run(show):
                show(index, "\n")  # a result without any text gets its header too
                _print_logprobs(result, stdout.write)
    except KeyboardInterrupt:
        stdout.write("\n")
        stdout.flush()
        raise


def _print_logprobs(result: RequestOutput, write: Callable[[str], Any]) -> None:
    from tapeout.cli.results import logprob_lines

    for line in logprob_lines(result.outputs[0]):
        write(line + "\n")


def _raise_failures(outputs: list[RequestOutput]) -> None:
    failed = [(i, o.outputs[0]) for i, o in enumerate(outputs, 1) if o.outputs[0].finish_reason == "error"]
    if failed:
        lines = [f"request {i} failed: {completion.stop_reason}" for i, completion in failed]
        raise TapeoutError("\n".join(lines), hint="the other results are complete")
