"""Unsupported fields that would change the answer: they are refused, never silently ignored.

Names are those of OpenAI's, vLLM's and Anthropic's requests. A value that describes the behavior of
this server, such as `use_beam_search: false`, is accepted, and so is every unknown field without
effect.
The tables list fields that an endpoint does not have.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.errors import RequestError
from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS

_BEAMS = "beam search is not supported; leave it out."
_TEMPLATE = "the server's own chat template is used; leave it out."
_TOKENS = "it is not supported; leave it out."
_PENALTIES = "of the penalties, send presence_, frequency_ or repetition_penalty."
_WHOLE = "no conversation is kept here; send all of its messages, and leave it out."
_FUNCTIONS = "it is OpenAI's old form; send tools and tool_choice."
_ELSEWHERE = "this endpoint has no such field; leave it out, or use /v1/chat/completions."
_CHAT_ONLY = "it works with /v1/chat/completions only; leave it out."
Table = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field -> (values that change nothing, remedy)."""

EVERYWHERE: Table = {
    "structural_tag": ((), "send it in structured_outputs, or as response_format."),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1, 1.0), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens; leave it out."),
    "logits_processors": ((), _TOKENS),
    "vllm_xargs": (({},), _TOKENS),
    "prompt_embeds": ((), "prompts are text or token ids; send one of them."),
    "logprob_token_ids": ((), _TOKENS),
    "kv_transfer_params": ((), _TOKENS),
    "repetition_detection": ((), _TOKENS),
    "mm_processor_kwargs": (({},), "this server takes text only; leave it out."),
    # Names of other servers and clients.
    "response_schema": ((), "send response_format with a JSON schema."),
    "format": ((), "send response_format."),
    "reasoning": ((), "send reasoning_effort."),
    "thinking": ((), "send reasoning_effort."),
    "think": ((), "send reasoning_effort."),
    "reasoning_format": (("auto", "deepseek"), "reasoning has a field of its own; leave it out."),
    "separate_reasoning": ((True,), "reasoning has a field of its own; leave it out."),
    "stop_regex": ((), "send stop, whose texts are not patterns."),
    "return_hidden_states": ((False,), _TOKENS),
    "return_logprob": ((False,), "send logprobs."),
    "n_probs": ((0,), "send logprobs."),
    "custom_logit_processor": ((), _TOKENS),
    "sampling_params": ((), "send its fields in the body itself."),
    "options": ((), "send its fields in the body itself."),
    "extra_body": ((), "send its fields in the body itself."),
    "session_params": ((), _WHOLE),
    "thread": ((), _WHOLE),
    "lora_path": ((), _TOKENS),
    "do_sample": ((True,), "send temperature 0 for the likeliest tokens."),
    "num_beams": ((1,), _BEAMS),
    "truncate": ((), "prompts are not cut; shorten the prompt and leave it out."),
    "transforms": (([],), "conversations are not cut; leave it out."),
    "n_keep": ((0,), "prompts are not cut; leave it out."),
    "top_logprobs_num": ((0,), "send logprobs and top_logprobs."),
    "num_ctx": ((), "the context is set when the server starts, by --max-model-len."),
    "max_length": ((), "send max_tokens."),
    "min_length": ((0,), "send min_tokens."),
    "no_repeat_ngram_size": ((0,), _PENALTIES),
    "repeat_last_n": ((-1,), "penalties look at the whole answer; leave it out."),
    "dry_multiplier": ((0, 0.0), _PENALTIES),
    "xtc_probability": ((0, 0.0), "send min_p or top_p."),
    "typical_p": ((1, 1.0), "send min_p or top_p."),
    "top_a": ((0, 0.0), "send min_p or top_p."),
    "tfs_z": ((1, 1.0), "send min_p or top_p."),
    "top_n_sigma": ((-1, -1.0), "send min_p or top_p."),
    "mirostat": ((0,), "send temperature and top_p."),
    "dynatemp_range": ((0, 0.0), "send temperature."),
    "samplers": ((), _TOKENS),
    "safe_prompt": ((False,), "send a message of the system."),
    "search_parameters": ((), "this server does not search; leave it out."),
    "enable_search": ((False,), "this server does not search; leave it out."),
    "moderation": ((), "nothing is moderated here; leave it out."),
}
"""Fields that no endpoint has."""

