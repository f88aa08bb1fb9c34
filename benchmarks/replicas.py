"""Simulate chats over replicas: where a router sends a turn decides what is cached there.

    python benchmarks/replicas.py
    python benchmarks/replicas.py --plot docs/images/replicas.svg  # needs matplotlib

Nothing is served. Replicas compute prompts and answers at the rates that were measured of
Qwen3.6-27B in bf16 on one H200. Such a model resumes a prefix only at a snapshot of its recurrent
state, so the cache of a replica is a number of snapshots: one at the end of each prompt, and one
after each system prompt. The answer of a turn is a part of the next prompt, and is computed again.
"""

import argparse
import heapq
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.step import PAGE_SIZE

PROMPT_TOKENS_PER_SECOND = 8192 / 0.705
"""benchmarks/results/prompts.json: seconds of a prompt of 8,192 tokens, bf16."""
STEP_SECONDS = ((1, 0.01327), (8, 0.01437), (64, 0.02046))
"""benchmarks/results/steps.json: (rows, seconds) of a step without drafts, bf16."""
FORCED_SECONDS = 0.000310
"""benchmarks/results/forced.json: seconds of a forced token, one row."""
CHUNK = 2048
"""Prompt tokens of an iteration."""
MAX_ROWS = 64
ROW_SECONDS = 0.02
"""Seconds that a decoding row counts in the load of a replica, about those of a step."""
TICK = 0.05
"""Seconds between two looks at the replicas."""


@dataclass(frozen=True)
class Workload:
    """Multi-turn chats.

    chats_per_second: new chats per replica. systems, system_tokens: system prompts and their
    length. turns: mean turns of a chat. user_tokens, answer_tokens: means. think_seconds: mean time
    between an answer and the next turn. snapshots: that a replica can keep. seconds: of the
    simulation; chats begin in all of it, and figures are of the requests after a fifth of it.
    """

    chats_per_second: float = 0.25
    systems: int = 8
    system_tokens: int = 2048
    turns: float = 6.0
    user_tokens: float = 400.0
    answer_tokens: float = 300.0
    think_seconds: float = 20.0
    snapshots: int = 128
    seconds: float = 400.0


@dataclass
class Chat:
    """Chat with its tokens so far. prompt_ends: length of each turn's prompt."""

    number: int
    system: int
    turns_left: int
    tokens: int
    prompt_ends: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Turn:
    """Request of one turn; times in seconds of the simulation.

    index: number of the turn in its chat. prompt, answer: their tokens. hit: prompt tokens that the
    replica has cached. work: seconds of the prompt that are not computed yet. produced: answer
    tokens so far. forced: answer tokens that the client has from a lost replica.
    """

    chat: Chat
    index: int
    arrival: float
    prompt: int
    answer: int
    hit: int = 0
    work: float = 0.0
    produced: float = 0.0
    forced: float = 0.0
    first_token: float | None = None
    lost_at: float | None = None


Snapshot = tuple[str, int, int]
"""Kind, chat or system prompt, and turn."""


