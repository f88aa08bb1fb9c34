"""A small hybrid model whose state affects the answers, and answers as bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.kernels.architecture import is_architecture_assumed
from lockstep.kernels.gated_delta_rule import gated_delta_step
from lockstep.layers.latent_attention import LatentAttention
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from tests.tiny_model import THREE_LAYERS, make_model

PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (310, 5, 65, 130)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1, detokenize=False)
WRONG_EVERY = 5
"""The scripted drafter is wrong at multiples of this position."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model's folder."""
    return make_model(tmp_path_factory.mktemp("tiny"), **THREE_LAYERS)


@pytest.fixture(scope="session")
def make(folder: Path) -> Callable[..., LLM]:
    """Return a function that makes an engine of the tiny model: engine_over."""
    return partial(engine_over, folder)


def engine_over(
    folder: Path,
    method: str | None = None,
    k: int = 3,
    changing: bool = False,
    known: list[list[int]] | None = None,
    preempt_every: int = 0,
    drafts_with: Path | None = None,
    **settings: Any,
) -> LLM:
    """Return an LLM over a folder with these settings.

    changing: a different number of drafts in every step; known: texts of a scripted drafter that
    replaces the method; preempt_every: as in CheckHooks; drafts_with: the folder of the method's
    module.
    """
    if method:
        spec = {"method": method, "num_speculative_tokens": k, "adaptive": changing}
        spec |= {"model": str(drafts_with)} if drafts_with else {}
        settings["speculative_config"] = spec
    settings = {"max_model_len": 512, "max_num_seqs": 8, **settings}
    config = EngineConfig.read(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, **settings
    )
    hooks = CheckHooks(
        drafter=partial(ScriptedDrafter, known) if known else None,
        draft_policy=RandomDraftLength if changing else None,
        preempt_every=preempt_every,
    )
    return LLM.from_engine(build_engine(config, hooks=hooks))


def answers(
    llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> list[Any]:
    """Return tokens and log-probability bits of every prompt."""
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [(o.outputs[0].token_ids, bits(o.outputs[0].logprobs)) for o in outs]


def run_null_rows(llm: LLM, rows: int, window: int) -> None:
    """Run a step of null rows with windows of this many tokens.

    Assert that it reads and writes only the null page, and changes no row.
    """
    runner = worker_of(llm.engine)
    table = runner.table
    with torch.inference_mode():
        table.inputs.fill()
        step, *_, verdict = runner.run_step(StepShape.uniform(rows, window))
    assert (step.seq_lens >= window).all()
    assert (step.slot_mapping < 64).all()
    assert not table.computed.any()
    assert not table.folded.any()
    assert (table.drafts[1:] == -1).all()
    assert ((verdict.tokens >= 0) & (verdict.tokens < llm.engine.vocab_size)).all()


def poison_latents_behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before every step, poison each row's slots from its first written one, in every layer and the
    draft module's.

    Returns: the list of poisoned pages, which grows.
    """
    index = LatentAttention._rotate_and_cache
    poisoned: list[int] = []

    def poisoning(self: LatentAttention, q: Any, kv: Any, step: Any) -> Any:
        if is_architecture_assumed():
            return index(self, q, kv, step)  # a dry run has no values to poison
        size = self.ropes.shape[1]
        for start, pages in zip(step.starts.tolist(), step.page_table.tolist(), strict=False):
            for j, page in enumerate(pages):
                if page and (j + 1) * size > start:
                    first = max(start - j * size, 0)
                    for part in self.cache_tensors():
                        part[page, first:] = torch.nan
                    poisoned.append(page)
        return index(self, q, kv, step)

    monkeypatch.setattr(LatentAttention, "_rotate_and_cache", poisoning)
    return poisoned


def replay_faults(replay: Callable[..., torch.Tensor]) -> list[Callable[..., torch.Tensor]]:
    """Return faulty replacements of the CPU backend's replay of accepted tokens."""

    def no_replay(state: Any, slots: Any, *rest: Any) -> torch.Tensor:
        """The state as it was before the last window: accepted tokens are forgotten."""
        return state.recurrent.index_select(0, slots).float()

    def replay_all_but_one(
        state: Any, slots: Any, starts: Any, folded: Any, indices: Any, flush: int
    ) -> torch.Tensor:
        """The state one token too early."""
        early = torch.maximum(starts - 1, folded)
        return replay(state, slots, early, folded, indices[: -len(slots)], flush)

    return [no_replay, replay_all_but_one]


def bits(logprobs: Any) -> list[dict[int, str]]:
    """Return log-probabilities as the bits of floats."""
    return [{token: x.logprob.hex() for token, x in entry.items()} for entry in logprobs]


@pytest.fixture(scope="session")
def plain(make: Callable[..., LLM]) -> list[Any]:
    """Return the answers to PROMPTS without drafts, from before a test's changes."""
    return answers(make())


@pytest.fixture(scope="session")
def known(plain: list[Any]) -> list[list[int]]:
    """Return the prompts with their plain answers, for a scripted drafter."""
    return [p + tokens for p, (tokens, _) in zip(PROMPTS, plain, strict=True)]


class ScriptedDrafter:
    """Drafter that knows the answers, and is wrong at every WRONG_EVERY-th position.

    Drafts are accepted in every number, and steps without drafts follow (F2).
    """

    def __init__(self, known: list[list[int]], context: DraftContext) -> None:
        self.known = known
        self.context = context
        self.calls = 0

    def propose(self, step: Any, hidden: Any, aux_hidden_states: Any, verdict: Any) -> None:
        """Write drafts from the known answers; none on every fourth call."""
        self.calls += 1
        drafts = self.context.drafts
        for row in step.row_ids.tolist():
            drafts[row] = -1
            if row == 0 or self.calls % 4 == 0:
                continue
            length = int(self.context.computed[row]) + 1
            mine = self.context.tokens[row, :length].tolist()
            for full in self.known:
                if full[:length] == mine:
                    known_tokens = full[length : length + drafts.shape[1]]
                    for k, token in enumerate(known_tokens):
                        wrong = (length + k) % WRONG_EVERY == 0
                        drafts[row, k] = (token + 1) % 200 if wrong else token


@pytest.fixture
def torch_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run gated_delta_step by torch's backend, into which a test puts a fault."""
    monkeypatch.delitem(gated_delta_step.backends, "numba", raising=False)
