"""Sampling parameters of a request, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral
from typing import Any, TypeGuard

from lockstep.errors import RequestError, brief
from lockstep.keywords import SAMPLING, explain_foreign_keywords

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
MAX_BAD_WORD_CHARACTERS = 1024
MAX_STOP_IDS = 16
MAX_EOS_IDS = 4
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOKEN_IDS = 2**19  # above all vocabulary sizes; the engine checks ids against its own
MAX_FORCED_TOKENS = 2**20  # above all context lengths; the engine checks its own
FORCED_MISMATCH = ("error", "report")
MAX_CHOICES = 1024
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_REGEX_CHARACTERS = 4096
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MIN_TEMPERATURE = 1e-5  # lower values overflow fp32 in logits / T and are greedy, as in vLLM
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Format that an answer must match: exactly one of the first six fields, with vLLM's names.

    json: JSON schema as a dict, JSON text or a pydantic model.
    regex: regex of the whole answer, in the syntax of Rust's regex crate.
    choice: one of these texts.
    grammar: Lark or GBNF.
    json_object: any JSON object.
    structural_tag: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, free text in
    which a trigger begins a structure.

    disable_any_whitespace: no blanks except those that json.dumps writes (json and json_object
    only).
    whitespace_pattern: regex of the blanks instead (json and json_object only).
    disable_additional_properties: objects have only the properties that the schema names (json
    only).
    disable_fallback: no effect.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check the fields. Raises RequestError."""
        # A pydantic model class is replaced by its schema, as in vLLM.
        if hasattr(self.json, "model_json_schema"):
            object.__setattr__(self, "json", self.json.model_json_schema())
        present = [name for name in STRUCTURES if _is_set(getattr(self, name))]
        if len(present) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(present) or 'nothing'}; allowed: exactly one "
                f"of {', '.join(STRUCTURES)}. Send one.",
                "structured_outputs",
            )
        for name, allowed, fits in (
            ("json", "a JSON schema, as an object or as JSON text", (dict, str, bool)),
            ("regex", "a text", str),
            ("grammar", "a text", str),
            ("json_object", "True", bool),
            ("structural_tag", "an object, or JSON text of one", (dict, str)),
            ("whitespace_pattern", "a text", str),
            ("disable_fallback", "True or False", bool),
            ("disable_any_whitespace", "True or False", bool),
            ("disable_additional_properties", "True or False", bool),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, fits):
                raise self._refusal(name, allowed)
        self._check_options()
        self._check_sizes()

    def _check_options(self) -> None:
        """Raise RequestError for JSON options of an answer that is not JSON."""
        for name, kinds in (
            ("whitespace_pattern", ("json", "json_object")),
            ("disable_any_whitespace", ("json", "json_object")),
            ("disable_additional_properties", ("json",)),
        ):
            if _is_set(getattr(self, name)) and self.kind not in kinds:
                raise self._refusal(name, f"with {' or '.join(kinds)} only")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise self._refusal("whitespace_pattern", "without disable_any_whitespace")

    def _check_sizes(self) -> None:
        if self.choice is not None:
            has_size = is_list(self.choice) and 1 <= len(self.choice) <= MAX_CHOICES
            if not has_size or not _is_list_of(self.choice, str):
                raise self._refusal("choice", f"a list of 1 to {MAX_CHOICES} texts")
        for name, text, limit in (
            ("json", self.json, MAX_GRAMMAR_CHARACTERS),
            ("regex", self.regex, MAX_REGEX_CHARACTERS),
            ("choice", "".join(self.choice or ()), MAX_GRAMMAR_CHARACTERS),
            ("grammar", self.grammar, MAX_GRAMMAR_CHARACTERS),
            ("structural_tag", self.structural_tag, MAX_GRAMMAR_CHARACTERS),
            ("whitespace_pattern", self.whitespace_pattern, MAX_REGEX_CHARACTERS),
        ):
            if isinstance(text, str) and len(text) > limit:
                raise self._refusal(name, f"at most {limit} characters")
            if isinstance(text, str) and not is_unicode(text):
                raise self._refusal(name, "Unicode text without lone surrogates")

    def _refusal(self, name: str, allowed: str) -> RequestError:
        field = self.field_of(name)
        return RequestError(
            f"{field}={brief(getattr(self, name))} is not allowed; allowed: {allowed}. "
            "Choose an allowed value.",
            field,
        )

    @classmethod
    def read(cls, sent: Mapping[str, Any]) -> "StructuredOutputsParams":
        """Return the parameters of a dict of fields. Raises RequestError."""
        known = [f.name for f in fields(cls)]
        for name in sent:
            if name not in known:
                raise RequestError(
                    f"structured_outputs has {brief(name)}; allowed: {', '.join(known)}. Remove "
                    "it.",
                    "structured_outputs",
                )
        return cls(**sent)

    @property
    def kind(self) -> str:
        """Return the name of the structure that is set."""
        return next(name for name in STRUCTURES if _is_set(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """Return the fields that were set, as JSON values."""
        known = [f.name for f in fields(StructuredOutputsParams)]
        return {name: getattr(self, name) for name in known if _is_set(getattr(self, name))}

    @property
    def is_client_grammar(self) -> bool:
        """Return whether a client wrote the grammar itself."""
        return self.kind == "grammar"

    @property
    def json_after(self) -> tuple[str, ...] | None:
        """Return () if the whole answer is JSON, None otherwise.

        Subclasses return the texts that introduce JSON in an answer.
        """
        return () if self.kind in ("json", "json_object") else None

    @property
    def field(self) -> str:
        """Return the request field of the structure, for errors."""
        return self.field_of(self.kind)

    def field_of(self, name: str) -> str:
        """Return the request field that sets one of these fields, for errors."""
        return f"structured_outputs.{name}"


class RequestOutputKind(Enum):
    """Content of an output of AsyncLLM.generate: all text so far, new text, or the final answer."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@explain_foreign_keywords(SAMPLING)
@dataclass
class SamplingParams:
    """Sampling parameters of one request.

    temperature: 0 (or below 1e-5) is greedy.
    top_k, top_p: 0 or -1, and 1, turn them off.
    bad_words: strings (`bad_words_ids` once tokenized).
    seed: None chooses one, which the output returns.
    logprobs: N: the chosen token and the N most likely ones at every generated position, of the raw
    logits. prompt_logprobs: the same for the prompt.
    structured_outputs: format of the answer; a dict of its fields is accepted.
    truncate_prompt_tokens: N: keep the last N tokens of the prompt; -1: the most that max_tokens
    allows.
    thinking_token_budget: N: at most N reasoning tokens before the closing tag; -1: unlimited.
    forced_token_ids: tokens with which the answer begins. They are computed as generated tokens
    are, so tokens and log-probabilities are those of the request that generated them itself.
    forced_mismatch: "error" ends the answer with an error before the first forced token that the
    model would not have chosen; "report" goes on. metrics.forced_mismatch of the output has the
    first one.
    scored_from: N, with prompt_logprobs: the prompt's tokens from index N on are an answer to its
    first N tokens. They are computed as generated tokens are, and their log-probabilities are those
    that their generation returned.
    prediction: a text, or token ids, that the answer will resemble: drafts of the drafter
    "prediction". No answer depends on it.
    output_kind: outputs of AsyncLLM; LLM returns whole answers.

    Values are checked when the object is created, and again when a request is made from it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    forced_token_ids: Sequence[int] | None = None
    forced_mismatch: str = "error"
    scored_from: int | None = None
    prediction: str | Sequence[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n", 1, 128),
            ("temperature", 0.0, 100.0),
            ("top_p", 1e-9, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("top_k", -1, 2**31 - 1),
            ("min_tokens", 0, 2**31 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), 2**63 - 1),
            ("truncate_prompt_tokens", -1, 2**31 - 1),
            ("thinking_token_budget", -1, 2**31 - 1),
            ("scored_from", 1, 2**31 - 1),
        ):
            self._check_range(name, low, high)
        # Sizes first: no later check reads an unbounded list.
        self._check_sizes()
        self._check_kinds()
        self._check_entries()
        self._check_structure()

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a checked copy with these changes. Raises RequestError."""
        values = {name: getattr(self, name) for name in self.names()}
        return type(self)(**{**values, **changes})

    def detached(self) -> "SamplingParams":
        """Return a checked copy that shares no list or dict with its caller.

        Its numbers, texts, lists and dicts are of Python's own types, which can be pickled.
        """
        return SamplingParams(**{name: _detached(getattr(self, name)) for name in self.names()})

    def without_structured_outputs(self) -> "SamplingParams":
        """Return the parameters for a process that gets the grammar apart from them.

        A schema may have objects that cannot be pickled, such as a pydantic model.
        """
        return self if self.structured_outputs is None else self.clone(structured_outputs=None)

    def to_json(self) -> dict[str, Any]:
        """Return all fields but output_kind as JSON values."""
        values = {name: getattr(self, name) for name in self.names() if name != "output_kind"}
        structure = self.structured_outputs
        return {**values, "structured_outputs": None if structure is None else structure.to_json()}

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        default = type(self).__dataclass_fields__[name].default
        # max_tokens has a default, and None means that only the context limits the answer.
        if value is None and (default is None or name == "max_tokens"):
            return
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits_type = isinstance(default, float) or isinstance(value, int)
        if not (is_number and fits_type and low <= value <= high):
            kind = "a number" if isinstance(low, float) else "a whole number"
            raise self._refusal(name, f"{kind} from {low} to {high}")

    def _check_sizes(self) -> None:
        """Check the sizes of collections before their entries are read."""
        for name, limit in (
            ("stop", MAX_STOP_STRINGS),
            ("stop_token_ids", MAX_STOP_IDS),
            ("bad_words", MAX_BAD_WORDS),
            ("bad_words_ids", MAX_BAD_WORDS),
            ("allowed_token_ids", MAX_TOKEN_IDS),
            ("logit_bias", MAX_TOKEN_IDS),
            ("forced_token_ids", MAX_FORCED_TOKENS),
            ("prediction", MAX_FORCED_TOKENS),
        ):
            value = getattr(self, name)
            if (is_list(value) or isinstance(value, Mapping)) and len(value) > limit:
                raise RequestError(
                    f"{name} has {len(value)} entries; allowed: at most {limit}. Send fewer.", name
                )

    def _check_kinds(self) -> None:
        for name, allowed, fits in (
            ("logit_bias", "a dict of token ids to finite numbers up to 1e30", _is_bias),
            ("allowed_token_ids", "a list of token ids", is_ids),
            ("stop_token_ids", "a list of token ids", is_ids),
            ("forced_token_ids", "a list of token ids", is_ids),
            ("prediction", "a text, or a list of token ids", lambda v: type(v) is str or is_ids(v)),
            ("bad_words", "a list of strings", lambda v: _is_list_of(v, str)),
            ("bad_words_ids", "a list of lists of token ids", _is_list_of_ids),
            ("stop", "a string or a list of strings", _is_stop),
        ):
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise self._refusal(name, allowed)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise self._refusal(name, "True or False")
        if self.forced_mismatch not in FORCED_MISMATCH:
            raise self._refusal("forced_mismatch", " or ".join(FORCED_MISMATCH))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise self._refusal("output_kind", "a RequestOutputKind")

    def _refusal(self, name: str, allowed: str) -> RequestError:
        return RequestError(
            f"{name}={brief(getattr(self, name))} is not allowed; allowed: {allowed}. "
            "Choose an allowed value, or leave it out.",
            name,
        )

    def _check_entries(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens.",
                "min_tokens",
            )
        num_forced = len(self.forced_token_ids or ())
        if self.max_tokens is not None and num_forced > self.max_tokens:
            raise RequestError(
                f"forced_token_ids has {num_forced} tokens; allowed: at most "
                f"max_tokens={self.max_tokens}. Raise max_tokens or force fewer tokens.",
                "forced_token_ids",
            )
        if self.truncate_prompt_tokens == 0:
            raise self._refusal("truncate_prompt_tokens", "-1, or a whole number from 1")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids=[] leaves no token to emit; name at least one or leave it out.",
                "allowed_token_ids",
            )
        if "" in self.stop_strings:
            raise RequestError('stop="" would end every answer; leave it out.', "stop")
        for name, words, kind, limit in (
            ("stop", self.stop_strings, "characters", MAX_STOP_CHARACTERS),
            ("bad_words", self.bad_words, "characters", MAX_BAD_WORD_CHARACTERS),
            ("bad_words", self.bad_words_ids, "tokens", MAX_BAD_WORD_TOKENS),
        ):
            # An empty list of ids would ban every token, so that only strings may be empty here.
            for word in words or ():
                if len(word) > limit or (kind == "tokens" and not len(word)):
                    raise RequestError(
                        f"{name} entry of {len(word)} {kind} is not allowed; allowed: 1 to {limit} "
                        f"{kind}. Shorten it or leave it out.",
                        name,
                    )

    def _check_structure(self) -> None:
        """Convert a dict to StructuredOutputsParams; refuse options that conflict with the
        grammar's end."""
        structure = self.structured_outputs
        if structure is None:
            return
        if isinstance(structure, Mapping):
            self.structured_outputs = StructuredOutputsParams.read(structure)
        elif not isinstance(structure, StructuredOutputsParams):
            raise self._refusal("structured_outputs", "StructuredOutputsParams")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"{name}={getattr(self, name)} is not allowed with structured_outputs, which "
                    "define where the answer may end. Remove one of them.",
                    name,
                )

    @property
    def greedy(self) -> bool:
        """Return whether the target token is the argmax."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all fields."""
        return tuple(f.name for f in fields(cls))


def _detached(value: Any) -> Any:
    """Return a copy of a field's value in Python's own types; other objects are returned."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {int(key): _detached(entry) for key, entry in value.items()}
    if is_list(value):
        # A list of ids may have half a million entries.
        has_ints = set(map(type, value)) <= {int}
        return list(value) if has_ints else [_detached(entry) for entry in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _is_set(value: object) -> bool:
    """Return whether a field is set."""
    return value is not None and value is not False


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_ids(value: object) -> bool:
    """Return whether a value is a sequence of integers."""
    return _is_list_of(value, Integral)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list, a tuple or the like, but not text, a set or an array."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _is_list_of(value: object, kind: type) -> bool:
    if not is_list(value):
        return False
    return all(issubclass(entry, kind) and entry is not bool for entry in set(map(type, value)))


def _is_list_of_ids(value: Any) -> bool:
    """Return whether a value is a list of lists of ids; too long lists are checked elsewhere."""
    if not _is_list_of(value, Sequence):
        return False
    # The message about the length is clearer than one about the type.
    return all(len(ids) > MAX_BAD_WORD_TOKENS or is_ids(ids) for ids in value)


def _is_bias(value: object) -> bool:
    if not isinstance(value, Mapping) or not is_ids(list(value)):
        return False
    return all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and -1e30 <= v <= 1e30
        for v in value.values()
    )


def _is_stop(value: object) -> bool:
    return isinstance(value, str) or _is_list_of(value, str)
