"""MTP modules with a layer of their own family draft what transformers would.

transformers has no such module. But a module is a projection, one layer and a norm; the latter two
are a model of one layer, which transformers runs on the projection's output.
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
from tests.models.test_mixtures import without_unknown_settings
from tests.spec.drawn import RandomTensors
from tests.spec.watching import RecordedDrafts
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
    """Names of a family's module in its files.

    target, layer: settings of the model, and of one whose only layer is like the module's.
    centre: mean of norms.
    embedding, hidden, projection, norm, inner: names of the module's parts; inner is its layer.
    settings: the module's settings in config.json.
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
    settings: Base


def hybrid(classes: str, base: Base, settings: Base) -> Family:
    """Return Qwen3-Next or Qwen3.5: norms around zero, and an attention layer."""
    target = without_unknown_settings({**base, **THREE_LAYERS})
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
        settings=settings,
    )


LAYER = f"model.layers.{DEEPSEEK['num_hidden_layers']}"
MTP_SETTINGS = {"mtp_num_hidden_layers": 1}
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
        settings={"num_nextn_predict_layers": 1},
    ),
    "Qwen3.5": hybrid("Qwen3_5", CONFIG, MTP_SETTINGS),
    "Qwen3.5 with experts": hybrid("Qwen3_5Moe", HYBRID_MOE, MTP_SETTINGS),
    "Qwen3-Next": hybrid("Qwen3Next", NEXT, {}),
}


@dataclass(frozen=True)
class Target:
    """A target with a module: transformers' model of each, and the module's other tensors."""

    family: Family
    folder: Path
    oracle: Any
    layer: Any
    module_tensors: Tensors


def oracle_of(family: Family, folder: Path, base: Base) -> Any:
    """Return transformers' random model of these settings, saved in the folder."""
    if family.classes == "DeepseekV3":
        return latent_oracle(folder, base)
    return random_oracle(folder, family.classes, base, family.centre)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a random target of each family with its module, as it is published."""
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("target")
    layer_folder = tmp_path_factory.mktemp("layer")
    oracle = oracle_of(family, folder, family.target)
    layer = oracle_of(family, layer_folder, family.layer)
    drawn = RandomTensors()
    module_tensors = {
        f"{family.embedding}.weight": drawn.norm(HIDDEN) - (1 - family.centre),
        f"{family.hidden}.weight": drawn.norm(HIDDEN) - (1 - family.centre),
        f"{family.projection}.weight": drawn.matrix(HIDDEN, 2 * HIDDEN),
    }
    tensors = dict(module_tensors)
    for name, tensor in load_file(layer_folder / "model.safetensors").items():
        if name == "model.norm.weight":
            tensors[f"{family.norm}.weight"] = tensor
        elif name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0", family.inner)] = tensor
    save_file(tensors, folder / "mtp.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | family.settings))
    return Target(family, folder, oracle, layer, module_tensors)


def drafts_of(target: Target, tokens: list[int], count: int) -> list[int]:
    """Return greedy drafts after `tokens` [N + 1], of which the target has computed the first N."""
    family = target.family
    embedding = target.oracle.model.embed_tokens.weight
    states = target.oracle.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]

    def normed(x: Tensor, name: str) -> Tensor:
        weight = target.module_tensors[f"{name}.weight"] + (1 - family.centre)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight

    arguments = tokens[1:]
    results: list[int] = []
    for _ in range(count):
        embedded = normed(embedding[torch.tensor(arguments)], family.embedding)
        joined = torch.cat([embedded, normed(states, family.hidden)], -1)
        x = F.linear(joined, target.module_tensors[f"{family.projection}.weight"])
        out = target.layer.model(inputs_embeds=x[None]).last_hidden_state[0]
        results.append(int(target.oracle.lm_head(out[-1]).argmax()))
        states = torch.cat([states, out[-1:]])
        arguments = [*arguments, results[-1]]
    return results


@pytest.mark.default_cases("Qwen3.5")
@torch.no_grad()
def test_drafts_equal_transformers_layer(target: Target) -> None:
    """At every step and in both rows, with chunked prompts, a varying number of drafts (sometimes
    none), and rows moved to the host."""
    spec = {"method": "mtp", "num_speculative_tokens": K}
    seen = RecordedDrafts(create)
    hooks = CheckHooks(drafter=seen.create, draft_policy=RandomDraftLength, preempt_every=3)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 64, "speculative_config": spec}
    llm = make_llm(target.folder, hooks, **settings)
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    for known, drafts in seen.drafts:
        assert drafts == drafts_of(target, known, len(drafts)), len(known)
    assert {len(drafts) for _, drafts in seen.drafts} >= {1, 3, K}
