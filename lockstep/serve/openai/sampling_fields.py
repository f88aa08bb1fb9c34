"""Fields of requests that generate: sampling, limits and the form of the answer.

A null counts as a field that was not sent. Every list has a maximum length, and validation stops at
its first invalid entry. Unknown fields are kept: unsupported_fields says which of them are errors.
"""

import uuid
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictInt, WithJsonSchema

from lockstep.errors import RequestError
from lockstep.inputs import MAX_SALT
from lockstep.sampling_params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_FORCED_TOKENS,
    MAX_STOP_IDS,
    SamplingParams,
    StructuredOutputsParams,
)
from lockstep.serve.openai.conversation import TEXT_SCHEMA
from lockstep.serve.openai.structured_outputs import FORM_FIELDS, structured_outputs
from lockstep.serve.requests.body_models import Body, Nested, Shape, known_fields
from lockstep.serve.requests.unsupported_fields import Table, without_effect
from lockstep.text.processor import Processor

MAX_SECONDS = 86_400.0
MAX_IDS = 1 << 20
"""Maximum token ids in a list, where the vocabulary of the model is unknown."""

FORMAT_SHAPE: Shape = {
    "type": None,
    "schema": None,
    "json_schema": {"name": None, "description": None, "schema": None, "strict": None},
}
"""Fields of a response_format."""


class StreamOptions(Nested):
    """`stream_options`: whether the last chunk, or every chunk, contains the usage."""

    WITHOUT_EFFECT = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


Schema = Annotated[Any, WithJsonSchema({"anyOf": [TEXT_SCHEMA, {"type": "object"}]})]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "maxItems": 16}]}
    ),
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
                        "name": TEXT_SCHEMA,
                        "description": TEXT_SCHEMA,
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


class GenerationFields(Body):
    """Fields of every endpoint that generates. None selects the model's default."""

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


class SamplerFields(GenerationFields):
    """Fields that constrain the sampled tokens. None selects the model's default."""

    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop = None
    stop_token_ids: list[StrictInt] | None = Field(None, fail_fast=True, max_length=MAX_STOP_IDS)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[StrictInt] | None = Field(None, fail_fast=True, max_length=MAX_IDS)
    bad_words: list[str] | None = Field(None, fail_fast=True, max_length=MAX_BAD_WORDS)
    logit_bias: Bias | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    speculate: bool = True


class SamplingFields(SamplerFields):
    """Fields of both kinds of completions. None selects the model's default."""

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
        "forced_token_ids",
        "forced_mismatch",
        "scored_from",
    )
    """Fields that have the same name in SamplingParams."""
    UNSUPPORTED: ClassVar[Table] = {}

    stream_options: StreamOptions | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    forced_token_ids: list[StrictInt] | None = Field(
        None, fail_fast=True, max_length=MAX_FORCED_TOKENS
    )
    forced_mismatch: str | None = None
    scored_from: int | None = None
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

    @property
    def needs_grammar(self) -> bool:
        """True where a grammar constrains the completion; compiling it may take long."""
        return any(getattr(self, name) is not None for name in FORM_FIELDS)

    def parsed_fields(self, id_prefix: str) -> dict[str, Any]:
        """Return the fields of a ParsedRequest that need no tokenizer.

        The response has the client's own request_id, which need not be unique, if one was sent.
        """
        unique_id = f"{id_prefix}{uuid.uuid4().hex}"
        sent_id = self.request_id
        return {
            "id": unique_id if sent_id is None else f"{id_prefix}{sent_id}",
            "engine_id": unique_id,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "speculate": self.speculate,
            "timeout": self.timeout,
            "stream": self.stream,
            "stream_options": self.stream_options and self.stream_options.model_dump(),
        }

    def ignored_fields(self) -> list[str]:
        """Return the sorted names of sent fields that have no effect."""
        return without_effect(self.model_extra or (), self.UNSUPPORTED)

    def sent_names(self) -> dict[str, str]:
        """Return, for a field of SamplingParams, the field of the body that it was made from.

        Only fields whose names differ are in it.
        """
        return {}

    def sampling(
        self, processor: Processor, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return sampling parameters: the fields that were sent, over the model's defaults."""
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
                "logit_bias": self._logit_bias(processor),
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "structured_outputs": self.structured(processor),
            }
        )

    def structured(self, processor: Processor) -> StructuredOutputsParams | None:
        """Return the form that the answer must match. Raises RequestError."""
        return structured_outputs({name: getattr(self, name) for name in FORM_FIELDS})

    def _logit_bias(self, processor: Processor) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        vocab_size = len(processor.tokenizer) if processor.tokenizer else MAX_IDS
        if len(self.logit_bias) > vocab_size:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; allowed: at most {vocab_size}, "
                "one a token of the vocabulary. Leave some out.",
                "logit_bias",
            )
        return {_token_id(key): value for key, value in self.logit_bias.items()}


def _token_id(key: str) -> int:
    # Keys of JSON objects are strings. Nine digits hold any token id and are fast to convert.
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise RequestError(
            f"logit_bias has the key {key[:40]!r}; allowed: token ids. Send ids as keys.",
            "logit_bias",
        )
    return int(key)
