"""A model of the device row table in plain Python, and a random walk that compares the two."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config import Plan
from lockstep.kernels.recurrent.history import state_grid
from lockstep.layers.build_context import BuildContext
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepContext, StepShape
from lockstep.worker import rows
from lockstep.worker.row_table import RowTable
from lockstep.worker.transfers import CopyStream, Transfers

VOCAB = 50
PAGE = 4
LENGTH = 40
ROWS = 5
PAGES = 90


def make_plan(query_len: int) -> Plan:
    """Return a plan of small sizes; fields that the table does not read are empty."""
    return Plan(
        model_path=Path(),
        device="cpu",
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        query_len=query_len,
        page_size=PAGE,
        num_pages=PAGES,
        page_bytes=0,
        num_slots=2 * ROWS + 1,
        slot_bytes=0,
        row_buckets=(ROWS,),
        graph_mode="none",
        steps_in_flight=1,
        numerics="",
    )


def make_table(query_len: int, kept: torch.dtype = torch.float32) -> RowTable:
    """Return a table of that plan. kept: the dtype of recurrent state."""
    build = BuildContext("cpu", torch.float32, query_len, 2 * LENGTH, state_dtype=kept)
    return RowTable(make_plan(query_len), build, VOCAB)


@dataclass(eq=False)
class Line:
    """A request in the model.

    tokens: prompt and answer; computed: number of tokens with KV; forced: tokens of the answer that
    are forced.
    """

    request: Request
    tokens: list[int]
    pages: list[int]
    slot: int
    row: int = 0
    computed: int = 0
    folded: int = 0
    drafts: list[int] = field(default_factory=list)
    saved: rows.HostRow | None = None

    @property
    def forced(self) -> list[int]:
        """Forced tokens that come after the known ones."""
        answered = len(self.tokens) - self.prompt_len
        return list(self.request.forced_token_ids[answered:])

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def in_prompt(self) -> bool:
        """True while prompt tokens remain to be computed."""
        return self.computed < self.prompt_len

    def slot_of(self, position: int) -> int:
        """Return the cache slot of a position; the null page if none is reserved."""
        column = position // PAGE
        page = self.pages[column] if column < len(self.pages) else 0
        return page * PAGE + position % PAGE


class Walk:
    """A table, its model, and a cache with one number per slot: the token written there."""

    def __init__(self, seed: int, query_len: int) -> None:
        self.draw = random.Random(seed)
        self.query_len = query_len
        kept = self.draw.choice((torch.float32, torch.bfloat16))
        self.grid = state_grid(kept)
        self.table = make_table(query_len, kept)
        self.written = torch.full((PAGES, PAGE), -1, dtype=torch.int64)
        self.state = torch.zeros(2 * ROWS + 1, 2, dtype=torch.int64)
        self.transfers = Transfers([self.written], [self.state], [], CopyStream("cpu"))
        self.free_pages = set(range(1, PAGES))
        self.free_slots = set(range(1, 2 * ROWS + 1))
        self.free_rows = set(range(1, ROWS + 1))
        self.lines: list[Line] = []
        self.null = null_line(self.table)
        self.done: Counter[str] = Counter()

    def take(self, pool: set[int]) -> int:
        """Return a random free id."""
        taken = self.draw.choice(sorted(pool))
        pool.discard(taken)
        return taken

    def running(self) -> list[Line]:
        """Return the lines that have a row, in random order."""
        results = [line for line in self.lines if line.row]
        self.draw.shuffle(results)
        return results

    def admit(self) -> None:
        """Admit a new request; some begin with whole cached pages."""
        if not self.free_rows or len(self.lines) >= 2 * ROWS:
            return
        draw = self.draw
        prompt = draw.choices(range(VOCAB), k=draw.randint(1, LENGTH - 8))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7]),
            seed=draw.randrange(2**40),
            repetition_penalty=draw.choice([1.0, 1.5]),
            min_tokens=draw.choice([0, 3]),
            logit_bias=draw.choice([None, {draw.randrange(VOCAB): 2.5}]),
            bad_words_ids=draw.choice([None, [[draw.randrange(VOCAB)], [1, 2, 3]]]),
            top_k=draw.choice([0, 5]),
            max_tokens=None,
            forced_token_ids=draw.choice([None, self.forced_tokens(LENGTH - len(prompt))]),
        )
        request = Request(str(draw.random()), prompt, params, seed=params.seed or 0)
        line = Line(request, list(prompt), [], self.take(self.free_slots))
        line.row = self.take(self.free_rows)
        line.computed = draw.randrange(len(prompt)) // PAGE * PAGE if draw.random() < 0.3 else 0
        line.folded = line.computed
        line.pages = [self.take(self.free_pages) for _ in range(-(-len(prompt) // PAGE))]
        rows.write_row(self.table, line.row, RowSpec.of(request), line.computed)
        rows.write_pages_and_slot(self.table, line.row, line.pages, line.slot)
        for position in range(line.computed):
            self.written.view(-1)[line.slot_of(position)] = prompt[position]
        self.state[line.slot] = torch.tensor([line.computed, sum(prompt[: line.computed])])
        self.lines.append(line)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return up to `limit` random tokens."""
        return self.draw.choices(range(VOCAB), k=self.draw.randint(0, limit))

    def chunk(self) -> None:
        """Run a prompt step: ragged chunks of the rows in their prompts."""
        chosen = [line for line in self.running() if line.in_prompt][: self.draw.randint(1, 3)]
        if not chosen:
            return
        lengths = [self.draw.randint(1, line.prompt_len - line.computed) for line in chosen]
        sources = [self.draw.choice([0, 9]) for _ in chosen]
        inputs = self.table.inputs
        inputs.fill(
            row_ids=[line.row for line in chosen],
            query_lens=lengths,
            state_src=sources,
            snapshot_slots=[3] * len(chosen),
        )
        shape = StepShape(len(chosen), sum(lengths), max(lengths), prompt=True)
        step = self.table.prepare(shape)
        self.check_step(step, chosen, lengths)
        assert step.drafts.shape == (len(chosen), 0)
        assert step.state_src.tolist() == [
            source or line.slot for source, line in zip(sources, chosen, strict=True)
        ]
        assert step.snapshot_slots.tolist() == [3] * len(chosen)
        ends = [sum(lengths[: i + 1]) - 1 for i in range(len(chosen))]
        assert step.logit_rows.tolist() == ends
        targets = self.draw.choices(range(VOCAB), k=len(chosen))
        emitted = []
        for line, length, target in zip(chosen, lengths, targets, strict=True):
            ends = line.computed + length == line.prompt_len
            emitted.append([line.forced[0] if ends and line.forced else target])
        self.advance(step, [[token] for token in targets], emitted, [0] * len(chosen))
        for line, length, (token,) in zip(chosen, lengths, emitted, strict=True):
            self.fold(line, line.computed + length)
            line.folded = line.computed
            if not line.in_prompt:
                line.tokens.append(token)
                self.done["prompts"] += 1

    def decode(self) -> None:
        """Run a uniform step over the decoding rows, padded with null rows."""
        ready = [line for line in self.running() if not (line.in_prompt or line.forced)]
        chosen = [line for line in ready if line.computed < LENGTH + self.query_len]
        if not chosen:
            return
        chosen = chosen[: self.draw.randint(1, len(chosen))]
        query_len = self.draw.choice([self.query_len, self.draw.randint(1, self.query_len)])
        padding = self.draw.randint(0, ROWS - len(chosen))
        for line in chosen:
            self.reserve(line, min(line.computed + query_len, LENGTH))
            line.drafts = self.make_drafts()
            self.table.drafts[line.row] = torch.tensor(line.drafts, dtype=torch.int64)
        self.table.inputs.fill(row_ids=[line.row for line in chosen])
        step = self.table.prepare(StepShape.uniform(len(chosen) + padding, query_len))
        self.check_step(step, chosen, [query_len] * len(chosen))
        self.check_padding(step, len(chosen), query_len)
        assert step.logit_rows == slice(None)
        tokens = []
        accepted = []
        for line in chosen:
            drafts = line.drafts[: query_len - 1]
            real = drafts.index(-1) if -1 in drafts else len(drafts)
            accepted.append(self.draw.randint(0, real))
            rest = self.draw.choices(range(VOCAB), k=query_len - accepted[-1])
            if drafts[accepted[-1] :]:
                rest[0] = (drafts[accepted[-1]] + self.draw.randint(1, VOCAB - 1)) % VOCAB
            tokens.append(drafts[: accepted[-1]] + rest)
        null = self.draw.choices(range(VOCAB), k=query_len)
        self.advance(step, tokens + [null] * padding, tokens, accepted)
        for line, emitted, count in zip(chosen, tokens, accepted, strict=True):
            line.tokens += emitted[: count + 1]
            line.folded = max(line.folded, line.computed // self.grid * self.grid)
            self.fold(line, line.computed + count + 1)
            self.done[f"accepted {count} of {query_len - 1}"] += 1

    def force(self) -> None:
        """Run a forced step: windows of forced tokens, padded to one length."""
        chosen = [line for line in self.running() if not line.in_prompt and line.forced]
        if not chosen:
            return
        window = self.draw.choice([2, 7, FORCED_WINDOWS[-1]])
        counts = [min(len(line.forced) + 1, window) for line in chosen]
        for line, count in zip(chosen, counts, strict=True):
            self.reserve(line, min(line.computed + count, LENGTH))
            # The step must not verify what the drafter proposed.
            proposed = self.draw.choices(range(VOCAB), k=self.query_len - 1)
            self.table.drafts[line.row] = torch.tensor(proposed, dtype=torch.int64)
            line.drafts = line.forced[: count - 1] + [-1] * (window - count)
        self.table.inputs.fill(row_ids=[line.row for line in chosen])
        step = self.table.prepare(replace(StepShape.uniform(len(chosen), window), forced=True))
        self.check_step(step, chosen, [window] * len(chosen))
        assert step.committed is not None
        assert step.committed.tolist() == counts
        targets = [self.draw.choices(range(VOCAB), k=window) for _ in chosen]
        emitted = [
            line.forced[:window] + target[len(line.forced[:window]) :]
            for line, target in zip(chosen, targets, strict=True)
        ]
        self.advance(step, targets, emitted, [count - 1 for count in counts])
        for line, tokens, count in zip(chosen, emitted, counts, strict=True):
            line.tokens += tokens[:count]
            line.drafts = []
            self.fold(line, line.computed + count)
            line.folded = max(line.folded, line.computed // self.grid * self.grid)
            self.done["forced"] += 1

    def make_drafts(self) -> list[int]:
        """Return K drafts, fewer, or none."""
        maximum = self.query_len - 1
        count = self.draw.choice([0, maximum, self.draw.randint(0, maximum)])
        return self.draw.choices(range(VOCAB), k=count) + [-1] * (maximum - count)

    def reserve(self, line: Line, tokens: int) -> None:
        """Grant the pages that `tokens` tokens need."""
        column = len(line.pages)
        new = [self.take(self.free_pages) for _ in range(-(-tokens // PAGE) - column)]
        if new:
            line.pages += new
            rows.write_pages(self.table, line.row, column, new)

    def fold(self, line: Line, computed: int) -> None:
        """Advance the row's recurrent state, here a count and a sum."""
        new = line.tokens[line.computed : computed]
        self.state[line.slot] += torch.tensor([len(new), sum(new)])
        line.computed = computed

    def advance(
        self,
        step: StepContext,
        targets: list[list[int]],
        emitted: list[list[int]],
        accepted: list[int],
    ) -> None:
        """Write the step's tokens to their slots, then commit; null rows may accept anything."""
        self.written.view(-1)[step.slot_mapping] = step.token_ids
        verdict = self.table.accept_and_commit(step, torch.tensor(targets))
        assert (self.table.drafts[step.row_ids] == -1).all(), "drafts are cleared"
        assert verdict.accepted[: len(accepted)].tolist() == accepted
        by_row = (verdict.results.tolist(), targets, emitted, accepted, step.drafts.tolist())
        for line, target, tokens, count, drafts in zip(*by_row, strict=False):
            differing = [i for i in range(count + 1) if tokens[i] != target[i]]
            mismatch = [differing[0], target[differing[0]]] if differing else [-1, target[-1]]
            assert line == [*tokens, count, sum(draft >= 0 for draft in drafts), *mismatch]

    def preempt(self) -> None:
        """Move a row to host memory; its old pages and slot are overwritten."""
        for line in self.running()[:1]:
            used = -(-line.computed // PAGE)
            index = (line.pages[:used], line.slot, self.transfers)
            line.saved = rows.save_row(self.table, line.row, *index)
            self.written[line.pages] = -7
            self.state[line.slot] = -7
            self.leave(line)

    def restore(self) -> None:
        """Restore a row into another row, other pages and another slot."""
        waiting = [line for line in self.lines if line.saved]
        if not waiting or not self.free_rows:
            return
        line = self.draw.choice(waiting)
        line.row = self.take(self.free_rows)
        line.slot = self.take(self.free_slots)
        maximum = max(min(line.computed + 1, LENGTH), line.prompt_len)
        line.pages = [self.take(self.free_pages) for _ in range(-(-maximum // PAGE))]
        assert line.saved is not None
        index = (line.pages, line.slot, self.transfers)
        rows.restore_row(self.table, line.row, line.saved, *index)
        line.saved = None
        self.done["restored"] += 1

    def release(self) -> None:
        """End a request; its row of the table stays as it is until the next request."""
        for line in self.running():
            if line.computed >= LENGTH or self.draw.random() < 0.2:
                self.leave(line)
                self.lines.remove(line)
                self.done["released"] += 1

    def leave(self, line: Line) -> None:
        """Free row, pages and slot."""
        self.free_rows.add(line.row)
        self.free_pages |= set(line.pages)
        self.free_slots.add(line.slot)
        line.row = 0
        line.pages = []
        line.slot = 0

    def check_step(self, step: StepContext, lines: list[Line], lengths: list[int]) -> None:
        """Assert every field of the step that concerns these rows, its first ones."""
        count = len(lines)
        total = sum(lengths)
        positions = [
            range(line.computed, line.computed + n) for line, n in zip(lines, lengths, strict=True)
        ]
        assert step.row_ids[:count].tolist() == [line.row for line in lines]
        assert step.starts[:count].tolist() == [line.computed for line in lines]
        assert step.seq_lens[:count].tolist() == [p.stop for p in positions]
        ends = [sum(lengths[:i]) for i in range(count + 1)]
        assert step.cu_seqlens[: count + 1].tolist() == ends
        assert step.positions[:total].tolist() == [p for span in positions for p in span]
        owners = [i for i, n in enumerate(lengths) for _ in range(n)]
        assert step.token_rows[:total].tolist() == owners
        slots = [line.slot_of(p) for line, s in zip(lines, positions, strict=True) for p in s]
        assert step.slot_mapping[:total].tolist() == slots
        ids = []
        for line, n in zip(lines, lengths, strict=True):
            shown = line.tokens + [max(draft, 0) for draft in line.drafts]
            ids += shown[line.computed : line.computed + n]
        assert step.token_ids[:total].tolist() == ids
        assert step.state_slots[:count].tolist() == [line.slot for line in lines]
        assert step.folded[:count].tolist() == [line.folded for line in lines]
        for i, line in enumerate(lines):
            padded = line.pages + [0] * (step.page_table.shape[1] - len(line.pages))
            assert step.page_table[i].tolist() == padded
            if not step.shape.prompt:
                assert step.drafts[i].tolist() == line.drafts[: step.shape.query_len - 1]

    def check_padding(self, step: StepContext, count: int, query_len: int) -> None:
        """Assert that padding rows are null: nothing is committed, and they only access null pages
        and slots."""
        for name in ("row_ids", "starts", "state_slots", "state_src", "folded"):
            assert not getattr(step, name)[count:].any(), name
        assert not step.page_table[count:].any()
        assert (step.seq_lens[count:] == query_len).all()
        assert (step.slot_mapping[count * query_len :] < PAGE).all()
        steps = torch.diff(step.cu_seqlens)
        assert (steps == query_len).all()

    def check(self) -> None:
        """Assert that table, cache and state equal the model, row by row."""
        for line in self.running():
            t = self.table
            row = line.row
            known = len(line.tokens)
            assert known == max(line.computed + 1, line.prompt_len)
            assert t.tokens[row, :known].tolist() == line.tokens
            assert t.tokens[row, known : known + len(line.forced)].tolist() == line.forced
            assert int(t.prompt_len[row]) == line.prompt_len
            assert int(t.computed[row]) == line.computed
            assert int(t.folded[row]) == line.folded
            counts = Counter(line.tokens[line.prompt_len :])
            assert t.sampling.counts[row].tolist() == [counts[i] for i in range(VOCAB)]
            assert int(t.sampling.seed[row]) == line.request.seed
            kept = min(line.computed, len(line.pages) * PAGE)
            slots = [line.slot_of(position) for position in range(kept)]
            assert self.written.view(-1)[slots].tolist() == line.tokens[:kept]
            done = line.tokens[: line.computed]
            assert self.state[line.slot].tolist() == [len(done), sum(done)]
        for name, now in null_line(self.table).items():
            assert torch.equal(now, self.null[name]), name


def null_line(table: RowTable) -> dict[str, Tensor]:
    """Return row 0 without the tokens and drafts that padding rows show and never commit."""
    names = ("computed", "folded", "prompt_len", "state_slots", "page_table")
    line = {name: getattr(table, name)[0].clone() for name in names}
    return line | {name: x[0].clone() for name, x in table.sampling.parts().items()}
