"""`LLM` over a fake engine: what users call, what they get, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError, UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime import LLM, RequestOutput, SamplingParams, loading
from tapeout.runtime.engine.manifest import KvCacheLayout, Limits, Manifest, ModelFacts, TokenizerFacts
from tapeout.runtime.scheduler.policies import ChunkingPolicy
from tapeout.runtime.turn_lock import TurnLock

LEVEL = detect_host().level
VOCAB = 280
LIMITS = Limits(max_batch_size=3, max_num_tokens=16, max_seq_len=64, tokens_per_page=4)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}bot:"
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def build_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte; <s> is put before raw text, </s> ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return made


BACKEND = build_tokenizer()
BOS, EOS = 256, 257


class FakeEngine:
    """Manifest and texts of an engine without weights."""

    def __init__(self, **texts: str) -> None:
        self.manifest = Manifest(
            format_version=1,
            target=f"cpu:{LEVEL}",
            model=ModelFacts("Fake", "fake", "float32", "none", VOCAB, 64, "none"),
            limits=LIMITS,
            kv_cache=KvCacheLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32"),
            tokenizer=TokenizerFacts(258, BOS, (EOS,), None, {"bos_token": "<s>"}),
            generation={},
            options={},
            versions={},
            passes={},
            parity={},
            timed=False,
        )
        self.texts = {name.replace("__", "."): text for name, text in texts.items()}
        self.text_names = tuple(self.texts)
        self.weights: dict[str, Any] = {}
        self.program = SimpleNamespace(arena_bytes=0)
        self.verified = self.closed = False
        self.weights_digest = "fake"

    def text(self, name: str) -> bytes:
        return self.texts[name].encode()

    def verify(self, *, weights: bool = True) -> None:
        self.verified = True

    def close(self) -> None:
        self.closed = True


Answer = Callable[[str], str]


@pytest.fixture
def make_llm(fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM that answers a prompt's text with `answer(text)`, byte by byte, then </s>."""
    made: list[LLM] = []

    def make(answer: Answer, engine: FakeEngine | None = None, **options: Any) -> LLM:
        engine = engine or FakeEngine(tokenizer__json=BACKEND.to_str(), chat_template__jinja=TEMPLATE)

        def script(tokens: Sequence[int]) -> int:
            text = BACKEND.decode(tokens, skip_special_tokens=True)
            for cut in range(len(text) + 1):
                wanted = BACKEND.encode(answer(text[:cut]), add_special_tokens=False).ids
                asked = BACKEND.encode(text[:cut], add_special_tokens=False).ids
                visible = [t for t in tokens if t < 256]
                said = visible[len(asked) :]
                if answer(text[:cut]) and visible[: len(asked)] == asked and wanted[: len(said)] == said:
                    return wanted[len(said)] if len(said) < len(wanted) else EOS
            return EOS

        monkeypatch.setattr(loading, "open_engine", lambda path, **_: engine)
        monkeypatch.setattr(
            "tapeout.runtime.executors.load_executor",
            lambda engine, *, num_pages, host_pages, **_: fakes.FakeExecutor(
                LIMITS, num_pages, script, host_pages=host_pages
            ),
        )
        made.append(LLM("fake.engine", **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def answers(table: dict[str, str]) -> Answer:
    return lambda text: table.get(text, "")


TABLE = {"Hi": "Hello 👍 there", "Count": "one two three", "A": "aaaa", "<s>": "x"}


def test_generation_settings_that_are_not_applied_are_logged_once_an_engine(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(tokenizer__json=BACKEND.to_str())
    engine.manifest = replace(engine.manifest, generation={"no_repeat_ngram_size": 3, "num_beams": 1})
    with caplog.at_level(logging.WARNING, logger="tapeout"):
        llm = make_llm(answers(TABLE), engine)
        llm.generate(["Hi", "Count"])
        llm.generate("A", llm.default_sampling_params(max_tokens=2))
    assert [r.getMessage() for r in caplog.records] == [
        "the model's generation config asks for what is not supported: no_repeat_ngram_size=3"
    ]


def test_generate_returns_results_in_order_with_the_usual_names(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE))
    outputs = llm.generate(["Hi", "Count", "A", "Hi"], GREEDY)
    assert [o.outputs[0].text for o in outputs] == [
        "Hello 👍 there",
        "one two three",
        "aaaa",
        "Hello 👍 there",
    ]
    first = outputs[0]
    assert (first.prompt, first.finished) == ("Hi", True)
    assert first.prompt_token_ids[0] == BOS
    completion = first.outputs[0]
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert completion.token_ids[-1] == EOS
    assert completion.logprobs is None
    metrics = first.metrics
    assert metrics.prompt_tokens == 3
    assert metrics.output_tokens == len(completion.token_ids)
    assert metrics.arrival_time <= metrics.admitted_time <= metrics.first_token_time  # type: ignore[operator]
    assert metrics.first_token_time <= metrics.finish_time  # type: ignore[operator]
    assert min(metrics.queue_seconds, metrics.prefill_seconds, metrics.decode_seconds) >= 0  # type: ignore[type-var]
    settle(llm)


def settle(llm: LLM) -> None:
    """A request without a surplus step reads what is still in flight; then nothing is held."""
    llm.generate("A", SamplingParams(temperature=0, max_tokens=1))
    assert llm.stats().kv_pages_used == 0
    assert llm.stats().num_requests_running == 0


def test_prompts_in_every_form_and_params_for_each(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE))
    ids = BACKEND.encode("Count").ids
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3), GREEDY, GREEDY]
    mixed = llm.generate(["Count", ids, {"prompt_token_ids": ids}, {"prompt": "Count"}], params)
    assert [o.outputs[0].text for o in mixed] == ["one two three", "one"] + ["one two three"] * 2
    assert [o.outputs[0].finish_reason for o in mixed] == ["stop", "length", "stop", "stop"]
    assert len(llm.generate(ids, GREEDY)) == 1
    assert len(llm.generate("Count", GREEDY)) == 1
    assert llm.generate([], GREEDY) == []
    with pytest.raises(UsageError, match="2 sampling_params for 1 prompts"):
        llm.generate("Count", [GREEDY, GREEDY])


