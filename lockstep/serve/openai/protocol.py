"""Request bodies of OpenAI's endpoints for completions, with vLLM's additional fields."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, ValidationError, WithJsonSchema

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import SamplingParams, StructuredOutputsParams
from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS, fault_message, field_remedy
from lockstep.serve.openai.conversation import (
    MAX_MESSAGES,
    TEXT_SCHEMA,
    Conversation,
    Message,
    check_call_ids,
    late_system_as_user,
)
from lockstep.serve.openai.sampling_fields import MAX_IDS, SamplingFields
from lockstep.serve.requests.body_models import (
    ANNOTATION_FIELDS,
    Body,
    Nested,
    Shape,
    known_fields,
    renamed_fields,
)
from lockstep.serve.requests.parsed_request import ParsedRequest
from lockstep.serve.requests.unsupported_fields import CHAT, COMPLETIONS, refuse_unsupported
from lockstep.text.grammars.tool_calls import ANY_CALL
from lockstep.text.processor import Processor, Rendered

MAX_PROMPTS = 1024
MAX_PARTS = 1024
"""Maximum parts of a prediction."""
NEWER_MAX_TOKENS = "max_completion_tokens"
"""OpenAI's newer name of max_tokens; it overrides the older one."""

CHOICE_SHAPE: Shape = {
    "type": None,
    "function": {"name": None},
    "allowed_tools": {"mode": None, "tools": None},
}
"""Fields of a tool_choice that is an object."""
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required"], "type": "string"},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": TEXT_SCHEMA},
                    "required": ["name"],
                },
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


_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": TEXT_SCHEMA},
        "required": ["type", "text"],
    },
    "maxItems": MAX_PARTS,
}


class Prediction(Nested):
    """`prediction`: a text that the answer will resemble. It changes no answer."""

    type: Literal["content"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [TEXT_SCHEMA, _PARTS]})]

    def text(self) -> str:
        """Return the predicted text. Raises RequestError."""
        if isinstance(self.content, str):
            return self.content
        parts = self.content
        if not isinstance(parts, list) or len(parts) > MAX_PARTS:
            raise RequestError(
                f"prediction.content={brief(parts)} is not allowed; allowed: a text, or a list of "
                f"at most {MAX_PARTS} parts. Send one of them.",
                "prediction",
            )
        for i, part in enumerate(parts):
            path = f"prediction.content[{i}]"
            if not isinstance(part, dict):
                raise RequestError(
                    f"{path}={brief(part)} is not allowed; allowed: an object with type and text. "
                    "Send one.",
                    "prediction",
                )
            for name in part:
                if name not in ("type", "text", *ANNOTATION_FIELDS) and part[name] is not None:
                    unknown = f"{path}.{name}"[:MAX_SHOWN_CHARACTERS]
                    raise RequestError(f"{unknown} {field_remedy(name)}", "prediction")
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f'{path} is not allowed; allowed: {{"type": "text", "text": a text}}. Send '
                    "that.",
                    "prediction",
                )
        return "".join(part["text"] for part in parts)


