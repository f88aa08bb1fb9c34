"""Conversion between text and tokens: prompts to engine requests, generated tokens to
completions."""

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import RequestError, brief, context_length_error
from lockstep.inputs import MAX_SALT, PROMPT_KEYS
from lockstep.keywords import PROMPT, check_keywords
from lockstep.outputs import CompletionOutput, Logprob
from lockstep.sampling_params import (
    SamplingParams,
    StructuredOutputsParams,
    is_ids,
    is_list,
    is_unicode,
)
from lockstep.scheduling.grammar import Grammar
from lockstep.scheduling.request import Request, ScoredTokens
from lockstep.text.generation_config import check_generation_config
from lockstep.text.grammars.compiler import (
    AfterReasoning,
    Compiled,
    Compiler,
    GrammarRecipe,
    Matcher,
)
from lockstep.text.grammars.structured_output import compile_structured_output, json_expression
from lockstep.text.grammars.thinking_budget import (
    BUDGET,
    PROMPT_END,
    BudgetRecipe,
    ClosingTag,
    ReasoningProgress,
    ThinkingBudget,
)
from lockstep.text.grammars.tool_calls import CallParams, ToolChoice, ToolSyntax
from lockstep.text.model_files import damaged, read_json
from lockstep.text.parsers import REASONING_PARSERS, TOOL_PARSERS, ReplyParser, choose
from lockstep.text.parsers.call_parser import CallsOrForm
from lockstep.text.parsers.events import NATURAL_END, TextEnd
from lockstep.text.parsers.schema import parameters_by_name
from lockstep.text.settings import READ_SETTINGS, TextSettings, sampling_defaults
from lockstep.text.templates.chat_template import ChatTemplates, Message
from lockstep.text.templates.files import DEFAULT
from lockstep.text.tokenizers.control_tokens import ControlTokens
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer, eos_ids

log = logging.getLogger(__name__)

EFFORT = "reasoning_effort"
MAX_CUT_CHARACTERS = 8 << 20
"""Lower limit of the maximum characters of a text that truncate_prompt_tokens cuts: the default
size of a request body. Encoding that much text takes seconds."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on and off."""


@dataclass(frozen=True)
class Rendered:
    """Rendered conversation: its text and token ids. The answer may begin with reasoning.

    tool_names: tools that the answer may call.
    """

    text: str
    ids: list[int]
    tool_names: tuple[str, ...] = ()


Prompt = str | Sequence[int] | dict[str, Any] | Rendered
Logprobs = list[dict[int, Logprob]]


