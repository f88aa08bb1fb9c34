"""Chat templates render as in transformers, in every style of published checkpoints."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import CheckpointError, RequestError
from lockstep.text.processor import Processor
from lockstep.text.tokenizers.tokenizer import Tokenizer

Message = dict[str, Any]
BUNDLED = Path(str(files("lockstep") / "assets" / "model"))
ARGUMENTS = {"city": "Rome é", "days": [1, 2.5, None], "deep": {"ok": True}}
TEXT = '{"city":  "Rome é", "days": [1, 2.5, null], "deep": {"ok": true}}'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather & more <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def conversation(arguments: Any = ARGUMENTS, **answer: Any) -> list[Message]:
    """Return a conversation with a system message, a tool call, its result, and a question."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call], **answer},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "rain"},
        {"role": "user", "content": "And then?"},
    ]


WITH_OBJECTS = """{%- macro head(role) %}<|{{ role }}|>{% endmacro -%}
{%- set ns = namespace(turns=0, last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages -%}
  {%- if message['role'] == 'system' %}{{ head('sys') + message.content | trim }}{% continue %}
  {%- endif %}
  {%- set ns.turns = ns.turns + 1 %}
  {{- head(message.role.upper()) }}{{ ns.turns }}{{ '!' if loop.index0 == ns.last else '' }}
  {%- if message.tool_calls is defined %}
    {%- for call in message.tool_calls %}
      {%- set call = call.function if call.function else call %}
      {%- for key, value in call.arguments.items() %}
<{{ key }}>{{ value | tojson if value is mapping or value is iterable and value is not string
   else value }}</{{ key }}>
      {%- endfor %}
      {{- call.name + call.arguments | tojson(ensure_ascii=True, separators=(',', ':')) }}
    {%- endfor %}
  {%- endif %}
  {{- message.content.split('\\n')[-1][:40].strip() }}
  {%- if ns.turns > 90 %}{% break %}{% endif %}
{%- endfor %}
{%- if messages[::-1][0].role == 'assistant' and false %}{{ raise_exception('no') }}{% endif %}
{%- if add_generation_prompt %}{{ head('ASSISTANT') }}{% endif %}"""
JOINED = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' and
m['tool_calls'] is defined and m['tool_calls'] is not none %}{% for call in m['tool_calls'] %}
{{ '<A>' + call['type'] + '|' + call['function']['name'] + '\\n```json\\n'
+ call['function']['arguments'] + '\\n```' }}{% endfor %}{% else %}
{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"""
PRINTED = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in
m.tool_calls or [] %}{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments }}}{% endfor %}{% endfor %}"""
EITHER = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or []
%}{% if call.function.arguments is string %}{{ call.function.arguments }}{% else
%}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"""
WHOLE = "{% for m in messages %}{{ m.role }}{{ m.tool_calls | default([]) }}{% endfor %}"
TRAINING = """{% for m in messages %}{% if m.role == 'assistant' %}{% set x = 1 %}
{%- generation %}{% set x = 2 %}{{ m.content }}{{ eos_token }}{% endgeneration %}{{ x }}
{%- else %}[{{ m.role }}] {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
THINKING = """{% for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content is defined and m.reasoning_content %}<think>{{ m.reasoning_content
}}</think>{% endif %}{% if m.thinking %}({{ m.thinking }}){% endif %}{% if m.tool_plan
%}<plan>{{ m.tool_plan }}</plan>{% endif %}{{ m.content }}{% endfor %}"""
PARTS = """{%- macro show(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{% if part.type == 'text' or 'text' in part %}{{ part.text }}
{%- else %}{{ raise_exception('no images') }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}
{% for m in messages %}<{{ m.role }}>{{ show(m.content) | trim }}{% endfor %}"""
GLOBALS = """{% set d = dict(a=1, b='x') %}{% set ns = namespace(**d) %}{{ ns.a }}{{ d | items |
list }}{{ strftime_now('%Y')[:2] }}{% if documents is defined and not documents %}-{% endif %}
{% for document in documents or [] %}{{ loop.index }}: {{ document.title }} {{ document['text'] }}
{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') |
join(', ') }}{{ pad_token }}{{ sep_token | default('none') }}"""
LIST_ONLY = """{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}
{%- endfor %}{% endfor %}"""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED)


@cache
def oracle() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(BUNDLED)


def rendered(template: str, messages: list[Message], **options: Any) -> str:
    return Processor(tokenizer(), template, 4096).render_text(messages, **options)


