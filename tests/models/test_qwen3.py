"""Qwen3 dense: against transformers, and one law for all tokens since nothing recurs."""

import json
from pathlib import Path

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import CheckpointError
from lockstep.layers.build import Build
from lockstep.models.loader import build_model
from lockstep.models.qwen3 import Config
from lockstep.outputs import RequestOutput
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from tests.tiny_model import QWEN3, make_model

VOCAB = 320
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
QWEN3_8B = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
}


def make_llm(folder: Path, **settings: object) -> LLM:
    """An engine over a tiny folder, token ids in and out."""
    chosen = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 4, **settings}
    return LLM(str(folder), **chosen)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(engine, oracle) over one checkpoint as transformers saves it, its weights random."""
    transformers = pytest.importorskip("transformers")
    own = {**QWEN3, "rope_theta": 50000.0, "torch_dtype": "float32", "vocab_size": VOCAB}
    config = transformers.Qwen3Config(**{**own, "tie_word_embeddings": request.param})
    torch.manual_seed(0)
    oracle = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in oracle.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
        else:
            parameter.data.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("qwen3")
    oracle.save_pretrained(folder)
    return make_llm(folder, speculative_config=NGRAM), oracle


def prompts(count: int, longest: int) -> list[list[int]]:
    """Random token ids, from 16 tokens to `longest`."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.linspace(16, longest, count).long().tolist()
    return [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]


def test_logits_and_greedy_tokens_of_a_few_prompts(pair) -> None:
    for ids in prompts(4, 200):
        assert logits_error(*pair, ids) < RELATIVE
        compare_greedy(*pair, ids, 24)


@pytest.mark.slow
def test_logits_and_greedy_tokens_of_64_prompts(pair) -> None:
    worst, ties = 0.0, 0
    for ids in prompts(64, 600):
        worst = max(worst, logits_error(*pair, ids))
        ties += compare_greedy(*pair, ids, 64)
    print(f"worst relative error {worst:.2e}, ties {ties}")
    assert worst < RELATIVE


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose weights are made up."""
    return make_model(tmp_path_factory.mktemp("dummy") / "model", QWEN3)


def answer(folder: Path, prompt: list[int], count: int = 90, **settings: object) -> RequestOutput:
    """A greedy answer with the log-probability of each of its tokens."""
    llm = make_llm(folder, load_format="dummy", **settings)
    return ask(llm, prompt, count)


def ask(llm: LLM, prompt: list[int], count: int = 90) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    return llm.generate({"prompt_token_ids": prompt}, params)[0]


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    """Each token with its log-probability: equal only if the logits are."""
    one = output.outputs[0]
    assert one.logprobs is not None
    return [(t, e[t].logprob) for t, e in zip(one.token_ids, one.logprobs, strict=True)]


def test_drafting_and_chunks_off_the_grid_change_no_bit(dummy: Path) -> None:
    prompt = [*range(5, 155), *range(5, 155)]
    plain = answer(dummy, prompt)
    drafted = answer(dummy, prompt, speculative_config=NGRAM)
    chunked = answer(dummy, prompt, max_num_batched_tokens=70, enable_prefix_caching=False)
    assert bits(plain) == bits(drafted) == bits(chunked)
    metrics = drafted.metrics
    assert metrics is not None and metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("drafting", [None, NGRAM], ids=["plain", "ngram"])
def test_a_second_turn_finds_what_was_generated(dummy: Path, drafting: object) -> None:
    llm = make_llm(dummy, load_format="dummy", speculative_config=drafting)
    first = list(range(5, 75))
    said = ask(llm, first, 150).outputs[0].token_ids
    second = [*first, *said, *range(40, 60)]
    warm = ask(llm, second)
    cold = answer(dummy, second, speculative_config=drafting)
    assert warm.metrics is not None and cold.metrics is not None
    assert warm.metrics.num_cached_tokens == (len(first) + len(said) - 1) // 64 * 64 > len(first)
    assert cold.metrics.num_cached_tokens == 0
    assert bits(warm) == bits(cold)


def test_no_state_is_kept(dummy: Path) -> None:
    llm = make_llm(dummy, load_format="dummy")
    assert llm.engine.plan.num_slots == 0 and llm.engine.scheduler.cache.state is None


def test_mtp_needs_a_module(dummy: Path) -> None:
    with pytest.raises(CheckpointError, match="has none"):
        make_llm(dummy, load_format="dummy", speculative_config={"method": "mtp"})


def test_a_layer_of_qwen3_8b_has_its_shapes_and_its_share_of_the_parameters() -> None:
    build = Build("cpu", torch.bfloat16, 1, 64)
    small = {**QWEN3_8B, "num_hidden_layers": 1, "vocab_size": 256}
    model = build_model(small, build)
    table = model.weights()
    layer = {n.removeprefix("layers.0."): t for n, t in table.items() if n.startswith("layers.")}
    assert {n: tuple(t.shape) for n, t in layer.items()} == {
        "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (12288, 4096),
        "mlp.up_proj.weight": (12288, 4096),
        "mlp.down_proj.weight": (4096, 12288),
    }
    others = {n: tuple(t.shape) for n, t in table.items() if not n.startswith("layers.")}
    matrix = (256, 4096)
    assert others == {
        "embed_tokens.weight": matrix, "lm_head.weight": matrix, "norm.weight": (4096,)
    }  # fmt: skip
    total = 36 * sum(t.numel() for t in layer.values()) + 2 * 151936 * 4096 + 4096
    assert total == 8_190_735_360


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 36}, "layer_types='?.*full_attention"),
        ({"layer_types": ["full_attention"] * 35}, "one for each of 36 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type='linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type='llama3'"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=10000.0.*1000000"),
        ({"rope_theta": None}, "rope_theta"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32.*multiples"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0.*1 or more"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.read({**QWEN3_8B, **changes})


@pytest.mark.parametrize("name", ["hidden_size", "num_key_value_heads", "rms_norm_eps"])
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        Config.read({k: v for k, v in QWEN3_8B.items() if k != name})


def test_both_ways_to_write_the_rotary_settings() -> None:
    new = {k: v for k, v in QWEN3_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert Config.read(json.loads(json.dumps(new))) == Config.read(QWEN3_8B)
