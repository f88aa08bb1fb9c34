"""The engines of a check: as users build them, and with what only checks may put in."""

from typing import Any

from lockstep.check.answer_oracle import NAME, AnswerOracle
from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine.hooks import CheckHooks
from lockstep.llm import LLM
from lockstep.scheduling.draft_length import RandomDraftLength


def hooks_of(drafter: str, changing: bool, preempt_every: int = 0) -> CheckHooks:
    """What an engine of this drafter needs. changing: every step brings another number of drafts;
    preempt_every: steps between forced preemptions, 0 for none."""
    return CheckHooks(
        drafter=AnswerOracle if drafter == NAME else None,
        draft_policy=RandomDraftLength if changing else None,
        preempt_every=preempt_every,
    )


def build_llm(model: str | None, settings: dict[str, Any], hooks: CheckHooks) -> LLM:
    """An LLM of these settings around an engine with these hooks. Raises what LLM raises."""
    return LLM.over(Engine(EngineConfig.read(model=model, **settings), hooks=hooks))
