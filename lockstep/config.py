"""What the user chose (EngineConfig) and what it implies (StepLimits, Plan). All are frozen."""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from lockstep import spec
from lockstep.errors import ConfigError
from lockstep.settings import (
    SIZES,
    TEXT_OF_PATH,
    TUPLE_OF_LIST,
    Settings,
    check_names,
    setting,
    size_in,
)
from lockstep.spec.config import EXAMPLE, SpeculativeConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
GraphMode = Literal["full", "piecewise", "none"]
DTYPES: tuple[str, ...] = get_args(Dtype)
GRAPH_MODES: tuple[str, ...] = get_args(GraphMode)
MAX_ROWS = 1024
"""Most requests that run at once: the largest number of rows that a GPU's steps are padded to."""
WINDOWS_PAST_END = 3
"""Windows of K + 1 tokens that a row may reach past max_model_len: one for each of two steps that
are in flight while the host does not know yet that the row has ended, one for the drafts behind."""

_ONE = "Choose one of them."


def _known_format(name: str) -> str:
    """A kv_cache_dtype; the formats need torch, which the command line's help does without."""
    from lockstep.kernels.formats.kv.table import check_kv_cache_dtype

    return name if name == "auto" else check_kv_cache_dtype(name)


def _format_names() -> str:
    from lockstep.kernels.formats.kv.table import kv_cache_dtypes

    return ", ".join(kv_cache_dtypes())


def _text_of_number(value: Any) -> Any:
    return str(value) if type(value) is int else value


ModelName = Annotated[str, Field(min_length=1), TEXT_OF_PATH]
KVCacheDtype = Annotated[str, AfterValidator(_known_format)]
SkippedLayer = Annotated[
    str, Field(pattern=r"^(first|last|0|[1-9]\d{0,3})$"), BeforeValidator(_text_of_number)
]
SkipLayers = Annotated[tuple[SkippedLayer, ...], Field(max_length=1024), TUPLE_OF_LIST]
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
RowBuckets = Annotated[tuple[Rows, ...], Field(min_length=1, max_length=MAX_ROWS), TUPLE_OF_LIST]


