"""F1 (vLLM #39483): a hybrid in GPTQ int4 with MTP drafts starts and answers.

In vLLM the engine did not start: graphs captured a path with drafts that warm-up never ran. Here an
int4 checkpoint is loaded and answers, with the same bits with drafts and without.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.models.random_checkpoint import MTP, build, weights_of
from tests.quantization.disk import Codes, gptq, names_in, random_codes, write
from tests.regressions.conftest import answers

SETTINGS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
}
"""Settings of released checkpoints of Qwen3.5: only MLPs are quantized."""
PLAIN = ("embed", "attn", "mtp.")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Return the tiny hybrid's folder in GPTQ int4."""
    llm = build(folder, load_format="dummy", speculative_config=MTP)

    def pick(name: str, n: int, k: int) -> Codes | None:
        return None if names_in(name, PLAIN) else random_codes(n, k, 4, 32, seed=len(name))

    target = tmp_path_factory.mktemp("gptq")
    return write(target, weights_of(llm), folder, SETTINGS, pick, partial(gptq, less=1)).quantized


def test_int4_hybrid_has_equal_answers_with_drafts(packed: Path) -> None:
    settings = {"max_model_len": 512, "max_num_seqs": 8}
    plain = build(packed, **settings)
    drafting = build(packed, speculative_config=MTP, **settings)
    assert "+gptq-int4-g32/" in plain.engine.numerics
    assert plain.engine.numerics == drafting.engine.numerics
    assert answers(drafting) == answers(plain)
    assert drafting.engine.stats.draft_tokens_total > 0
