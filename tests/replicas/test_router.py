"""Choice of a replica by cached prefixes, load, readiness and numerics."""

from collections import Counter
from typing import Any

import pytest

from lockstep.engine.messages import EngineRequest
from lockstep.replicas.messages import Call, Hello, page_keys
from lockstep.replicas.router import TOKENS_PER_REQUEST, ReplicaRouter
from lockstep.scheduling.request import Request
from lockstep.step import PAGE_SIZE

ROWS = 8
LONG = PAGE_SIZE * 40


def make_router(*names: str, pages: int = 1000) -> ReplicaRouter:
    router = ReplicaRouter()
    router.update(names)
    for name in names:
        router.introduce(name, Hello("ls-a", ROWS, pages))
    return router


def make_call(
    tag: str, prompt: list[int], numerics: str = "ls-a", allow: bool = False, **fields: Any
) -> Call:
    request = EngineRequest.of(Request(id=tag, prompt_token_ids=prompt, **fields))
    return Call(
        "client",
        tag=tag,
        numerics=numerics,
        allow_other_numerics=allow,
        request=request,
        page_keys=page_keys(request),
    )


def choose(router: ReplicaRouter, tag: str, prompt: list[int], **fields: Any) -> str | None:
    return router.choose(make_call(tag, prompt, **fields), router.replica_ids)


def test_turns_of_a_chat_go_to_the_replica_that_has_the_turns_before() -> None:
    router = make_router("a", "b", "c")
    chats = {seed: [seed] * LONG for seed in range(9)}
    first = {seed: choose(router, f"{seed}", chat) for seed, chat in chats.items()}
    assert Counter(first.values()) == {"a": 3, "b": 3, "c": 3}, "by load, without a prefix"
    for turn in range(4):
        for seed, chat in chats.items():
            router.end(f"{seed}" if not turn else f"{seed} {turn - 1}")
            chat += [turn + 100] * PAGE_SIZE
            assert choose(router, f"{seed} {turn}", chat) == first[seed]


def test_a_salt_or_an_adapter_has_separate_prefixes() -> None:
    router = make_router("a", "b")
    assert choose(router, "1", [7] * LONG) == "a"
    for index, fields in enumerate(({"cache_salt": "x"}, {"adapter": "x"})):
        assert choose(router, f"other {index}", [7] * LONG, **fields) == "b"
        router.end(f"other {index}")
    assert choose(router, "2", [7] * LONG) == "a"


def test_a_short_common_prefix_does_not_gather_all_requests() -> None:
    router = make_router("a", "b")
    system = [1] * PAGE_SIZE
    chosen = [choose(router, f"{i}", system + [i] * PAGE_SIZE) for i in range(2, 10)]
    assert Counter(chosen) == {"a": 4, "b": 4}
    saved = TOKENS_PER_REQUEST // PAGE_SIZE + 2
    for index in range(2, 10):
        router.end(f"{index}")
    assert choose(router, "long 1", [99] * PAGE_SIZE * saved) in ("a", "b")
    assert choose(router, "long 2", [99] * PAGE_SIZE * saved) == router._replica_of["long 1"]


def test_a_full_replica_takes_no_more_than_its_share_of_one_prefix() -> None:
    router = make_router("a", "b")
    chosen = Counter(choose(router, f"{i}", [7] * LONG) for i in range(4 * ROWS))
    assert chosen["a"] + chosen["b"] == 4 * ROWS
    assert 0 <= chosen["a"] - chosen["b"] <= 1 + ROWS // 4, "a has the prefix"


def test_pages_are_forgotten_as_the_cache_evicts_them() -> None:
    router = make_router("a", "b", pages=LONG // PAGE_SIZE)
    assert choose(router, "1", [1] * LONG) == "a"
    router.end("1")
    assert choose(router, "2", [1] * LONG) == "a"
    router.end("2")
    assert choose(router, "3", [2] * LONG) == "b"
    router.end("3")
    assert choose(router, "4", [3] * LONG) == "a", "an equal cost, a lower name"
    router.end("4")
    state = router._replicas["a"]
    assert len(state.pages) == LONG // PAGE_SIZE
    assert state.num_cached(make_call("5", [1] * LONG).page_keys) == 0


def test_an_engine_that_restarts_gets_requests_only_if_no_other_runs() -> None:
    router = make_router("a", "b")
    router.set_ready("a", False)
    assert {choose(router, f"{i}", [i] * LONG) for i in range(ROWS)} == {"b"}
    router.set_ready("b", False)
    assert router.num_ready == 0
    assert choose(router, "waits", [5] * LONG) in ("a", "b")
    router.set_ready("a", True)
    assert choose(router, "next", [5] * LONG) == "a"


def test_calls_on_a_replica_that_is_listed_again_count() -> None:
    """It was not drained: its calls go on."""
    router = make_router("a")
    for index in range(4):
        choose(router, f"{index}", [index] * LONG)
    for names in ((), ("a", "b")):
        router.update(names)
    for name in ("a", "b"):
        router.introduce(name, Hello("ls-a", ROWS, 1000))
    assert {choose(router, f"later {i}", [10 + i] * LONG) for i in range(4)} == {"b"}
    for index in range(4):
        router.end(f"{index}")
    assert choose(router, "last", [20] * LONG) == "a"


def test_numerics_decide_before_prefixes() -> None:
    router = make_router("a", "b")
    refused: list[tuple[str, Any]] = []
    router.on_refuse = lambda call, numerics: refused.append((call.tag, numerics))
    router.introduce("b", Hello("ls-b", ROWS, 1000))
    assert choose(router, "1", [1] * LONG, numerics="ls-b") == "b"
    assert choose(router, "2", [1] * LONG) == "a"
    assert choose(router, "3", [1] * LONG, numerics="ls-c") is None
    assert refused == [("3", ["ls-a", "ls-b"])]
    router.update(["a", "b", "c"])
    assert choose(router, "4", [1] * LONG, numerics="ls-c") is None
    assert len(refused) == 1, "the new replica has not told its numerics"
    assert router.all_numerics == ["ls-a", "ls-b"]


def test_other_numerics_may_be_allowed() -> None:
    router = make_router("a", "b")
    router.introduce("b", Hello("ls-b", ROWS, 1000))
    assert choose(router, "1", [1] * LONG, numerics="ls-b", allow=True) == "b"
    assert choose(router, "2", [1] * LONG, numerics="ls-c", allow=True) in ("a", "b")
    for index in range(2 * ROWS):
        assert choose(router, f"any {index}", [index] * LONG, numerics="") in ("a", "b")


@pytest.mark.parametrize("back", (True, False), ids=("listed", "gone"))
def test_a_lost_replica_comes_back_while_it_is_listed(back: bool) -> None:
    router = make_router("a", "b")
    changes: list[tuple[list[str], list[str]]] = []
    router.on_change = lambda added, removed: changes.append((sorted(added), sorted(removed)))
    router.remove("a")
    if not back:
        router.update(["b"])
    router.restore("a")
    assert changes == ([(["a"], [])] if back else [])
    assert choose(router, "1", [1] * LONG) == "b", "it must introduce itself first"
