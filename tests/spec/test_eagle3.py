"""EAGLE-3: drafts equal an independent forward pass, published files load, and invalid ones are
refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import EngineConfig, SamplingParams
from lockstep.errors import CheckpointError, ConfigError
from lockstep.llm import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec.chain import ChainDrafter
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from tests.models.dense import VOCAB, make_llm, random_targets
from tests.spec.heads import LATENT, drafts_of, make_head, save_head
from tests.spec.watching import RecordedDrafts
from tests.tiny_model import DEEPSEEK, LLAMA, NEMOTRON_H, QWEN3, QWEN3_MOE

HIDDEN = 48
LAYERS = 7
K = 4
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (70, 5)]
HYBRID = {
    **{n: value for n, value in NEMOTRON_H.items() if n != "model_type"},
    "hidden_size": HIDDEN,
    "hybrid_override_pattern": "M-M*ME*",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def make_engine(folder: Path, head: Path, hooks: CheckHooks = NO_HOOKS, **settings: Any) -> LLM:
    """Return an engine of the target in `folder` that drafts with a head."""
    spec = {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": K,
        "adaptive": False,
        **settings.pop("options", {}),
    }
    return make_llm(folder, hooks, max_model_len=256, speculative_config=spec, **settings)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    families = {
        "Llama": LLAMA,
        "Qwen3": QWEN3,
        "Qwen3Moe": QWEN3_MOE,
        "DeepseekV3": DEEPSEEK,
        "NemotronH": HYBRID,
    }
    return random_targets(tmp_path_factory, families, LAYERS)


def residuals_of(oracle: Any, tokens: list[int], aux_layers: tuple[int, ...]) -> list[torch.Tensor]:
    """Return transformers' residuals before these layers; for the number of layers, the one before
    the final norm."""
    inner = oracle.model
    norm = inner.norm_f if hasattr(inner, "norm_f") else inner.norm
    result: dict[int, torch.Tensor] = {}

    def keeping(index: int) -> Any:
        def keep(module: Any, arguments: Any, named: Any) -> None:
            result[index] = arguments[0] if arguments else named["hidden_states"]

        return keep

    indices = [*inner.layers, norm]
    hooks = [
        module.register_forward_pre_hook(keeping(index), with_kwargs=True)
        for index, module in enumerate(indices)
    ]
    with torch.no_grad():
        inner(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [result[layer][0] for layer in aux_layers]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "a mixture": ("Qwen3Moe", {}),
    "norm before the residual": ("Llama", {"norm_before_residual": True}),
    "norms in front of fc": ("Llama", {"norm_before_fc": True, "fc_norm": True}),
    "a normed state": ("Qwen3", {"norm_output": True}),
    "another width": ("Llama", {"width": 40}),
    "the whole vocabulary": ("Qwen3", {"known": VOCAB}),
    "latent attention": ("Llama", LATENT),
    "latent attention for a latent target": ("DeepseekV3", LATENT),
    "a latent target": ("DeepseekV3", {}),
    "a hybrid": ("NemotronH", {}),
    "biases and a theta that is not told": ("Llama", {"attention_bias": True, "rope_theta": None}),
    "the place behind all layers": (
        "Qwen3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7]}},
    ),
    "ModelOpt": (
        "Qwen3",
        {
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            }
        },
    ),
    "named auxiliary layers": (
        "Llama",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4, 6]}},
    ),
    "two layers": ("Llama", {"num_hidden_layers": 2}),
    "three layers with biases and a normed state": (
        "Qwen3",
        {"num_hidden_layers": 3, "attention_bias": True, "norm_output": True},
    ),
    "two layers of latent attention": ("DeepseekV3", {**LATENT, "num_hidden_layers": 2}),
}
VARYING_FORMS = ("llama", "latent attention for a latent target", "two layers")
"""Forms that are also tested with a varying number of drafts."""


@pytest.mark.default_cases(
    "norms in front of fc",
    "a latent target",
    "a hybrid",
    "three layers with biases and a normed state",
)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_equal_the_paper(targets: dict[str, Any], tmp_path: Path, form: str) -> None:
    """At every step and in both rows, with chunked prompts."""
    family, changes = FORMS[form]
    folder, oracle = targets[family]
    head = make_head(tmp_path / "head", VOCAB, HIDDEN, **changes)
    seen = RecordedDrafts(ChainDrafter)
    llm = make_engine(
        folder, tmp_path / "head", CheckHooks(drafter=seen.create), max_num_batched_tokens=64
    )
    llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    named = changes.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    aux_layers = tuple(named or (2, LAYERS // 2, LAYERS - 3))
    flags = {name: value for name, value in changes.items() if value is True}
    embedding = oracle.get_input_embeddings().weight.detach()
    every = seen.by_longest_prefix(lambda tokens: residuals_of(oracle, tokens, aux_layers))
    for known, drafts in seen.drafts:
        residuals = [states[: len(known) - 1] for states in every(known)]
        assert drafts == drafts_of(head, embedding, residuals, known, K, **flags), len(known)
    assert len(seen.drafts) > 9


@pytest.mark.default_cases("llama")
@pytest.mark.parametrize("form", VARYING_FORMS)
def test_steps_without_drafts_store_head_state(
    targets: dict[str, Any], tmp_path: Path, form: str
) -> None:
    """Rows that move to host memory and back keep it too."""
    family, changes = FORMS[form]
    folder, oracle = targets[family]
    head = make_head(tmp_path / "head", VOCAB, HIDDEN, **changes)
    seen = RecordedDrafts(ChainDrafter)
    hooks = CheckHooks(drafter=seen.create, draft_policy=RandomDraftLength, preempt_every=3)
    llm = make_engine(folder, tmp_path / "head", hooks, options={"adaptive": True})
    llm.generate([{"prompt_token_ids": p} for p in PROMPTS], replace(GREEDY, max_tokens=24))
    embedding = oracle.get_input_embeddings().weight.detach()
    for known, drafts in seen.drafts:
        residuals = residuals_of(oracle, known[:-1], (2, LAYERS // 2, LAYERS - 3))
        assert drafts == drafts_of(head, embedding, residuals, known, len(drafts)), len(known)
    assert {len(drafts) for _, drafts in seen.drafts} >= {1, 3, K}


def drafts_with(
    folder: Path, head: Path, params: SamplingParams = GREEDY, **settings: Any
) -> list[tuple[list[int], list[int]]]:
    """Return an engine's drafts for the second prompt."""
    seen = RecordedDrafts(ChainDrafter)
    llm = make_engine(folder, head, CheckHooks(drafter=seen.create), **settings)
    llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
    return seen.drafts