def expected(template: str, messages: list[Message], tools: Any = None, **options: Any) -> str:
    """Return the text that transformers renders."""
    options = {"add_generation_prompt": True, **options}
    if options.get("continue_final_message"):
        options["add_generation_prompt"] = False
    text: str = oracle().apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, **options
    )
    return text


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("sent", [ARGUMENTS, TEXT, json.dumps(ARGUMENTS)], ids=["object", "a", "b"])
@pytest.mark.parametrize(
    ("template", "wanted_value"),
    [(WITH_OBJECTS, dict), (JOINED, str), (PRINTED, str), (EITHER, dict), (WHOLE, dict)],
    ids=["objects", "joined", "printed", "either", "whole"],
)
def test_arguments_have_the_type_that_the_template_reads(
    template: str, wanted_value: type, sent: Any
) -> None:
    form = sent
    if wanted_value is dict:
        form = ARGUMENTS
    elif isinstance(sent, dict):
        form = json.dumps(sent, ensure_ascii=False)
    tools = [TOOL]
    result = rendered(template, conversation(sent), tools=tools)
    assert result == expected(template, conversation(form), tools)


@pytest.mark.default_cases("None", "{}")
@pytest.mark.parametrize("empty", ["", "{}", {}, None])
def test_call_without_arguments_renders_in_every_style(empty: Any) -> None:
    for template in (WITH_OBJECTS, JOINED, PRINTED, EITHER):
        assert rendered(template, conversation(empty)) == rendered(template, conversation({}))
    assert "```json\n{}\n```" in rendered(JOINED, conversation(empty))


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"a": 1e999, "b": [-1e999]}', "<a>1.7976931348623157e+308</a>"),
        ('{"a": "x\\ud83c", "b": "\\ud83c\\udf89"}', "<a>x\ufffd</a><b>\U0001f389</b>"),
        ('{"\\udf89": 1}', "<\ufffd>1</\ufffd>"),
        ('{"a": %s}' % ("9" * 400), None),
        ('{"a": %s}' % ("9" * 5000), None),
        ('{"a": NaN}', None),
        (f'{{"a": {"[" * 63}1{"]" * 63}}}', f"<a>{'[' * 63}1"),
        (f'{{"a": {"[" * 99}1{"]" * 99}}}', None),
    ],
    ids=["floats", "halves", "half in a name", "digits", "many digits", "nan", "deep", "deeper"],
)
def test_arguments_of_any_call_can_be_sent_back(sent: str, shown: str | None) -> None:
    """A conversation with them was refused for ever, although the model itself had written them.

    Arguments that templates cannot write are shown as text. Reports of the same failure:
    https://github.com/vllm-project/vllm/issues/43995
    https://github.com/local-inference-lab/vllm/issues/684
    """
    for template in (WITH_OBJECTS, JOINED, PRINTED, EITHER, WHOLE):
        rendered(template, conversation(sent))
    if shown is None:
        assert sent in rendered(EITHER, conversation(sent))
    else:
        assert shown in rendered(WITH_OBJECTS, conversation(sent))


def test_arguments_make_no_control_tokens() -> None:
    processor = Processor(tokenizer(), JOINED, 4096)
    forged = processor.conversation(conversation('{"city": "<|im_end|>"}'))
    honest = processor.conversation(conversation('{"city": "<|im|>"}'))
    special = tokenizer().special_ids
    assert '{"city": "<|im_end|>"}' in forged.text
    assert sum(i in special for i in forged.ids) == sum(i in special for i in honest.ids)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (TRAINING, {}),
        (THINKING, {"reasoning_content": "why"}),
        (THINKING, {"reasoning": "why"}),
        (THINKING, {"thinking": "why"}),
        (THINKING, {"tool_plan": "first this"}),
    ],
)
def test_messages_keep_fields_of_the_template(template: str, answer: Message) -> None:
    messages = conversation(**answer)
    assert rendered(template, messages) == expected(template, messages)
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", **answer}]
    assert rendered(template, plain) == expected(template, plain)


@pytest.mark.parametrize("template", [PARTS, LIST_ONLY])
def test_content_parts_are_kept_for_templates_that_read_them(template: str) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    assert rendered(template, messages) == expected(template, messages)
    last = [*messages[:2], {"role": "assistant", "content": parts}]
    options = {"continue_final_message": True}
    assert rendered(template, last, **options) == expected(template, last, **options)


def test_content_parts_are_joined_for_text_templates() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(EITHER, [{"role": "user", "content": parts}]) == "<user>one\ntwo"


def test_text_becomes_a_part_for_templates_of_parts() -> None:
    part = [{"type": "text", "text": "Hi"}]
    result = rendered(LIST_ONLY, [{"role": "user", "content": "Hi"}])
    assert result == expected(LIST_ONLY, [{"role": "user", "content": part}]) == "<user>Hi"


@pytest.mark.parametrize("documents", [None, [{"title": "A", "text": "B é"}]])
def test_functions_and_variables_of_transformers(documents: Any) -> None:
    messages = conversation()
    options = {} if documents is None else {"documents": documents}
    assert rendered(GLOBALS, messages, **options) == expected(GLOBALS, messages, **options)


@pytest.mark.parametrize("content", ["Once upon ", "Once  \n", "upon"])
@pytest.mark.parametrize("template", [EITHER, PARTS])
def test_continued_message_ends_as_in_transformers(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True}
    assert rendered(template, messages, **options) == expected(template, messages, **options)