ELSEWHERE: Table = {
    **{
        name: ((), _ELSEWHERE)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "stop",
            "stop_token_ids",
            "min_tokens",
            "allowed_token_ids",
            "prompt_logprobs",
            "truncate_prompt_tokens",
            "thinking_token_budget",
            "forced_token_ids",
            "scored_from",
            "max_tokens",
            "max_completion_tokens",
            "reasoning_effort",
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_whitespace_pattern",
        )
    },
    "min_p": ((0, 0.0), _ELSEWHERE),
    "n": ((1,), _ELSEWHERE),
    "repetition_penalty": ((1, 1.0), _ELSEWHERE),
    "presence_penalty": ((0, 0.0), _ELSEWHERE),
    "frequency_penalty": ((0, 0.0), _ELSEWHERE),
    "logit_bias": (({},), _ELSEWHERE),
    "bad_words": (([],), _ELSEWHERE),
    "ignore_eos": ((False,), _ELSEWHERE),
    "skip_special_tokens": ((True,), _ELSEWHERE),
    "include_stop_str_in_output": ((False,), _ELSEWHERE),
    "logprobs": ((False,), _ELSEWHERE),
    "top_logprobs": ((0,), _ELSEWHERE),
    "return_token_ids": ((False,), _ELSEWHERE),
    "return_tokens_as_token_ids": ((False,), _ELSEWHERE),
    "return_token_sources": ((False,), _ELSEWHERE),
    "forced_mismatch": (("error",), _ELSEWHERE),
    "include_reasoning": ((True,), _ELSEWHERE),
    "add_generation_prompt": ((True,), _ELSEWHERE),
    "continue_final_message": ((False,), _ELSEWHERE),
}
"""Fields that only some endpoints have; the others refuse them."""

CHAT: Table = {
    "echo": ((False,), "it works with /v1/completions only; leave it out."),
    "add_special_tokens": ((False,), "the chat template writes them; leave it out."),
    "chat_template": ((), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "functions": (([],), _FUNCTIONS),
    "function_call": (("none",), _FUNCTIONS),
    "modalities": ((["text"],), "this server writes text only; leave it out."),
    "audio": ((), "this server writes text only; leave it out."),
    "web_search_options": ((), "this server does not search; leave it out."),
    "verbosity": (("medium",), "ask for it in words, and leave it out (Codex: model_verbosity)."),
    "suffix": (("",), "it belongs to /v1/completions; leave it out."),
    "best_of": ((1,), "completions are not ranked; send n and choose."),
}
RESPONSES: Table = {
    "conversation": ((), "send previous_response_id, or all items as input."),
    "prompt": ((), "no prompts are kept here; send instructions and input."),
    "prompt_template": ((), "no prompts are kept here; send instructions and input."),
    "context_management": ((), "send the items that count."),
    "truncation": (("disabled",), "prompts are not cut; leave it out."),
    "logprobs": ((False,), "send top_logprobs, or include message.output_text.logprobs."),
    "n": ((1,), "a response is one; send several requests."),
    "max_tokens": ((), "send max_output_tokens."),
    "max_completion_tokens": ((), "send max_output_tokens."),
    "reasoning_effort": ((), "send reasoning.effort."),
    "response_format": ((), "send text.format."),
    "messages": ((), "they work with /v1/chat/completions; send input."),
    **{name: CHAT[name] for name in ("chat_template", "documents", "functions", "function_call")},
}
_ALL_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
_ALL_KEPT: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [_ALL_THOUGHTS]})
"""Context management that keeps the whole conversation. Claude Code sends it."""
_SERVER_TOOLS = "this server runs no tools; send tools of your own."
MESSAGES: Table = {
    "compaction": ((), "ask for a summary in a message."),
    "container": ((), _SERVER_TOOLS),
    "mcp_servers": (([],), _SERVER_TOOLS),
    "context_management": (_ALL_KEPT, "send the messages that count."),
    "output_format": ((), "send output_config.format."),
    "n": ((1,), "a message is one; send several requests."),
    "thinking_token_budget": ((), "send thinking.budget_tokens."),
    "stop": ((), "send stop_sequences."),
    "max_completion_tokens": ((), "send max_tokens."),
    "reasoning_effort": ((), "send output_config.effort."),
    "response_format": ((), "send output_config.format."),
    **{name: CHAT[name] for name in ("chat_template", "documents", "functions", "function_call")},
}
COMPLETIONS: Table = {
    "suffix": (("",), "text is only written at the end of a prompt; leave it out."),
    "best_of": ((1,), "completions are not ranked; send n and choose."),
    "tools": (([],), "they work with /v1/chat/completions only; leave them out."),
    "messages": ((), "they work with /v1/chat/completions only; send a prompt."),
    "max_completion_tokens": ((), "send max_tokens."),
    "reasoning_effort": ((), _CHAT_ONLY),
    "chat_template_kwargs": (({},), _CHAT_ONLY),
    "tool_choice": (("none", "auto"), _CHAT_ONLY),
}


