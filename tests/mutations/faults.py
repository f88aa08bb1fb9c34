"""Faults, each a small change of one function. The names say what is wrong.

A fault is anchored by the module, the qualified name of the function and a pattern of the code that
it changes; tests.mutations.patterns describes patterns. Renaming a local variable, reformatting and
moving code change no fault. Renaming what a pattern spells out does.
"""

from dataclasses import dataclass
from pathlib import Path

METADATA = "kernels.step_metadata.contract"
DRAFTING = "kernels.drafting.contract"
SAMPLING = "kernels.sampling.reference"
DELTA = "kernels.gated_delta_rule.cpu"
ATTENTION = "kernels.attention.cpu"
LATENTS = "kernels.latent_attention.cpu"
LATENT_ROPE = "kernels.latent_attention.contract"
LATENT_LAYER = "layers.latent_attention"
RINGS = "kernels.recurrent.cpu"
NORM = "kernels.norm.contract"
ROTARY = "kernels.rotary.contract"
ROWS = "worker.rows"
GRAMMAR_MASKS = "worker.grammar_masks"
GRAMMAR = "text.grammars.compiler"
WORKER = "worker.worker"
RECURRENT_CPU = "kernels.recurrent.cpu"
PROMPT_ROWS = "kernels.recurrent.prompt_rows"
SCHEDULER = "scheduling.scheduler"
GROUPS = "cache.groups"
HOST = "cache.host_tier"
TRANSFERS = "worker.transfers"
GPTQ = "quantization.gptq"
STORAGE = "quantization.storage"
EXPERTS = "kernels.experts.cpu"
ROUTE = "kernels.route.contract"
LINEAR = "layers.linear"
MOE = "layers.moe"
VECTORS = "tests/quantization/test_vectors.py"
STORED = "tests/quantization/test_stored.py"
STORED_MAPS = f"{STORED}::test_loaded_weight_equals_represented_weight"
REFUSED = "tests/quantization/test_refused.py"
OF_CHECKPOINTS = "tests/quantization/test_expert_checkpoints.py"
OF_ADAPTERS = "tests/engine/test_adapters.py"
OF_EXPERTS = "tests/kernels/test_experts.py"
OF_ROUTE = "tests/kernels/test_route.py"
OF_PACKED = "tests/kernels/test_quantized_weights.py"
OF_KV = "tests/kernels/test_kv.py"
OF_KV_LATENTS = "tests/kernels/test_kv_latents.py"
OF_LATENTS = "tests/kernels/test_latent_attention.py"
OF_LINEAR_LAYERS = "tests/layers/test_linear.py"
OF_PROCESSES = "tests/engine/test_process_transport.py"
OF_NODES = "tests/worker/test_nodes.py"
OF_DEEPSEEK = "tests/models/test_deepseek_v3.py"
OF_TURBOQUANT = "tests/kernels/test_turboquant.py"
OF_KV_FORMATS = "tests/regressions/test_f3_kv_formats.py"
OF_HALF_STATE = "tests/regressions/test_f2_state_in_16_bits.py"
MAMBA = "kernels.mamba2.cpu"
OF_MAMBA = "tests/regressions/test_f2_f4_mamba2.py"
OF_COMMITTED = "tests/kernels/test_committed.py"
OF_FORCED = "tests/engine/test_forced.py"
OF_AUDITS = "tests/engine/test_audit.py"
OF_NEMOTRON = "tests/models/test_nemotron_h.py"
EAGLE3 = "models.eagle3"
OF_EAGLE3 = "tests/spec/test_eagle3.py::test_drafts_equal_the_paper"
OF_SUFFIX = "tests/spec/test_suffix.py::test_longest_then_own_then_latest_match_wins"
OF_RING = "tests/spec/test_suffix.py::test_drafts_end_with_the_matched_answer"
OF_RECURRENT_DRAFTS = (
    "tests/spec/test_recurrent_draft_model.py::test_recurrent_drafts_equal_its_own_answers"
)
OF_BLOCKS = "tests/spec/test_dflash.py::test_drafts_equal_the_paper"
OF_DRAFT_MODEL = "tests/spec/test_draft_model.py::test_drafts_equal_the_draft_models_greedy_answer"
OF_NO_DRAFTS = "tests/engine/test_speculate.py::test_speculate_changes_no_token"
OF_ROWS_ALONE = "tests/kernels/test_exactness.py"
OF_HOST = "tests/cache/test_host_tier.py"
OF_JOINT = "tests/engine/test_joint_steps.py"
OF_TRANSFERS = "tests/worker/test_transfers.py::test_units_are_not_read_before_their_copy_arrives"
PACKAGE = Path(__file__).parents[2] / "lockstep"


@dataclass(frozen=True)
class Fault:
    """Code change of the package that a test or `lockstep check` must find.

    area: part of the engine that the fault is in.
    module: dotted name within lockstep.
    scope: qualified name of the function or class; "" is the whole module.
    old, new: pattern of the code that the fault changes, and its replacement.
    test: the test of pytest that finds the fault. "": `lockstep check` finds it; the check runs the
    bundled model, which is dense and not quantized.
    breaks: promise that the fault breaks, where its name does not say it.
    gpu: only a GPU runs the changed code.
    """

    name: str
    area: str
    module: str
    scope: str
    old: str
    new: str
    test: str = ""
    breaks: str = ""
    gpu: bool = False

    @property
    def numba(self) -> bool:
        """Return whether the fault is in a Numba kernel or its launcher."""
        return self.module.endswith((".numba", ".numba_kernels", ".tiled"))

    @property
    def file(self) -> str:
        """Return the path of the module's file within the package."""
        path = self.module.replace(".", "/")
        is_package = (PACKAGE / path).is_dir()
        return f"{path}/__init__.py" if is_package else f"{path}.py"


