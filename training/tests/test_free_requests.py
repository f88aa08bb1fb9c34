"""Tests of requests in free phrasing: arguments come from the request, and none is held out."""

import random
import re
from typing import Any

import pytest

from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from training.corpus import argument_values, free_requests, number_sequences, tasks
from training.corpus.words import Words
from training.evaluate import calls_in
from training.evaluation_sets import blind_requests, development_requests
from training.evaluation_sets.request_set import Call, Requests

SEEDS = range(60)


def _words(seed: int) -> Words:
    return Words(random.Random(seed), False)


def _properties(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (function,) = (t["function"] for t in tools if t["function"]["name"] == name)
    return function.get("parameters", {}).get("properties", {})


def _check(tools: list[dict[str, Any]], request: str, calls: list[Call]) -> None:
    for name, arguments in calls:
        entries = _properties(tools, name)
        assert list(arguments) == [key for key in entries if key in arguments]
        for key, value in arguments.items():
            entry = entries[key]
            if "enum" in entry:
                assert value in entry["enum"]
            elif entry["type"] == "string":
                assert value in request
            elif entry["type"] == "array":
                assert all(item in request for item in value)
            else:
                kinds = {"integer": int, "number": (int, float), "boolean": bool}
                assert isinstance(value, kinds[entry["type"]])  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [free_requests.single, free_requests.several])
def test_arguments_occur_in_the_request(make: Any) -> None:
    for seed in SEEDS:
        request = make(_words(seed))
        tools = [tool.schema for tool in request.tools]
        assert len({tool["function"]["name"] for tool in tools}) == len(tools)
        assert (len(request.calls) > 1) == (make is free_requests.several)
        _check(tools, request.text, request.calls)


def test_every_frame_of_the_file_can_be_filled() -> None:
    w = _words(1)
    for intent in free_requests.intents():
        assert intent.abouts and intent.frames
        for _, frame, _ in intent.frames:
            assert free_requests.slots_of(frame) <= intent.params.keys()
            resolved = free_requests.resolve(w, frame)
            assert not re.search(r"[()\[\]|]", resolved)
            tool = free_requests.offer_for(w, intent, resolved)
            assert free_requests.can_answer(tool, resolved)
            assert "{" not in free_requests.fill(w, resolved, tool).text.replace("{}", "")


def test_a_verb_may_mean_a_member_of_an_enum() -> None:
    param = free_requests.Param(("status",), "{open closed=shut}", False)
    frame = free_requests.Frame("!", "{status=closed/finish} it")
    intent = free_requests.Intent(("set_status",), ("Sets it",), {"status": param}, (frame,))
    for seed in SEEDS:
        w = _words(seed)
        tool = free_requests.offer_for(w, intent, frame.text)
        (listed,) = tool.schema["function"]["parameters"]["properties"].values()
        phrasing = free_requests.fill(w, frame.text, tool)
        assert phrasing.text == "finish it"
        assert phrasing.arguments["status"].lower() == "closed"
        assert phrasing.arguments["status"] in listed["enum"]


def test_additions_to_a_request_become_arguments() -> None:
    params = {
        "city": free_requests.Param(("city",), "city", False),
        "days": free_requests.Param(("days",), "int 2-9", True),
    }
    intent = free_requests.Intent(("f",), ("F",), params, (free_requests.Frame("!", "see {city}"),))
    tools = [free_requests.offer(_words(1), intent, frozenset(params))]
    requests = [free_requests.single(_words(seed), tools) for seed in range(300)]
    counts = [len(request.calls[0][1]) for request in requests]
    assert 15 < counts.count(2) < 90 and counts.count(1) + counts.count(2) == 300


def test_tools_of_one_field_are_related_and_differ() -> None:
    for intent in free_requests.intents():
        names = [tool.intent.names[0] for tool in free_requests.domain(_words(3), intent)]
        assert set(names) <= free_requests.related(intent) - free_requests.incompatible_with(intent)
        assert len(set(names)) == len(names) <= 4