class TextUpdate(NamedTuple):
    """Immutable result of one push.

    texts, token_ids, logprobs: of the new tokens. texts has one entry per token, and one for the
    flushed text if no token is new. finish_reason: None until the completion has ended. num_tokens:
    all tokens so far.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0

    @property
    def delta(self) -> str:
        """Return all new text."""
        return "".join(self.texts)


class CompletionText:
    """Incremental text of one completion. It accumulates the whole completion."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        request: Request,
        index: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        params = request.params
        num_scored = 0 if request.scored is None else len(request.scored.token_ids)
        self.request = request
        self._output = CompletionOutput(index=index, seed=request.seed)
        # Adding to a string would copy all of the text for every token.
        self._text_buffer = StringIO()
        self._has_new_text = False
        self._tokenizer = tokenizer
        self._text = None
        if tokenizer is not None and params.detokenize:
            self._text = Detokenizer(
                tokenizer,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens - num_scored,
                shown,
            )

    @property
    def finished(self) -> bool:
        """Return whether the completion has ended; the engine does not know stop strings."""
        return self._output.finish_reason is not None

    @property
    def output(self) -> CompletionOutput:
        """Return the completion so far, always the same object. New text is joined here."""
        if self._has_new_text:
            self._output.text = self._text_buffer.getvalue()
            self._has_new_text = False
        return self._output

    def part(self, updates: Sequence[TextUpdate]) -> CompletionOutput:
        """Return a completion that has the text and the tokens of these updates only."""
        scores = [entry for update in updates for entry in update.logprobs or ()]
        return replace(
            self._output,
            text="".join(update.delta for update in updates),
            token_ids=[token for update in updates for token in update.token_ids],
            logprobs=None if self._output.logprobs is None else scores,
        )

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Logprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> TextUpdate:
        """Append tokens and return the text that became final. Tokens after a stop string are
        dropped.

        The token that ended the answer (finish_reason stop) is listed but gives no text, unless
        include_stop_str_in_output is set. Tokens after the end are ignored.
        """
        if self.finished:
            return self._update((), (), None)
        hide_last = finish_reason == "stop" and not self.request.params.include_stop_str_in_output
        texts: list[str] = []
        for i, token in enumerate(token_ids):
            hidden = hide_last and i == len(token_ids) - 1
            texts.append(self._text.push(token) if self._text and not hidden else "")
            if self._text and self._text.stopped is not None:
                break
        num_taken = len(texts)
        if self._text and finish_reason is not None and self._text.stopped is None:
            texts[-1:] = ["".join(texts[-1:]) + self._text.flush()]
        if self._text and self._text.stopped is not None:
            finish_reason = "stop"
            stop_reason = self._text.stopped
        new = tuple(token_ids[:num_taken])
        scores = tuple(logprobs[:num_taken]) if logprobs is not None else None
        self._accumulate(texts, new, scores)
        self._output.finish_reason = finish_reason
        self._output.stop_reason = stop_reason
        return self._update(tuple(texts), new, scores)

    def _accumulate(
        self,
        texts: Sequence[str],
        token_ids: tuple[int, ...],
        logprobs: tuple[dict[int, Logprob], ...] | None,
    ) -> None:
        """Add new tokens to the completion."""
        output = self._output
        self._text_buffer.writelines(texts)
        self._has_new_text = True
        output.token_ids += token_ids
        if logprobs is not None:
            name_tokens(self._tokenizer, logprobs)
            output.logprobs = output.logprobs or []
            output.logprobs += logprobs
            total = output.cumulative_logprob or 0.0
            for token_id, entry in zip(token_ids, logprobs, strict=True):
                total += entry[token_id].logprob
            output.cumulative_logprob = total

    def _update(
        self,
        texts: tuple[str, ...],
        token_ids: tuple[int, ...],
        logprobs: tuple[dict[int, Logprob], ...] | None,
    ) -> TextUpdate:
        output = self._output
        return TextUpdate(
            texts,
            token_ids,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            len(output.token_ids),
        )


