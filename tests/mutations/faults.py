"""The faults, each a small change of one file. Names say what is wrong.

`old` stands once in the file. A change of the house that takes it away changes the fault too.
"""

from dataclasses import dataclass

METADATA = "kernels/step_metadata/__init__.py"
DRAFTING = "kernels/drafting/__init__.py"
SAMPLING = "kernels/sampling/__init__.py"
DELTA = "kernels/gated_delta_rule/cpu.py"
ATTENTION = "kernels/attention/cpu.py"
LATENTS = "kernels/latent_attention/cpu.py"
LATENT_ROPE = "kernels/latent_attention/__init__.py"
LATENT_LAYER = "layers/latent_attention.py"
RINGS = "kernels/recurrent/_cpu.py"
NORM = "kernels/norm/__init__.py"
ROTARY = "kernels/rotary/__init__.py"
ROWS = "runner/rows.py"
GRAMMAR_MASKS = "runner/grammar_masks.py"
GRAMMAR = "text/grammar.py"
RUNNER = "runner/runner.py"
RECURRENT_CPU = "kernels/recurrent/_cpu.py"
PROMPT_ROWS = "kernels/recurrent/prompt.py"
SCHEDULER = "scheduling/scheduler.py"
GROUPS = "cache/groups.py"
HOST = "cache/host.py"
TRANSFERS = "runner/transfers.py"
GPTQ = "quant/gptq.py"
STORAGE = "quant/storage.py"
PACKED = "kernels/packed/_weights.py"
EXPERTS = "kernels/experts/cpu.py"
ROUTE = "kernels/route/__init__.py"
LINEAR = "layers/linear.py"
MOE = "layers/moe.py"
VECTORS = "tests/quant/test_vectors.py"
STORED = "tests/quant/test_stored.py"
STORED_MAPS = f"{STORED}::test_a_map_is_what_its_tensors_stand_for"
REFUSED = "tests/quant/test_refused.py"
OF_CHECKPOINTS = "tests/quant/test_expert_checkpoints.py"
OF_EXPERTS = "tests/kernels/test_experts.py"
OF_ROUTE = "tests/kernels/test_route.py"
OF_PACKED = "tests/kernels/test_packed.py"
OF_KV = "tests/kernels/test_kv.py"
OF_KV_LATENTS = "tests/kernels/test_kv_latents.py"
OF_LATENTS = "tests/kernels/test_latent_attention.py"
OF_DEEPSEEK = "tests/models/test_deepseek_v3.py"
OF_TURBOQUANT = "tests/kernels/test_turboquant.py"
OF_KV_FORMATS = "tests/regressions/test_f3_kv_formats.py"
OF_HALF_STATE = "tests/regressions/test_f2_state_in_16_bits.py"
MAMBA = "kernels/mamba2/cpu.py"
OF_MAMBA = "tests/regressions/test_f2_f4_mamba2.py"
OF_NEMOTRON = "tests/models/test_nemotron_h.py"
EAGLE3 = "models/eagle3.py"
OF_EAGLE3 = "tests/spec/test_eagle3.py::test_drafts_are_those_of_the_paper"
OF_SUFFIX = "tests/spec/test_suffix.py::test_the_longest_match_wins_then_the_own_then_the_latest"
OF_RING = "tests/spec/test_suffix.py::test_drafts_end_where_an_answer_does"
OF_RECURRENT_DRAFTS = "tests/spec/test_recurrent_draft_model.py::test_drafts_are_what_it_says_alone"
OF_BLOCKS = "tests/spec/test_dflash.py::test_drafts_are_those_of_the_paper"
OF_DRAFT_MODEL = "tests/spec/test_draft_model.py::test_drafts_are_the_models_own_answer"
OF_NO_DRAFTS = "tests/engine/test_speculate.py::test_no_token_depends_on_it"
OF_ROWS_ALONE = "tests/kernels/test_exactness.py"
OF_HOST = "tests/cache/test_host.py"
OF_TRANSFERS = "tests/runner/test_transfers.py::test_nothing_is_read_that_is_on_its_way"