def test_logit_scale_scales_sampled_drafts(targets: dict[str, Any], tmp_path: Path) -> None:
    """logit_scale equals a factor of lm_head."""
    folder, _ = targets["Llama"]
    drawn = replace(GREEDY, temperature=0.9, seed=3)
    tensors = make_head(tmp_path / "plain", VOCAB, HIDDEN)
    make_head(tmp_path / "scaled", VOCAB, HIDDEN, logit_scale=0.25)
    expected = make_head(tmp_path / "expected", VOCAB, HIDDEN)
    expected["lm_head.weight"] = 0.25 * tensors["lm_head.weight"]
    save_head(tmp_path / "expected", expected)
    scaled = drafts_with(folder, tmp_path / "scaled", drawn)
    assert scaled == drafts_with(folder, tmp_path / "expected", drawn)
    assert scaled != drafts_with(folder, tmp_path / "plain", drawn)


def test_tensor_names_and_vocabulary_order_do_not_matter(
    targets: dict[str, Any], tmp_path: Path
) -> None:
    """Files of other trainers; rows of lm_head in any order; a nested config."""
    folder, _ = targets["Llama"]
    tensors = make_head(tmp_path / "head", VOCAB, HIDDEN)
    expected = drafts_with(folder, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())

    other = tmp_path / "speculators"
    other.mkdir()
    outer = ("draft_vocab_size",)
    nested = {
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        **{name: config[name] for name in outer},
        "transformer_layer_config": {n: v for n, v in config.items() if n not in outer},
    }
    (other / "config.json").write_text(json.dumps(nested))
    shuffled = torch.randperm(len(tensors["d2t"]))
    ids = tensors["d2t"] + torch.arange(len(shuffled))
    changed = {
        "lm_head.weight": tensors["lm_head.weight"][shuffled],
        "d2t": ids[shuffled] - torch.arange(len(shuffled)),
    }
    renamed = {
        "model." + name.replace("midlayer", "layers.0"): tensor
        for name, tensor in {**tensors, **changed}.items()
    }
    save_head(other, renamed)
    assert drafts_with(folder, other) == expected


