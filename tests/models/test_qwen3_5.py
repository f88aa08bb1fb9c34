"""Qwen3.5's MTP module stores the same keys and values with and without drafting."""

import pytest
import torch

from lockstep.layers.build_context import BuildContext
from lockstep.models.qwen3_5 import Config, Draft, Model
from lockstep.step import StepContext, StepShape
from tests.tiny_model import CONFIG

PAGE = 16
TOKENS = 5


def test_keep_stores_keys_and_values_without_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of queries and gates are not read."""
    torch.manual_seed(0)
    config = Config.read({**CONFIG, "vocab_size": 50})
    target = Model(config, BuildContext("cpu", torch.float32, 1, 64))
    draft = Draft(target, BuildContext("cpu", torch.float32, 1, 64, exact=False))
    for parameter in draft.parameters():
        parameter.data.normal_()
    mixer = draft.blocks[0].self_attn
    actual = []
    monkeypatch.setattr(mixer, "attend", lambda q, *rest: torch.zeros_like(q))
    ids = torch.arange(TOKENS)
    hidden = torch.randn(TOKENS, config.hidden_size)
    unread = dict.fromkeys(StepContext.__dataclass_fields__)
    indices = dict(shape=StepShape.uniform(1, TOKENS), positions=ids + 3, slot_mapping=ids + PAGE)
    step = StepContext(**{**unread, **indices})  # type: ignore[arg-type]
    for call in (draft, draft.write_cache):
        mixer.bind(mixer.cache_spec().allocate(2, PAGE, "cpu"))
        call(ids, hidden, step)
        actual.append(mixer.cache_tensors())
        mixer.qkv.part(0).fill_(torch.nan)
    for expected, kept in zip(*actual, strict=True):
        assert expected[1, :TOKENS].all()
        torch.testing.assert_close(kept, expected)
