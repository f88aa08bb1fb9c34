"""Decode speed of one GGUF file on one CPU thread: Lockstep, and llama.cpp where it is installed.

    python benchmarks/cpu_decode.py MODEL.gguf [--rows 1,8] [--drafts 4] [--dtype float32]

CPU time of the process is measured, so that other programs on the machine do not count.
Lockstep answers the same prompts with 1 token and with 1 + TOKENS; the difference is decoding.
llama.cpp (llama_cpp) decodes one token per sequence and step, without sampling. One JSON line each.
"""

import argparse
from importlib.util import find_spec

import torch

from lockstep import LLM, SamplingParams
from lockstep.bench.measurement import Stopwatch, parse_counts, print_json

TOKENS = 16
"""Decoded tokens per row and repetition."""
REPEATS = 3
"""Repetitions; the fastest one is reported."""
FIRST = 40
"""Tokens of every llama.cpp sequence before the timed steps, as long as a short chat prompt."""
PROMPTS = (
    "Write a short story about a dog.",
    "What is the capital of France?",
    "List five colors.",
    "Explain gravity to a child.",
    "Write a Python function that adds two numbers.",
    "Name three rivers in Europe and say where they are.",
    "What is 2 + 2? Explain.",
    "Describe a sunset over the sea.",
)


def main() -> None:
    """Read the arguments and measure both engines at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument(
        "--rows", type=parse_counts, default="1,8", help="requests at once, at most 8"
    )
    parser.add_argument("--drafts", type=int, default=0, help="n-gram drafts per row and step")
    parser.add_argument("--dtype", default="float32", help="dtype of Lockstep")
    args = parser.parse_args()
    rows = args.rows
    if not all(1 <= count <= len(PROMPTS) for count in rows):
        parser.error(f"--rows {rows}: allowed are numbers from 1 to {len(PROMPTS)}")
    torch.set_num_threads(1)
    if find_spec("llama_cpp") is not None:
        for count in rows:
            report("llama.cpp", count, llama_seconds(args.model, count) / count)
    settings = {}
    if args.drafts:
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
        }
    llm = LLM(args.model, dtype=args.dtype, max_model_len=1024, max_num_seqs=8, **settings)
    for count in rows:
        decode = answer_seconds(llm, count, 1 + TOKENS) - answer_seconds(llm, count, 1)
        report("lockstep", count, decode / (count * TOKENS))


def report(engine: str, rows: int, seconds: float) -> None:
    """Print the tokens per CPU second of all rows together."""
    print_json(dict(engine=engine, rows=rows, tokens_per_s=round(1 / seconds, 1)))


def answer_seconds(llm: LLM, rows: int, tokens: int) -> float:
    """Return the lowest CPU time of `rows` answers of `tokens` tokens, prompts included."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:rows]]
    cpu_seconds = []
    for _ in range(1 + REPEATS):
        watch = Stopwatch()
        llm.chat(chats, params, use_tqdm=False)
        cpu_seconds.append(watch.cpu)
    # The first repetition fills the prefix cache, which the others read.
    return min(cpu_seconds[1:])


def llama_seconds(model: str, rows: int) -> float:
    """Return the lowest CPU time of one llama.cpp step with one token in each sequence."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = 128 * rows
    settings.n_seq_max = rows
    settings.n_threads = settings.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(weights, settings)
    batch = llama_cpp.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows

    def step(position: int) -> None:
        for row in range(rows):
            batch.token[row] = 1000 + 7 * row + position
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = row
            batch.logits[row] = 1
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp did not decode position {position}")

    for position in range(FIRST):
        step(position)
    cpu_seconds = []
    for repeat in range(REPEATS):
        watch = Stopwatch()
        for position in range(TOKENS):
            step(FIRST + repeat * TOKENS + position)
        cpu_seconds.append(watch.cpu / TOKENS)
    return min(cpu_seconds)


if __name__ == "__main__":
    main()
