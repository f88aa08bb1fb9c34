"""What clients may send: OpenAI's fields and vLLM's further ones.

A null counts as a field that was not sent. Every list is bounded, and is given up at its first bad
entry. Unknown fields are kept aside: `refused` says which of them would change the answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from lockstep.errors import RequestError
from lockstep.inputs import MAX_SALT
from lockstep.sampling_params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_STOP_IDS,
    SamplingParams,
    StructuredOutputsParams,
)
from lockstep.serve.http.errors import UNKNOWN_FIELD, told
from lockstep.serve.openai.structured_outputs import FORM_FIELDS, wanted
from lockstep.serve.requests.body_models import (
    NOTES,
    Body,
    Nested,
    Sent,
    Shape,
    check_extra_fields,
    known_fields,
)
from lockstep.serve.requests.unsupported_fields import (
    CHAT,
    COMPLETIONS,
    Table,
    refuse,
    without_effect,
)
from lockstep.text.grammars.tool_calls import ANY_CALL
from lockstep.text.processor import Processor
from lockstep.text.templates.chat_template import TemplateRefusalError

MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_CALLS = 256
MAX_NAME = 256
MAX_PROMPTS = 1024
MAX_COMPLETIONS = 1024
"""Completions of one request: prompts times n."""
SYSTEM_ROLES = ("system", "developer")
TAKEN = ("messages", "tools", "self", "continue_final_message")
"""Names that no chat_template_kwargs may have."""
NEWER = "max_completion_tokens"
"""OpenAI's newer name of max_tokens; it has the last word."""
MAX_SECONDS = 86_400.0
MAX_IDS = 1 << 20
"""Token ids in a list, where the model's vocabulary is not known."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much to reason, in OpenAI's words."""

FORMAT_SHAPE: Shape = {
    "type": None,
    "schema": None,
    "json_schema": {"name": None, "description": None, "schema": None, "strict": None},
}
"""Fields of a response_format."""
CHOICE_SHAPE: Shape = {
    "type": None,
    "function": {"name": None},
    "allowed_tools": {"mode": None, "tools": None},
}
"""Fields of a tool_choice that is an object."""
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}


PART_FIELDS = frozenset({"type", "text", "refusal", *NOTES})
"""Fields of a part of a message's content."""


def _content(value: Any) -> Any:
    """Return text, or a list of text parts. Raises ValueError naming the part at fault."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise ValueError(f"allowed: a text, or a list of at most {MAX_PARTS} text parts")
    for i, part in enumerate(value):
        if isinstance(part, str):
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(
                f"part {i} is of type {str(kind)[:40]!r}; allowed: text, which is all that this "
                "server reads. Send text in its place"
                + (" (Codex: tools.view_image = false)" if kind == "input_image" else "")
            )
        if not isinstance(part.get("text", part.get("refusal")), str):
            raise ValueError(f'part {i} has no text; send {{"type": "text", "text": ...}}')
        unknown = next((name for name in part if name not in PART_FIELDS), None)
        if unknown is not None and part[unknown] is not None:
            # The path of the error goes on inside of the list.
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"inside": (i, unknown)})
    return value


def own_kind(kind: str) -> BeforeValidator:
    """Return the check of a tool's type: clients run all tools, and call them by a JSON schema."""

    def check(value: Any) -> Any:
        if value == "custom" != kind:
            raise ValueError(
                "custom tools work with /v1/responses only; allowed: function. Send it as a "
                "function of one text, or use /v1/responses"
            )
        if value != kind:
            raise ValueError(
                "tools are run by clients, and called with JSON of a schema; allowed: "
                f"{kind}. Leave this tool out, or declare it by a schema"
            )
        return value

    return BeforeValidator(check)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT, "refusal": _TEXT},
    "required": ["type", "text"],
}
Content = Annotated[
    Any,
    AfterValidator(_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART, "maxItems": MAX_PARTS}]}),
]


