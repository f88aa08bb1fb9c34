"""Damaged model folders load, or raise a CheckpointError that names the file."""

import json
import random
import shutil

import pytest

from lockstep.errors import CheckpointError, LockstepError
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("generation_config.json", "chat_template.jinja"),
)
RAW = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "no UTF-8": b"\xff\xfe{}",
    "zeros": b"\0" * 100,
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "deep": b"[" * 100_000,
    "long number": b'{"eos_token_id": ' + b"9" * 5000 + b"}",
    "template": b"{% for x in %}",
}
WRONG = [None, 5, -1, 10**18, 2.5, True, "x", "", "\ud800", [], [5], ["x"], [[]], {}, {"a": 5}]


@pytest.fixture
def copy(folder, tmp_path):
    """Return a folder that a test may damage."""
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model"


def load(folder):
    """Load and use a folder; return the project's error, if any."""
    try:
        tokenizer = Tokenizer(folder)
        processor = Processor.for_model(tokenizer, folder, 512)
        Processor.for_model(None, folder, 512)
    except CheckpointError as error:
        message = str(error)
        assert any(name in message for name in FILES), message
        assert message.endswith(".") and len(message) < 900
        return message
    try:
        processor.default_params()
        processor.decode(processor.encode("the fox"))
        processor.conversation([{"role": "user", "content": "a <|im_end|>"}])
    except LockstepError:
        pass
    return None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", RAW)
def test_file_of_another_type_is_named(copy, name, kind):
    (copy / name).write_bytes(RAW[kind])
    reported = load(copy)
    if name == "chat_template.jinja" and kind not in ("no UTF-8", "template"):
        assert reported is None, "it is a template, if an odd one"
    else:
        assert name in str(reported)


# What makes each file an error, by the path of what is exchanged in it.
WRONG_VALUES = [
    ("tokenizer_config.json", ("added_tokens_decoder",), [5]),
    ("tokenizer_config.json", ("added_tokens_decoder", "x"), {"content": "a"}),
    ("tokenizer_config.json", ("added_tokens_decoder", "-1"), {"content": "a"}),
    ("tokenizer_config.json", ("added_tokens_decoder", "9" * 50), {"content": "a"}),
    ("tokenizer_config.json", ("added_tokens_decoder", "330"), {"content": 5}),
    ("tokenizer_config.json", ("added_tokens_decoder", "330"), {"content": ""}),
    ("tokenizer_config.json", ("added_tokens_decoder", "330"), {"content": "\ud800"}),
    ("tokenizer_config.json", ("added_tokens_decoder", "330"), None),
    ("tokenizer_config.json", ("chat_template",), 5),
    ("tokenizer_config.json", ("chat_template",), "\ud800"),
    ("tokenizer_config.json", ("chat_template",), "{{ a"),
    ("tokenizer_config.json", ("chat_template",), "{% nonsense %}"),
    ("tokenizer_config.json", ("chat_template",), "{{ " + "(" * 5000 + "}}"),
    ("tokenizer_config.json", ("chat_template",), [{"name": "default", "template": 5}]),
    ("tokenizer_config.json", ("eos_token",), 5),
    ("tokenizer_config.json", ("eos_token",), {"content": [5]}),
    ("tokenizer_config.json", ("bos_token",), ["a"]),
    ("special_tokens_map.json", ("pad_token",), 5),
    ("config.json", ("eos_token_id",), "x"),
    ("config.json", ("eos_token_id",), 10**18),
    ("config.json", ("text_config", "eos_token_id"), [1, "x"]),
    ("config.json", ("text_config", "eos_token_id"), True),
    ("generation_config.json", ("eos_token_id",), "151645"),
    ("generation_config.json", ("eos_token_id",), -1),
    ("generation_config.json", ("eos_token_id",), {"a": 1}),
    ("generation_config.json", ("eos_token_id",), list(range(5))),
    ("generation_config.json", ("eos_token_id",), [1, 2, 3]),
    ("generation_config.json", ("eos_token_id",), 1.0),
    ("generation_config.json", ("temperature",), "hot"),
    ("generation_config.json", ("top_p",), 7),
    ("generation_config.json", ("top_k",), [1]),
    ("tokenizer.json", ("model",), {}),
    ("tokenizer.json", ("model", "vocab"), {"a": 10**18}),
    ("tokenizer.json", ("model", "merges"), [["a", "zzz"]]),
    ("tokenizer.json", ("added_tokens",), 5),
    ("tokenizer.json", ("pre_tokenizer",), {"type": "Nonsense"}),
    ("tokenizer.json", ("decoder",), 5),
]


def exchange(path, index, value):
    """Replace one value of the file."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    inner = content
    for step in index[:-1]:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else inner[step]
    inner[index[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(("name", "index", "value"), WRONG_VALUES, ids=lambda v: str(v)[:30])
def test_wrong_value_is_named(copy, name, index, value):
    exchange(copy / name, index, value)
    reported = load(copy)
    assert reported is not None and name in reported
    if name != "tokenizer.json":
        assert index[0] in reported or index[-1] in reported or "chat template" in reported


def value_paths(value, path=()):
    """Yield the paths of all values; of long lists and objects only the first and the last."""
    if path:
        yield path
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in pairs[:4] + pairs[-2:] if len(pairs) > 12 else pairs:
        yield from (
            value_paths(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]
        )


@pytest.mark.default_cases("tokenizer.json", "config.json")
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_wrong_values_raise_no_other_error(copy, name):
    """Replace every value of the file by wrong ones, within the time limit."""
    entry = {"content": "<|new|>", "special": True, "normalized": True}
    exchange(copy / "tokenizer_config.json", ("added_tokens_decoder", "999"), entry)
    exchange(copy / "special_tokens_map.json", ("bos_token",), {"content": "<|im_start|>"})
    complete = (copy / name).read_text()
    rng = random.Random(name)
    tries = [(index, value) for index in value_paths(json.loads(complete)) for value in WRONG]
    for index, value in rng.sample(tries, min(len(tries), 100)):
        (copy / name).write_text(complete)
        exchange(copy / name, index, value)
        load(copy)


def test_truncation_of_tokenizer_json_is_ignored(copy):
    cut = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    exchange(copy / "tokenizer.json", ("truncation",), cut)
    assert len(Tokenizer(copy).encode("a " * 50)) > 50


def test_unencodable_text_is_a_request_error(copy):
    exchange(copy / "tokenizer.json", ("model",), {"type": "WordLevel", "vocab": {"a": 0}})
    exchange(copy / "tokenizer.json", ("model", "unk_token"), "<unk>")
    processor = Processor.for_model(Tokenizer(copy), copy, 512)
    with pytest.raises(LockstepError, match="cannot encode this text"):
        processor.encode("b")
