"""Configuration of the engine: EngineConfig from the user; StepLimits and Plan derived from it.

All three are frozen.
"""

import json
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from lockstep import spec
from lockstep.cache.events_config import EXAMPLE as EVENTS_EXAMPLE
from lockstep.cache.events_config import KVEventsConfig, read_kv_events
from lockstep.errors import ConfigError
from lockstep.scheduling.chunks import FORCED_TOKENS, FORCED_WINDOWS
from lockstep.settings import (
    LIST_TO_TUPLE,
    PATH_TO_TEXT,
    SIZES,
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
"""Maximum rows of the row table: the largest row count that GPU steps are padded to."""
MAX_RANKS = 64
"""Maximum tensor-parallel ranks, over all nodes."""
WINDOWS_PAST_END = 3
"""Windows of K + 1 tokens that a row may reach past max_model_len: one for each of two steps in
flight while the host does not know that the row has ended, and one for the drafts after them."""

MAX_ADAPTERS = 64
"""Maximum LoRA adapters of an engine: each takes memory next to every layer that it changes."""
_CHOOSE_ONE = "Choose one of them."


def _known_format(name: str) -> str:
    """Return the name of a known kv_cache_dtype; imports torch, which --help must not need."""
    # Imported here: the formats import torch, which takes a second.
    from lockstep.kernels.formats.kv.table import check_kv_cache_dtype

    return name if name == "auto" else check_kv_cache_dtype(name)


def _format_names() -> str:
    """Return the names of the KV formats, for messages."""
    from lockstep.kernels.formats.kv.table import kv_cache_dtypes

    return ", ".join(kv_cache_dtypes())


def _number_to_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def adapter_paths(value: Any) -> Any:
    """Return the folder of each adapter by its name, from the forms of vLLM's --lora-modules.

    They are NAME=PATH and {"name": NAME, "path": PATH}, one or a list. Anything else is returned
    unchanged, for the type to refuse.
    """
    if isinstance(value, str) or (isinstance(value, dict) and "name" in value and "path" in value):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    pairs = [_adapter_path(entry) for entry in value]
    paths = dict(pair for pair in pairs if pair is not None)
    return paths if len(paths) == len(pairs) else value


def _adapter_path(entry: Any) -> tuple[Any, Any] | None:
    """Return (name, folder) of one adapter; None where the entry has another form."""
    if isinstance(entry, str) and entry.startswith("{"):
        try:
            entry = json.loads(entry)
        except (ValueError, RecursionError):
            return None
    if isinstance(entry, str):
        name, separator, path = entry.partition("=")
        return (name, path) if separator else None
    known = {"name", "path", "base_model_name"}
    if not isinstance(entry, dict) or not {"name", "path"} <= set(entry) <= known:
        return None
    return (entry["name"], entry["path"]) if isinstance(entry["name"], str) else None


def backends_by_op(value: Any) -> Any:
    """Return the backend of each op by its name, from OP=BACKEND or a list of such texts.

    Anything else is returned unchanged, for the type to refuse.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple):
        return value
    pairs = [entry.partition("=") for entry in value if isinstance(entry, str)]
    backends = {op: backend for op, equals, backend in pairs if equals}
    return backends if len(backends) == len(value) else value


AdapterName = Annotated[str, Field(min_length=1, max_length=256)]
AdapterPaths = Annotated[
    dict[AdapterName, Annotated[str, Field(min_length=1, max_length=4096), PATH_TO_TEXT]],
    Field(max_length=MAX_ADAPTERS),
    BeforeValidator(adapter_paths),
]
KernelName = Annotated[str, Field(min_length=1, max_length=64)]
Kernels = Annotated[
    dict[KernelName, KernelName], Field(max_length=64), BeforeValidator(backends_by_op)
]
ModelName = Annotated[str, Field(min_length=1), PATH_TO_TEXT]
KVCacheDtype = Annotated[str, AfterValidator(_known_format)]
SkippedLayer = Annotated[
    str, Field(pattern=r"^(first|last|0|[1-9]\d{0,3})$"), BeforeValidator(_number_to_text)
]
SkipLayers = Annotated[tuple[SkippedLayer, ...], Field(max_length=1024), LIST_TO_TUPLE]
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
RowBuckets = Annotated[tuple[Rows, ...], Field(min_length=1, max_length=MAX_ROWS), LIST_TO_TUPLE]
PADDED_PROMPTS = 7
"""Maximum prompts of a padded step. Grids grow with it: each prompt may have all of the tokens."""
MAX_PROMPT_BUCKETS = 64
MAX_BUCKET_TOKENS = 1 << 14
PromptBucket = Annotated[int, Field(ge=1, le=MAX_BUCKET_TOKENS)]
PromptBuckets = Annotated[
    tuple[PromptBucket, ...], Field(max_length=MAX_PROMPT_BUCKETS), LIST_TO_TUPLE
]


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Settings of the engine, with vLLM's names where vLLM has the setting."""

    model: ModelName | None = setting(
        None,
        "model folder, GGUF file or Hub id; default: the bundled model",
        allowed="a folder, a GGUF file, a hub id, or None for the bundled model",
        remedy="Name one of them.",
    )
    dtype: Dtype = setting(
        "auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU", remedy=_CHOOSE_ONE
    )
    quantization: str | None = setting(
        None,
        "quantize the weights while loading: fp8, int8 or int4",
        allowed="fp8, int8, int4, the format of a quantized checkpoint, or None",
        remedy=_CHOOSE_ONE,
    )
    activation_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "auto is the model's dtype; fp8 quantizes the activations of e4m3 weights, per token",
        remedy=_CHOOSE_ONE,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto, cpu or cuda", remedy=_CHOOSE_ONE
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "auto, or dummy for random weights", remedy=_CHOOSE_ONE
    )
    hf_overrides: dict[str, Any] | None = setting(
        None,
        "settings that override config.json",
        allowed="a dict of config.json's settings",
        remedy="Write it as a dict, or leave it out.",
    )
    max_model_len: Annotated[int, Field(ge=2, le=1 << 24)] | None = setting(
        None, "maximum tokens of prompt and answer together"
    )
    max_num_seqs: Rows | None = setting(
        None,
        "maximum running requests; default: 16 on a CPU, on a GPU as many as fit, up to 256",
    )
    max_num_batched_tokens: Annotated[int, Field(ge=64, le=1 << 20)] | None = setting(
        None,
        "maximum tokens of a schedule, prompts and decoding; prompts get half of them at least; "
        "default: 2048, or fewer if GPU memory is short",
    )
    speculative_config: SpeculativeConfig | None = setting(
        None, f"speculative decoding, e.g. {EXAMPLE}", allowed="None or a dict"
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "format of the KV cache; auto is the model's dtype, fp8 is fp8_e4m3",
        allowed=_format_names,
        remedy=_CHOOSE_ONE,
    )
    kv_cache_dtype_skip_layers: SkipLayers = setting(
        (),
        "layers whose KV cache keeps the model's dtype, e.g. first,last,7",
        allowed="a list of first, last and indices of attention layers",
        remedy="Correct the list, or leave it out.",
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "dtype of the recurrent state; auto is float32, bfloat16 halves its size",
        remedy=_CHOOSE_ONE,
    )
    cuda_graph_mode: GraphMode = setting(
        "full", "full, piecewise or none; a CPU has no graphs", remedy=_CHOOSE_ONE
    )
    gpu_memory_utilization: Annotated[float, Field(ge=0.05, le=0.98)] = setting(
        0.9, "fraction of the GPU's memory to use"
    )
    kv_cache_memory_bytes: Annotated[int, Field(ge=1, le=1 << 50), size_in(1)] | None = setting(
        None,
        "size of the KV cache, e.g. 24G or 25.3e9, instead of measuring memory",
        allowed=f"bytes from 1 to {1 << 50}, such as {SIZES}",
        is_size=True,
    )
    num_gpu_blocks: Annotated[int, Field(ge=2, le=1 << 30)] | None = setting(
        None, "number of KV cache pages, instead of measuring memory"
    )
    num_snapshots: Annotated[int, Field(ge=0, le=1 << 20)] | None = setting(
        None, "number of snapshots of recurrent state for prefix hits"
    )
    snapshot_every: Annotated[int, Field(ge=1, le=1 << 20)] | None = setting(
        None, "prompt pages between two snapshots; default: chosen by the architecture"
    )
    enable_prefix_caching: bool = setting(
        True, "reuse the KV cache of common prompt prefixes", remedy=_CHOOSE_ONE
    )
    kv_offloading_size: Annotated[float, Field(ge=0, le=1 << 20), size_in(1 << 30)] = setting(
        0.0,
        "host memory for evicted prefixes, in GiB or as a size such as 64GB; 0: they are dropped",
        allowed=f"numbers from 0 to {1 << 20}, in GiB, or sizes such as 24G or 24GB",
        is_size=True,
    )
    kv_events_config: KVEventsConfig | None = setting(
        None,
        f"events of cached blocks over ZeroMQ, for gateways that route by prefix, e.g. "
        f"{EVENTS_EXAMPLE}",
        allowed="None or a dict",
        remedy="Write it as a dict, or leave it out.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "fcfs, or priority (lower values first)", remedy=_CHOOSE_ONE
    )
    skip_tokenizer_init: bool = setting(
        False, "load no tokenizer: prompts and outputs are token ids", remedy=_CHOOSE_ONE
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = setting(0, "seed of dummy weights")
    lora_modules: AdapterPaths | None = setting(
        None,
        "LoRA adapters as NAME=FOLDER; requests choose one by its name",
        allowed=f"up to {MAX_ADAPTERS} of NAME=FOLDER, each name once",
        remedy="Correct the list, or leave it out.",
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS)] = setting(
        1, "number of GPUs (on a CPU: processes) that hold the model together"
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "exchange activations between GPUs by NCCL alone, not by writes into each other's memory",
        remedy=_CHOOSE_ONE,
    )
    nnodes: Annotated[int, Field(ge=1, le=MAX_RANKS)] = setting(
        1, "number of hosts that run the ranks; every one runs equally many"
    )
    node_rank: Annotated[int, Field(ge=0, le=MAX_RANKS - 1)] = setting(
        0, "number of this host, from 0; the others run without an HTTP server"
    )
    master_addr: Annotated[str, Field(min_length=1, max_length=255)] = setting(
        "127.0.0.1",
        "address of the host with --node-rank 0",
        allowed="a host name or an address",
        remedy="Name the host that runs with --node-rank 0.",
    )
    master_port: Annotated[int, Field(ge=1, le=65_535)] = setting(
        29501,
        "port on which the host with --node-rank 0 expects the others",
        remedy="Choose another, the same on all hosts.",
    )
    distributed_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = setting(
        600, "seconds that hosts wait for each other at the start, and ranks in an exchange"
    )
    audit: Annotated[float, Field(ge=0.0, le=1.0)] = setting(
        0.0,
        "share of ended requests that the idle engine runs again to compare the answers, e.g. "
        "0.01; above 0, tensor-parallel ranks also compare their row tables, every 16 steps",
    )
    kernels: Kernels | None = setting(
        None,
        "backends of ops as OP=BACKEND, used wherever they serve, e.g. paged_attention=triton",
        allowed="OP=BACKEND, each op once; lockstep explain shows ops and backends",
        remedy="Correct the list, or leave it out.",
    )
    sync_kernels: bool = setting(
        False,
        "wait for the device after every op and name the op that failed; slow, without graphs",
        remedy=_CHOOSE_ONE,
    )
    row_buckets: RowBuckets | None = setting(
        None,
        "row counts that steps are padded to; default: chosen for the device",
        allowed=f"a list of at most {MAX_ROWS} whole numbers from 1 to {MAX_ROWS}",
        remedy="Correct the list, or leave it out.",
    )
    prompt_buckets: PromptBuckets | None = setting(
        None,
        f"token counts that steps of up to {PADDED_PROMPTS} prompts are padded to, one CUDA graph "
        "each; default: chosen for the device",
        allowed=f"a list of at most {MAX_PROMPT_BUCKETS} whole numbers from 1 to "
        f"{MAX_BUCKET_TOKENS}, or an empty one for no padding",
        remedy="Correct the list, or leave it out.",
    )
    steps_in_flight: Annotated[int, Field(ge=1, le=2)] | None = setting(
        None, "steps launched before the first result is read; default: 2 on a GPU, 1 on a CPU"
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid setting or an invalid combination."""
        # The class is frozen, so that checked values replace the fields by this call.
        object.__setattr__(self, "speculative_config", spec.read(self.speculative_config))
        object.__setattr__(self, "kv_events_config", read_kv_events(self.kv_events_config))
        super().__post_init__()
        self._check_events()
        if self.num_gpu_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_gpu_blocks={self.num_gpu_blocks} is not allowed with kv_cache_memory_bytes="
                f"{self.kv_cache_memory_bytes}: both set the size of the cache. Remove one."
            )
        self._check_nodes()
        speculative = self.speculative_config
        if speculative is None or speculative.synthetic_acceptance is None:
            return
        if self.audit:
            raise ConfigError(
                f"audit={self.audit} is not allowed with synthetic_acceptance, whose tokens are "
                "not the model's. Remove one of them."
            )
        # With real weights synthetic acceptance would emit tokens that the model never chose.
        if self.load_format != "dummy":
            raise ConfigError(
                f"synthetic_acceptance={speculative.synthetic_acceptance} is not allowed with "
                f"load_format={self.load_format!r}: it replaces the model's own answers. Allowed: "
                "load_format='dummy' (random weights). Remove it, or choose dummy."
            )

    def _check_events(self) -> None:
        """Raise ConfigError where events are wanted of a cache that keeps no blocks."""
        events = self.kv_events_config
        if events is not None and events.is_on and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config is not allowed with enable_prefix_caching=False, where no block "
                "is cached. Remove one of them."
            )

    def _check_nodes(self) -> None:
        """Raise ConfigError for a number of ranks or a node_rank that nnodes does not allow."""
        nodes = self.nnodes
        if self.node_rank >= nodes:
            raise ConfigError(
                f"node_rank={self.node_rank} is not allowed with nnodes={nodes}; allowed: 0 to "
                f"{nodes - 1}. Correct one of them."
            )
        if self.tensor_parallel_size % nodes:
            below = self.tensor_parallel_size // nodes * nodes
            sizes = [str(size) for size in (below, below + nodes) if 0 < size <= MAX_RANKS]
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not allowed with "
                f"nnodes={nodes}; allowed: multiples of {nodes}, such as {' or '.join(sizes)}: "
                "every node runs equally many ranks. Choose one of these sizes."
            )

    @classmethod
    def read(cls, **settings: Any) -> "EngineConfig":
        """Build a config from keyword arguments. Raises ConfigError for an unknown name."""
        check_names(cls, settings, "setting", "Remove or rename it.")
        return cls(**settings)

    @property
    def node_ranks(self) -> range:
        """Return the tensor-parallel ranks that this node runs."""
        size = self.tensor_parallel_size // self.nnodes
        return range(self.node_rank * size, (self.node_rank + 1) * size)

    @property
    def max_drafts(self) -> int:
        """Return K, the maximum drafts per row and step."""
        speculative = self.speculative_config
        return speculative.num_speculative_tokens if speculative else 0


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Sizes of steps and the device they run on; known before memory is measured.

    max_num_batched_tokens: maximum tokens of a schedule; prompts get half of them at least.
    query_len: K + 1, maximum tokens of a row in a decode step.
    page_size: tokens per page.
    row_buckets: row counts that decode steps are padded to, ascending.
    prompt_buckets: token counts that steps of few prompts are padded to, ascending.
    joint_graphs: number of the largest joint steps whose results the memory of graphs can keep.
    draft_lengths: draft lengths of a step, ascending; one graph each per row bucket.
    graph_mode: as in EngineConfig; none on a CPU.
    steps_in_flight: steps launched before the first result is read.
    numerics: text of everything that bits depend on except weights and request.
    quantization: weight format, None for unquantized weights.
    adapters: digest of each LoRA adapter by its name, in the order of lora_modules.
    has_predictions: the drafter reads the predicted texts of requests.
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
    prompt_buckets: tuple[int, ...] = ()
    joint_graphs: int = 0
    draft_lengths: tuple[int, ...] = (0,)
    graph_mode: str
    steps_in_flight: int
    numerics: str
    quantization: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    has_predictions: bool = False

    @property
    def row_columns(self) -> int:
        """Return the columns of a page table: the pages that hold history_len tokens."""
        return -(-self.history_len // self.page_size)

    @property
    def history_len(self) -> int:
        """Return the tokens that a row of the table can hold.

        They include the windows past the row's end, of forced tokens as well, and the token that
        follows the last window.
        """
        past_end = max(WINDOWS_PAST_END * self.query_len, FORCED_WINDOWS[-1] + self.query_len)
        return self.max_model_len + past_end + 1

    @property
    def max_decided(self) -> int:
        """Return the maximum logit rows of a step: of the largest decode step, or of windows of
        forced tokens.
        """
        return max(self.max_num_seqs * self.query_len, FORCED_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Plan(StepLimits):
    """Complete, immutable plan of one engine: what its config implies for this model and machine.

    num_pages: KV cache pages, the null page included.
    page_bytes, slot_bytes: bytes of one page and of one state slot, summed over all layers, the
    draft module's included.
    num_slots: state slots, i.e. the null slot, one per row, and the snapshots; 0 without recurrent
    layers.
    memory: bytes of GPU memory by part, pages and state included.
    memory_notes: choices of the memory planner.
    snapshot_every: prompt pages between two snapshots.
    draft_vocab_size: tokens that a draft module may propose; 0 without one.
    draft_head_bytes: bytes of the draft module's copy of the target's head rows; 0 if it shares
    the whole head.
    host_pages: size of the host tier in pages of page_bytes.
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
        """Return a short hash of the numerics: the `system_fingerprint` of answers."""
        return f"ls-{sha256(self.numerics.encode()).hexdigest()[:12]}"

    @property
    def slot_host_pages(self) -> int:
        """Return the host pages that a snapshot occupies."""
        return -(-self.slot_bytes // self.page_bytes) if self.num_slots else 0
