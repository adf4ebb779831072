"""The KV cache: which pages every slot holds, and what it takes from and leaves to the prefix cache.

Only bookkeeping: the memory itself belongs to the executor. Page ids are indices into its pool.
Misuse raises RuntimeError, because it is a fault of the runtime and never of a request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.runtime.kv_cache.events import EventBuffer
from tapeout.runtime.kv_cache.options import PrefixCacheOptions
from tapeout.runtime.kv_cache.pages import PageCopy, pages_for
from tapeout.runtime.kv_cache.pool import PagePool
from tapeout.runtime.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from tapeout.runtime.kv_cache.radix_tree import Namespace, PageHash, PageNode, RadixTree, page_hash
from tapeout.runtime.kv_cache.statistics import CacheStats, RequestCacheStats, count_found
from tapeout.runtime.kv_cache.tables import Departures, PageTables
from tapeout.runtime.kv_cache.users import AdmissionPages, CacheUser, PageEvictions, PinnedPrefix, SlotState

#: `token_ids(start, end)`: int32 ids of a request, prompt and output, at these positions.
TokenIds = Callable[[int, int], np.ndarray]


class KvCache:
    """Page tables of all slots over one pool, and the prefix cache.

    Args:
        num_pages, tokens_per_page: the pool.
        num_slots: requests that can hold pages at a time.
        max_seq_len: longest sequence in tokens, which bounds a table's width.
        options: of the prefix cache. host_pages: size of its host tier.
        weights: digest of the weights that compute pages.
        clock: seconds, monotonic, for retention. hash_of: names pages for others.

    Attributes:
        tables: [num_slots, max_pages_per_seq] int32, NO_PAGE beyond the pages in use.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        tokens_per_page: int,
        num_slots: int,
        max_seq_len: int,
        options: PrefixCacheOptions | None = None,
        host_pages: int = 0,
        weights: str = "",
        clock: Callable[[], float] = time.monotonic,
        hash_of: PageHash = page_hash,
    ) -> None:
        self.options = options or PrefixCacheOptions()
        self.tokens_per_page = tokens_per_page
        self.pool = PagePool(num_pages)
        self.events = EventBuffer(self.options.event_buffer_max_size)
        self._pages = PageTables(
            tokens_per_page=tokens_per_page, num_slots=num_slots, max_seq_len=max_seq_len
        )
        self.tables = self._pages.tables
        self._cache = PrefixCache(
            self.pool,
            RadixTree(tokens_per_page, hash_of),
            host_pages=host_pages,
            events=self.events,
            clock=clock,
        )
        self._weights = weights
        self._slots: list[SlotState | None] = [None] * num_slots
        self._is_unstored = np.zeros(num_slots, bool)
        self._num_stored = np.zeros(num_slots, np.int32)  # pages of their paths
        self._num_unstored = 0
        self._retired: list[tuple[int, int]] = []  # (step that may still use it, page)
        self._last_read = -1
        self._evictions: list[PageEvictions] = []
        self._pins: set[PinnedPrefix] = set()
        # What was said of the request that did not fit, and whether nothing was stored since; see `ask`.
        self._refused: tuple[np.ndarray, Namespace, int, AdmissionPages] | None = None
        self._may_repeat = False
        self._found: Counter[str] = Counter()

    # ---- size -------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that requests can still get; cached pages nobody holds are among them."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        """Pages that are held."""
        return self.pool.num_pages - self.pool.num_free

    def departures(self, most: int) -> Departures:
        """Counts what comes back when slots, `most` of them at most, are freed one after the other."""
        # Without the prefix cache nobody shares.
        owners = self.pool.reference_counts if self.options.enable_prefix_reuse else None
        return Departures(self._pages, owners, most)

    @property
    def retired_pages(self) -> int:
        """Pages that stand in no table any more and come back once a step has been read."""
        return len(self._retired)

    def lacking_pages(self, slots: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the slots lack pages to hold their `num_tokens` tokens: int64 [L] indices into `slots`,
        ascending, and int32 [L] how many pages each of them lacks."""
        return self._pages.lacking(slots, num_tokens)

    def missing_pages(self, num_tokens: np.ndarray) -> np.ndarray:
        """int32 [num_slots]: pages that each slot lacks to hold its `num_tokens` tokens."""
        return self._pages.missing(num_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self.tokens_per_page)

    def pages_of(self, slot: int) -> list[int]:
        """The slot's pages, in order of the tokens they hold."""
        return self._pages.pages_of(slot)

    @property
    def pinned_pages(self) -> int:
        return len({page for pin in self._pins for page in pin.pages})

    def uncommitted_pages(self, promised_pages: int) -> int:
        """Pages neither held nor promised, where `promised_pages` is the sum of the worst cases of the
        requests that hold slots.

        A page several of them share counts once: what they may still come to take is what is promised
        beyond the pages in their tables.
        """
        return self.pool.num_free - (promised_pages - self._pages.total)

    # ---- a request's pages ------------------------------------------------------------------

    def ask(
        self, token_ids: np.ndarray, user: CacheUser, num_pages: int, available_pages: int
    ) -> AdmissionPages:
        """What admitting a request would take that is to come to `num_pages` pages, of `available_pages`.

        A request that waits is asked about every step: as long as nothing has become available or been
        stored, what was said is said again without a search, and then the search goes on where it ended.
        """
        if not self.options.enable_prefix_reuse:
            return AdmissionPages(num_pages, available_pages, PrefixMatch())
        namespace = self._namespace(user)
        known: Sequence[PageNode] = ()
        if self._refused is not None:
            asked, its_namespace, its_pages, answer = self._refused
            if asked is token_ids and its_namespace == namespace:
                if self._may_repeat and (its_pages, answer.available) == (num_pages, available_pages):
                    return answer
                known = answer.match.path
            self._refused = None
        tree = self._cache.tree
        # One token is always computed: its logits give the first output token.
        most = len(token_ids) - 1
        path, last = tree.find(namespace, token_ids, most, known), None
        needed = num_pages - len(path) + self._cache.unheld(path)
        if needed <= available_pages and self.options.enable_partial_reuse:
            last = tree.find_partial(namespace, path, token_ids, most)
        answer = AdmissionPages(needed, available_pages, PrefixMatch(path, last))
        if not answer.fits:
            self._refused, self._may_repeat = (token_ids, namespace, num_pages, answer), True
        return answer

    def attach(
        self,
        slot: int,
        token_ids: np.ndarray,
        user: CacheUser,
        match: PrefixMatch,
        prompt_tokens: int | None = None,
        owner: str = "",
    ) -> RequestCacheStats:
        """Give a slot that has no pages to a request, with the pages `ask` found for it just before.

        `prompt_tokens` of the ids are the prompt, None = all; others it generated before it was paused.
        `owner` is its id.
        The first `cached_tokens` of its ids are in the cache once `take_copies` have been carried out.
        """
        onboarded = self._cache.hold(match.path)
        pages = [node.page for node in match.path]
        full_pages, tokens = (len(token_ids) - 1) // self.tokens_per_page, len(pages) * self.tokens_per_page
        copied = 0
        if match.partial is not None:
            on_host = not match.partial.node.on_device
            page = self._cache.copy(match.partial.node)
            if page is not None:
                pages.append(page)
                tokens += match.partial.num_tokens
                copied, onboarded = 1, onboarded + on_host
        self._pages.begin(slot, pages)
        prompt_tokens = len(token_ids) if prompt_tokens is None else prompt_tokens
        state = SlotState(owner, self._namespace(user), user, prompt_tokens, list(match.path))
        self._slots[slot], self._num_stored[slot] = state, len(match.path)
        self._note_evictions((slot,))
        if self.options.enable_prefix_reuse:
            self._is_unstored[slot] = True
            self._num_unstored += 1
        if user.retention is not None:
            first_tokens = range(0, len(match.path) * self.tokens_per_page, self.tokens_per_page)
            for node, retention in zip(match.path, state.retentions(first_tokens), strict=True):
                self._cache.set_retention(node, retention)
        stats = RequestCacheStats(tokens, len(match.path), full_pages - len(match.path), onboarded, copied)
        count_found(self._found, len(token_ids), stats)
        return stats

    def grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Give each of the slots the pages it still lacks to hold its `num_tokens` tokens.

        Slots are different ones; when the pages do not suffice for all, none gets any.
        """
        grown = self._pages.grow(slots, num_tokens, self._cache.allocate)
        if self._cache.evicted and grown is not None:
            self._note_evictions(tuple(grown.tolist()))

    @property
    def any_unstored(self) -> bool:
        """Whether `unstored_slots` has any."""
        return self._num_unstored > 0

    def unstored_slots(self) -> np.ndarray:
        """int64, ascending: slots a request was attached to of which neither `context_is_known` nor
        `slots_to_store` was told."""
        return self._is_unstored.nonzero()[0]

    def context_is_known(self, slot: int) -> None:
        """The slot's context is stored now: it is no longer one of the `unstored_slots`."""
        self._is_unstored[slot] = False
        self._num_unstored -= 1

    def slots_to_store(self, ready: np.ndarray, num_tokens: np.ndarray) -> list[int]:
        """Which of the slots, whose contexts can be stored now, have full pages beyond those in the tree.

        ready: int64 [S], of `unstored_slots`. num_tokens: [S] what `store` would be told.
        """
        self._is_unstored[ready] = False
        self._num_unstored -= len(ready)
        has_more = num_tokens // self.tokens_per_page > self._num_stored[ready]
        slots: list[int] = ready[has_more].tolist()
        return slots

    def store(self, slot: int, num_tokens: int, token_ids: TokenIds, in_use_until: int) -> None:
        """Leave the slot's full pages to the prefix cache, as far as its first `num_tokens` tokens go.

        Their K and V have been computed by steps that were read, and a later row of the request
        had finite logits.

        Args:
            in_use_until: last submitted step that has the slot's page table as it is now.
        """
        state = self._slots[slot]
        if state is None or not state.may_store or not self.options.enable_prefix_reuse:
            return
        path, size = state.path, self.tokens_per_page
        first, end = len(path), num_tokens // size
        if first >= end:
            return
        self._may_repeat = False  # who was refused may share these pages and need fewer
        ids = token_ids(first * size, end * size)
        data, page_bytes = ids.tobytes(), ids.itemsize * size
        keys = [data[start : start + page_bytes] for start in range(0, len(data), page_bytes)]
        pages = self.tables[slot, first:end].tolist()
        retentions = state.retentions(range(first * size, end * size, size))
        tree, known = self._cache.tree, 0
        parent = path[-1] if path else tree.root(state.namespace)
        for key, page, retention in zip(keys, pages, retentions, strict=True):
            if (node := tree.child(parent, key)) is None:
                break
            path.append(node)
            if self._cache.share(node, page, retention):
                state.own.append(node)
            else:
                self.tables[slot, first + known] = node.page
                self._retire(in_use_until, page)
            parent, known = node, known + 1
        if known < len(keys):
            new = self._cache.store(parent, keys[known:], pages[known:], retentions[known:], state.owner)
            path += new
            state.own += new
        self._num_stored[slot] = end

    def free(self, slot: int, *, failed: bool = False) -> None:
        """Give back all pages of the slot. Pages left to the prefix cache stay there, unless the request
        `failed`: then those that came from it go, as far as no other request uses them."""
        # Last page first, so that the next request gets them in the same order again.
        self._cache.release(self._pages.clear(slot)[::-1])
        state, self._slots[slot] = self._slots[slot], None
        if self._is_unstored.item(slot):
            self.context_is_known(slot)
        if failed and state is not None:
            self._cache.forget(state.own)

    def take_evictions(self) -> list[PageEvictions]:
        """What was evicted since the last call, and for whom."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def _note_evictions(self, slots: tuple[int, ...]) -> None:
        if self._cache.evicted:
            self._evictions.append(PageEvictions(self._cache.evicted, slots))
            self._cache.evicted = []

    # ---- steps and copies -------------------------------------------------------------------

    def step_read(self, step: int) -> None:
        """All steps up to this one have been read."""
        self._last_read = step
        if self._retired:
            self._cache.release([page for until, page in self._retired if until <= step])
            self._retired = [entry for entry in self._retired if entry[0] > step]

    def _retire(self, in_use_until: int, page: int) -> None:
        """Let go of a page that stands in no table any more, once no step uses it."""
        if in_use_until > self._last_read:
            self._retired.append((in_use_until, page))
        else:
            self.pool.release((page,))  # which the tree does not have

    @property
    def has_copies(self) -> bool:
        return bool(self._cache.copies)

    def take_copies(self) -> list[PageCopy]:
        """Page copies since the last call; the executor gets them before the next step."""
        copies, self._cache.copies = self._cache.copies, []
        return copies

    # ---- for users --------------------------------------------------------------------------

    def pin(self, token_ids: np.ndarray, user: CacheUser, available_pages: int) -> PinnedPrefix:
        """Keep the full pages of a prefix that is cached, on the device, until `unpin`.

        `available_pages` may be taken from those that run.

        Raises:
            UsageError: it is not cached as a whole, or requests would lack the pages.
        """
        size = self.tokens_per_page
        num_tokens = len(token_ids) // size * size
        path = self._cache.tree.find(self._namespace(user), token_ids, num_tokens)
        if not path or len(path) * size < num_tokens:
            raise UsageError(
                f"{len(path) * size} of the prefix's {len(token_ids)} tokens are cached, "
                f"expected {num_tokens} and at least one page of {size}",
                hint="run the prefix as a prompt first, or make it longer",
            )
        needed, available = self._cache.unheld(path), max(available_pages, 0)
        pinned = len({p for pin in self._pins for p in pin.pages} | {n.page for n in path})
        largest = min(self.tables.shape[1], self.num_pages)
        if needed > available or pinned + largest > self.num_pages:
            raise UsageError(
                f"pinning {len(path)} pages ({pinned} in all) leaves too few of the pool's {self.num_pages}: "
                f"the longest request takes {largest}, and {available} are not promised to running ones",
                hint="give the KV cache more memory, pin less, or use a retention priority of 100 instead",
            )
        self._cache.hold(path)
        self._note_evictions(())
        pin = PinnedPrefix(num_tokens, tuple(path), tuple(n.page for n in path))
        self._pins.add(pin)
        return pin

    def unpin(self, pin: PinnedPrefix) -> None:
        """Let go of a pinned prefix; nothing happens when it was, or was cleared."""
        if pin in self._pins:
            self._pins.remove(pin)
            self._cache.release(pin.pages[::-1])

    def clear(self, *, salt: str | None = None, adapter: str | None = None) -> int:
        """Forget cached pages, of a salt or adapter or all of them; returns how many.

        Running requests keep theirs, and leave none of them to the cache. Pins end.
        """

        def wanted(namespace: Namespace) -> bool:
            return (salt is None or namespace.salt == salt) and (
                adapter is None or namespace.adapter == adapter
            )

        for state in self._slots:
            if state is not None and wanted(state.namespace):
                state.may_store, state.path, state.own = False, [], []
        removed = self._cache.clear(wanted)
        for pin in [p for p in self._pins if p.path[0].removed]:
            self.unpin(pin)
        self._refused = None
        return removed

    def set_weights(self, digest: str) -> None:
        """Pages are computed by other weights from now on: nothing of before is served again."""
        self.clear()
        self._weights = digest

    def stats(self) -> CacheStats:
        return CacheStats(**self._found, **self._cache.counts(), pinned_pages=self.pinned_pages)

    def _namespace(self, user: CacheUser) -> Namespace:
        return Namespace(self._weights, user.adapter, user.salt)