ALIASES: Mapping[str, tuple[str, ...]] = {
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "random_seed": ("seed",),
    "sampling_seed": ("seed",),
    "num_return_sequences": ("n",),
    "thinking_budget": ("thinking_token_budget",),
    "thinking_budget_tokens": ("thinking_token_budget",),
    "no_stop_trim": ("include_stop_str_in_output",),
    "regex": ("structured_outputs", "regex"),
    "ebnf": ("structured_outputs", "grammar"),
    "grammar": ("structured_outputs", "grammar"),
    "json_schema": ("structured_outputs", "json"),
    "enable_thinking": ("chat_template_kwargs", "enable_thinking"),
}
"""Names of SGLang, llama.cpp and others -> path of the equivalent field."""


def resolve_aliases(sent: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request with every alias under its own name.

    names: name of a field in ALIASES -> its name in this endpoint. Raises ValueError where an alias
    and its equivalent field are both sent and differ.
    """
    fields = dict(sent)
    for alias in [name for name in sent if name in ALIASES]:
        first, *rest = ALIASES[alias]
        field = names.get(first, first)
        value = fields.pop(alias)
        if not rest:
            _check_equal(fields, field, alias, value, field)
            fields[field] = value
            continue
        (key,) = rest
        inner = fields.get(field, {})
        # A value of another type is refused by the validation of the body.
        if isinstance(inner, Mapping):
            _check_equal(inner, key, alias, value, f"{field}.{key}")
            fields[field] = {**inner, key: value}
    return fields


def _check_equal(fields: Mapping[str, Any], key: str, alias: str, value: Any, field: str) -> None:
    if key in fields and fields[key] != value:
        raise ValueError(
            f"has {alias} and {field}, which mean the same and differ; send {field} alone"
        )


def without_effect(extra: Iterable[str], table: Table) -> list[str]:
    """Return the sorted names of unknown fields that no table refuses: they have no effect."""
    known = {*EVERYWHERE, *ELSEWHERE, *table}
    return sorted(name for name in extra if name not in known)


def refuse_unsupported(extra: Mapping[str, Any], table: Table) -> None:
    """Raise RequestError for the first field whose value would change the answer.

    extra: unknown fields of a body. table: fields that its endpoint refuses.
    """
    for name, value in extra.items():
        entry = table.get(name) or EVERYWHERE.get(name) or ELSEWHERE.get(name)
        if entry is None:
            continue
        harmless, remedy = entry
        # Types must be equal, too: true is not 1.
        if not any(type(value) is type(other) and value == other for other in harmless):
            shown = (
                repr(value)[:MAX_SHOWN_CHARACTERS]
                if isinstance(value, (str, int, float))
                else "..."
            )
            raise RequestError(f"{name}={shown} is not supported: {remedy}", name)
