"""The oracle drafter: stored outputs, some positions wrong, no drafts for other rows."""

import torch

from lockstep.check.oracle_drafter import NONE_EVERY, PLACEHOLDER_METHOD, WRONG_EVERY, OracleDrafter
from lockstep.spec.config import SpeculativeConfig
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepShape


def test_drafts_follow_the_stored_text() -> None:
    text = list(range(100, 130))
    tokens = torch.zeros(3, 40, dtype=torch.int64)
    tokens[1, :30] = torch.tensor(text)
    tokens[2, :30] = torch.tensor(text).flip(0)
    drafts = torch.full((3, 3), 7)
    computed = torch.zeros(3, dtype=torch.int32)
    config = SpeculativeConfig(PLACEHOLDER_METHOD, 3)
    table = (drafts, tokens, computed, computed, 64)
    drafter = OracleDrafter(DraftContext(config, *table, None, torch.cat, lambda op: op))

    class Step:
        row_ids = torch.tensor([1, 2, 0])
        shape = StepShape.uniform(3, 4)

    def proposed(length: int) -> list[int]:
        computed.fill_(length - 1)
        drafter.propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        assert drafts[0].tolist() == drafts[2].tolist() == [-1, -1, -1]
        return drafts[1].tolist()

    assert proposed(6) == [-1, -1, -1], "no text is stored yet"
    for texts, period in zip(([text], [[5, 6], text]), WRONG_EVERY, strict=True):
        drafter.set_texts(texts)
        for length in range(1, 31):
            positions = range(length, length + 3)
            expected = [text[i] - (i % period == 0) if i < 30 else -1 for i in positions]
            assert proposed(length) == ([-1] * 3 if length % NONE_EVERY == 0 else expected), length
    for count in range(3):
        Step.shape = StepShape.uniform(3, count + 1)
        computed.fill_(11)
        drafts.fill_(7)
        drafter.propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        expected_drafts = [text[i] for i in range(12, 12 + count)] + [7] * (3 - count)
        assert drafts[1].tolist() == expected_drafts, (
            "drafts beyond the step's number are not written"
        )
