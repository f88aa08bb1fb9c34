"""lockstep generate: one answer, or the same answer twice: without and with drafts."""

import sys
from dataclasses import asdict
from os.path import exists
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.cli.options import engine_options, sampling_options, text_options
from lockstep.cli.show import load, note, print_json, print_text
from lockstep.errors import ConfigError, brief
from lockstep.outputs import RequestOutput

if TYPE_CHECKING:
    from lockstep.bench import Comparison
    from lockstep.llm import LLM

MOST_PIPED = 1 << 26
"""Characters of a prompt on stdin: more than any model's context holds."""


@engine_options
@text_options
@sampling_options
def generate(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="the prompt; stdin if piped, or a sample question"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask it as a chat message")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="without and with drafts: speed, and that both agree")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
    text: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete a prompt, printing the text as it comes.

    Without a prompt, a sample question is shown and answered. Text goes to stdout, notes to stderr.
    """
    _refuse_prompt_as_model(settings["model"])
    if prompt is None and not sys.stdin.isatty():
        prompt = _piped()
    if compare:
        _compare(prompt, chat, json, settings | text, sampling)
        return
    llm = load(settings | text, quiet=json)
    params = llm.processor.default_params(**{"max_tokens": 256, **sampling})
    shown = 0

    def stream(output: RequestOutput) -> None:
        nonlocal shown
        whole = output.outputs[0].text
        print_text(whole[shown:])
        shown = len(whole)

    see = None if json else stream
    if not json:
        _note_question(prompt)
    (output,) = llm.generate(_prompt(llm, prompt, chat), params, on_progress=see, use_tqdm=False)
    if json:
        print_json(_answer(output, prompt) | {"system_fingerprint": llm.engine.fingerprint})
    else:
        print_text("\n")
        note(_closing(output))
    if output.outputs[0].error:
        note(output.outputs[0].error, "red")
        raise typer.Exit(1)


def _refuse_prompt_as_model(model: str | None) -> None:
    """Raise ConfigError where the model argument can only be meant as a prompt."""
    if model is not None and any(char.isspace() for char in model) and not exists(model):
        raise ConfigError(
            f"model={brief(model)} is not allowed; allowed: a folder or a hub id, and neither is "
            "there under this name. Write a prompt after -p, as in: lockstep generate MODEL "
            "-p PROMPT."
        )


def _question() -> str:
    """Return the sample question: the last user message of the first example conversation."""
    from lockstep.example_prompts import CONVERSATIONS

    turns, _ = CONVERSATIONS[0]
    return turns[-1]


def _note_question(prompt: str | None) -> None:
    """Show the sample question and its tools on stderr; a prompt of the user's is not repeated."""
    if prompt is None:
        from lockstep.example_prompts import CONVERSATIONS

        _, tools = CONVERSATIONS[0]
        names = ", ".join(tool["function"]["name"] for tool in tools)
        note(f"question: {_question()} (a sample, with the tools {names}; write your own after -p)")


def _piped() -> str | None:
    """What is piped into the command; None if it is nothing. Raises ConfigError."""
    found = sys.stdin.read(MOST_PIPED + 1)
    if len(found) > MOST_PIPED:
        raise ConfigError(
            f"the prompt on stdin has more than {MOST_PIPED} characters; allowed: at most so many. "
            "Shorten it."
        )
    return found or None


def _prompt(llm: "LLM", prompt: str | None, chat: bool) -> dict[str, Any]:
    if prompt is None:
        from lockstep.example_prompts import short_prompts

        return {"prompt_token_ids": short_prompts(llm)[0]}
    if chat:
        message = {"role": "user", "content": prompt}
        return {"prompt_token_ids": llm.processor.render([message])}
    return {"prompt": prompt}


def _answer(output: RequestOutput, prompt: str | None) -> dict[str, Any]:
    done = output.outputs[0]
    metrics = output.metrics
    return {
        "prompt": _question() if prompt is None else prompt,
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "error": done.error,
        "seed": done.seed,
        "prompt_tokens": len(output.prompt_token_ids),
        "acceptance_length": round(metrics.acceptance_length, 3),
        "metrics": asdict(metrics),
    }


def _closing(output: RequestOutput) -> str:
    done = output.outputs[0]
    m = output.metrics
    begin = m.first_token_time or 0.0
    end = m.finished_time or 0.0
    speed = (len(done.token_ids) - 1) / (end - begin) if end > begin else 0.0
    return (
        f"{len(done.token_ids)} tokens, {speed:.0f} tokens/s, acceptance length "
        f"{m.acceptance_length:.2f}, finish reason {done.finish_reason}, seed {done.seed}"
    )


def _compare(
    prompt: str | None, chat: bool, json: bool, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    from lockstep.bench import compare
    from lockstep.engine_args import resolve_auto_drafter

    settled = resolve_auto_drafter({**settings, "enable_prefix_caching": False})
    if settled["speculative_config"] is None:
        raise ConfigError(
            "--compare needs drafts, and there are none: the checkpoint has no draft module, or "
            "--speculative-config says none. Name a drafter, e.g. "
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'."""
        )
    plain = load({**settled, "speculative_config": None}, quiet=json)
    drafted = load(settled, quiet=json)
    params = plain.processor.default_params(**{"max_tokens": 256, "seed": 0, **sampling})
    if not json:
        _note_question(prompt)
    found, outputs = compare(plain, drafted, [_prompt(plain, prompt, chat)], params)
    agree = found.disagreement is None
    if json:
        answer = _answer(outputs[0], prompt)
        print_json(asdict(found) | {"agree": agree, "speedup": found.speedup} | answer)
    else:
        print_text(outputs[0].outputs[0].text + "\n")
        _show(found, agree)
    raise typer.Exit(0 if agree else 1)


def _show(found: "Comparison", agree: bool) -> None:
    table = Table("", "tokens/s", "ms per step", "acceptance length")
    for name, f in (("without drafts", found.plain), ("with drafts", found.drafted)):
        speed = f"{f.decode_tokens_per_s:.1f}"
        table.add_row(name, speed, f"{f.ms_per_step:.2f}", f"{f.acceptance_length:.2f}")
    console = Console(highlight=False)
    console.print(table)
    verdict = "[green]the tokens agree[/green]" if agree else "[red]the tokens differ[/red]"
    console.print(f"{found.speedup:.2f} times as fast; {found.plain.tokens} tokens, {verdict}")
