"""Check of the steps that schedules plan: rows, chunks, drafts, padding, and pages to be cached."""

from lockstep.cache.groups import CacheSeq
from lockstep.cache.host_tier import Key
from lockstep.scheduling.draft_length import FixedDraftLength
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import PromptChunk, Schedule
from lockstep.scheduling.scheduler import Scheduler


class StepPlans:
    """Steps of one scheduler, followed from its schedules.

    spare_columns: columns of a row in the row table past max_model_len, None if unknown.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.spare_columns: int | None = None
        self._committed: dict[str, int] = {}
        self._chunk_ends: dict[str, int] = {}
        self._cached_pages: dict[str, int] = {}
        self._ever_cached: set[Key] = set()

    def begin(self) -> None:
        """Record the cached pages before the next schedule, which may evict them."""
        self._ever_cached.update(self.scheduler.cache.paged.pool.by_key)
        entries = self.scheduler.entries
        self._committed = {name: entry.max_committed for name, entry in entries.items()}

    def fault(self, schedule: Schedule) -> str | None:
        """Return what is wrong with the steps of this schedule, the next after begin(), or None."""
        for admission in schedule.admissions:
            self._chunk_ends[admission.spec.id] = admission.start
            self._cached_pages[admission.spec.id] = 0
        fault = self._wrong_rows(schedule) or self._wrong_decode(schedule)
        fault = fault or self._idle_admission(schedule) or self._idle_first_prompt(schedule)
        fault = fault or self._window_past_row(schedule)
        requests = {entry.row: entry.request for entry in self.scheduler.running}
        for chunk in schedule.prompt:
            fault = fault or self._wrong_chunk(chunk, requests[chunk.row])
        return fault or self._unwritten_page() or self._uncached_page()

    def _wrong_rows(self, schedule: Schedule) -> str | None:
        """Return what is wrong with the rows and the prompt tokens of the steps, or None."""
        scheduler = self.scheduler
        rows = [*schedule.decode, *schedule.forced, *(chunk.row for chunk in schedule.prompt)]
        if len(set(rows)) < len(rows):
            return f"a row is twice in the steps of a schedule: {rows}"
        if len(scheduler.running) > scheduler.max_num_seqs:
            return f"{len(scheduler.running)} rows run of at most {scheduler.max_num_seqs}"
        num_tokens = sum(chunk.length for chunk in schedule.prompt)
        if num_tokens > scheduler.budget:
            return f"chunks have {num_tokens} tokens of at most {scheduler.budget}"
        for entry in scheduler.running:
            waits = entry.in_prompt or entry.num_forced or entry.will_finish
            if entry.row not in rows and not waits:
                return f"row {entry.row} has a token to generate and is in no step"
        return None

    @staticmethod
    def _idle_admission(schedule: Schedule) -> str | None:
        """Return which new row has no chunk in its first schedule, or None.

        The snapshot from which such a row resumes is pinned in that schedule only.
        """
        chunks = {chunk.row for chunk in schedule.prompt}
        idle = [admission.row for admission in schedule.admissions if admission.row not in chunks]
        return f"the new rows {idle} have no chunk in their first schedule" if idle else None

    def _idle_first_prompt(self, schedule: Schedule) -> str | None:
        """Return which prompt is the first one in the order of service and has no chunk, or None.

        Shorter prompts may overtake a prompt, so only this rule lets long prompts end. New rows
        need a chunk each, which may leave none for the first prompt.
        """
        prompts = [
            entry
            for entry in self.scheduler.running
            if self._committed[entry.request.id] < len(entry.request.prompt_token_ids)
        ]
        if schedule.admissions or not prompts:
            return None
        first = min(prompts, key=lambda entry: entry.key)
        if first.row in {chunk.row for chunk in schedule.prompt}:
            return None
        return f"the prompt of row {first.row} is the first one and has no chunk"

    def _window_past_row(self, schedule: Schedule) -> str | None:
        """Return which window of forced tokens would not fit into a row's columns, or None.

        The end of the request may be max_model_len.
        """
        if self.spare_columns is None:
            return None
        for entry in self.scheduler.running:
            if entry.row in schedule.forced:
                end = self._committed[entry.request.id] + schedule.forced_len
                past_end = end - entry.request.max_total_tokens
                if past_end > self.spare_columns:
                    return (
                        f"a window of forced tokens ends {past_end} tokens after request "
                        f"{entry.request.id}, and rows have {self.spare_columns} spare columns"
                    )
        return None

    def _wrong_decode(self, schedule: Schedule) -> str | None:
        """Return what is wrong with the padding and the drafts of a decode step, or None."""
        scheduler = self.scheduler
        count = len(schedule.decode)
        if not count:
            return None
        buckets = [size for size in scheduler.row_buckets or () if size >= count]
        if schedule.padded_rows != min(buckets, default=count):
            return f"{count} rows are padded to {schedule.padded_rows}"
        max_drafts = scheduler.query_len - 1
        min_drafts = max_drafts if isinstance(scheduler.draft_policy, FixedDraftLength) else 0
        if not min_drafts <= schedule.num_drafts <= max_drafts:
            return f"{schedule.num_drafts} drafts instead of {min_drafts} to {max_drafts}"
        return None

    def _wrong_chunk(self, chunk: PromptChunk, request: Request) -> str | None:
        """Return what is wrong with the bounds of a chunk, or None."""
        start = self._chunk_ends[request.id]
        end = chunk.start + chunk.length
        self._chunk_ends[request.id] = end
        if chunk.start != start or chunk.length < 1:
            return f"a chunk has the tokens {chunk.start} to {end}, and {start} come before it"
        length = len(request.prompt_token_ids)
        if chunk.last != (end == length):
            known = "the last one" if chunk.last else "one of several"
            return f"a chunk that ends at token {end} of {length} is marked as {known}"
        cache = self.scheduler.cache
        if cache.state is not None and not chunk.last and end % cache.config.page_size:
            return f"a chunk of a model with recurrent layers ends at token {end}, within a page"
        return None

    def _unwritten_page(self) -> str | None:
        """Return which cached page of a row has a token that no step has written, or None."""
        cache = self.scheduler.cache
        size = cache.config.page_size
        for entry in self.scheduler.running:
            request = entry.request
            written = entry.max_committed
            if request.output_token_ids:
                # The last token is written by the step that it is an input of.
                written = request.num_tokens - 1
            for page in entry.seq.pages[written // size :]:
                if page in cache.paged.pool.key_of:
                    return (
                        f"page {page} of request {request.id} is cached, and only {written} tokens "
                        "of the request are known to be written"
                    )
        return None

    def _uncached_page(self) -> str | None:
        """Return which full page of a row was not cached, or None.

        Rows that were preempted have other pages, which are cached later.
        """
        cache = self.scheduler.cache
        if not cache.config.enable_prefix_caching:
            return None
        size = cache.config.page_size
        # Another row's page of the same key may have been cached first, and evicted since then.
        self._ever_cached.update(cache.paged.pool.by_key)
        for entry in self.scheduler.running:
            request = entry.request
            tokens = min(entry.max_committed, len(request.prompt_token_ids))
            if cache.state is None and request.output_token_ids:
                tokens = request.num_tokens - 1
            first = self._cached_pages[request.id]
            if request.metrics.num_preemptions or tokens // size <= first:
                continue
            self._cached_pages[request.id] = tokens // size
            root = self.scheduler.cache_root(request)
            fresh = CacheSeq(request.prompt_token_ids, request.output_token_ids, root=root)
            for page in range(first, tokens // size):
                if fresh.key(page, size) not in self._ever_cached:
                    return f"page {page} of request {request.id} is full and was not cached"
        return None