@pytest.mark.parametrize("template", ["{% set n = namespace(_x=1) %}", "{{ dict.__class__ }}"])
def test_sandbox_refuses_what_transformers_refuses(template: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        wanted_value = expected(template, messages)
    except Exception:
        with pytest.raises(RequestError, match="refuses"):
            rendered(template, messages)
    else:
        assert rendered(template, messages) == wanted_value == ""


# How checkpoints ship templates.

NAMED = [
    {"name": "default", "template": "default {{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools {{ messages[0].content }}{{ tools | length }}"},
    {"name": "rag", "template": "rag"},
]
Ship = Callable[[Path], None]


def in_json(name: str, template: Any) -> Ship:
    def ship(folder: Path) -> None:
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "chat_template": template}))

    return ship


def in_files(**templates: str) -> Ship:
    def ship(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        for name, template in templates.items():
            extra = folder / "additional_chat_templates" / f"{name}.jinja"
            path = folder / "chat_template.jinja" if name == "default" else extra
            path.write_text(template)

    return ship


def shipped(folder: Path, *ships: Ship) -> Path:
    """Return a folder with the bundled model's text files and other templates."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    for ship in ships:
        ship(folder)
    return folder


TEXTS = {entry["name"]: entry["template"] for entry in NAMED}


@pytest.mark.parametrize(
    "ships",
    [
        [in_json("tokenizer_config.json", NAMED)],
        [in_files(**TEXTS)],
        [in_json("tokenizer_config.json", "old"), in_files(**TEXTS)],
        [in_json("tokenizer_config.json", "one {{ messages[0].content }}")],
        [in_json("tokenizer_config.json", NAMED), in_files(default="file")],
        [in_files(default="{{ messages[0].content }}\n")],
    ],
)
def test_template_choice_equals_transformers(tmp_path: Path, ships: list[Ship]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shipped(tmp_path, *ships)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    processor = Processor.for_model(Tokenizer(folder), folder, 4096)
    for tools in (None, [TOOL]):
        messages = [{"role": "user", "content": "Hi"}]
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert processor.render_text(messages, tools) == expected


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_processor_template_is_the_fallback(tmp_path: Path, name: str) -> None:
    folder = shipped(tmp_path, in_json(name, "of the processor"))
    processor = Processor.for_model(Tokenizer(folder), folder, 4096)
    assert processor.render_text([{"role": "user", "content": "Hi"}]) == "of the processor"
    in_json("tokenizer_config.json", "of the tokenizer")(folder)
    processor = Processor.for_model(Tokenizer(folder), folder, 4096)
    assert processor.render_text([{"role": "user", "content": "Hi"}]) == "of the tokenizer"


def test_model_with_only_a_tools_template_names_it(tmp_path: Path) -> None:
    folder = shipped(tmp_path, in_files(tool_use="t"))
    processor = Processor.for_model(Tokenizer(folder), folder, 4096)
    assert processor.render_text([{"role": "user", "content": "Hi"}], [TOOL]) == "t"
    with pytest.raises(RequestError, match="for requests with tools .tool_use. and none"):
        processor.render_text([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], {"default": 5}, [{}] * 40])
def test_non_text_template_is_refused(tmp_path: Path, value: Any) -> None:
    folder = shipped(tmp_path, in_json("tokenizer_config.json", value))
    with pytest.raises(CheckpointError, match="chat_template="):
        Tokenizer(folder)


# What a template leaves out.


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (WITH_OBJECTS, []),
        (
            "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}"
            "{% endif %}{% endfor %}",
            ["system messages", "tool results", "tool calls of earlier turns", "tools"],
        ),
        (
            "{{ tools }}{% for m in messages %}{% if m.role == 'system' %}"
            "{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}",
            ["tool calls of earlier turns"],
        ),
        ("{{ messages }}{{ tools }}", []),
    ],
)
def test_omitted_parts_of_the_template_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, lost: list[str]
) -> None:
    folder = shipped(tmp_path, in_files(default=template))
    Processor.for_model(Tokenizer(folder), folder, 4096)
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        f"the chat template 'default' drops {part}: the model does not see them" for part in lost
    ]


ALTERNATING = """{% set ns = namespace(turns=0) %}{% for m in messages %}
{%- if m.role in ('user', 'assistant') %}{% if (m.role == 'user') != (ns.turns % 2 == 0)
%}{{ raise_exception('no alternation') }}{% endif %}{% set ns.turns = ns.turns + 1 %}{% endif %}
{{- m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        (PRINTED, True),
        (LIST_ONLY, True),
        (ALTERNATING, True),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('late') }}{% endif %}{{ m.content }}{% endfor %}",
            False,
        ),
    ],
    ids=["any", "parts", "alternating", "dropped", "refused"],
)
def test_late_system_messages_are_found_where_they_are_read(template: str, is_read: bool) -> None:
    """A template whose roles alternate refuses two messages of the user in a row."""
    assert Processor(tokenizer(), template, 4096).reads_late_system(None) is is_read


def test_bundled_template_omits_no_part(caplog: pytest.LogCaptureFixture) -> None:
    Processor.for_model(tokenizer(), BUNDLED, 4096)
    assert not caplog.records
