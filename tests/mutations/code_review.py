"""Faults that a reviewer of the engine's code could miss, chosen with the code in view.

Each leaves most answers as they are: it needs a length at a border, a row that changes its owner
while a step is in flight, or two features in one request. `breaks` says which requests it meets.
Nothing of how `lockstep check` generates its scenarios was known.
"""

from tests.mutations.faults import (
    GRAMMAR_MASKS,
    OF_COMMITTED,
    OF_PROCESSES,
    SCHEDULER,
    WORKER,
    Fault,
)

OF_ENGINE = "tests/engine/test_engine.py"
OF_MASKS = "tests/worker/test_grammar_masks.py"
OF_SCHEDULER = "tests/scheduling/test_scheduler.py"
OF_WALK = "tests/scheduling/test_scheduler_walk.py"

FAULTS = (
    # Scheduler and cache.
    Fault(
        "preemption saves the pages of the tokens that the host has read", "scheduler", SCHEDULER,
        "Scheduler._preempt",
        "$used = self.cache.pages_for(min($entry.max_committed, $entry.request.max_total_tokens))",
        "$used = self.cache.pages_for($entry.request.num_tokens)",
        f"{OF_WALK}::test_row_table_random_walk",
        "With two steps in flight and drafts, a preempted row returns without the page that "
        "accepted drafts of the unread step opened.",
    ),
    Fault(
        "a new prompt may have no chunk in its first schedule", "scheduler", SCHEDULER,
        "Scheduler._plan_prompt",
        "0 if $entry.has_begun else min($rest, self.min_chunk)",
        "0",
        f"{OF_SCHEDULER}::test_admitted_prompts_have_a_chunk_in_the_same_schedule",
        "Of more prompts with a prefix hit than a step has chunks, one begins a schedule later. "
        "Its snapshot is not pinned then: with priorities and few snapshots it is overwritten.",
    ),
    Fault(
        "a rebuilt queue is not a heap", "scheduler", "scheduling.waiting_queue",
        "WaitingQueue.remove",
        "self._heap = sorted(self._entries)",
        "self._heap = list(self._entries)",
        "tests/scheduling/test_waiting_queue.py::test_order_survives_the_removal_of_most_entries",
        "After more than 64 waiting requests were aborted, a request of low priority runs "
        "before one of high priority.",
    ),
    Fault(
        "salts of one adapter share prefixes", "cache", "cache.groups", "root_key",
        "return blake2b(bytes.fromhex($adapter) + $salt, person=b'adapter').digest()",
        "return blake2b(bytes.fromhex($adapter), person=b'adapter').digest()",
        f"{OF_SCHEDULER}::test_prefixes_are_shared_within_a_salt_only",
        "A request with a LoRA adapter shows by num_cached_tokens, and by its time to the "
        "first token, what was asked under another cache_salt.",
    ),
    Fault(
        "a row that finds no pages keeps its new slot", "cache", "cache.cache", "Cache.readmit",
        "if self.pages_for($tokens) + $spare > self.paged.pool.available:\n"
        "    return False\n"
        "if self.state:\n"
        "    $seq.slot = self.state.pool.take()\n"
        "    if not $seq.slot:\n"
        "        return False",
        "if self.state:\n"
        "    $seq.slot = self.state.pool.take()\n"
        "    if not $seq.slot:\n"
        "        return False\n"
        "if self.pages_for($tokens) + $spare > self.paged.pool.available:\n"
        "    return False",
        f"{OF_WALK}::test_row_table_random_walk",
        "A preempted request of a recurrent model leaks a state slot in every schedule in "
        "which it waits for pages, until no request gets a slot.",
    ),
    Fault(
        "a stop token does not end an answer that ignores the model's ends", "request",
        "scheduling.request", "Request.ends_at",
        "if $token in (self.params.stop_token_ids or ()):\n"
        "    return True\n"
        "return $token in self.eos_token_ids and not self.params.ignore_eos",
        "if self.params.ignore_eos:\n"
        "    return False\n"
        "return $token in self.eos_token_ids or $token in (self.params.stop_token_ids or ())",
        "tests/scheduling/test_request.py::test_append",
        "A request with ignore_eos and stop_token_ids goes on to max_tokens.",
    ),
    # Worker: rows and their columns.
    Fault(
        "prompt log-probabilities as the row's present request wants them", "worker", WORKER,
        "Worker._prompt_logprobs",
        "$count = $row.spec.params.prompt_logprobs",
        "$count = self.specs[$row.row].params.prompt_logprobs",
        f"{OF_ENGINE}::test_row_of_a_preempted_prompt_is_used_before_its_logprobs_are_read",
        "With two steps in flight, a prompt that is preempted right after a chunk loses "
        "that chunk's prompt_logprobs to the request that takes its row.",
    ),
    Fault(
        "a prompt's hidden states begin after the previous prompt's scored tokens", "worker",
        WORKER, "Worker._prompt_rows",
        "$next_tokens = $spec.prompt_token_ids[:0]\n"
        "...\n"
        "$begin += $chunk.length",
        "$next_tokens = $spec.prompt_token_ids[:0]\n"
        "...\n"
        "$begin += len($next_tokens)",
        f"{OF_ENGINE}::test_prompts_of_one_step_keep_their_logprobs",
        "Of two prompts in one step, the second gets prompt_logprobs of the first one's "
        "positions.",
    ),
    Fault(
        "a grammar sees as many tokens of a forced window as a decode step has", "worker", WORKER,
        "Worker.__init__",
        "$longest = max($plan.query_len, FORCED_WINDOWS[-1])",
        "$longest = $plan.query_len",
        "tests/engine/test_resumed_answers.py::test_answers_do_not_change_while_steps_raise",
        "A structured answer that is resumed after K + 2 or more tokens has masks of an "
        "earlier position.",
    ),
    Fault(
        "a grammar that ends removes the masks of the row with its index", "worker", GRAMMAR_MASKS,
        "GrammarMasks._upload",
        "remove_masks(self.table.sampling, $one.masked.row)",
        "remove_masks(self.table.sampling, $one.index)",
        f"{OF_MASKS}::test_free_grammar_fills_no_masks_and_changes_no_token",
        "Where a thinking_token_budget ends, another request loses its structured output, "
        "and this one keeps the masks of an earlier step.",
    ),
    Fault(
        "a step uploads one mask of its last row", "worker", GRAMMAR_MASKS, "GrammarMasks._upload",
        "slice($chosen[0].index * $query_len, ($chosen[-1].index + 1) * $query_len)",
        "slice($chosen[0].index * $query_len, $chosen[-1].index * $query_len + 1)",
        f"{OF_MASKS}::test_masks_follow_their_row",
        "With drafts, the last row of structured output has masks of an earlier step after "
        "its first token, so it may break its form.",
    ),
    Fault(
        "the last position of a prompt is left out where it begins a tile", "worker", WORKER,
        "Worker._prompt_logprobs",
        "range(0, len($row.next_tokens), PROMPT_LOGPROB_TILE)",
        "range(0, len($row.next_tokens) - 1, PROMPT_LOGPROB_TILE)",
        f"{OF_ENGINE}::test_prompts_of_one_step_keep_their_logprobs",
        "A chunk of 64n + 1 scored tokens, such as that of a prompt of 66 tokens, has one "
        "entry of prompt_logprobs less.",
    ),
    Fault(
        "a row has no columns for the padding of a forced window", "table", "config",
        "StepLimits.history_len",
        "$past_end = max(WINDOWS_PAST_END * self.query_len, FORCED_WINDOWS[-1] + self.query_len)",
        "$past_end = WINDOWS_PAST_END * self.query_len",
        "tests/worker/test_row_table.py::test_row_table_random_walk",
        "A resumed answer that ends within a window of max_model_len fails, on a GPU by a "
        "read of the next row's tokens.",
    ),
    # Sampler.
    Fault(
        "a grammar's shortcut leaves out bias and penalties", "sampler",
        "kernels.sampling.reference", "sample_by",
        "$words is not None and $row_flags == ALLOWED and _are_allowed($tokens[$s], $words)",
        "$words is not None and not $row_flags & NOISE and _are_allowed($tokens[$s], $words)",
        "tests/kernels/test_sampling.py::test_mask_equals_infinite_bias",
        "A greedy request with structured output and a logit_bias, bad_words, min_tokens or "
        "a penalty gets the plain argmax where the grammar allows it.",
    ),
    # Recurrent layers and kernels of a CPU.
    Fault(
        "raw inputs of a forced window are stored by the length of another history", "mixer",
        "kernels.recurrent.cpu", "CommittedWindow._save",
        "span_indices($part.shape[1], self.slots, self.first, $begins, self.ends)",
        "span_indices(self.state.k.shape[1], self.slots, self.first, $begins, self.ends)",
        f"{OF_COMMITTED}::test_window_equals_single_tokens",
        "After forced tokens a row convolves with other inputs, and may have overwritten "
        "those of the next slot.",
    ),
    Fault(
        "a kernel of attention leaves old scores in the last vector", "numerics",
        "kernels.attention.numba_kernels", "_softmax_weights",
        "for $j in range($count, $padded):\n"
        "    store(F32, $scores, $j, LOWEST)",
        "",
        "tests/kernels/test_numba.py::test_thread_count_changes_no_bit",
        "An answer depends on what the thread computed before, where the context is no "
        "multiple of 16 tokens.",
    ),
    Fault(
        "a kernel keeps the k of the first value heads", "mixer",
        "kernels.gated_delta_rule.numba_kernels", "_save_token",
        "$h % ($hv // $hk) == 0",
        "$h < $hk",
        "tests/kernels/test_backends.py::test_backend_agrees_with_reference"
        "[gated_delta_step-numba-cpu-float32]",
        "A state is replayed with stale keys, so an answer depends on how many drafts were "
        "accepted.",
    ),
    # Engine, and answers that outlive it.
    Fault(
        "an aborted request's progress is that of the next one of its id", "engine",
        "engine.engine", "Engine._end",
        "self._counted.pop($request_id, None)",
        "",
        f"{OF_ENGINE}::test_id_of_an_aborted_request_is_counted_anew",
        "A client that aborts a request and sends its id again gets no first_token_time, "
        "and generation_tokens_total falls.",
    ),
    Fault(
        "tokens of an earlier engine are not counted as received", "engine",
        "engine.received_answer", "ReceivedAnswer.__init__",
        "self._token_ids = list($request.forced_token_ids[:$request.num_resumed])",
        "self._token_ids = list($request.forced_token_ids[:0])",
        f"{OF_PROCESSES}::test_tokens_of_an_earlier_server_are_kept_where_the_engine_is_lost",
        "A stream that loses its engine twice goes on with other tokens, or ends with an "
        "error about forced tokens.",
    ),
    Fault(
        "the last block of a removed log is cleared, not the first", "engine",
        "serve.journal.block_file", "BlockFile.remove",
        "for $number, $block in enumerate($blocks):\n"
        "    if $erase:\n"
        "        ...\n"
        "    elif $number == 0:\n"
        "        ...",
        "for $number, $block in enumerate($blocks):\n"
        "    if $erase:\n"
        "        ...\n"
        "    elif $number == len($blocks) - 1:\n"
        "        ...",
        "tests/serve/journal/test_block_file.py::test_random_use_equals_a_dict",
        "A complete answer of several blocks that made room for others is open again after "
        "a restart, and the server goes on with it.",
    ),
)  # fmt: skip
