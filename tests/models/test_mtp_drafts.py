"""MTP modules that are a layer of their own family: what they draft, against transformers.

transformers reads no such module. But a module is a projection, one layer and a norm, and these two
are a model of one layer, which transformers runs on what the projection gives.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from lockstep import SamplingParams
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec.mtp import create
from lockstep.worker.hooks import CheckHooks
from tests.models.dense import make_llm, random_oracle
from tests.models.test_deepseek_v3 import oracle_of as latent_oracle
from tests.models.test_mixtures import of_transformers
from tests.spec.drawn import Drawn
from tests.spec.watching import Seen
from tests.tiny_model import CONFIG, DEEPSEEK, HYBRID_MOE, NEXT, THREE_LAYERS

Base = dict[str, Any]
Tensors = dict[str, Tensor]
K = 4
EPS = 1e-6
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (70, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
HIDDEN = 48
ONE_LAYER: Base = {"layer_types": ["full_attention"], "num_hidden_layers": 1}


@dataclass(frozen=True)
class Family:
    """How a family's files name its module.

    target, layer: settings of the model, and of one whose only layer is like the module's; centre:
    what norms lie around; embedding, hidden, projection, norm, inner: the names of its parts, the
    last one that of its layer; told: what config.json says of it.
    """

    classes: str
    target: Base
    layer: Base
    centre: float
    embedding: str
    hidden: str
    projection: str
    norm: str
    inner: str
    told: Base


def hybrid(classes: str, base: Base, told: Base) -> Family:
    """Qwen3-Next and Qwen3.5: norms around zero, and a layer that attends."""
    target = of_transformers({**base, **THREE_LAYERS})
    return Family(
        classes,
        target,
        {**target, **ONE_LAYER},
        centre=0.0,
        embedding="mtp.pre_fc_norm_embedding",
        hidden="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        inner="mtp.layers.0",
        told=told,
    )


LAYER = f"model.layers.{DEEPSEEK['num_hidden_layers']}"
TOLD = {"mtp_num_hidden_layers": 1}
FAMILIES = {
    "DeepSeek-V3": Family(
        "DeepseekV3",
        DEEPSEEK,
        {**DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 0},
        centre=1.0,
        embedding=f"{LAYER}.enorm",
        hidden=f"{LAYER}.hnorm",
        projection=f"{LAYER}.eh_proj",
        norm=f"{LAYER}.shared_head.norm",
        inner=LAYER,
        told={"num_nextn_predict_layers": 1},
    ),
    "Qwen3.5": hybrid("Qwen3_5", CONFIG, TOLD),
    "Qwen3.5 with experts": hybrid("Qwen3_5Moe", HYBRID_MOE, TOLD),
    "Qwen3-Next": hybrid("Qwen3Next", NEXT, {}),
}


@dataclass(frozen=True)
class Target:
    """A target with a module: transformers' model of each, and the module's other tensors."""

    family: Family
    folder: Path
    oracle: Any
    layer: Any
    own: Tensors


def oracle_of(family: Family, folder: Path, base: Base) -> Any:
    """transformers' model of these settings, random, saved in the folder."""
    if family.classes == "DeepseekV3":
        return latent_oracle(folder, base)
    return random_oracle(folder, family.classes, base, family.centre)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random target of each family with its module, as it is published."""
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("target")
    apart = tmp_path_factory.mktemp("layer")
    oracle = oracle_of(family, folder, family.target)
    layer = oracle_of(family, apart, family.layer)
    drawn = Drawn()
    own = {
        f"{family.embedding}.weight": drawn.norm(HIDDEN) - (1 - family.centre),
        f"{family.hidden}.weight": drawn.norm(HIDDEN) - (1 - family.centre),
        f"{family.projection}.weight": drawn.matrix(HIDDEN, 2 * HIDDEN),
    }
    tensors = dict(own)
    for name, tensor in load_file(apart / "model.safetensors").items():
        if name == "model.norm.weight":
            tensors[f"{family.norm}.weight"] = tensor
        elif name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0", family.inner)] = tensor
    save_file(tensors, folder / "mtp.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | family.told))
    return Target(family, folder, oracle, layer, own)


def drafts_of(target: Target, tokens: list[int], count: int) -> list[int]:
    """Greedy drafts behind `tokens` [N + 1], of which the target has computed the first N."""
    family = target.family
    embedding = target.oracle.model.embed_tokens.weight
    states = target.oracle.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]

    def normed(x: Tensor, name: str) -> Tensor:
        weight = target.own[f"{name}.weight"] + (1 - family.centre)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    given = tokens[1:]
    found: list[int] = []
    for _ in range(count):
        embedded = normed(embedding[torch.tensor(given)], family.embedding)
        joined = torch.cat([embedded, normed(states, family.hidden)], -1)
        x = F.linear(joined, target.own[f"{family.projection}.weight"])
        out = target.layer.model(inputs_embeds=x[None]).last_hidden_state[0]
        found.append(int(target.oracle.lm_head(out[-1]).argmax()))
        states = torch.cat([states, out[-1:]])
        given = [*given, found[-1]]
    return found


@torch.no_grad()
def test_drafts_are_those_of_transformers_layer(target: Target) -> None:
    """At every step and in both rows: prompts in chunks, another number of drafts in every step,
    none among them, and rows that are moved to the host."""
    spec = {"method": "mtp", "num_speculative_tokens": K}
    seen = Seen(create)
    hooks = CheckHooks(drafter=seen.create, draft_policy=RandomDraftLength, preempt_every=3)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 64, "speculative_config": spec}
    llm = make_llm(target.folder, hooks, **settings)
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    for known, drafts in seen.found:
        assert drafts == drafts_of(target, known, len(drafts)), len(known)
    assert {len(drafts) for _, drafts in seen.found} >= {1, 3, K}
