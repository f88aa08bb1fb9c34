"""What the user chose (EngineConfig) and what it implies (Plan). Both are frozen."""

from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, choice_error

DTYPES = ("auto", "float32", "bfloat16", "float16")
GRAPH_MODES = ("full", "piecewise", "none")
MAX_DRAFTS = 7
MAX_LOOKUP = 16
MAX_ROWS = 1024
HEAD_GRAIN = 64
"""A reduced draft head has a multiple of this many tokens."""
EXAMPLE = '{"method": "mtp", "num_speculative_tokens": 3}'


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether the value lies in the range, and is whole where the range's ends are."""
    kinds = int if isinstance(low, int) else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def _check_number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    if not _is_number(value, low, high):
        kind = "whole numbers" if isinstance(low, int) else "numbers"
        raise choice_error(ConfigError, name, value, f"{kind} from {low} to {high}", remedy)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made, in vLLM's keys. `method`: a name in lockstep.spec.DRAFTERS.

    draft_vocab_size: tokens that a draft module may propose, the most frequent ones: "full", a
    multiple of 64, or "auto", 32,768 where the model knows more than 65,536.
    synthetic_acceptance: with random weights only, the probability with which a draft behind
    accepted ones is accepted, instead of comparing it with the target's token.
    adaptive: whether each step brings as many drafts, up to num_speculative_tokens, as pay at the
    running acceptance.
    """

    method: str
    num_speculative_tokens: int = 3
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    draft_vocab_size: int | str = "auto"
    synthetic_acceptance: float | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            remedy = "Name one of lockstep.spec.DRAFTERS."
            raise choice_error(
                ConfigError, "method", self.method, "a drafter's name, e.g. mtp", remedy
            )
        k, low, high = self.num_speculative_tokens, self.prompt_lookup_min, self.prompt_lookup_max
        leave = "Choose K in that range, or leave speculative_config out to draft nothing."
        _check_number("num_speculative_tokens", k, 1, MAX_DRAFTS, leave)
        _check_number("prompt_lookup_max", high, 1, MAX_LOOKUP, "Choose the longest n-gram anew.")
        remedy = "Choose it no larger than prompt_lookup_max."
        _check_number("prompt_lookup_min", low, 1, high, remedy)
        self._check_draft_vocab_size()
        if not isinstance(self.adaptive, bool):
            remedy = "Choose true, or false for the same number of drafts in every step."
            allowed = "true, false"
            raise choice_error(ConfigError, "adaptive", self.adaptive, allowed, remedy)
        if self.synthetic_acceptance is not None:
            remedy = "Choose a probability, or leave it out to verify drafts."
            _check_number("synthetic_acceptance", self.synthetic_acceptance, 0.0, 1.0, remedy)

    @property
    def synthetic_length(self) -> float | None:
        """The mean acceptance length that synthetic_acceptance implies with K drafts in a step."""
        p = self.synthetic_acceptance
        return None if p is None else sum(p**i for i in range(self.num_speculative_tokens + 1))

    def _check_draft_vocab_size(self) -> None:
        size = self.draft_vocab_size
        whole = _is_number(size, HEAD_GRAIN, 1 << 24) and int(size) % HEAD_GRAIN == 0
        if size not in ("auto", "full") and not whole:
            allowed = f"auto, full, or multiples of {HEAD_GRAIN} from {HEAD_GRAIN}"
            remedy = "Choose one of them, or leave it out."
            raise choice_error(ConfigError, "draft_vocab_size", size, allowed, remedy)

    @classmethod
    def read(cls, value: "dict[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig | None":
        """A config from vLLM's dict. Raises ConfigError on an unknown key or a missing method."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, dict):
            allowed = f"None or a dict, e.g. {EXAMPLE}"
            raise choice_error(
                ConfigError, "speculative_config", value, allowed, "Write it as a dict."
            )
        known = [f.name for f in fields(cls)]
        for key in value:
            if key not in known:
                raise choice_error(
                    ConfigError,
                    "speculative_config key",
                    key,
                    ", ".join(known),
                    "Remove or rename the key.",
                )
        if "method" not in value:
            raise ConfigError('speculative_config has no "method"; name a drafter, e.g. "mtp".')
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """What the user chose, in vLLM's names where vLLM has one."""

    model: str | None = _option(None, "model folder or hub id; the bundled model if left out")
    dtype: str = _option("auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU")
    device: str = _option("auto", "auto, cpu or cuda")
    load_format: str = _option("auto", "auto, or dummy for random weights")
    max_model_len: int | None = _option(None, "most tokens of prompt and answer together")
    max_num_seqs: int = _option(16, "most requests that run at once")
    max_num_batched_tokens: int = _option(2048, "most prompt tokens in one step")
    speculative_config: SpeculativeConfig | None = _option(
        None, 'drafting, e.g. {"method": "mtp", "num_speculative_tokens": 3}'
    )
    kv_cache_dtype: str = _option("auto", "format of the KV cache; auto is the model's dtype")
    cuda_graph_mode: str = _option("full", "full, piecewise or none; a CPU has no graphs")
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory to use")
    num_gpu_blocks: int | None = _option(None, "pages of KV cache, instead of measuring memory")
    num_snapshots: int | None = _option(None, "snapshots of recurrent state kept for prefix hits")
    enable_prefix_caching: bool = _option(True, "reuse the cache of common prompt prefixes")
    scheduling_policy: str = _option("fcfs", "fcfs, or priority (lower runs sooner)")
    skip_tokenizer_init: bool = _option(False, "token ids in, token ids out")
    seed: int = _option(0, "seed of dummy weights")
    tensor_parallel_size: int = _option(1, "GPUs that share the model; 1 for now")
    row_buckets: tuple[int, ...] | None = _option(
        None, "row counts that steps are padded to; chosen for the device if left out"
    )
    steps_in_flight: int | None = _option(
        None, "steps launched before the first is read: 2 on a GPU, 1 on a CPU"
    )

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "speculative_config", SpeculativeConfig.read(self.speculative_config)
        )
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", str(self.model))
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            allowed = "a folder, a hub id, or None for the bundled model"
            raise choice_error(ConfigError, "model", self.model, allowed, "Name one of them.")
        self._check_choices()
        self._check_synthetic()
        self._check_numbers()
        self._check_buckets()

    def _check_choices(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("device", ("auto", "cpu", "cuda")),
            ("load_format", ("auto", "dummy")),
            ("kv_cache_dtype", ("auto",)),
            ("cuda_graph_mode", GRAPH_MODES),
            ("scheduling_policy", ("fcfs", "priority")),
            ("tensor_parallel_size", (1,)),
            ("enable_prefix_caching", (True, False)),
            ("skip_tokenizer_init", (True, False)),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(a) and value == a for a in allowed):
                known = ", ".join(map(str, allowed))
                raise choice_error(ConfigError, name, value, known, "Choose one of them.")

    def _check_synthetic(self) -> None:
        spec = self.speculative_config
        if spec and spec.synthetic_acceptance is not None and self.load_format != "dummy":
            raise ConfigError(
                f"synthetic_acceptance={spec.synthetic_acceptance} is not allowed with "
                f"load_format={self.load_format!r}: it replaces what the model would say. Allowed: "
                "load_format='dummy' (random weights). Leave it out, or choose dummy."
            )

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("max_num_seqs", 1, MAX_ROWS),
            ("max_num_batched_tokens", 64, 1 << 20),
            ("max_model_len", 2, 1 << 24),
            ("num_gpu_blocks", 2, 1 << 30),
            ("num_snapshots", 0, 1 << 20),
            ("steps_in_flight", 1, 2),
            ("gpu_memory_utilization", 0.05, 0.98),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if value is not None or self.__dataclass_fields__[name].default is not None:
                _check_number(name, value, low, high, "Choose a value in that range.")

    def _check_buckets(self) -> None:
        buckets = self.row_buckets
        if buckets is None:
            return
        listed = isinstance(buckets, (tuple, list)) and 0 < len(buckets) <= MAX_ROWS
        if not listed or not all(_is_number(b, 1, MAX_ROWS) for b in buckets):
            allowed = f"a list of at most {MAX_ROWS} whole numbers from 1 to {MAX_ROWS}"
            remedy = "Mend the list, or leave it out."
            raise choice_error(ConfigError, "row_buckets", buckets, allowed, remedy)
        object.__setattr__(self, "row_buckets", tuple(buckets))

    @classmethod
    def read(cls, **chosen: Any) -> "EngineConfig":
        """A config from keyword arguments. Raises ConfigError on an unknown name."""
        known = [f.name for f in fields(cls)]
        for name in chosen:
            if name not in known:
                raise choice_error(
                    ConfigError, "setting", name, ", ".join(known), "Remove or rename it."
                )
        return cls(**chosen)

    @property
    def num_drafts(self) -> int:
        """K: draft tokens per row and step."""
        spec = self.speculative_config
        return spec.num_speculative_tokens if spec else 0


@dataclass(frozen=True)
class Plan:
    """What a config implies on this machine, for this model: fixed before anything is allocated.

    draft_lengths: numbers of drafts that a step may bring, ascending, one graph each and bucket;
    draft_vocab_size: tokens that a draft module may propose, 0 without one; draft_head_bytes: its
    own copy of their rows of the head, 0 where it shares the whole one.
    """

    model_path: Path
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int
    page_size: int
    num_pages: int
    page_bytes: int
    num_slots: int
    slot_bytes: int
    row_buckets: tuple[int, ...]
    graph_mode: str
    steps_in_flight: int
    numerics: str
    draft_lengths: tuple[int, ...] = (0,)
    draft_vocab_size: int = 0
    draft_head_bytes: int = 0

    @property
    def row_columns(self) -> int:
        """Columns of a page table: pages for max_model_len tokens and two windows of drafts."""
        return -(-self.history_len // self.page_size)

    @property
    def history_len(self) -> int:
        """Tokens that a row of the table can hold, drafts past the end included."""
        return self.max_model_len + 3 * self.query_len + 1
