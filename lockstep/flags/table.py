"""Table of every flag of `vllm serve`, by group, with its effect in Lockstep.

The readers of the command line and of LLM's keywords use it. The groups of `--help` and the page
docs/vllm_flags.md are generated from it.
"""

from lockstep.flags.flag import Flag, Form, acts, noted, refused

SWITCH = Form.SWITCH
SIZE = Form.SIZE
NUMBER = Form.NUMBER
JSON = Form.JSON
MANY = Form.MANY

OWN_REPLICAS = "one server routes to all replicas (--replicas); leave it out."
NO_MEDIA = "only text is read and written, so the flag has no effect"
ALL_ADAPTERS = "--lora-modules loads each of its adapters at the start, at any rank up to 512"
NO_OFFLOAD = "the whole model is on the GPU; quantize it (--quantization), or leave it out."
NO_POOLING = "models generate text here; leave it out."
NO_PLUGINS = "code is not loaded by name; leave it out."
OWN_BACKEND = (
    "each op runs the fastest backend that gives its one result; `lockstep explain` names them"
)
NO_LOG = "texts of requests and answers are never written to the log; /metrics counts them"
OWN_LOADER = "safetensors are read directly into the weights"
ALL_PROMPTS = "waiting prompts share a step equally, in whole pages"
NO_CONTEXT_PARALLEL = "the KV cache is split by heads; leave it out."
NO_INDUCTOR = "no step is compiled by Inductor: its heuristics would change bits"
EAGER = "none"
GRAPHS = {
    "NONE": EAGER,
    "PIECEWISE": "piecewise",
    "FULL": "full",
    "FULL_DECODE_ONLY": "full",
    "FULL_AND_PIECEWISE": "full",
}
ATTENTION_BACKENDS = (
    "auto",
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "TRITON_ATTN",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "TURBOQUANT",
    "TREE_ATTN",
    "TORCH_SDPA",
    "CPU_ATTN",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_AITER_MLA",
    "ROCM_AITER_TRITON_MLA",
    "ROCM_AITER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "CUTLASS_MLA",
    "TRITON_MLA",
)
ONE_BACKEND = "llguidance constrains all answers"
IN_REQUESTS = "send it in a request's structured_outputs."
HEADS = "the size of a request's head has a fixed limit"
SAME_ANSWER = "drafts never change an answer, so the flag has no effect"