@pytest.mark.default_cases("mine0")
@pytest.mark.parametrize("mine", [(), ("lm_head.weight",), ("embed_tokens.weight",)])
def test_head_and_embedding_are_own_or_shared(
    targets: dict[str, Any], tmp_path: Path, mine: tuple[str, ...]
) -> None:
    folder, oracle = targets["Qwen3"]
    head = make_head(tmp_path / "head", VOCAB, HIDDEN, known=VOCAB)
    head["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    shared = {
        "lm_head.weight": oracle.lm_head.weight.detach(),
        "embed_tokens.weight": oracle.model.embed_tokens.weight.detach(),
    }
    save_head(tmp_path / "head", {n: t for n, t in head.items() if n in mine or n not in shared})
    for name, tensor in shared.items():
        if name not in mine:
            head[name] = tensor
    aux_layers = (2, LAYERS // 2, LAYERS - 3)
    for known, drafts in drafts_with(folder, tmp_path / "head"):
        residuals = residuals_of(oracle, known[:-1], aux_layers)
        embedding = head["embed_tokens.weight"]
        assert drafts == drafts_of(head, embedding, residuals, known, K)


def test_reduced_tied_head_uses_its_file(targets: dict[str, Any], tmp_path: Path) -> None:
    """SpecForge's head for Qwen3-4B has the settings of its target, but its reduced lm_head is no
    copy of an embedding."""
    folder, _ = targets["Qwen3"]
    make_head(tmp_path / "apart", VOCAB, HIDDEN)
    make_head(tmp_path / "tied", VOCAB, HIDDEN, tie_word_embeddings=True)
    assert drafts_with(folder, tmp_path / "tied") == drafts_with(folder, tmp_path / "apart")
    make_engine(folder, tmp_path / "tied", load_format="dummy")
    head = make_head(tmp_path / "whole", VOCAB, HIDDEN, known=VOCAB, tie_word_embeddings=True)
    save_head(tmp_path / "whole", {n: t for n, t in head.items() if n != "lm_head.weight"})
    with pytest.raises(CheckpointError, match="no lm_head.weight.*tie_word_embeddings=True"):
        make_engine(folder, tmp_path / "whole")


def test_taps_may_name_layer_outputs(targets: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = targets["Qwen3"]
    ids = "eagle_aux_hidden_state_layer_ids"
    make_head(tmp_path / "front", VOCAB, HIDDEN, eagle_config={ids: [2, 4, 6]})
    make_head(tmp_path / "behind", VOCAB, HIDDEN, eagle_config={ids: [1, 3, 5]})
    front = drafts_with(folder, tmp_path / "front")
    assert drafts_with(folder, tmp_path / "behind") != front
    following = drafts_with(folder, tmp_path / "behind", options={"aux_hidden_layer_outputs": True})
    assert following == front


def without(name: str) -> Any:
    """Return a change that removes a tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def changed(name: str, make: Any) -> Any:
    """Return a change that replaces a tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = make(tensors.get(name))

    return change


def duplicate_offset(offsets: torch.Tensor) -> torch.Tensor:
    """Return offsets that map the head's second token to the first one's again."""
    result = offsets.clone()
    result[1] = result[0] - 1
    return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("midlayer.hidden_norm.weight"), r"missing tensors \(1\): layers.0.hidden_norm"),
        (without("d2t"), "has no tensor d2t"),
        (changed("d2t", lambda t: t + 400), "leads to token"),
        (changed("d2t", duplicate_offset), "a token twice"),
        (changed("d2t", lambda t: t[:-1]), "one for each token"),
        (changed("t2d", lambda t: ~t), "t2d names other tokens than d2t"),
        (
            changed("midlayer.extra", lambda t: torch.ones(2)),
            r"spare tensors \(1\): midlayer.extra",
        ),
        (changed("fc.weight", lambda t: t[:, 1:].contiguous()), "unfit tensors"),
        (changed("fc.bias", lambda t: torch.ones(HIDDEN)), r"spare tensors \(1\): fc.bias"),
        (
            changed("midlayer.mlp.experts.0.up_proj.weight", lambda t: torch.ones(2, 2)),
            "a mixture of experts .*Take a head with a dense MLP",
        ),
    ],
)
def test_damaged_head_is_refused(
    targets: dict[str, Any], tmp_path: Path, change: Any, message: str
) -> None:
    tensors = make_head(tmp_path / "head", VOCAB, HIDDEN)
    change(tensors)
    save_head(tmp_path / "head", tensors)
    with pytest.raises(CheckpointError, match=message):
        make_engine(targets["Llama"][0], tmp_path / "head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": VOCAB + 1}, "the target's, 320"),
        ({"target_hidden_size": 64}, "the target's, 48"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        (
            {"num_hidden_layers": 2, "eagle_config": {"next_layer_regular": False}},
            "eagle_config.next_layer_regular=False",
        ),
        ({"logit_scale": 0}, "logit_scale=0.*finite numbers above 0"),
        ({"draft_vocab_size": VOCAB + 1}, "1 to vocab_size"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_aux_hidden_states": 2}, "one for each layer id"),
        *(
            ({"eagle_aux_hidden_state_layer_ids": ids}, "ascending numbers of layers, 0 to 7")
            for ids in ([2, 2, 3], [3, 8], [-1, 2], ["2"], [True])
        ),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types='sliding_attention'"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'.*'eagle3'"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step=4"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm=True"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False"),
        ({**LATENT, "rope_interleave": False}, "rope_interleave=False"),
        ({**LATENT, "attention_bias": True}, "attention_bias=True"),
    ],
)
def test_head_settings_must_match_target(
    targets: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make_head(tmp_path / "head", VOCAB, HIDDEN, **changes)
    with pytest.raises(CheckpointError, match=f"head/config.json .*{message}"):
        make_engine(targets["Llama"][0], tmp_path / "head")


def test_taps_beyond_last_layer_output_are_refused(targets: dict[str, Any], tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, LAYERS]}
    make_head(tmp_path / "head", VOCAB, HIDDEN, eagle_config=ids)
    with pytest.raises(CheckpointError, match="0 to 6"):
        make_engine(
            targets["Llama"][0], tmp_path / "head", options={"aux_hidden_layer_outputs": True}
        )


