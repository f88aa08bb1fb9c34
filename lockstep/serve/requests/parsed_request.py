"""A request after parsing: what to generate, whichever API the request came by.

The path of a request has one direction: HTTP body -> ParsedRequest -> engine requests -> updates
-> OutputDelta -> events of the response.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.text.parsers import ReplyParser
from lockstep.text.processor import Processor, Rendered


@dataclass(frozen=True)
class ParsedRequest:
    """Work of one HTTP request: `params.n` completions of each prompt.

    id: id of the response. engine_id: prefix of the ids of the engine's requests; unlike `id`, no
    other request has it.
    prompts: token ids of each prompt, with lengths and types already checked.
    conversation: the prompt as rendered by the chat template, where the request has messages.
    reply_parsers: a parser for the text of each completion of a conversation.
    visible_token_ids: special tokens that are part of the text, such as tags of tool calls.
    echoes: text of each prompt, where the response repeats it before the completion; else empty.
    only_prompt: the response contains no generated token. One is generated, since the engine
        computes log-probabilities of a prompt together with a token.
    adapter: name of the LoRA adapter that answers; "" for the base model.
    timeout: seconds after which the request ends incomplete; None sets no limit.
    stream: the response is sent while it is generated.
    stream_options: sent by the client, only for the render endpoints.
    """

    id: str
    engine_id: str
    params: SamplingParams
    prompts: tuple[list[int], ...]
    conversation: Rendered | None = None
    reply_parsers: tuple[ReplyParser, ...] = ()
    visible_token_ids: frozenset[int] = frozenset()
    echoes: tuple[str, ...] = ()
    only_prompt: bool = False
    priority: int = 0
    cache_salt: str | None = None
    adapter: str = ""
    speculate: bool = True
    timeout: float | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def num_completions(self) -> int:
        """Number of completions, over all prompts."""
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def has_logprobs(self) -> bool:
        """True where the response has log-probabilities.

        Formatting them is slow: the 20 likeliest of each of 20,000 tokens take 2 s.
        """
        return (self.params.logprobs, self.params.prompt_logprobs) != (None, None)

    def engine_requests(self, processor: Processor) -> list[Request]:
        """Build the engine's requests: `params.n` for the first prompt, then for the next ones.

        Compiles grammars, so it may take long. Raises RequestError.
        """
        requests: list[Request] = []
        for i, token_ids in enumerate(self.prompts):
            # The engine needs a unique id for each prompt; processor.requests adds the completion.
            suffix = "" if len(self.prompts) == 1 else f"-p{i}"
            requests += processor.tokenized_requests(
                f"{self.engine_id}{suffix}",
                token_ids,
                self.params,
                self.priority,
                self.conversation,
                self.cache_salt or "",
            )
        for request in requests:
            request.metrics.arrival_time = time.monotonic()
            request.speculate = self.speculate
            request.adapter = self.adapter
        return requests


class GenerationBody(Protocol):
    """Body of an HTTP request that generates: the part that admission needs before parsing."""

    model: str | None
    n: int | None

    @property
    def num_prompts(self) -> int:
        """Number of prompts. Raises RequestError where the prompt has a wrong type."""
        ...

    @property
    def needs_grammar(self) -> bool:
        """True where a grammar constrains the completion; compiling it may take long."""
        ...

    def parse(self, id_prefix: str, processor: Processor) -> ParsedRequest:
        """Validate the fields and tokenize the prompts. Raises RequestError."""
        ...

    def sent_names(self) -> dict[str, str]:
        """Return, for a field of SamplingParams, the field of the body that it was made from."""
        ...

    def ignored_fields(self) -> list[str]:
        """Return the sorted names of sent fields that have no effect."""
        ...