COMPILATION = (
    acts(
        "cudagraph_mode",
        "how much of a step is captured",
        setting="cuda_graph_mode",
        mapping=GRAPHS,
        allowed=tuple(GRAPHS),
    ),
    acts(
        "cudagraph_capture_sizes",
        "the numbers of rows that steps are padded to, not of tokens",
        setting="row_buckets",
    ),
    *(
        noted(key, NO_INDUCTOR)
        for key in (
            "mode",
            "level",
            "backend",
            "custom_ops",
            "splitting_ops",
            "use_inductor",
            "use_inductor_graph_partition",
            "compile_mm_encoder",
            "compile_sizes",
            "compile_ranges_split_points",
            "inductor_compile_config",
            "inductor_passes",
            "pass_config",
            "fast_moe_cold_start",
            "debug_dump_path",
            "cache_dir",
            "compile_cache_save_format",
            "dynamic_shapes_config",
            "evaluate_guards",
        )
    ),
    *(
        noted(key, "a graph is captured for each number of rows and drafts, up to --max-num-seqs")
        for key in (
            "max_cudagraph_capture_size",
            "cudagraph_num_of_warmups",
            "cudagraph_copy_inputs",
            "cudagraph_specialize_lora",
            "cudagraph_mm_encoder",
        )
    ),
)
DRAFTING = (
    noted("disable_padded_drafter_batch", SAME_ANSWER),
    noted("draft_sample_method", SAME_ANSWER),
    noted("rejection_sample_method", "a draft is accepted where it is the target's own token"),
    noted("max_model_len", SAME_ANSWER),
    noted("disable_by_batch_size", "adaptive chooses the number of drafts in every step"),
    refused(
        "draft_tensor_parallel_size",
        "the draft module is placed as the model is; leave it out.",
        no_op=(1,),
    ),
    noted("suffix_decoding_max_cached_requests", "suffix_cache_tokens bounds what is kept"),
    noted("suffix_decoding_max_spec_factor", "adaptive chooses the number of drafts in every step"),
    noted("suffix_decoding_min_token_prob", "the latest of the longest matches is drafted"),
    noted("quantization", "the draft module is quantized as the checkpoint says"),
    refused("revision", "fetch it, and name the folder.", no_op=("main",)),
    refused("parallel_drafting", "drafts come one after the other; leave it out.", no_op=(False,)),
)
STRUCTURED = (
    noted("backend", ONE_BACKEND),
    noted("disable_fallback", ONE_BACKEND),
    refused("disable_any_whitespace", IN_REQUESTS, no_op=(False,)),
    refused("disable_additional_properties", IN_REQUESTS, no_op=(False,)),
    refused(
        "enable_in_reasoning",
        "a structured output constrains the content, never the reasoning; leave it out.",
        no_op=(False,),
    ),
    refused("reasoning_parser", "choose it by --reasoning-parser; leave it out.", no_op=("",)),
)

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        acts("config", "YAML file of flags by their names; the command line overrides it"),
        acts("model", "folder or hub id; may be given without the flag"),
        acts(
            "served-model-name",
            "names that clients may use; responses contain the first one",
            MANY,
        ),
        acts(
            "dtype",
            "dtype of the model",
            mapping={"half": "float16", "float": "float32"},
        ),
        acts(
            "max-model-len",
            "the maximum tokens of prompt and output together",
            SIZE,
            mapping={"auto": None, "-1": None},
        ),
        acts(
            "quantization",
            "quantizes a plain checkpoint at load; for a quantized one, any name of its family",
            short=("-q",),
            mapping={"None": None, "none": None},
        ),
        acts(
            "load-format",
            "safetensors or GGUF, whichever the checkpoint has, or random weights",
            mapping={
                "safetensors": "auto",
                "gguf": "auto",
                "hf": "auto",
                "fastsafetensors": "auto",
                "runai_streamer": "auto",
                "instanttensor": "auto",
            },
            allowed=("auto", "dummy"),
        ),
        acts("seed", "seed of random weights; sampling uses the seed of each request", NUMBER),
        acts("hf-overrides", "settings that replace those of config.json", JSON),
        acts("skip-tokenizer-init", "load no tokenizer: prompts and outputs are token ids", SWITCH),
        acts(
            "generation-config",
            "source of sampling defaults: auto (the checkpoint), vllm (none), or a folder",
        ),
        acts("override-generation-config", "sampling defaults that override those", JSON),
        acts(
            "max-logprobs",
            "the maximum number of log-probabilities that a request may ask for, up to 20",
            NUMBER,
        ),
        acts(
            "language-model-only",
            "only the text model is built, always",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        noted("trust-remote-code", "no code of a checkpoint is run", SWITCH, no_op=(False,)),
        noted("code-revision", "no code of a checkpoint is run"),
        refused(
            "revision",
            "fetch it (`hf download ID --revision REVISION`) and name the folder.",
            no_op=("main",),
        ),
        refused(
            "tokenizer",
            "the tokenizer is the checkpoint's; put another tokenizer.json into its folder. A GGUF "
            "file has its own.",
        ),
        refused(
            "tokenizer-revision",
            "the tokenizer is the checkpoint's; leave it out.",
            no_op=("main",),
        ),
        refused(
            "tokenizer-mode",
            "tokenizer.json is read; leave it out.",
            no_op=("auto", "hf"),
        ),
        refused(
            "hf-config-path",
            "config.json is the checkpoint's, or of a GGUF file its metadata; change settings by "
            "--hf-overrides.",
        ),
        refused("config-format", "config.json is read; leave it out.", no_op=("auto", "hf")),
        refused("hf-token", "set HF_TOKEN, or log in by `hf auth login`; leave it out."),
        refused("runner", NO_POOLING, no_op=("auto", "generate")),
        refused("convert", NO_POOLING, no_op=("auto", "none")),
        refused("pooler-config", NO_POOLING),
        refused(
            "model-impl",
            "every architecture is built in; leave it out.",
            no_op=("auto", "vllm"),
        ),
        refused("quantization-config", "choose how weights are quantized by --quantization."),
        noted("allow-deprecated-quantization", "no format is deprecated", SWITCH),
        refused("override-attention-dtype", "attention is of the model's dtype; choose --dtype."),
        refused(
            "disable-sliding-window",
            "a layer's window is part of the model; lower --max-model-len to it.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "logprobs-mode",
            "log-probabilities are those of the raw logits; leave it out.",
            no_op=("raw_logprobs",),
        ),
        noted(
            "use-fp64-gumbel",
            "the noise is a hash of seed, position and token, the same in every run",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "enable-return-routed-experts",
            "responses do not contain the experts; leave it out.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "enable-prompt-embeds",
            "prompts are text or token ids; leave it out.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "enable-sleep-mode", "stop the server instead; leave it out.", SWITCH, no_op=(False,)
        ),
        refused("logits-processors", NO_PLUGINS, MANY),
        refused("io-processor-plugin", NO_PLUGINS),
        noted("renderer-num-workers", "templates are rendered in the server's own threads", NUMBER),
    ),
    "Loading": (
        noted("download-dir", "the hub's client keeps its cache where HF_HOME says"),
        noted("safetensors-load-strategy", OWN_LOADER),
        noted("safetensors-prefetch-num-threads", OWN_LOADER, NUMBER),
        noted("safetensors-prefetch-block-size", OWN_LOADER, SIZE),
        noted("model-loader-extra-config", OWN_LOADER, JSON, no_op=({},)),
        noted("ignore-patterns", "only *.json, *.safetensors and *.jinja are fetched", MANY),
        noted(
            "use-tqdm-on-load",
            "a progress bar is shown if stderr is a terminal",
            SWITCH,
            no_op=(True,),
        ),
        noted("pt-load-map-location", "only safetensors are read"),
        noted("max-parallel-loading-workers", OWN_LOADER, NUMBER),
    ),
    "Batch and memory": (
        acts("max-num-seqs", "requests that run at once", SIZE),
        acts("max-num-batched-tokens", "prompt tokens of a step", SIZE),
        acts("gpu-memory-utilization", "the share of the GPU's memory to use"),
        acts("kv-cache-memory-bytes", "the cache's own bytes, instead of that share"),
        acts(
            "num-gpu-blocks-override",
            "pages of the cache, of 64 tokens each",
            SIZE,
            setting="num_gpu_blocks",
        ),
        acts("enable-prefix-caching", "common prefixes of prompts are computed once", SWITCH),
        acts("kv-cache-dtype", "format of the KV cache"),
        acts("kv-cache-dtype-skip-layers", "layers whose cache keeps the model's dtype", MANY),
        acts("mamba-ssm-cache-dtype", "the dtype of recurrent state"),
        acts(
            "mamba-cache-mode",
            "none: no snapshots of recurrent state for prefix hits; else snapshots on the grid of "
            "64 tokens",
            setting="num_snapshots",
            mapping={"none": 0},
            no_op=("align", "all"),
            allowed=("none",),
        ),
        acts("scheduling-policy", "order in which waiting requests start"),
        acts(
            "async-scheduling",
            "the next step is scheduled while one runs; --no-async-scheduling: after it has ended",
            SWITCH,
            setting="steps_in_flight",
            mapping={False: 1},
            no_op=(True,),
        ),
        noted(
            "enable-chunked-prefill",
            "prompts are always cut at --max-num-batched-tokens, which changes no bit",
            SWITCH,
            no_op=(True,),
        ),
        noted("block-size", "a page has 64 tokens", NUMBER, no_op=(64,)),
        noted("mamba-block-size", "snapshots lie on the grid of 64 tokens", NUMBER, no_op=(64,)),
        refused(
            "mamba-cache-dtype",
            "choose the recurrent state's by --mamba-ssm-cache-dtype.",
            no_op=("auto",),
        ),
        refused(
            "enable-mamba-cache-stochastic-rounding",
            "state is rounded to the nearest; leave it out.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "mamba-cache-philox-rounds",
            "state is rounded to the nearest; leave it out.",
            NUMBER,
            no_op=(0,),
        ),
        noted("prefix-caching-hash-algo", "pages are always keyed by BLAKE2b"),
        noted(
            "calculate-kv-scales",
            "--kv-cache-dtype decides: scales of the checkpoint, or a scale per token",
            SWITCH,
        ),
        noted("kv-sharing-fast-prefill", "all tokens of a prompt run through all layers", SWITCH),
        acts("kv-offloading-size", "GiB of host memory for prefixes that the cache evicts"),
        noted("kv-offloading-backend", "pages are moved by Lockstep itself", no_op=("native",)),
        noted("max-num-partial-prefills", ALL_PROMPTS, NUMBER),
        noted("max-long-partial-prefills", ALL_PROMPTS, NUMBER),
        noted("long-prefill-token-threshold", ALL_PROMPTS, NUMBER),
        noted("scheduler-reserve-full-isl", "pages are reserved step by step", SWITCH),
        noted("disable-hybrid-kv-cache-manager", "each kind of state has its own pool", SWITCH),
        noted("disable-chunked-mm-input", NO_MEDIA, SWITCH),
        noted("stream-interval", "the tokens of a step are sent at once", NUMBER, no_op=(1,)),
        refused("scheduler-cls", NO_PLUGINS),
        refused("offload-backend", NO_OFFLOAD, no_op=("auto",)),
        refused("cpu-offload-gb", NO_OFFLOAD, NUMBER, no_op=(0,)),
        refused("cpu-offload-params", NO_OFFLOAD, MANY),
        refused("offload-group-size", NO_OFFLOAD, NUMBER, no_op=(0,)),
        refused("offload-num-in-group", NO_OFFLOAD, NUMBER, no_op=(1,)),
        refused("offload-prefetch-step", NO_OFFLOAD, NUMBER, no_op=(1,)),
        refused("offload-params", NO_OFFLOAD, MANY),
    ),
    "Drafts": (
        acts(
            "speculative-config",
            "drafter and its settings; default: the checkpoint's draft module, if it has one",
            JSON,
            short=("-sc",),
            keys=DRAFTING,
        ),
        acts("spec-method", "the drafter", setting="speculative_config.method"),
        acts("spec-model", "a model that drafts", setting="speculative_config.model"),
        acts(
            "spec-tokens",
            "the maximum number of drafts per step",
            NUMBER,
            setting="speculative_config.num_speculative_tokens",
        ),
    ),
    "Graphs and backends": (
        acts(
            "enforce-eager",
            "no graphs are captured",
            SWITCH,
            setting="cuda_graph_mode",
            mapping={True: EAGER},
            no_op=(False,),
        ),
        acts(
            "compilation-config",
            "its keys are below",
            JSON,
            short=("-cc",),
            setting="",
            keys=COMPILATION,
        ),
        acts(
            "cudagraph-capture-sizes",
            "the numbers of rows that steps are padded to, not of tokens",
            MANY,
            setting="row_buckets",
        ),
        noted("max-cudagraph-capture-size", "graphs reach up to --max-num-seqs rows", NUMBER),
        noted("attention-backend", OWN_BACKEND, allowed=ATTENTION_BACKENDS, no_op=("auto",)),
        noted("attention-config", OWN_BACKEND, JSON, short=("-ac",)),
        noted("mamba-backend", OWN_BACKEND),
        noted("gdn-prefill-backend", OWN_BACKEND),
        noted("moe-backend", OWN_BACKEND, no_op=("auto",)),
        noted("linear-backend", OWN_BACKEND, no_op=("auto",)),
        noted("kernel-config", OWN_BACKEND, JSON, no_op=({},)),
        noted("ir-op-priority", OWN_BACKEND, JSON, no_op=({},)),
        noted("enable-flashinfer-autotune", OWN_BACKEND, SWITCH),
        noted("disable-cascade-attn", "attention never depends on other requests", SWITCH),
        noted(
            "optimization-level",
            NO_INDUCTOR,
            short=("-O",),
        ),
        noted("performance-mode", "kernels are chosen by the size of each step"),
    ),
    "Several GPUs": (
        acts("tensor-parallel-size", "GPUs that share the model", NUMBER, short=("-tp",)),
        refused(
            "pipeline-parallel-size",
            "share the model by --tensor-parallel-size; leave it out.",
            NUMBER,
            short=("-pp",),
            no_op=(1,),
        ),
        acts("nnodes", "hosts that run the ranks", NUMBER, short=("-n",)),
        acts("node-rank", "number of this host; 0 is the head", NUMBER, short=("-r",)),
        acts("master-addr", "address of the head"),
        acts("master-port", "port on which the head expects the other hosts", NUMBER),
        noted(
            "distributed-executor-backend",
            "processes are started as --tensor-parallel-size needs them",
            allowed=("mp", "uni"),
        ),
        acts(
            "distributed-timeout-seconds",
            "how long hosts wait for each other at the start, and ranks in an exchange",
            NUMBER,
        ),
        noted("numa-bind", "start the server under numactl", SWITCH, no_op=(False,)),
        noted("numa-bind-nodes", "start the server under numactl", MANY),
        noted("numa-bind-cpus", "start the server under numactl", MANY),
        refused(
            "decode-context-parallel-size",
            NO_CONTEXT_PARALLEL,
            NUMBER,
            short=("-dcp",),
            no_op=(1,),
        ),
        refused(
            "prefill-context-parallel-size",
            NO_CONTEXT_PARALLEL,
            NUMBER,
            short=("-pcp",),
            no_op=(1,),
        ),
        noted("dcp-comm-backend", "no cache is shared by its tokens"),
        noted("dcp-kv-cache-interleave-size", "no cache is shared by its tokens", NUMBER),
        noted("cp-kv-cache-interleave-size", "no cache is shared by its tokens", NUMBER),
        acts(
            "data-parallel-size",
            "engines behind the server, on Ray Serve",
            NUMBER,
            short=("-dp",),
            setting="replicas",
            no_op=(1,),
        ),
        refused("data-parallel-rank", OWN_REPLICAS, NUMBER, short=("-dpn",), no_op=(0,)),
        refused("data-parallel-start-rank", OWN_REPLICAS, NUMBER, short=("-dpr",), no_op=(0,)),
        refused("data-parallel-size-local", OWN_REPLICAS, NUMBER, short=("-dpl",), no_op=(1,)),
        noted("data-parallel-address", "Ray places the replicas", short=("-dpa",)),
        noted("data-parallel-rpc-port", "Ray places the replicas", NUMBER, short=("-dpp",)),
        noted("data-parallel-backend", "Ray places the replicas", short=("-dpb",)),
        refused("data-parallel-hybrid-lb", OWN_REPLICAS, SWITCH, short=("-dph",), no_op=(False,)),
        refused("data-parallel-external-lb", OWN_REPLICAS, SWITCH, short=("-dpe",), no_op=(False,)),
        noted(
            "enable-expert-parallel",
            "experts are shared as --tensor-parallel-size says",
            SWITCH,
            short=("-ep",),
            no_op=(False,),
        ),
        noted("enable-ep-weight-filter", "a GPU reads the weights that it stores", SWITCH),
        noted("all2all-backend", "rows are not sent from GPU to GPU"),
        noted("enable-dbo", "batches are not cut in two", SWITCH, no_op=(False,)),
        noted("ubatch-size", "batches are not cut in two", NUMBER, no_op=(0,)),
        noted("dbo-decode-token-threshold", "batches are not cut in two", NUMBER),
        noted("dbo-prefill-token-threshold", "batches are not cut in two", NUMBER),
        refused("enable-elastic-ep", OWN_REPLICAS, SWITCH, no_op=(False,)),
        noted("disable-nccl-for-dp-synchronization", "replicas do not run in step", SWITCH),
        noted("enable-eplb", "experts stay where they were loaded", SWITCH, no_op=(False,)),
        noted("eplb-config", "experts stay where they were loaded", JSON),
        noted("expert-placement-strategy", "experts stay where they were loaded"),
        noted("ray-workers-use-nsight", "ranks are no Ray workers", SWITCH, no_op=(False,)),
        acts("disable-custom-all-reduce", "GPUs exchange by NCCL alone", SWITCH),
        refused("worker-cls", NO_PLUGINS, no_op=("auto",)),
        refused("worker-extension-cls", NO_PLUGINS, no_op=("",)),
    ),
    "Chat": (
        acts("chat-template", "a file, or the template itself"),
        acts("default-chat-template-kwargs", "the template's variables, under a request's", JSON),
        acts("tool-call-parser", "parser of tool calls; default: derived from the chat template"),
        acts(
            "enable-auto-tool-choice",
            "tool_choice auto works with any known parser; --no-enable-auto-tool-choice: tool "
            "calls stay text",
            SWITCH,
            setting="tool_call_parser",
            mapping={False: "none"},
            no_op=(True,),
        ),
        acts(
            "exclude-tools-when-tool-choice-none",
            "the prompt then omits the tools, always",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        acts("reasoning-parser", "parser of reasoning; default: derived from the chat template"),
        refused("reasoning-parser-plugin", NO_PLUGINS, no_op=("",)),
        refused("tool-parser-plugin", NO_PLUGINS, no_op=("",)),
        refused("tool-server", "clients run the tools; leave it out."),
        refused(
            "reasoning-config",
            "the reasoning parser knows the tags that thinking_token_budget needs; leave it out.",
            JSON,
        ),
        refused(
            "chat-template-content-format",
            "content reaches the template as text; leave it out.",
            no_op=("auto", "string"),
        ),
        refused(
            "trust-request-chat-template",
            "requests cannot send a template; choose the server's by --chat-template.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "response-role", "answers are the assistant's; leave it out.", no_op=("assistant",)
        ),
        acts("structured-outputs-config", "its keys are below", JSON, setting="", keys=STRUCTURED),
    ),
    "Server": (
        acts("host", "the address to listen on; default: 127.0.0.1"),
        acts("port", "the port to listen on", NUMBER),
        acts("uds", "a Unix socket, not a port"),
        acts("root-path", "the path under which a proxy shows the server"),
        acts("api-key", "keys that clients must send", MANY),
        acts("allowed-origins", "origins of web pages that may send requests (CORS)", MANY),
        acts("allowed-methods", "methods that these web pages may use", MANY),
        acts("allowed-headers", "headers that these web pages may send", MANY),
        acts("allow-credentials", "these web pages may send cookies and keys", SWITCH),
        acts("ssl-keyfile", "private key, PEM"),
        acts("ssl-certfile", "certificate, PEM"),
        acts("ssl-ca-certs", "CA certificates that verify those of clients, PEM"),
        acts(
            "ssl-cert-reqs",
            "client certificates: 0 (none), 1 (optional) or 2 (required)",
            NUMBER,
        ),
        acts("ssl-ciphers", "ciphers before TLS 1.3, in OpenSSL's syntax"),
        acts("shutdown-timeout", "seconds that running requests may go on after SIGTERM", NUMBER),
        acts(
            "disable-fastapi-docs",
            "no /docs, /redoc and /openapi.json",
            SWITCH,
            setting="no_docs",
        ),
        acts(
            "enable-prompt-tokens-details",
            "usage contains the cached tokens, always",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        acts(
            "disable-frontend-multiprocessing",
            "the engine runs in the server's own process, in a thread",
            SWITCH,
        ),
        acts("uvicorn-log-level", "log level of the HTTP server"),
        noted("h11-max-incomplete-event-size", HEADS, SIZE),
        noted("h11-max-header-count", HEADS, NUMBER),
        refused("enable-ssl-refresh", "restart the server; leave it out.", SWITCH, no_op=(False,)),
        refused("middleware", "put a proxy in front; leave it out.", MANY, no_op=([],)),
        acts(
            "enable-request-id-headers",
            "X-Request-Id is in every answer, always",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        refused(
            "enable-offline-docs", "/docs needs the network; leave it out.", SWITCH, no_op=(False,)
        ),
        refused(
            "return-tokens-as-token-ids",
            "send return_tokens_as_token_ids with a request; leave it out.",
            SWITCH,
            no_op=(False,),
        ),
        refused(
            "enable-force-include-usage",
            "send stream_options with include_usage; leave it out.",
            SWITCH,
            no_op=(False,),
        ),
        acts(
            "enable-tokenizer-info-endpoint",
            "/tokenizer_info returns tokenizer_config.json and the chat template",
            SWITCH,
        ),
        refused(
            "tokens-only",
            "choose --skip-tokenizer-init and send token ids.",
            SWITCH,
            no_op=(False,),
        ),
        noted(
            "fingerprint-mode",
            "system_fingerprint identifies everything that output bits depend on",
        ),
        refused(
            "fingerprint-value",
            "system_fingerprint identifies everything that output bits depend on; leave it out.",
        ),
        noted("enable-flash-late-interaction", "models generate text here", SWITCH),
        noted("api-server-count", "one process answers", NUMBER, short=("-asc",), no_op=(1,)),
        acts("headless", "no HTTP server; on the head it is refused", SWITCH),
        refused("grpc", "the server has HTTP only; leave it out.", SWITCH, no_op=(False,)),
    ),
    "Logs and metrics": (
        acts(
            "disable-log-requests",
            "requests are logged only with --enable-log-requests",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        acts(
            "disable-log-stats",
            "omits the log line of throughput every ten seconds",
            SWITCH,
        ),
        acts(
            "disable-uvicorn-access-log",
            "there is an access log only if --uvicorn-log-level is info or below",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        noted(
            "disable-access-log-for-endpoints",
            "requests are logged only if --uvicorn-log-level is info or below",
        ),
        acts(
            "enable-log-requests",
            "logs a line for every request that has ended, without any text of it",
            SWITCH,
        ),
        noted("enable-log-outputs", NO_LOG, SWITCH, no_op=(False,)),
        noted("enable-log-deltas", NO_LOG, SWITCH, no_op=(False,)),
        noted("max-log-len", NO_LOG, NUMBER),
        noted("log-error-stack", "an internal error is logged with its stack", SWITCH),
        noted("log-config-file", "the log goes to stderr, in the format of --log-format"),
        noted("aggregate-engine-logging", "each replica logs its own throughput", SWITCH),
        noted("enable-server-load-tracking", "/metrics has running and waiting requests", SWITCH),
        noted("show-hidden-metrics-for-version", "no metric is hidden"),
        noted("kv-cache-metrics", "/metrics has pages and hits", SWITCH, no_op=(False,)),
        noted("kv-cache-metrics-sample", "/metrics has pages and hits", NUMBER),
        noted("cudagraph-metrics", "`lockstep explain` prints the plan", SWITCH, no_op=(False,)),
        noted(
            "enable-mfu-metrics",
            "/metrics has step times and their roofline floors",
            SWITCH,
            no_op=(False,),
        ),
        noted("enable-logging-iteration-details", "/metrics counts steps", SWITCH, no_op=(False,)),
        noted(
            "enable-layerwise-nvtx-tracing",
            "`lockstep bench --trace` writes a timeline",
            SWITCH,
            no_op=(False,),
        ),
        noted("profiler-config", "`lockstep bench --trace` writes a timeline", JSON),
        acts("otlp-traces-endpoint", "a span for every request, by OTLP over HTTP"),
        refused("collect-detailed-traces", "a span covers a whole request; leave it out.", MANY),
        noted("fail-on-environ-validation", "no variable named VLLM_ is read", SWITCH),
    ),
    "Adapters": (
        noted("enable-lora", ALL_ADAPTERS, SWITCH, no_op=(False,)),
        acts("lora-modules", "LoRA adapters, each served under its name", MANY),
        refused("default-mm-loras", "only text is supported; leave it out.", JSON, no_op=({},)),
        noted("max-loras", ALL_ADAPTERS, NUMBER),
        noted("max-lora-rank", ALL_ADAPTERS, NUMBER),
        refused("lora-dtype", "adapters have the model's dtype; leave it out.", no_op=("auto",)),
        noted("enable-tower-connector-lora", NO_MEDIA, SWITCH),
        noted("max-cpu-loras", ALL_ADAPTERS, NUMBER),
        noted("fully-sharded-loras", "B is cut across GPUs and A is not: no sum crosses", SWITCH),
        refused("lora-target-modules", "an adapter changes all modules of its files.", MANY),
        noted("specialize-active-lora", ALL_ADAPTERS, SWITCH),
        noted("enable-mixed-moe-lora-format", "no adapter changes experts", SWITCH),
    ),
    "Images, video and sound": (
        noted("limit-mm-per-prompt", NO_MEDIA, JSON),
        noted("allowed-local-media-path", NO_MEDIA),
        noted("allowed-media-domains", NO_MEDIA, MANY),
        noted("media-io-kwargs", NO_MEDIA, JSON),
        noted("mm-processor-kwargs", NO_MEDIA, JSON),
        noted("mm-processor-cache-gb", NO_MEDIA, NUMBER),
        noted("mm-processor-cache-type", NO_MEDIA),
        noted("mm-shm-cache-max-object-size-mb", NO_MEDIA, NUMBER),
        noted("mm-encoder-tp-mode", NO_MEDIA),
        noted("mm-encoder-attn-backend", NO_MEDIA),
        noted("mm-encoder-attn-dtype", NO_MEDIA),
        noted("mm-encoder-fp8-scale-path", NO_MEDIA),
        noted("mm-encoder-fp8-scale-save-path", NO_MEDIA),
        noted("mm-encoder-fp8-scale-save-margin", NO_MEDIA, NUMBER),
        noted("interleave-mm-strings", NO_MEDIA, SWITCH),
        noted("skip-mm-profiling", NO_MEDIA, SWITCH),
        noted("video-pruning-rate", NO_MEDIA, NUMBER),
        noted("mm-tensor-ipc", NO_MEDIA),
        refused("enable-mm-embeds", "only text is read; leave it out.", SWITCH, no_op=(False,)),
        refused("mm-encoder-only", "models generate text; leave it out.", SWITCH, no_op=(False,)),
    ),
    "Older flags": (
        acts(
            "enable-reasoning",
            "reasoning is parsed whenever a parser is known",
            SWITCH,
            setting="",
            no_op=(True,),
        ),
        refused("task", NO_POOLING, no_op=("auto", "generate")),
        acts(
            "rope-scaling", "scaling of rotary positions", JSON, setting="hf_overrides.rope_scaling"
        ),
        acts("rope-theta", "base of rotary positions", NUMBER, setting="hf_overrides.rope_theta"),
        noted(
            "swap-space",
            "preempted rows always move to host memory; --kv-offloading-size limits the prefixes "
            "that are cached there",
            NUMBER,
        ),
        noted("max-seq-len-to-capture", "graphs serve rows of any length", SIZE),
        noted("num-scheduler-steps", "--steps-in-flight sets the steps that are launched", NUMBER),
        noted("use-v2-block-manager", "there is one block manager", SWITCH),
        noted("preemption-mode", "preempted rows move to host memory; nothing is recomputed"),
        noted("guided-decoding-backend", ONE_BACKEND),
        noted("disable-async-output-proc", "text is detokenized while steps run", SWITCH),
        noted("disable-mm-preprocessor-cache", NO_MEDIA, SWITCH),
    ),
    "Connections to other engines": (
        refused(
            "kv-transfer-config",
            "each engine computes both prompts and answers; leave it out.",
            JSON,
        ),
        acts("kv-events-config", "events of cached blocks, for gateways; vLLM's keys", JSON),
        refused("ec-transfer-config", "only text is read; leave it out.", JSON),
        refused("weight-transfer-config", "restart with the new weights; leave it out.", JSON),
        refused("additional-config", NO_PLUGINS, JSON, no_op=({},)),
    ),
}
"""Group of `--help` and of the page -> its flags."""


def all_flags() -> list[Flag]:
    """Return every flag of the table, in its order."""
    return [flag for flags in GROUPS.values() for flag in flags]


SERVER_OPTIONS = (
    "allow_other_numerics",
    "allowed_hosts",
    "api_key_file",
    "downscale_delay",
    "enable_reset_prefix_cache",
    "journal",
    "journal_size",
    "limit_concurrency",
    "log_format",
    "max_body_size",
    "max_queued_requests",
    "max_replicas",
    "metrics_names",
    "min_replicas",
    "no_docs",
    "no_playground",
    "ray_address",
    "replicas",
    "request_timeout",
    "resume_timeout",
    "ssl_keyfile_password",
    "step_timeout",
    "target_ongoing_requests",
    "timeout_keep_alive",
)
"""Options of `lockstep serve` that no flag of vLLM sets and no other command has, as keywords."""
