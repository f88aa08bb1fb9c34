"""us of one ngram_lookup, as n-gram and suffix drafting call it, in a captured chain of calls.

    python benchmarks/lookup.py --rows 1,8,64 --context 32768 --ring 65536

The texts are random tokens of a large vocabulary, where a lookup gives up early, and of four
tokens, where it compares as far as it may.
"""

import argparse
import json
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.drafting import ngram_lookup
from lockstep.kernels.timing import REPEATS, seconds_per_call

CALLS = 16
"""Calls of a chain, on the same texts: a step finds them in the cache as far as they fit."""
DRAFTS = 15
ENDS_EVERY = 400
"""Tokens of an answer in the ring."""
LOOKUPS = {"ngram": (2, 4), "suffix": (2, 24)}
"""Method -> tokens of the shortest and the longest n-gram that it looks up."""


def main() -> None:
    """Reads the arguments and times every method, number of rows and vocabulary."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("--rows", default="1,8,64", help="numbers of rows")
    ask.add_argument("--context", type=int, default=32768, help="known tokens of every row")
    ask.add_argument("--ring", type=int, default=65536, help="tokens of the ring of answers")
    ask.add_argument("--device", default="cuda", help="cuda or cpu")
    given = ask.parse_args()
    load_backends()
    name = ngram_lookup.choose(device=given.device, dtype=torch.bfloat16)
    lookup = ngram_lookup.backends[name].run
    for vocab in (150_000, 4):
        for method, (least, most) in LOOKUPS.items():
            room = given.ring if method == "suffix" else 0
            texts = torch.randint(0, vocab, (room,), device=given.device)
            texts[ENDS_EVERY - 1 :: ENDS_EVERY] = -1
            for rows in map(int, given.rows.split(",")):
                made = arguments(rows, given.context, vocab, texts)
                call = partial(lookup, *made, least, most)
                taken = seconds_per_call([call] * CALLS, given.device, REPEATS[given.device])
                line = {"method": method, "rows": rows, "context": given.context, "ring": room}
                print(json.dumps(line | {"vocab": vocab, "us": round(taken * 1e6, 1)}), flush=True)


def arguments(rows: int, context: int, vocab: int, texts: Tensor) -> tuple[Tensor, ...]:
    """The tensors of ngram_lookup, of rows that know `context` tokens."""
    device = texts.device
    history = torch.randint(0, vocab, (rows + 1, context + DRAFTS + 1), device=device)
    computed = torch.full((rows + 1,), context - 1, dtype=torch.int32, device=device)
    oldest = torch.zeros(1, dtype=torch.int64, device=device)
    drafts = torch.full((rows + 1, DRAFTS), -1, device=device)
    row_ids = torch.arange(1, rows + 1, device=device)
    return history, computed, texts, oldest, drafts, row_ids


if __name__ == "__main__":
    main()
