"""Text settings: chat template, its variables, parsers, sampling defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.errors import CheckpointError, ConfigError, RequestError
from lockstep.settings import MAX_CHARACTERS
from lockstep.text.generation_config import NEUTRAL, WITHOUT_EFFECT
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.tiny_model import make_model

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ tone }}"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "ping"}}]


def processor(folder: Path, tokenizer: Tokenizer, **chosen: Any) -> Processor:
    return Processor.for_model(tokenizer, folder, 512, TextSettings(**chosen))


def test_template_may_be_text_or_file(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    for chosen in (TEMPLATE, str(path)):
        result = processor(folder, tokenizer, chat_template=chosen)
        assert result.render_text(HI) == "hi|"
    with pytest.raises(RequestError, match="tool-call parser"):
        result.check_tools(TOOLS)  # parsers are chosen by the template that is used


def test_request_variables_override_defaults(folder: Path, tokenizer: Tokenizer) -> None:
    variables = {"tone": "calm"}
    result = processor(
        folder, tokenizer, chat_template=TEMPLATE, default_chat_template_kwargs=variables
    )
    assert result.render_text(HI) == "hi|calm"
    assert result.render_text(HI, tone="loud") == "hi|loud"


def test_parsers_by_name(folder: Path, tokenizer: Tokenizer) -> None:
    plain = processor(folder, tokenizer, tool_call_parser="none", reasoning_parser="none")
    plain.check_tools(None)
    with pytest.raises(RequestError, match="tool-call parser"):
        plain.check_tools(TOOLS)
    text = "<think>\nwhy\n</think>\n\nso"
    assert plain.reply_parser("", None).parse(text).content == text
    named = processor(folder, tokenizer, reasoning_parser="deepseek_r1", tool_call_parser="hermes")
    result = named.reply_parser("", None).parse(text)
    assert (result.reasoning, result.content) == ("why", "so")
    named.check_tools(TOOLS)


def test_sampling_defaults(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By default they are those of the checkpoint's generation_config.json, here 0.5. Those of the
    user override them."""
    assert processor(folder, tokenizer).default_params().temperature == 0.5
    none = processor(folder, tokenizer, generation_config="vllm")
    assert none.defaults == {} and none.default_params().temperature == 1.0
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"top_k": 7, "do_sample": False, "max_new_tokens": 9, "eos_token_id": 1})
    )
    expected = processor(folder, tokenizer, generation_config=str(tmp_path))
    assert expected.defaults == {"top_k": 7, "temperature": 0.0} and expected.max_new_tokens == 9
    assert expected.eos_ids == tokenizer.eos_ids, "what ends an answer is the checkpoint's"
    over = processor(
        folder,
        tokenizer,
        generation_config=str(tmp_path),
        override_generation_config={"temperature": 0.25, "max_new_tokens": 5},
    )
    assert over.defaults == {"top_k": 7, "temperature": 0.25} and over.max_new_tokens == 5


def test_damaged_generation_config_is_named(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(CheckpointError, match="generation_config.json is damaged: top_p='high'"):
        processor(folder, tokenizer, generation_config=str(tmp_path))


UNSUPPORTED: dict[str, Any] = {
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 2e-3,
    "penalty_alpha": 0.6,
    "num_beams": 4,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "diversity_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "guidance_scale": 1.5,
    "min_length": 5,
    "min_new_tokens": 5,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "forced_decoder_ids": [[1, 5]],
    "bad_words_ids": [[5]],
    "force_words_ids": [[5]],
    "sequence_bias": [[[5], 2.0]],
    "exponential_decay_length_penalty": [10, 1.1],
    "watermarking_config": {"greenlist_ratio": 0.25},
    "dola_layers": "high",
    "stop_strings": ["x"],
    "max_time": 2.0,
    "token_healing": True,
    "unheard_of": 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_generation_setting_is_refused(
    name: str, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({name: UNSUPPORTED[name]}))
    chosen = {"generation_config": str(tmp_path)}
    with pytest.raises(CheckpointError, match=f"{name}=.*allowed: .*null.*vllm"):
        processor(folder, tokenizer, **chosen)
    for off in (None, False, [], *NEUTRAL.get(name, ())):
        path.write_text(json.dumps({name: off}))
        assert processor(folder, tokenizer, **chosen).defaults == {}


def test_generation_settings_without_effect_are_ignored(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ignored = {**dict.fromkeys(WITHOUT_EFFECT, 7), "_from_model_config": True, "eos_token_id": [1]}
    read = {"top_k": 20, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(ignored | read))
    expected = processor(folder, tokenizer, generation_config=str(tmp_path))
    assert expected.defaults == read and expected.default_params().presence_penalty == 1.5


def test_generation_defaults_of_transformers_are_accepted(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(transformers.GenerationConfig().to_dict()))
    processor(folder, tokenizer, generation_config=str(tmp_path))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tool_call_parser": "x"}, "tool_call_parser='x' is not allowed; allowed: auto, none, q"),
        ({"reasoning_parser": 1}, "reasoning_parser=1 is not allowed; allowed: auto, none, think"),
        ({"chat_template": "/no/file"}, "chat_template='/no/file' is not allowed"),
        ({"generation_config": "none"}, "generation_config='none' is not allowed; allowed: auto"),
        ({"generation_config": "x" * 9_999}, "generation_config='xx.* is not allowed"),
        ({"tool_call_parser": "\ud800"}, "tool_call_parser=.* is not allowed"),
        ({"override_generation_config": []}, "override_generation_config=.* a dict of temperature"),
        ({"override_generation_config": {"top": 1}}, "override_generation_config key='top'"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p=2 is"),
        (
            {"default_chat_template_kwargs": {"messages": 1}},
            "default_chat_template_kwargs: .*messa",
        ),
    ],
)
def test_invalid_text_settings_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextSettings(**chosen)


def test_llm_accepts_text_settings(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    settings = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 1}
    llm = LLM(model, chat_template=TEMPLATE, generation_config="vllm", **settings)
    assert llm.processor.render_text(HI) == "hi|" and llm.processor.defaults == {}
    with pytest.raises(ConfigError, match="setting='chat_templte' is not allowed"):
        LLM(model, chat_templte=TEMPLATE, **settings)


def test_template_file_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.jinja"
    path.write_text("x" * (MAX_CHARACTERS + 1))
    with pytest.raises(ConfigError, match="chat_template=.*longer than 1048576 characters"):
        TextSettings(chat_template=str(path)).template()