class ChatRequest(SamplingFields, Conversation):
    """The body of /v1/chat/completions. Other APIs of conversations are converted to it.

    Their system messages may be anywhere: see late_system_as_user().
    """

    UNSUPPORTED = CHAT

    messages: list[Message] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Annotated[Any, known_fields(CHOICE_SHAPE), WithJsonSchema(_TOOL_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    prediction: Prediction | None = None
    _is_converted: bool = PrivateAttr(default=False)

    @property
    def num_prompts(self) -> int:
        """Number of prompts: a conversation is one."""
        return 1

    @property
    def needs_grammar(self) -> bool:
        """See SamplingFields; a grammar may constrain tool calls, too."""
        tools = self.template_tools()
        is_choice = self.tool_choice not in ("auto", "none")
        return super().needs_grammar or is_choice or ANY_CALL.strict(tools)

    def parse(self, id_prefix: str, processor: Processor) -> ParsedRequest:
        """Validate the fields, render the conversation and tokenize it. Raises RequestError."""
        params = self.params(processor)
        tools = self.callable_tools(processor)
        conversation = self.render(processor)
        form = params.structured_outputs
        # Stop strings and parsers need the text of the tags, which are special tokens.
        return ParsedRequest(
            params=params,
            prompts=(processor.prompt_ids(conversation, params),),
            conversation=conversation,
            reply_parsers=tuple(
                processor.reply_parser(conversation.text, tools, form) for _ in range(params.n)
            ),
            visible_token_ids=processor.marker_ids(tools),
            **self.parsed_fields(id_prefix),
        )

    def render(self, processor: Processor) -> Rendered:
        """Render the conversation by the chat template. Raises RequestError."""
        check_call_ids(self.messages)
        messages = [message.sent for message in self.messages]
        tools = self.template_tools()
        if self._is_converted and not processor.reads_late_system(tools):
            messages = late_system_as_user(messages)
        return processor.conversation(messages, tools, **self.template_kwargs(processor))

    def params(self, processor: Processor) -> SamplingParams:
        """Return sampling parameters. Raises RequestError."""
        refuse_unsupported(self.model_extra or {}, self.UNSUPPORTED)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true; set it.", "top_logprobs"
            )
        newer = self.max_completion_tokens
        max_tokens = self.max_tokens if newer is None else newer
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        with renamed_fields(self.sent_names()):
            params = self.sampling(processor, max_tokens, logprobs)
        if self.prediction is not None:
            params = replace(params, prediction=self.prediction.text())
        return params

    def sent_names(self) -> dict[str, str]:
        """See SamplingFields."""
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = NEWER_MAX_TOKENS
        return names

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template; none where tool_choice is none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.sent for tool in self.tools]

    def structured(self, processor: Processor) -> StructuredOutputsParams | None:
        """Return the form of the answer: a requested one, or tool calls that are forced or
        strict."""
        tools = self.callable_tools(processor)
        form = super().structured(processor)
        return processor.form(form, tools, self.tool_choice, self.parallel_tool_calls)

    def callable_tools(self, processor: Processor) -> list[dict[str, Any]] | None:
        """Return the tools that the model may call. Raises RequestError for unsupported ones."""
        tools = self.template_tools()
        processor.check_tools(tools)
        return tools


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Convert a request of another API to a ChatRequest.

    names: for a field of ChatRequest, the field that the client sent. Raises RequestError.
    """
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        raise RequestError(fault_message(first, first["loc"]), names.get(field, field)) from None
    request._is_converted = True
    return request


_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {
    "anyOf": [
        TEXT_SCHEMA,
        _IDS,
        {"type": "array", "items": TEXT_SCHEMA, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(SamplingFields):
    """The body of /v1/completions.

    `prompt` is validated by prompts(), since a union of four types would try each of them.
    """

    UNSUPPORTED = COMPLETIONS

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    add_special_tokens: StrictBool = True
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False

    @property
    def num_prompts(self) -> int:
        """Number of prompts. Raises RequestError where the prompt has a wrong type."""
        return len(self.prompts())

    @property
    def only_prompt(self) -> bool:
        """True where the response contains the prompt and no generated token."""
        return self.echo and self.max_tokens == 0

    def parse(self, id_prefix: str, processor: Processor) -> ParsedRequest:
        """Validate the fields and tokenize the prompts. Raises RequestError."""
        params = self.params(processor)
        prompts = self.prompts()
        special = self.add_special_tokens
        token_ids = tuple(processor.prompt_ids(prompt, params, special) for prompt in prompts)
        echoes: tuple[str, ...] = ()
        if self.echo and processor.tokenizer is not None:
            is_truncated = params.truncate_prompt_tokens is not None
            echoes = tuple(
                # The echo shows the tokens that the model reads, not those that were cut off.
                processor.decode(ids, field="prompt")
                if is_truncated or not isinstance(prompt, str)
                else prompt
                for prompt, ids in zip(prompts, token_ids, strict=True)
            )
        return ParsedRequest(
            params=params,
            prompts=token_ids,
            echoes=echoes or ("",) * len(prompts),
            only_prompt=self.only_prompt,
            **self.parsed_fields(id_prefix),
        )

    def params(self, processor: Processor) -> SamplingParams:
        """Return sampling parameters; echo with logprobs needs those of the prompt as well."""
        refuse_unsupported(self.model_extra or {}, self.UNSUPPORTED)
        max_tokens = 1 if self.only_prompt else self.max_tokens
        params = self.sampling(processor, max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        return params

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts; each is a text or a list. Raises RequestError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            fault = "[] is empty" if prompt == [] else f"is {_json_type(prompt)}"
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
                    f"prompt[{i}] is {_json_type(entry)}, prompt[0] {_json_type(prompt[0])}; "
                    "allowed: all texts, or all lists of token ids. Send one kind.",
                    "prompt",
                )
        return prompt


def _json_type(value: Any) -> str:
    """Return JSON's name of a value's type, with its article."""
    names: Mapping[type, str] = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
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
    tokens: list[StrictInt] = Field(fail_fast=True, max_length=MAX_IDS)