def test_head_must_be_named_and_exist(targets: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = targets["Llama"]
    with pytest.raises(ConfigError, match="model='' is not allowed"):
        EngineConfig.read(speculative_config={"method": "eagle3"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="EAGLE-3 head"):
        make_engine(folder, tmp_path / "empty")


def test_pickled_head_is_refused_with_conversion(targets: dict[str, Any], tmp_path: Path) -> None:
    """The authors' files are pickles; the message's conversion works."""
    folder, _ = targets["Llama"]
    tensors = make_head(tmp_path / "head", VOCAB, HIDDEN)
    expected = drafts_with(folder, tmp_path / "head")
    ours = tmp_path / "head" / "model.safetensors"
    ours.unlink()
    pickled = tmp_path / "head" / "pytorch_model.bin"
    torch.save(tensors, pickled)
    with pytest.raises(
        CheckpointError, match=r"\(\*.bin, \*.pt\) are not read, .* one is converted by"
    ):
        make_engine(folder, tmp_path / "head")
    save_file(torch.load(pickled, weights_only=True), ours)
    assert drafts_with(folder, tmp_path / "head") == expected


def test_dummy_head_needs_only_settings(targets: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = targets["Llama"]
    make_head(tmp_path / "head", VOCAB, HIDDEN, width=40)
    (tmp_path / "head" / "model.safetensors").unlink()
    llm = make_engine(folder, tmp_path / "head", load_format="dummy")
    plan = llm.engine.plan
    assert plan.draft_vocab_size == 192
    assert plan.draft_head_bytes == 192 * 40 * 4
