"""AsyncLLM streams the answers of LLM, and aborts them."""

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind
from lockstep.errors import EngineDeadError, RequestError
from tests.bundled_model import GREEDY, NUM_TOKENS, PROMPTS, SEEDED, TEXT, answer, make_engine
from tests.tiny_model import TWO_LAYERS, make_model

PATIENCE = 90
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4}
LONG = replace(GREEDY, max_tokens=400)
IDS = {"prompt_token_ids": [5, 6, 7, 8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model."""
    return str(make_model(tmp_path_factory.mktemp("tiny"), **TWO_LAYERS))


@pytest.fixture(scope="module")
def plain(folder: str) -> LLM:
    """Return an LLM of the tiny model, with random weights."""
    return make_engine(None, model=folder, load_format="dummy")


@pytest.fixture(scope="module")
def client(folder: str) -> Iterator[AsyncLLM]:
    """Return an AsyncLLM of the bundled model in a thread."""
    local = {"load_format": "dummy", "disable_frontend_multiprocessing": True}
    llm = AsyncLLM(folder, **local, **SETTINGS)
    yield llm
    llm.shutdown()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; fail after PATIENCE seconds."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def read(llm: AsyncLLM, *messages: Any, **options: Any) -> list[RequestOutput]:
    """Return all outputs of a request."""
    return [output async for output in llm.generate(*messages, **options)]


def test_concurrent_requests_equal_llm(client: AsyncLLM, plain: LLM) -> None:
    params = [replace(SEEDED, n=2), GREEDY, replace(GREEDY, logprobs=2, prompt_logprobs=1), SEEDED]
    expected = [answer(out) for out in plain.generate(PROMPTS, params)]

    async def work() -> list[list[RequestOutput]]:
        messages = enumerate(zip(PROMPTS, params, strict=True))
        return await asyncio.gather(*(read(client, *one, f"r{i}") for i, one in messages))

    received = run(work())
    assert [answer(outs[-1]) for outs in received] == expected
    assert [outs[-1].request_id for outs in received] == ["r0", "r1", "r2", "r3"]
    for outs in received:
        assert [out.finished for out in outs] == [*[False] * (len(outs) - 1), True]
        lengths = [len(out.outputs[0].token_ids) for out in outs]
        assert lengths == sorted(lengths) and len(outs) > 1, "an output changed after it was given"


def test_outputs_follow_their_output_kind(client: AsyncLLM, plain: LLM) -> None:
    params = replace(SEEDED, n=2, logprobs=0)
    expected = answer(plain.generate(TEXT, params)[0])[0]
    deltas = run(read(client, TEXT, replace(params, output_kind=RequestOutputKind.DELTA)))
    for index in range(2):
        parts = [one for out in deltas for one in out.outputs if one.index == index]
        assert "".join(one.text for one in parts) == expected[index][1]
        assert [token for one in parts for token in one.token_ids] == expected[index][2]
        assert len([entry for one in parts for entry in one.logprobs or ()]) == NUM_TOKENS
    (only,) = run(read(client, TEXT, replace(params, output_kind=RequestOutputKind.FINAL_ONLY)))
    assert answer(only)[0] == expected and only.finished


def test_abort_and_closed_generator_end_a_request(client: AsyncLLM) -> None:
    async def aborted() -> list[RequestOutput]:
        outputs = []
        async for output in client.generate(TEXT, LONG, "long"):
            outputs.append(output)
            await client.abort("long")
        await client.abort(["long", "unknown"])
        return outputs

    last = run(aborted())[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort"

    async def left() -> None:
        outputs = client.generate(TEXT, LONG, "left")
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        assert len(await read(client, TEXT, GREEDY, "left")) > 1, "the id is free again"

    run(left())
    assert client._client.num_open == 0 and not client._groups


def test_reused_id_gets_no_token_of_an_aborted_request(client: AsyncLLM, plain: LLM) -> None:
    """Updates of an aborted request may still be on their way when its id is used again."""
    expected = answer(plain.generate(TEXT, GREEDY)[0])

    async def work() -> None:
        for prompt in PROMPTS[1:] * 6:
            outputs = client.generate(prompt, LONG, "same")
            await anext(outputs)
            await outputs.aclose()  # type: ignore[attr-defined]
            assert answer((await read(client, TEXT, GREEDY, "same"))[-1]) == expected

    run(work())


def test_end_of_a_request_does_not_forget_a_later_one_of_its_id(client: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        async for output in client.generate(TEXT, GREEDY, "same"):
            if output.finished:
                later = await client.add_request("same", TEXT, LONG)
        await client.abort("same")
        return [output async for output in later][-1]

    assert run(work()).outputs[0].finish_reason == "abort"


def test_stream_that_is_dropped_frees_its_id_at_the_end(client: AsyncLLM) -> None:
    async def work() -> None:
        await client.add_request("same", TEXT, GREEDY)
        while client._groups:  # until the event loop has delivered the last updates
            await asyncio.sleep(0.01)
            gc.collect()
        assert (await read(client, TEXT, GREEDY, "same"))[-1].finished

    run(work())
    assert not client._groups


def test_invalid_requests_do_not_affect_others(client: AsyncLLM) -> None:
    async def twice() -> None:
        stream = await client.add_request("same", TEXT, LONG)
        with pytest.raises(RequestError, match="request_id='same' is not allowed"):
            await client.add_request("same", TEXT, LONG)
        await stream.aclose()

    run(twice())
    for messages, options, field in (
        ((TEXT, GREEDY, ""), {}, "request_id"),
        ((TEXT, GREEDY, 7), {}, "request_id"),
        ((TEXT, {"n": 1}, "x"), {}, "sampling_params"),
        (([4096], GREEDY, "x"), {}, "prompt"),
        ((TEXT, GREEDY, "x"), {"priority": "high"}, "priority"),
        ((TEXT, GREEDY, "x"), {"lora_request": 3}, "lora_request"),
        ((TEXT, GREEDY, "x"), {"lora_request": "sql"}, "adapter"),
        ((TEXT, GREEDY, "x"), {"prority": 1}, "prority"),
    ):
        with pytest.raises(RequestError) as caught:
            run(read(client, *messages, **options))
        assert caught.value.field == field
    assert run(read(client, TEXT, GREEDY))[-1].finished


def test_engine_in_another_process(tmp_path: Path, forked_processes: None) -> None:
    args = EngineArgs(
        str(make_model(tmp_path)), load_format="dummy", skip_tokenizer_init=True, **SETTINGS
    )

    async def work() -> None:
        async with AsyncLLM.from_engine_args(args, speculative_config=None) as llm:
            assert llm.is_running and llm.config.speculative_config is None
            await llm.check_health()
            outs = await asyncio.gather(*(read(llm, IDS, GREEDY) for _ in range(5)))
            assert len({str(answer(one[-1])) for one in outs}) == 1
            stream = await llm.add_request("long", IDS, LONG)
            await anext(stream)
        assert llm.errored
        with pytest.raises(EngineDeadError, match="Make a new AsyncLLM"):
            async for _ in stream:
                continue
        with pytest.raises(EngineDeadError, match="Make a new AsyncLLM"):
            await read(llm, IDS, GREEDY)

    run(work())