class Replica:
    """Replica with a queue of prompts, rows that decode, and snapshots (least recently used)."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.snapshots: OrderedDict[Snapshot, None] = OrderedDict()
        self.waiting: deque[Turn] = deque()
        self.rows: list[Turn] = []
        self.clock = 0.0

    @property
    def load(self) -> float:
        """Return the seconds of queued prompts, and ROW_SECONDS for each row."""
        return sum(turn.work for turn in self.waiting) + ROW_SECONDS * len(self.rows)

    def hit(self, turn: Turn) -> int:
        """Return the tokens of the longest prefix that a snapshot here resumes."""
        chat = turn.chat
        for index in range(turn.index - 1, -1, -1):
            if ("chat", chat.number, index) in self.snapshots:
                return chat.prompt_ends[index] // PAGE_SIZE * PAGE_SIZE
        known = ("system", chat.system, 0) in self.snapshots
        return self.workload.system_tokens if known else 0

    def add(self, turn: Turn) -> None:
        """Queue a turn; what is cached is decided now, as by an engine that has room."""
        turn.hit = self.hit(turn)
        turn.work = prompt_seconds(turn) + turn.forced * FORCED_SECONDS
        self.waiting.append(turn)
        self._keep(("system", turn.chat.system, 0))
        for index in range(turn.index):
            if ("chat", turn.chat.number, index) in self.snapshots:
                self._keep(("chat", turn.chat.number, index))
        self._keep(("chat", turn.chat.number, turn.index))

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshots[snapshot] = None
        self.snapshots.move_to_end(snapshot)
        while len(self.snapshots) > self.workload.snapshots:
            self.snapshots.popitem(last=False)

    def advance(self, now: float) -> list[Turn]:
        """Compute until `now`, and return the turns that ended.

        An iteration is a decode step of all rows and, where prompts wait, a chunk of the first one.
        """
        ended: list[Turn] = []
        while self.clock < now and (self.waiting or self.rows):
            seconds = step_seconds(len(self.rows)) if self.rows else 0.0
            steps = 1
            if self.waiting and len(self.rows) < MAX_ROWS:
                turn = self.waiting[0]
                chunk = min(turn.work, CHUNK / PROMPT_TOKENS_PER_SECOND)
                turn.work -= chunk
                seconds += chunk
            else:
                remaining = min(turn.answer - turn.produced for turn in self.rows)
                steps = max(1, int(min(remaining, (now - self.clock) / seconds)))
                seconds *= steps
            self.clock += seconds
            for row in self.rows:
                row.produced += steps
            if self.waiting and self.waiting[0].work <= 1e-9 and len(self.rows) < MAX_ROWS:
                turn = self.waiting.popleft()
                turn.first_token = turn.first_token or self.clock
                turn.produced = max(turn.produced, turn.forced, 1.0)
                self.rows.append(turn)
            ended += [row for row in self.rows if row.produced >= row.answer]
            self.rows = [row for row in self.rows if row.produced < row.answer]
        self.clock = max(self.clock, now)
        return ended


def step_seconds(rows: int) -> float:
    """Return the seconds of a decode step, between the measured numbers of rows."""
    for (low, first), (high, second) in zip(STEP_SECONDS, STEP_SECONDS[1:], strict=False):
        if rows <= high:
            return first + (second - first) * max(rows - low, 0) / (high - low)
    return STEP_SECONDS[-1][1] * rows / STEP_SECONDS[-1][0]


Policy = Callable[[Sequence[Replica], Turn, int], int]
"""Function that returns the index of the replica for a turn. Its last argument numbers the turns.
"""


def round_robin(replicas: Sequence[Replica], turn: Turn, number: int) -> int:
    """Choose the replicas one after the other."""
    return number % len(replicas)


def least_load(replicas: Sequence[Replica], turn: Turn, number: int) -> int:
    """Choose the replica with the least work."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].load, (i + number) % len(replicas)))


def prefix_affinity(replicas: Sequence[Replica], turn: Turn, number: int) -> int:
    """Choose the replica where the first token comes soonest, by its queue and its cached prefixes.

    Its queue is known from metrics, its cache from KV events.
    """

    def wait(index: int) -> tuple[float, int]:
        replica = replicas[index]
        missing = (turn.prompt - replica.hit(turn)) / PROMPT_TOKENS_PER_SECOND
        return replica.load + missing, (index + number) % len(replicas)

    return min(range(len(replicas)), key=wait)


POLICIES: dict[str, Policy] = {
    "prefix affinity": prefix_affinity,
    "least load": least_load,
    "round robin": round_robin,
}


@dataclass(frozen=True)
class Outcome:
    """Figures of a run.

    hit_rate: share of prompt tokens that were cached. ttft: seconds to the first token, sorted.
    pauses: seconds until the next token of streams whose replica was lost, sorted. redecoded: those
    pauses if each token of the answer were decoded again.
    """

    hit_rate: float
    ttft: list[float]
    pauses: list[float]
    redecoded: list[float]
    num_requests: int

    def percentile(self, share: float) -> float:
        """Return a percentile of the seconds to the first token."""
        return self.ttft[min(int(share * len(self.ttft)), len(self.ttft) - 1)]


def simulate(
    num_replicas: int, policy: Policy, workload: Workload, seed: int = 0, lose_at: float = 0.0
) -> Outcome:
    """Return the figures of a run. lose_at: a replica is lost at that time; 0 for never."""
    rng = random.Random(seed)
    replicas = [Replica(workload) for _ in range(num_replicas)]
    arrivals: list[tuple[float, int, Turn]] = []
    chats = 0
    at = 0.0
    while True:
        at += rng.expovariate(workload.chats_per_second * num_replicas)
        if at > workload.seconds:
            break
        turns = 1 + int(rng.expovariate(1 / max(workload.turns - 1, 1e-9)))
        chat = Chat(chats, rng.randrange(workload.systems), turns, workload.system_tokens)
        heapq.heappush(arrivals, (at, chats, next_turn(chat, at, workload, rng)))
        chats += 1
    order = chats
    sent = 0
    prompt = 0
    cached = 0
    ended: list[Turn] = []
    moved: list[Turn] = []
    now = 0.0
    while arrivals or any(one.waiting or one.rows for one in replicas):
        now += TICK
        if lose_at and now >= lose_at and not moved:
            lost = replicas.pop(0)
            moved = [*lost.rows, *lost.waiting]
            for turn in moved:
                turn.lost_at = now
                turn.forced = turn.produced
                replicas[policy(replicas, turn, sent)].add(turn)
                sent += 1
        while arrivals and arrivals[0][0] <= now:
            _, _, turn = heapq.heappop(arrivals)
            replicas[policy(replicas, turn, sent)].add(turn)
            sent += 1
            if turn.arrival > workload.seconds / 5:
                prompt += turn.prompt
                cached += turn.hit
        for replica in replicas:
            for turn in replica.advance(now):
                ended.append(turn)
                chat = turn.chat
                chat.tokens += turn.answer
                if chat.turns_left:
                    begin = now + rng.expovariate(1 / workload.think_seconds)
                    heapq.heappush(arrivals, (begin, order, next_turn(chat, begin, workload, rng)))
                    order += 1
    counted = [turn for turn in ended if turn.arrival > workload.seconds / 5]
    ttft = sorted((turn.first_token or now) - turn.arrival for turn in counted)
    streams = [turn for turn in moved if turn.forced]
    return Outcome(
        cached / max(prompt, 1),
        ttft,
        sorted(prompt_seconds(turn) + turn.forced * FORCED_SECONDS for turn in streams),
        sorted(prompt_seconds(turn) + turn.forced * step_seconds(8) for turn in streams),
        len(ended),
    )


