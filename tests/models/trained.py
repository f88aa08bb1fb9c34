"""What trained models are asked, and how their answers are compared."""

from pathlib import Path

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput
from training.corpus import tasks

ASSETS = Path(__file__).parents[1] / "assets"
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, skip_special_tokens=False, logprobs=1)
LENGTH = {"max_model_len": 2048}
"""What the longest document and its answer fit into."""
NEEDLE = {"characters": 1300}
"""A document of 600 tokens: several chunks of a prompt, and segments of attention."""
END = "<|im_end|>"
FIRST = 10**9
"""Evaluation's seeds begin here."""
MOST_BYTES = 10 << 20
Answers = list[list[tuple[int, float]]]
"""Of each answer, its tokens with their log-probabilities."""


def cases(count: int) -> list[tasks.Sample]:
    """Tool calls, and one needle."""
    found = [tasks.draw(FIRST + seed, True, "tools") for seed in range(count)]
    return [*found, tasks.draw(FIRST, True, "needle", **NEEDLE)]


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities."""
    found = output.outputs[0]
    assert found.logprobs is not None
    pairs = zip(found.token_ids, found.logprobs, strict=True)
    return [(token, entries[token].logprob) for token, entries in pairs]


def right(outputs: list[RequestOutput], samples: list[tasks.Sample]) -> int:
    """How many answers are the wanted ones."""
    return sum(
        out.outputs[0].text.removesuffix(END) == sample.answer.removesuffix(END)
        for out, sample in zip(outputs, samples, strict=True)
    )


def acceptance_length(outputs: list[RequestOutput]) -> float:
    """Tokens a step."""
    steps = sum(out.metrics.num_steps for out in outputs)
    return 1 + sum(out.metrics.num_accepted_tokens for out in outputs) / steps


def answers_alone(llm: LLM, samples: list[tasks.Sample]) -> Answers:
    """What llm, which does not draft, answers to one sample after another."""
    return [bits(llm.generate([sample.prompt], GREEDY)[0]) for sample in samples]


def answers_right_and_alike(llm: LLM, alone: Answers, samples: list[tasks.Sample]) -> float:
    """Asks llm, which drafts, for all samples at once; alone: what they are answered one by one.

    All answers but one are right, and bits are equal. Returns the acceptance length.
    """
    together = llm.generate([sample.prompt for sample in samples], GREEDY)
    assert right(together, samples) >= len(samples) - 1
    assert [bits(out) for out in together] == alone
    return acceptance_length(together)


def size_of(folder: Path) -> int:
    """Bytes of all files in and below the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
