"""Nemotron-H's MTP module drafts like an independent forward pass written from the published
names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lockstep import LLM, SamplingParams
from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models import architecture
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.nemotron_h import Config, Draft, Model
from lockstep.spec import own_drafter
from lockstep.spec.mtp import create
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from tests.models.dense import VOCAB, make_llm
from tests.models.test_nemotron_h import BIASES, MTP_OF_SUPER, SUPER, oracle_of
from tests.spec.watching import RecordedDrafts
from tests.tiny_model import NEMOTRON_H

K = 4
HIDDEN = 40
HEADS = 5
DIM = 20
EPS = 1e-5
LATENT = 18
EXPERTS = 6
CHOSEN = 2
INNER = 22
SHARED = 26
DENSE = 66
SCALE = 2.5
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (70, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
Tensors = dict[str, Tensor]
FORMS: dict[str, dict[str, Any]] = {
    "super": {"mtp_hybrid_override_pattern": "*E", "moe_latent_size": LATENT},
    "neither, without latents": {},
    "dense": {"mtp_hybrid_override_pattern": "*-"},
}


@dataclass(frozen=True)
class Target:
    """A target with an MTP module: transformers' model, and the module's tensors by name."""

    folder: Path
    oracle: Any
    module: Tensors
    settings: dict[str, Any]


def random_module(settings: dict[str, Any]) -> Tensors:
    """Return random tensors with the names of Nemotron 3 Super's files."""
    draw = torch.Generator().manual_seed(5)

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=draw) * 1.5 * k**-0.5

    def norm() -> Tensor:
        return torch.rand(HIDDEN, generator=draw) + 0.5

    module = {
        "layers.0.enorm.weight": norm(),
        "layers.0.hnorm.weight": norm(),
        "layers.0.eh_proj.weight": matrix(HIDDEN, 2 * HIDDEN),
        "layers.0.norm.weight": norm(),
        "layers.0.mixer.q_proj.weight": matrix(HEADS * DIM, HIDDEN),
        "layers.0.mixer.k_proj.weight": matrix(DIM, HIDDEN),
        "layers.0.mixer.v_proj.weight": matrix(DIM, HIDDEN),
        "layers.0.mixer.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        "layers.1.norm.weight": norm(),
        "layers.1.final_layernorm.weight": norm(),
    }
    if settings.get("mtp_hybrid_override_pattern") == "*-":
        module["layers.1.mixer.up_proj.weight"] = matrix(DENSE, HIDDEN)
        module["layers.1.mixer.down_proj.weight"] = matrix(HIDDEN, DENSE)
        return module
    width = settings.get("moe_latent_size") or HIDDEN
    module["layers.1.mixer.gate.weight"] = matrix(EXPERTS, HIDDEN)
    module["layers.1.mixer.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=draw)
    module["layers.1.mixer.shared_experts.up_proj.weight"] = matrix(SHARED, HIDDEN)
    module["layers.1.mixer.shared_experts.down_proj.weight"] = matrix(HIDDEN, SHARED)
    for expert in range(EXPERTS):
        name = f"layers.1.mixer.experts.{expert}"
        module[f"{name}.up_proj.weight"] = matrix(INNER, width)
        module[f"{name}.down_proj.weight"] = matrix(width, INNER)
    if width != HIDDEN:
        module["layers.1.mixer.fc1_latent_proj.weight"] = matrix(width, HIDDEN)
        module["layers.1.mixer.fc2_latent_proj.weight"] = matrix(HIDDEN, width)
    return module


@pytest.fixture(scope="module", params=FORMS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return a random target of each form, saved as it is published."""
    folder = tmp_path_factory.mktemp("nemotron")
    settings = FORMS[request.param]
    ours = {name: value for name, value in settings.items() if name.startswith("mtp")}
    theirs = {name: value for name, value in settings.items() if name not in ours}
    oracle = oracle_of(folder, **theirs)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | {"mtp_layers_block_type": None}
    path.write_text(json.dumps({**raw, "num_nextn_predict_layers": 1, **ours}))
    module = random_module(settings)
    save_file({f"mtp.{name}": t for name, t in module.items()}, folder / "mtp.safetensors")
    return Target(folder, oracle, module, settings)


def make_engine(folder: Path, hooks: CheckHooks = NO_HOOKS, **settings: Any) -> LLM:
    """Return an engine that drafts with the module."""
    spec = {"method": "mtp", "num_speculative_tokens": K, "adaptive": False}
    chosen = {"max_model_len": 256, "speculative_config": spec, **settings}
    return make_llm(folder, hooks, **chosen)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / rms(x) * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def relu_mlp(x: Tensor, module: Tensors, name: str) -> Tensor:
    """Return down(relu(up x)^2)."""
    up = F.linear(x, module[f"{name}.up_proj.weight"])
    return F.linear(F.relu(up).square(), module[f"{name}.down_proj.weight"])


def attention(x: Tensor, module: Tensors) -> Tensor:
    """Return causal attention without positions, with one KV head."""
    q, k, v = (F.linear(x, module[f"layers.0.mixer.{name}_proj.weight"]) for name in "qkv")
    heads = q.unflatten(-1, (HEADS, DIM)).transpose(0, 1)
    scores = heads @ k.T * DIM**-0.5
    unseen = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    mixed = (weights @ v).transpose(0, 1).flatten(1)
    return F.linear(mixed, module["layers.0.mixer.o_proj.weight"])


def mixture(x: Tensor, module: Tensors) -> Tensor:
    """Return the experts' output: sigmoid scores, selection with a bias; experts in the latent
    space if there is one."""
    name = "layers.1.mixer"
    if f"{name}.gate.weight" not in module:
        return relu_mlp(x, module, name)
    scores = F.linear(x, module[f"{name}.gate.weight"]).sigmoid()
    chosen = (scores + module[f"{name}.gate.e_score_correction_bias"]).topk(CHOSEN).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * SCALE
    inner = x
    latent = f"{name}.fc1_latent_proj.weight" in module
    if latent:
        inner = F.linear(x, module[f"{name}.fc1_latent_proj.weight"])
    result = torch.zeros_like(inner)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            out = relu_mlp(inner[token : token + 1], module, f"{name}.experts.{expert}")
            result[token] += weight * out[0]
    if latent:
        result = F.linear(result, module[f"{name}.fc2_latent_proj.weight"])
    return result + relu_mlp(x, module, f"{name}.shared_experts")


def drafts_of(target: Target, tokens: list[int]) -> list[int]:
    """Return K greedy drafts after `tokens` [N + 1], of which the target has computed the first
    N."""
    module = target.module
    model = target.oracle.model
    embedding = model.embeddings.weight.detach()
    with torch.no_grad():
        states = model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    arguments = tokens[1:]
    results: list[int] = []
    for _ in range(K):
        embedded = rms(embedding[torch.tensor(arguments)], module["layers.0.enorm.weight"])
        joined = torch.cat([embedded, rms(states, module["layers.0.hnorm.weight"])], -1)
        x = F.linear(joined, module["layers.0.eh_proj.weight"])
        x = x + attention(rms(x, module["layers.0.norm.weight"]), module)
        x = x + mixture(rms(x, module["layers.1.norm.weight"]), module)
        out = rms(x, module["layers.1.final_layernorm.weight"])
        logits = out[-1] @ target.oracle.lm_head.weight.detach().T
        results.append(int(logits.argmax()))
        states = torch.cat([states, out[-1:]])
        arguments = [*arguments, results[-1]]
    return results


@pytest.mark.default_cases("dense")
def test_drafts_equal_independent_forward(target: Target) -> None:
    """At every step and in both rows, with chunked prompts; the answers equal those without
    drafts."""
    assert own_drafter(Checkpoint.read(target.folder)) == "mtp"
    seen = RecordedDrafts(create)
    hooks = CheckHooks(drafter=seen.create)
    llm = make_engine(target.folder, hooks, max_num_batched_tokens=64)
    outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert len(seen.drafts) > 9
    for known, drafts in seen.drafts:
        assert drafts == drafts_of(target, known), len(known)
    plain = make_engine(target.folder, speculative_config=None)
    expected = plain.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.default_cases("super")
def test_steps_without_drafts_store_keys_and_values(target: Target) -> None:
    """The adaptive drafter skips drafts in many steps; its answers equal those without drafts."""
    spec = {"method": "mtp", "num_speculative_tokens": K}
    adaptive = make_engine(target.folder, speculative_config=spec)
    plain = make_engine(target.folder, speculative_config=None)
    actual = [
        llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)[0].outputs[0].token_ids
        for llm in (adaptive, plain)
    ]
    assert actual[0] == actual[1]


def test_missing_module_tensor_is_named(target: Target, tmp_path: Path) -> None:
    for path in target.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    less = {f"mtp.{n}": t for n, t in target.module.items() if n != "layers.0.hnorm.weight"}
    save_file(less, tmp_path / "mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\): mtp.layers.0.hnorm.weight"):
        make_engine(tmp_path)


def test_mtp_block_list_equals_pattern() -> None:
    """transformers writes the list; if neither is present, the default counts."""
    raw = {**NEMOTRON_H, "vocab_size": VOCAB, "num_nextn_predict_layers": 1}
    read = architecture("nemotron_h").Config.read
    plain = read({**raw, "mtp_hybrid_override_pattern": "*E"})
    assert plain.draft_kinds == ("attention", "moe")
    assert read({**raw, "mtp_layers_block_type": ["full_attention", "moe"]}) == plain
    assert read(raw) == plain
    assert read({**raw, "num_nextn_predict_layers": 0}).draft_kinds == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2.*0, 1"),
        ({"mtp_hybrid_override_pattern": "E*"}, "mtp_hybrid_override_pattern='E.*attention first"),
        ({"mtp_hybrid_override_pattern": "*M"}, "attention first, then blocks of mlp or moe alone"),
        ({"mtp_hybrid_override_pattern": "**"}, "attention first, then blocks of mlp or moe alone"),
        ({"mtp_hybrid_override_pattern": ""}, "1 to .* blocks"),
        ({"mtp_layers_block_type": ["attention", 3]}, "mtp_layers_block_type=3"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = {**NEMOTRON_H, "vocab_size": VOCAB, "num_nextn_predict_layers": 1}
    with pytest.raises(CheckpointError, match=message):
        architecture("nemotron_h").Config.read(raw | changes)


@pytest.mark.slow
def test_parameters_of_super_mtp_module() -> None:
    """The released module has these parameters, with the correction bias of its router."""
    raw = {**SUPER, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    with FakeTensorMode():
        build = BuildContext("cpu", torch.bfloat16, 1, 64)
        build.memory_budget.bounded = False
        target = Model(Config.read(raw), build)
        module = Draft(target, build)
    shared = {id(parameter) for parameter in target.parameters()}
    mine = [p.numel() for p in module.parameters() if id(p) not in shared]
    assert sum(mine) == MTP_OF_SUPER + BIASES // 40
