"""DFlash layers trained with plain torch on the bundled model's answers draft in the engine what
they learned."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import lockstep
from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from tests.spec.blocks import MASK, Tensors, logits_of, make_block_model

pytestmark = pytest.mark.slow

BUNDLED = str(Path(lockstep.__file__).parent / "assets" / "model")
AUX_LAYERS = [1, 3, 5]
WIDTH = 8
"""Tokens per block."""
ANSWERS = 40
HELD_OUT = 8
STEPS = 500
BLOCKS = 12
"""Blocks of one answer per training step."""
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)


class ResidualRecorder:
    """Drafter that records the auxiliary hidden states of the last prompt and drafts nothing.

    joined [T, layers * H]: those of all layers, side by side.
    """

    joined: Tensor

    def __init__(self, context: Any) -> None:
        self.context = context

    def propose(self, step: Any, hidden: Tensor, aux: tuple[Tensor, ...], verdict: Any) -> None:
        if step.shape.prompt:
            self.joined = torch.cat(aux, -1)


def make_engine(folder: Path | None, hooks: CheckHooks | None = None) -> LLM:
    """Return the bundled model, which drafts with the folder's layers if there is one."""
    spec = None
    if folder is not None:
        spec = {"method": "dflash", "model": str(folder), "num_speculative_tokens": WIDTH - 1}
        spec["adaptive"] = False
    config = EngineConfig.read(
        model=BUNDLED,
        max_model_len=512,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        speculative_config=spec,
    )
    return LLM.from_engine(build_engine(config, hooks=hooks or CheckHooks()))


def make_conversations() -> list[list[dict[str, str]]]:
    """Return number sequences to continue."""
    rng = random.Random(0)
    results = []
    for _ in range(ANSWERS + HELD_OUT):
        first = rng.randrange(1, 40)
        increment = rng.randrange(1, 9)
        numbers = ", ".join(str(first + i * increment) for i in range(10))
        text = f"Continue the sequence with twenty more numbers: {numbers}"
        results.append([{"role": "user", "content": text}])
    return results


def train(model: Tensors, examples: list[tuple[Tensor, int, Tensor]], target: Any) -> None:
    """Train the model in place on blocks at random positions of answers, whose tokens but the first
    are masked.

    examples: (tokens, index of the answer's first one, auxiliary hidden states) of each answer.
    """
    rng = random.Random(1)
    embedding = target.embed.weight.detach().clone()
    head = target.head.weight.detach().clone()
    weights = [tensor.mul_(0.6 if tensor.dim() > 1 else 1.0) for tensor in model.values()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=2e-3)
    for _ in range(STEPS):
        tokens, begin, joined = rng.choice(examples)
        starts = torch.tensor([rng.randrange(begin, len(tokens) - WIDTH) for _ in range(BLOCKS)])
        expected = tokens[starts[:, None] + torch.arange(WIDTH)]
        blocks = torch.where(torch.arange(WIDTH) == 0, expected, MASK)
        logits = logits_of(model, embedding, head, joined, blocks, starts)
        loss = F.cross_entropy(logits.flatten(0, 1), expected[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def test_trained_layers_draft_accepted_tokens(tmp_path: Path) -> None:
    """On unseen answers; the untrained layers have almost no accepted draft."""
    conversations = make_conversations()
    plain = make_engine(None).chat(conversations, GREEDY)
    expected = [out.outputs[0].token_ids for out in plain]
    model = make_block_model(tmp_path, 4096, 256, AUX_LAYERS)
    recording = make_engine(tmp_path, CheckHooks(drafter=ResidualRecorder))
    recorder: Any = worker_of(recording.engine).program.drafter
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    examples = []
    for out in plain[:ANSWERS]:
        text = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        recording.generate({"prompt_token_ids": text}, one)
        begin = len(out.prompt_token_ids)
        examples.append((torch.tensor(text), begin, recorder.joined.clone()))
    accepted = []
    for trained in (False, True):
        if trained:
            train(model, examples, worker_of(recording.engine).model)
            saved = {name: tensor.detach() for name, tensor in model.items()}
            save_file(saved, tmp_path / "model.safetensors")
        outs = make_engine(tmp_path).chat(conversations[ANSWERS:], GREEDY)
        assert [out.outputs[0].token_ids for out in outs] == expected[ANSWERS:]
        accepted.append(sum(out.metrics.num_accepted_tokens for out in outs))
    tokens = HELD_OUT * GREEDY.max_tokens
    assert accepted[0] < 0.1 * tokens
    assert accepted[1] > 0.4 * tokens, accepted
