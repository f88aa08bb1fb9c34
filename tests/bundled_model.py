"""Engines of the bundled model for tests, and bitwise comparison of their answers."""

from dataclasses import fields, replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.llm import processor_of
from lockstep.outputs import RequestOutput
from lockstep.spec import drafter_module
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.worker.executor import Facts, worker_of
from lockstep.worker.hooks import NO_HOOKS, CheckHooks

TEXT = "def read(path):"
PROMPTS = [TEXT, "import os\n\n\ndef main(", "3, 6, 9, 12, 15, 18, 21,", "The clock on the square"]
QUESTION = [
    {"role": "user", "content": "My name is Tavoli."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is my name?"},
]
NUM_TOKENS = 10
"""Tokens of an answer; end tokens are ignored."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
DRAFTS = 3
PROCESSORS: dict[tuple[int, int], Processor] = {}


def make_engine(drafter: str | None, hooks: CheckHooks = NO_HOOKS, **settings: Any) -> LLM:
    """Return an LLM of the bundled model with four rows of 512 tokens.

    drafter: method of speculation with a constant DRAFTS drafts per step; None for none. settings:
    options of the drafter, and of EngineConfig.
    """
    keys = {f.name for f in fields(drafter_module(drafter).Options)} if drafter else set()
    spec = {"method": drafter, "num_speculative_tokens": DRAFTS, "adaptive": False}
    spec |= {name: settings.pop(name) for name in list(settings) if name in keys}
    settings = {"max_model_len": 512, "max_num_seqs": 4, **settings}
    config = EngineConfig.read(speculative_config=spec if drafter else None, **settings)
    engine = build_engine(config, hooks=hooks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.llm.processor_of", shared_processor)
        return LLM.from_engine(engine)


def shared_processor(facts: Facts, text: TextSettings) -> Processor:
    """Return one processor for all engines of the bundled model; a tokenizer and a template take a
    quarter of the start of an engine."""
    if facts.config.model is not None or facts.config.skip_tokenizer_init:
        return processor_of(facts, text)
    key = (facts.plan.max_model_len, facts.vocab_size)
    if key not in PROCESSORS:
        PROCESSORS[key] = processor_of(facts, text)
    return PROCESSORS[key]


def assert_idle(llm: LLM) -> None:
    """Assert that the engine has no work, no used row or page, and nothing in host memory."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work() and not scheduler.running and not scheduler.queue
    assert len(scheduler.free_rows) == llm.engine.plan.max_num_seqs
    assert not scheduler.cache.seqs and not worker_of(llm.engine).saved
    scheduler.cache.check()


def one(llm: LLM, prompt: Any = TEXT, params: SamplingParams = GREEDY, **changes: Any) -> Any:
    """Return the completion of one prompt."""
    return llm.generate(prompt, replace(params, **changes))[0].outputs[0]


def bits(entries: Any) -> list[list[tuple[int, str, int]] | None]:
    """Return log-probabilities as exact hexadecimal numbers."""
    return [e and [(t, x.logprob.hex(), x.rank) for t, x in e.items()] for e in entries or ()]


def answer(out: RequestOutput) -> list[Any]:
    """Return everything that must not depend on batching, drafts or scheduling."""
    completions = [
        (o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, o.seed, bits(o.logprobs))
        for o in out.outputs
    ]
    return [completions, bits(out.prompt_logprobs)]