def _defaults(settings: TextSettings, folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json and their overrides."""
    chosen = settings.generation_folder(folder)
    defaults: dict[str, Any] = {}
    if chosen is not None:
        path = chosen / "generation_config.json"
        raw = read_json(path)
        check_generation_config(path, raw, READ_SETTINGS)
        try:
            defaults = sampling_defaults(raw)
        except RequestError as error:
            raise damaged(path, error) from None
    return defaults | sampling_defaults(settings.override_generation_config or {})


def name_tokens(tokenizer: Tokenizer | None, logprobs: Sequence[dict[int, Logprob] | None]) -> None:
    """Set `decoded_token` where it is missing."""
    for entry in logprobs:
        for token_id, logprob in (entry or {}).items():
            if tokenizer is not None and logprob.decoded_token is None:
                logprob.decoded_token = tokenizer.decode([token_id], skip_special_tokens=False)


class Processor:
    """Tokenizer, chat template, parsers and grammars of a model.

    Without a tokenizer it takes and returns token ids only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str | Mapping[str, str] | None,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        defaults: dict[str, Any] | None = None,
        settings: TextSettings | None = None,
        vocab: int | None = None,
    ) -> None:
        """Compile the chat templates and choose the parsers.

        vocab: number of tokens of the model; by default the tokenizer's.
        chat_template: one template, or several by name (see templates/files.py).
        Raises: CheckpointError, ConfigError.
        """
        self.tokenizer = tokenizer
        self.grammars = None
        if tokenizer is not None and eos_ids:
            self.grammars = Compiler(tokenizer, vocab or len(tokenizer), eos_ids)
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        # A longer text cannot fit, since no token has more characters than the longest one.
        self.max_characters = max_model_len * (tokenizer.max_token_length if tokenizer else 1)
        self.template = None
        if isinstance(chat_template, str):
            chat_template = {DEFAULT: chat_template}
        templates = dict(chat_template or {})
        self._template_text = {"chat_template": templates[DEFAULT]} if DEFAULT in templates else {}
        if chat_template and tokenizer:
            self._control = ControlTokens(tokenizer.fast)
            self.template = ChatTemplates(
                chat_template,
                tokenizer.special_tokens,
                self._control,
                self.max_characters,
                tokenizer.chat_template_path,
                max_model_len,
            )
        settings = settings or TextSettings()
        self.defaults = dict(defaults or {})
        # Maximum tokens of an answer, and the default of requests that set none.
        self.max_new_tokens: int | None = self.defaults.pop("max_tokens", None)
        self.template_defaults = settings.default_chat_template_kwargs or {}
        source = "\n".join(templates.values())
        self._tools = choose("tool_call_parser", TOOL_PARSERS, settings.tool_call_parser, source)
        self._reasoning = choose(
            "reasoning_parser", REASONING_PARSERS, settings.reasoning_parser, source
        )

    @classmethod
    def for_model(
        cls,
        tokenizer: Tokenizer | None,
        folder: str | Path,
        max_model_len: int,
        settings: TextSettings | None = None,
        vocab: int | None = None,
    ) -> "Processor":
        """Return the processor of a model folder. vocab: number of tokens of the model."""
        settings = settings or TextSettings()
        defaults = _defaults(settings, Path(folder))
        eos = tokenizer.eos_ids if tokenizer else eos_ids(Path(folder))
        template = settings.template() or (tokenizer.chat_templates if tokenizer else None)
        processor = cls(tokenizer, template, max_model_len, eos, defaults, settings, vocab)
        for warning in processor.template.warnings() if processor.template else ():
            log.warning("%s", warning)
        return processor

    def tokenizer_info(self) -> dict[str, Any]:
        """Return tokenizer_config.json for clients that run the tokenizer themselves.

        Special tokens are strings, whichever file defines them. chat_template is the template in
        use, or absent. Raises RequestError without a tokenizer.
        """
        tokenizer = self.require_tokenizer("/tokenizer_info")
        info = {**tokenizer.config, **tokenizer.special_tokens}
        info.pop("chat_template", None)
        return info | self._template_text

    def default_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling defaults of the model's generation_config, with changes."""
        return SamplingParams(**{**self.defaults, **changes})

    def bounded_params(self, changes: dict[str, Any]) -> SamplingParams:
        """Return default_params() with max_tokens limited to generation_config's max_new_tokens.

        Raises: RequestError.
        """
        requested = changes.get("max_tokens")
        limit = self.max_new_tokens
        if limit is not None and (requested is None or requested > limit):
            changes = {**changes, "max_tokens": limit}
        return self.default_params(**changes)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        field: str = "prompt",
        is_cut: bool = False,
    ) -> list[int]:
        """Return the token ids of a text.

        is_cut: the tokens are truncated afterwards, so that more text is allowed.
        Raises: RequestError without a tokenizer, for text that is too long, and for lone
        surrogates.
        """
        tokenizer = self.require_tokenizer(field)
        if is_cut and isinstance(text, str) and len(text) > self._max_cut_characters:
            raise RequestError(
                f"{field} has {len(text)} characters; allowed with truncate_prompt_tokens: at most "
                f"{self._max_cut_characters}. Shorten it.",
                field,
            )
        self._check_text(text, field, self._max_cut_characters if is_cut else self.max_characters)
        return _encoded(tokenizer.encode, text, field, add_special_tokens=add_special_tokens)

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, field: str = "tokens"
    ) -> str:
        """Return the text of token ids. Raises RequestError for invalid or too many ids."""
        tokenizer = self.require_tokenizer(field)
        is_sequence = is_list(token_ids)
        if is_sequence and len(token_ids) > self.max_model_len:
            raise RequestError(
                f"{field} has {len(token_ids)} entries; allowed: at most {self.max_model_len} "
                "(max_model_len). Send fewer.",
                field,
            )
        if not is_sequence or not is_ids(token_ids) or not all(0 <= i < 2**31 for i in token_ids):
            raise RequestError(
                f"{field}={brief(token_ids)} is not allowed; allowed: a list of token ids, from 0 "
                f"to {2**31 - 1}. Send one.",
                field,
            )
        return tokenizer.decode(token_ids, skip_special_tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids that a client sent.

        Raises: RequestError as decode() does, and for ids outside the vocabulary.
        """
        text = self.decode(tokens)
        tokenizer = self.require_tokenizer("tokens")
        for token_id in tokens:
            if not tokenizer.token(token_id):
                raise RequestError(
                    f"tokens has token id {token_id}; allowed: ids of the tokenizer's "
                    f"{len(tokenizer)} tokens. Remove it.",
                    "tokens",
                )
        return text

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token on its own."""
        tokenizer = self.require_tokenizer("tokens")
        return [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

    def conversation(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Render a conversation for the next answer.

        kwargs: variables of the template; they override the defaults of the settings.
        continue_final_message: the answer continues the last message.

        Only the template writes control tokens: their spellings in messages, tools and kwargs are
        tokenized as plain text. Raises RequestError.
        """
        if self.template is None:
            raise RequestError(
                "messages need a chat template, and this model has none; send a prompt instead, "
                "or add chat_template.jinja to the model folder.",
                "messages",
            )
        variables = {**self.template_defaults, **kwargs}
        template = self.template.choose(tools)
        marked = template.render_marked(messages, tools, continue_final_message, **variables)
        text = self._control.unmark(marked)
        self._check_text(text, "messages", self.max_characters)
        ids = _encoded(self._control.encode, marked, "messages")
        return Rendered(text, ids, tuple(parameters_by_name(tools)))

    def render_text(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """Return the text of a conversation for the next answer."""
        return self.conversation(messages, tools, **kwargs).text

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a conversation for the next answer."""
        return self.conversation(messages, tools, **kwargs).ids

    def prompt_ids(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of a prompt.

        prompt: text, ids, {"prompt": text} or {"prompt_token_ids": ids}.
        params: may truncate the prompt to its last tokens.
        add_special_tokens: add the tokens that the tokenizer puts around a text.
        Raises: RequestError.
        """
        if isinstance(prompt, dict):
            content = prompt.get("prompt_token_ids")
            content = prompt.get("prompt") if content is None else content
            if content is None or isinstance(content, dict):
                raise RequestError(
                    f"prompt has the keys {brief(list(prompt))}; allowed: prompt (text) or "
                    "prompt_token_ids (ids). Send one of them.",
                    "prompt",
                )
            extra = {name: value for name, value in prompt.items() if name not in PROMPT_KEYS}
            check_keywords(extra, PROMPT_KEYS, PROMPT, field="prompt")
            prompt = content
        field = "prompt"
        if isinstance(prompt, Rendered):
            prompt = prompt.ids
            field = "messages"
        is_cut = params is not None and params.truncate_prompt_tokens is not None
        ids: Any = prompt
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special_tokens, is_cut=is_cut)
        is_sequence = is_list(ids)
        if is_sequence and params is not None and is_cut:
            ids = ids[-self._max_prompt_tokens(params) :]
        if not is_sequence or (len(ids) < self.max_model_len and not is_ids(ids)):
            raise RequestError(
                f"prompt={brief(prompt)} is not allowed; allowed: a text, or a list of token ids. "
                "Send one of them.",
                "prompt",
            )
        if not ids:
            raise RequestError(
                f"the prompt has 0 tokens; allowed: 1 to {self.max_model_len - 1} "
                f"(max_model_len={self.max_model_len}, one of them for the answer). "
                "Send a longer prompt.",
                "prompt",
            )
        if len(ids) >= self.max_model_len:
            raise context_length_error(len(ids), self.max_model_len, field)
        return list(map(int, ids))  # other integers are no plain data

    def _max_prompt_tokens(self, params: SamplingParams) -> int:
        """Return how many tokens truncate_prompt_tokens keeps."""
        requested = params.truncate_prompt_tokens
        if requested is None or requested < 0:
            return max(1, self.max_model_len - (params.max_tokens or 1))
        return requested

    def requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        """Return `params.n` engine requests for a prompt: see tokenized_requests()."""
        token_ids = self.prompt_ids(prompt, params)
        conversation = prompt if isinstance(prompt, Rendered) else None
        return self.tokenized_requests(
            request_id, token_ids, params, priority, conversation, _salt_of(prompt)
        )

    def tokenized_requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        conversation: Rendered | None = None,
        cache_salt: str = "",
    ) -> list[Request]:
        """Return `params.n` engine requests with the seeds seed, seed + 1, ...

        token_ids: a prompt that prompt_ids() has checked. max_tokens is reduced to what the context
        allows. conversation: the rendered prompt, whose answer may begin with reasoning. Compiles
        the grammar. Raises RequestError.
        """
        # Callers may change their lists while the request waits or runs.
        params = params.detached()
        if params.stop_strings and (self.tokenizer is None or not params.detokenize):
            raise RequestError("stop needs text; remove stop or detokenize=False.", "stop")
        max_new_tokens = self.max_model_len - len(token_ids)
        seed = secrets.randbits(48) if params.seed is None else params.seed
        changes: dict[str, Any] = {
            "n": 1,
            "max_tokens": min(params.max_tokens or max_new_tokens, max_new_tokens),
            "bad_words_ids": self._bad_words(params),
            "prediction": self._prediction(params),
        }
        scored = _scored_tokens(token_ids, params)
        if scored is not None:
            changes |= _scoring_changes(scored, params, changes["max_tokens"])
            token_ids = token_ids[: params.scored_from]
        grammars = self._grammars(params, conversation or token_ids, token_ids)
        requests = []
        for i in range(params.n):
            # Seeds wrap around within 64 bits.
            request_seed = (seed + i + 2**63) % 2**64 - 2**63
            requests.append(
                Request(
                    id=request_id if params.n == 1 else f"{request_id}-{i}",
                    prompt_token_ids=token_ids,
                    params=replace(params, **changes, seed=request_seed),
                    priority=priority,
                    eos_token_ids=self.eos_ids,
                    seed=request_seed,
                    cache_salt=cache_salt,
                    grammar=next(grammars),
                    scored=scored,
                )
            )
        return requests

    def completion(
        self, request: Request, index: int = 0, shown: Collection[int] = ()
    ) -> CompletionText:
        """Return the text side of one of `requests`. shown: special tokens that are not skipped."""
        return CompletionText(self.tokenizer, request, index, shown)

    def marker_ids(self, tools: list[dict[str, Any]] | None) -> frozenset[int]:
        """Return the special tokens that `reply_parser` looks for."""
        if self.tokenizer is None:
            return frozenset()
        texts = self._reasoning.texts() if self._reasoning else set()
        if self._tools and tools:
            texts |= self._tools.texts()
        token = self.tokenizer.token
        return frozenset(i for i in self.tokenizer.special_ids if token(i) in texts)

    def reply_parser(
        self,
        prompt: str,
        tools: list[dict[str, Any]] | None,
        structure: StructuredOutputsParams | None = None,
    ) -> ReplyParser:
        """Return the parser that splits an answer into reasoning, content and tool calls.

        prompt: rendered prompt of the answer.
        structure: structured output of the answer. It begins at the reasoning's closing tag only,
        so that no call inside of the reasoning ends it.
        """
        calls = self._tools if tools else None
        openers = calls.ENDS_REASONING if calls and structure is None else ()
        parser = calls(tools) if calls else None
        if parser is not None and isinstance(structure, CallParams) and structure.or_form:
            parser = CallsOrForm(parser)
        return ReplyParser(self._reasoning(prompt, openers) if self._reasoning else None, parser)

    def text_end(
        self, finish_reason: str | None, stop_reason: int | str | None, params: SamplingParams
    ) -> TextEnd:
        """Return why the text of a completion ended, for the parsers."""
        if finish_reason == "stop" and (stop_reason is None or stop_reason in self.eos_ids):
            return NATURAL_END
        if finish_reason != "stop" or params.include_stop_str_in_output or stop_reason is None:
            return TextEnd(cut=True)
        if isinstance(stop_reason, str):
            return TextEnd(cut=True, stop=stop_reason)
        tokenizer = self.tokenizer
        stop = (
            "" if tokenizer is None else tokenizer.decode([stop_reason], skip_special_tokens=False)
        )
        return TextEnd(cut=True, stop=stop)

    def reads_late_system(self, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the chat template writes system messages after other messages.

        Raises RequestError.
        """
        return self.template is None or self.template.choose(tools).findings.reads_late_system

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template may read a field of this name."""
        return self.template is not None and name in self.template.names

    def template_prints(self, name: str) -> bool:
        """Return whether the chat template may print a tool's field of this name, alone or in an
        object."""
        return self.template_reads(name) or bool(self.template and self.template.prints_objects)

    def effort_kwargs(self, effort: str) -> dict[str, Any]:
        """Return the template variables that set the reasoning effort.

        `reasoning_effort` takes the degree; a switch only turns reasoning on or off. A model that
        never reasons needs no variable for "none". Raises RequestError if the template has no such
        variable.
        """
        readable = self.template.variables if self.template else frozenset()
        variables: dict[str, Any] = {
            name: effort != "none" for name in SWITCHES if name in readable
        }
        if EFFORT in readable:
            variables[EFFORT] = effort
        if not variables and (effort != "none" or self._reasoning is not None):
            names = ", ".join((EFFORT, *SWITCHES))
            raise RequestError(
                f"reasoning_effort={effort!r} has no effect: the model's chat template reads none "
                f"of {names}. Remove it.",
                "reasoning_effort",
            )
        return variables

    def check_tools(self, tools: list[dict[str, Any]] | None) -> None:
        """Raise RequestError for tools whose calls could not be parsed."""
        if tools and self._tools is None:
            raise RequestError(
                "tools need a tool-call parser, and the model's template names none that is "
                "known; set tool_call_parser (--tool-call-parser), or send no tools.",
                "tools",
            )

    def require_tokenizer(self, field: str) -> Tokenizer:
        """Return the tokenizer. Raises RequestError, which names the field, if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{field} needs the tokenizer, but skip_tokenizer_init is set; send token ids.",
                field,
            )
        return self.tokenizer

    @property
    def _max_cut_characters(self) -> int:
        """Return the maximum characters of a text that is truncated to its last tokens."""
        return max(self.max_characters, MAX_CUT_CHARACTERS)

    def _check_text(self, text: str, field: str, max_characters: int) -> None:
        if not isinstance(text, str):
            raise RequestError(f"{field}={brief(text)} is not allowed; send a text.", field)
        if len(text) > max_characters:
            # No token has more characters than the longest one.
            tokens = -(-len(text) * self.max_model_len // self.max_characters)
            why = f"{field} has {len(text)} characters"
            raise context_length_error(tokens, self.max_model_len, field, why)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{field}: character {error.start} of the text is half of a surrogate pair. Send "
                "the whole character, or remove it.",
                field,
            ) from None

    def _grammars(
        self, params: SamplingParams, prompt: Prompt, ids: Sequence[int]
    ) -> Iterator[Compiled | None]:
        """Yield the grammar of each answer of a request, one object each."""
        first = self._grammar(params, prompt, ids)
        yield first
        while True:
            yield None if first is None else self._from_recipe(first.recipe)

    def _grammar(
        self, params: SamplingParams, prompt: Prompt, ids: Sequence[int]
    ) -> Compiled | None:
        """Return the grammar of an answer: of its content, its reasoning budget, or both."""
        structure = params.structured_outputs
        form = None if structure is None else self._form(structure, prompt)
        budget = params.thinking_token_budget
        if budget is None or budget < 0:
            return form
        self._check_budget(params)
        max_tokens = min(params.max_tokens or self.max_model_len, self.max_model_len - len(ids))
        # A form without AfterReasoning binds the answer's first token: there is no reasoning.
        if budget >= max_tokens or (form is not None and not isinstance(form, AfterReasoning)):
            return form
        bounded = self._thinking_budget(self._budget_recipe(budget, prompt, ids, form))
        return form if bounded.ended else bounded

    def _form(self, structure: StructuredOutputsParams, prompt: Prompt) -> Matcher | AfterReasoning:
        """Return the grammar of an answer's content, which does not bind its reasoning."""
        grammars = self._compiler()
        matcher = compile_structured_output(structure, grammars)
        if self._reasoning is None or not isinstance(prompt, Rendered):
            return matcher
        return self._after_reasoning(matcher, prompt.text.rstrip(), grammars)

    def _check_budget(self, params: SamplingParams) -> None:
        """Raise RequestError if the reasoning could not be ended."""
        if self._reasoning is None:
            raise RequestError(
                f"{BUDGET}={params.thinking_token_budget} needs a reasoning parser, and this model "
                "has none; set reasoning_parser (--reasoning-parser), or remove it.",
                BUDGET,
            )
        tag = self._closing_tag
        allowed = params.allowed_token_ids
        if allowed is not None and not set(tag.tokens) <= set(allowed):
            raise RequestError(
                f"{BUDGET}={params.thinking_token_budget} needs the tokens {tag.tokens} of "
                f"{tag.text}, which allowed_token_ids lacks. Add them, or remove a field.",
                BUDGET,
            )

    @cached_property
    def _closing_tag(self) -> ClosingTag:
        return ClosingTag(self._reasoning.TAGS[1], self.require_tokenizer(BUDGET))

    def _budget_recipe(
        self, budget: int, prompt: Prompt, ids: Sequence[int], form: AfterReasoning | None
    ) -> BudgetRecipe:
        """Return the recipe of a budget. Calls end the reasoning unless a form binds the answer."""
        names: tuple[str, ...] = ()
        if isinstance(prompt, Rendered):
            text = prompt.text
            names = prompt.tool_names if form is None else ()
        else:
            text = self.require_tokenizer(BUDGET).decode(
                ids[-PROMPT_END:], skip_special_tokens=False
            )
        end = text.rstrip()[-PROMPT_END:]
        return BudgetRecipe(budget, end, names, None if form is None else form.recipe)

    def _thinking_budget(self, recipe: BudgetRecipe) -> ThinkingBudget:
        """Return a new grammar that keeps a budget."""
        grammars = self._compiler(BUDGET)
        tools = [{"type": "function", "function": {"name": name}} for name in recipe.tool_names]
        shown = self.marker_ids(tools)

        def make_progress() -> ReasoningProgress:
            parser = self.reply_parser(recipe.prompt_end, tools)
            text = Detokenizer(grammars.tokenizer, shown=shown)
            return ReasoningProgress(parser, text, self._closing_tag, recipe.budget)

        form = None if recipe.form is None else grammars.grammar(recipe.form)
        return ThinkingBudget(recipe, make_progress, grammars, form)

    def grammar_of(self, recipe: GrammarRecipe | BudgetRecipe) -> Grammar:
        """Return a new, compiled grammar from a recipe of this model's processor."""
        grammar = self._from_recipe(recipe)
        grammar.prepare()
        return grammar

    def _from_recipe(self, recipe: GrammarRecipe | BudgetRecipe) -> Compiled:
        """Return a new grammar from its recipe."""
        if isinstance(recipe, BudgetRecipe):
            return self._thinking_budget(recipe)
        return self._compiler().grammar(recipe)

    def _compiler(self, field: str = "structured_outputs") -> Compiler:
        if self.grammars is None:
            raise RequestError(
                f"{field} needs a tokenizer with a token that ends an answer, and this model has "
                "none. Remove it.",
                field,
            )
        return self.grammars

    def _after_reasoning(
        self, matcher: Matcher, prompt: str, grammars: Compiler
    ) -> Matcher | AfterReasoning:
        """Return the matcher, wrapped in AfterReasoning if the answer may begin with reasoning."""
        begin_tag, end_tag = getattr(self._reasoning, "TAGS", (None, None))
        if end_tag is not None and prompt.endswith(end_tag):
            return matcher
        is_begun = begin_tag is not None and prompt.endswith(begin_tag)
        find = grammars.tokenizer.fast.token_to_id
        begin, end = (None if tag is None else find(tag) for tag in (begin_tag, end_tag))
        if begin is not None and end is not None:
            return AfterReasoning(matcher, end, None if is_begun else begin)
        raise RequestError(
            "structured_outputs are not supported after this model's reasoning, whose tags are not "
            "single tokens. Turn reasoning off, or set reasoning_parser to none.",
            "structured_outputs",
        )

    def form(
        self,
        requested: StructuredOutputsParams | None,
        tools: list[dict[str, Any]] | None,
        choice: Any = "auto",
        parallel: bool = True,
    ) -> StructuredOutputsParams | None:
        """Return the form that an answer must match: the requested one, or tool calls.

        Calls are enforced if the choice requires them or a tool is strict. If calls are optional
        and JSON was requested, the answer is one or the other. Required calls leave no content for
        a form to bind.
        choice: tool_choice of OpenAI's API.
        parallel: allow more than one call.
        Raises: RequestError.
        """
        tool_choice = ToolChoice.read(choice)
        if requested is None or not tools or tool_choice.mode != "auto":
            return self._calls(tools, tool_choice, parallel) or requested
        self.check_tools(tools)
        syntax = self._syntax()
        strict = tool_choice.strict(tools)
        form = None if syntax.parser.BARE else json_expression(requested)
        if form is not None:
            compile_structured_output(requested, self._compiler())
            callable_tools = syntax.tools(tools, tool_choice, enforced=strict)
            grammar = syntax.calls_or_form(callable_tools, parallel, form)
            json_after = syntax.json_after(callable_tools, free_text=False)
            return CallParams(grammar=grammar, or_form=True, json_after=json_after)
        if strict:
            raise RequestError(
                "strict tools are not supported together with this structured output; allowed: "
                "JSON, with a model whose tool calls begin with a tag. Remove strict, the "
                "structured output, or the tools.",
                "tools",
            )
        return requested

    def _calls(
        self, tools: list[dict[str, Any]] | None, choice: ToolChoice, parallel: bool
    ) -> StructuredOutputsParams | None:
        """Return the parameters that enforce tool calls; None if nothing is enforced."""
        auto = choice.mode == "auto"
        enforced = not auto or choice.strict(tools)
        if choice.mode == "none" or (choice.names is None and not enforced):
            return None
        if not tools:
            raise RequestError("tool_choice needs tools; send some.", "tool_choice")
        self.check_tools(tools)
        syntax = self._syntax()
        write = syntax.text_and_calls if auto else syntax.calls_only
        callable_tools = syntax.tools(tools, choice, enforced)
        grammar = write(callable_tools, parallel)
        json_after = syntax.json_after(callable_tools, free_text=auto)
        return CallParams(grammar=grammar, json_after=json_after)

    def _syntax(self) -> ToolSyntax:
        """Return the call syntax of the model."""
        tokenizer = self.require_tokenizer("tools")
        tags = self._tools.texts()
        special = tokenizer.special_ids - self.eos_ids
        tokens = {tokenizer.token(i): i for i in special if tokenizer.token(i) in tags}
        return ToolSyntax(self._tools, tokens)

    def _prediction(self, params: SamplingParams) -> Sequence[int] | None:
        """Return the token ids of the prediction, cut to max_model_len."""
        predicted = params.prediction
        if isinstance(predicted, str):
            predicted = self.encode(predicted, False, "prediction")
        return predicted[: self.max_model_len] if predicted else None

    def _bad_words(self, params: SamplingParams) -> Sequence[Sequence[int]] | None:
        """Return the token sequences of bad_words: each word at the start of a text, and after a
        blank."""
        if not params.bad_words:
            return params.bad_words_ids
        sequences = [list(ids) for ids in params.bad_words_ids or ()]
        for word in params.bad_words:
            plain = self.encode(word.lstrip(), False, "bad_words")
            spaced = self.encode(" " + word.lstrip(), False, "bad_words")
            if not plain:
                raise RequestError(
                    f"bad_words has {brief(word)}, which has no tokens. Remove it.", "bad_words"
                )
            sequences.append(plain)
            if spaced[-len(plain) :] != plain:  # otherwise `plain` bans it already
                sequences.append(spaced)
        return sequences


def _scored_tokens(token_ids: list[int], params: SamplingParams) -> ScoredTokens | None:
    """Return the tokens of a prompt from scored_from on, None without it. Raises RequestError."""
    first = params.scored_from
    if first is None:
        return None
    if params.prompt_logprobs is None:
        raise RequestError(
            f"scored_from={first} needs prompt_logprobs, which it is for. Send it, or leave "
            "scored_from out.",
            "scored_from",
        )
    for name in (
        "truncate_prompt_tokens",
        "forced_token_ids",
        "structured_outputs",
        "thinking_token_budget",
    ):
        if getattr(params, name) is not None:
            raise RequestError(
                f"scored_from={first} is not allowed with {name}. Leave one of them out.",
                "scored_from",
            )
    if first >= len(token_ids):
        raise RequestError(
            f"scored_from={first} is not allowed; allowed: 1 to {len(token_ids) - 1}, since the "
            f"prompt has {len(token_ids)} tokens. Send the number of tokens before the answer.",
            "scored_from",
        )
    return ScoredTokens(token_ids[first:], params.logprobs)


def _scoring_changes(
    scored: ScoredTokens, params: SamplingParams, max_tokens: int
) -> dict[str, Any]:
    """Return changes of sampling parameters that force scored tokens before the answer.

    max_tokens: limit of the answer.
    """
    count = len(scored.token_ids)
    return {
        "forced_token_ids": scored.token_ids,
        "forced_mismatch": "report",
        "max_tokens": count + max_tokens,
        # Stop tokens among the scored ones do not end the answer.
        "min_tokens": count + params.min_tokens,
        "logprobs": max(params.prompt_logprobs or 0, params.logprobs or 0),
    }


def _salt_of(prompt: Prompt) -> str:
    """Return the cache_salt of a prompt that is a dict. Raises RequestError."""
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT or not is_unicode(salt):
        raise RequestError(
            f"cache_salt={brief(salt)} is not allowed; allowed: a text of 1 to {MAX_SALT} "
            "characters without lone surrogates. Correct it, or remove it.",
            "cache_salt",
        )
    return salt


def _encoded(encode: Callable[..., list[int]], text: str, field: str, **options: Any) -> list[int]:
    try:
        return encode(text, **options)
    except Exception:  # tokenizers raises plain Exception for a character that its vocabulary lacks
        raise RequestError(
            f"{field}: the model's tokenizer cannot encode this text. Change the text.", field
        ) from None
