"""Faults against promises of the documentation: each breaks a sentence of a page in docs/.

The sentences and the mistakes were chosen from the pages alone, and before anything was known of
how `lockstep check` generates its scenarios.
"""

from tests.mutations.faults import (
    PROMPT_ROWS,
    ROWS,
    SAMPLING,
    SCHEDULER,
    WORKER,
    Fault,
)

FAULTS = (
    Fault(
        "of equal logits the last token is taken", "sampler", SAMPLING, "_best",
        "$best = $scores.argmax(-1, keepdim=True)",
        "$best = $scores.shape[-1] - 1 - $scores.flip(-1).argmax(-1, keepdim=True)",
        "tests/kernels/test_sampling.py::test_greedy_takes_first_largest_allowed_token",
        "kernels/sampling.md: Among equal maxima the smallest id is taken.",
    ),
    Fault(
        "top-k drops tokens that tie with its last one", "sampler", SAMPLING, "_filter",
        "$x.masked_fill($x < $x.topk($top_k).values[:, -1:], -torch.inf)",
        "torch.full_like($x, -torch.inf).scatter_(-1, *$x.topk($top_k)[::-1])",
        "tests/kernels/test_sampling.py::test_top_k_keeps_all_tokens_that_tie_with_its_last",
        "kernels/sampling.md: **top_k** keeps the k largest of those, and all that tie with the "
        "last.",
    ),
    Fault(
        "a bias is added after the filters", "sampler", SAMPLING, "_process",
        "if $flags & BIAS:\n"
        "    $x = $x + $bias\n"
        "...\n"
        "if $flags & FILTERS:\n"
        "    $min_p = float($state.min_p[$row])\n"
        "    ...\n"
        "    $x = $filtered",
        "if $flags & BIAS and not $flags & FILTERS:\n"
        "    $x = $x + $bias\n"
        "...\n"
        "if $flags & FILTERS:\n"
        "    $min_p = float($state.min_p[$row])\n"
        "    ...\n"
        "    $x = $filtered\n"
        "    $x = $x + $bias if $flags & BIAS else $x",
        "tests/kernels/test_sampling.py::test_mask_equals_infinite_bias",
        "kernels/sampling.md: score = x / T; -inf where min_p, top_k or top_p drop it",
    ),
    Fault(
        "the repetition penalty forgets cached tokens of the prompt", "sampler", ROWS, "write_row",
        "copy_to_device($start, $table.folded[$row])\n"
        "...\n"
        "write_sampling($table.sampling, $row, $spec, $prompt)",
        "copy_to_device($start, $table.folded[$row])\n"
        "...\n"
        "write_sampling($table.sampling, $row, $spec, "
        "torch.where(torch.arange(len($prompt)) < $start, $prompt[-1], $prompt))",
        "tests/worker/test_row_table.py"
        "::test_penalties_of_a_cached_prompt_include_its_cached_tokens",
        "kernels/sampling.md: for tokens of the prompt or generated ones",
    ),
    Fault(
        "temperatures below 0.01 are raised to it", "sampler", ROWS, "write_sampling",
        "s.RowParameters(..., temperature=$p.temperature)",
        "s.RowParameters(..., temperature=max($p.temperature, 0.01))",
        "tests/worker/test_row_table.py::test_temperatures_have_no_bounds",
        "kernels/sampling.md: score = x / T;",
    ),
    Fault(
        "a stop string is looked for in single tokens", "text", "text.tokenizers.detokenizer",
        "Detokenizer._until_stop",
        "return $text + self._scan.flush() if $final else $text",
        "return $text + self._scan.flush()",
        "tests/text/tokenizers/test_tokenizer.py"
        "::test_stop_strings_end_the_text_at_the_first_match",
        "serving.md: Text that may still change (a partial character, the beginning of a stop "
        "string or tool call) is delayed.",
    ),
    Fault(
        "salted answers are drafted to other users", "scheduler", SCHEDULER,
        "Scheduler._append_tokens",
        "if not ($request.cache_salt or $request.is_audit):\n"
        "    self.answers.append($request.output_token_ids)",
        "if not $request.is_audit:\n"
        "    self.answers.append($request.output_token_ids)",
        "tests/spec/test_suffix.py::test_salted_answers_are_not_learned",
        "drafters.md: So the answer to a request with a "
        "[`cache_salt`](serving.md#fields-beyond-openais) is not stored in the buffer.",
    ),
    Fault(
        "max_tokens does not count forced tokens", "request", "scheduling.request",
        "Request.max_total_tokens",
        "min(self.max_len, len(self.prompt_token_ids) + $max_tokens)",
        "min(self.max_len, self.forced_end + $max_tokens)",
        "tests/engine/test_forced.py::test_forced_prefix_changes_no_answer",
        "continuation.md: `max_tokens`, stop conditions and structured output count forced tokens "
        "as tokens of the answer.",
    ),
    Fault(
        "results in flight reach the next request of an aborted one's id", "scheduler", SCHEDULER,
        "Scheduler.update",
        "self.entries.get($entry.request.id) is $entry",
        "$entry.request.id in self.entries",
        "tests/scheduling/test_scheduler.py::test_abort_in_every_phase",
        "python_api.md: An id is free again once its request has ended.",
    ),
    Fault(
        "log-probabilities after the temperature", "worker", WORKER, "_read_row",
        "logprobs($row.logits[:len($valid)], ...)",
        "logprobs($row.logits[:len($valid)] / ($row.spec.params.temperature or 1), ...)",
        "tests/test_score.py::test_score_equals_generation",
        "continuation.md: Log-probabilities are of the raw logits, so no score depends on "
        "temperature, penalties or masks.",
    ),
    Fault(
        "a page of generated tokens is shared one token before it is full", "cache", SCHEDULER,
        "Scheduler._append_tokens",
        "self.cache.commit($entry.seq, $request.num_tokens - 1)",
        "self.cache.commit($entry.seq, $request.num_tokens)",
        "tests/scheduling/test_scheduler.py::test_follow_up_prompt_reuses_generated_pages",
        "decisions/0012-draft-model-reads-every-step.md: Pages of generated tokens are prefix hits "
        "as soon as they are full.",
    ),
    Fault(
        "requests of a failed step lose their place in the queue", "scheduler", SCHEDULER,
        "Scheduler.restart",
        "self._enqueue(ScheduledRequest($request, $seq, $entry.key))",
        "self.arrivals += 1\n"
        "self._enqueue(ScheduledRequest($request, $seq, ($entry.key[0], self.arrivals)))",
        "tests/scheduling/test_restart.py::test_restarted_request_keeps_its_place_and_its_tokens",
        "architecture.md: All requests that have or had a row begin again at their position in the "
        "queue. Their tokens so far are forced tokens.",
    ),
    Fault(
        "higher values of priority run first", "scheduler", SCHEDULER, "Scheduler.add",
        '$request.priority if self.policy == "priority" else 0',
        '-$request.priority if self.policy == "priority" else 0',
        "tests/scheduling/test_scheduler.py::test_priority_preempts_and_fcfs_does_not",
        "serving.md: lower values run first with `--scheduling-policy priority`",
    ),
    Fault(
        "a thinking budget allows one token more", "text", "text.grammars.thinking_budget",
        "ReasoningProgress.only_token",
        "self.remaining > 0 or not self._parser.reasons",
        "self.remaining >= 0 or not self._parser.reasons",
        "tests/text/grammars/test_thinking_budget.py"
        "::test_closing_tag_is_forced_once_the_budget_is_used_up",
        "serving.md: | `thinking_token_budget` | maximum reasoning tokens; -1: no limit.",
    ),
    Fault(
        "penalties count the first eight drafts of a window", "sampler", SAMPLING, "_penalise",
        "for $q, $draft in enumerate($drafts.tolist()):\n"
        "    ...",
        "for $q, $draft in enumerate($drafts[:8].tolist()):\n"
        "    ...",
        "tests/kernels/test_sampling.py::test_penalties_count_each_draft_of_the_longest_window",
        "kernels/sampling.md: n counts the drafts before the position, so a draft changes when a "
        "token is known and not which.",
    ),
    Fault(
        "a chunk shorter than the convolution leaves older inputs of its slot", "mixer",
        PROMPT_ROWS, "PromptRow._write",
        "$indices = past_indices(self.start + $count, $history, self.state.conv.shape[1])\n"
        "...\n"
        "self.state.conv[$slot, $indices] = self.raw[$count:$count + $history]",
        "$indices = past_indices(self.start + $count, $history, self.state.conv.shape[1])\n"
        "...\n"
        "first = max($history - $count, 0)\n"
        "self.state.conv[$slot, $indices[first:]] = self.raw[$count + first:$count + $history]",
        "tests/regressions/test_f2_state_after_acceptance.py::test_accepted_drafts_keep_the_answer",
        "kernels/gated_delta_rule.md: causal convolution of the raw q, k, v channels",
    ),
    Fault(
        "stop ids of min_tokens not moved at preemption", "worker", "worker.row_table",
        "RowTable.row_tensors",
        "$values += self.sampling.tensors() + self.adapters.tensors()",
        "$values += [t for t in self.sampling.tensors() if t is not self.sampling.stop_ids] + "
        "self.adapters.tensors()",
        "tests/worker/test_row_table.py::test_restored_row_equals_saved_row",
        "architecture.md: Its pages, its state slot and its line of the row table move.",
    ),
    Fault(
        "cached prefixes outlive a failed step", "engine", "engine.engine", "Engine._forget",
        "self.scheduler.cache.drop_cached()",
        "pass",
        "tests/engine/test_faults.py::test_requests_go_on_after_a_failed_step",
        "architecture.md: `Engine.recover` drops the prefix cache and runs an empty step.",
    ),
    Fault(
        "a grammar begins with a drafted end of the reasoning", "text", "text.grammars.compiler",
        "AfterReasoning._reasoning",
        "$free = 1 + sum(1 for $_ in takewhile(lambda $token: $token != self._end, $drafts))",
        "$free = sum(1 for $_ in takewhile(lambda $token: $token != self._end, $drafts)) or 1",
        "tests/text/grammars/test_compiler.py::test_grammar_starts_after_reasoning",
        "structured_output.md: If the prompt ends inside of reasoning, the grammar begins after "
        "`</think>`.",
    ),
    Fault(
        "the buffer of finished answers does not wrap around", "drafter", "spec.suffix",
        "SuffixDrafter.learn",
        "self.next = (self.next + len($kept)) % self.capacity",
        "self.next = self.next + len($kept)",
        "tests/spec/test_suffix.py::test_buffer_is_bounded_and_circular",
        "drafters.md: a circular buffer of the last `suffix_cache_tokens` tokens of finished "
        "answers",
    ),
)  # fmt: skip
