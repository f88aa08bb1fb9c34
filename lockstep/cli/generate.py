"""lockstep generate: complete a prompt once, or without and with drafts for a comparison."""

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

MAX_STDIN_CHARACTERS = 1 << 26
"""Maximum characters of a prompt on stdin, beyond the context of any model."""


@engine_options
@text_options
@sampling_options
def generate(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="the prompt; stdin if piped, or a sample question"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="apply the chat template to the prompt")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="run without and with drafts; compare speed and tokens"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
    text: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete a prompt, and print the text while it is generated.

    Without a prompt, a sample question is shown and answered. Text goes to stdout, notes to stderr.
    """
    _refuse_prompt_as_model(settings["model"])
    # Reading from a terminal would wait for the user.
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_stdin()
    if compare:
        _compare(prompt, chat, json, settings | text, sampling)
        return
    llm = load(settings | text, quiet=json)
    params = llm.processor.default_params(**{"max_tokens": 256, **sampling})
    num_shown = 0

    def stream(output: RequestOutput) -> None:
        nonlocal num_shown
        text_so_far = output.outputs[0].text
        print_text(text_so_far[num_shown:])
        num_shown = len(text_so_far)

    on_progress = None if json else stream
    if not json:
        _note_question(prompt)
    (output,) = llm.generate(
        _prompt(llm, prompt, chat), params, on_progress=on_progress, use_tqdm=False
    )
    if json:
        print_json(_result(output, prompt) | {"system_fingerprint": llm.engine.fingerprint})
    else:
        print_text("\n")
        note(_summary(output))
    if output.outputs[0].error:
        note(output.outputs[0].error, "red")
        raise typer.Exit(1)


def _refuse_prompt_as_model(model: str | None) -> None:
    """Raise ConfigError if the model argument contains spaces, like a prompt."""
    if model is not None and any(char.isspace() for char in model) and not exists(model):
        raise ConfigError(
            f"model={brief(model)} is not allowed; allowed: an existing folder or a hub id. Write "
            "a prompt after -p, as in: lockstep generate MODEL -p PROMPT."
        )


def _question() -> str:
    """Return the sample question: the last user message of the first example conversation."""
    from lockstep.example_prompts import CONVERSATIONS

    turns, _ = CONVERSATIONS[0]
    return turns[-1]


def _note_question(prompt: str | None) -> None:
    """Show the sample question and its tools on stderr, unless the user wrote a prompt."""
    if prompt is None:
        from lockstep.example_prompts import CONVERSATIONS

        _, tools = CONVERSATIONS[0]
        names = ", ".join(tool["function"]["name"] for tool in tools)
        note(f"question: {_question()} (a sample, with the tools {names}; write your own after -p)")


def _read_stdin() -> str | None:
    """Return the text on stdin, or None if it is empty. Raises ConfigError if it is too long."""
    text = sys.stdin.read(MAX_STDIN_CHARACTERS + 1)
    if len(text) > MAX_STDIN_CHARACTERS:
        raise ConfigError(
            f"the prompt on stdin has more than {MAX_STDIN_CHARACTERS} characters, the maximum. "
            "Shorten it."
        )
    return text or None


def _prompt(llm: "LLM", prompt: str | None, chat: bool) -> dict[str, Any]:
    if prompt is None:
        from lockstep.example_prompts import short_prompts

        return {"prompt_token_ids": short_prompts(llm)[0]}
    if chat:
        message = {"role": "user", "content": prompt}
        return {"prompt_token_ids": llm.processor.render([message])}
    return {"prompt": prompt}


def _result(output: RequestOutput, prompt: str | None) -> dict[str, Any]:
    completion = output.outputs[0]
    metrics = output.metrics
    return {
        "prompt": _question() if prompt is None else prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "seed": completion.seed,
        "prompt_tokens": len(output.prompt_token_ids),
        "acceptance_length": round(metrics.acceptance_length, 3),
        "metrics": asdict(metrics),
    }


def _summary(output: RequestOutput) -> str:
    done = output.outputs[0]
    metrics = output.metrics
    start = metrics.first_token_time or 0.0
    end = metrics.finished_time or 0.0
    speed = (len(done.token_ids) - 1) / (end - start) if end > start else 0.0
    return (
        f"{len(done.token_ids)} tokens, {speed:.0f} tokens/s, acceptance length "
        f"{metrics.acceptance_length:.2f}, finish reason {done.finish_reason}, seed {done.seed}"
    )


def _compare(
    prompt: str | None, chat: bool, json: bool, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    from lockstep.bench import compare
    from lockstep.engine_args import resolve_auto_drafter

    resolved = resolve_auto_drafter({**settings, "enable_prefix_caching": False})
    if resolved["speculative_config"] is None:
        raise ConfigError(
            "--compare needs a drafter, but the checkpoint has no draft module, or "
            "--speculative-config is none. Name one, e.g. "
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'."""
        )
    plain = load({**resolved, "speculative_config": None}, quiet=json)
    drafted = load(resolved, quiet=json)
    params = plain.processor.default_params(**{"max_tokens": 256, "seed": 0, **sampling})
    if not json:
        _note_question(prompt)
    comparison, outputs = compare(plain, drafted, [_prompt(plain, prompt, chat)], params)
    agree = comparison.disagreement is None
    if json:
        result = _result(outputs[0], prompt)
        print_json(asdict(comparison) | {"agree": agree, "speedup": comparison.speedup} | result)
    else:
        print_text(outputs[0].outputs[0].text + "\n")
        _show(comparison, agree)
    raise typer.Exit(0 if agree else 1)


def _show(comparison: "Comparison", agree: bool) -> None:
    table = Table("", "tokens/s", "ms per step", "acceptance length")
    for name, figures in (
        ("without drafts", comparison.plain),
        ("with drafts", comparison.drafted),
    ):
        speed = f"{figures.decode_tokens_per_s:.1f}"
        table.add_row(name, speed, f"{figures.ms_per_step:.2f}", f"{figures.acceptance_length:.2f}")
    console = Console(highlight=False)
    console.print(table)
    verdict = "[green]the tokens agree[/green]" if agree else "[red]the tokens differ[/red]"
    console.print(
        f"{comparison.speedup:.2f} times as fast; {comparison.plain.tokens} tokens, {verdict}"
    )