def test_a_request_that_names_values_alone_is_vague() -> None:
    assert free_requests.vague("get me a {x}") and free_requests.vague("{x} please")
    assert not free_requests.vague("play {x}") and not free_requests.vague("get me out of here")


def test_groups_name_intents_of_the_file() -> None:
    known = {intent.names[0] for intent in free_requests.intents()}
    assert {
        name for group in free_requests.RELATED + free_requests.CLASHES for name in group.split()
    } <= known


def test_similar_intents_have_unambiguous_frames_with_required_slots_alone() -> None:
    for group in free_requests.CLASHES:
        for intent in (i for i in free_requests.intents() if i.names[0] in group.split()):
            if len(free_requests.incompatible_with(intent)) > 1:
                continue
            needed = {slot for slot, param in intent.params.items() if not param.optional}
            bare = [re.sub(r"\[[^]]*\]", "", f.text) for f in intent.frames if f.sure]
            assert sum(free_requests.slots_of(text) <= needed for text in bare) >= 2, intent.names[
                0
            ]


def test_requests_next_to_a_similar_tool_are_unambiguous() -> None:
    def intent(name: str, sure: str) -> free_requests.Intent:
        frames = (
            free_requests.Frame("!", "see to it", False),
            free_requests.Frame("!", sure, True),
        )
        return free_requests.Intent((name,), (name,), {}, frames)

    reminder = intent("set_reminder", "remind me")
    todo = intent("add_todo", "list it")
    for seed in SEEDS:
        w = _words(seed)
        both = free_requests.single(
            w, [free_requests.offer(w, reminder), free_requests.offer(w, todo)]
        )
        assert "see to it" not in both.text.lower()
    alone = [
        free_requests.single(w, [free_requests.offer(w, reminder)]).text.lower() for _ in range(50)
    ]
    assert any("see to it" in text for text in alone)


def test_intents_without_a_distinguishing_frame_are_not_offered_together() -> None:
    for seed in range(600):
        drawn = [tool.intent for tool in free_requests.rivals(_words(seed))]
        names = [intent.names[0] for intent in drawn if intent in free_requests.intents()]
        assert len(set(names)) == len(names)
        for intent in drawn:
            assert not (free_requests.incompatible_with(intent) - {intent.names[0]}) & set(names)


def test_requests_without_a_fitting_tool_have_no_calls() -> None:
    for seed in SEEDS:
        request = free_requests.unfit(_words(seed))
        assert request.tools and not request.calls


def test_a_held_out_request_is_not_allowed_in_any_case() -> None:
    for _, text, _ in development_requests.REQUESTS.cases() + blind_requests.REQUESTS.cases():
        assert not free_requests.allowed(text) and not free_requests.allowed(
            text.upper().rstrip("?.!")
        )
    assert free_requests.allowed("something that nobody wrote down")


@pytest.mark.parametrize(
    ("requests", "calls", "silent", "tools"),
    [(development_requests.REQUESTS, 300, 120, 60), (blind_requests.REQUESTS, 200, 80, 80)],
    ids=["heldout", "unseen"],
)
def test_a_set_written_by_hand_is_as_large_as_it_says_and_sound(
    requests: Requests, calls: int, silent: int, tools: int
) -> None:
    cases = requests.cases()
    assert sum(bool(right) for _, _, right in cases) >= calls
    assert sum(not right for _, _, right in cases) >= silent
    assert sum(len(tools_of_domain) for tools_of_domain in requests.domains.values()) >= tools
    assert len({text for _, text, _ in cases}) > 0.98 * len(cases)
    for offered, text, right in cases:
        assert len({tool["function"]["name"] for tool in offered}) == len(offered)
        _check(offered, text, right)


