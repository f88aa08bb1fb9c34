"""Roofline of a step: minimum bytes and FLOPs, and the minimum time that follows.

A built model is walked once: its weights are its parameters and buffers, and its layers declare in
cache_spec() what they keep between steps. The result, StepCosts, is plain data from which the floor
of any step follows.

Counted: every weight once per pass; KV of the context read, KV of the step's tokens written;
recurrent state read and written once, and the history lines of the step's tokens. For MoE, the
experts that are read: tokens are assumed to choose independently and evenly (distinct_experts);
real texts choose less evenly, and tokens of one row more alike.

Not counted: activations, LoRA adapters (rows of the base model read none), and FLOPs other than
products with a weight (attention's: 3 % at a prompt of 8,192 tokens).

A tensor-parallel rank has the costs of its slices, and its exchanges with the other ranks,
which are added to the time: a layer waits for them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from lockstep.cache.specs import Spec, StorageKind, is_cached, unit_bytes
from lockstep.layers.exchange import Exchange
from lockstep.layers.latent_attention import AbsorbedHeads
from lockstep.layers.linear import Embedding, Gemm, Head
from lockstep.layers.lora import LoRA
from lockstep.layers.moe import ExpertWeight
from lockstep.layers.norm import AddRMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.spec import Passes, no_passes
from lockstep.worker.device_rates import H200, ExchangeRate, Rates
from lockstep.worker.memory import mixers

GATHERED = (Embedding, Rotary)
"""Layers that read one line of their table per token."""


@dataclass(frozen=True)
class Part:
    """Line of the roofline table: bytes moved and FLOPs."""

    name: str
    bytes: int
    flops: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.name, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def memory_ms(self) -> float:
        """Return the time of its bytes on an H200."""
        return 1e3 * self.bytes / H200.memory

    @property
    def matrix_ms(self) -> float:
        """Return the time of its FLOPs on an H200."""
        return 1e3 * self.flops / H200.matrix


@dataclass(frozen=True)
class Exchanged:
    """Exchanges of a rank with the others. bytes: that it receives."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Exchanged") -> "Exchanged":
        return Exchanged(self.count + other.count, self.bytes + other.bytes)

    def ms(self, rate: ExchangeRate) -> float:
        """Return their minimum time."""
        return 1e3 * rate.seconds(self.count, self.bytes)


@dataclass(frozen=True)
class Floor:
    """Parts and exchanges of one pass, or of several equal ones."""

    parts: tuple[Part, ...]
    exchanged: Exchanged = Exchanged()

    def __add__(self, other: "Floor") -> "Floor":
        return Floor(_summed(self.parts + other.parts), self.exchanged + other.exchanged)

    @property
    def total(self) -> Part:
        """Return the sum of all parts."""
        return sum(self.parts, Part("total", 0))

    @property
    def ms(self) -> float:
        """Return the minimum time on an H200."""
        return self.device_ms + self.exchanged.ms(H200.exchange)

    @property
    def device_ms(self) -> float:
        """Return the minimum time on an H200 without exchanges."""
        total = self.total
        return 1e3 * H200.seconds(total.bytes, total.flops)


@dataclass(frozen=True)
class StepFloor:
    """Floor of a step of `rows` rows with `query_len` tokens each after `context` cached tokens.

    verify: the target's pass. drafts: the draft module's passes, without parts where there is no
    module.
    """

    rows: int
    query_len: int
    context: int
    verify: Floor
    drafts: Floor

    @property
    def ms(self) -> float:
        """Return the floor of the whole step on an H200."""
        return self.verify.ms + self.drafts.ms

    @property
    def exchanged(self) -> Exchanged:
        """Return the exchanges of the whole step."""
        return self.verify.exchanged + self.drafts.exchanged


@dataclass(frozen=True)
class WeightCost:
    """Weights of one name that a pass reads as a whole.

    flops: per token, or per row of logits where of_logits is set.
    """

    name: str
    bytes: int
    flops: int = 0
    of_logits: bool = False

    def part(self, tokens: int, logits: int) -> Part:
        """Return bytes and FLOPs of a pass of `tokens` tokens and `logits` rows of logits."""
        columns = logits if self.of_logits else tokens
        return Part(self.name, self._read(tokens), self.flops * columns)

    def _read(self, tokens: int) -> int:
        return self.bytes


@dataclass(frozen=True)
class GatheredCost(WeightCost):
    """Table of `lines` lines, of which a token reads one."""

    lines: int = 1

    def _read(self, tokens: int) -> int:
        return self.bytes // self.lines * min(tokens, self.lines)


