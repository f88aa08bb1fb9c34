"""Qwen3.5's MTP module: what it keeps without drafting is what drafting would have kept."""

import pytest
import torch

from lockstep.layers.build_context import BuildContext
from lockstep.models.qwen3_5 import Config, Draft, Model
from lockstep.step import StepContext, StepShape
from tests.tiny_model import CONFIG

PAGE = 16
TOKENS = 5


def test_keys_and_values_are_kept_without_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the weights of queries and gates."""
    torch.manual_seed(0)
    config = Config.read({**CONFIG, "vocab_size": 50})
    target = Model(config, BuildContext("cpu", torch.float32, 1, 64))
    draft = Draft(target, BuildContext("cpu", torch.float32, 1, 64, exact=False))
    for parameter in draft.parameters():
        parameter.data.normal_()
    mixer = draft.blocks[0].self_attn
    found = []
    monkeypatch.setattr(mixer, "attend", lambda q, *rest: torch.zeros_like(q))
    ids = torch.arange(TOKENS)
    hidden = torch.randn(TOKENS, config.hidden_size)
    unread = dict.fromkeys(StepContext.__dataclass_fields__)
    places = dict(shape=StepShape.uniform(1, TOKENS), positions=ids + 3, slot_mapping=ids + PAGE)
    step = StepContext(**{**unread, **places})  # type: ignore[arg-type]
    for call in (draft, draft.keep):
        mixer.bind(mixer.cache_spec().allocate(2, PAGE, "cpu"))
        call(ids, hidden, step)
        found.append(mixer.cache_tensors())
        mixer.qkv.part(0).fill_(torch.nan)
    for wanted, kept in zip(*found, strict=True):
        assert wanted[1, :TOKENS].all()
        torch.testing.assert_close(kept, wanted)