@dataclass(frozen=True)
class Fault:
    """old -> new in lockstep/<file>. area: what of the engine it is in.

    test: of pytest, the one that finds it; empty: `lockstep check` does. The check runs the bundled
    model, which is dense and not packed.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    test: str = ""


FAULTS = (
    # The twenty that the fixed matrix was first tried on.
    Fault(
        "state slot taken from the row", "table", METADATA,
        "slots = table.state_slots[row_ids].long()",
        "slots = row_ids.clone()",
    ),
    Fault(
        "replay of at most 4", "mixer", RECURRENT_CPU,
        "        most = max(0, *(starts - folded).tolist())\n",
        "        most = min(4, max(0, *(starts - folded).tolist()))\n",
    ),
    Fault(
        "folded one too far when all were accepted", "table", METADATA,
        "folded_by(seq_lens - width, table.folded[row_ids], flush, state_grid)",
        "folded_by(seq_lens - width, table.folded[row_ids], flush, state_grid)"
        " + ((accepted == width - 1) & (width > 1)).int()",
    ),
    Fault(
        "pages rotated after preemption", "runner", ROWS,
        "    write_place(table, row, pages, slot)\n    transfers.back(",
        "    write_place(table, row, [*pages[1:], pages[0]], slot)\n    transfers.back(",
    ),
    Fault(
        "a draft compared with a shifted position", "table", METADATA,
        "agreed = ((drafts == tokens[:, :-1]) & (drafts >= 0)).int()",
        "agreed = ((drafts == tokens[:, 1:]) & (drafts >= 0)).int()",
    ),
    Fault(
        "drafts behind a rejected one are accepted", "table", METADATA,
        "accepted = agreed.cumprod(1).sum(1, dtype=torch.int32)",
        "accepted = agreed.sum(1, dtype=torch.int32)",
    ),
    Fault(
        "the bonus token of the next row", "table", METADATA,
        "    drafted = (drafts >= 0).sum(1, keepdim=True)\n",
        "    drafted = (drafts >= 0).sum(1, keepdim=True)\n"
        "    tokens = torch.where(order == accepted[:, None], tokens.roll(-1, 0), tokens)\n",
    ),
    Fault(
        "random position off under speculation", "table", METADATA,
        "sample_at=seq_lens[:, None] + decided,",
        "sample_at=seq_lens[:, None] + decided + (window > 1),",
    ),
    Fault(
        "conv ring off at its end", "mixer", RINGS,
        "s * length + (p + i) % length for i in offsets",
        "s * length + min((p + i) % length, length - 2) for i in offsets",
    ),
    Fault(
        "snapshot slot off the grid", "mixer", PROMPT_ROWS,
        "self._write(self.snapshot, at_grid, length // GRID * GRID)",
        "self._write(self.snapshot, after, length // GRID * GRID)",
    ),
    Fault(
        "penalties count no drafts", "sampler", SAMPLING,
        "counts[max(q + 1 - first, 0) :, draft] += 1",
        "counts[max(q + 1 - first, 0) :, draft] += 0",
    ),
    Fault(
        "bad_words see no drafts", "sampler", SAMPLING,
        "            seen = history[(position + back).clamp_min(0)]\n",
        "            seen = history[(position + back).clamp_min(0)]\n"
        "            seen = torch.where(position + back < int(positions[0]), seen, -2)\n",
    ),
    Fault(
        "min_tokens judged by the window's first position", "sampler", SAMPLING,
        "early = positions < state.min_position[row]",
        "early = positions[:1].expand(len(positions)) < state.min_position[row]",
    ),
    Fault(
        "high half of a seed dropped", "sampler", SAMPLING,
        "of_row = _mix(of_row ^ ((int(seed) >> 32) & MASK32))",
        "of_row = _mix(of_row)",
    ),
    Fault(
        "top-p mass of the first row used for all", "sampler", SAMPLING,
        "out[:, 1:] = mass[:, :-1] >= top_p",
        "out[:, 1:] = mass[:1, :-1] >= top_p",
    ),
    Fault(
        "page key without its parent", "cache", GROUPS,
        "parent = self.keys[-1] if self.keys else self.salt",
        "parent = self.salt",
    ),
    Fault(
        "snapshots not pinned", "cache", GROUPS,
        "        self.pins.extend(sources)\n",
        "        for source in sources:\n            self.pool.drop(source)\n",
    ),
    Fault(
        "one page too few saved at preemption", "scheduler", SCHEDULER,
        "pages = entry.seq.pages[:used]",
        "pages = entry.seq.pages[: max(used - 1, 1)]",
    ),
    Fault(
        "prompt log-probabilities missing at chunk ends", "runner", RUNNER,
        "request.prompt_token_ids[first : first + chunk.length]",
        "request.prompt_token_ids[first : first + chunk.length - 1]",
    ),
    Fault(
        "a rejected token counted", "table", METADATA,
        "counted = (emits & (order <= accepted[:, None]) & (tokens >= 0)).int()",
        "counted = (emits & (order <= accepted[:, None] + 1) & (tokens >= 0)).int()",
    ),
    Fault(
        "drafts not cleared", "table", METADATA,
        "table.drafts[row_ids] = -1",
        "table.drafts[row_ids[:0]] = -1",
    ),
    # The table, and what the host writes to it.
    Fault(
        "drafts shown one place behind", "table", METADATA,
        "behind = torch.arange(1, drafts.shape[1] + 1, device=starts.device)",
        "behind = torch.arange(2, drafts.shape[1] + 2, device=starts.device)",
    ),
    Fault(
        "the null row is committed to", "table", METADATA,
        "table.computed[row_ids] = torch.where(real, known, 0)",
        "table.computed[row_ids] = known",
    ),
    Fault(
        "the prompt's last chunk emits at its first token", "table", METADATA,
        "ends=(cu[1:].long() - 1).clamp_min_(0),",
        "ends=(cu[1:].long() - 1 - (starts > 0).long()).clamp_min_(0),",
    ),
    Fault(
        "drafts behind a page's end written into its first slot", "table", METADATA,
        "slot_mapping=pages[token_rows, column] * page_size + positions % page_size,\n        ends",
        "slot_mapping=pages[token_rows, (starts.long()[token_rows] // page_size if uniform"
        " else column)] * page_size + positions % page_size,\n        ends",
    ),
    Fault(
        "counts of the last request kept", "runner", ROWS,
        "    copy_to_device(0, state.counts[row])\n",
        "",
    ),
    Fault(
        "a seed's low half written alone", "runner", ROWS,
        "seed=request.seed,",
        "seed=request.seed & 0xFFFFFFFF,",
    ),
    Fault(
        "min_tokens keeps off the model's ends alone", "runner", ROWS,
        "stops = sorted(request.eos_token_ids | set(p.stop_token_ids or ()))",
        "stops = sorted(request.eos_token_ids)",
    ),
    Fault(
        "min_tokens one short", "runner", ROWS,
        "min(len(prompt) + p.min_tokens, FURTHEST)",
        "min(len(prompt) + p.min_tokens - 1, FURTHEST)",
    ),
    Fault(
        "a bias allows a token that is not", "runner", ROWS,
        "bias[int(token)] += min(max(float(value), -MOST_BIAS), MOST_BIAS)",
        "bias[int(token)] = min(max(value, -MOST_BIAS), MOST_BIAS)",
    ),
    Fault(
        "folded left behind at preemption", "runner", "runner/table.py",
        "own = [self.tokens, self.prompt_len, self.computed, self.folded, self.drafts]",
        "own = [self.tokens, self.prompt_len, self.computed, self.drafts]",
    ),
    Fault(
        "a request that wants no drafts has one verified", "drafter", METADATA,
        "    return torch.where(order < limit[:, None], drafts, -1)\n",
        "    return torch.where(order <= limit[:, None], drafts, -1)\n",
        OF_NO_DRAFTS,
    ),
    Fault(
        "counts left behind at preemption", "runner", "runner/table.py",
        "return own + [self.draft_limit] + self.sampling.tensors()",
        "return own + [self.draft_limit] + "
        "[t for t in self.sampling.tensors() if t is not self.sampling.counts]",
    ),
    Fault(
        "conv inputs left behind at preemption", "runner", TRANSFERS,
        "                part.index_copy_(0, index, column)\n",
        "                if part is not units.spans[0].parts[1]:\n"
        "                    part.index_copy_(0, index, column)\n",
    ),
    Fault(
        "log-probabilities of the window's end", "runner", RUNNER,
        "row.logits[: len(real)]",
        "row.logits[-len(real) :]",
    ),
    Fault(
        "a rank counts itself", "runner", "runner/sampler.py",
        "rank = int((scores > scores[token]).sum()) + 1",
        "rank = int((scores >= scores[token]).sum()) + 1",
    ),
    Fault(
        "prompt log-probabilities of the next token", "runner", RUNNER,
        "head(row.hidden[begin : begin + len(tokens)])",
        "head(row.hidden[begin : begin + len(tokens)].roll(1, 0))",
    ),
    # The sampler.
    Fault(
        "repetition penalty rewards", "sampler", SAMPLING,
        "torch.where(x > 0, x / repetition, x * repetition)",
        "torch.where(x > 0, x * repetition, x / repetition)",
    ),
    Fault(
        "frequency penalty without counts", "sampler", SAMPLING,
        "x = x - state.frequency[row] * counts",
        "x = x - state.frequency[row] * (counts > 0)",
    ),
    Fault(
        "presence penalty on the prompt too", "sampler", SAMPLING,
        "return x - state.presence[row] * (counts > 0)",
        "return x - state.presence[row] * seen",
    ),
    Fault(
        "penalties after the temperature", "sampler", SAMPLING,
        "x = x - state.frequency[row] * counts",
        "x = x - state.frequency[row] * counts * state.temperature[row].clamp_min(1e-3)",
    ),
    Fault(
        "top-k keeps one more", "sampler", SAMPLING,
        "x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)",
        "x.masked_fill(x < x.topk(top_k + 1).values[:, -1:], -torch.inf)",
    ),
    Fault(
        "top-p leaves out the token that reaches it", "sampler", SAMPLING,
        "out[:, 1:] = mass[:, :-1] >= top_p",
        "out[:, 1:] = mass[:, 1:] >= top_p",
    ),
    Fault(
        "min-p of the sum", "sampler", SAMPLING,
        "floor = x.amax(-1, keepdim=True) + torch.log",
        "floor = x.logsumexp(-1, keepdim=True) + torch.log",
    ),
    Fault(
        "one noise for a window", "sampler", SAMPLING,
        "return x + gumbel(state.seed[row], positions, noise)",
        "return x + gumbel(state.seed[row], positions[:1], noise)",
    ),
    Fault(
        "bias of the first row used for all", "sampler", SAMPLING,
        "x = x + state.bias[row][:, kept]",
        "x = x + state.bias[1:2][:, kept]",
    ),
    Fault(
        "noise of half the range", "sampler", SAMPLING,
        "bits = _mix(_mix(key ^ ids) ^ key) >> 9",
        "bits = _mix(_mix(key ^ ids) ^ key) >> 10",
    ),
    Fault(
        "a grammar's tokens counted from what it allows", "sampler", SAMPLING,
        "tokens[s, part] = best if kept is None else kept[best]",
        "tokens[s, part] = best",
    ),
    Fault(
        "a grammar's first mask holds at every position", "sampler", SAMPLING,
        "for q, bits in enumerate(_bits(words, ids, logits.shape[1])):",
        "for q, bits in enumerate(_bits(words[:1].expand(len(words), -1), ids, logits.shape[1])):",
    ),
    Fault(
        "the largest is looked for in the first block", "sampler", SAMPLING,
        "    return first[..., 0] * BLOCK + best, top\n",
        "    return best, top\n",
        test="tests/kernels/test_sampling.py::test_the_first_of_the_largest_is_found_among_many",
    ),
    Fault(
        "a grammar is compiled whoever waits", "engine", "engine/ahead.py",
        "self._changed.wait_for(lambda: len(self._ids) < self._most)",
        "self._changed.wait_for(lambda: True)",
        test="tests/engine/test_ahead.py::test_the_next_waits_for_room",
    ),
    Fault(
        "tools that are shown may all be called", "text", "text/tool_grammar.py",
        "return self.names is None or name in self.names",
        "return True",
        test="tests/text/test_tool_grammar.py::test_every_call_of_a_writer_fits",
    ),
    Fault(
        "a large body is parsed at once", "request", "serve/bodies.py",
        "if len(body) < LARGE:",
        "if body:",
        test="tests/serve/test_bodies.py::test_others_go_on_while_a_large_body_is_parsed",
    ),
    Fault(
        "bad_words match at the prompt's beginning", "sampler", SAMPLING,
        "prefix = word[:-1]",
        "prefix = word[1:]",
    ),
    # Requests and the cache.
    Fault(
        "completions of a request share a seed", "text", "text/processor.py",
        "mine = (seed + i + 2**63) % 2**64 - 2**63",
        "mine = (seed + 2**63) % 2**64 - 2**63",
    ),
    Fault(
        "tokens behind the end kept", "request", "scheduling/request.py",
        "            if self.finish_reason is not None:\n                return index\n",
        "",
    ),
    Fault(
        "a stop token right at min_tokens passed over", "request", "scheduling/request.py",
        "if len(self.output_token_ids) > self.params.min_tokens:",
        "if len(self.output_token_ids) > self.params.min_tokens + 1:",
    ),
    Fault(
        "a key outlives its page", "cache", "cache/pool.py",
        "            del self.by_key[key]\n",
        "",
    ),
    Fault(
        "a page shared under another's key", "cache", GROUPS,
        "self.pool.publish(seq.pages[page], seq.key(page, self.page_size))",
        "self.pool.publish(seq.pages[-1 - page], seq.key(page, self.page_size))",
    ),
    Fault(
        "generated pages shared beside recurrent state", "cache", "cache/cache.py",
        "min(tokens, len(seq.prompt)) if self.state else tokens",
        "tokens",
    ),
    Fault(
        "a hit leaves no token to compute", "cache", "cache/cache.py",
        "(len(seq.prompt) - 1) // self.config.page_size",
        "len(seq.prompt) // self.config.page_size",
    ),
    Fault(
        "new snapshots not pinned", "cache", GROUPS,
        "            self.pool.publish(slot, key)\n            self.pins.append(slot)\n",
        "            self.pool.publish(slot, key)\n            self.pool.drop(slot)\n",
    ),
    Fault(
        "a page released twice", "cache", GROUPS,
        "        seq.pages = []\n        seq.published = 0\n",
        "        seq.published = 0\n",
    ),
    Fault(
        "a hit without its snapshot", "cache", "cache/cache.py",
        "        resumed = self.state.hit(seq, hit)\n",
        "        resumed = hit\n",
    ),
    # Host memory.
    Fault(
        "a page comes back to the wrong place", "runner", TRANSFERS,
        "part.index_copy_(0, index, column)",
        "part.index_copy_(0, index.roll(1), column)",
    ),
    Fault(
        "a page comes back too late", "runner", RUNNER,
        "        self.transfers.fetch(schedule.fetched)\n"
        "        if schedule.prompt:\n"
        "            launched.append(self._launch_prompt(schedule.prompt))\n",
        "        if schedule.prompt:\n"
        "            launched.append(self._launch_prompt(schedule.prompt))\n"
        "        self.transfers.fetch(schedule.fetched)\n",
    ),
    Fault(
        "what is evicted is read behind rows that move in", "runner", RUNNER,
        "        self.transfers.evict(schedule.evicted)\n        self._place(schedule)\n",
        "        self._place(schedule)\n        self.transfers.evict(schedule.evicted)\n",
    ),
    Fault(
        "a snapshot's host pages begin one too late", "runner", TRANSFERS,
        "        for host in place:\n",
        "        for host in place[len(place) > 1 :]:\n",
    ),
    Fault(
        "moves of a schedule are made again", "cache", HOST,
        "self.pool.leaving.pop(name) for name",
        "self.pool.leaving[name] for name",
    ),
    Fault(
        "two moves of a schedule go to one place", "cache", HOST,
        "            self.leaving.pop(oldest, None)\n",
        "",
        f"{OF_HOST}::test_a_place_is_filled_once_in_a_schedule",
    ),
    Fault(
        "a host page keeps the name of what it held", "cache", HOST,
        "self.free.extend(self.places.pop(oldest))",
        "self.free.extend(self.places[oldest])",
    ),
    Fault(
        "a place of one pool is found by the other", "cache", HOST,
        "return (self.name, key) in self.pool.places",
        "return any(known == key for _, known in self.pool.places)",
    ),
    Fault(
        "what is to come back makes room in host memory", "cache", HOST,
        "        self.touch(name)\n        if name not in self.pinned:\n",
        "        self.touch(name)\n        if False:\n",
        f"{OF_HOST}::test_what_a_hit_needs_makes_no_room_for_what_it_evicts",
    ),
    Fault(
        "host memory outlives what is forgotten", "cache", "cache/cache.py",
        "        self.host.forget()\n",
        "",
        f"{OF_HOST}::test_forgetting_empties_host_memory",
    ),
    Fault(
        "a page of another salt comes back from the host", "cache", GROUPS,
        "parent = self.keys[-1] if self.keys else self.salt",
        'parent = self.keys[-1] if self.keys else b""',
        f"{OF_HOST}::test_no_salt_finds_what_another_left_in_host_memory",
    ),
    Fault(
        "the steps read what is on its way to the device", "runner", TRANSFERS,
        "            self.stream.wait(self.stream.copy(copies, staging.idle))\n",
        "            self.stream.copy(copies, staging.idle)\n",
        OF_TRANSFERS,
    ),
    Fault(
        "a staging buffer is filled again before it is copied", "runner", TRANSFERS,
        "            self.stream.wait(staging.idle)\n",
        "",
        OF_TRANSFERS,
    ),
    # The scheduler.
    Fault(
        "a snapshot read by every chunk", "scheduler", SCHEDULER,
        "            entry.seq.source = 0\n",
        "",
    ),
    Fault(
        "chunks end off the grid", "scheduler", SCHEDULER,
        "self.align = grid if cache.state else 1",
        "self.align = 1",
    ),
    Fault(
        "snapshot of the next page", "scheduler", SCHEDULER,
        "point = end // size * size",
        "point = -(-end // size) * size",
    ),
    Fault(
        "granted pages one column off", "scheduler", SCHEDULER,
        "plan.grants.append(PageGrant(entry.row, column, entry.seq.pages[column:]))",
        "plan.grants.append(PageGrant(entry.row, column - 1, entry.seq.pages[column:]))",
    ),
    Fault(
        "prompt log-probabilities skip what is cached", "scheduler", SCHEDULER,
        "reuse = request.params.prompt_logprobs is None",
        "reuse = True",
    ),
    Fault(
        "grants of a preempted row kept", "scheduler", SCHEDULER,
        "        plan.grants = [grant for grant in plan.grants if grant.row != entry.row]\n",
        "",
    ),
    Fault(
        "an aborted request stays in host memory", "engine", "engine/engine.py",
        "        self.runner.forget(request_id)\n        self._counted.pop",
        "        self._counted.pop",
    ),
    # Drafters, which may be wrong about drafts and nothing else.
    Fault(
        "ngram_lookup writes over the last token", "drafter", DRAFTING,
        "        drafts[row, : len(ahead)] = ahead\n",
        "        drafts[row, : len(ahead)] = ahead\n"
        "        history[row, len(own) - 1] = (ahead if len(ahead) else own[-1:])[0]\n",
    ),
    Fault(
        "next_draft_step commits what it drafts", "drafter", DRAFTING,
        "    starts = computed[row_ids] + index + behind\n",
        "    starts = computed[row_ids] + index + behind\n"
        "    computed[row_ids] += int(index == 2)\n",
    ),
    Fault(
        "mtp_inputs takes drafts for history", "drafter", DRAFTING,
        "    after = history[row_ids[token_rows], where]\n",
        "    after = history[row_ids[token_rows], where]\n"
        "    history[row_ids[token_rows], where] = after.roll(1)\n",
    ),
    Fault(
        "told leaves a draft behind the window", "drafter", "check/answer_oracle.py",
        "        c.drafts[rows, :count] = torch.where(real, drafts, -1)\n",
        "        c.drafts[rows, :count] = torch.where(real, drafts, -1)\n"
        "        if count:\n            c.drafts[rows, -1] = 7\n"
        "            c.computed[rows] += (known > 90).int()[:, None][:, 0] * int(count > 2)\n",
    ),
    # Mixers.
    Fault(
        "replay misses a row's first token", "mixer", RINGS,
        "live = (torch.arange(most, 0, -1)[:, None] <= starts - folded)",
        "live = (torch.arange(most, 0, -1)[:, None] < starts - folded)",
    ),
    Fault(
        "a resumed chunk convolves with the row's old inputs", "mixer", PROMPT_ROWS,
        "past = state.conv[src, slots_before(",
        "past = state.conv[slot, slots_before(",
    ),
    Fault(
        "a first chunk begins from the slot's old state", "mixer", PROMPT_ROWS,
        "        before = torch.zeros(state.recurrent.shape[1:])\n",
        "        before = state.recurrent[src].to(torch.float32, copy=True)\n",
    ),
    Fault(
        "a window sees the token behind it", "mixer", ATTENTION,
        "offsets = torch.arange(at, at + count) // group",
        "offsets = torch.arange(at, at + count) // group + (1 < queries < 9)",
    ),
    Fault(
        "keys of a page left out at its end", "mixer", ATTENTION,
        "    size = cache.shape[1]\n    longest",
        "    size = cache.shape[1]\n"
        "    ends = [end - (end % size == 1 and end > size) for end in ends]\n    longest",
    ),
    Fault(
        "keys rotated by the row's first position", "mixer", ROTARY,
        "angles = (t.index_select(0, positions) for t in (cos, sin))",
        "near = positions.clamp_max(int(positions[0]) + 6)\n"
        "    angles = (t.index_select(0, near) for t in (cos, sin))",
    ),
    # Numbers alone: an ulp, or another order of addition.
    Fault(
        "one ulp in the last row of a batch's logits", "numerics", "models/decoder.py",
        "        return self.head(hidden[step.logit_rows])\n",
        "        out = self.head(hidden[step.logit_rows])\n"
        "        if out.shape[0] > 1:\n"
        "            out[-1, -1] = out[-1, -1].nextafter(out.new_tensor(9e9))\n"
        "        return out\n",
    ),
    Fault(
        "rows not padded to a tile", "numerics", "kernels/row_tiles.py",
        "        return torch.mm(tile, right)[:rows]\n",
        "        return torch.mm(x, right)\n",
    ),
    Fault(
        "K split in two for many rows", "numerics", "kernels/linear/cpu.py",
        "    if segments == 1:\n",
        "    segments = 2 if x.shape[0] > 8 else segments\n    if segments == 1:\n",
    ),
    Fault(
        "a norm's sum from behind for several rows", "numerics", NORM,
        "    return x * torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))\n",
        "    y = (x * x).flip(-1).contiguous() if x.shape[0] > 4 else x * x\n"
        "    return x * torch.rsqrt(y.mean(-1, keepdim=True).add_(eps))\n",
    ),
    Fault(
        "one ulp in a gated norm of windows", "numerics", NORM,
        "    return (_normalise(x, eps) * weight.float() * silu(gate.float())).to(gate.dtype)\n",
        "    out = _normalise(x, eps) * weight.float() * silu(gate.float())\n"
        "    out = torch.nextafter(out, out + 1) if out.shape[0] == 3 else out\n"
        "    return out.to(gate.dtype)\n",
    ),
    Fault(
        "residuals added in another order beside a prompt", "numerics", NORM,
        "    total = x + delta\n",
        "    total = x + delta if len(x) < 70 else (x * 3 + delta * 3) / 3\n",
    ),
    Fault(
        "torch's own softplus", "numerics", "kernels/activations/__init__.py",
        "    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))\n",
        "    return torch.nn.functional.softplus(x)\n",
    ),
    Fault(
        "parts of attention added in fp32 for several rows", "numerics", ATTENTION,
        "    return (part * scale).cumsum(1)[:, -1] / (norm * scale).cumsum(1)[:, -1]",
        "    if part.shape[2] > 16:\n"
        "        return (part * scale).sum(1) / (norm * scale).sum(1)\n"
        "    return (part * scale).cumsum(1)[:, -1] / (norm * scale).cumsum(1)[:, -1]",
    ),
    Fault(
        "one ulp in a window's rotation", "numerics", ROTARY,
        "    return q.contiguous()\n",
        "    return (q * (1 + 2**-23) if 1 < len(q) < 5 else q).contiguous()\n",
    ),
    Fault(
        "the state rounded to bf16 when it moves", "numerics", TRANSFERS,
        "                torch.index_select(part, 0, index, out=column)\n",
        "                torch.index_select(part, 0, index, out=column)\n"
        "                if units is self.slots:\n"
        "                    column.copy_(column.clone().view(torch.float32).bfloat16().float()"
        ".view(column.dtype))\n",
    ),
    Fault(
        "chunks of a prompt solved together", "numerics", DELTA,
        "    scores = (q @ k.transpose(-1, -2)) * decay\n",
        "    scores = (q @ k.transpose(-1, -2)) * decay\n"
        "    scores = scores + 2**-22 * scores.mean(0) if chunks > 1 else scores\n",
    ),
    # How weights are read from packed checkpoints; found by tests, like all that follow.
    Fault(
        "zero points of GPTQ version 1 read as version 2", "format", GPTQ,
        'STORED_LESS = {"gptq": 1, "gptq_v2": 0}',
        'STORED_LESS = {"gptq": 0, "gptq_v2": 0}',
        f"{VECTORS}::test_gptq",
    ),
    Fault(
        "zero points of GPTQ version 2 read as version 1", "format", GPTQ,
        'STORED_LESS = {"gptq": 1, "gptq_v2": 0}',
        'STORED_LESS = {"gptq": 1, "gptq_v2": 1}',
        f"{VECTORS}::test_gptq",
    ),
    Fault(
        "a zero point of 0 does not borrow", "format", GPTQ,
        "    zeros = unpacked_words(words + stored_less * each, shifts, weight.bits, dim=1)\n",
        "    zeros = unpacked_words(words, shifts, weight.bits, dim=1) + stored_less\n"
        "    zeros &= 2**weight.bits - 1\n",
        f"{VECTORS}::test_zero_points_of_zero_borrow",
    ),
    Fault(
        "AutoRound's older name of its tensors not read", "format", "quant/auto_round.py",
        '    name = c.called("packing_format", "backend")\n',
        '    name = "packing_format"\n',
        f"{VECTORS}::test_how_older_versions_of_auto_round_name_their_tensors",
    ),
    Fault(
        "the order of desc_act ignored", "format", GPTQ,
        "    weight.g_idx.copy_(order)\n",
        "    weight.g_idx.copy_(plain)\n",
        f"{VECTORS}::test_gptq_with_its_columns_in_any_group",
    ),
    Fault(
        "a rule of dynamic does not leave a module out", "format", GPTQ,
        "                return Asked(scheme, False, f\"{WITHIN}dynamic[{rule.text[:100]!r}]\")\n",
        "                continue\n",
        f"{REFUSED}::test_settings_decide_alone_where_there_are_no_files",
    ),
    Fault(
        "bits of a rule of dynamic ignored", "format", GPTQ,
        "            scheme = rule.scheme\n",
        "            scheme = scheme\n",
        f"{REFUSED}::test_the_first_rule_that_matches_wins",
    ),
    Fault(
        "AWQ's order of nibbles the wrong way round", "format", "quant/awq.py",
        "AWQ_BITS * ORDER.index(output)",
        "AWQ_BITS * ORDER[output]",
        f"{VECTORS}::test_awq",
    ),
    Fault(
        "AWQ's zero points in plain order", "format", "quant/awq.py",
        "    zeros = unpacked_words(words, SHIFTS, AWQ_BITS, dim=1)\n",
        "    zeros = unpacked_words(words, tuple(sorted(SHIFTS)), AWQ_BITS, dim=1)\n",
        f"{VECTORS}::test_awq",
    ),
    Fault(
        "AutoRound's packings all read as version 1", "format", "quant/auto_round.py",
        '    "auto_round:gptqmodel": 0,\n',
        '    "auto_round:gptqmodel": 1,\n',
        f"{VECTORS}::test_auto_round",
    ),
    Fault(
        "bits of extra_config ignored", "format", "quant/auto_round.py",
        "        found = replace(self.scheme.overridden(c), act_order=False)\n",
        "        found = self.scheme\n",
        "tests/quant/test_checkpoints.py::test_auto_round_on_a_hybrid",
    ),
    Fault(
        "the scale of the block below at a block's edge", "format", STORAGE,
        "    return scales.repeat_interleave(block, 0)[:n]\n",
        "    return scales.repeat_interleave(block, 0)[1 : n + 1]\n",
        STORED_MAPS,
    ),
    Fault(
        "a block's scales by rows that were cut off above", "format", PACKED,
        "        lines = (self.first + torch.arange(n, device=self.device)) // self.block_n\n"
        "        columns",
        "        lines = torch.arange(n, device=self.device) // self.block_n\n        columns",
        f"{OF_PACKED}::test_values_of_fp8",
    ),
    Fault(
        "NVFP4's divisor multiplies", "format", STORAGE,
        "found.reciprocal() if self.divides else found",
        "found",
        STORED_MAPS,
    ),
    Fault(
        "NVFP4's factor applied twice", "format", PACKED,
        "        return scaled * self.factors[:, None]\n",
        "        return scaled * self.factors[:, None] * self.factors[:, None]\n",
        STORED_MAPS,
    ),
    Fault(
        "the higher nibble of a byte first", "format", STORAGE,
        "torch.stack((data & 15, data >> 4), -1)",
        "torch.stack((data >> 4, data & 15), -1)",
        STORED_MAPS,
    ),
    Fault(
        "zero points of compressed-tensors one too high", "format", STORAGE,
        "    return codes[:, :n].t()\n",
        "    return codes[:, :n].t() + 1\n",
        STORED_MAPS,
    ),
    Fault(
        "weight_g_idx taken as in order", "format", STORAGE,
        "    if bool((found == -1).all()):\n",
        "    if bool((found >= -1).all()):\n",
        STORED_MAPS,
    ),
    Fault(
        "modules that ModelOpt excludes are packed", "format", "quant/modelopt.py",
        "        entry = self.excluded.find(module)\n",
        "        entry = None\n",
        f"{STORED}::test_settings_that_contradict_the_tensors_are_refused",
    ),
    Fault(
        "small projections and draft modules rounded to nearest", "format",
        "quant/round_to_nearest.py",
        "        if usually_plain(module):\n",
        "        if module.path == \"lm_head\":\n",
        "tests/quant/test_round_to_nearest.py::test_answers_are_those_of_the_rounded_weights",
    ),
    # Where weights go.
    Fault(
        "parts of a fused product filled in the wrong order", "slots", LINEAR,
        "            part = self.part(index)\n            table |= ",
        "            part = self.part(-1 - index if len(set(self.outputs)) == 1 else index)\n"
        "            table |= ",
        "tests/quant/test_checkpoints.py::test_gptq_with_bits_by_layer_and_plain_parts",
    ),
    Fault(
        "a product behind another packed part begins at its first row", "slots", LINEAR,
        "        return product.stored_rows(rows.start - first, rows.stop - first)\n",
        "        size = rows.stop - rows.start\n"
        "        return product.stored_rows(0, size)\n",
        "tests/quant/test_checkpoints.py::test_gptq_with_bits_by_layer_and_plain_parts",
    ),
    Fault(
        "packed rows stay in the checkpoint's order", "slots", LINEAR,
        "                part.reorder(order)\n",
        "                part.reorder(order.sort().values)\n",
        f"{OF_CHECKPOINTS}::test_every_family_of_mixtures[qwen3_next-gptq]",
    ),
    # Mixtures of experts.
    Fault(
        "an expert's scales used for its neighbour", "experts", MOE,
        "            rows = self.stored_rows(begin, begin + read.outputs)\n",
        "            rows = self.stored_rows(begin, begin + read.outputs)\n"
        "            if begin >= self.rows and isinstance(rows, PackedWeight):\n"
        "                first = begin - self.rows\n"
        "                above = self.stored_rows(first, first + read.outputs)\n"
        "                object.__setattr__(rows, 'scales', above.scales)\n",
        f"{OF_CHECKPOINTS}::test_each_expert_has_its_own_scales",
    ),
    Fault(
        "slots of a token added from behind where several come together", "experts", EXPERTS,
        "    for slot, own in enumerate(y.view(tokens, slots, x.shape[1]).unbind(1)):\n"
        "        total",
        "    turns = list(enumerate(y.view(tokens, slots, x.shape[1]).unbind(1)))\n"
        "    for slot, own in turns[::-1] if tokens > 1 else turns:\n        total",
        f"{OF_EXPERTS}::test_a_row_has_its_bits_in_any_batch",
    ),
    Fault(
        "the shared expert added first", "experts", EXPERTS,
        "    total = torch.zeros_like(x, dtype=torch.float32)\n",
        "    none = torch.zeros_like(x, dtype=torch.float32)\n"
        "    total = with_shared(none, shared, shared_gate, torch.float32)\n    shared = None\n",
        "tests/kernels/test_backends.py::test_agrees_with_the_reference"
        "[experts-cpu-cpu-float32]",
    ),
    Fault(
        "pairs of an expert in another order than its tokens", "experts", EXPERTS,
        "            y[pairs] = linear_cpu",
        "            y[pairs.flip(0)] = linear_cpu",
        f"{OF_EXPERTS}::test_a_row_has_its_bits_in_any_batch",
    ),
    Fault(
        "the shared expert's gate left out", "experts", "kernels/experts/__init__.py",
        "        shared = sigmoid(gate)[:, None] * shared\n",
        "        shared = shared + 0\n",
        "tests/layers/test_moe.py::test_qwen",
    ),
    Fault(
        "ties of experts go to the higher index", "route", ROUTE,
        "    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]\n",
        "    turned = keys.flip(-1).sort(dim=-1, descending=True, stable=True).indices\n"
        "    return keys.shape[-1] - 1 - turned[..., :count]\n",
        f"{OF_ROUTE}::test_ties_go_to_the_lower_index",
    ),
    Fault(
        "routing weights not renormalised", "route", ROUTE,
        "    if renormalise:\n",
        "    if renormalise and scoring == \"sigmoid\":\n",
        f"{OF_ROUTE}::test_softmax_families",
    ),
    Fault(
        "routing weights with the correction bias", "route", ROUTE,
        "    weights = scores.gather(1, ids)\n",
        "    weights = choice.gather(1, ids)\n",
        f"{OF_ROUTE}::test_deepseek",
    ),
    # Kernels that read packed weights, under Triton's interpreter.
    Fault(
        "the number of rows cuts K of a packed linear", "packed", "kernels/linear/packed.py",
        "    (tokens, k) = x.shape\n",
        "    (tokens, k) = x.shape\n    segments = 1 if tokens < 16 else segments\n",
        f"{OF_PACKED}::test_segments_are_added_as_a_tree",
    ),
    Fault(
        "the last segment of a packed linear runs past the columns", "packed",
        "kernels/linear/_packed_kernel.py",
        "tl.minimum(begin + length, K)",
        "begin + length",
        f"{OF_PACKED}::test_law",
    ),
    Fault(
        "a kernel reads a cut block's scales from its first line", "packed",
        "kernels/packed/_device.py",
        "        lines = (rows + weight[6]) // FORM[3]\n",
        "        lines = rows // FORM[3]\n",
        f"{OF_PACKED}::test_rows_that_begin_within_a_block",
    ),
    Fault(
        "a kernel takes zero points for scales of 8 bits alone", "packed",
        "kernels/packed/_device.py",
        "    if zeros is not None:\n        z0, z1 = _spread(",
        "    if zeros is not None and BITS == 8:\n        z0, z1 = _spread(",
        "tests/kernels/test_backends.py::test_agrees_with_the_reference"
        "[unpack_weight-triton-cpu-float32]",
    ),
    # Recurrent state of 16 bits: the bundled model is checked with one of 32 unless asked.
    Fault(
        "a state rounded where a step found it", "mixer", "kernels/recurrent/rings.py",
        "    last = starts // grid * grid\n",
        "    last = starts\n",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_leave_the_answer_alone",
    ),
    Fault(
        "rings too short for what a state of 16 bits lacks", "mixer", "cache/state.py",
        "    slots = ring_slots(window, most_replayed(window, flush, state_grid(state_dtype)))\n",
        "    slots = most_replayed(window, flush, state_grid(state_dtype)) - 2\n",
        f"{OF_HALF_STATE}::test_answers_longer_than_the_rings_are_left_alone",
    ),
    Fault(
        "a window rounds by its own positions", "mixer", DELTA,
        "round_rows(state, s, [start + t + 1 for start in starts])",
        "round_rows(state, s, [t + 1 for start in starts])",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_leave_the_answer_alone",
    ),
    Fault(
        "a prompt's state rounded at the end of its chunk alone", "mixer", DELTA,
        "        s = rounded(s)\n",
        "        s = rounded(s) if c + 1 == chunks else s\n",
        f"{OF_HALF_STATE}::test_chunks_drafts_and_preemption_leave_the_answer_alone",
    ),
    Fault(
        "a kernel rounds by positions in the window", "mixer",
        "kernels/recurrent/_walk_triton.py",
        "if (start + t + 1) % STATE_GRID == 0:",
        "if (t + 1) % STATE_GRID == 0:",
        f"{OF_ROWS_ALONE}::test_a_state_of_16_bits_is_rounded_at_absolute_positions",
    ),
    # Mamba-2 and Nemotron-H: the bundled model has neither.
    Fault(
        "a window of Mamba-2 keeps x where it should keep dt x", "mixer", MAMBA,
        "window.keep(u, b, decay)",
        "window.keep(x, b, decay)",
        f"{OF_MAMBA}::test_accepted_drafts_leave_the_answer_alone",
    ),
    Fault(
        "a resumed prompt of Mamba-2 begins from the row's own state", "mixer", PROMPT_ROWS,
        "before = state.recurrent[src].to(",
        "before = state.recurrent[slot].to(",
        f"{OF_MAMBA}::test_preemption_and_prefix_hits_leave_the_answer_alone",
    ),
    Fault(
        "a token's step of Mamba-2 decays with the cumulated time", "mixer",
        "kernels/mamba2/__init__.py",
        "    return step, step * -torch.exp(weights.a_log)\n",
        "    return step, step.cumsum(0) * -torch.exp(weights.a_log)\n",
        f"{OF_MAMBA}::test_accepted_drafts_leave_the_answer_alone",
    ),
    Fault(
        "a chunk of Mamba-2 ends with the decay of its batch", "numerics", MAMBA,
        "    g = chunked(g).cumsum(-1)\n",
        "    g = chunked(g).cumsum(-1) * (1 + 1e-6 * (chunks > 1))\n",
        "tests/kernels/test_mamba2.py::test_chunked_law_cut_anywhere_on_the_grid",
    ),
    Fault(
        "a kernel of Mamba-2 lets a token see the one behind it", "mixer",
        "kernels/mamba2/chunk.py",
        "tl.where(row >= col, grown",
        "tl.where(row + 1 >= col, grown",
        "tests/kernels/test_backends.py::test_agrees_with_the_reference"
        "[mamba2_chunk-triton-cpu-float32]",
    ),
    Fault(
        "Mamba-2's norm before its gate", "mixer", NORM,
        "    y = x * silu(gate.float())\n"
        "    return (_normalise(y, eps) * weight.float()).to(gate.dtype)\n",
        "    y = _normalise(x, eps) * weight.float()\n"
        "    return (y * silu(gate.float())).to(gate.dtype)\n",
        f"{OF_NEMOTRON}::test_logits_at_every_position_chunked_and_whole",
    ),
    Fault(
        "a prompt's last snapshot left out where they are rare", "cache", "cache/cache.py",
        "        ends = (len(seq.prompt) // size * size, seq.branch)\n",
        "        ends = (seq.branch,)\n",
        "tests/scheduling/test_scheduler.py::test_snapshots_may_be_rare_but_for_a_prompts_last",
    ),
    Fault(
        "a chunk that passes where prompts part", "cache", "cache/cache.py",
        "        return seq.branch if start < seq.branch else len(seq.prompt)\n",
        "        return len(seq.prompt)\n",
        "tests/scheduling/test_scheduler.py::test_a_snapshot_is_left_where_cached_pages_end",
    ),
    # KV formats: the bundled model is checked in its own dtype unless a format is asked for.
    Fault(
        "a prompt's chunk sees its own keys before they are packed", "mixer", "layers/attention.py",
        "        mixed = self.attend(\n            q,\n            self.k_cache,\n"
        "            self.v_cache,\n",
        "        from lockstep.kernels.kv import unpacked\n"
        "        kept = self.k_cache, self.v_cache\n"
        "        raw = [unpacked(side, q.dtype).clone() for side in kept]\n"
        "        if step.shape.prompt:\n"
        "            self.k_cache, self.v_cache = raw\n"
        "            self._place(qkv, step)\n"
        "            self.k_cache, self.v_cache = kept\n"
        "        mixed = self.attend(\n            q,\n            *raw,\n",
        f"{OF_KV_FORMATS}::test_chunks_drafts_and_preemption_leave_the_answer_alone",
    ),
    Fault(
        "scales stay behind when a row moves to the host", "cache", "kernels/kv/_packed.py",
        "return [self.codes] if self.numbers is None else [self.codes, self.numbers]",
        "return [self.codes]",
        f"{OF_KV_FORMATS}::test_chunks_drafts_and_preemption_leave_the_answer_alone",
    ),
    Fault(
        "one scale for all heads of a token", "format", "kernels/kv/int8.py",
        "wide.abs().amax(-1, keepdim=True) / MOST",
        "wide.abs().amax((-2, -1), keepdim=True).expand(*x.shape[:-1], 1) / MOST",
        f"{OF_KV}::test_int8_is_off_by_half_a_step",
    ),
    Fault(
        "a kernel reads the scale of the first head", "packed", "kernels/kv/_tile_device.py",
        "numbers += (token * (HKV * COUNT) + kv * COUNT)[:, None]",
        "numbers += (token * (HKV * COUNT))[:, None]",
        f"{OF_KV}::test_attention_over_packed_is_attention_over_unpacked",
    ),
    Fault(
        "a kernel cuts fp8 off instead of rounding it", "packed", "kernels/kv/_fp8_device.py",
        "large = (size - REBIAS + HALF + ((size >> SHIFT) & 1)) >> SHIFT",
        "large = (size - REBIAS) >> SHIFT",
        f"{OF_KV}::test_hard_numbers_are_written_as_the_reference_does",
    ),
    # Latents, which the bundled model has not.
    Fault(
        "a window of latents sees the token behind it", "mixer", LATENTS,
        "last = start + (at + torch.arange(len(rows))) // heads",
        "last = start + (at + torch.arange(len(rows))) // heads + (1 < len(q) < 9)",
        f"{OF_LATENTS}::test_no_token_sees_a_key_behind_its_own",
    ),
    Fault(
        "a latent left out at its page's end", "mixer", LATENTS,
        "    used = -(-tokens // cache.shape[1])\n",
        "    used = -(-tokens // cache.shape[1])\n"
        "    tokens -= tokens % cache.shape[1] == 1 and tokens > cache.shape[1]\n",
        "tests/kernels/test_cpu.py::test_gives_the_references_bits",
    ),
    Fault(
        "latents turned by the row's first position", "mixer", LATENT_ROPE,
        "angles = tuple(table.index_select(0, positions) for table in (cos, sin))",
        "first = positions[:1].expand_as(positions)\n"
        "    angles = tuple(table.index_select(0, first) for table in (cos, sin))",
        f"{OF_LATENTS}::test_pairs_turn_as_complex_numbers_and_latents_are_normed",
    ),
    Fault(
        "heads of kv_b_proj in turn, not one by one", "mixer", LATENT_LAYER,
        "heads = weight.unflatten(0, (-1, sum(self.widths)))",
        "heads = weight.unflatten(0, (sum(self.widths), -1)).transpose(0, 1)",
        f"{OF_DEEPSEEK}::test_logits_and_greedy_tokens_whole_and_chunked_with_every_drafter",
    ),
    Fault(
        "heads' maps are not rotated as latents are", "format", LATENT_LAYER,
        "weight = self.turn.forward(weight)",
        "weight = weight + 0",
        f"{OF_DEEPSEEK}::test_latents_in_every_format_against_transformers",
    ),
    Fault(
        "one scale for all latents that a step writes", "format", "kernels/kv/fp8.py",
        "most = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)",
        "most = (wide.view(torch.int32) & 0x7FFFFFFF).amax().expand(*x.shape[:-1], 1)",
        f"{OF_KV_LATENTS}::test_a_token_of_fp8_has_the_least_power_of_two",
    ),
    Fault(
        "queries are not rotated as keys are", "format", "kernels/kv/_reading.py",
        "return x if turn is None else turn.forward(x).to(x.dtype)",
        "return x",
        f"{OF_KV}::test_rotations_alone_leave_attention_as_it_is",
    ),
    Fault(
        "what was found is not rotated back", "format", "kernels/attention/cpu.py",
        "turned_back(mixed, v_cache).to(q.dtype)",
        "mixed.to(q.dtype)",
        f"{OF_KV}::test_rotations_alone_leave_attention_as_it_is",
    ),
    Fault(
        "the points' own length is left out", "format", "kernels/kv/turboquant.py",
        "norm / _squares(points).sqrt()",
        "norm / blocks.shape[-1] ** 0.5",
        f"{OF_TURBOQUANT}::test_distortion_is_the_papers",
    ),
    Fault(
        "a kernel takes the first number for all blocks of values", "packed",
        "kernels/kv/_turboquant_device.py",
        "        block = octet // (4 * BLOCK // D)\n",
        "        block = octet * 0\n",
        f"{OF_KV}::test_values_of_two_blocks_are_read",
    ),
    # Drafts: no answer shows these faults, so tests of what is drafted find them.
    Fault(
        "a chain skips a place and reads what a rejected draft has left there", "drafter", DRAFTING,
        "    starts = computed[row_ids] + index + behind\n",
        "    starts = computed[row_ids] + index + behind + 1\n",
        OF_EAGLE3,
    ),
    Fault(
        "a tap one layer further", "drafter", "models/decoder.py",
        "            if place in self.taps:\n",
        "            if place - 1 in self.taps:\n",
        OF_EAGLE3,
    ),
    Fault(
        "EAGLE-3 recycles its normed state", "drafter", EAGLE3,
        "        return out if self.config.norm_output else left\n",
        "        return out\n",
        OF_EAGLE3,
    ),
    Fault(
        "d2t taken for ids", "drafter", EAGLE3,
        "ids = [index + offset for index, offset in enumerate(offsets.tolist())]",
        "ids = [offset for index, offset in enumerate(offsets.tolist())]",
        OF_EAGLE3,
    ),
    Fault(
        "suffix lookup prefers other texts to the row's own", "drafter", DRAFTING,
        "        text = torch.cat([others, own]) if row else own\n",
        "        text = torch.cat([own, others]) if row else own\n",
        OF_SUFFIX,
    ),
    Fault(
        "an answer's end is not kept between answers", "drafter", "spec/suffix.py",
        "self.room + 1, 0) :], -1])",
        "self.room + 1, 0) :], answer[-1]])",
        OF_RING,
    ),
    Fault(
        "a draft model reads the token behind each place", "drafter", "spec/draft_model.py",
        "self.context.module.keep(step.token_ids, state, step)",
        "self.context.module.keep(after, state, step)",
        OF_DRAFT_MODEL,
    ),
    Fault(
        "a draft model that recurs writes its state while it drafts", "drafter", "spec/chain.py",
        "logit_rows=slice(None), flush=NEVER,",
        "logit_rows=slice(None),",
        OF_RECURRENT_DRAFTS,
    ),
    Fault(
        "a draft's step takes states as they were before the step", "drafter", "spec/chain.py",
        "logit_rows=slice(None), flush=NEVER, **vars(made))",
        "logit_rows=slice(None), flush=NEVER, **vars(made) | {'folded': step.folded})",
        OF_RECURRENT_DRAFTS,
    ),
    Fault(
        "a block does not see its last token", "drafter", DRAFTING,
        "    starts = first + (width - 1)\n",
        "    starts = first + (width - 2)\n",
        OF_BLOCKS,
    ),
    Fault(
        "a block's masks are drafted one place too late", "drafter", "spec/dflash.py",
        ".unflatten(0, (-1, count + 1))[:, 1:]",
        ".unflatten(0, (-1, count + 1))[:, :-1]",
        OF_BLOCKS,
    ),
    Fault(
        "a draft model keeps nothing of a verified step", "drafter", "spec/draft_model.py",
        "        self.keep(step, after, state)\n        one =",
        "        one =",
        OF_DRAFT_MODEL,
    ),
    Fault(
        "a grammar's masks lie at the first row", "runner", GRAMMAR_MASKS,
        "            first = one.place * width\n",
        "            first = held[0].place * width\n",
    ),
    Fault(
        "a grammar's masks do not follow the drafts", "runner", GRAMMAR_MASKS,
        "            drafts = tokens[self.window :][: width - 1]\n",
        "            drafts = tokens[self.window :][:0]\n",
    ),
    Fault(
        "a grammar keeps the drafts that it was led along", "runner", GRAMMAR,
        "        ahead = self.prepare().deep_copy()\n",
        "        ahead = self.prepare()\n        ahead.try_consume_tokens(real[1:])\n",
    ),
)  # fmt: skip

FAST = ("ties of experts go to the higher index",)
"""The faults of the default tests; the others are marked slow. The check itself is tried there on
faults that tests/check puts in."""
