"""Messages between the scheduler and the workers: a schedule and its results, as plain data.

A schedule pickles, so that every rank of a model can receive the same one. Rows are named by their
number in the row table. A worker receives the data of a request once, in its `Admission`, and keeps
what it needs. Workers execute the fields of a schedule in their order: they drop ended requests,
copy evicted pages to the host, move rows out and in, admit rows, grant pages, run the decode step
and the forced step, copy fetched pages to the device and run the prompt step. The decode step may
share the prompt step's forward pass; it runs after the forced step then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.cache.host_tier import Moves
from lockstep.outputs import Logprob, TokenSource
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request


@dataclass(frozen=True)
class RowSpec:
    """Data of a request that a worker needs while the request has a row.

    eos_token_ids: tokens that min_tokens bans. speculate: verify drafts of this row.
    is_constrained: a grammar masks the tokens of this row. adapter: name of its adapter, "" for
    the base model.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    speculate: bool = True
    is_constrained: bool = False
    adapter: str = ""

    @classmethod
    def of(cls, request: Request) -> "RowSpec":
        """Return the data of a request as it is now."""
        return cls(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params.without_structured_outputs(),
            eos_token_ids=request.eos_token_ids,
            seed=request.seed,
            speculate=request.speculate,
            is_constrained=request.is_constrained,
            adapter=request.adapter,
        )


@dataclass
class Admission:
    """Assignment of a row to a request whose first `start` tokens are cached.

    pages: pages of the row's first tokens, in order. state_slot: slot of the row's recurrent state,
    0 without one. state_src: slot of the snapshot that the row resumes from; 0 for none.
    """

    row: int
    spec: RowSpec
    pages: list[int]
    state_slot: int
    start: int
    state_src: int


@dataclass
class PromptChunk:
    """Prompt tokens [start, start + length) of a row.

    last: the chunk ends the prompt. state_src: slot of the snapshot that the chunk resumes from; 0
    for the row's own state, which is zero at start 0. snapshot_slot: slot for the state at the
    chunk's last multiple of the grid; 0 for no snapshot.
    """

    row: int
    start: int
    length: int
    last: bool
    state_src: int = 0
    snapshot_slot: int = 0


@dataclass
class Swap:
    """Move of a preempted row to host memory, or back to the device.

    pages, state_slot: those that the row leaves, or the fresh ones that it comes back to.
    """

    row: int
    request_id: str
    pages: list[int]
    state_slot: int


@dataclass
class PageGrant:
    """Pages that extend a row's page table, from one column on."""

    row: int
    column: int
    pages: list[int]


@dataclass(frozen=True)
class MaskedRow:
    """Row of a step whose next tokens a grammar masks.

    num_known: tokens of prompt and answer that the grammar has accepted.
    """

    row: int
    request_id: str
    num_known: int


@dataclass
class Schedule:
    """Work of one iteration. Without `decode`, `forced` and `prompt` there is nothing to compute.

    tick: number of the schedule, counted from 1.
    dropped: requests that ended in host memory; their saved rows are freed.
    answers: complete answers that drafters may learn from.
    evicted: pages and slots to copy to the host before anything of this schedule writes them.
    masked: rows of all steps that need masks of a grammar.
    decode: rows of the decode step, padded with null rows to `padded_rows`.
    num_drafts: drafts per row to verify in the decode step, and to propose after it.
    drafts_ready: drafts per row that the previous decode step has proposed.
    forced: rows of the forced step, which commits forced tokens of each.
    forced_len: maximum tokens of a row in the forced step.
    fetched: pages and slots to copy to the device; only the prompt step reads them.
    """

    tick: int
    dropped: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    evicted: Moves = field(default_factory=dict)
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    masked: list[MaskedRow] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    padded_rows: int = 0
    num_drafts: int = 0
    drafts_ready: int = 0
    forced: list[int] = field(default_factory=list)
    forced_len: int = 0
    fetched: Moves = field(default_factory=dict)
    prompt: list[PromptChunk] = field(default_factory=list)

    @property
    def has_steps(self) -> bool:
        """Return whether the device gets work whose end the engine waits for."""
        return bool(self.computes or self.swap_out)

    @property
    def computes(self) -> bool:
        """Return whether the device gets a step."""
        return bool(self.decode or self.forced or self.prompt)

    @property
    def is_empty(self) -> bool:
        """Return whether workers have nothing to do at all."""
        return not (self.has_steps or self.dropped or self.answers)


@dataclass
class RowResult:
    """Tokens that one row emitted in one step: 1 + num_accepted, or none inside a prompt.

    The last token is -1 where the target had no token to emit; it has no log-probabilities.
    prompt_logprobs: one entry for each token after the positions of a prompt chunk, where the
    request wants them; None for a token whose logits were not finite. mismatch: (index among
    tokens, the target's token) of the first forced token that the target would not have emitted.
    """

    tokens: list[int]
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    mismatch: tuple[int, int] | None = None

    @property
    def sources(self) -> list[TokenSource]:
        """Source of each token: accepted drafts, then the target's own token."""
        accepted: list[TokenSource] = ["draft"] * self.num_accepted
        return [*accepted, "bonus" if self.num_drafted else "plain"]


@dataclass
class Results:
    """Results of a schedule by row, for every row of its steps.

    decode_ms: time of the decode step in ms, None without one, or if it shared a forward pass with
    a prompt step.
    """

    rows: dict[int, RowResult] = field(default_factory=dict)
    decode_ms: float | None = None
