"""The floor of a step: the bytes and flops that it must move at least, and how long they take.

A model is walked as it was built, once: its weights are its parameters and buffers, what it keeps
between steps is what its layers state in cache_spec(). What comes of it, StepCosts, is plain data,
from which the floor of any step follows.

Counted: every weight once per pass; the KV of the context read, that of the step's tokens written;
recurrent state read and written once, and the lines of one window. Of a mixture, the experts that
are really read: tokens are taken to choose independently and evenly, as distinct_experts says; real
texts choose less evenly, and tokens of one row more alike. Activations are neglected, and
so are the flops that are not products with a weight (attention's: 3 % at a prompt of 8,192 tokens).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from lockstep.cache.specs import Law, Spec, is_cached, unit_bytes
from lockstep.layers.latent_attention import AbsorbedHeads
from lockstep.layers.linear import Embedding, Gemm, Head
from lockstep.layers.moe import ExpertWeight
from lockstep.layers.rotary import Rotary
from lockstep.spec import Passes, no_passes
from lockstep.worker.device_rates import H200, Rates
from lockstep.worker.memory import mixers

GATHERED = (Embedding, Rotary)
"""Layers that read one line of their table per token, not the table."""


@dataclass(frozen=True)
class Part:
    """One line of the table: what it moves and multiplies."""

    name: str
    bytes: int
    flops: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.name, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def memory_ms(self) -> float:
        """Time of its bytes on an H200."""
        return 1e3 * self.bytes / H200.memory

    @property
    def matrix_ms(self) -> float:
        """Time of its flops on an H200."""
        return 1e3 * self.flops / H200.matrix


@dataclass(frozen=True)
class Floor:
    """The parts of one pass, or of several alike."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        """All parts as one."""
        return sum(self.parts, Part("total", 0))

    @property
    def ms(self) -> float:
        """The least time on an H200."""
        total = self.total
        return 1e3 * H200.seconds(total.bytes, total.flops)


@dataclass(frozen=True)
class StepFloor:
    """A step of `rows` rows that bring `query_len` tokens each, behind `context` tokens: verify is
    the target's pass, drafts the draft module's passes (no parts where nothing is drafted with)."""

    rows: int
    query_len: int
    context: int
    verify: Floor
    drafts: Floor

    @property
    def ms(self) -> float:
        """The floor of the whole step, on an H200."""
        return self.verify.ms + self.drafts.ms


@dataclass(frozen=True)
class WeightCost:
    """Weights of one name that a pass reads as a whole. flops: of a column, which is a token, or
    where of_logits is set a row of logits."""

    name: str
    bytes: int
    flops: int = 0
    of_logits: bool = False

    def part(self, tokens: int, logits: int) -> Part:
        """What a pass of so many tokens and rows of logits moves and multiplies."""
        columns = logits if self.of_logits else tokens
        return Part(self.name, self._read(tokens), self.flops * columns)

    def _read(self, tokens: int) -> int:
        return self.bytes


@dataclass(frozen=True)
class GatheredCost(WeightCost):
    """Tables of so many lines, of which a token reads one."""

    lines: int = 1

    def _read(self, tokens: int) -> int:
        return self.bytes // self.lines * min(tokens, self.lines)


@dataclass(frozen=True)
class ExpertCost(WeightCost):
    """Linear maps of a mixture's experts, of which a token goes to top_k."""

    experts: int = 1
    top_k: int = 1

    def _read(self, tokens: int) -> int:
        read = distinct_experts(self.experts, self.top_k, tokens) / self.experts
        return round(self.bytes * read)


@dataclass(frozen=True)
class PassCosts:
    """What a pass over a module needs. specs: what its mixers keep; key_flops: of a token with each
    key of its context."""

    weights: tuple[WeightCost, ...]
    specs: tuple[Spec, ...]
    key_flops: int

    @classmethod
    def of(cls, root: nn.Module) -> "PassCosts":
        """Those of a module, by the outermost layers that have weights."""
        layers = mixers(root, None).values()
        return cls(
            tuple(_merged(_weights(root))),
            tuple(layer.cache_spec() for layer in layers),
            sum(int(getattr(layer, "key_flops", 0)) for layer in layers),
        )

    def parts(self, rows: int, tokens: int, logits: int, context: int) -> tuple[Part, ...]:
        """Of a pass of `tokens` tokens, evenly of `rows` rows with `context` tokens in the cache
        each, that makes `logits` rows of logits."""
        read = _summed(cost.part(tokens, logits) for cost in self.weights)
        return read + self._kept(rows, tokens, context)

    def _kept(self, rows: int, tokens: int, context: int) -> tuple[Part, ...]:
        """What the mixers keep between steps: KV read and written, state read and written."""
        each = tokens // rows
        seen = context // 2 if each == context else context  # of a prompt, half on average
        token = unit_bytes(self.specs, Law.PAGED, 1)
        moved = sum(spec.step_bytes(each) for spec in self.specs if spec.law is Law.STATE)
        parts = (
            Part("KV read", token * context * rows, self.key_flops * tokens * seen),
            Part("KV written", token * tokens),
            Part("state", 2 * moved * rows),
        )
        return tuple(part for part in parts if part.bytes)


