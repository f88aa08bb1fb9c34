"""Time per token of forced tokens, next to that of generated ones.

    python benchmarks/forced.py FOLDER --rows 1,8 --prompt 2048 --output-len 513 [--k 3]

FOLDER contains a config.json; weights are random. Each batch of prompts is answered twice: first
all tokens are generated, then all of them are forced, and the answers must be equal. Prints a JSON
line per number of rows. ms_token and forced_ms_token: time of the answers' tokens after the first
one, per token of a row; ratio: their quotient. window_ms: time of a step with a full window.
"""

import argparse
from dataclasses import replace

from lockstep import LLM, SamplingParams
from lockstep.bench.measurement import (
    greedy_params,
    model_settings,
    parse_counts,
    print_json,
    speculative_config,
)
from lockstep.outputs import RequestOutput


def main() -> None:
    """Read the arguments, build the engine, and time each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8", help="numbers of rows, separated by commas")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=513, help="tokens of an answer")
    parser.add_argument("--k", type=int, default=0, help="MTP drafts of a step")
    parser.add_argument("--kv-cache-dtype", default="auto", help="format of keys and values")
    args = parser.parse_args()
    counts = parse_counts(args.rows)
    llm = LLM(
        **model_settings(args.model),
        skip_tokenizer_init=True,
        max_model_len=args.prompt + args.output_len + 1,
        max_num_seqs=max(counts),
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=False,
        speculative_config=speculative_config("mtp", args.k),
    )
    for rows in counts:
        print_json(compare(llm, rows, args.prompt, args.output_len) | {"k": args.k})


def compare(llm: LLM, rows: int, prompt_len: int, output_len: int) -> dict[str, float]:
    """Return the times of `rows` answers, generated and forced."""
    prompts = [
        {"prompt_token_ids": [(7 * i + row) % 1000 for i in range(prompt_len)]}
        for row in range(rows)
    ]
    params = [greedy_params(output_len) for _ in prompts]
    llm.generate(prompts, [replace(one, max_tokens=8) for one in params])  # compiles
    generated = llm.generate(prompts, params)
    forcing = [_forcing(one, output) for one, output in zip(params, generated, strict=True)]
    llm.generate(prompts, forcing)  # compiles
    forced = llm.generate(prompts, forcing)
    for one, other in zip(generated, forced, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, "the answers differ"
    steps = max(output.metrics.num_steps for output in forced)
    ms_token = decode_ms(generated) / (output_len - 1)
    forced_ms = decode_ms(forced)
    return {
        "rows": rows,
        "prompt": prompt_len,
        "ms_token": round(ms_token, 3),
        "forced_ms_token": round(forced_ms / (output_len - 1), 4),
        "ratio": round(ms_token * (output_len - 1) / forced_ms, 1),
        "window_ms": round(forced_ms / steps, 2),
        "steps": steps,
    }


def _forcing(params: SamplingParams, output: RequestOutput) -> SamplingParams:
    """Return the parameters that force the tokens of an output."""
    return replace(params, forced_token_ids=output.outputs[0].token_ids)


def decode_ms(outputs: list[RequestOutput]) -> float:
    """Return the ms from the last first token of a batch to its last token."""
    first = max(output.metrics.first_token_time or 0.0 for output in outputs)
    return 1e3 * (max(output.metrics.finished_time or 0.0 for output in outputs) - first)


if __name__ == "__main__":
    main()