def test_answers_parse_to_the_intended_calls() -> None:
    for sample, calls in tasks.written(development_requests.REQUESTS) + tasks.written(
        blind_requests.REQUESTS
    ):
        assert calls_in(sample.answer, sample.tools) == calls
    for seed in SEEDS:
        request = free_requests.several(_words(seed))
        tools = [tool.schema for tool in request.tools]
        parsed = calls_in(tasks.calls_text(request.calls), tools)
        assert [name for name, _ in parsed] == [name for name, _ in request.calls]
    (sign,) = Qwen3CoderParser.SIGNS
    assert sign in tasks.calls_text([("f", {})])


def _sure(text: str, kind: str) -> free_requests.Intent:
    params = {"text": free_requests.Param(("text",), kind, False)}
    return free_requests.Intent(("f",), ("F",), params, (free_requests.Frame("!", text),))


def test_politeness_and_remarks_after_a_value_are_not_part_of_it() -> None:
    intent = _sure("write {text}", "word")
    polite = 0
    remarked = 0
    for seed in range(400):
        w = _words(seed)
        request = free_requests.single(w, [free_requests.offer(w, intent)])
        ((_, arguments),) = request.calls
        after = request.text.split(arguments["text"])[-1]
        assert not re.search(r"please|thanks|;", arguments["text"], re.IGNORECASE)
        polite += after.lower().startswith((" please", ", thanks", ", if you", " thanks"))
        remarked += after.startswith((", i", ", I", "; ", " - "))
    assert polite > 10 and remarked > 3


def test_a_remark_in_the_same_sentence_never_follows_a_value_of_several_words() -> None:
    for seed in SEEDS:
        parts: list[tuple[str, str | None]] = [("tell Bob ", None), ("I am late", "text")]
        free_requests._remark(_words(seed), parts)
        assert parts[-1][0].startswith(". ")


def test_a_sentence_may_precede_a_second_request() -> None:
    spoken = 0
    for seed in range(300):
        first, second, forms = free_requests._pair_of(_words(seed))
        assert forms[0] in first.frames and forms[1] in second.frames
        spoken += forms[0] in free_requests._ending_orders(first) and forms[1].sort == "!"
    assert spoken > 30


def test_echo_tools_share_a_word_with_the_request_and_are_not_excluded_ones() -> None:
    barred = frozenset({"find_recipe"})
    for seed in SEEDS:
        for tool in free_requests.echo_tool(_words(seed), "find the recipe of {x}", barred):
            assert tool.intent.names[0] not in barred
            words = " ".join((*tool.intent.names, *tool.intent.abouts)).lower()
            assert "find" in words or "recipe" in words
    assert not free_requests.echo_tool(_words(1), "qqqq {x}", barred)


def test_a_switch_is_asked_for_by_state_or_idiom() -> None:
    for seed in SEEDS:
        w = _words(seed)
        intent = free_requests._switch(w, "fan")
        tool = free_requests.offer(w, intent, frozenset(intent.params), frozenset({"state"}))
        ((_, arguments),) = free_requests.single(w, [tool]).calls
        assert arguments[tool.keys["state"]].lower() in ("on", "off")


def test_number_words_and_sequences() -> None:
    words = {0: "zero", 21: "twenty-one", 100: "one hundred", 345: "three hundred forty-five"}
    assert {n: argument_values.number_words(n) for n in words} == words
    for seed in SEEDS:
        ask, values = number_sequences.question(_words(seed))
        assert ask and len(values) >= 3 and all(isinstance(n, int) for n in values)


def test_a_follow_up_changes_one_argument() -> None:
    changed = 0
    for seed in SEEDS:
        w = _words(seed)
        request = free_requests.single(w)
        follow = free_requests.follow_up(w, request)
        if follow:
            _, (name, arguments) = follow
            before = dict(request.calls[0][1])
            assert name == request.calls[0][0] and arguments.keys() == before.keys()
            assert sum(arguments[key] != before[key] for key in before) == 1
            changed += 1
    assert changed > 10