class CalledFunction(Sent):
    """The function of a tool call: `arguments` is JSON text, as the model wrote it."""

    WITHOUT_EFFECT = NOTES | {"parsed_arguments"}
    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "object"}]})] = "{}"


class SentCall(Sent):
    """A tool call in an assistant's message."""

    WITHOUT_EFFECT = (NOTES - {"id"}) | {"extra_content"}
    ONLY_DEFAULTS = {"custom": ({},)}
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See Sent."""
        yield from super().extra_fields(path)
        yield from self.function.extra_fields(f"{path}.function")


class Message(Sent):
    """One message of a conversation."""

    WITHOUT_EFFECT = NOTES | {
        "finish_reason",
        "metadata",
        "parsed",
        "reasoning_details",
        "stop_reason",
        "thinking_blocks",
        "token_ids",
        "tool_call_parse_error",
    }
    ONLY_DEFAULTS = {
        "audio": ({},),
        "function_call": ({},),
        "prefix": (False,),
        "partial": (False,),
    }

    role: str = Field(min_length=1, max_length=MAX_NAME)
    content: Content = None
    name: str | None = None
    tool_calls: list[SentCall] | None = Field(None, fail_fast=True, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See Sent."""
        yield from super().extra_fields(path)
        for i, call in enumerate(self.tool_calls or ()):
            yield from call.extra_fields(f"{path}.tool_calls[{i}]")


TOOL_NOTES = frozenset({"cache_control", "eager_input_streaming", "provider_specific_fields"})
"""Fields of a tool that change no answer."""
TOOL_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
"""Fields of a tool with the values that say what happens anyway."""


class Function(Sent):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None
    WITHOUT_EFFECT = TOOL_NOTES
    ONLY_DEFAULTS = TOOL_DEFAULTS


class Tool(Sent):
    """A tool that the model may call."""

    WITHOUT_EFFECT = TOOL_NOTES
    ONLY_DEFAULTS = TOOL_DEFAULTS
    type: Annotated[Literal["function"], own_kind("function")] = "function"
    function: Function

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See Sent."""
        yield from super().extra_fields(path)
        yield from self.function.extra_fields(f"{path}.function")


class StreamOptions(Nested):
    """`stream_options`: whether a last chunk, or every chunk, tells the usage."""

    WITHOUT_EFFECT = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Conversation(Body):
    """A conversation, and what goes to the chat template besides messages and tools."""

    messages: list[Message] | None = Field(None, fail_fast=True, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None

    def template_kwargs(self, processor: Processor) -> dict[str, Any]:
        """Return the template's variables; chat_template_kwargs override all others.

        Raises RequestError where they hide the messages, where fields exclude each other, and for a
        field of a message or a tool that the template does not read.
        """
        check_extra_fields(self.messages, "messages", processor.template_reads)
        check_extra_fields(self.tools, "tools", processor.template_prints)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message=true needs add_generation_prompt=false; set it.",
                "continue_final_message",
            )
        for name in TAKEN:
            if name in self.chat_template_kwargs:
                raise RequestError(
                    f"chat_template_kwargs has {name!r}, which has a field of its own; allowed: "
                    "the template's other variables. Send it as a field.",
                    "chat_template_kwargs",
                )
        effort = self.reasoning_effort
        return {
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt,
            **(processor.effort_kwargs(effort) if effort else {}),
            **self.chat_template_kwargs,
        }


Schema = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "object"}]})]
Stop = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]})
]
Bias = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


ResponseFormat = Annotated[
    dict[str, Any],
    known_fields(FORMAT_SHAPE, "structural_tag"),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                "schema": {"type": "object"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": _TEXT,
                        "description": _TEXT,
                        "schema": {"type": "object"},
                        "strict": {"type": "boolean"},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type"],
        }
    ),
]


class TurnFields(Body):
    """Fields that every endpoint which answers has. None means: the model's own default."""

    OWN_NAMES = {}
    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    timeout: float | None = Field(None, gt=0, le=MAX_SECONDS)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT)

    def answer_id(self, kind: str, unique: str) -> str:
        """Return the id that the answer shows, of an id of this kind that no other request has."""
        return unique


