"""The answer oracle: right where it knows, wrong every fifth place, silent for strangers."""

import torch

from lockstep.check.oracle_drafter import NONE_EVERY, PLACEHOLDER_METHOD, WRONG_EVERY, OracleDrafter
from lockstep.spec.config import SpeculativeConfig
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepShape


def test_drafts_what_comes_next() -> None:
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

    def proposed(known: int) -> list[int]:
        computed.fill_(known - 1)
        drafter.propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        assert drafts[0].tolist() == drafts[2].tolist() == [-1, -1, -1]
        return drafts[1].tolist()

    assert proposed(6) == [-1, -1, -1], "nobody has told it anything"
    drafter.set_texts([[5, 6], text])
    for known in range(1, 31):
        ahead = range(known, known + 3)
        expected = [text[i] - (i % WRONG_EVERY == 0) if i < 30 else -1 for i in ahead]
        assert proposed(known) == ([-1] * 3 if known % NONE_EVERY == 0 else expected), known
    for count in range(3):
        Step.shape = StepShape.uniform(3, count + 1)
        computed.fill_(11)
        drafts.fill_(7)
        drafter.propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        wanted = [text[i] for i in range(12, 12 + count)] + [7] * (3 - count)
        assert drafts[1].tolist() == wanted, "what the step did not ask for is not the drafter's"