@dataclass(frozen=True)
class ExpertCost(WeightCost):
    """Linears of a mixture's experts, of which a token uses top_k."""

    experts: int = 1
    top_k: int = 1

    def _read(self, tokens: int) -> int:
        read = distinct_experts(self.experts, self.top_k, tokens) / self.experts
        return round(self.bytes * read)


@dataclass(frozen=True)
class ExchangeCost:
    """Exchange of a layer. token_bytes: bytes that a rank receives per token, or per row of logits
    where of_logits is set.
    """

    layer: str
    token_bytes: int
    of_logits: bool = False

    def exchanged(self, tokens: int, logits: int) -> Exchanged:
        """Return the exchange in a pass of `tokens` tokens and `logits` rows of logits."""
        return Exchanged(1, self.token_bytes * (logits if self.of_logits else tokens))


@dataclass(frozen=True)
class PassCosts:
    """Costs of a pass over a module. specs: storage of its mixers. key_flops: FLOPs per token and
    key of its context. exchanges: with other tensor-parallel ranks.
    """

    weights: tuple[WeightCost, ...]
    specs: tuple[Spec, ...]
    key_flops: int
    exchanges: tuple[ExchangeCost, ...] = ()

    @classmethod
    def of(cls, root: nn.Module) -> "PassCosts":
        """Return the costs of a module, by its outermost layers with weights."""
        layers = mixers(root, None).values()
        return cls(
            tuple(_merged(_weights(root))),
            tuple(layer.cache_spec() for layer in layers),
            sum(int(getattr(layer, "key_flops", 0)) for layer in layers),
            tuple(_exchanges(root)),
        )

    def floor(self, rows: int, tokens: int, logits: int, context: int) -> Floor:
        """Return the floor of a pass of `tokens` tokens.

        The tokens belong evenly to `rows` rows with `context` cached tokens each; `logits`: rows of
        logits.
        """
        read = _summed(cost.part(tokens, logits) for cost in self.weights)
        exchanged = (cost.exchanged(tokens, logits) for cost in self.exchanges)
        return Floor(read + self._kept(rows, tokens, context), sum(exchanged, Exchanged()))

    def _kept(self, rows: int, tokens: int, context: int) -> tuple[Part, ...]:
        """Return the parts of KV and state that mixers read and write."""
        query_len = tokens // rows
        seen = context // 2 if query_len == context else context  # of a prompt, half on average
        token = unit_bytes(self.specs, StorageKind.PAGED, 1)
        moved = sum(
            spec.step_bytes(query_len) for spec in self.specs if spec.kind is StorageKind.STATE
        )
        parts = (
            Part("KV read", token * context * rows, self.key_flops * tokens * seen),
            Part("KV written", token * tokens),
            Part("state", 2 * moved * rows),
        )
        return tuple(part for part in parts if part.bytes)


@dataclass(frozen=True)
class StepCosts:
    """Costs of a target and of its draft module, None without one. passes: see lockstep.spec."""

    target: PassCosts
    draft: PassCosts | None
    passes: Passes = no_passes

    @classmethod
    def of(cls, model: nn.Module, draft: nn.Module | None, passes: Passes) -> "StepCosts":
        """Return the costs of a built model and draft module."""
        return cls(PassCosts.of(model), None if draft is None else PassCosts.of(draft), passes)

    def step(self, rows: int, drafts: int, context: int) -> StepFloor:
        """Return the floor of a decode step.

        `rows` rows with `context` cached tokens each verify `drafts` drafts and propose as many.
        """
        tokens = rows * (drafts + 1)
        verify = self.target.floor(rows, tokens, tokens, context)
        proposed = Floor(())
        if self.draft is not None and drafts:
            for brought in self.passes(rows, tokens, drafts):
                proposed += self.draft.floor(rows, brought, rows, context)
        return StepFloor(rows, drafts + 1, context, verify, proposed)

    def prompt(self, tokens: int) -> Floor:
        """Return the floor of one prompt of `tokens` tokens with an empty cache.

        Its keys and values are written, and read at least once by later tokens.
        """
        return self.target.floor(1, tokens, 1, tokens)


MANY = 1 << 20
"""Context length from which the cost per cached token is computed."""