FAULTS = (
    # The twenty that the fixed matrix was first tried on.
    Fault(
        "state slot taken from the row", "table", METADATA, "prepare_step",
        "$slots = $table.state_slots[$row_ids].long()",
        "$slots = $row_ids.clone()",
    ),
    Fault(
        "replay of at most 4", "mixer", RECURRENT_CPU, "Window.__init__",
        "$count = max(0, *($starts - $folded).tolist())",
        "$count = min(4, max(0, *($starts - $folded).tolist()))",
    ),
    Fault(
        "folded one too far when all were accepted", "table", METADATA, "advance_rows",
        "next_folded($seq_lens - $width, $table.folded[$row_ids], $flush, $state_grid)",
        "next_folded($seq_lens - $width, $table.folded[$row_ids], $flush, $state_grid) + "
        "((accepted == $width - 1) & ($width > 1)).int()",
    ),
    Fault(
        "pages rotated after preemption", "worker", ROWS, "restore_row",
        "write_pages_and_slot($table, $row, $pages, $slot)",
        "write_pages_and_slot($table, $row, [*$pages[1:], $pages[0]], $slot)",
    ),
    Fault(
        "a draft compared with a shifted position", "table", METADATA, "advance_rows",
        "$agreed = (($drafts == $tokens[:, :-1]) & ($drafts >= 0)).int()",
        "$agreed = (($drafts == $tokens[:, 1:]) & ($drafts >= 0)).int()",
    ),
    Fault(
        "drafts after a rejected one are accepted", "table", METADATA, "advance_rows",
        "$accepted = $agreed.cumprod(1).sum(1, dtype=torch.int32)",
        "$accepted = $agreed.sum(1, dtype=torch.int32)",
    ),
    Fault(
        "the bonus token of the next row", "table", METADATA, "advance_rows",
        "$counted = ($emits & ($order <= $accepted[:, None]) & ($tokens >= 0)).int()\n"
        "...\n"
        "$drafted = ($drafts >= 0).sum(1, keepdim=True)",
        "$counted = ($emits & ($order <= $accepted[:, None]) & ($tokens >= 0)).int()\n"
        "...\n"
        "$drafted = ($drafts >= 0).sum(1, keepdim=True)\n"
        "$tokens = torch.where($order == $accepted[:, None], $tokens.roll(-1, 0), $tokens)",
    ),
    Fault(
        "random position off under speculation", "table", METADATA, "prepare_step",
        "$decided = torch.arange(1 - $window, 1, device=$starts.device)\n"
        "return StepTensors(..., sample_at=$seq_lens[:, None] + $decided)",
        "$decided = torch.arange(1 - $window, 1, device=$starts.device)\n"
        "return StepTensors(..., sample_at=$seq_lens[:, None] + $decided + ($window > 1))",
    ),
    Fault(
        "the last slot of a circular history buffer not used", "mixer", RINGS, "flat_indices",
        "[$s * $length + ($p + $i) % $length for $i in $offsets for $s, $p in $rows]",
        "[$s * $length + min(($p + $i) % $length, $length - 2) for $i in $offsets for $s, $p "
        "in $rows]",
    ),
    Fault(
        "snapshot slot off the grid", "mixer", PROMPT_ROWS, "PromptRow.save",
        "self._write(self.snapshot, $at_grid, $length // GRID * GRID)",
        "self._write(self.snapshot, after, $length // GRID * GRID)",
    ),
    Fault(
        "penalties count no drafts", "sampler", SAMPLING, "_penalise",
        "$counts[max($q + 1 - $first, 0):, $draft] += 1",
        "$counts[max($q + 1 - $first, 0):, $draft] += 0",
    ),
    Fault(
        "bad_words see no drafts", "sampler", SAMPLING, "_ban_words",
        "$seen = $history[($position + $back).clamp_min(0)]",
        "$seen = $history[($position + $back).clamp_min(0)]\n"
        "$seen = torch.where($position + $back < int(positions[0]), $seen, -2)",
    ),
    Fault(
        "min_tokens judged by the window's first position", "sampler", SAMPLING, "_process",
        "$early = $positions < $state.min_position[$row]",
        "$early = $positions[:1].expand(len($positions)) < $state.min_position[$row]",
    ),
    Fault(
        "high half of a seed dropped", "sampler", SAMPLING, "position_keys",
        "$of_row = _mix($of_row ^ int($seed) >> 32 & MASK32)",
        "$of_row = _mix($of_row)",
    ),
    Fault(
        "top-p mass of the first row used for all", "sampler", SAMPLING, "_filter",
        "$out[:, 1:] = $mass[:, :-1] >= $top_p",
        "$out[:, 1:] = $mass[:1, :-1] >= $top_p",
    ),
    Fault(
        "page key without its parent", "cache", GROUPS, "CacheSeq.key",
        "$parent = self.keys[-1] if self.keys else self.root",
        "$parent = self.root",
    ),
    Fault(
        "page key without the adapter", "cache", SCHEDULER, "Scheduler.cache_root",
        "return root_key($salt, $digest)",
        "return root_key($salt)",
        f"{OF_ADAPTERS}::test_no_prefix_is_shared_between_adapters",
    ),
    Fault(
        "every token has the adapter of the first row", "worker", "worker.adapter_column",
        "AdapterColumn.of_tokens",
        "return self.by_row[$row_ids][$token_rows]",
        "return self.by_row[$row_ids][0 * $token_rows]",
        f"{OF_ADAPTERS}::test_batch_of_adapters_equals_single_rows",
    ),
    Fault(
        "adapter not moved at preemption", "worker", "worker.adapter_column",
        "AdapterColumn.tensors",
        "return [self.by_row]",
        "return []",
        f"{OF_ADAPTERS}::test_preempted_row_moves_with_its_adapter",
    ),
    Fault(
        "snapshots not pinned", "cache", GROUPS, "StateGroup.resume",
        "self.pins.extend($sources)",
        "for source in $sources:\n"
        "    self.pool.drop(source)",
    ),
    Fault(
        "one page too few saved at preemption", "scheduler", SCHEDULER, "Scheduler._preempt",
        "$pages = $entry.seq.pages[:$used]",
        "$pages = $entry.seq.pages[:max($used - 1, 1)]",
    ),
    Fault(
        "prompt log-probabilities missing at chunk ends", "worker", WORKER, "Worker._prompt_rows",
        "$request.prompt_token_ids[$first:$first + $chunk.length]",
        "$request.prompt_token_ids[$first:$first + $chunk.length - 1]",
    ),
    Fault(
        "a rejected token counted", "table", METADATA, "advance_rows",
        "$counted = ($emits & ($order <= $accepted[:, None]) & ($tokens >= 0)).int()",
        "$counted = ($emits & ($order <= $accepted[:, None] + 1) & ($tokens >= 0)).int()",
    ),
    Fault(
        "drafts not cleared", "table", METADATA, "advance_rows",
        "$table.drafts[$row_ids] = -1",
        "$table.drafts[$row_ids[:0]] = -1",
    ),
    # The table, and what the host writes to it.
    Fault(
        "drafts written one position late", "table", METADATA, "_append_drafts",
        "$offset = torch.arange(1, $drafts.shape[1] + 1, device=$starts.device)",
        "$offset = torch.arange(2, $drafts.shape[1] + 2, device=$starts.device)",
    ),
    Fault(
        "the null row is committed to", "table", METADATA, "advance_rows",
        "$table.computed[$row_ids] = torch.where($real, $known, 0)",
        "$table.computed[$row_ids] = $known",
    ),
    Fault(
        "the prompt's last chunk emits at its first token", "table", METADATA, "prepare_step",
        "StepTensors(..., starts=$starts, ends=($cu[1:].long() - 1).clamp_min_(0))",
        "StepTensors(..., starts=$starts, ends=($cu[1:].long() - 1 - ($starts > "
        "0).long()).clamp_min_(0))",
    ),
    Fault(
        "drafts past a page's end written into its first slot", "table", METADATA, "prepare_step",
        "$window = $query_len if $uniform else 1\n"
        "...\n"
        "return StepTensors(..., starts=$starts, slot_mapping=$pages[$token_rows, $column] * "
        "$page_size + $positions % $page_size)",
        "$window = $query_len if $uniform else 1\n"
        "...\n"
        "return StepTensors(..., starts=$starts, slot_mapping=$pages[$token_rows, "
        "$starts.long()[$token_rows] // $page_size if $uniform else $column] * $page_size + "
        "$positions % $page_size)",
    ),
    Fault(
        "token counts of the previous request remain in a row", "worker", ROWS, "write_sampling",
        "copy_to_device(0, $state.counts[$row])",
        "",
    ),
    Fault(
        "a seed's low half written alone", "worker", ROWS, "write_sampling",
        "s.RowParameters(..., seed=$request.seed)",
        "s.RowParameters(..., seed=$request.seed & 0xFFFFFFFF)",
    ),
    Fault(
        "min_tokens keeps off the model's ends alone", "worker", ROWS, "write_sampling",
        "$stops = sorted($request.eos_token_ids | set($p.stop_token_ids or ()))",
        "$stops = sorted($request.eos_token_ids)",
    ),
    Fault(
        "min_tokens one short", "worker", ROWS, "write_sampling",
        "min(len($prompt) + $p.min_tokens, FURTHEST)",
        "min(len($prompt) + $p.min_tokens - 1, FURTHEST)",
    ),
    Fault(
        "a bias allows a token that is not", "worker", ROWS, "_bias",
        "$bias[int($token)] += min(max(float($value), -MAX_BIAS), MAX_BIAS)",
        "$bias[int($token)] = min(max($value, -MAX_BIAS), MAX_BIAS)",
    ),
    Fault(
        "folded not moved at preemption", "worker", "worker.row_table", "RowTable.row_tensors",
        "$values = [self.tokens, self.prompt_len, self.forced_end, self.computed, self.folded]",
        "$values = [self.tokens, self.prompt_len, self.forced_end, self.computed]",
    ),
    Fault(
        "a request that wants no drafts has one verified", "drafter", METADATA, "step_drafts",
        "$drafts = torch.where($order < $limit[:, None], $drafts, -1)",
        "$drafts = torch.where($order <= $limit[:, None], $drafts, -1)",
        OF_NO_DRAFTS,
    ),
    Fault(
        "token counts not moved at preemption",
        "worker", "worker.row_table", "RowTable.row_tensors",
        "$values += self.sampling.tensors() + self.adapters.tensors()",
        "$values += [t for t in self.sampling.tensors() if t is not self.sampling.counts] + "
        "self.adapters.tensors()",
    ),
    Fault(
        "convolution inputs not moved at preemption", "worker", TRANSFERS, "Transfers.copy_in",
        "$part.index_copy_(0, $index, $column)",
        "if $part is not units.spans[0].parts[1]:\n"
        "    $part.index_copy_(0, $index, $column)",
    ),
    Fault(
        "log-probabilities of the window's end", "worker", WORKER, "_read_row",
        "$row.logits[:len($valid)]",
        "$row.logits[-len($valid):]",
    ),
    Fault(
        "a rank counts itself", "worker", "worker.sampler", "logprobs",
        "$rank = int(($scores > $scores[$token]).sum()) + 1",
        "$rank = int(($scores >= $scores[$token]).sum()) + 1",
    ),
    Fault(
        "prompt log-probabilities of the next token", "worker", WORKER, "Worker._prompt_logprobs",
        "self.program.model.head($row.hidden[$begin:$begin + len($tokens)])",
        "self.program.model.head($row.hidden[$begin:$begin + len($tokens)].roll(1, 0))",
    ),
    # The sampler.
    Fault(
        "repetition penalty rewards", "sampler", SAMPLING, "_penalise",
        "torch.where($x > 0, $x / $repetition, $x * $repetition)",
        "torch.where($x > 0, $x * $repetition, $x / $repetition)",
    ),
    Fault(
        "frequency penalty without counts", "sampler", SAMPLING, "_penalise",
        "$x = $x - $state.frequency[$row] * $counts",
        "$x = $x - $state.frequency[$row] * ($counts > 0)",
    ),
    Fault(
        "presence penalty on the prompt too", "sampler", SAMPLING, "_penalise",
        "$x = torch.where($seen, torch.where($x > 0, $x / $repetition, $x * $repetition), $x)\n"
        "...\n"
        "return $x - $state.presence[$row] * ($counts > 0)",
        "$x = torch.where($seen, torch.where($x > 0, $x / $repetition, $x * $repetition), $x)\n"
        "...\n"
        "return $x - $state.presence[$row] * $seen",
    ),
    Fault(
        "penalties after the temperature", "sampler", SAMPLING, "_penalise",
        "$x = $x - $state.frequency[$row] * $counts",
        "$x = $x - $state.frequency[$row] * $counts * $state.temperature[$row].clamp_min(0.001)",
    ),
    Fault(
        "top-k keeps one more", "sampler", SAMPLING, "_filter",
        "$x.masked_fill($x < $x.topk($top_k).values[:, -1:], -torch.inf)",
        "$x.masked_fill($x < $x.topk($top_k + 1).values[:, -1:], -torch.inf)",
    ),
    Fault(
        "top-p leaves out the token that reaches it", "sampler", SAMPLING, "_filter",
        "$out[:, 1:] = $mass[:, :-1] >= $top_p",
        "$out[:, 1:] = $mass[:, 1:] >= $top_p",
    ),
    Fault(
        "min-p of the sum", "sampler", SAMPLING, "_filter",
        "$floor = $x.amax(-1, keepdim=True) + torch.log(torch.tensor($min_p))",
        "$floor = $x.logsumexp(-1, keepdim=True) + torch.log(torch.tensor($min_p))",
    ),
    Fault(
        "one noise for a window", "sampler", SAMPLING, "_process",
        "return $x + _to_gumbel($uniform($state.seed[$row], $positions, $noise))",
        "return $x + _to_gumbel($uniform($state.seed[$row], $positions[:1], $noise))",
    ),
    Fault(
        "bias of the first row used for all", "sampler", SAMPLING, "_process",
        "$x = $x + $state.bias[$row][:, $selected]",
        "$x = $x + $state.bias[1:2][:, $selected]",
    ),
    Fault(
        "noise of half the range", "sampler", SAMPLING, "uniform",
        "$bits = _mix(_mix($key ^ $ids) ^ $key) >> 9",
        "$bits = _mix(_mix($key ^ $ids) ^ $key) >> 10",
    ),
    Fault(
        "the index of a token among the sampled ids taken for its id",
        "sampler", SAMPLING, "sample_by",
        "$tokens[$s, $part] = $best if $selected is None else $selected[$best]",
        "$tokens[$s, $part] = $best",
    ),
    Fault(
        "a grammar's first mask holds at every position", "sampler", SAMPLING, "_parts",
        "for $q, $bits in enumerate(_bits($words, $ids, $logits.shape[1])):\n"
        "    ...",
        "for $q, $bits in enumerate(_bits($words[:1].expand(len($words), -1), $ids, "
        "$logits.shape[1])):\n"
        "    ...",
    ),
    Fault(
        "the first rank's best score always wins", "sampler", SAMPLING, "_best_of_ranks",
        "$best, $top_of_all = _best($values)",
        "$best, $top_of_all = _best($values[:, :1])",
        "tests/kernels/test_sampling_shards.py::test_every_parameter",
    ),
    Fault(
        "the largest is looked for in the first block", "sampler", SAMPLING, "_best_of_many",
        "return ($first[..., 0] * BLOCK + $best, $top)",
        "return ($best, $top)",
        "tests/kernels/test_sampling.py::test_greedy_first_largest_in_large_vocabulary",
    ),
    Fault(
        "a grammar is compiled whoever waits", "engine", "engine.compile_limiter",
        "CompileLimiter.enter",
        "self._changed.wait_for(lambda: len(self._ids) < self._limit)",
        "self._changed.wait_for(lambda: True)",
        "tests/engine/test_compile_limiter.py::test_enter_blocks_at_the_limit",
    ),
    Fault(
        "tools that are shown may all be called", "text", "text.grammars.tool_calls",
        "ToolChoice.allows",
        "return self.names is None or $name in self.names",
        "return True",
        "tests/text/grammars/test_tool_calls.py::test_grammar_allows_calls_of_every_writer",
    ),
    Fault(
        "a large body is parsed at once", "request", "serve.http.json_body", "BodyReader.read",
        "if len($body) < LARGE_BODY_BYTES:\n"
        "    ...",
        "if $body:\n"
        "    ...",
        "tests/serve/http/test_json_body.py::test_large_body_does_not_block_the_event_loop",
    ),
    Fault(
        "bad_words match at the prompt's beginning", "sampler", SAMPLING, "_ban_words",
        "$prefix = $word[:-1]",
        "$prefix = $word[1:]",
    ),
    # Requests and the cache.
    Fault(
        "completions of a request share a seed", "text", "text.processor",
        "Processor.tokenized_requests",
        "$mine = ($seed + $i + 2 ** 63) % 2 ** 64 - 2 ** 63",
        "$mine = ($seed + 2 ** 63) % 2 ** 64 - 2 ** 63",
    ),
    Fault(
        "tokens after the end of an answer remain",
        "request", "scheduling.request", "Request.append",
        "if self.finish_reason is not None:\n"
        "    return $index",
        "",
    ),
    Fault(
        "a stop token right at min_tokens passed over", "request", "scheduling.request",
        "Request.ends_at",
        "if $index < self.params.min_tokens:\n"
        "    ...",
        "if $index <= self.params.min_tokens:\n"
        "    ...",
    ),
    Fault(
        "a key outlives its page", "cache", "cache.pool", "Pool.take",
        "del self.by_key[$key]",
        "",
    ),
    Fault(
        "a page shared under another's key", "cache", GROUPS, "PagedGroup.commit",
        "self.pool.publish($seq.pages[$page], $key)",
        "self.pool.publish($seq.pages[-1 - $page], $key)",
    ),
    Fault(
        "generated pages shared with recurrent layers", "cache", "cache.cache", "Cache.commit",
        "min($tokens, len($seq.prompt)) if self.state else $tokens",
        "$tokens",
    ),
    Fault(
        "a hit leaves no token to compute", "cache", "cache.cache", "Cache._hit",
        "(len($seq.prompt) - 1) // self.config.page_size",
        "len($seq.prompt) // self.config.page_size",
    ),
    Fault(
        "new snapshots not pinned", "cache", GROUPS, "StateGroup.snapshot",
        "self.pins.append($slot)",
        "self.pool.drop($slot)",
    ),
    Fault(
        "a page released twice", "cache", GROUPS, "PagedGroup.release",
        "$seq.pages = []",
        "",
    ),
    Fault(
        "a hit without its snapshot", "cache", "cache.cache", "Cache._hit",
        "$resumed = self.state.hit($seq, $hit)",
        "$resumed = $hit",
    ),
    # Joint steps: a decode step and a prompt step in one forward pass.
    Fault(
        "a mixer's outputs of a joint step's prompts come first", "worker", "step",
        "JointContext.mix",
        "torch.cat([$function(*$inputs, $part) for $inputs, $part in $steps])",
        "torch.cat([$function(*$inputs, $part) for $inputs, $part in $steps][::-1])",
    ),
    Fault(
        "the logit rows of a joint step's prompts come first", "worker", "step",
        "JointContext.at_logit_rows",
        "torch.cat([$part.at_logit_rows($hidden) for $hidden, $part in $steps])",
        "torch.cat([$part.at_logit_rows($hidden) for $hidden, $part in $steps][::-1])",
    ),
    Fault(
        "the adapters of a joint step's prompts come first", "worker", "step", "JointContext.of",
        "_joined([$part.adapter_ids for $part in $parts])",
        "_joined([$part.adapter_ids for $part in $parts[::-1]])",
        f"{OF_JOINT}::test_joint_steps_of_adapters_change_no_bit",
    ),
    Fault(
        "the prompts of a joint step have the rows of its decode step", "worker",
        "worker.row_table", "RowTable.prepare",
        "$inputs = self.pass_inputs[$index]",
        "$inputs = self.pass_inputs[0]",
    ),
    Fault(
        "a joint step's drafter reads the hidden states of the decode step", "worker",
        "worker.program", "Program.forward",
        "Forwarded($step, $hidden, tuple($aux[$i] for $aux in $parts), $logits, $shapes)",
        "Forwarded($step, $hidden, tuple($aux[0] for $aux in $parts), $logits, $shapes)",
        f"{OF_JOINT}::test_joint_steps_change_no_bit",
    ),
    Fault(
        "the time of a rank's decode steps includes joint steps", "worker", "worker.rank_times",
        "StepTimes.before_step",
        "self.timers.pop()\n"
        "self.is_timing = False",
        "pass",
        f"{OF_JOINT}::test_times_of_ranks_leave_joint_steps_out",
    ),
    Fault(
        "a joint step is captured on a row of a request", "worker", WORKER,
        "Worker._capture_joint",
        "$inputs.fill(query_lens=$lengths)",
        "$inputs.fill(row_ids=[1], query_lens=$lengths)",
        "tests/worker/test_joint_steps.py::test_capture_writes_null_rows_only",
    ),
    Fault(
        "the masks of a joint step's prompts overwrite those of its decode step", "worker", WORKER,
        "Worker._launch",
        "$num_masks += len($step.row_ids) * $width",
        "$num_masks += 0",
        "tests/worker/test_grammar_masks.py::test_steps_of_one_pass_write_their_masks_apart",
    ),
    Fault(
        "rows that return take the chunks of new prompts", "scheduler", SCHEDULER,
        "Scheduler._plan_prompt",
        "max(self._prompt_budget($decoded), sum($minimum))",
        "self._prompt_budget($decoded)",
        "tests/scheduling/test_scheduler.py::test_rows_that_return_leave_new_prompts_their_chunks",
    ),
    Fault(
        "the shortest prompts take whole steps", "scheduler", "scheduling.chunks", "split_budget",
        "$first = min(max($budget // 2, $align), $budget)",
        "$first = 0",
        "tests/scheduling/test_scheduler.py::test_split_budget",
    ),
    Fault(
        "a joint step before its capture has no memory", "worker", "worker.memory_estimate",
        "DryEngine.largest_pass",
        "$passes.append(($widest, padded_shapes($limits)[-1]))",
        "pass",
        "tests/worker/test_dry_run.py::test_joint_steps_before_their_captures_have_memory",
    ),
    Fault(
        "the logits of a joint graph's prompts take no memory", "worker", "worker.joint_steps",
        "JointSteps._may_get_graph",
        "$logit_rows = sum($first.tokens + $second.rows for $first, $second in $passes)",
        "$logit_rows = sum($first.tokens for $first, $second in $passes)",
        "tests/worker/test_joint_steps.py::test_graphs_of_joint_steps_are_bounded",
    ),
    Fault(
        "the draft length learns the time of joint steps", "worker", WORKER, "Worker.collect",
        "if $step.shape.is_decode and not $step.is_joint: ...",
        "if $step.shape.is_decode: ...",
        f"{OF_JOINT}::test_draft_length_learns_no_time_from_joint_steps",
    ),
    # Host memory.
    Fault(
        "a page is fetched into the wrong page", "worker", TRANSFERS, "Transfers.copy_in",
        "$part.index_copy_(0, $index, $column)",
        "$part.index_copy_(0, $index.roll(1), $column)",
    ),
    Fault(
        "a page is fetched after the prompt step", "worker", WORKER, "Worker.launch",
        "self.transfers.fetch($schedule.fetched)\n"
        "return $launched + self._launch($last, $masked, $fill_masks)",
        "$launched += self._launch($last, $masked, $fill_masks)\n"
        "self.transfers.fetch($schedule.fetched)\n"
        "return $launched",
    ),
    Fault(
        "evicted pages are copied after rows move in", "worker", WORKER, "Worker.launch",
        "self.transfers.evict($schedule.evicted)\n"
        "self._update_rows($schedule)",
        "self._update_rows($schedule)\n"
        "self.transfers.evict($schedule.evicted)",
    ),
    Fault(
        "a snapshot's host pages begin one too late", "worker", TRANSFERS, "_pairs",
        "$at = 0\n"
        "for $host in $page_ids:\n"
        "    ...",
        "$at = 0\n"
        "for $host in $page_ids[len($page_ids) > 1:]:\n"
        "    ...",
    ),
    Fault(
        "moves of a schedule are repeated", "cache", HOST, "HostStore.end_schedule",
        "[self.pool.evictions.pop($name) for $name in $evicted]",
        "[self.pool.evictions[$name] for $name in $evicted]",
    ),
    Fault(
        "two evictions of a schedule go to one host page", "cache", HOST, "HostPool.store",
        "self.evictions.pop($oldest, None)",
        "",
        f"{OF_HOST}::test_host_page_is_written_once_per_schedule",
    ),
    Fault(
        "a reused host page keeps its former key", "cache", HOST, "HostPool.store",
        "self.free.extend(self.entries.pop($oldest))",
        "self.free.extend(self.entries[$oldest])",
    ),
    Fault(
        "an entry of one pool is found by the other", "cache", HOST, "HostStore.has",
        "return (self.name, $key) in self.pool.entries",
        "return any((known == $key for _, known in self.pool.entries))",
    ),
    Fault(
        "pinned entries are evicted from host memory", "cache", HOST, "HostPool.pin",
        "if $name not in self.pinned:\n"
        "    ...",
        "if False:\n"
        "    ...",
        f"{OF_HOST}::test_restored_host_pages_are_not_evicted_by_their_hit",
    ),
    Fault(
        "host memory outlives dropped prefixes", "cache", "cache.cache", "Cache.drop_cached",
        "self.host.drop_cached()",
        "",
        f"{OF_HOST}::test_reset_empties_host_memory",
    ),
    Fault(
        "a page of another salt is fetched from the host", "cache", GROUPS, "CacheSeq.key",
        "$parent = self.keys[-1] if self.keys else self.root",
        "$parent = self.keys[-1] if self.keys else b''",
        f"{OF_HOST}::test_salts_isolate_host_memory",
    ),
    Fault(
        "a step reads pages that are still being copied to the device",
        "worker", TRANSFERS, "Transfers.copy_in",
        "self.stream.wait(self.stream.copy($copies, $staging.idle))",
        "self.stream.copy($copies, $staging.idle)",
        OF_TRANSFERS,
    ),
    Fault(
        "a staging buffer is filled again before it is copied", "worker", TRANSFERS,
        "Transfers.copy_out",
        "self.stream.wait($staging.idle)",
        "",
        OF_TRANSFERS,
    ),
    # The scheduler.
    Fault(
        "a snapshot read by every chunk", "scheduler", SCHEDULER, "Scheduler._plan_prompt",
        "$entry.seq.source = 0",
        "",
    ),
    Fault(
        "chunks end off the grid", "scheduler", SCHEDULER, "Scheduler.__init__",
        "self.align = $grid if $cache.state else 1",
        "self.align = 1",
    ),
    Fault(
        "snapshot of the next page", "scheduler", SCHEDULER, "Scheduler._plan_prompt",
        "$point = $end // $size * $size",
        "$point = -(-$end // $size) * $size",
    ),
    Fault(
        "granted pages one column off", "scheduler", SCHEDULER, "Scheduler._reserve",
        "$plan.grants.append(PageGrant($entry.row, $column, $entry.seq.pages[$column:]))",
        "$plan.grants.append(PageGrant($entry.row, $column - 1, $entry.seq.pages[$column:]))",
    ),
    Fault(
        "prompt log-probabilities skip cached tokens", "scheduler", SCHEDULER,
        "Scheduler._cache_seq",
        "$reuse = $request.params.prompt_logprobs is None and not $request.is_audit",
        "$reuse = not $request.is_audit",
    ),
    Fault(
        "audits resume cached prefixes", "scheduler", SCHEDULER, "Scheduler._cache_seq",
        "$request.params.prompt_logprobs is None and not $request.is_audit",
        "$request.params.prompt_logprobs is None",
        f"{OF_AUDITS}::test_audits_use_no_cached_prefix",
    ),
    Fault(
        "a request waits for two steps of an audit", "engine", "engine.engine", "Engine.step",
        "1 if self.scheduler.is_auditing else self.plan.steps_in_flight",
        "self.plan.steps_in_flight",
        f"{OF_AUDITS}::test_requests_stop_audits",
    ),
    Fault(
        "audits compare no log-probabilities", "engine", "engine.auditor", "answer_of",
        "exact_logprobs($request.logprobs)",
        "()",
        f"{OF_AUDITS}::test_wrong_logprobs_are_a_difference",
    ),
    Fault(
        "page grants of a preempted row remain", "scheduler", SCHEDULER, "Scheduler._preempt",
        "$plan.grants = [$grant for $grant in $plan.grants if $grant.row != $entry.row]",
        "",
    ),
    Fault(
        "an aborted request stays in host memory", "scheduler", SCHEDULER, "Scheduler._finish",
        "self.dropped.append($entry.request.id)",
        "pass",
    ),
    # Drafters, which may be wrong about drafts and nothing else.
    Fault(
        "ngram_lookup writes over the last token", "drafter", DRAFTING, "ngram_lookup",
        "$values = $history[$row, :int($computed[$row]) + 1]\n"
        "...\n"
        "$drafts[$row, :len($proposal)] = $proposal",
        "$values = $history[$row, :int($computed[$row]) + 1]\n"
        "...\n"
        "$drafts[$row, :len($proposal)] = $proposal\n"
        "$history[$row, len($values) - 1] = ($proposal if len($proposal) else $values[-1:])[0]",
    ),
    Fault(
        "next_draft_step commits its drafts", "drafter", DRAFTING, "next_draft_step",
        "$starts = $computed[$row_ids] + $index + $offset",
        "$starts = $computed[$row_ids] + $index + $offset\n"
        "$computed[$row_ids] += int($index == 2)",
    ),
    Fault(
        "mtp_inputs takes drafts for history", "drafter", DRAFTING, "mtp_inputs",
        "$after = $history[$row_ids[$token_rows], $where]",
        "$after = $history[$row_ids[$token_rows], $where]\n"
        "$history[$row_ids[$token_rows], $where] = $after.roll(1)",
    ),
    Fault(
        "the oracle drafter leaves a draft after the window", "drafter", "check.oracle_drafter",
        "OracleDrafter.propose",
        "$ok = $match.any(1, keepdim=True) & ($target >= 0) & ($length[:, None] % NONE_EVERY > 0)\n"
        "...\n"
        "$c.drafts[$rows, :$count] = torch.where($ok, $drafts, -1)",
        "$ok = $match.any(1, keepdim=True) & ($target >= 0) & ($length[:, None] % NONE_EVERY > 0)\n"
        "...\n"
        "$c.drafts[$rows, :$count] = torch.where($ok, $drafts, -1)\n"
        "if $count:\n"
        "    $c.drafts[$rows, -1] = 7\n"
        "    $c.computed[$rows] += ($length > 90).int()[:, None][:, 0] * int($count > 2)",
    ),
    # Mixers.
    Fault(
        "replay misses a row's first token", "mixer", RINGS, "replay",
        "$live = (torch.arange($count, 0, -1)[:, None] <= $starts - $folded)[..., None, None]",
        "$live = (torch.arange($count, 0, -1)[:, None] < $starts - $folded)[..., None, None]",
    ),
    Fault(
        "a resumed chunk convolves with the row's old inputs", "mixer", PROMPT_ROWS, "prompt_rows",
        "$past = $state.conv[$src, past_indices($start, $history, $state.conv.shape[1])]",
        "$past = $state.conv[slot, past_indices($start, $history, $state.conv.shape[1])]",
    ),
    Fault(
        "a first chunk begins from the slot's old state", "mixer", PROMPT_ROWS, "prompt_rows",
        "$before = torch.zeros($state.recurrent.shape[1:])",
        "$before = $state.recurrent[src].to(torch.float32, copy=True)",
    ),
    Fault(
        "a token of a window sees the next one", "mixer", ATTENTION, "causal_mask",
        "$offsets = torch.arange($begin, $begin + $count) // $group",
        "$offsets = torch.arange($begin, $begin + $count) // $group + (1 < $count // $group < 9)",
    ),
    Fault(
        "values of a page left out at its end", "mixer", ATTENTION, "_unseen_tokens",
        "$unseen = [torch.arange($s * $length + $end, ($s + 1) * $length)"
        " for $s, $end in enumerate($ends)]",
        "$unseen = [torch.arange($s * $length + $end - ($end % 64 == 1 and $end > 64), "
        "($s + 1) * $length) for $s, $end in enumerate($ends)]",
    ),
    Fault(
        "keys rotated by the row's first position", "mixer", ROTARY, "_rotate_at",
        "$angles = ($t.index_select(0, $positions) for $t in ($cos, $sin))",
        "near = $positions.clamp_max(int($positions[0]) + 6)\n"
        "$angles = ($t.index_select(0, near) for $t in ($cos, $sin))",
    ),
    # Numbers alone: an ulp, or another order of addition.
    Fault(
        "one ulp in the last row of a batch's logits", "numerics", "models.decoder",
        "Decoder.logits",
        "return self.head($step.at_logit_rows($hidden))",
        "out = self.head($step.at_logit_rows($hidden))\n"
        "if out.shape[0] > 1:\n"
        "    out[-1, -1] = out[-1, -1].nextafter(out.new_tensor(9e9))\n"
        "return out",
    ),
    Fault(
        "rows not padded to a tile", "numerics", "kernels.row_tiles", "tiled_mm",
        "$tile = $x.expand($size, $k) if $rows == 1 else F.pad($x, (0, 0, 0, $size - $rows))\n"
        "return torch.mm($tile, $right)[:$rows]",
        "$tile = $x.expand($size, $k) if $rows == 1 else F.pad($x, (0, 0, 0, $size - $rows))\n"
        "return torch.mm($x, $right)",
    ),
    Fault(
        "different rounding for many rows", "numerics", "kernels.linear.cpu", "linear_cpu",
        "if isinstance($weight, PrepackedWeight):\n"
        "    return $weight.multiply($x, $out)",
        "if isinstance($weight, PrepackedWeight):\n"
        "    $x = $x.float() / 3 * 3 if $x.shape[0] > 8 else $x.float()\n"
        "    return $weight.multiply($x, $out)",
    ),
    Fault(
        "different rounding for many rows of a kernel", "numerics", "kernels.linear.tiled",
        "ColumnTiles.multiply",
        "$wide = $x.float().contiguous()",
        "$wide = $x.float() / 3 * 3 if len($x) > 8 else $x.float().contiguous()",
    ),
    Fault(
        "attention of a kernel reads one key less in long steps", "numerics",
        "kernels.attention.numba", "paged_attention_numba",
        "$q = $q.contiguous()\n"
        "$rotated = rotation_of($v_cache) is not None",
        "$q = $q.contiguous()\n"
        "starts = (starts - (tokens > 4)).clamp_min(0)\n"
        "$rotated = rotation_of($v_cache) is not None",
    ),
    Fault(
        "a kernel replays one token too few", "mixer", "kernels.gated_delta_rule.numba_kernels",
        "_replay",
        "range($first, $start)",
        "range($first + 1, $start)",
    ),
    Fault(
        "a norm of a kernel has another eps for several rows", "numerics", "kernels.norm.numba",
        "add_rms_norm_numba",
        "$kernel($a, $b, $c, $d, $e, $rows, $stride, $width, $eps, $offset)",
        "$kernel($a, $b, $c, $d, $e, $rows, $stride, $width, $eps * 3 if $rows > 4 else $eps, "
        "$offset)",
    ),
    Fault(
        "a norm sums in descending order for several rows", "numerics", NORM, "_normalize",
        "return $x * torch.rsqrt(($x * $x).mean(-1, keepdim=True).add_($eps))",
        "y = ($x * $x).flip(-1).contiguous() if $x.shape[0] > 4 else $x * $x\n"
        "return $x * torch.rsqrt(y.mean(-1, keepdim=True).add_($eps))",
    ),
    Fault(
        "one ulp in a gated norm of windows", "numerics", NORM, "gated_rms_norm",
        "return (_normalize($x, $eps) * $weight.float() * silu($gate.float())).to($gate.dtype)",
        "out = _normalize($x, $eps) * $weight.float() * silu($gate.float())\n"
        "out = torch.nextafter(out, out + 1) if out.shape[0] == 3 else out\n"
        "return out.to($gate.dtype)",
    ),
    Fault(
        "residuals added in another order in prompt steps", "numerics", NORM, "add_rms_norm",
        "$total = $x + $delta",
        "$total = $x + $delta if len($x) < 70 else ($x * 3 + $delta * 3) / 3",
    ),
    Fault(
        "torch's own softplus", "numerics", "kernels.activations.contract", "softplus",
        "return torch.where($x > SOFTPLUS_LINEAR, $x, torch.log1p(torch.exp($x)))",
        "return torch.nn.functional.softplus($x)",
    ),
    Fault(
        "parts of attention added in fp32 for several rows", "numerics", ATTENTION,
        "combine_splits",
        "return ($part * $scale).cumsum(1)[:, -1] / ($norm * $scale).cumsum(1)[:, -1]",
        "if $part.shape[2] > 16:\n"
        "    return ($part * $scale).sum(1) / ($norm * $scale).sum(1)\n"
        "return ($part * $scale).cumsum(1)[:, -1] / ($norm * $scale).cumsum(1)[:, -1]",
    ),
    Fault(
        "one ulp in a window's rotation", "numerics", ROTARY, "rope_and_cache",
        "return $q.contiguous()",
        "return ($q * (1 + 2 ** (-23)) if 1 < len($q) < 5 else $q).contiguous()",
    ),
    Fault(
        "the state rounded to bf16 when it moves", "numerics", TRANSFERS, "Transfers.copy_out",
        "torch.index_select($part, 0, $index, out=$column)",
        "torch.index_select($part, 0, $index, out=$column)\n"
        "if units is self.slots:\n"
        "    $column.copy_($column.clone().view(torch.float32).bfloat16().float().view($column"
        ".dtype))",
    ),
    Fault(
        "chunks of a prompt solved together", "numerics", DELTA, "_run_chunks",
        "$chunks = -(-$length // GRID)\n"
        "...\n"
        "$scores = $q @ $k.transpose(-1, -2) * $decay",
        "$chunks = -(-$length // GRID)\n"
        "...\n"
        "$scores = $q @ $k.transpose(-1, -2) * $decay\n"
        "$scores = $scores + 2 ** (-22) * $scores.mean(0) if $chunks > 1 else $scores",
    ),
    # How weights are read from packed checkpoints; found by tests, like all that follow.
    Fault(
        "zero points of GPTQ version 1 read as version 2", "format", GPTQ, "",
        "STORED_LESS = {'gptq': 1, 'gptq_v2': 0}",
        "STORED_LESS = {'gptq': 0, 'gptq_v2': 0}",
        f"{VECTORS}::test_gptq_vectors",
    ),
    Fault(
        "zero points of GPTQ version 2 read as version 1", "format", GPTQ, "",
        "STORED_LESS = {'gptq': 1, 'gptq_v2': 0}",
        "STORED_LESS = {'gptq': 1, 'gptq_v2': 1}",
        f"{VECTORS}::test_gptq_vectors",
    ),
    Fault(
        "a zero point of 0 does not borrow", "format", GPTQ, "_fill_zeros",
        "$zeros = unpack_words($words + $stored_less * $entry, $shifts, $weight.bits, dim=1)",
        "$zeros = unpack_words($words, $shifts, $weight.bits, dim=1) + $stored_less\n"
        "$zeros &= 2 ** $weight.bits - 1",
        f"{VECTORS}::test_zero_points_of_zero_borrow_in_version_1",
    ),
    Fault(
        "AutoRound's older name of its tensors not read", "format", "quantization.auto_round",
        "_packing_format",
        "$name = $c.present_name('packing_format', 'backend')",
        "$name = 'packing_format'",
        f"{VECTORS}::test_older_auto_round_formats",
    ),
    Fault(
        "the order of desc_act ignored", "format", GPTQ, "_fill_order",
        "if not torch.equal($order.long().sort().values, $plain):\n"
        "    ...\n"
        "$weight.g_idx.copy_($order)",
        "if not torch.equal($order.long().sort().values, $plain):\n"
        "    ...\n"
        "$weight.g_idx.copy_($plain)",
        f"{VECTORS}::test_gptq_with_shuffled_groups",
    ),
    Fault(
        "a rule of dynamic does not leave a module out", "format", GPTQ, "GPTQ.module_scheme",
        "return ModuleScheme($scheme, False, f'{SETTINGS_PREFIX}dynamic[{$rule.text[:100]!r}]')",
        "continue",
        f"{REFUSED}::test_settings_decide_without_files",
    ),
    Fault(
        "bits of a rule of dynamic ignored", "format", GPTQ, "GPTQ.module_scheme",
        "if $rule.scheme is None:\n"
        "    ...\n"
        "$scheme = $rule.scheme",
        "if $rule.scheme is None:\n"
        "    ...\n"
        "$scheme = $scheme",
        f"{REFUSED}::test_first_matching_rule_wins",
    ),
    Fault(
        "steps of GGUF scales one too large", "format", "quantization.gguf_format",
        "_store_by_group",
        "$bases.copy_($base.view($bases.shape))\n"
        "$numbers.copy_($steps.view($numbers.shape))",
        "$bases.copy_($base.view($bases.shape))\n"
        "$numbers.copy_($steps.view($numbers.shape) + 1)",
        "tests/quantization/test_gguf_format.py::test_device_weight_equals_file_values",
    ),
    Fault(
        "high bits of GGUF codes in reverse order", "packed",
        "kernels.formats.weights.gguf_ptx", "_extract_pair",
        "$lines.append(_shift('h', '$5', $low_bits - $high_bits * $pair))",
        "$lines.append(_shift('h', '$5', $low_bits - $high_bits * (3 - $pair)))",
        "tests/kernels/test_gguf_ptx.py::test_words_are_dequantized_by_type",
    ),
    Fault(
        "AWQ's order of nibbles the wrong way round", "format", "quantization.awq", "",
        "AWQ_BITS * ORDER.index(output)",
        "AWQ_BITS * ORDER[output]",
        f"{VECTORS}::test_awq_vectors",
    ),
    Fault(
        "AWQ's zero points in plain order", "format", "quantization.awq", "_fill_zeros",
        "$zeros = unpack_words($words, SHIFTS, AWQ_BITS, dim=1)",
        "$zeros = unpack_words($words, tuple(sorted(SHIFTS)), AWQ_BITS, dim=1)",
        f"{VECTORS}::test_awq_vectors",
    ),
    Fault(
        "AutoRound's packings all read as version 1", "format", "quantization.auto_round", "",
        "{'auto_round:auto_gptq': 1, 'auto_round:gptq': 1, 'auto_gptq': 1, 'gptq': 1, 'auto': "
        "1, 'auto_round:gptqmodel': 0, 'auto_round': 0}",
        "{'auto_round:auto_gptq': 1, 'auto_round:gptq': 1, 'auto_gptq': 1, 'gptq': 1, 'auto': "
        "1, 'auto_round:gptqmodel': 1, 'auto_round': 0}",
        f"{VECTORS}::test_auto_round",
    ),
    Fault(
        "bits of extra_config ignored", "format", "quantization.auto_round", "AutoRound._scheme",
        "$match = replace(self.scheme.overridden($c), act_order=False)",
        "$match = self.scheme",
        "tests/quantization/test_checkpoints.py::test_auto_round_of_hybrid",
    ),
    Fault(
        "the scale of the block below at a block's edge", "format", STORAGE, "expand_to_rows",
        "return $scales.repeat_interleave($block, 0)[:$n]",
        "return $scales.repeat_interleave($block, 0)[1:$n + 1]",
        STORED_MAPS,
    ),
    Fault(
        "a block's scales by rows that were cut off above", "format", "kernels.formats.weights.fp8",
        "Fp8Weight._values",
        "$lines = (self.first + torch.arange($n, device=self.device)) // self.block_n",
        "$lines = torch.arange($n, device=self.device) // self.block_n",
        f"{OF_PACKED}::test_fp8_weight_values",
    ),
    Fault(
        "NVFP4's divisor multiplies", "format", STORAGE, "Fp4Storage._factor",
        "$match.reciprocal() if self.divides else $match",
        "$match",
        STORED_MAPS,
    ),
    Fault(
        "NVFP4's factor applied twice", "format", "kernels.formats.weights.fp4",
        "Fp4Weight._values",
        "return $scaled * self.factors[:, None]",
        "return $scaled * self.factors[:, None] * self.factors[:, None]",
        STORED_MAPS,
    ),
    Fault(
        "the higher nibble of a byte first", "format", STORAGE, "nibbles",
        "torch.stack(($data & 15, $data >> 4), -1)",
        "torch.stack(($data >> 4, $data & 15), -1)",
        STORED_MAPS,
    ),
    Fault(
        "zero points of compressed-tensors one too high", "format", STORAGE, "unpack_along_n",
        "return $codes[:, :$n].t()",
        "return $codes[:, :$n].t() + 1",
        STORED_MAPS,
    ),
    Fault(
        "weight_g_idx taken as in order", "format", STORAGE, "fill_g_idx",
        "if bool(($match == -1).all()):\n"
        "    ...",
        "if bool(($match >= -1).all()):\n"
        "    ...",
        STORED_MAPS,
    ),
    Fault(
        "modules that ModelOpt excludes are quantized", "format", "quantization.modelopt",
        "ModelOpt.storage",
        "$entry = self.excluded.find($module)",
        "$entry = None",
        f"{STORED}::test_contradicting_settings_are_refused",
    ),
    Fault(
        "small projections and draft modules rounded to nearest", "format",
        "quantization.round_to_nearest", "RoundToNearest.layout",
        "if is_usually_unquantized($module):\n"
        "    ...",
        "if $module.path == 'lm_head':\n"
        "    ...",
        "tests/quantization/test_round_to_nearest.py::test_answers_equal_rounded_weights",
    ),
    # Where weights go.
    Fault(
        "parts of a fused product filled in the wrong order", "slots", LINEAR, "Linear.weights",
        "$part = self.part($index)",
        "$part = self.part(-1 - $index if len(set(self.outputs)) == 1 else $index)",
        "tests/quantization/test_checkpoints.py::test_gptq_with_bits_per_layer_and_dense_modules",
    ),
    Fault(
        "the second part of a fused quantized weight begins at row 0", "slots", LINEAR,
        "Linear.part",
        "return $product.stored_rows($rows.start - $first, $rows.stop - $first)",
        "size = $rows.stop - $rows.start\n"
        "return $product.stored_rows(0, size)",
        "tests/quantization/test_checkpoints.py::test_gptq_with_bits_per_layer_and_dense_modules",
    ),
    Fault(
        "quantized rows stay in the checkpoint's order", "slots", LINEAR, "Linear.finish",
        "$part.reorder($order)",
        "$part.reorder($order.sort().values)",
        f"{OF_CHECKPOINTS}::test_quantized_mixtures_of_every_family[qwen3_next-gptq]",
    ),
    # Mixtures of experts.
    Fault(
        "an expert's scales used for its neighbour", "experts", MOE, "ExpertWeight.weights",
        "$rows = self.stored_rows($begin, $begin + $read.outputs)",
        "$rows = self.stored_rows($begin, $begin + $read.outputs)\n"
        "if $begin >= self.rows and isinstance($rows, QuantizedWeight):\n"
        "    first = $begin - self.rows\n"
        "    above = self.stored_rows(first, first + $read.outputs)\n"
        "    object.__setattr__($rows, 'scales', above.scales)",
        f"{OF_CHECKPOINTS}::test_experts_with_their_own_scales_equal_dense",
    ),
    Fault(
        "expert slots added in descending order for several tokens", "experts", EXPERTS,
        "experts_cpu",
        "for $slot, $values in enumerate($y.view($tokens, $slots, $x.shape[1]).unbind(1)):\n"
        "    $total += $weights[:, $slot, None].float() * $values.float()",
        "turns = list(enumerate($y.view($tokens, $slots, $x.shape[1]).unbind(1)))\n"
        "for $slot, $values in turns[::-1] if $tokens > 1 else turns:\n"
        "    $total += $weights[:, $slot, None].float() * $values.float()",
        f"{OF_EXPERTS}::test_row_bits_are_batch_independent",
    ),
    Fault(
        "the shared expert added first", "experts", EXPERTS, "experts_cpu",
        "$total = $y.new_zeros($tokens, $y.shape[1], dtype=torch.float32)\n"
        "...\n"
        "return combine($total, $shared, $shared_gate, $x.dtype)",
        "none = $y.new_zeros($tokens, $y.shape[1], dtype=torch.float32)\n"
        "$total = combine(none, $shared, $shared_gate, torch.float32)\n"
        "$shared = None\n"
        "...\n"
        "return combine($total, $shared, $shared_gate, $x.dtype)",
        "tests/kernels/test_backends.py::test_backend_agrees_with_reference"
        "[experts-cpu-cpu-float32]",
    ),
    Fault(
        "pairs of an expert in another order than its tokens", "experts", EXPERTS, "experts_cpu",
        "$y[$pairs] = $multiply($inner, $down, $expert)",
        "$y[$pairs.flip(0)] = $multiply($inner, $down, $expert)",
        f"{OF_EXPERTS}::test_row_bits_are_batch_independent",
    ),
    Fault(
        "the shared expert's gate left out", "experts",
        "kernels.experts.contract", "combine",
        "$shared = sigmoid($gate)[:, None] * $shared",
        "$shared = $shared + 0",
        "tests/layers/test_moe.py::test_qwen",
    ),
    Fault(
        "ties of experts go to the higher index", "route", ROUTE, "top_indices",
        "return $keys.sort(dim=-1, descending=True, stable=True).indices[..., :$count]",
        "turned = $keys.flip(-1).sort(dim=-1, descending=True, stable=True).indices\n"
        "return $keys.shape[-1] - 1 - turned[..., :$count]",
        f"{OF_ROUTE}::test_ties_select_lower_index",
    ),
    Fault(
        "routing weights not renormalized", "route", ROUTE, "route",
        "$scores = softmax($x) if $scoring == 'softmax' else sigmoid($x)\n"
        "...\n"
        "if $renormalize:\n"
        "    ...",
        "$scores = softmax($x) if $scoring == 'softmax' else sigmoid($x)\n"
        "...\n"
        "if $renormalize and $scoring == 'sigmoid':\n"
        "    ...",
        f"{OF_ROUTE}::test_softmax_routing",
    ),
    Fault(
        "routing weights with the correction bias", "route", ROUTE, "route",
        "$keys = sortable_keys($choice)\n"
        "...\n"
        "$weights = $scores.gather(1, $ids)",
        "$keys = sortable_keys($choice)\n"
        "...\n"
        "$weights = $choice.gather(1, $ids)",
        f"{OF_ROUTE}::test_deepseek_grouped_routing",
    ),
    # Kernels that read packed weights, under Triton's interpreter.
    Fault(
        "the number of rows changes the split-K partitions of a quantized linear", "packed",
        "kernels.linear.quantized", "launch",
        "$tokens, $k = $x.shape\n"
        "...\n"
        "$split = min($tile.ctas_k, $split_k)",
        "$tokens, $k = $x.shape\n"
        "$split_k = 1 if $tokens < 16 else $split_k\n"
        "...\n"
        "$split = min($tile.ctas_k, $split_k)",
        f"{OF_PACKED}::test_splits_are_added_as_a_tree",
    ),
    Fault(
        "the last split-K partition of a quantized linear runs past the columns", "packed",
        "kernels.device.tree_reduction", "reduce_partitions",
        "tl.minimum($begin + $length, $K)",
        "$begin + $length",
        f"{OF_PACKED}::test_quantized_linear_equals_dequantized",
    ),
    Fault(
        "a kernel reads a cut block's scales from its first line", "packed",
        "kernels.formats.weights.dequantize_tile", "_load_group_scales",
        "$scale_row = ($rows + $weight.scale_row_offset) // $FORMAT.scale_rows",
        "$scale_row = $rows // $FORMAT.scale_rows",
        f"{OF_PACKED}::test_row_slice_inside_a_scale_block",
    ),
    Fault(
        "a kernel takes zero points for scales of 8 bits alone", "packed",
        "kernels.formats.weights.dequantize_tile", "_dequantize_scaled",
        "$z1 = (1 << $BITS) / 2.0\n"
        "if $zeros is not None:\n"
        "    ...",
        "$z1 = (1 << $BITS) / 2.0\n"
        "if $zeros is not None and $BITS == 8:\n"
        "    ...",
        "tests/kernels/test_backends.py::test_backend_agrees_with_reference"
        "[dequantize_weight-triton-cpu-float32]",
    ),
    # Recurrent state of 16 bits: the bundled model is checked with one of 32 unless asked.
    Fault(
        "a 16-bit state written off its grid of tokens", "mixer", "kernels.recurrent.history",
        "next_folded",
        "$last = $starts // $grid * $grid",
        "$last = $starts",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_keep_the_answer",
    ),
    Fault(
        "history buffers too short for a 16-bit state", "mixer", "cache.state", "state_spec",
        "$slots = history_length($window, max_replayed($window, $flush, state_grid($state_dtype)))",
        "$slots = max_replayed($window, $flush, state_grid($state_dtype)) - 2",
        f"{OF_HALF_STATE}::test_answers_longer_than_the_token_ring_are_equal",
    ),
    Fault(
        "a window rounds by its own positions", "mixer", DELTA, "_step_tokens",
        "round_rows($state, $s, [$start + $t + 1 for $start in $starts])",
        "round_rows($state, $s, [$t + 1 for $start in $starts])",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_keep_the_answer",
    ),
    Fault(
        "a prompt's state rounded at the end of its chunk alone", "mixer", DELTA, "_run_chunks",
        "$s = $s * torch.exp($g[$c, :, -1])[:, None, None] + $remaining[$c].transpose(-1, -2) @ "
        "$new\n"
        "$s = $rounded($s)",
        "$s = $s * torch.exp($g[$c, :, -1])[:, None, None] + $remaining[$c].transpose(-1, -2) @ "
        "$new\n"
        "$s = $rounded($s) if $c + 1 == chunks else $s",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_keep_the_answer",
    ),
    Fault(
        "a kernel rounds by positions in the window", "mixer", "kernels.recurrent.step_kernel",
        "_step_through_window",
        "if ($start + $t + 1) % $STATE_GRID == 0:\n"
        "    ...",
        "if ($t + 1) % $STATE_GRID == 0:\n"
        "    ...",
        f"{OF_ROWS_ALONE}::test_16_bit_state_is_rounded_at_absolute_positions",
    ),
    # Committed windows: see tests/kernels/test_committed.py.
    Fault(
        "a committed window's state includes no token of the window", "mixer", RECURRENT_CPU,
        "CommittedWindow.write_states",
        "self.state.recurrent[self.slots[$row]] = $s[$row]",
        "pass",
        f"{OF_COMMITTED}::test_answer_in_committed_windows_equals_single_tokens",
    ),
    Fault(
        "padding of a committed window takes the place of raw inputs", "mixer", RECURRENT_CPU,
        "CommittedWindow.__init__",
        "self.ends: tuple[int, ...] = tuple($committed.tolist())\n"
        "self.padding = torch.arange(len($mixed))[:, None] >= $committed",
        "self.ends: tuple[int, ...] = (len($mixed),) * len($committed)\n"
        "self.padding = torch.arange(len($mixed))[:, None] >= $committed",
        f"{OF_COMMITTED}::test_padding_disturbs_no_row",
    ),
    Fault(
        "a committed window saves tokens that its state includes", "mixer",
        "kernels.recurrent.step_kernel", "_step_through_window",
        "$in_v & ($start + $t >= $written) if $committed else $in_v",
        "$in_v & ($start + $t < $written) if $committed else $in_v",
        f"{OF_COMMITTED}::test_window_equals_single_tokens",
    ),
    Fault(
        "k and decay of a committed window saved before they are replayed", "mixer",
        "kernels.gated_delta_rule.step_kernels", "_key_inputs",
        "if not $committed:\n"
        "    ...",
        "if True:\n"
        "    ...",
        f"{OF_COMMITTED}::test_window_equals_single_tokens",
    ),
    Fault(
        "a kernel adds half of the partials of the gates twice", "mixer",
        "kernels.gated_delta_rule.gating", "load_gate",
        "tl.arange(0, $parts)[None, :] * $stride.to(tl.int64)",
        "tl.arange(0, $parts)[None, :] // 2 * $stride.to(tl.int64)",
        "tests/kernels/test_gate_partials.py::test_recurrent_form_adds_partials",
    ),
    Fault(
        "a rank's outputs decide the split-K partitions of its gates", "mixer", LINEAR,
        "Gemm.__init__",
        "choose_split_k($whole or $columns, ...)",
        "choose_split_k(self.shape[0], ...)",
        f"{OF_LINEAR_LAYERS}::test_partitions_of_a_last_gemm_follow_from_its_outputs_on_all_ranks",
    ),
    Fault(
        "a committed window keeps one raw input less", "mixer",
        "kernels.mamba2.step_kernels", "_channel_inputs",
        "$mask = $mask & ($t >= $length - $count)",
        "$mask = $mask & ($t > $length - $count)",
        f"{OF_COMMITTED}::test_window_equals_single_tokens",
    ),
    Fault(
        "a committed window never uses the last entry of a history", "mixer",
        "kernels.device.history", "window_index",
        "return ($first + $t) % $history_len",
        "return ($first + $t) % ($history_len - 1)",
        f"{OF_COMMITTED}::test_window_equals_single_tokens",
    ),
    # Forced tokens.
    Fault(
        "the target's token kept where another is forced", "table", METADATA, "advance_rows",
        "$emits & ($first[:, None] + $order < $table.forced_end[$row_ids][:, None])",
        "$emits & ($first[:, None] + $order < 0 * $table.forced_end[$row_ids][:, None])",
        f"{OF_FORCED}::test_other_token_is_an_error_or_reported",
    ),
    Fault(
        "a forced window one token too long", "table", METADATA, "step_drafts",
        "$committed = ($table.forced_end[$row_ids] - $starts).clamp(1, $query_len)",
        "$committed = ($table.forced_end[$row_ids] - $starts + 1).clamp(1, $query_len)",
    ),
    Fault(
        "a forced token is no draft", "table", METADATA, "step_drafts",
        "$order < $committed[:, None] - 1",
        "$order < $committed[:, None] - 2",
    ),
    Fault(
        "drafts after the forced tokens of a window", "table", METADATA, "step_drafts",
        "$limit = torch.where($committed > 1, 0, $table.draft_limit[$row_ids])",
        "$limit = $table.draft_limit[$row_ids]",
        "tests/worker/test_row_table.py::test_row_table_random_walk",
    ),
    Fault(
        "folded of a forced window one token early", "table", METADATA, "advance_rows",
        "next_folded($computed, $table.folded[$row_ids], 1, $state_grid)",
        "next_folded($computed - 1, $table.folded[$row_ids], 1, $state_grid)",
    ),
    Fault(
        "a mismatch reported one position late", "table", METADATA, "advance_rows",
        "$mismatch = [torch.where($index < $width, $index, -1), $chosen]",
        "$mismatch = [torch.where($index < $width, ($index + 1).clamp_max($width - 1), -1), "
        "$chosen]",
        f"{OF_FORCED}::test_other_token_is_an_error_or_reported",
    ),
    Fault(
        "end of the forced tokens not moved at preemption", "worker", "worker.row_table",
        "RowTable.row_tensors",
        "$values = [self.tokens, self.prompt_len, self.forced_end, self.computed, self.folded]",
        "$values = [self.tokens, self.prompt_len, self.computed, self.folded]",
        "tests/worker/test_row_table.py::test_restored_row_equals_saved_row",
    ),
    Fault(
        "the last forced token is not written to its row", "worker", ROWS, "write_row",
        "$known = torch.cat([$prompt, $forced])",
        "$known = torch.cat([$prompt, $forced[:-1]])",
        "tests/worker/test_row_table.py::test_row_table_random_walk",
    ),
    Fault(
        "a row decodes while it has forced tokens", "scheduler", SCHEDULER, "Scheduler.schedule",
        "if not ($entry.in_prompt or $entry.num_forced or $entry.will_finish):\n"
        "    ...",
        "if not ($entry.in_prompt or $entry.will_finish):\n"
        "    ...",
    ),
    Fault(
        "a forced window counted as one token", "scheduler", SCHEDULER, "Scheduler._plan_forced",
        "$entry.max_committed += $count",
        "$entry.max_committed += 1",
    ),
    Fault(
        "tokens of a forced window stay in flight", "scheduler", SCHEDULER, "Scheduler.update",
        "$entry.in_flight -= len($result.tokens) - 1",
        "$entry.in_flight -= 0",
    ),
    Fault(
        "no pages for a forced window", "scheduler", SCHEDULER, "ScheduledRequest.need",
        "$reach += self.num_forced",
        "$reach += 0",
        "tests/scheduling/test_scheduler.py::test_forced_windows_have_pages_of_the_row",
    ),
    Fault(
        "forced windows take more than their budget", "scheduler", SCHEDULER,
        "Scheduler._plan_forced",
        "if $window * (len($chosen) + 1) > self.forced_budget:\n"
        "    ...",
        "if $window * len($chosen) > self.forced_budget:\n"
        "    ...",
        "tests/scheduling/test_scheduler.py::test_forced_tokens_take_windows_within_the_budget",
    ),
    Fault(
        "a grammar sees the drafter's drafts instead of forced tokens", "worker", GRAMMAR_MASKS,
        "GrammarMasks._gather_unseen",
        "$ignored, $drafts = step_drafts($table, $ids[:, 0], $count + 1)",
        "$drafts = torch.full_like($table.tokens[$ids[:, 0], :$count], -1)",
        f"{OF_FORCED}::test_forced_prefix_changes_no_answer",
    ),
    Fault(
        "an error for a mismatch that should be reported", "request", "scheduling.request",
        "Request._ends_by_mismatch",
        'if $mismatch is None or self.params.forced_mismatch == "report":\n'
        "    ...",
        "if $mismatch is None:\n"
        "    ...",
        f"{OF_FORCED}::test_other_token_is_an_error_or_reported",
    ),
    Fault(
        "a mismatch counts from the beginning of its window", "scheduler", SCHEDULER,
        "Scheduler._append_tokens",
        "ForcedMismatch($first + $at, $result.tokens[$at], $chosen)",
        "ForcedMismatch($at, $result.tokens[$at], $chosen)",
    ),
    Fault(
        "a forced token that ends an answer by mismatch is appended", "request",
        "scheduling.request", "Request.append",
        "for $index, $token in enumerate($tokens):\n"
        "    ...\n"
        "    if self._ends_by_mismatch():\n"
        "        return $index\n"
        "    ...",
        "for $index, $token in enumerate($tokens):\n"
        "    ...\n"
        "    if self._ends_by_mismatch():\n"
        "        self.output_token_ids.append($token)\n"
        "        return $index + 1\n"
        "    ...",
    ),
    Fault(
        "logits of rows that want log-probabilities go to the first rows", "worker", WORKER,
        "Worker._copy_logits",
        "for $i, $copied in zip($indices, $rows, strict=True):\n"
        "    $copies[$i] = $copied",
        "for $i, $copied in zip(range(len($indices)), $rows, strict=True):\n"
        "    $copies[$i] = $copied",
    ),
    Fault(
        "of stop strings that end together the shortest ends the text", "text", "text.scan",
        "Scan._matched",
        "max(filter($suffix.endswith, $spellings), key=len)",
        "min(filter($suffix.endswith, $spellings), key=len)",
    ),
    # Mamba-2 and Nemotron-H: the bundled model has neither.
    Fault(
        "a window of Mamba-2 keeps x where it should keep dt x", "mixer", MAMBA, "mamba2_step_cpu",
        "$window.append($u, $b, $decay)\n"
        "$out = $y.view($x.shape).add_($weights.d[:, None] * $x)",
        "$window.append($x, $b, $decay)\n"
        "$out = $y.view($x.shape).add_($weights.d[:, None] * $x)",
        f"{OF_MAMBA}::test_accepted_drafts_keep_the_answer",
    ),
    Fault(
        "a resumed prompt of Mamba-2 begins from the row's state, not the snapshot",
        "mixer", PROMPT_ROWS,
        "prompt_rows",
        "$before = $state.recurrent[$src].to(torch.float32, copy=True)",
        "$before = $state.recurrent[slot].to(torch.float32, copy=True)",
        f"{OF_MAMBA}::test_preemption_and_prefix_hits_keep_the_answer",
    ),
    Fault(
        "a token's step of Mamba-2 decays with the cumulated time", "mixer",
        "kernels.mamba2.contract",
        "discretize",
        "return ($step, $step * -torch.exp($weights.a_log))",
        "return ($step, $step.cumsum(0) * -torch.exp($weights.a_log))",
        f"{OF_MAMBA}::test_accepted_drafts_keep_the_answer",
    ),
    Fault(
        "a chunk of Mamba-2 ends with the decay of its batch", "numerics", MAMBA, "_run_chunks",
        "$chunks = -(-$length // GRID)\n"
        "...\n"
        "$g = split_chunks($g).cumsum(-1)",
        "$chunks = -(-$length // GRID)\n"
        "...\n"
        "$g = split_chunks($g).cumsum(-1) * (1 + 1e-6 * ($chunks > 1))",
        "tests/kernels/test_chunked_form.py::test_chunked_form_is_independent_of_cuts",
    ),
    Fault(
        "a kernel of Mamba-2 lets a token see the next one", "mixer",
        "kernels.mamba2.chunk_kernels", "chunk_output_kernel",
        "tl.where($row >= $col, $grown[:, None] - $grown[None, :], float('-inf'))",
        "tl.where($row + 1 >= $col, $grown[:, None] - $grown[None, :], float('-inf'))",
        "tests/kernels/test_backends.py::test_backend_agrees_with_reference"
        "[mamba2_chunk-triton-cpu-float32]",
    ),
    Fault(
        "Mamba-2's norm before its gate", "mixer", NORM, "gated_group_norm",
        "$y = $x * silu($gate.float())\n"
        "return (_normalize($y, $eps) * $weight.float()).to($gate.dtype)",
        "$y = _normalize($x, $eps) * $weight.float()\n"
        "return ($y * silu($gate.float())).to($gate.dtype)",
        f"{OF_NEMOTRON}::test_logits_equal_transformers_with_and_without_chunks",
    ),
    Fault(
        "a prompt's last snapshot left out where they are rare", "cache", "cache.cache",
        "Cache.wants_snapshot",
        "$ends = (len($seq.prompt) // $size * $size, $seq.branch)",
        "$ends = ($seq.branch,)",
        "tests/scheduling/test_scheduler.py::test_rare_snapshots_include_the_last_page",
    ),
    Fault(
        "a chunk that passes where prompts part", "cache", "cache.cache", "Cache.prompt_end",
        "return $seq.branch if $start < $seq.branch else len($seq.prompt)",
        "return len($seq.prompt)",
        "tests/scheduling/test_scheduler.py::test_snapshot_is_saved_where_cached_pages_end",
    ),
    # KV formats: the bundled model is checked in its own dtype unless a format is asked for.
    Fault(
        "a prompt chunk sees its keys before quantization", "mixer", "layers.attention",
        "Attention._mix",
        "$mixed = self.attend($q, self.k_cache, self.v_cache, $step.page_table, "
        "$step.cu_seqlens, $step.starts, $step.shape.query_len, self.scale, $qkv if self.gated "
        "else None)",
        "from lockstep.kernels.formats.kv import dequantize\n"
        "kept = (self.k_cache, self.v_cache)\n"
        "raw = [dequantize(side, $q.dtype).clone() for side in kept]\n"
        "if $step.shape.prompt:\n"
        "    self.k_cache, self.v_cache = raw\n"
        "    self._rotate_and_cache($qkv, $step)\n"
        "    self.k_cache, self.v_cache = kept\n"
        "$mixed = self.attend($q, *raw, $step.page_table, $step.cu_seqlens, $step.starts, "
        "$step.shape.query_len, self.scale, $qkv if self.gated else None)",
        f"{OF_KV_FORMATS}::test_chunks_drafts_and_preemption_keep_the_answer",
    ),
    Fault(
        "scales not copied when a row moves to the host", "cache", "kernels.formats.kv.contract",
        "QuantizedKV.tensors",
        "return [self.qdata] if self.scales is None else [self.qdata, self.scales]",
        "return [self.qdata]",
        f"{OF_KV_FORMATS}::test_chunks_drafts_and_preemption_keep_the_answer",
    ),
    Fault(
        "one scale for all heads of a token", "format", "kernels.formats.kv.int8", "Int8.quantize",
        "$wide = $x.float()\n"
        "...\n"
        "$scale = $wide.abs().amax(-1, keepdim=True) / MAX_VALUE",
        "$wide = $x.float()\n"
        "...\n"
        "$scale = $wide.abs().amax((-2, -1), keepdim=True).expand(*$x.shape[:-1], 1) / MAX_VALUE",
        f"{OF_KV}::test_int8_error_is_at_most_half_a_step",
    ),
    Fault(
        "a kernel reads the scale of the first head", "packed", "kernels.device.kv_tile",
        "_load_quantized_tile",
        "$numbers += ($token * ($HKV * $COUNT) + $kv * $COUNT)[:, None]",
        "$numbers += ($token * ($HKV * $COUNT))[:, None]",
        f"{OF_KV}::test_attention_over_quantized_equals_dequantized",
    ),
    Fault(
        "a kernel truncates fp8 instead of rounding", "packed", "kernels.device.fp8",
        "round_to_fp8",
        "$large = $size - $REBIAS + $HALF + ($size >> $SHIFT & 1) >> $SHIFT",
        "$large = $size - $REBIAS >> $SHIFT",
        f"{OF_KV}::test_hard_numbers_are_written_as_reference",
    ),
    # Latents, which the bundled model has not.
    Fault(
        "a token of a latent attention window sees the next one", "mixer", LATENTS, "_attend",
        "$hidden = causal_mask(($start,), $begin, len($rows), $size, $heads)",
        "$hidden = causal_mask(($start + (1 < len(q) < 9),), $begin, len($rows), $size, $heads)",
        f"{OF_LATENTS}::test_attention_is_causal",
    ),
    Fault(
        "a latent left out at its page's end", "mixer", LATENTS, "_load_splits",
        "$used = -(-$tokens // $cache.shape[1])",
        "$used = -(-$tokens // $cache.shape[1])\n"
        "$tokens -= $tokens % $cache.shape[1] == 1 and $tokens > $cache.shape[1]",
        "tests/kernels/test_cpu.py::test_cpu_backend_equals_reference",
    ),
    Fault(
        "latents turned by the row's first position", "mixer", LATENT_ROPE, "latent_rope_and_cache",
        "$angles = tuple(($table.index_select(0, $positions) for $table in ($cos, $sin)))",
        "first = $positions[:1].expand_as($positions)\n"
        "$angles = tuple(($table.index_select(0, first) for $table in ($cos, $sin)))",
        f"{OF_LATENTS}::test_rope_rotates_pairs_and_latents_are_normed",
    ),
    Fault(
        "heads of kv_b_proj interleaved", "mixer", LATENT_LAYER, "AbsorbedHeads._fill",
        "$heads = $weight.unflatten(0, (-1, sum(self.widths)))",
        "$heads = $weight.unflatten(0, (sum(self.widths), -1)).transpose(0, 1)",
        f"{OF_DEEPSEEK}::test_equals_transformers_with_chunks_and_every_drafter",
    ),
    Fault(
        "heads' maps are not rotated as latents are", "format", LATENT_LAYER, "AbsorbedHeads._fill",
        "$weight = self.rotation.rotate($weight)",
        "$weight = $weight + 0",
        f"{OF_DEEPSEEK}::test_latent_formats_are_close_to_transformers",
    ),
    Fault(
        "one scale for all latents that a step writes", "format", "kernels.formats.kv.fp8",
        "TokenFp8.quantize",
        "$wide = $x.float()\n"
        "$count = ($wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)",
        "$wide = $x.float()\n"
        "$count = ($wide.view(torch.int32) & 0x7FFFFFFF).amax().expand(*$x.shape[:-1], 1)",
        f"{OF_KV_LATENTS}::test_token_fp8_scale_is_smallest_power_of_two",
    ),
    Fault(
        "queries are not rotated as keys are", "format", "kernels.formats.kv.access",
        "rotate_queries",
        "return $x if $turn is None else $turn.rotate($x).to($x.dtype)",
        "return $x",
        f"{OF_KV}::test_rotation_without_quantization_preserves_attention",
    ),
    Fault(
        "attention over rotated values is not rotated back", "format", "kernels.attention.cpu",
        "paged_attention_cpu",
        "rotate_back($mixed, $v_cache).flatten(0, 1).to($q.dtype)",
        "$mixed.flatten(0, 1).to($q.dtype)",
        f"{OF_KV}::test_rotation_without_quantization_preserves_attention",
    ),
    Fault(
        "the norm of the code points is left out", "format", "kernels.formats.kv.turboquant",
        "TurboQuantizer.quantize",
        "$scaled = torch.where($usable, $blocks, 0.0) "
        "* _power_of_two(2 * FP32_BIAS + 1 - $exponents)\n"
        "...\n"
        "$numbers = $norm / _sum_of_squares($points).sqrt() * _power_of_two($exponents - 1)",
        "$scaled = torch.where($usable, $blocks, 0.0) "
        "* _power_of_two(2 * FP32_BIAS + 1 - $exponents)\n"
        "...\n"
        "$numbers = $norm / $blocks.shape[-1] ** 0.5 * _power_of_two($exponents - 1)",
        f"{OF_TURBOQUANT}::test_distortion_equals_paper",
    ),
    Fault(
        "a kernel takes the first number for all blocks of values", "packed",
        "kernels.formats.kv.turboquant_triton", "_octet_scale",
        "$block = $octet // (4 * $BLOCK // $D)",
        "$block = $octet * 0",
        f"{OF_KV}::test_values_of_two_blocks",
    ),
    # Drafts: no answer shows these faults, so tests of what is drafted find them.
    Fault(
        "a chain skips a position and reads a rejected draft's cache there", "drafter", DRAFTING,
        "next_draft_step",
        "$starts = $computed[$row_ids] + $index + $offset",
        "$starts = $computed[$row_ids] + $index + $offset + 1",
        OF_EAGLE3,
    ),
    Fault(
        "an auxiliary hidden state one layer further",
        "drafter",
        "models.decoder",
        "Decoder.forward",
        "$x, $delta, $entered = $block($x, $delta, $step)\n"
        "if $page_ids in self.aux_hidden_layers:\n"
        "    ...",
        "$x, $delta, $entered = $block($x, $delta, $step)\n"
        "if $page_ids - 1 in self.aux_hidden_layers:\n"
        "    ...",
        OF_EAGLE3,
    ),
    Fault(
        "EAGLE-3 recycles its normed state", "drafter", EAGLE3, "Eagle3Head.forward",
        "return $out if self.config.norm_output else $remaining",
        "return $out",
        OF_EAGLE3,
    ),
    Fault(
        "d2t taken for ids", "drafter", EAGLE3, "draft_ids",
        "$ids = [$index + $offset for $index, $offset in enumerate($offsets.tolist())]",
        "$ids = [$offset for $index, $offset in enumerate($offsets.tolist())]",
        OF_EAGLE3,
    ),
    Fault(
        "suffix lookup prefers other texts to the row's text", "drafter", DRAFTING, "ngram_lookup",
        "$text = torch.cat([$peers, $values]) if $row else $values",
        "$text = torch.cat([$values, $peers]) if $row else $values",
        OF_SUFFIX,
    ),
    Fault(
        "suffix texts have no separator between answers", "drafter", "spec.suffix",
        "SuffixDrafter.learn",
        "torch.tensor([*$answer[max(len($answer) - self.capacity + 1, 0):], -1])",
        "torch.tensor([*$answer[max(len($answer) - self.capacity + 1, 0):], $answer[-1]])",
        OF_RING,
    ),
    Fault(
        "a draft model reads the token after each position", "drafter", "spec.draft_model",
        "DraftModelDrafter.write_cache",
        "self.context.module.write_cache($step.token_ids, $state, $step)",
        "self.context.module.write_cache(next_tokens, $state, $step)",
        OF_DRAFT_MODEL,
    ),
    Fault(
        "a recurrent draft model writes its state while it drafts", "drafter", "spec.chain",
        "ChainDrafter.next_step",
        "replace($step, shape=$shape, logit_rows=slice(None), flush=NEVER_FLUSH, **vars($tensors))",
        "replace($step, shape=$shape, logit_rows=slice(None), **vars($tensors))",
        OF_RECURRENT_DRAFTS,
    ),
    Fault(
        "a draft's step takes states as they were before the step", "drafter", "spec.chain",
        "ChainDrafter.next_step",
        "replace($step, shape=$shape, logit_rows=slice(None), flush=NEVER_FLUSH, **vars($tensors))",
        "replace($step, shape=$shape, logit_rows=slice(None), flush=NEVER_FLUSH, **vars($tensors) "
        "| "
        "{'folded': $step.folded})",
        OF_RECURRENT_DRAFTS,
    ),
    Fault(
        "a block does not see its last token", "drafter", DRAFTING, "block_step",
        "$starts = $first + ($width - 1)",
        "$starts = $first + ($width - 2)",
        OF_BLOCKS,
    ),
    Fault(
        "a block's masks are drafted one position late", "drafter", "spec.dflash",
        "BlockDrafter.propose",
        "$c.module($block.token_ids, $state, $block).unflatten(0, (-1, $count + 1))[:, 1:]",
        "$c.module($block.token_ids, $state, $block).unflatten(0, (-1, $count + 1))[:, :-1]",
        OF_BLOCKS,
    ),
    Fault(
        "a draft model keeps nothing of a verified step", "drafter", "spec.draft_model",
        "DraftModelDrafter.first_states",
        "self.write_cache($step, $after, $state)",
        "",
        OF_DRAFT_MODEL,
    ),
    Fault(
        "a grammar's masks lie at the first row", "worker", GRAMMAR_MASKS, "GrammarMasks._upload",
        "$first = $begin + $one.index * $query_len",
        "$first = $begin + chosen[0].index * $query_len",
    ),
    Fault(
        "a grammar's masks do not follow the drafts", "worker", GRAMMAR_MASKS,
        "GrammarMasks._upload",
        "$drafts = $tokens[self.max_query_len:][:$query_len - 1]",
        "$drafts = $tokens[self.max_query_len:][:0]",
    ),
    Fault(
        "a grammar keeps the drafts of its masks", "worker", GRAMMAR, "Matcher.begin",
        "if $known > len($real):\n"
        "    ...\n"
        "$proposal = self.prepare().deep_copy()",
        "if $known > len($real):\n"
        "    ...\n"
        "$proposal = self.prepare()\n"
        "$proposal.try_consume_tokens($real[1:])",
    ),
    Fault(
        "ranks with other weights work together", "worker", "worker.agreement", "check_identity",
        "$mine.get($name) != $theirs.get($name)",
        "$theirs.get($name) is None",
        f"{OF_NODES}::test_checkpoints_are_compared_by_their_contents",
    ),
    Fault(
        "the draft model's weights are not compared", "worker", "worker.agreement", "identity_of",
        "$identity[\"draft model's weights\"] = weights_digest(find_model($draft))",
        "",
        f"{OF_NODES}::test_draft_models_are_compared_by_their_contents",
    ),
    Fault(
        "ranks with other LoRA adapters work together", "worker", "worker.agreement",
        "identity_of",
        "$adapters = shown(list($limits.adapters.items()))",
        "$adapters = shown(list($limits.adapters))",
        f"{OF_NODES}::test_adapters_are_compared_by_their_contents",
    ),
    Fault(
        "the audit leaves the adapters out", "worker", "worker.row_table_audit", "compare_ranks",
        '$compared += [("adapters", $tensor) for $tensor in $table.adapters.tensors()]',
        "",
        "tests/engine/test_adapters.py::test_audit_names_a_rank_with_other_adapters",
    ),
    Fault(
        "an idle engine does not notice a dead rank", "worker", "engine.engine_loop",
        "EngineLoop.run",
        "$executor.call_on_failure(self._end_by_failure)",
        "",
        "tests/worker/test_ranks.py::"
        "test_processes_give_the_answers_of_one_rank_until_one_is_killed",
    ),
    Fault(
        "messages of other hosts name any function", "worker", "worker.plain_data",
        "_Unpickler.find_class",
        "$is_plain and $item.__module__ == $module",
        "$item is not None",
        f"{OF_NODES}::test_messages_reach_nothing_that_a_module_imports",
    ),
    Fault(
        "a restarted request keeps the state of its grammar", "worker", "scheduling.request",
        "Request.restart",
        "self.grammar = self.grammar.fresh()",
        "pass",
        "tests/engine/test_resumed_answers.py::test_answers_do_not_change_while_steps_raise",
    ),
    Fault(
        "tokens that the client has are sent again", "worker", "engine.engine_loop",
        "EngineLoop._add",
        "self._sent[$request.id] = $request.num_resumed",
        "self._sent[$request.id] = 0",
        f"{OF_PROCESSES}::test_requests_go_on_after_the_engine_was_killed",
    ),
    Fault(
        "suspects run with other requests", "worker", SCHEDULER, "Scheduler._isolate_suspect",
        "$entry is not self.suspects[0]",
        "False",
        "tests/scheduling/test_restart.py::test_suspects_run_alone_until_they_have_a_new_token",
    ),
    Fault(
        "a request with new tokens keeps its failures", "worker", "engine.received_answer",
        "ReceivedAnswer.add",
        "self.failures = 0",
        "pass",
        f"{OF_PROCESSES}::test_lost_requests_are_submitted_with_what_the_client_has",
    ),
)  # fmt: skip

FAST = ("ties of experts go to the higher index",)
"""The faults of the default tests; the others are marked slow. The check itself is tried there on
faults that tests/check puts in."""
