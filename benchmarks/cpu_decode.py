"""Decode speed of one GGUF file on one CPU thread: Lockstep, and llama.cpp where it is installed.

    python benchmarks/cpu_decode.py MODEL.gguf [--rows 1,8] [--drafts 4] [--dtype float32]

CPU time of the process is measured, not wall time: another program on the machine must not count.
Lockstep answers the same prompts with 1 token and with 1 + TOKENS; the difference is decoding.
llama.cpp (llama_cpp) decodes one token per sequence and step, without sampling. One JSON line each.
"""

import argparse
import json
import time
from importlib.util import find_spec

import torch

from lockstep import LLM, SamplingParams

TOKENS = 16
"""Decoded tokens per row and repetition."""
REPEATS = 3
"""Repetitions, of which the fastest counts."""
FIRST = 40
"""Tokens that llama.cpp has in every sequence before it is timed, as a short chat prompt has."""
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
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("model", help="a GGUF file")
    ask.add_argument("--rows", default="1,8", help="requests at once, at most 8")
    ask.add_argument("--drafts", type=int, default=0, help="n-gram drafts per row and step")
    ask.add_argument("--dtype", default="float32", help="dtype of Lockstep")
    given = ask.parse_args()
    rows = [int(count) for count in given.rows.split(",")]
    if not all(1 <= count <= len(PROMPTS) for count in rows):
        ask.error(f"--rows {given.rows}: allowed are numbers from 1 to {len(PROMPTS)}")
    torch.set_num_threads(1)
    if find_spec("llama_cpp") is not None:
        for count in rows:
            report("llama.cpp", count, llama_seconds(given.model, count) / count)
    settings = {}
    if given.drafts:
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": given.drafts,
        }
    llm = LLM(given.model, dtype=given.dtype, max_model_len=1024, max_num_seqs=8, **settings)
    for count in rows:
        decode = answer_seconds(llm, count, 1 + TOKENS) - answer_seconds(llm, count, 1)
        report("lockstep", count, decode / (count * TOKENS))


def report(engine: str, rows: int, seconds: float) -> None:
    """Print the tokens per CPU second of all rows together."""
    print(
        json.dumps(dict(engine=engine, rows=rows, tokens_per_s=round(1 / seconds, 1))), flush=True
    )


def answer_seconds(llm: LLM, rows: int, tokens: int) -> float:
    """Return the least CPU time of so many answers of so many tokens, prompts included."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:rows]]
    taken = []
    for _ in range(1 + REPEATS):
        begin = time.process_time()
        llm.chat(chats, params, use_tqdm=False)
        taken.append(time.process_time() - begin)
    # The first repetition fills the prefix cache, which the others read.
    return min(taken[1:])


def llama_seconds(model: str, rows: int) -> float:
    """Return the least CPU time of one llama.cpp step with one token in each sequence."""
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
    taken = []
    for repeat in range(REPEATS):
        begin = time.process_time()
        for position in range(TOKENS):
            step(FIRST + repeat * TOKENS + position)
        taken.append((time.process_time() - begin) / TOKENS)
    return min(taken)


if __name__ == "__main__":
    main()