@dataclass(frozen=True)
class _Line:
    """Bytes and FLOPs of a pass as a line over the cached tokens of all rows. exchanged: does not
    depend on them.
    """

    bytes: int
    flops: int
    token_bytes: float
    token_flops: float
    exchanged: Exchanged

    @classmethod
    def through(cls, empty: Floor, full: Floor, tokens: int) -> "_Line":
        """Return the line through a pass with an empty cache and one with `tokens` cached
        tokens.
        """
        begin = empty.total
        end = full.total
        more_bytes = (end.bytes - begin.bytes) / tokens
        more_flops = (end.flops - begin.flops) / tokens
        return cls(begin.bytes, begin.flops, more_bytes, more_flops, empty.exchanged)

    def seconds(self, rates: Rates, context: int) -> float:
        """Return the minimum time with `context` cached tokens in total."""
        moved = self.bytes + self.token_bytes * context
        exchanged = rates.exchange.seconds(self.exchanged.count, self.exchanged.bytes)
        return rates.seconds(moved, self.flops + self.token_flops * context) + exchanged


class StepFloors:
    """Cached floors of an engine's steps, for a server that reports thousands."""

    def __init__(self, costs: StepCosts, rates: Rates) -> None:
        self.costs = costs
        self.rates = rates
        self._lines: dict[tuple[int, int], tuple[_Line, ...]] = {}

    def seconds(self, rows: int, drafts: int, context: int) -> float:
        """Return the floor of a step of `rows` rows, `drafts` drafts each, and `context` cached
        tokens in total.
        """
        kind = (rows, drafts)
        if kind not in self._lines:
            self._lines[kind] = self._made(rows, drafts)
        return sum(line.seconds(self.rates, context) for line in self._lines[kind])

    def _made(self, rows: int, drafts: int) -> tuple[_Line, ...]:
        empty = self.costs.step(rows, drafts, 0)
        full = self.costs.step(rows, drafts, MANY)
        pairs = ((empty.verify, full.verify), (empty.drafts, full.drafts))
        return tuple(_Line.through(a, b, rows * MANY) for a, b in pairs)


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """Return the expected number of experts that `tokens` tokens use, top_k each, chosen evenly.

    All tokens miss an expert with probability (1 - top_k / experts)^tokens.
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _weights(root: nn.Module) -> Iterator[WeightCost]:
    """Yield the cost of every weight of a module."""
    for label, module in _labelled(root):
        of_logits = isinstance(module, Head)
        if isinstance(module, Gemm):
            flops = 2 * prod(module.shape)
            yield WeightCost(label, module.stored.nbytes, flops, of_logits)
        elif isinstance(module, ExpertWeight):
            flops = 2 * prod(module.shape) // module.experts * module.top_k
            chosen = (module.experts, module.top_k)
            yield ExpertCost(label, module.stored.nbytes, flops, False, *chosen)
        elif not isinstance(module, LoRA):
            for tensor in _own(module):
                yield _tensor(label, module, tensor, of_logits)


def _tensor(label: str, module: nn.Module, tensor: Tensor, of_logits: bool) -> WeightCost:
    if isinstance(module, GATHERED):
        return GatheredCost(label, tensor.nbytes, lines=tensor.shape[0])
    multiplied = tensor.dim() == 2 or isinstance(module, AbsorbedHeads)
    flops = 2 * tensor.numel() if multiplied else 0
    return WeightCost(label, tensor.nbytes, flops, of_logits)


def _exchanges(root: nn.Module) -> Iterator[ExchangeCost]:
    """Yield the exchanges of a pass over a module."""
    first_norm = next((m for m in root.modules() if isinstance(m, AddRMSNorm)), None)
    for module in root.modules():
        if module is first_norm:
            continue  # there is no delta to gather before the first layer
        for child in module.children():
            if isinstance(child, Exchange):
                yield ExchangeCost(child.layer, child.token_bytes, isinstance(module, Head))


def _merged(costs: Iterable[WeightCost]) -> Iterator[WeightCost]:
    """Merge costs that differ in nothing but bytes and FLOPs."""
    merged: dict[WeightCost, WeightCost] = {}
    for cost in costs:
        kind = replace(cost, bytes=0, flops=0)
        so_far = merged.get(kind, kind)
        merged[kind] = replace(
            cost, bytes=so_far.bytes + cost.bytes, flops=so_far.flops + cost.flops
        )
    yield from merged.values()


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _labelled(root: nn.Module, label: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule with the class name of the outermost layer that contains it."""
    for child in root.children():
        layer = is_cached(child) or type(child).__module__.startswith("lockstep.layers")
        below = label or (type(child).__name__ if layer or _own(child) else "")
        yield below, child
        yield from _labelled(child, below)


def _summed(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Add parts by name."""
    sums: dict[str, Part] = {}
    for part in parts:
        sums[part.name] = sums[part.name] + part if part.name in sums else part
    return tuple(sums.values())