@dataclass(frozen=True)
class StepCosts:
    """Those of a target and of its draft module, None where there is none. passes: of the module in
    a step, as lockstep.spec says."""

    target: PassCosts
    draft: PassCosts | None
    passes: Passes = no_passes

    @classmethod
    def of(cls, model: nn.Module, draft: nn.Module | None, passes: Passes) -> "StepCosts":
        """Those of a model and of what it drafts with, as they were built."""
        return cls(PassCosts.of(model), None if draft is None else PassCosts.of(draft), passes)

    def step(self, rows: int, drafts: int, context: int) -> StepFloor:
        """A generated step: `rows` rows with `context` tokens in the cache each, that bring so many
        drafts and make as many."""
        tokens = rows * (drafts + 1)
        verify = Floor(self.target.parts(rows, tokens, tokens, context))
        passes: list[Part] = []
        if self.draft is not None and drafts:
            for brought in self.passes(rows, tokens, drafts):
                passes += self.draft.parts(rows, brought, rows, context)
        return StepFloor(rows, drafts + 1, context, verify, Floor(_summed(passes)))

    def prompt(self, tokens: int) -> Floor:
        """One prompt of `tokens` tokens that starts with an empty cache.

        Its keys and values are written, and read at least once by the tokens behind them.
        """
        return Floor(self.target.parts(1, tokens, 1, tokens))


MANY = 1 << 20
"""Tokens of a context that show what one of them adds."""


@dataclass(frozen=True)
class _Line:
    """Bytes and flops of a pass as they grow with the tokens in the cache of all rows."""

    bytes: int
    flops: int
    token_bytes: float
    token_flops: float

    @classmethod
    def through(cls, empty: Part, full: Part, tokens: int) -> "_Line":
        """Through a pass with nothing in the cache and one with so many tokens."""
        more_bytes = (full.bytes - empty.bytes) / tokens
        more_flops = (full.flops - empty.flops) / tokens
        return cls(empty.bytes, empty.flops, more_bytes, more_flops)


class StepFloors:
    """The floors of an engine's steps on its device, quickly: for a server that has thousands."""

    def __init__(self, costs: StepCosts, rates: Rates) -> None:
        self.costs = costs
        self.rates = rates
        self._lines: dict[tuple[int, int], tuple[_Line, ...]] = {}

    def seconds(self, rows: int, drafts: int, context: int) -> float:
        """That of a step of `rows` rows with so many drafts each, and `context` tokens in the cache
        of all of them together."""
        kind = (rows, drafts)
        if kind not in self._lines:
            self._lines[kind] = self._made(rows, drafts)
        return sum(
            self.rates.seconds(
                line.bytes + line.token_bytes * context, line.flops + line.token_flops * context
            )
            for line in self._lines[kind]
        )

    def _made(self, rows: int, drafts: int) -> tuple[_Line, ...]:
        empty = self.costs.step(rows, drafts, 0)
        full = self.costs.step(rows, drafts, MANY)
        pairs = ((empty.verify, full.verify), (empty.drafts, full.drafts))
        return tuple(_Line.through(a.total, b.total, rows * MANY) for a, b in pairs)


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """The expected number of experts that `tokens` tokens go to, each to top_k of them, chosen
    evenly: an expert is missed by all of them with probability (1 - top_k / experts)^tokens."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _weights(root: nn.Module) -> Iterator[WeightCost]:
    """The cost of every weight below."""
    for label, module in _labelled(root):
        of_logits = isinstance(module, Head)
        if isinstance(module, Gemm):
            flops = 2 * prod(module.shape)
            yield WeightCost(label, module.stored.nbytes, flops, of_logits)
        elif isinstance(module, ExpertWeight):
            flops = 2 * prod(module.shape) // module.experts * module.top_k
            chosen = (module.experts, module.top_k)
            yield ExpertCost(label, module.stored.nbytes, flops, False, *chosen)
        else:
            for tensor in _own(module):
                yield _tensor(label, module, tensor, of_logits)


def _tensor(label: str, module: nn.Module, tensor: Tensor, of_logits: bool) -> WeightCost:
    if isinstance(module, GATHERED):
        return GatheredCost(label, tensor.nbytes, lines=tensor.shape[0])
    multiplied = tensor.dim() == 2 or isinstance(module, AbsorbedHeads)
    flops = 2 * tensor.numel() if multiplied else 0
    return WeightCost(label, tensor.nbytes, flops, of_logits)


def _merged(costs: Iterable[WeightCost]) -> Iterator[WeightCost]:
    """Those that differ in nothing but bytes and flops as one."""
    found: dict[WeightCost, WeightCost] = {}
    for cost in costs:
        kind = replace(cost, bytes=0, flops=0)
        so_far = found.get(kind, kind)
        found[kind] = replace(
            cost, bytes=so_far.bytes + cost.bytes, flops=so_far.flops + cost.flops
        )
    yield from found.values()


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _labelled(root: nn.Module, label: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module below, under the class name of the outermost layer that it is part of."""
    for child in root.children():
        layer = is_cached(child) or type(child).__module__.startswith("lockstep.layers")
        below = label or (type(child).__name__ if layer or _own(child) else "")
        yield below, child
        yield from _labelled(child, below)


def _summed(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts, added by name."""
    found: dict[str, Part] = {}
    for part in parts:
        found[part.name] = found[part.name] + part if part.name in found else part
    return tuple(found.values())
