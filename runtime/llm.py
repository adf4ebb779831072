"""`LLM`: an engine, loaded, with the calls users make."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Self

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.cache_control import PrefixCacheControl
from tapeout.runtime.chats import ChatPrompts, conversations
from tapeout.runtime.collector import Collector
from tapeout.runtime.engine import Engine
from tapeout.runtime.intake import CheckedRequest, Intake, Prompt, as_prompt_list, with_cache_options
from tapeout.runtime.kv_cache import KvCacheRetentionConfig, PrefixCacheOptions
from tapeout.runtime.laps import Laps
from tapeout.runtime.llm_options import check_on_step, check_params, check_priorities, engine_path
from tapeout.runtime.loading import eos_token_ids, load
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.new_loop import SchedulerOptions, new_loop
from tapeout.runtime.new_request import new_request
from tapeout.runtime.observe import LoopStats
from tapeout.runtime.output import RequestOutput
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.stream import RequestStream
from tapeout.runtime.text.chat_template import Message
from tapeout.runtime.trace.writer import EventMaker, open_trace, start_event
from tapeout.runtime.turn_lock import TurnLock
from tapeout.runtime.weight_reload import WeightReload


class LLM:
    """Generates text from one engine file, in-flight batched.

    Several threads may call it: their requests share batches, and whoever waits drives the loop.
    Close it, or use it as a context manager, to free memory and threads.

    Args:
        engine: path of an engine file; or an engine set, a directory or the URL of one in a store, of which
            the engine for this machine is taken (docs/engine_sets.md).
        target, precision: which engine of a set instead, such as "cuda:h200", "cpu" or "bfloat16".
        kv_cache_bytes, max_tokens_in_kv_cache, free_memory_fraction: bounds of the KV pool; the
            smallest wins and the log says which. The fraction is of the memory left beside the
            weights and activations.
        chunk_tokens: most prompt tokens of one request in a step; None = max_num_tokens.
        capacity_policy: when a waiting request may hold pages: "guaranteed_no_evict" (the default),
            "max_utilization" or "static_batch"; see docs/scheduling.md.
        chunking_policy: how prompts share a step: "first_come_first_served" (the default),
            "equal_progress" or "force_chunk".
        max_batch_size, max_num_tokens: lower the engine's limits for this process.
        enable_prefix_reuse: keep pages of ended requests and use them for later ones that begin with the same
            ids; enable_partial_reuse: also copy a page of which only the beginning is wanted.
        host_cache_bytes: host memory for cached pages that leave the device; pinned on a GPU.
        event_buffer_max_size: how many of the newest changes of the prefix cache `prefix_cache.events` has.
        threads: CPU threads for kernels, at most the machine's; None = the library's default.
        strict_sku: refuse a GPU of another model than the engine was built for, which otherwise is a
            warning, and on CPUs a later level than the engine's.
        on_step: called with a `StepRecord` for every step that is on its way, to see what was scheduled and
            why; it may end requests.
        trace: a file that gets every decision as a JSON line; `tapeout explain` shows it. It is
            complete when the LLM is closed, which raises TapeoutError if it could not be written.

    Attributes:
        load_seconds: what loading took, by part: opening the file, its checksums, the device, the
            tokenizer, importing the executor, weights, kernels, memory.

    Raises:
        UsageError, EngineError, CapacityError: see docs/python.md; they are in `tapeout.runtime`.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str],
        *,
        target: str | None = None,
        precision: str | None = None,
        kv_cache_bytes: int | None = None,
        max_tokens_in_kv_cache: int | None = None,
        free_memory_fraction: float = 0.9,
        chunk_tokens: int | None = None,
        capacity_policy: CapacityPolicy | str | None = None,
        chunking_policy: ChunkingPolicy | str | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        enable_prefix_reuse: bool = True,
        enable_partial_reuse: bool = True,
        host_cache_bytes: int = 0,
        event_buffer_max_size: int = 0,
        threads: int | None = None,
        strict_sku: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        laps = Laps()
        self.load_seconds = laps.seconds
        path = engine_path(engine)
        check_on_step(on_step)
        self._cache_options = PrefixCacheOptions(
            enable_prefix_reuse=enable_prefix_reuse,
            enable_partial_reuse=enable_partial_reuse,
            host_cache_bytes=host_cache_bytes,
            event_buffer_max_size=event_buffer_max_size,
        )
        loaded = load(
            path,
            self._cache_options,
            laps,
            target=target,
            precision=precision,
            strict_sku=strict_sku,
            threads=threads,
            kv_cache_bytes=kv_cache_bytes,
            max_tokens_in_kv_cache=max_tokens_in_kv_cache,
            free_memory_fraction=free_memory_fraction,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            chunk_tokens=chunk_tokens,
            capacity_policy=capacity_policy,
            chunking_policy=chunking_policy,
        )
        self.engine, self.tokenizer, self._executor = loaded.engine, loaded.tokenizer, loaded.executor
        try:
            self._trace = None if trace is None else open_trace(trace)
        except BaseException:
            self._executor.close()
            self.engine.close()
            raise
        limits, num_pages, options = self.engine.manifest.limits, loaded.num_pages, loaded.options
        self._intake = Intake(limits, self.engine.manifest.model.vocab_size, num_pages, self.tokenizer)
        self._options, self._on_step = options, on_step
        if self._trace is not None:
            pool = {"pages": num_pages, "tokens_per_page": limits.tokens_per_page}
            self._trace.take(start_event({**pool, **asdict(options)}))
        self._loop = self._new_loop(options)
        self._adopt(self.engine)
        self._ids, self._lock = count(), TurnLock()
        self._reload = WeightReload(lambda: self._loop, self._lock, self._turn)
        # Streams closed by the garbage collector, maybe within a turn: aborted before the next one.
        self._abandoned: deque[str] = deque()
        self._closed = False

    # ---- calls ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends; one result per prompt, in order.

        Args:
            prompts: a text, a list of token ids, {"prompt_token_ids": [...]}, or a list of these. An object
                may hold `cache_salt` and `kv_cache_retention_config` of its own.
            sampling_params: for all, or one per prompt; None = the model's generation defaults.
            priority: for all, or one per prompt; larger is served earlier (see docs/scheduling.md).
            cache_salt: cached pages are shared among requests of the same salt only.
            kv_cache_retention_config: how long pages of these requests are worth keeping.

        A request that fails while running has finish_reason "error" and does not disturb others.

        Raises:
            UsageError: some prompts can never run; nothing was run.
        """
        with_options = with_cache_options(as_prompt_list(prompts), cache_salt, kv_cache_retention_config)
        collectors = self._add(with_options, sampling_params, priority)
        try:
            with self._lock.many_turns():
                for collector in collectors:
                    while not collector.finished:
                        self._turn()
        except BaseException:  # KeyboardInterrupt above all
            self._abort(collectors)
            raise
        return [c.output() for c in collectors]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
    ) -> RequestStream:
        """Run one prompt; returns an iterator of deltas. The request is queued at once.

        Each result's `outputs[0]` holds only the text, ids and logprobs that are new since the
        last one; the last has `finished` True and the finish_reason. Joined texts equal the text
        `generate` gives. Generation advances as results of this or other calls are taken; closing or
        dropping the iterator aborts the request.

        Raises:
            UsageError: at once, when the prompt can never run.
        """
        with_options = with_cache_options([prompt], cache_salt, kv_cache_retention_config)
        (collector,) = self._add(with_options, sampling_params, priority)
        return RequestStream(collector, self._next_delta, self._abandoned.append)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
    ) -> list[RequestOutput]:
        """Run one conversation, or a list of them, through the chat template."""
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations(messages)
        ]
        return self.generate(
            prompts,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            kv_cache_retention_config=kv_cache_retention_config,
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate` or `stream`: rendered, then encoded without
        special tokens, because the template writes BOS itself."""
        return self._chats.prompt(
            messages,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's generation defaults, with overrides that are not None."""
        return SamplingParams.from_generation(self.engine.manifest.generation, **overrides)

    def abort(self, request_id: str) -> bool:
        """End a running request (from another thread, say); False when it is not running."""
        with self._lock:
            return self._loop.abort(request_id)

    def stats(self) -> LoopStats:
        """Counts so far. A surplus step after the last answer is read by the next call, until
        when its pages count as used."""
        with self._lock:
            return self._loop.stats()

    def reload_weights(self, path: str | os.PathLike[str], *, running: str = "finish") -> None:
        """Run with the weights of another file from now on: of an engine with the same program, or a shared
        weight file of the same layout. Kernels and captured graphs stay; nothing cached is served again, and
        pinned prefixes end.

        Args:
            running: what becomes of requests that run: "finish" lets them, "recompute" pauses them and has
                what they have computed again by the new weights, "abort" ends them. Who waits runs after it.

        Raises:
            UsageError, EngineError: the file cannot take the place of the engine's; nothing has changed.
            TapeoutError: the executor failed. On a GPU every request fails until weights were loaded again.
        """
        self._check_open()
        self._reload.run(lambda: self.engine, path, running, self._adopt)

    @property
    def prefix_cache(self) -> PrefixCacheControl:
        """Statistics and events of the prefix cache, pinned prefixes, `clear`."""
        return PrefixCacheControl(lambda: self._loop, self._lock, self._compute)

    def close(self) -> None:
        """Abort what runs, free memory and threads. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.abort_all()
            self._executor.close()
            self.engine.close()
            if self._trace is not None:
                self._trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------

    def _new_loop(self, options: SchedulerOptions) -> EngineLoop:
        return new_loop(
            self._executor,
            options,
            cache_options=self._cache_options,
            weights=self.engine.weights_digest,
            on_step=self._on_step,
            observer=None if self._trace is None else EventMaker(self._trace.take),
        )

    def _add(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> list[Collector]:
        """Check all prompts, then queue all of them."""
        priorities = check_priorities(priority, len(prompts))
        params = self.default_sampling_params() if params is None else params
        checked = self._intake.check(prompts, check_params(params, len(prompts)))
        collectors: list[Collector] = []
        try:
            with self._lock:
                self._check_open()
                for one, its_priority in zip(checked, priorities, strict=True):
                    collectors.append(self._queue(one, its_priority))
        except BaseException:  # an interrupt: nobody would take their results
            self._abort(collectors)
            raise
        return collectors

    def _adopt(self, engine: Engine) -> None:
        """Its weights run from now on, and it says what the model's defaults are."""
        self.engine = engine
        self._eos, self._chats = eos_token_ids(engine), ChatPrompts(engine, self.tokenizer)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this LLM is closed")

    def _queue(self, checked: CheckedRequest, priority: int = 0) -> Collector:
        request, collector = new_request(
            str(next(self._ids)),
            checked,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos,
            priority=priority,
            arrival=self._loop.clock(),
        )
        self._loop.add(request)
        return collector

    def _compute(self, prompt: Prompt) -> CheckedRequest:
        """Have a prompt's pages computed, for one that is pinned."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        (checked,) = self._intake.check([prompt], [params])
        (output,) = self.generate([prompt], params)
        if output.outputs[0].finish_reason == "error":
            raise TapeoutError(f"the prefix could not be computed: {output.outputs[0].stop_reason}")
        return checked

    def _turn(self) -> None:
        """One turn of the loop, under the lock."""
        with self._lock:
            while self._abandoned:
                self._loop.abort(self._abandoned.popleft())
            self._loop.step()

    def _next_delta(self, collector: Collector) -> RequestOutput:
        with self._lock.many_turns():
            while True:
                with self._lock:
                    if self._has_delta(collector):
                        return collector.take_delta()
                self._turn()  # by itself, so that an interrupt is not put off until there is a delta

    def _has_delta(self, collector: Collector) -> bool:
        self._loop.hand_over(collector.request_id)
        return collector.has_delta

    def _abort(self, collectors: Sequence[Collector]) -> None:
        with self._lock:
            for collector in collectors:
                if not collector.finished:
                    self._loop.abort(collector.request_id)
