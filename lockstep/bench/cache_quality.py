"""Accuracy of quantized caches: perplexity and top-1 tokens of a text against the model's dtype.

The text is processed as prompts, so its tokens take the chunked form. A 16-bit recurrent state is
rounded there at multiples of 64 tokens; for generated tokens it is rounded at multiples of 16.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.llm import LLM
from lockstep.progress import Progress, ignore_progress
from lockstep.sampling_params import SamplingParams
from lockstep.settings import path_fault

BYTES_PER_TOKEN = 16
"""Bytes of the file that are read per requested token, more than any text needs."""
MIN_WINDOW = 2
"""Minimum tokens of a window; its first token is not predicted."""
SCORING_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=1
)
"""Sampling parameters of a window: log-probabilities of its tokens and of the best ones."""


@dataclass(frozen=True)
class Scores:
    """Log-probability and best token of every predicted token of a text.

    positions: number of tokens before it in its window.
    """

    logprobs: tuple[float, ...]
    best: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        """Return exp(mean(-logprob))."""
        return exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True)
class CacheDtypes:
    """Cache dtypes that are compared."""

    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"


@dataclass(frozen=True)
class CacheScores:
    """Scores of one pair of cache dtypes.

    page_bytes: bytes of the KV of 64 tokens. slot_bytes: bytes of one recurrent state.
    """

    dtypes: CacheDtypes
    scores: Scores
    numerics: str
    page_bytes: int
    slot_bytes: int


@dataclass(frozen=True)
class Quality:
    """Comparison of one pair of cache dtypes with the first.

    agreement: share of positions with the same best token. differences: absolute difference of each
    token's log-probability.
    """

    measured: CacheScores
    ratio: float
    agreement: float
    differences: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        figures = asdict(self.measured.dtypes)
        return figures | {
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
    """Read the start of a file that contains at least `tokens` tokens. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(tokens * BYTES_PER_TOKEN)
    except OSError as error:
        raise ConfigError(
            f"--text {path} cannot be read: {path_fault(error)}. Name a text file."
        ) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(data) - error.start < 4 and len(data) == tokens * BYTES_PER_TOKEN:
            return data[: error.start].decode("utf-8")  # the read limit cut the last character
        raise ConfigError(
            f"--text {path} is not UTF-8 at byte {error.start}; allowed: UTF-8. Convert it."
        ) from None


def windows_of(llm: LLM, text: str, tokens: int, window: int) -> list[list[int]]:
    """Split the text's first tokens into windows; the last may be shorter. Raises ConfigError."""
    if llm.tokenizer is None:
        raise ConfigError("check quality needs a tokenizer; leave --skip-tokenizer-init out.")
    max_window = llm.engine.plan.max_model_len - 1
    if window > max_window:
        raise ConfigError(
            f"--window {window} is not allowed; allowed: {MIN_WINDOW} to {max_window} "
            "(max_model_len less one output token). Lower it."
        )
    ids = llm.tokenizer.encode(text, add_special_tokens=False)[:tokens]
    parts = [ids[begin : begin + window] for begin in range(0, len(ids), window)]
    windows = [part for part in parts if len(part) >= MIN_WINDOW]
    if not windows:
        raise ConfigError(
            f"--text has {len(ids)} tokens; allowed: {MIN_WINDOW} or more. Name another."
        )
    return windows


def score(llm: LLM, windows: Sequence[Sequence[int]]) -> Scores:
    """Predict every token of each window but its first.

    Raises ConfigError if logits are not finite.
    """
    prompts = [{"prompt_token_ids": list(part)} for part in windows]
    outputs = llm.generate(prompts, SCORING_PARAMS, use_tqdm=False)
    logprobs = []
    best = []
    positions = []
    for part, output in zip(windows, outputs, strict=True):
        # The first token of a window has no log-probability.
        entries = (output.prompt_logprobs or [])[-(len(part) - 1) :]
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


def measure(
    dtypes: CacheDtypes, settings: dict[str, Any], text: str, tokens: int, window: int
) -> CacheScores:
    """Score the text on an engine with these cache dtypes, without drafts and prefix caching."""
    overrides = {"speculative_config": None, "enable_prefix_caching": False} | asdict(dtypes)
    llm = LLM(**{**settings, **overrides})
    plan = llm.engine.plan
    scores = score(llm, windows_of(llm, text, tokens, window))
    return CacheScores(dtypes, scores, plan.numerics, plan.page_bytes, plan.slot_bytes)


def compare(first: CacheScores, other: CacheScores) -> Quality:
    """Compare one pair of cache dtypes with the first."""
    pairs = list(zip(first.scores.logprobs, other.scores.logprobs, strict=True))
    equal = [a == b for a, b in zip(first.scores.best, other.scores.best, strict=True)]
    return Quality(
        other,
        other.scores.perplexity / first.scores.perplexity,
        sum(equal) / len(equal),
        tuple(abs(a - b) for a, b in pairs),
    )


def run_quality(
    pairs: Sequence[CacheDtypes],
    settings: dict[str, Any],
    text: str,
    tokens: int,
    window: int,
    progress: Progress = ignore_progress,
) -> list[Quality]:
    """Measure the caches in the model's dtype, then compare each other pair with them."""
    all_pairs = [CacheDtypes(), *(pair for pair in dict.fromkeys(pairs) if pair != CacheDtypes())]
    qualities: list[Quality] = []
    for index, dtypes in enumerate(all_pairs):
        progress("scoring", index, len(all_pairs))
        measured = measure(dtypes, settings, text, tokens, window)
        gc.collect()  # free the engine's memory for the next one; its objects refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        qualities.append(compare(qualities[0].measured if qualities else measured, measured))
    return qualities
