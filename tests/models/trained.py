"""Tasks for trained models, and the comparison of their answers."""

from pathlib import Path

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput
from training.corpus import tasks

ASSETS = Path(__file__).parents[1] / "assets"
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, skip_special_tokens=False, logprobs=1)
LENGTH = {"max_model_len": 2048}
"""Settings with room for the longest document and its answer."""
NEEDLE = {"characters": 1300}
"""A document of 600 tokens: several chunks of a prompt, and splits of attention."""
END = "<|im_end|>"
FIRST_SEED = 10**9
"""First seed of evaluation."""
MAX_BYTES = 10 << 20
Answers = list[list[tuple[int, float]]]
"""For each answer, its tokens with their log-probabilities."""


def cases(count: int) -> list[tasks.Sample]:
    """Return tool calls and one needle."""
    results = [tasks.draw(FIRST_SEED + seed, True, "tools") for seed in range(count)]
    return [*results, tasks.draw(FIRST_SEED, True, "needle", **NEEDLE)]


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    """Return tokens and their log-probabilities."""
    result = output.outputs[0]
    assert result.logprobs is not None
    pairs = zip(result.token_ids, result.logprobs, strict=True)
    return [(token, entries[token].logprob) for token, entries in pairs]


def num_correct(outputs: list[RequestOutput], samples: list[tasks.Sample]) -> int:
    """Return the number of correct answers."""
    return sum(
        out.outputs[0].text.removesuffix(END) == sample.answer.removesuffix(END)
        for out, sample in zip(outputs, samples, strict=True)
    )


def acceptance_length(outputs: list[RequestOutput]) -> float:
    """Return the tokens per step."""
    steps = sum(out.metrics.num_steps for out in outputs)
    return 1 + sum(out.metrics.num_accepted_tokens for out in outputs) / steps


def answers_alone(llm: LLM, samples: list[tasks.Sample]) -> Answers:
    """Return the answers of an llm without drafts to one sample after another."""
    return [bits(llm.generate([sample.prompt], GREEDY)[0]) for sample in samples]


def check_answers(llm: LLM, alone: Answers, samples: list[tasks.Sample]) -> float:
    """Assert that at most one answer of a batch with drafts is wrong, and that all equal `alone`
    bit for bit; return the acceptance length."""
    together = llm.generate([sample.prompt for sample in samples], GREEDY)
    assert num_correct(together, samples) >= len(samples) - 1
    assert [bits(out) for out in together] == alone
    return acceptance_length(together)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in and below the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
