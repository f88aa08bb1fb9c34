"""One prompt as long as memory allows: the allocator's peak and the time of prompt and answer.

    python benchmarks/long_prompt.py FOLDER --memory-gib 22 --prompt 120000 \\
        --max-model-len 125000 --k 3 --kv-cache-dtype turboquant_3bit_nc

FOLDER holds a config.json; weights are random. torch may take no more than --memory-gib of the GPU,
and the engine plans with as much: what does not fit fails. Prints a JSON line when the engine is
built and another after the answer, which compares the memory in use with the sum of the parts that
`lockstep explain` estimates.
"""

import argparse
import json
import time

import torch

from lockstep import LLM, SamplingParams
from lockstep.config import EngineConfig
from lockstep.kernels.architecture import sm_number
from lockstep.outputs import RequestOutput
from lockstep.worker.explain import explain_absent

GIB = 1 << 30


def main() -> None:
    """Reads the arguments, builds the engine, answers one prompt."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("model")
    ask.add_argument("--memory-gib", type=float, default=22, help="of the GPU, all in all")
    ask.add_argument("--prompt", type=int, default=120000, help="tokens of the prompt")
    ask.add_argument("--max-model-len", type=int, default=125000)
    ask.add_argument("--output-len", type=int, default=64, help="tokens of the answer")
    ask.add_argument("--k", type=int, default=3, help="MTP drafts verified and made in a step")
    ask.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    ask.add_argument("--max-num-seqs", type=int, help="chosen if left out")
    ask.add_argument("--max-num-batched-tokens", type=int, help="chosen if left out")
    given = ask.parse_args()
    share = given.memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    spec = {"method": "mtp", "num_speculative_tokens": given.k}
    settings = {
        "model": given.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "gpu_memory_utilization": share,
        "kv_cache_dtype": given.kv_cache_dtype,
        "speculative_config": spec if given.k else None,
    }
    estimated = _estimated(EngineConfig.read(**settings))
    began = time.perf_counter()
    llm = LLM(**settings)
    line = {"build_s": _since(began), "built_gib": _gib(torch.cuda.max_memory_allocated())}
    print(json.dumps(line), flush=True)
    torch.cuda.reset_peak_memory_stats()
    tokens = [7 * i % 1000 for i in range(given.prompt)]
    params = SamplingParams(
        temperature=0, max_tokens=given.output_len, ignore_eos=True, detokenize=False
    )
    times: list[float] = []
    began = time.perf_counter()

    def see(output: RequestOutput) -> None:
        if output.outputs[0].token_ids:
            times.append(_since(began))

    found = llm.generate([{"prompt_token_ids": tokens}], params, on_progress=see)
    assert len(found[0].outputs[0].token_ids) == given.output_len
    line |= {"first_token_s": times[0], "all_s": times[-1]}
    free, total = torch.cuda.mem_get_info()
    line |= {
        "peak_gib": _gib(torch.cuda.max_memory_allocated()),
        "reserved_gib": _gib(torch.cuda.max_memory_reserved()),
        "taken_gib": _gib(total - free),
        "allowed_gib": given.memory_gib,
        "estimated_over_taken": round(estimated / (total - free), 4),
        "rows": llm.engine.plan.max_num_seqs,
        "chunk": llm.engine.plan.max_num_batched_tokens,
        "pages": llm.engine.plan.num_pages,
        "kv": given.kv_cache_dtype,
    }
    print(json.dumps(line), flush=True)


def _estimated(config: EngineConfig) -> int:
    """Return the sum of the bytes that explain estimates for this GPU, part by part."""
    total = torch.cuda.get_device_properties(0).total_memory
    plan = explain_absent(config, f"sm_{sm_number('cuda')}", total)["plan"]
    parts = ("weights", "overhead", "table", "step", "graphs", "pages", "state")
    return sum(plan.get(f"{part}_bytes", 0) for part in parts)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


def _gib(count: int) -> float:
    return round(count / GIB, 3)


if __name__ == "__main__":
    main()
