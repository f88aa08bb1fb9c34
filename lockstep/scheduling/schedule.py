"""What the scheduler hands to the runner, and what it gets back.

The runner executes a schedule in the order of its fields: moves out, moves in, admissions, grants,
then the decode step, then the prompt step.
"""

from dataclasses import dataclass, field

from lockstep.outputs import Logprob
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
    request: Request
    start: int
    length: int
    last: bool
    state_src: int = 0
    snapshot_slot: int = 0


@dataclass
class Swap:
    """A row moves to host memory, or from there into fresh pages and a fresh slot."""

    row: int
    request: Request
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
    """One iteration. With `decode` and `prompt` empty there is nothing to compute."""

    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    grants: list[PageGrant] = field(default_factory=list)
    prompt: list[PromptChunk] = field(default_factory=list)
    decode: list[tuple[int, Request]] = field(default_factory=list)


@dataclass
class RowResult:
    """What a row emitted in one step: 1 + num_accepted tokens.

    The last of them is -1 where the target had none; log-probabilities are those of the others.
    """

    tokens: list[int]
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