def test_a_stream_yields_deltas_that_join_to_the_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE))
    deltas = list(llm.stream("Hi", GREEDY))
    texts = [d.outputs[0].text for d in deltas]
    assert "".join(texts) == "Hello 👍 there"
    assert "👍" in texts
    assert len(deltas) > 5
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    whole = llm.generate("Hi", GREEDY)[0].outputs[0]
    assert tuple(i for d in deltas for i in d.outputs[0].token_ids) == whole.token_ids
    assert deltas[-1].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", ["two", "e tw", "o t"])
def test_stop_strings_end_text_and_stream_alike(make_llm: Callable[..., LLM], stop: str) -> None:
    llm = make_llm(answers(TABLE))
    params = SamplingParams(temperature=0, max_tokens=40, stop=(stop, "never"))
    expected = "one two three".split(stop, maxsplit=1)[0]
    output = llm.generate("Count", params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (expected, "stop", stop)
    assert "".join(d.outputs[0].text for d in llm.stream("Count", params)) == expected
    kept = SamplingParams(temperature=0, max_tokens=40, stop=(stop,), include_stop_str_in_output=True)
    assert llm.generate("Count", kept)[0].outputs[0].text == expected + stop


def test_chat_renders_the_template_with_one_bos(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers({"user:Hi\nbot:": "Hello!"}))
    output = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)[0]
    assert output.outputs[0].text == "Hello!"
    assert output.prompt == "<s>user:Hi\nbot:"
    assert output.prompt_token_ids.count(BOS) == 1
    two = llm.chat([[{"role": "user", "content": "Hi"}]] * 2, GREEDY)
    assert [o.outputs[0].text for o in two] == ["Hello!"] * 2
    prompt = llm.chat_prompt([{"role": "user", "content": "Hi"}])
    assert "".join(d.outputs[0].text for d in llm.stream(prompt, GREEDY)) == "Hello!"


def test_logprobs_and_seed_are_reported(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE))
    output = llm.generate("A", SamplingParams(max_tokens=4, logprobs=0))[0]
    rows = output.outputs[0].logprobs
    assert rows is not None
    assert [next(iter(r.values())).decoded_token for r in rows] == ["a"] * 4
    assert output.outputs[0].cumulative_logprob == pytest.approx(-4.0 * output.outputs[0].token_ids[0])
    assert output.seed is not None
    assert llm.generate("A", SamplingParams(max_tokens=1, seed=5))[0].seed == 5
    assert llm.generate("A", GREEDY)[0].seed is None