class SamplerFields(TurnFields):
    """Fields that say which tokens may come. None means: the model's own default."""

    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = Field(None, fail_fast=True, max_length=MAX_STOP_IDS)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True, max_length=MAX_IDS)
    bad_words: list[str] | None = Field(None, fail_fast=True, max_length=MAX_BAD_WORDS)
    logit_bias: Bias | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    speculate: bool = True


class SamplingFields(SamplerFields):
    """Fields that both kinds of completion share. None means: the model's own default."""

    SHARED: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "thinking_token_budget",
    )
    REFUSED: ClassVar[Table] = {}

    stream_options: StreamOptions | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    user: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_sources: bool = False
    response_format: ResponseFormat | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, fail_fast=True, max_length=MAX_CHOICES)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def answer_id(self, kind: str, unique: str) -> str:
        """Return the client's own request_id, which need not be unique, where it sent one."""
        return unique if self.request_id is None else f"{kind}{self.request_id}"

    @property
    def held(self) -> bool:
        """Whether the answer is held to a grammar, which is to be compiled."""
        return any(getattr(self, name) is not None for name in FORM_FIELDS)

    def ignored_fields(self) -> list[str]:
        """The names, in order, of sent fields that have no effect."""
        return without_effect(self.model_extra or (), self.REFUSED)

    def sent_names(self) -> dict[str, str]:
        """A field of SamplingParams -> the one that it was made of, where they differ."""
        return {}

    def sampling(
        self, processor: Processor, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters: what was sent, over the model's defaults."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true; leave it out.", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs={self.prompt_logprobs} is not supported with stream=true; leave "
                "one of them out.",
                "prompt_logprobs",
            )
        sent = {name: getattr(self, name) for name in self.SHARED}
        changes = {name: value for name, value in sent.items() if value is not None}
        return processor.bounded_params(
            {
                **changes,
                "logit_bias": self._bias(processor),
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "structured_outputs": self.structured(processor),
            }
        )

    def structured(self, processor: Processor) -> StructuredOutputsParams | None:
        """What the answer must match. Raises RequestError."""
        return wanted({name: getattr(self, name) for name in FORM_FIELDS})

    def _bias(self, processor: Processor) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        most = len(processor.tokenizer) if processor.tokenizer else MAX_IDS
        if len(self.logit_bias) > most:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; allowed: at most {most}, one a "
                "token of the vocabulary. Leave some out.",
                "logit_bias",
            )
        return {_token_id(key): value for key, value in self.logit_bias.items()}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}; allowed: token ids. Send ids as keys.",
            "logit_bias",
        )
    return int(key)


def one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of the system and of developers at their beginning as one.

    Other APIs have a field for the system beside the messages, and templates take one message.
    """
    first = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    if len(first) < 2:
        return messages
    contents = [message["content"] for message in first]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [one])]
    return [{"role": "system", "content": parts}, *messages[len(first) :]]


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that were sent, not those that they became."""
    try:
        yield
    except RequestError as error:
        became = error.field or ""
        sent = names.get(became, became)
        message = str(error)
        if message.startswith(tuple(f"{became}{sign}" for sign in "= ,:.")):
            error.args = (sent + message.removeprefix(became),)
        error.field = sent or None
        raise


@contextmanager
def system_named(field: str, roles: Sequence[str]) -> Iterator[None]:
    """Name the first late system message where the chat template refuses the messages.

    field: the list that was sent. roles: the role of each entry. Many templates take a system
    message at the beginning alone, and their error does not say which message is at fault.
    """
    try:
        yield
    except TemplateRefusalError as error:
        begin = len(list(takewhile(SYSTEM_ROLES.__contains__, roles)))
        late = next((i for i, role in enumerate(roles) if i > begin and role in SYSTEM_ROLES), None)
        if late is not None:
            error.args = (
                f"{field}[{late}].role={roles[late]!r}: {error} A system message at the beginning, "
                "or one of the user here, may be what the template allows.",
            )
        raise