def prompt_seconds(turn: Turn) -> float:
    """Return the seconds of the uncached part of a turn's prompt, when it runs alone."""
    return (turn.prompt - turn.hit) / PROMPT_TOKENS_PER_SECOND


def next_turn(chat: Chat, at: float, workload: Workload, rng: random.Random) -> Turn:
    """Return the next turn of a chat, whose prompt grows by what the user writes."""
    chat.turns_left -= 1
    chat.tokens += 1 + int(rng.expovariate(1 / workload.user_tokens))
    chat.prompt_ends.append(chat.tokens)
    answer = 1 + int(rng.expovariate(1 / workload.answer_tokens))
    return Turn(chat, len(chat.prompt_ends) - 1, at, chat.tokens, answer)


def table(sizes: Sequence[int], workload: Workload) -> dict[str, dict[int, Outcome]]:
    """Return policy -> replicas -> figures, and print them."""
    results: dict[str, dict[int, Outcome]] = {}
    print(
        f"{'policy':16} {'replicas':>8} {'hit rate':>9} {'TTFT p50':>9} {'p95':>8} {'requests':>9}"
    )
    for name, policy in POLICIES.items():
        for size in sizes:
            outcome = simulate(size, policy, workload)
            results.setdefault(name, {})[size] = outcome
            figures = f"{outcome.hit_rate:9.3f} {outcome.percentile(0.5):7.2f} s"
            print(
                f"{name:16} {size:8} {figures} {outcome.percentile(0.95):6.2f} s "
                f"{outcome.num_requests:9}",
                flush=True,
            )
    return results


def plot(results: dict[str, dict[int, Outcome]], path: Path) -> None:
    """Write the plot of hit rates and times to the first token."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # The same file for the same figures, with text as text.
    rcParams.update({"svg.hashsalt": "lockstep", "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="#fcfcfa")
    rates, waits = figure.subplots(1, 2)
    for (name, by_size), color in zip(
        results.items(), ("#3b6ea5", "#c98a2b", "#9aa0a6"), strict=True
    ):
        sizes = list(by_size)
        rates.plot(sizes, [by_size[size].hit_rate for size in sizes], "o-", color=color, label=name)
        p95 = [by_size[size].percentile(0.95) for size in sizes]
        waits.plot(sizes, p95, "o-", color=color, label=name)
    rates.set(ylabel="share of prompt tokens cached", ylim=(0, 1))
    waits.set(ylabel="seconds to the first token, p95")
    waits.set_ylim(bottom=0)
    for axes in (rates, waits):
        axes.set(xlabel="replicas", xscale="log", facecolor="#fcfcfa")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def main() -> None:
    """Print the tables and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="1,2,4,8,16,32,64", help="numbers of replicas")
    parser.add_argument("--chats-per-second", type=float, default=Workload.chats_per_second)
    parser.add_argument("--plot", type=Path, help="SVG to write")
    options = parser.parse_args()
    workload = Workload(chats_per_second=options.chats_per_second)
    sizes = [int(size) for size in options.sizes.split(",")]
    results = table(sizes, workload)
    if options.plot is not None:
        plot(results, options.plot)
    outcome = simulate(8, prefix_affinity, workload, lose_at=workload.seconds / 2)
    if outcome.pauses:
        print(f"\none of 8 replicas lost: {len(outcome.pauses)} streams moved")
        for name, values in (
            ("forced continuation", outcome.pauses),
            ("decoded again", outcome.redecoded),
        ):
            print(f"{name:20} median {statistics.median(values):.2f} s, maximum {values[-1]:.2f} s")


if __name__ == "__main__":
    main()
