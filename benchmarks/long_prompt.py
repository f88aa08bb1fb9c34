"""Peak memory and time of one long prompt and its answer.

    python benchmarks/long_prompt.py FOLDER --memory-gib 22 --prompt 120000 \\
        --max-model-len 125000 --k 3 --kv-cache-dtype turboquant_3bit_nc

FOLDER contains a config.json; weights are random. torch gets at most --memory-gib of the GPU, and
the engine plans with the same limit, so a prompt that does not fit fails. Prints a JSON line after
the engine is built, and another after the answer, which compares the memory in use with the parts
that `lockstep explain` estimates.
"""

import argparse

import torch

from lockstep import LLM
from lockstep.bench.measurement import Stopwatch, greedy_params, model_settings, print_json
from lockstep.config import EngineConfig
from lockstep.kernels.architecture import sm_number
from lockstep.outputs import RequestOutput
from lockstep.worker.explain import explain_architecture

GIB = 1 << 30


def main() -> None:
    """Read the arguments, build the engine, and answer one prompt."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--memory-gib", type=float, default=22, help="limit of GPU memory")
    parser.add_argument("--prompt", type=int, default=120000, help="tokens of the prompt")
    parser.add_argument("--max-model-len", type=int, default=125000)
    parser.add_argument("--output-len", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--k", type=int, default=3, help="MTP drafts of a step")
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    parser.add_argument("--max-num-seqs", type=int, help="default: chosen by the planner")
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: chosen by the planner")
    args = parser.parse_args()
    fraction = args.memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    spec = {"method": "mtp", "num_speculative_tokens": args.k}
    settings = {
        **model_settings(args.model),
        "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "gpu_memory_utilization": fraction,
        "kv_cache_dtype": args.kv_cache_dtype,
        "speculative_config": spec if args.k else None,
    }
    estimated = _estimated(EngineConfig.read(**settings))
    watch = Stopwatch()
    llm = LLM(**settings)
    line = {"build_s": round(watch.wall, 2), "built_gib": _gib(torch.cuda.max_memory_allocated())}
    print_json(line)
    torch.cuda.reset_peak_memory_stats()
    tokens = [7 * i % 1000 for i in range(args.prompt)]
    params = greedy_params(args.output_len)
    times: list[float] = []
    watch = Stopwatch()

    def on_update(output: RequestOutput) -> None:
        if output.outputs[0].token_ids:
            times.append(round(watch.wall, 2))

    outputs = llm.generate([{"prompt_token_ids": tokens}], params, on_progress=on_update)
    assert len(outputs[0].outputs[0].token_ids) == args.output_len
    line |= {"first_token_s": times[0], "all_s": times[-1]}
    free, total = torch.cuda.mem_get_info()
    line |= {
        "peak_gib": _gib(torch.cuda.max_memory_allocated()),
        "reserved_gib": _gib(torch.cuda.max_memory_reserved()),
        "taken_gib": _gib(total - free),
        "allowed_gib": args.memory_gib,
        "estimated_over_taken": round(estimated / (total - free), 4),
        "rows": llm.engine.plan.max_num_seqs,
        "chunk": llm.engine.plan.max_num_batched_tokens,
        "pages": llm.engine.plan.num_pages,
        "kv": args.kv_cache_dtype,
    }
    print_json(line)


def _estimated(config: EngineConfig) -> int:
    """Return the sum of the bytes that explain estimates for this GPU, part by part."""
    total = torch.cuda.get_device_properties(0).total_memory
    plan = explain_architecture(config, f"sm_{sm_number('cuda')}", total)["plan"]
    parts = ("weights", "overhead", "table", "step", "graphs", "pages", "state")
    return sum(plan.get(f"{part}_bytes", 0) for part in parts)


def _gib(count: int) -> float:
    """Return bytes in GiB."""
    return round(count / GIB, 3)


if __name__ == "__main__":
    main()