_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required"], "type": "string"},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": {"type": "object"}, "minItems": 1},
                    },
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
    ]
}


class ChatRequest(SamplingFields, Conversation):
    """The body of /v1/chat/completions; every API of conversations is turned into it."""

    REFUSED = CHAT

    messages: list[Message] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Annotated[Any, known_fields(CHOICE_SHAPE), WithJsonSchema(_TOOL_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    def params(self, processor: Processor) -> SamplingParams:
        """Sampling parameters. Raises RequestError."""
        refuse(self.model_extra or {}, self.REFUSED)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true; set it.", "top_logprobs"
            )
        most = self.max_completion_tokens
        most = self.max_tokens if most is None else most
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        with named_as(self.sent_names()):
            return self.sampling(processor, most, logprobs)

    def sent_names(self) -> dict[str, str]:
        """See SamplingFields."""
        newer = self.max_completion_tokens is not None
        return {"logprobs": "top_logprobs"} | ({"max_tokens": NEWER} if newer else {})

    @property
    def held(self) -> bool:
        """See SamplingFields; calls may be held to a grammar, too."""
        tools = self.shown_tools()
        return super().held or self.tool_choice not in ("auto", "none") or ANY_CALL.strict(tools)

    def shown_messages(self) -> list[dict[str, Any]]:
        """The messages for the template."""
        return [message.sent for message in self.messages]

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the template; none with tool_choice none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.sent for tool in self.tools]

    def structured(self, processor: Processor) -> StructuredOutputsParams | None:
        """The form of the answer: of tool calls, where they are asked for or strict."""
        tools = self.callable_tools(processor)
        asked = super().structured(processor)
        return processor.form(asked, tools, self.tool_choice, self.parallel_tool_calls)

    def callable_tools(self, processor: Processor) -> list[dict[str, Any]] | None:
        """The tools that the model may call. Raises RequestError for what is not supported."""
        tools = self.shown_tools()
        processor.check_tools(tools)
        return tools


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The turn that another API's request means; names: its fields', by the ChatRequest's.

    Raises RequestError.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        raise RequestError(told(first, first["loc"]), names.get(field, field)) from None


_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(SamplingFields):
    """The body of /v1/completions. `prompts` looks into `prompt`, so a bad one costs nothing."""

    REFUSED = COMPLETIONS

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    add_special_tokens: StrictBool = True
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False

    @property
    def only_prompt(self) -> bool:
        """Whether the prompt is all that is asked for: echo, and no tokens after it."""
        return self.echo and self.max_tokens == 0

    def params(self, processor: Processor) -> SamplingParams:
        """Sampling parameters; echo with logprobs asks for those of the prompt as well."""
        refuse(self.model_extra or {}, self.REFUSED)
        most = 1 if self.only_prompt else self.max_tokens
        params = self.sampling(processor, most, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        return params

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several; each is a text or a list. Raises RequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            fault = "[] is empty" if prompt == [] else f"is a {_kind(prompt)}"
            raise RequestError(f"prompt {fault}; send text or token ids.", "prompt")
        if not isinstance(prompt[0], (str, list)):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt has {len(prompt)} entries; allowed: at most {MAX_PROMPTS}. Send fewer.",
                "prompt",
            )
        for i, entry in enumerate(prompt):
            if type(entry) is not type(prompt[0]):
                raise RequestError(
                    f"prompt[{i}] is a {_kind(entry)} beside a {_kind(prompt[0])}; allowed: all "
                    "texts, or all lists of token ids. Send one kind.",
                    "prompt",
                )
        return prompt


def _kind(value: Any) -> str:
    """A JSON value's type, in JSON's words."""
    names: Mapping[type, str] = {
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        list: "list",
        dict: "object",
    }
    return names.get(type(value), "null")


class TokenizeRequest(Conversation):
    """The body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True, max_length=MAX_IDS)
