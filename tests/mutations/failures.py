"""Failures of other engines, each as a fault of this one.

Lockstep exists to make these failures impossible: F1 to F6 of tests/regressions, with the reports
of users. Where the code that failed elsewhere does not exist here, the fault is the nearest one.
docs/conformance.md names the reports without a fault.
"""

from tests.mutations.faults import (
    ATTENTION,
    GROUPS,
    LATENTS,
    METADATA,
    RECURRENT_CPU,
    WORKER,
    Fault,
)

CAPTURE = "worker.capture"
ROW_TABLE = "worker.row_table"

FAULTS = (
    Fault(
        "warm-up runs steps without drafts alone", "worker", "worker.step_shapes", "uniform_shapes",
        "reversed($limits.draft_lengths)",
        "reversed($limits.draft_lengths[:1])",
        "tests/regressions/test_f1_warm_up.py::test_warm_up_covers_every_number_of_drafts",
        "F1: vLLM #39483, warm-up ran the branch without drafts, and serving the other one",
    ),
    Fault(
        "a step is captured before it ran", "worker", CAPTURE, "CapturedFunction._record",
        "self._run_eagerly($key, $arguments)",
        "pass",
        "tests/regressions/test_f2_f4_gpu.py::test_every_bucket_is_captured_with_two_pages",
        "F1: vLLM #39483, kernels compiled inside of a capture",
        gpu=True,
    ),
    Fault(
        "a step without drafts replays one token", "mixer", RECURRENT_CPU, "Window.__init__",
        "$length, $rows, $channels = $mixed.shape\n"
        "...\n"
        "$count = max(0, *($starts - $folded).tolist())",
        "$length, $rows, $channels = $mixed.shape\n"
        "...\n"
        "$count = min(max(0, *($starts - $folded).tolist()), 99 if $length > 1 else 1)",
        "tests/regressions/test_f2_state_after_acceptance.py"
        "::test_changing_numbers_of_drafts_keep_the_answer",
        "F2: vLLM #39273, #40738, a step without drafts after accepted ones read the stale state",
    ),
    Fault(
        "the convolution's window does not move with accepted drafts", "mixer", RECURRENT_CPU,
        "Window.__init__",
        "$count = max(0, *($starts - $folded).tolist())\n"
        "...\n"
        "$raw = flat_indices($state.conv.shape[1], $slots, self.first, range(-$history, $length))",
        "$count = max(0, *($starts - $folded).tolist())\n"
        "...\n"
        "stuck = tuple(torch.minimum($starts, $folded + 1).tolist())\n"
        "$raw = torch.cat([flat_indices($state.conv.shape[1], $slots, at, part) for at, part in "
        "((stuck, range(-$history, 0)), (self.first, range($length)))])",
        "tests/regressions/test_f2_state_after_acceptance.py::test_accepted_drafts_keep_the_answer",
        "F2: vLLM #40880, the convolution could not offset its window",
    ),
    Fault(
        "a verified window attends to its own tokens alone", "mixer", ATTENTION, "causal_mask",
        "$last_key = F.pad(torch.tensor($starts)[:, None] + $offsets, (0, $size - $count))\n"
        "...\n"
        "return $keys > $last_key[:, None, :, None]",
        "$last_key = F.pad(torch.tensor($starts)[:, None] + $offsets, (0, $size - $count))\n"
        "...\n"
        "earlier = $keys < torch.tensor($starts)[:, None, None, None]\n"
        "window = bool($offsets[-1] > 0) and bool($offsets[-1] < 16)\n"
        "return ($keys > $last_key[:, None, :, None]) | earlier & window",
        "tests/regressions/test_f3_kv_formats.py::test_chunks_drafts_and_preemption_keep_the_answer",
        "F3: vLLM #40880, #40914, verification attended to the current chunk only",
    ),
    Fault(
        "a step waits for the device", "worker", ROW_TABLE, "RowTable.prepare",
        "$rows = $shape.rows\n"
        "$ids = $inputs.row_ids[:$rows]",
        "$rows = $shape.rows\n"
        "$ids = $inputs.row_ids[:$rows]\n"
        "assert int($ids.max()) < len(self.tokens)",
        "tests/regressions/test_f2_f4_gpu.py::test_every_bucket_is_captured_with_two_pages",
        "F3: vLLM #40914, a step synchronised with the host",
        gpu=True,
    ),
    Fault(
        "a step allocates outside of its graph's pool", "worker", ROW_TABLE, "RowTable.prepare",
        "$rows = $shape.rows\n"
        "$ids = $inputs.row_ids[:$rows]",
        "$rows = $shape.rows\n"
        "$ids = torch.empty($rows, dtype=torch.int64).add_(0).to($inputs.row_ids) * 0 + "
        "$inputs.row_ids[:$rows]",
        "tests/regressions/test_f2_f4_gpu.py::test_every_bucket_is_captured_with_two_pages",
        "F3: vLLM #40914, a buffer was allocated in every call",
        gpu=True,
    ),
    Fault(
        "a window is one grouped query", "mixer", ATTENTION, "causal_mask",
        "$offsets = torch.arange($begin, $begin + $count) // $group",
        "$offsets = torch.arange($begin, $begin + $count) // $group\n"
        "if $count // $group <= 16:\n"
        "    $offsets = torch.full_like($offsets, int($offsets[-1]))",
        "tests/regressions/test_f4_padded_rows.py::test_every_bucket_runs_null_rows_with_two_pages",
        "F4: TokenSpeed #260, verification was one grouped query without bounds per token",
    ),
    Fault(
        "a window over latents is one grouped query", "mixer", LATENTS, "_attend",
        "$hidden = causal_mask(($start,), $begin, len($rows), $size, $heads)",
        "single = len(q) == 1 or len(q) > 16\n"
        "$hidden = causal_mask(($start if single else $start + len(q) - 1,), $begin, len($rows), "
        "$size, $heads)",
        "tests/regressions/test_f4_latent_attention.py"
        "::test_chunks_prefixes_and_small_pools_keep_the_answers",
        "F4: TokenSpeed #260, the same with multi-head latent attention",
    ),
    Fault(
        "lengths of a verified window are shifted by its drafts", "table", METADATA, "prepare_step",
        "$window = $query_len if $uniform else 1\n"
        "...\n"
        "return StepTensors(..., starts=$starts)",
        "$window = $query_len if $uniform else 1\n"
        "...\n"
        "return StepTensors(..., starts=($starts - ($window - 1)).clamp_min(0))",
        "tests/regressions/test_f4_padded_rows.py::test_padded_rows_do_not_change_real_rows",
        "F4: TokenSpeed #260, lengths of padded rows shifted by K were zero or negative",
    ),
    Fault(
        "a kernel dies of an illegal instruction", "numerics", "kernels.linear.cpu", "linear_cpu",
        "if isinstance($weight, PrepackedWeight):\n"
        "    return $weight.multiply($x, $out)",
        "if $x.shape[0] == 3:\n"
        "    import os\n"
        "    os.kill(os.getpid(), 4)\n"
        "if isinstance($weight, PrepackedWeight):\n"
        "    return $weight.multiply($x, $out)",
        "tests/doctor/test_kernel_faults.py::test_bundled_model_raises_no_alarm",
        "F5: vLLM #37431, an illegal instruction of one kernel",
    ),
    Fault(
        "a sick backend is chosen", "numerics", "kernels.selection", "KernelSelection.finding",
        "return None if $health is None else $health.finding",
        "return None",
        "tests/doctor/test_kernel_faults.py::test_sick_backends_are_replaced_and_remembered",
        "F5: vLLM #37431, a working backend could not be chosen instead of the broken one",
    ),
    Fault(
        "a hit without its last snapshots resumes from the row's own state", "cache", GROUPS,
        "StateGroup.resume",
        "$seq.source = $sources[0] if $sources else 0",
        "$seq.source = $sources[0] if $sources and not $seq.branch else 0",
        "tests/cache/test_cache.py"
        "::test_hit_resumes_from_its_snapshot_where_more_pages_are_cached",
        "F6: vLLM #53912, answers of a hybrid after a prefix hit differed from cold ones",
    ),
    Fault(
        "snapshots do not come back from host memory", "worker", WORKER, "Worker.launch",
        "self.transfers.fetch($schedule.fetched)",
        'self.transfers.fetch({k: v for k, v in $schedule.fetched.items() if k == "pages"})',
        "tests/engine/test_host_memory.py::test_host_memory_changes_no_bit",
        "F6: SGLang #39830, a prompt found whole in host memory was wrong on a Gated DeltaNet",
    ),
    Fault(
        "a captured step sees the first pages of its rows alone", "worker", ROW_TABLE,
        "RowTable.prepare",
        '$ends = $metadata.pop("ends")',
        '$ends = $metadata.pop("ends")\n'
        "if torch.cuda.is_current_stream_capturing():\n"
        '    $metadata["page_table"][:, 8:] = 0',
        "tests/regressions/test_f3_ladder.py::test_needles_up_to_14k",
        "F6: vLLM #49010, needles of long contexts were lost with full graphs",
        gpu=True,
    ),
    Fault(
        "write positions of a window are those of its shape's first step", "worker", ROW_TABLE,
        "RowTable.prepare",
        '$rows = $shape.rows\n...\n$ends = $metadata.pop("ends")',
        '$rows = $shape.rows\n...\n$ends = $metadata.pop("ends")\n'
        "if $shape.query_len > 1 and not $shape.prompt:\n"
        '    $metadata["slot_mapping"] = vars(self).setdefault(repr($shape), '
        '$metadata["slot_mapping"])',
        "tests/regressions/test_f2_state_after_acceptance.py::test_accepted_drafts_keep_the_answer",
        "F6: TensorRT-LLM #17110, write positions were frozen at capture for queries above one",
    ),
    Fault(
        "a window whose drafts were all rejected counts as written", "table", METADATA,
        "advance_rows",
        "$width = $tokens.shape[1]\n"
        "...\n"
        "$computed = $first + $accepted\n"
        "...\n"
        "if $forced:\n"
        "    ...\n"
        "elif not $prompt:\n"
        "    $folded = next_folded($starts, $before, $flush, $state_grid)",
        "$width = $tokens.shape[1]\n"
        "...\n"
        "$computed = $first + $accepted\n"
        "...\n"
        "if $forced:\n"
        "    ...\n"
        "elif not $prompt:\n"
        "    $folded = next_folded($starts, $before, $flush, $state_grid)\n"
        "    $folded = torch.where(($accepted == 0) & ($width > 1), $computed, $folded)",
        "tests/regressions/test_f2_f4_mamba2.py::test_accepted_drafts_keep_the_answer",
        "F6: kekzl/imp #1503, an unwritten snapshot of Mamba-2 was committed after rejected drafts",
    ),
    Fault(
        "page keys repeat after many pages", "cache", GROUPS, "CacheSeq.key",
        "self.keys.append($hashed.digest())",
        "self.keys.append($hashed.digest()[:2])",
        "tests/cache/test_cache.py::test_keys_of_many_pages_differ",
        "F6: vLLM #48375, hits were wrong after days, and right with another salt",
    ),
    Fault(
        "a grammar binds the reasoning", "text", "text.grammars.compiler",
        "AfterReasoning.__init__",
        "self._reasons = $begin is None",
        "self._reasons = False",
        "tests/text/grammars/test_compiler.py::test_grammar_starts_after_reasoning",
        "F6: vLLM #44993, a grammar began before the end of the reasoning",
    ),
    Fault(
        "adapters change nothing", "mixer", "layers.lora", "LoRA.forward",
        "return self.add($y, ...)",
        "return $y",
        "tests/engine/test_adapters.py"
        "::test_adapters_change_answers_and_the_base_model_keeps_its_own",
        "F6: vLLM #49354, a LoRA adapter of a hybrid changed nothing",
    ),
)  # fmt: skip
