"""Tests of tasks: seeds determine samples, answers follow from prompts, the template agrees."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import training
from lockstep.text.templates.chat_template import ChatTemplate
from training.corpus import stdlib_text, tasks
from training.corpus.words import held_out

SEEDS = range(25)
TEMPLATE = Path(training.__file__).parent / "chat_template.jinja"


@pytest.fixture(autouse=True, scope="module")
def _filler() -> None:
    stdlib_text.load_filler()


def test_shares_name_tasks_and_only_these_are_sampled() -> None:
    assert set(tasks.CALLS) < set(tasks.SHARES) == set(tasks.TASKS)
    kinds = {tasks.draw(seed, shares=tasks.CALLS).task for seed in range(200)}
    assert "sequence" not in kinds and "tools" in kinds
    assert tasks.draw(3, shares={"json": 1.0}).task == "json"


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_seed_gives_one_sample(task: str) -> None:
    first = [tasks.draw(seed, task=task).pieces for seed in SEEDS]
    assert first == [tasks.draw(seed, task=task).pieces for seed in SEEDS]
    assert first != [tasks.draw(seed, evaluation=True, task=task).pieces for seed in SEEDS]


@cache
def template_of_model() -> ChatTemplate:
    """Return the template of the bundled model."""
    return ChatTemplate(TEMPLATE.read_text())


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("evaluation", [False, True])
def test_prompts_are_what_the_template_renders(task: str, evaluation: bool) -> None:
    template = template_of_model()
    for seed in SEEDS:
        sample = tasks.draw(seed, evaluation=evaluation, task=task)
        assert template.render(sample.messages, sample.tools) == sample.prompt
        assert sample.answer.endswith("<|im_end|>")


def test_calls_name_a_given_tool_and_every_required_parameter() -> None:
    for seed in SEEDS:
        sample = tasks.draw(seed, evaluation=True, task="tools")
        name = re.search(r"<function=(.+?)>", sample.answer)
        assert name is not None
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in sample.tools}
        required = schemas[name[1]]["required"]
        values = dict(re.findall(r"<parameter=(.+?)>\n(.*?)\n</parameter>", sample.answer, re.S))
        assert list(values) == required
        question = sample.messages[-1]["content"]
        for key, entry in schemas[name[1]]["properties"].items():
            if entry["type"] == "string":
                assert values[key] in question


def test_needles_are_in_the_text_once_and_held_out() -> None:
    for seed in SEEDS:
        sample = tasks.draw(seed, evaluation=True, task="needle", characters=2000)
        answer = sample.answer.removesuffix("<|im_end|>")
        assert sample.prompt.count(answer) == 1
        assert held_out(answer.removesuffix(".").split(" is ")[1])


def test_json_answers_fit_their_schema() -> None:
    for seed in SEEDS:
        sample = tasks.draw(seed, evaluation=True, task="json")
        schema = json.loads(sample.messages[-1]["content"].split("schema:\n")[1].split("\n")[0])
        assert list(json.loads(sample.answer.removesuffix("<|im_end|>"))) == schema["required"]


def test_sides_share_no_made_up_name() -> None:
    for evaluation in (False, True):
        for seed in SEEDS:
            for tool in tasks.draw(seed, evaluation=evaluation, task="tools").tools:
                for name in tool["function"]["parameters"]["properties"]:
                    assert held_out(name) == evaluation
