"""What clients may send: OpenAI's fields and vLLM's further ones. Unknown fields are kept aside."""

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from lockstep.errors import RequestError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.text.processor import Processor


class StreamOptions(BaseModel):
    """`stream_options`: whether a last chunk, or every chunk, tells the usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(BaseModel):
    """Fields that both kinds of completion share. None means: the model's own default."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
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
    )

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    user: str | None = None

    def sampling(
        self, processor: Processor, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Sampling parameters: what was sent, over the model's defaults."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only allowed with stream=true; leave it out.", "stream_options"
            )
        sent = {name: getattr(self, name) for name in self.SHARED}
        changes = {name: value for name, value in sent.items() if value is not None}
        return processor.default_params(
            **changes,
            logit_bias=self._bias(),
            max_tokens=max_tokens,
            logprobs=logprobs,
        )

    def _bias(self) -> dict[int, float] | None:
        try:
            return {int(k): v for k, v in self.logit_bias.items()} if self.logit_bias else None
        except ValueError:
            raise RequestError(
                f"logit_bias has the keys {sorted(self.logit_bias or ())}; allowed: token ids. "
                "Send ids as keys.",
                "logit_bias",
            ) from None


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True

    def params(self, processor: Processor) -> SamplingParams:
        """Sampling parameters. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"top_logprobs={self.top_logprobs} needs logprobs=true; set it.", "top_logprobs"
            )
        most = self.max_completion_tokens
        most = self.max_tokens if most is None else most
        return self.sampling(processor, most, (self.top_logprobs or 0) if self.logprobs else None)

    def callable_tools(self, processor: Processor) -> list[dict[str, Any]] | None:
        """The tools that the model may call. Raises RequestError for what is not supported."""
        choice = self.tool_choice if self.tool_choice is not None else "auto"
        if choice not in ("auto", "none"):
            raise choice_error(
                _ToolChoiceError, "tool_choice", choice, "auto, none", "Send one of them."
            )
        if not self.tools or choice == "none":
            return None
        for i, tool in enumerate(self.tools):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f"tools[{i}] has no function with a name; send "
                    '{"type": "function", "function": {"name": ..., "parameters": ...}}.',
                    "tools",
                )
        if not processor.can_call_tools:
            raise RequestError(
                "tools need a tool-call parser, and the model's template names none that is "
                "known; start the server with one (tool_parser), or send no tools.",
                "tools",
            )
        return self.tools


class _ToolChoiceError(RequestError):
    def __init__(self, message: str) -> None:
        super().__init__(message, "tool_choice")


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    def params(self, processor: Processor) -> SamplingParams:
        """Sampling parameters; echo with logprobs asks for those of the prompt as well."""
        params = self.sampling(processor, self.max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        return params

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several. Raises RequestError if there is none."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise RequestError("prompt=[] is empty; send text or token ids.", "prompt")
        return prompt  # type: ignore[return-value]


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    tokens: list[int]