def test_what_can_never_run_is_refused_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE), max_tokens_in_kv_cache=40)
    with pytest.raises(UsageError) as error:
        llm.generate(
            ["Hi", "", [], [1, 280, -1], "x" * 70, {"tokens": [1]}, ["a"], "y" * 30, 3.5],
            SamplingParams(temperature=0, max_tokens=20),
        )
    for part in (
        "prompt 1: it is empty",
        "prompt 2: it is empty",
        "prompt 3: token ids 280, -1 are outside the vocabulary, expected [0, 280)",
        "prompt 4: it has 71 tokens; max_seq_len = 64",
        "prompt 5: keys ['tokens']",
        "prompt 6: token ids hold 'a'",
        "prompt 7: 31 prompt tokens and 20 to generate need 13 KV pages of 4 tokens; the pool has 10",
        "prompt 8: it is a float",
    ):
        assert part in error.value.message
    assert "prompt 0" not in error.value.message
    assert llm.stats().steps == 0
    with pytest.raises(UsageError, match="stop_token_ids"):
        llm.stream("Hi", SamplingParams(stop_token_ids=(300,)))
    assert llm.generate("Hi", GREEDY.__class__(temperature=0, max_tokens=None))[0].outputs[0].text


def test_max_tokens_none_means_as_many_as_fit(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda text: "z" * 200 if text == "A" else "")
    params = SamplingParams(temperature=0, max_tokens=None)
    output = llm.generate("A", params)[0]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == LIMITS.max_seq_len


def test_leaving_a_stream_frees_its_pages(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda text: "z" * 50 if text == "A" else TABLE.get(text, ""))
    stream = llm.stream("A", SamplingParams(temperature=0, max_tokens=40))
    next(stream)
    stream.close()
    assert list(stream) == []
    llm.stream("A", SamplingParams(temperature=0, max_tokens=40))  # dropped unread
    assert llm.generate("Count", GREEDY)[0].outputs[0].text == "one two three"
    settle(llm)


