"""What the scheduler hands to the runner, and what it gets back: plain data.

Rows are named by their number in the table. A whole request is handed over once, when it gets a
row; whoever executes schedules remembers what it needs of it. The fields of a schedule are executed
in their order: what is evicted is read, rows move out and in, admissions, grants, then the decode
step, what is fetched is written, then the prompt step.
"""

from dataclasses import dataclass, field

from lockstep.cache.host_tier import Moves
from lockstep.outputs import Logprob, TokenSource
from lockstep.scheduling.request import Request


@dataclass
class Admission:
    """A request gets a row. `start` tokens are cached; `state_src`: their snapshot, or 0."""

    row: int
    request: Request
    pages: list[int]
    state_slot: int
    start: int
    state_src: int


@dataclass
class PromptChunk:
    """Prompt tokens [start, start + length) of a row; `last`: they end the prompt.

    state_src: snapshot that the chunk begins from, 0: the row's own state (zero at start 0).
    snapshot_slot: where the state at the chunk's last grid point goes, 0: nowhere.
    """

    row: int
    start: int
    length: int
    last: bool
    state_src: int = 0
    snapshot_slot: int = 0


@dataclass
class Swap:
    """A row moves to host memory, or from there into fresh pages and a fresh slot."""

    row: int
    request_id: str
    pages: list[int]
    state_slot: int


@dataclass
class PageGrant:
    """More pages of a row, from this column of its page table on."""

    row: int
    column: int
    pages: list[int]


@dataclass
class Schedule:
    """One iteration. With `decode` and `prompt` empty there is nothing to compute.

    tick: its number, one more than that of the schedule before it.
    decode: the rows of the decode step; padded_rows: how many it has with its null rows.
    num_drafts: drafts that each of them brings to be verified, and that are made behind the step.
    drafts_ready: how many of these the step before has made for rows that decoded in it.
    evicted: pages and slots that go to host memory as they are before this schedule; fetched: those
    that come back, which its prompt step is the first to read.
    """

    tick: int
    evicted: Moves = field(default_factory=dict)
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    padded_rows: int = 0
    num_drafts: int = 0
    drafts_ready: int = 0
    fetched: Moves = field(default_factory=dict)
    prompt: list[PromptChunk] = field(default_factory=list)


@dataclass
class RowResult:
    """What a row emitted in one step: 1 + num_accepted tokens, none in the middle of a prompt.

    The last of them is -1 where the target had none; log-probabilities are those of the others.
    prompt_logprobs: of the tokens behind those of a prompt's chunk, where the request asks for
    them; None for a token whose logits were no numbers.
    """

    tokens: list[int]
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    @property
    def sources(self) -> list[TokenSource]:
        """How each of the tokens came."""
        accepted: list[TokenSource] = ["draft"] * self.num_accepted
        return [*accepted, "bonus" if self.num_drafted else "plain"]


@dataclass
class Results:
    """What came of a schedule: by row, every row that decoded or ended its prompt among them.

    decode_ms: how long the decode step took, where there was one.
    """

    rows: dict[int, RowResult] = field(default_factory=dict)
    decode_ms: float | None = None
