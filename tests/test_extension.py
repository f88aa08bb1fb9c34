"""A new drafter or architecture is one file and one table line."""

from pathlib import Path

import pytest

from lockstep import LLM, SamplingParams, models, spec
from tests.tiny_model import make_model

DRAFTER = """
from lockstep.spec.config import SpeculativeConfig as Options

NEEDS_MODULE = False


class Echo:
    def __init__(self, context):
        self.context = context

    def propose(self, step, hidden, aux_hidden_states, verdict):
        rows = step.row_ids
        last = self.context.tokens[rows, self.context.computed[rows].long()]
        self.context.drafts[rows] = last[:, None].expand(-1, self.context.drafts.shape[1])


def create(context):
    return Echo(context)
"""

MODEL = """
from lockstep.models.qwen3_5 import DRAFT_PREFIX, IGNORED, PREFIXES, Config, Draft
from lockstep.models.qwen3_5 import Model as Base


class Model(Base):
    def forward(self, step):
        hidden, aux_hidden_states = super().forward(step)
        return -hidden, aux_hidden_states
"""

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPT = {"prompt_token_ids": list(range(5, 90))}


def tokens(folder: Path, **settings: object) -> list[int]:
    """Return the answer of the model in this folder."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=2,
        **settings,
    )
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


def test_drafter_from_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_drafter.py").write_text(DRAFTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(spec.DRAFTERS, "echo", "echo_drafter")
    folder = make_model(tmp_path / "model")
    drafted = tokens(folder, speculative_config={"method": "echo", "num_speculative_tokens": 2})
    assert drafted == tokens(folder)
    assert len(drafted) == 12


def test_architecture_from_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "minus_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(models.ARCHITECTURES, "minus", "minus_model")
    folder = make_model(tmp_path / "model", model_type="minus")
    answer = tokens(folder)
    assert len(answer) == 12
    assert answer != tokens(make_model(tmp_path / "plain"))