@dataclass(frozen=True)
class EngineConfig(Settings):
    """What the user chose, in vLLM's names where vLLM has one."""

    model: ModelName | None = setting(
        None,
        "model folder, GGUF file or hub id; the bundled model if left out",
        allowed="a folder, a GGUF file, a hub id, or None for the bundled model",
        remedy="Name one of them.",
    )
    dtype: Dtype = setting(
        "auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU", remedy=_ONE
    )
    quantization: str | None = setting(
        None,
        "weights are packed while they are loaded: fp8, int8 or int4",
        allowed="fp8, int8, int4, the format of a packed checkpoint, or None",
        remedy=_ONE,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto, cpu or cuda", remedy=_ONE)
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "auto, or dummy for random weights", remedy=_ONE
    )
    hf_overrides: dict[str, Any] | None = setting(
        None,
        "settings that replace those of config.json",
        allowed="a dict of config.json's settings",
        remedy="Write it as a dict, or leave it out.",
    )
    max_model_len: Annotated[int, Field(ge=2, le=1 << 24)] | None = setting(
        None, "most tokens of prompt and answer together"
    )
    max_num_seqs: Rows | None = setting(
        None,
        "most requests that run at once; left out: 16 on a CPU, on a GPU the most, up to 256, that "
        "memory has room for",
    )
    max_num_batched_tokens: Annotated[int, Field(ge=64, le=1 << 20)] | None = setting(
        None, "most prompt tokens in one step; left out: 2048, or fewer where a GPU lacks memory"
    )
    speculative_config: SpeculativeConfig | None = setting(
        None, f"drafting, e.g. {EXAMPLE}", allowed="None or a dict"
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "format of the KV cache; auto is the model's dtype, fp8 is fp8_e4m3",
        allowed=_format_names,
        remedy=_ONE,
    )
    kv_cache_dtype_skip_layers: SkipLayers = setting(
        (),
        "layers whose cache keeps the model's dtype, e.g. first,last,7",
        allowed="a list of first, last and numbers of layers that attend",
        remedy="Mend the list, or leave it out.",
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "dtype of the state of recurrent layers; auto is float32, bfloat16 halves it",
        remedy=_ONE,
    )
    cuda_graph_mode: GraphMode = setting(
        "full", "full, piecewise or none; a CPU has no graphs", remedy=_ONE
    )
    gpu_memory_utilization: Annotated[float, Field(ge=0.05, le=0.98)] = setting(
        0.9, "share of the GPU's memory to use"
    )
    kv_cache_memory_bytes: Annotated[int, Field(ge=1, le=1 << 50), size_in(1)] | None = setting(
        None,
        "bytes of the cache, e.g. 24G or 25.3e9, instead of measuring memory",
        allowed=f"bytes from 1 to {1 << 50}, such as {SIZES}",
        is_size=True,
    )
    num_gpu_blocks: Annotated[int, Field(ge=2, le=1 << 30)] | None = setting(
        None, "pages of KV cache, instead of measuring memory"
    )
    num_snapshots: Annotated[int, Field(ge=0, le=1 << 20)] | None = setting(
        None, "snapshots of recurrent state kept for prefix hits"
    )
    snapshot_every: Annotated[int, Field(ge=1, le=1 << 20)] | None = setting(
        None, "pages of a prompt between two snapshots; the architecture's own if left out"
    )
    enable_prefix_caching: bool = setting(
        True, "reuse the cache of common prompt prefixes", remedy=_ONE
    )
    kv_offloading_size: Annotated[float, Field(ge=0, le=1 << 20), size_in(1 << 30)] = setting(
        0.0,
        "GiB of host memory, or a size such as 64GB, for prefixes that the cache has no room for; "
        "0: they are dropped",
        allowed=f"numbers from 0 to {1 << 20}, in GiB, or sizes such as 24G or 24GB",
        is_size=True,
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "fcfs, or priority (lower runs sooner)", remedy=_ONE
    )
    skip_tokenizer_init: bool = setting(False, "token ids in, token ids out", remedy=_ONE)
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = setting(0, "seed of dummy weights")
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1)] = setting(
        1,
        "GPUs that share the model; 1 for now",
        allowed="1",
        remedy="Leave it out; a server for each GPU shares the load.",
    )
    row_buckets: RowBuckets | None = setting(
        None,
        "row counts that steps are padded to; chosen for the device if left out",
        allowed=f"a list of at most {MAX_ROWS} whole numbers from 1 to {MAX_ROWS}",
        remedy="Mend the list, or leave it out.",
    )
    steps_in_flight: Annotated[int, Field(ge=1, le=2)] | None = setting(
        None, "steps launched before the first is read: 2 on a GPU, 1 on a CPU"
    )

    def __post_init__(self) -> None:
        """Raises ConfigError where a setting is wrong, alone or together with another."""
        object.__setattr__(self, "speculative_config", spec.read(self.speculative_config))
        super().__post_init__()
        if self.num_gpu_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_gpu_blocks={self.num_gpu_blocks} is not allowed with kv_cache_memory_bytes="
                f"{self.kv_cache_memory_bytes}: both say how large the cache is. Leave one out."
            )
        drafting = self.speculative_config
        if drafting is None or drafting.synthetic_acceptance is None:
            return
        if self.load_format != "dummy":
            raise ConfigError(
                f"synthetic_acceptance={drafting.synthetic_acceptance} is not allowed with "
                f"load_format={self.load_format!r}: it replaces what the model would say. Allowed: "
                "load_format='dummy' (random weights). Leave it out, or choose dummy."
            )

    @classmethod
    def read(cls, **chosen: Any) -> "EngineConfig":
        """A config from keyword arguments. Raises ConfigError on an unknown name."""
        check_names(cls, chosen, "setting", "Remove or rename it.")
        return cls(**chosen)

    @property
    def num_drafts(self) -> int:
        """K: draft tokens per row and step."""
        drafting = self.speculative_config
        return drafting.num_speculative_tokens if drafting else 0


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """How large steps may be, and what they run on: known before any memory is counted.

    query_len: K + 1, the most tokens that a row brings to a generated step; page_size: tokens of a
    page; draft_lengths: numbers of drafts that a step may bring, ascending, one graph each and
    bucket; graph_mode: as in EngineConfig, none on a CPU; quantization: how the weights are packed,
    None where they are not.
    """

    model_path: Path
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int
    page_size: int
    row_buckets: tuple[int, ...]
    draft_lengths: tuple[int, ...] = (0,)
    graph_mode: str
    steps_in_flight: int
    numerics: str
    quantization: str | None = None

    @property
    def row_columns(self) -> int:
        """Columns of a page table: the pages that hold history_len tokens."""
        return -(-self.history_len // self.page_size)

    @property
    def history_len(self) -> int:
        """Tokens that a row of the table can hold: what it reaches past its end, and the token that
        comes with the last of these windows, included."""
        return self.max_model_len + WINDOWS_PAST_END * self.query_len + 1


@dataclass(frozen=True, kw_only=True)
class Plan(StepLimits):
    """What a config implies on this machine, for this model: made once, and never changed.

    page_bytes and slot_bytes: of all layers, the draft module's included; num_slots: the null slot,
    one for each row and the snapshots, 0 where no layer recurs; memory: bytes of a GPU by part,
    pages and state included; memory_notes: what the memory planner chose; snapshot_every: pages of
    a prompt between two of them; draft_vocab_size: tokens that a draft module may propose, 0
    without one; draft_head_bytes: its own copy of their rows of the head, 0 where it shares the
    whole one. host_pages: pages that host memory has room for.
    """

    num_pages: int
    page_bytes: int
    num_slots: int
    slot_bytes: int
    host_pages: int = 0
    snapshot_every: int = 1
    draft_vocab_size: int = 0
    draft_head_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    memory_notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Short hash of the numerics: the `system_fingerprint` of answers."""
        return f"ls-{sha256(self.numerics.encode()).hexdigest()[:12]}"

    @property
    def slot_host_pages(self) -> int:
        """Host pages that a snapshot takes."""
        return -(-self.slot_bytes // self.page_bytes) if self.num_slots else 0
