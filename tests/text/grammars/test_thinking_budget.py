"""thinking_token_budget: which tokens are counted, and which are forced once it is used up."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.sampling_params import SamplingParams
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import allows, masks_of
from tests.text.tiny_tokenizer import make_folder

USER = [{"role": "user", "content": "the fox"}]
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module", params=["one token", "several tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """Yield a model whose tags are single tokens, and one that spells them."""
    folder: Path = make_folder(tmp_path_factory.mktemp("tags"))
    if request.param == "several tokens":
        path = folder / "tokenizer.json"
        raw = json.loads(path.read_text())
        raw["added_tokens"] = [one for one in raw["added_tokens"] if one["special"]]
        path.write_text(json.dumps(raw))
    return Processor.for_model(Tokenizer(folder), folder, 512)


def budget_grammar(
    model: Processor, budget: int, tools: Any = None, thinks: bool = True, **fields: Any
):
    """Return the grammar of an answer to a chat."""
    prompt = model.conversation(USER, tools, enable_thinking=thinks)
    params = SamplingParams(thinking_token_budget=budget, max_tokens=100, **fields)
    return model.requests("r", prompt, params)[0].grammar


def ids(model: Processor, text: str) -> list[int]:
    return model.encode(text, add_special_tokens=False)


def forced_tokens(masks: Sequence[bytes]) -> list[int | None]:
    """Return the single token that each mask allows; None where it allows all."""
    result: list[int | None] = []
    for mask in masks:
        tokens = [token for token in range(len(mask) * 8) if allows(mask, token)]
        result.append(tokens[0] if len(tokens) == 1 else None)
        assert len(tokens) in (1, len(mask) * 8)
    return result


def closing_tokens(model: Processor, grammar: Any, thought: Sequence[int]) -> list[int]:
    """Return the forced tokens after a thought, up to the first free one."""
    grammar.accept(list(thought))
    result: list[int] = []
    while (token := forced_tokens(masks_of(grammar))[0]) is not None:
        result.append(token)
        grammar.accept([token])
        assert len(result) < 20
    return result


def test_closing_tag_is_forced_once_the_budget_is_used_up(model: Processor) -> None:
    thought = ids(model, "abcdefgh")
    for budget in (0, 1, 3):
        grammar = budget_grammar(model, budget)
        for count in range(budget):
            assert forced_tokens(masks_of(grammar)) == [None]
            grammar.accept([thought[count]])
        tag = closing_tokens(model, grammar, [])
        assert model.tokenizer.decode(tag, skip_special_tokens=False) == "</think>"
        assert forced_tokens(masks_of(grammar, thought)) == [None] * (len(thought) + 1)
        assert grammar.accepted == budget + len(tag) and grammar.fault is None
        fresh = grammar.fresh()
        assert fresh.accepted == 0
        assert closing_tokens(model, fresh, thought[:budget]) == tag


@pytest.mark.default_cases("one token")
def test_masks_after_drafts_are_those_of_the_same_tokens_accepted(model: Processor) -> None:
    texts = ["abcdefghij", "ab</think>cdefgh", "a</think>\n\nthe <think>abcd", "ab</thi"]
    for text in texts:
        tokens = ids(model, text)
        for budget in range(6):
            for size in (1, 2, 4, 7):
                plain = budget_grammar(model, budget)
                drafting = budget_grammar(model, budget)
                for start in range(len(tokens)):
                    result = masks_of(drafting, tokens[start : start + size])
                    for offset, mask in enumerate(result):
                        copy_ahead = budget_grammar(model, budget)
                        copy_ahead.accept(tokens[: start + offset])
                        assert mask == masks_of(copy_ahead)[0]
                    assert result[0] == masks_of(plain)[0]
                    for grammar in (plain, drafting):
                        grammar.accept([tokens[start]])


def test_partial_closing_tag_is_completed(model: Processor) -> None:
    thought = [*ids(model, "a"), *ids(model, "<"), *ids(model, "/")]
    tag = closing_tokens(model, budget_grammar(model, 3), thought)
    text = model.tokenizer.decode([*thought, *tag], skip_special_tokens=False)
    complete = model.tokenizer.fast.token_to_id("</think>")
    assert text == ("a</think>" if complete is None else "a</</think>")
    parser = model.reply_parser("<think>", None)
    assert [event.text for event in parser.feed(f"{text}yes")][-1] == "yes"


def test_thought_within_the_budget_leaves_the_answer_free(model: Processor) -> None:
    grammar = budget_grammar(model, 4)
    assert not grammar.is_free
    grammar.accept(ids(model, "a</think>"))
    assert grammar.is_free
    rest = ids(model, "bcdefgh")
    assert forced_tokens(masks_of(grammar, rest)) == [None] * (len(rest) + 1)
    grammar.accept(rest)
    assert forced_tokens(masks_of(grammar)) == [None]


@pytest.mark.parametrize("lead", ["", "\n\n"])
def test_thought_opened_by_the_answer_is_bounded(model: Processor, lead: str) -> None:
    """A raw prompt opens no thought; the opening tag of the answer is not counted."""
    params = SamplingParams(thinking_token_budget=2, max_tokens=100)
    grammar = model.requests("r", "the fox", params)[0].grammar
    assert grammar is not None
    opening = ids(model, f"{lead}<think>")
    assert forced_tokens(masks_of(grammar, opening)) == [None] * (len(opening) + 1)
    tag = closing_tokens(model, grammar, [*opening, *ids(model, "ab")])
    assert model.tokenizer.decode(tag, skip_special_tokens=False) == "</think>"
    free = model.requests("r", "the fox", params)[0].grammar
    assert forced_tokens(masks_of(free, ids(model, "the <think>ab"))) == [None] * (
        len(ids(model, "the <think>ab")) + 1
    )


@pytest.mark.parametrize("raw", [False, True])
def test_prompt_determines_whether_a_thought_is_open(model: Processor, raw: bool) -> None:
    params = SamplingParams(thinking_token_budget=0, max_tokens=100)
    prompts = [model.conversation(USER, enable_thinking=thinks) for thinks in (True, False)]
    for prompt, thinks in zip(prompts, (True, False), strict=True):
        sent = prompt.ids if raw else prompt
        grammar = model.requests("r", sent, params)[0].grammar
        assert (grammar is not None) == thinks
        assert not thinks or forced_tokens(masks_of(grammar)) != [None]


def test_ineffective_budget_has_no_grammar(model: Processor) -> None:
    assert budget_grammar(model, -1) is None
    assert budget_grammar(model, 100) is None
    assert budget_grammar(model, 99) is not None
    assert budget_grammar(model, 5, thinks=False) is None


def test_complete_call_header_ends_the_thought(model: Processor) -> None:
    call = ids(model, "a<tool_call>\n<function=get>\n")
    grammar = budget_grammar(model, len(call), TOOLS)
    grammar.accept(call)
    more = ids(model, "</function>\n</tool_call>")
    assert forced_tokens(masks_of(grammar, more)) == [None] * (len(more) + 1)
    named = ids(model, "a<tool_call>\nis a tag")
    assert closing_tokens(model, budget_grammar(model, len(named), TOOLS), named)
    assert closing_tokens(model, budget_grammar(model, len(call)), call), (
        "there are no tools to call"
    )


def test_each_completion_has_its_own_budget(model: Processor) -> None:
    prompt = model.conversation(USER, enable_thinking=True)
    params = SamplingParams(thinking_token_budget=2, max_tokens=100, n=3)
    first, second, third = (one.grammar for one in model.requests("r", prompt, params))
    first.accept(ids(model, "ab"))
    assert forced_tokens(masks_of(first)) != [None]
    assert forced_tokens(masks_of(second)) == forced_tokens(masks_of(third)) == [None]
    again = model.grammar_of(pickle.loads(pickle.dumps(first.recipe)))
    assert again.accepted == 0 and again.recipe == first.recipe
    assert masks_of(again, ids(model, "abc")) == masks_of(second, ids(model, "abc"))


def test_budget_composes_with_structured_outputs(processor: Processor) -> None:
    """With tags of one token; the content is constrained wherever the thought ends.

    The content may be empty, so that the answer may end inside of the thought.
    """
    form = {"choice": ["yes", "no", ""]}
    end = processor.tokenizer.fast.token_to_id("</think>")
    content = ids(processor, "yes")
    plain = processor.requests("r", "fox", SamplingParams(structured_outputs=form))[0].grammar
    for thought in ("", "a", "ab"):
        grammar = budget_grammar(processor, 2, structured_outputs=form)
        tokens = ids(processor, thought)
        free = [None] * len(tokens) + [end if len(tokens) == 2 else None]
        assert forced_tokens(masks_of(grammar, tokens)) == free
        drafted = masks_of(grammar, [*tokens, end, *content])
        assert drafted[len(tokens) + 1 :] == masks_of(plain, content)
        grammar.accept([*tokens, end])
        assert not grammar.is_free
        assert masks_of(grammar, content) == masks_of(plain, content)
    again = processor.grammar_of(pickle.loads(pickle.dumps(grammar.recipe)))
    for restarted in (again, grammar.fresh()):
        assert masks_of(restarted, [end, *content]) == masks_of(
            budget_grammar(processor, 2, structured_outputs=form), [end, *content]
        )
    raw = SamplingParams(structured_outputs=form, thinking_token_budget=0)
    bound = processor.requests("r", "fox", raw)[0].grammar
    assert masks_of(bound, content) == masks_of(plain, content), "there is no thought"


def test_unenforceable_budget_is_refused(model: Processor, folder: Path) -> None:
    messages = SamplingParams(thinking_token_budget=5)
    plain = Processor(model.tokenizer, None, 512, model.eos_ids)
    with pytest.raises(RequestError, match="thinking_token_budget=5 needs a reasoning parser"):
        plain.requests("r", "fox", messages)
    with pytest.raises(RequestError, match="which allowed_token_ids lacks") as error:
        budget_grammar(model, 5, allowed_token_ids=[1, 2, 3])
    assert error.value.field == "thinking_token_budget"
    for wrong in (-2, 1.5, True, "9", 2**31):
        with pytest.raises(RequestError, match="thinking_token_budget="):
            SamplingParams(thinking_token_budget=wrong)
