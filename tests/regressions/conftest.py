"""A small hybrid model whose state matters, and answers as bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.kernels.architecture import is_architecture_assumed
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
"""Positions at which the scripted drafter is wrong: the multiples of this."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return make_model(tmp_path_factory.mktemp("tiny"), **THREE_LAYERS)


@pytest.fixture(scope="session")
def make(folder: Path) -> Callable[..., LLM]:
    """An engine over the tiny model: engine_over."""
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
    """An engine over a folder with these settings. changing: every step brings another number of
    drafts; known: texts that a scripted drafter knows, which stands in for the method;
    preempt_every: as in CheckHooks; drafts_with: the folder of the method's module."""
    if method:
        spec = {"method": method, "num_speculative_tokens": k, "adaptive": changing}
        spec |= {"model": str(drafts_with)} if drafts_with else {}
        settings["speculative_config"] = spec
    settings = {"max_model_len": 512, "max_num_seqs": 8, **settings}
    config = EngineConfig.read(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, **settings
    )
    hooks = CheckHooks(
        drafter=partial(Scripted, known) if known else None,
        draft_policy=RandomDraftLength if changing else None,
        preempt_every=preempt_every,
    )
    return LLM.over(build_engine(config, hooks=hooks))


def answers(
    llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> list[Any]:
    """Tokens and log-probability bits of every prompt."""
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [(o.outputs[0].token_ids, bits(o.outputs[0].logprobs)) for o in outs]


def run_null_rows(llm: LLM, rows: int, window: int) -> None:
    """A step of so many null rows with windows of so many tokens: it is legal, reads and writes the
    null page alone, and changes no row."""
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
    """From here on, before every step, each of its rows' slots from the first that it writes on is
    poisoned, in every layer and the draft module's. The pages that were, as they come."""
    place = LatentAttention._place
    poisoned: list[int] = []

    def poisoning(self: LatentAttention, q: Any, kv: Any, step: Any) -> Any:
        if is_architecture_assumed():
            return place(self, q, kv, step)  # a dry run has no values to poison
        size = self.ropes.shape[1]
        for start, pages in zip(step.starts.tolist(), step.page_table.tolist(), strict=False):
            for j, page in enumerate(pages):
                if page and (j + 1) * size > start:
                    first = max(start - j * size, 0)
                    for part in self.cache_tensors():
                        part[page, first:] = torch.nan
                    poisoned.append(page)
        return place(self, q, kv, step)

    monkeypatch.setattr(LatentAttention, "_place", poisoning)
    return poisoned


def replay_faults(replay: Callable[..., torch.Tensor]) -> list[Callable[..., torch.Tensor]]:
    """What may stand in the place of a CPU face's replay of accepted tokens, and is wrong."""

    def no_replay(state: Any, slots: Any, *rest: Any) -> torch.Tensor:
        """The state as it was before the last window: accepted tokens are forgotten."""
        return state.recurrent.index_select(0, slots).float()

    def replay_all_but_one(
        state: Any, slots: Any, starts: Any, folded: Any, places: Any, flush: int
    ) -> torch.Tensor:
        """The state one token too early."""
        early = torch.maximum(starts - 1, folded)
        return replay(state, slots, early, folded, places[: -len(slots)], flush)

    return [no_replay, replay_all_but_one]


def bits(logprobs: Any) -> list[dict[int, str]]:
    """Log-probabilities as the bits of floats."""
    return [{token: x.logprob.hex() for token, x in entry.items()} for entry in logprobs]


@pytest.fixture(scope="session")
def plain(make: Callable[..., LLM]) -> list[Any]:
    """The answers to PROMPTS of the engine without drafts, made before a test changes anything."""
    return answers(make())


@pytest.fixture(scope="session")
def known(plain: list[Any]) -> list[list[int]]:
    """The prompts with their plain answers, for a drafter that knows them."""
    return [p + tokens for p, (tokens, _) in zip(PROMPTS, plain, strict=True)]


class Scripted:
    """A drafter that knows the answers: proposes the right token, but for every WRONG_EVERY-th one.

    So that drafts are accepted in every number, and a step without drafts follows (F2).
    """

    def __init__(self, known: list[list[int]], context: DraftContext) -> None:
        self.known = known
        self.context = context
        self.calls = 0

    def propose(self, step: Any, hidden: Any, aux_hidden_states: Any, verdict: Any) -> None:
        """Writes drafts from the known answers; none at all on every fourth call."""
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
                    ahead = full[length : length + drafts.shape[1]]
                    for k, token in enumerate(ahead):
                        wrong = (length + k) % WRONG_EVERY == 0
                        drafts[row, k] = (token + 1) % 200 if wrong else token
