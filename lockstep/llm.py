"""LLM: offline inference for programs that have all their prompts at hand."""

import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Number
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from lockstep.child_processes import on_end
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine, Inbox, Update
from lockstep.engine.engine import Engine
from lockstep.engine.engine_process import MakeGrammar, lower_priority
from lockstep.engine.kv_publisher import BlockFormat, open_publisher
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.engine_args import EngineArgs
from lockstep.engine_builder import build_engine
from lockstep.errors import EngineDeadError, RequestError, brief
from lockstep.keywords import CALL, CHAT, METHODS, check_keywords
from lockstep.outputs import RequestOutput, ScoreOutput
from lockstep.progress import Progress, ignore_progress, progress_bar
from lockstep.request_group import ReplyReader, RequestGroup
from lockstep.sampling_params import SamplingParams
from lockstep.text.grammars.tool_calls import ToolChoice
from lockstep.text.model_tokenizer import ModelTokenizer
from lockstep.text.processor import Processor, Prompt
from lockstep.text.scores import (
    GREEDY,
    Answer,
    answer_ids,
    answer_list,
    naming_answers,
    score_output,
    score_params,
)
from lockstep.text.settings import TextSettings
from lockstep.text.templates.chat_template import check_kwargs
from lockstep.text.tokenizers.tokenizer import Tokenizer
from lockstep.worker.build import pick_device
from lockstep.worker.executor import Facts

GENERATE = (
    "prompts", "sampling_params", "priority", "lora_request", "on_progress", "use_tqdm",
)  # fmt: skip
"""Parameters of generate(), for the error of an unknown keyword."""
CHAT_PARAMETERS = (
    "messages",
    "sampling_params",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    *GENERATE[2:],
)
"""Parameters of chat(), for the same error."""
SCORE = ("prompts", "answers", "sampling_params", "logprobs", *GENERATE[2:])
"""Parameters of score(), for the same error."""


def processor_of(facts: Facts, text: TextSettings) -> Processor:
    """Return the processor of an engine: tokenizer and chat template of its checkpoint.

    The processor has no tokenizer where skip_tokenizer_init is set.
    """
    plan = facts.plan
    tokenizer = None if facts.config.skip_tokenizer_init else Tokenizer(plan.model_path)
    return Processor.for_model(
        tokenizer, plan.model_path, plan.max_model_len, text, facts.vocab_size
    )


def build_remote_engine(
    config: EngineConfig, text: TextSettings, progress: Progress
) -> tuple[Engine, MakeGrammar]:
    """Build an engine and its grammar factory; called in the engine's own process.

    On a CPU the engine's threads get a lower priority than the client's. Data that the first
    grammar needs is built here, so that no step competes with that work for the interpreter.
    """
    lower_priority(pick_device(config))
    engine = build_engine(config, progress)
    processor = processor_of(engine.facts, text)
    if processor.grammars is not None:
        processor.grammars.prepare()
    return engine, processor.grammar_of


