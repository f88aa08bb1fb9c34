"""What a compressed cache costs in answers: a text's perplexity and best tokens, against those of
the cache in the model's own dtype.

The text is a prompt in windows, so its tokens go through the prompt law; a recurrent state of 16
bits is rounded at multiples of 64 tokens there, and of 16 where tokens are generated.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.settings import why_unread

BYTES_PER_TOKEN = 16
"""Of the file, so many are read for each token that is wanted: more than any text has."""
LEAST = 2
"""Tokens of a window, of which the first is not predicted."""
ONE = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=1
)
"""Of a window: the log-probabilities of its tokens and of the best ones."""


@dataclass(frozen=True)
class Scores:
    """Of every predicted token of a text: its log-probability, and the best token in its place.
    positions: how many tokens of its window stand in front of it."""

    logprobs: tuple[float, ...]
    best: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean of -logprob."""
        return exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class Kept:
    """How caches are kept: the two settings that are compared."""

    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Measured:
    """One way to keep caches. page_bytes, slot_bytes: of 64 tokens' KV, of one recurrent state."""

    kept: Kept
    scores: Scores
    numerics: str
    page_bytes: int
    slot_bytes: int


@dataclass(frozen=True)
class Quality:
    """A way to keep caches against the first one. agreement: share of places with the same best
    token; differences: |log-probability - the first one's| of each predicted token."""

    measured: Measured
    ratio: float
    agreement: float
    differences: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Its figures as plain numbers."""
        found = asdict(self.measured.kept)
        return found | {
            "perplexity": self.measured.scores.perplexity,
            "perplexity_ratio": self.ratio,
            "top1_agreement": self.agreement,
            "mean_difference": sum(self.differences) / len(self.differences),
            "max_difference": max(self.differences),
            "page_bytes": self.measured.page_bytes,
            "slot_bytes": self.measured.slot_bytes,
            "numerics": self.measured.numerics,
        }


def read_text(path: Path, tokens: int) -> str:
    """As much of a file as `tokens` tokens may take. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(tokens * BYTES_PER_TOKEN)
    except OSError as error:
        raise ConfigError(
            f"--text {path} cannot be read: {why_unread(error)}. Name a text file."
        ) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(data) - error.start < 4 and len(data) == tokens * BYTES_PER_TOKEN:
            return data[: error.start].decode("utf-8")  # a character that was cut in two
        raise ConfigError(
            f"--text {path} is not UTF-8 at byte {error.start}; allowed: UTF-8. Convert it."
        ) from None


def windows_of(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    """The text's first tokens in windows, the last one shorter. Raises ConfigError."""
    if llm.tokenizer is None:
        raise ConfigError("check quality needs a tokenizer; leave --skip-tokenizer-init out.")
    most = llm.engine.plan.max_model_len - 1
    if window > most:
        raise ConfigError(
            f"--window {window} is not allowed; allowed: {LEAST} to {most} (max_model_len less one "
            "output token). Lower it."
        )
    ids = llm.tokenizer.encode(text, add_special_tokens=False)[:tokens]
    cut = [ids[begin : begin + window] for begin in range(0, len(ids), window)]
    found = [part for part in cut if len(part) >= LEAST]
    if not found:
        raise ConfigError(f"--text has {len(ids)} tokens; allowed: {LEAST} or more. Name another.")
    return found


def score(llm: LLM, windows: Sequence[Sequence[int]]) -> Scores:
    """Every token but the first of each window, predicted from those in front of it. Raises
    ConfigError where logits are no numbers."""
    prompts = [{"prompt_token_ids": list(part)} for part in windows]
    outs = llm.generate(prompts, ONE, use_tqdm=False)
    logprobs = []
    best = []
    positions = []
    for part, out in zip(windows, outs, strict=True):
        entries = (out.prompt_logprobs or [])[-(len(part) - 1) :]
        for position, (token, entry) in enumerate(zip(part[1:], entries, strict=True), 1):
            if entry is None or not isfinite(entry[token].logprob):
                raise ConfigError(
                    f"the model gives no finite log-probability for token {token} at position "
                    f"{position} of a window. Try another text, dtype or cache format."
                )
            logprobs.append(entry[token].logprob)
            best.append(min(entry, key=lambda t: (entry[t].rank, t)))
            positions.append(position)
    return Scores(tuple(logprobs), tuple(best), tuple(positions))


def measure(kept: Kept, settings: dict[str, Any], text: str, tokens: int, window: int) -> Measured:
    """An engine that keeps caches so, without drafts and prefix hits, scores the text."""
    own = {"speculative_config": None, "enable_prefix_caching": False} | asdict(kept)
    llm = LLM(**{**settings, **own})
    plan = llm.engine.plan
    scores = score(llm, windows_of(llm, text, tokens, window))
    return Measured(kept, scores, plan.numerics, plan.page_bytes, plan.slot_bytes)


def compare(first: Measured, other: Measured) -> Quality:
    """One way to keep caches against the first."""
    pairs = list(zip(first.scores.logprobs, other.scores.logprobs, strict=True))
    same = [a == b for a, b in zip(first.scores.best, other.scores.best, strict=True)]
    return Quality(
        other,
        other.scores.perplexity / first.scores.perplexity,
        sum(same) / len(same),
        tuple(abs(a - b) for a, b in pairs),
    )


def run_quality(
    ways: Sequence[Kept],
    settings: dict[str, Any],
    text: str,
    tokens: int,
    window: int,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> list[Quality]:
    """The cache in the model's own dtype, then each of the ways, against it."""
    every = [Kept(), *(way for way in dict.fromkeys(ways) if way != Kept())]
    found: list[Quality] = []
    for index, kept in enumerate(every):
        progress("scoring", index, len(every))
        measured = measure(kept, settings, text, tokens, window)
        gc.collect()  # the engine that stood: its memory is the next one's
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        found.append(compare(found[0].measured if found else measured, measured))
    return found