def test_streams_of_several_threads_share_batches(make_llm: Callable[..., LLM]) -> None:
    records: list[Any] = []
    llm = make_llm(answers(TABLE), on_step=records.append)
    streams = {name: llm.stream(name, GREEDY) for name in ("Hi", "Count", "A")}
    texts: dict[str, str] = {}

    def consume(name: str, stream: Iterator[RequestOutput]) -> None:
        texts[name] = "".join(d.outputs[0].text for d in stream)

    threads = [threading.Thread(target=consume, args=item) for item in streams.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == {name: TABLE[name] for name in streams}
    assert max(len(r.plan.scheduled) for r in records) == 3


def test_without_tokenizer_ids_go_in_and_out(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(answers(TABLE), engine=FakeEngine())
    ids = BACKEND.encode("A").ids
    output = llm.generate([ids], GREEDY)[0].outputs[0]
    assert output.text == ""
    assert BACKEND.decode(output.token_ids) == "aaaa"
    for refused in (lambda: llm.generate("A"), lambda: llm.chat([{"role": "user", "content": "A"}])):
        with pytest.raises(UsageError, match="no tokenizer"):
            refused()
    with pytest.raises(UsageError, match="use stop_token_ids"):
        llm.generate([ids], SamplingParams(stop=("x",)))


def test_bad_options_are_refused_together_and_the_engine_is_closed(make_llm: Callable[..., LLM]) -> None:
    engine = FakeEngine()
    with pytest.raises(UsageError) as error:
        make_llm(answers(TABLE), engine=engine, chunk_tokens=0, max_batch_size=4, threads=-1)
    for part in ("chunk_tokens = 0", "max_batch_size = 4, but the engine was built for at most 3", "threads"):
        assert part in error.value.message
    assert engine.closed


def test_another_machine_is_refused_before_the_weights_are_read(make_llm: Callable[..., LLM]) -> None:
    engine = FakeEngine()
    engine.path = "fake.engine"  # type: ignore[attr-defined]
    engine.manifest = replace(engine.manifest, target="cpu:x86_64" if LEVEL != "x86_64" else "cpu:aarch64")
    with pytest.raises(EngineIncompatibleError, match=f"this machine is cpu:{LEVEL}"):
        make_llm(answers(TABLE), engine=engine, strict_sku=True)
    assert (engine.verified, engine.closed) == (False, True)
    with pytest.raises(UsageError, match="threads"):
        make_llm(answers(TABLE), engine=(engine := FakeEngine()), threads=0)
    assert not engine.verified
    make_llm(answers(TABLE), engine=(engine := FakeEngine()), strict_sku=True)
    assert engine.verified


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_cache_bytes": "1"}, "kv_cache_bytes = '1', expected an integer"),
        ({"max_tokens_in_kv_cache": 64.0}, "max_tokens_in_kv_cache = 64.0, expected an integer"),
        ({"free_memory_fraction": None}, "free_memory_fraction = None, expected a number"),
        ({"free_memory_fraction": True}, "free_memory_fraction = True, expected a number"),
        ({"on_step": 5}, "on_step = 5, expected a function"),
        ({"threads": 100_000}, "threads = 100000, but this machine has"),
        ({"threads": 10**5000}, "threads = <int too long to print>"),
        ({"chunk_tokens": "x"}, "chunk_tokens = 'x', expected an integer"),
        ({"capacity_policy": "best"}, "capacity_policy = 'best', expected one of guaranteed_no_evict, max_"),
        ({"capacity_policy": 5}, "capacity_policy = 5, expected one of"),
        ({"chunking_policy": "x"}, "chunking_policy = 'x', expected one of first_come_first_served, equal_"),
        ({"trace": "/no/such/folder/x"}, "trace = '/no/such/folder/x' cannot be written: No such file"),
        ({"trace": 5.0}, "trace = 5.0 cannot be written: expected the path of a file"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(
    make_llm: Callable[..., LLM], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        make_llm(answers(TABLE), **options)
    assert expected in error.value.message


def test_an_engine_is_a_path() -> None:
    for value in (None, 5, ["x"]):
        with pytest.raises(UsageError, match="expected the path of an engine file"):
            LLM(value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="File name too long"):
        LLM("x" * 5000)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda llm: llm.generate(np.array(5)), "prompts = array(5), a ndarray, expected a prompt"),
        (lambda llm: llm.generate(None), "prompts = None"),
        (lambda llm: llm.generate(b"Hi"), "prompts = b'Hi', a bytes"),
        (lambda llm: llm.generate("Hi", 5), "sampling_params = 5, expected SamplingParams"),
        (lambda llm: llm.generate("a\ud800"), "prompt 0: the text holds '\\ud800' at character 1"),
        (lambda llm: llm.generate({"prompt": 5, "prompt_token_ids": [1]}), "'prompt' = 5, expected a string"),
        (lambda llm: llm.generate([[10**5000]]), "token ids <int too long to print> are outside"),
        (lambda llm: llm.chat({"role": "user", "content": "Hi"}), "messages = {'role': 'user'"),
        (lambda llm: llm.chat(None), "messages = None, a NoneType, expected a list"),
        (lambda llm: llm.chat(5), "messages = 5, a int, expected a list"),
        (lambda llm: llm.chat([]), "there are no messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]), "the text holds '\\ud800'"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template=5), "chat_template = 5"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs=5),
            "chat_template_kwargs = 5, expected a mapping",
        ),
    ],
)
def test_a_call_with_a_wrong_type_is_refused(
    make_llm: Callable[..., LLM], call: Callable[[Any], Any], expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        call(make_llm(answers(TABLE)))
    assert expected in error.value.message


def test_a_closed_llm_refuses(make_llm: Callable[..., LLM]) -> None:
    with make_llm(answers(TABLE)) as llm:
        stream = llm.stream("Hi", GREEDY)
        next(stream)
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.generate("Hi", GREEDY)


def test_importing_the_runtime_loads_no_framework() -> None:
    code = (
        "import sys, tapeout.runtime; from tapeout.runtime import LLM, SamplingParams, RequestOutput\n"
        "SamplingParams(temperature=0)\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_policies_pause_and_answers_stay_the_same(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    texts = {"Hi": "z" * 40, "Count": "y" * 40, "A": "x" * 40}
    trace = tmp_path / "trace.jsonl"
    llm = make_llm(
        answers(texts),
        capacity_policy="MAX-UTILIZATION",
        chunking_policy=ChunkingPolicy.EQUAL_PROGRESS,
        max_tokens_in_kv_cache=64,
        trace=trace,
    )
    outputs = llm.generate(list(texts), SamplingParams(temperature=0, max_tokens=45))
    assert [o.outputs[0].text for o in outputs] == list(texts.values())
    stats = llm.stats()
    assert stats.pauses > 0
    llm.close()
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert events[0]["event"] == "start"
    assert (events[0]["pages"], events[0]["capacity_policy"]) == (16, "max_utilization")
    assert sum(len(e.get("paused", ())) for e in events) == stats.pauses
    assert [e["id"] for e in events if e["event"] == "finished"] == ["0", "1", "2"]


def test_priorities_of_a_call(make_llm: Callable[..., LLM]) -> None:
    records: list[Any] = []
    llm = make_llm(answers(TABLE), max_batch_size=1, on_step=records.append)
    llm.generate(["Hi", "Count", "A"], GREEDY, priority=[0, 0, 3])
    assert [a.request_id for r in records for a in r.admitted] == ["2", "0", "1"]
    stream = llm.stream("Hi", GREEDY)
    llm.chat([{"role": "user", "content": "Hi"}], GREEDY, priority=1)
    assert "".join(d.outputs[0].text for d in stream) == TABLE["Hi"]
    for bad, expected in (
        ([1], "1 priorities for 2 prompts"),
        ("5", "priority = '5', expected an integer from -1,000,000"),
        (True, "priority = True, expected"),
        (10**6 + 1, "priority = 1000001, expected"),
    ):
        with pytest.raises(UsageError, match=expected):
            llm.generate(["Hi", "A"], GREEDY, priority=bad)


def test_a_trace_that_cannot_be_written_disturbs_nobody(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(answers(TABLE), trace="/dev/full")
    # More lines than a buffer holds.
    outputs = llm.generate(["Count"] * 60, GREEDY)
    assert {o.outputs[0].text for o in outputs} == {"one two three"}
    with pytest.raises(TapeoutError, match="the trace '/dev/full' is not complete: No space left"):
        llm.close()
    assert sum("cannot be written" in r.getMessage() for r in caplog.records) == 1
    llm.close()


#: Lines of the runtime's code from one interruption to the next; odd, so that loops do not hide behind it.
INTERRUPT_EVERY = 277
RUNTIME = Path(loading.__file__).parent


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Ctrl-C once so many lines of the runtime have run in a call; whether it came to that."""
    left = line

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return count

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(str(RUNTIME)) else None

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


def test_an_interrupt_anywhere_ends_its_call_and_nothing_else(make_llm: Callable[..., LLM]) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    wanted = ["Hello 👍 there", "aaaa", "one two three", "Hello 👍 there"]
    line, times, llm = 1, 0, make_llm(answers(TABLE))
    while True:
        other = llm.stream("Count", GREEDY)
        text = next(other).outputs[0].text
        if not interrupted_at(line, lambda: llm.generate(["Hi", "A", "Hi", "A"], GREEDY)):
            break
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        text += "".join(delta.outputs[0].text for delta in other)
        assert text == "one two three", f"after line {line}"
        outputs = llm.generate(["Hi", "A", "Count", "Hi"], GREEDY)
        assert [o.outputs[0].text for o in outputs] == wanted, f"after line {line}"
        while llm._loop.step():
            pass
        stats = llm.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        assert llm._loop.capacity.num_free_slots == LIMITS.max_batch_size, f"after line {line}"
        assert stats.kv_pages_used == 0, f"after line {line}"
        line, times = line + INTERRUPT_EVERY, times + 1
    assert times > 20
    other.close()


def test_who_interrupts_twice_is_not_kept_waiting() -> None:
    lock, done = TurnLock(), []

    def hold(times: int) -> None:
        with lock, lock:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                done.append(times)

    with pytest.raises(KeyboardInterrupt):
        hold(1)
    assert done == [1], "the first one waits"
    with pytest.raises(KeyboardInterrupt):
        hold(2)
    assert done == [1, 2], "the second one does not"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
