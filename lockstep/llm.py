"""LLM: the engine for programs that have all their prompts at hand."""

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from numbers import Number
from typing import Any

from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine, Facts
from lockstep.errors import RequestError, brief
from lockstep.outputs import RequestOutput
from lockstep.progress import Progress, progress_bar
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.text.processor import CompletionText, Processor, Prompt
from lockstep.text.settings import TextSettings
from lockstep.text.template import check_kwargs
from lockstep.text.tokenizer import Tokenizer
from lockstep.text.tool_grammar import ToolChoice


def split_settings(settings: dict[str, Any]) -> tuple[TextSettings, dict[str, Any]]:
    """Those of the text side among an LLM's settings, and all others."""
    names = [one.name for one in fields(TextSettings) if one.name in settings]
    text = TextSettings(**{name: settings[name] for name in names})
    return text, {name: value for name, value in settings.items() if name not in names}


def processor_of(facts: Facts, text: TextSettings) -> Processor:
    """The text side of an engine: the tokenizer and the chat template of its checkpoint."""
    plan = facts.plan
    tokenizer = None if facts.config.skip_tokenizer_init else Tokenizer(plan.model_path)
    return Processor.for_model(
        tokenizer, plan.model_path, plan.max_model_len, text, facts.vocab_size
    )


def _unseen(what: str, done: int, of: int) -> None:
    """Progress that nobody watches."""


class LLM:
    """A model and its tokenizer.

        llm = LLM()
        print(llm.generate("def main(", SamplingParams(max_tokens=20))[0].outputs[0].text)

    Settings are EngineConfig's and TextSettings'. `progress(what, done, of)` is called while
    loading, in bytes, and while warming up, in shapes.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Progress = _unseen,
        **settings: Any,
    ) -> None:
        text, own = split_settings(settings)
        self._stand_over(Engine(EngineConfig.read(model=model, **own), progress), text)

    @classmethod
    def over(cls, engine: Engine) -> "LLM":
        """An LLM around an engine that stands."""
        llm = cls.__new__(cls)
        llm._stand_over(engine, TextSettings())
        return llm

    def _stand_over(self, engine: Engine, text: TextSettings) -> None:
        """Takes the engine, and reads the tokenizer and chat template of its checkpoint."""
        self.engine = engine
        self.processor = processor_of(engine.facts, text)
        self.tokenizer = self.processor.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts (text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}).

        Outputs come in the order of the prompts. `on_progress` sees each output as it grows.
        use_tqdm: where stderr is a terminal, a bar there counts the prompts that are answered.
        Raises RequestError naming the parameter where a request is wrong; then none is run.
        """
        many = _as_list(prompts)
        params = _params(sampling_params, len(many))
        return self._answer(many, params, priority, on_progress, use_tqdm)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] = 0,
        on_progress: Callable[[RequestOutput], None] | None = None,
        use_tqdm: bool = True,
        shown: Collection[int] = (),
    ) -> list[RequestOutput]:
        """Answers prompts, each with its parameters. shown: special tokens that give text."""
        if not isinstance(use_tqdm, bool):
            raise RequestError(
                f"use_tqdm={brief(use_tqdm)} is not allowed; allowed: True or False. Send one of "
                "them.",
                "use_tqdm",
            )
        ranks = _per_prompt("priority", priority, len(prompts), int, "a whole number")
        jobs = [
            _Job(self.processor, prompt, p, rank, shown)
            for prompt, p, rank in zip(prompts, params, ranks, strict=True)
        ]
        owner = {request.id: job for job in jobs for request in job.requests}
        with progress_bar() if use_tqdm else nullcontext(_unseen) as show:
            done = set[str]()
            show("answers", 0, len(jobs))

            def update(request: Request) -> None:
                job = owner[request.id]
                if job.push(request):
                    self.engine.abort(request.id)
                if on_progress:
                    on_progress(job.output)
                if job.output.finished:
                    done.add(job.output.request_id)
                    show("answers", len(done), len(jobs))

            self.engine.run([r for job in jobs for r in job.requests], update)
        return [job.output for job in jobs]

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered with the checkpoint's chat template.

        tools, tool_choice and parallel_tool_calls mean what they do over HTTP; the text holds the
        calls as the model writes them, tags that are special tokens too. Raises RequestError.
        """
        many = isinstance(messages, list) and messages and isinstance(messages[0], list)
        several: list[Any] = list(messages) if many else [messages]
        extra = check_kwargs({} if chat_template_kwargs is None else chat_template_kwargs)
        if not isinstance(parallel_tool_calls, bool):
            raise RequestError(
                f"parallel_tool_calls={brief(parallel_tool_calls)} is not allowed; allowed: True "
                "or False. Send one of them.",
                "parallel_tool_calls",
            )
        choice = ToolChoice.read(tool_choice)
        processor = self.processor
        tools = None if choice.mode == "none" else tools
        given = _params(sampling_params, len(several))
        rendered = [processor.conversation(m, tools=tools, **extra) for m in several]
        params = [
            replace(
                own,
                structured_outputs=processor.form(
                    own.structured_outputs, tools, tool_choice, parallel_tool_calls
                ),
            )
            for own in given
        ]
        return self._answer(rendered, params, shown=processor.marker_ids(tools), **options)


class _Job:
    """One prompt: its requests (n of them) and what has come of them."""

    def __init__(
        self,
        processor: Processor,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        shown: Collection[int],
    ) -> None:
        self.requests = processor.requests(uuid.uuid4().hex, prompt, params, priority=priority)
        now = time.monotonic()
        for request in self.requests:
            request.metrics.arrival_time = now
        self.texts: dict[str, CompletionText] = {
            r.id: processor.completion(r, i, shown) for i, r in enumerate(self.requests)
        }
        self.seen = dict.fromkeys(self.texts, 0)
        first = self.requests[0]
        self.output = RequestOutput(
            request_id=first.id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[text.output for text in self.texts.values()],
            metrics=first.metrics,
        )

    def push(self, request: Request) -> bool:
        """Takes the request's new tokens; True if it ended on a stop string: abort it."""
        text = self.texts[request.id]
        seen = self.seen[request.id]
        if text.finished:
            return False
        new = request.output_token_ids[seen:]
        self.seen[request.id] += len(new)
        scores = request.logprobs[seen:] if request.params.logprobs is not None else None
        if request.params.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None, *request.prompt_logprobs]
        text.push(new, scores, request.finish_reason, request.stop_reason)
        text.output.error = request.error
        self.output.finished = all(t.finished for t in self.texts.values())
        return text.finished and request.finish_reason is None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; what is no prompt at all is left for the processor."""
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], Number):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The sampling parameters of each of so many prompts."""
    chosen = SamplingParams() if given is None else given
    return _per_prompt("sampling_params", chosen, count, SamplingParams, "SamplingParams")


def _per_prompt(name: str, value: Any, count: int, kind: type, allowed: str) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise RequestError(
            f"{name} has {len(values)} entries for {count} prompts; send one, or one per prompt.",
            name,
        )
    for wrong in (v for v in values if not isinstance(v, kind)):
        raise RequestError(
            f"{name}={brief(wrong)} is not allowed; allowed: {allowed}, or a list of one per "
            "prompt. Send one of them.",
            name,
        )
    return values