class LLM:
    """Model and tokenizer for offline inference.

        llm = LLM()
        print(llm.generate("def main(", SamplingParams(max_tokens=20))[0].outputs[0].text)

    Settings are EngineConfig's and TextSettings', and the flags of `vllm serve` by their names:
    those without effect here give warnings, others errors with a remedy. Without
    speculative_config, the checkpoint's draft module drafts, if it has one ("auto").
    `progress(what, done, total)` is called with bytes while loading, with shapes while warming up.

    Any thread may call generate() and chat(): a thread of the LLM runs the engine, which batches
    the requests of all callers. close(), or the end of a `with` block, ends it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Progress = ignore_progress,
        **settings: Any,
    ) -> None:
        config, text = EngineArgs(model, **settings).read()
        engine = build_engine(config, progress)
        self._adopt(engine, processor_of(engine.facts, text))

    @classmethod
    def from_engine(cls, engine: Engine, processor: Processor | None = None) -> "LLM":
        """Return an LLM around a built engine.

        processor: that of an engine with the same tokenizer and max_model_len; None reads the
        checkpoint's.
        """
        llm = cls.__new__(cls)
        llm._adopt(engine, processor or processor_of(engine.facts, TextSettings()))
        return llm

    def _adopt(self, engine: Engine, processor: Processor) -> None:
        """Take the engine, and the tokenizer and chat template of its checkpoint."""
        self._engine: Engine | None = engine
        self._client: AsyncEngine | None = None
        self._stop: Callable[[], Any] | None = None
        self._starting = threading.Lock()
        self.processor = processor
        self.tokenizer = self.processor.tokenizer

    @property
    def engine(self) -> Engine:
        """Return the engine. Its methods may be called while no generate() or chat() runs.

        Raises EngineDeadError once the LLM is closed.
        """
        if self._engine is None:
            raise EngineDeadError("the LLM was closed. Make a new one.")
        return self._engine

    @property
    def llm_engine(self) -> Engine:
        """Return the engine, by vLLM's name."""
        return self.engine

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the tokenizer, with the chat template.

        Raises RequestError where skip_tokenizer_init is set.
        """
        return ModelTokenizer(self.processor)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the default sampling parameters, as over HTTP.

        They are the checkpoint's generation_config, with the max_tokens of /v1/completions. Raises
        RequestError.
        """
        return self.processor.bounded_params({"max_tokens": SamplingParams.max_tokens, **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = 0,
        lora_request: str | Sequence[str] | None = None,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
        **other_keywords: Any,
    ) -> list[RequestOutput]:
        """Answer prompts (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}).

        Outputs have the order of the prompts. on_progress: called in this thread with each output
        as it grows. lora_request: name of a LoRA adapter of lora_modules, or one per prompt, "" for
        the base model. use_tqdm: show a bar on stderr that counts answered prompts, where stderr is
        a terminal.

        An exception in the caller, such as KeyboardInterrupt, aborts only this call's requests.

        Raises RequestError naming the parameter where a request is wrong; then none runs.
        ComputeError where the engine fails again and again while it runs a request,
        EngineDeadError where the engine has ended.
        """
        check_keywords(other_keywords, GENERATE, CALL)
        prompt_list = _as_list(prompts)
        params = self._params(sampling_params, len(prompt_list), self.get_default_sampling_params)
        return self._answer(
            prompt_list, params, priority, on_progress, use_tqdm, adapters=lora_request
        )

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        answers: Answer | Sequence[Answer],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logprobs: int = 0,
        priority: int | Sequence[int] | None = 0,
        lora_request: str | Sequence[str] | None = None,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
        **other_keywords: Any,
    ) -> list[ScoreOutput]:
        """Return the log-probabilities of given answers, bit for bit those of their generation.

        answers: a text or token ids each, one per prompt; or several of one prompt. A text is
        tokenized without special tokens; token ids of a generated answer are exact. logprobs: N
        likeliest tokens at each position, next to the answer's own. sampling_params: those that
        forced_mismatch compares the answer with, greedy ones by default; no score depends on them.
        An answer is read to its end, stop tokens included.

        Raises what generate() does.
        """
        check_keywords(other_keywords, SCORE, CALL)
        answers_ids = [answer_ids(self.processor, answer) for answer in answer_list(answers)]
        prompt_list = _as_list(prompts)
        if len(prompt_list) == 1:
            prompt_list *= len(answers_ids)
        if len(prompt_list) != len(answers_ids):
            raise RequestError(
                f"answers has {len(answers_ids)} entries for {len(prompt_list)} prompts; send one "
                "per prompt, or one prompt.",
                "answers",
            )
        params = self._params(sampling_params, len(prompt_list), lambda: GREEDY)
        params = [
            score_params(request_params, ids, logprobs)
            for request_params, ids in zip(params, answers_ids, strict=True)
        ]
        with naming_answers():
            outputs = self._answer(
                prompt_list, params, priority, on_progress, use_tqdm, adapters=lora_request
            )
        return [score_output(output) for output in outputs]

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] | None = 0,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
        shown_ids: Collection[int] = (),
        readers: Sequence[ReplyReader | None] = (),
        adapters: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts with one set of parameters each.

        shown_ids: special tokens that become text. readers: one per prompt, which parse the
        finished answers; empty for plain text. adapters: names of LoRA adapters, "" for none.
        """
        _check_switch("use_tqdm", use_tqdm)
        count = len(prompts)
        priorities = _per_prompt("priority", priority or 0, count, int, "a whole number")
        names = _per_prompt("lora_request", adapters or "", count, str, "a name in lora_modules")
        each_reader = readers or (None,) * count
        groups = [
            RequestGroup(
                self.processor, uuid.uuid4().hex, prompt, p, value, shown_ids, reader, name
            )
            for prompt, p, value, reader, name in zip(
                prompts, params, priorities, each_reader, names, strict=True
            )
        ]
        engine = self.engine
        for group in groups:
            for request in group.requests:
                engine.check(request)
        with progress_bar() if use_tqdm else nullcontext(ignore_progress) as show:
            _Call(self._running_client(), groups, on_progress, partial(show, "answers")).run()
        return [group.output for group in groups]

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes and return True, as vLLM does.

        Later calls find no cached prefix; running calls of other threads continue.
        """
        self._running_client().reset_prefix_cache()
        return True

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int | Sequence[int] | None = 0,
        lora_request: str | Sequence[str] | None = None,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
        **other_keywords: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or conversations, rendered with the checkpoint's chat template.

        tools, tool_choice and parallel_tool_calls mean what they do over HTTP. Once a completion
        has ended, its `content`, `reasoning` and `tool_calls` are the parsers' results; `text` is
        everything that the model wrote, including tags that are special tokens. Without
        sampling_params an answer may fill the context, as over HTTP. lora_request: as in
        generate(). Raises what generate() does.
        """
        check_keywords(other_keywords, CHAT_PARAMETERS, CHAT)
        prompt_list = isinstance(messages, list) and messages and isinstance(messages[0], list)
        conversations: list[Any] = list(messages) if prompt_list else [messages]
        variables = self._variables(
            chat_template_kwargs, add_generation_prompt, continue_final_message
        )
        _check_switch("parallel_tool_calls", parallel_tool_calls)
        choice = ToolChoice.read(tool_choice)
        processor = self.processor
        tools = None if choice.mode == "none" else tools
        params = self._params(
            sampling_params,
            len(conversations),
            lambda: processor.bounded_params({"max_tokens": None}),
        )
        rendered = [processor.conversation(m, tools=tools, **variables) for m in conversations]
        for request_params in params:
            request_params.structured_outputs = processor.form(
                request_params.structured_outputs, tools, tool_choice, parallel_tool_calls
            )
        readers = [
            ReplyReader(processor, prompt, tools, request_params, parallel_tool_calls)
            for prompt, request_params in zip(rendered, params, strict=True)
        ]
        shown_ids = processor.marker_ids(tools)
        return self._answer(
            rendered, params, priority, on_progress, use_tqdm, shown_ids, readers, lora_request
        )

    def beam_search(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RequestError: a beam's answer would depend on other answers."""
        raise RequestError(
            "beam_search is not supported: a beam's answer depends on the others, and drafts do "
            "not apply. Call generate() with temperature=0, or with n and logprobs, and choose by "
            "cumulative_logprob."
        )

    if not TYPE_CHECKING:  # hidden from type checkers, so that they still report misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with a remedy for vLLM's methods that do not exist here."""
            if name in METHODS:
                raise AttributeError(f"LLM has no {name}: {METHODS[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def close(self) -> None:
        """End the engine after its current step and release its memory.

        Calls that run in other threads end with EngineDeadError, as do later calls.
        """
        with self._starting:
            self._engine = None
            self._client = None
            stop = self._stop
            self._stop = None
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _running_client(self) -> AsyncEngine:
        """Return the client of the engine's thread, which the first call starts."""
        with self._starting:
            if self._client is None:
                publisher = open_publisher(self.engine.config.kv_events_config)
                if publisher is not None:
                    publisher.start(BlockFormat.of(self.engine.plan))
                client = AsyncEngine(
                    ThreadTransport(self.engine), remedy="Make a new LLM.", publisher=publisher
                )
                client.start()
                self._client = client
                # The thread refers to the engine, not to this object. If this object is collected
                # without close(), the thread ends and the engine's memory is freed.
                self._stop = on_end(self, client.shutdown)
            return self._client

    def _params(
        self,
        params_or_list: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        default: Callable[[], SamplingParams],
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each prompt, checked and copied."""
        chosen = default() if params_or_list is None else params_or_list
        params = _per_prompt("sampling_params", chosen, count, SamplingParams, "SamplingParams")
        return [request_params.clone() for request_params in params]

    def _variables(
        self, chat_template_kwargs: Any, add_prompt: bool, continues: bool
    ) -> dict[str, Any]:
        """Return the chat template's variables. Raises RequestError."""
        _check_switch("add_generation_prompt", add_prompt)
        _check_switch("continue_final_message", continues)
        if continues and add_prompt:
            raise RequestError(
                "continue_final_message=True needs add_generation_prompt=False; set it.",
                "continue_final_message",
            )
        variables = {} if chat_template_kwargs is None else check_kwargs(chat_template_kwargs)
        return {
            "add_generation_prompt": add_prompt,
            "continue_final_message": continues,
            **variables,
        }


class _Call:
    """Call of generate() or chat(), in the thread of its caller.

    show: called with the number of answered prompts and their total.
    """

    def __init__(
        self,
        client: AsyncEngine,
        groups: Sequence[RequestGroup],
        on_progress: Callable[[RequestOutput], None] | None,
        show: Callable[[int, int], None],
    ) -> None:
        self._client = client
        self._groups = groups
        self._on_progress = on_progress
        self._show = show
        self._inbox = Inbox()
        self._open: dict[str, None] = {}
        self._num_finished = 0

    def run(self) -> None:
        """Serve all requests until they end; an exception aborts the unfinished ones."""
        self._show(0, len(self._groups))
        transport = self._client.transport
        assert isinstance(transport, ThreadTransport)
        try:
            requests = [
                (request, partial(self._take, group, index))
                for group in self._groups
                for index, request in enumerate(group.requests)
            ]
            self._open = {request.id: None for request, _ in requests}
            self._client.submit(requests, self._inbox)
            while self._open:
                self._inbox.deliver()
            transport.wait_until_idle()  # for the audits of these answers
        except BaseException:
            transport.drop_audits()
            raise
        finally:
            for request_id in self._open:
                self._client.abort(request_id)
            # The caller may use the engine's own methods next: they need an idle engine.
            transport.wait_until_idle()

    def _take(self, group: RequestGroup, index: int, update: Update) -> None:
        """Apply an update of one completion. Raises the error that ended the request."""
        request_id = group.requests[index].id
        if request_id not in self._open:  # an update from before the abort took effect
            return
        group.push(index, update)
        if group.has_ended(index):
            del self._open[request_id]
            if not isinstance(update, Exception) and update.finish_reason is None:
                self._client.abort(request_id)  # a stop string ended it: the engine knows none
        if self._on_progress is not None:
            self._on_progress(group.output)
        if group.finished:
            self._num_finished += 1
            self._show(self._num_finished, len(self._groups))


def _as_list(prompts: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    """Return one prompt or several as a list; the processor rejects what is no prompt."""
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Sequence):
        return [prompts]  # type: ignore[list-item]
    if prompts and isinstance(prompts[0], Number):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(
            f"{name}={brief(value)} is not allowed; allowed: True or False. Send one of them.",
            name,
        )


def _per_prompt(name: str, value: Any, count: int, kind: type, allowed: str) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise RequestError(
            f"{name} has {len(values)} entries for {count} prompts; send one, or one per prompt.",
            name,
        )
    # A boolean is an int in Python, and no number here.
    for wrong in (v for v in values if not isinstance(v, kind) or isinstance(v, bool)):
        raise RequestError(
            f"{name}={brief(wrong)} is not allowed; allowed: {allowed}, or a list of one per "
            "prompt. Send one of them.",
            name,
        )
    return values
