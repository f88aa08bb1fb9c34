"""Time of ngram_lookup in us, as n-gram and suffix drafting call it, in a captured chain.

    python benchmarks/ngram_lookup.py --rows 1,8,64 --context 32768 --answer-tokens 65536

Texts are random tokens of a large vocabulary, where a lookup ends early, and of a vocabulary of
four tokens, where it compares up to its longest n-gram.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from lockstep.bench.measurement import parse_counts, print_json
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.drafting import ngram_lookup
from lockstep.kernels.timing import REPEATS, seconds_per_call

CALLS = 16
"""Calls of a chain on the same texts, which therefore stay in the cache, as in a step."""
DRAFTS = 15
"""Drafts of a row: the maximum of speculative_config."""
ENDS_EVERY = 400
"""Tokens of one ended answer, its separator included."""
LOOKUPS = {"ngram": (2, 4), "suffix": (2, 24)}
"""Method -> lengths of the shortest and the longest n-gram."""


def main() -> None:
    """Read the arguments; time every method, vocabulary, and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=parse_counts, default="1,8,64", help="numbers of rows")
    parser.add_argument("--context", type=int, default=32768, help="known tokens of every row")
    parser.add_argument(
        "--answer-tokens", type=int, default=65536, help="tokens of ended answers, for suffix"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    args = parser.parse_args()
    load_backends()
    name = ngram_lookup.choose(device=args.device, dtype=torch.bfloat16)
    lookup = ngram_lookup.backends[name].run
    for vocab in (150_000, 4):
        for method, (min_length, max_length) in LOOKUPS.items():
            num_answer_tokens = args.answer_tokens if method == "suffix" else 0
            texts = torch.randint(0, vocab, (num_answer_tokens,), device=args.device)
            texts[ENDS_EVERY - 1 :: ENDS_EVERY] = -1
            for rows in args.rows:
                inputs = arguments(rows, args.context, vocab, texts)
                call = partial(lookup, *inputs, min_length, max_length)
                seconds = seconds_per_call([call] * CALLS, args.device, REPEATS[args.device])
                line = {"method": method, "rows": rows, "context": args.context}
                line["answer_tokens"] = num_answer_tokens
                print_json(line | {"vocab": vocab, "us": round(seconds * 1e6, 1)})


def arguments(rows: int, context: int, vocab: int, texts: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of ngram_lookup for rows with `context` known tokens."""
    device = texts.device
    tokens = torch.randint(0, vocab, (rows + 1, context + DRAFTS + 1), device=device)
    computed = torch.full((rows + 1,), context - 1, dtype=torch.int32, device=device)
    oldest = torch.zeros(1, dtype=torch.int64, device=device)
    drafts = torch.full((rows + 1, DRAFTS), -1, device=device)
    row_ids = torch.arange(1, rows + 1, device=device)
    return tokens, computed, texts, oldest, drafts, row_ids


if __name__ == "__main__":
    main()
