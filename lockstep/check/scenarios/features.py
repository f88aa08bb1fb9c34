"""Features of scenarios, their values, and which values exclude each other.

A covering array (covering.py) combines the values of this table. The generator expresses each value
in a scenario. A pair of values is met if one request of a scenario had both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.check import oracle_drafter
from lockstep.check.companions import ATTENTION, MIXTURE, NUMERICS
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.judges.plain_runs import SERVED

FAILURE = "failure"
Event = tuple[str, str]
"""Feature and value."""


class Level(Enum):
    """Part of a scenario that has one value of a feature: its engine, its limits, or a request."""

    ENGINE = "engine"
    LIMITS = "limits"
    REQUEST = "request"


@dataclass(frozen=True)
class Feature:
    """Feature of a scenario with its values, the usual value first.

    expressed: how a scenario expresses it. state: it decides which pages, snapshots or recurrent
    states a step reads or writes.
    """

    name: str
    level: Level
    values: tuple[str, ...]
    expressed: str
    state: bool = False


@dataclass(frozen=True)
class Exclusion:
    """Two features whose values no request can have together, or would not exercise.

    first, second: a feature's name and its values.
    """

    first: tuple[str, tuple[str, ...]]
    second: tuple[str, tuple[str, ...]]
    reason: str


def _engine(name: str, values: Sequence[str], expressed: str, state: bool = False) -> Feature:
    return Feature(name, Level.ENGINE, tuple(values), expressed, state)


def _limits(name: str, values: Sequence[str], expressed: str, state: bool = False) -> Feature:
    return Feature(name, Level.LIMITS, tuple(values), expressed, state)


def _request(name: str, values: Sequence[str], expressed: str, state: bool = False) -> Feature:
    return Feature(name, Level.REQUEST, tuple(values), expressed, state)


NO_STATE = "no state"
"""Value of "snapshots" for models without recurrent layers."""

FEATURES: tuple[Feature, ...] = (
    _engine("model", (SERVED, ATTENTION, MIXTURE), "checkpoint of the engine"),
    _engine("numerics", tuple(NUMERICS), "formats of weights, cache, state and activations"),
    _engine("drafter", (NO_DRAFTER,), "speculative_config"),
    _engine("drafts", ("0", "1", "2", "3", "7", "15"), "drafts per step", state=True),
    _engine("draft counts", ("fixed", "changing"), "the number of drafts varies per step"),
    _engine("answers kept", ("many", "few"), "size of the suffix drafter's circular buffer"),
    _engine("row buckets", ("every", "gaps", "one"), "numbers of rows that steps are padded to"),
    _engine("steps in flight", ("1", "2"), "steps launched ahead of their results", state=True),
    _engine("graph", ("none",), "cuda_graph_mode"),
    _engine("adapters", ("no", "yes"), "lora_modules"),
    _limits("rows", ("all", "3", "2"), "max_num_seqs"),
    _limits("chunk", ("whole", "192", "127", "65", "64"), "max_num_batched_tokens", state=True),
    _limits("pages", ("all", "one spare", "least"), "pages of the cache", state=True),
    _limits(
        "snapshots", ("16", "2", "1", "0", NO_STATE), "snapshots of recurrent state", state=True
    ),
    _limits("host tier", ("none", "one", "few", "many"), "pages of host memory", state=True),
    _limits("host slabs", ("one", "several"), "allocations of host memory"),
    _limits("prefix cache", ("on", "off"), "enable_prefix_caching", state=True),
    _limits("preempt every", ("never", "3", "1"), "schedules between preemptions", state=True),
    _limits("policy", ("fcfs", "priority"), "scheduling_policy"),
    _limits(
        FAILURE,
        ("none", "before a step", "after a launch", "at the results"),
        "the engine raises once, recovers, and goes on",
        state=True,
    ),
    _request("temperature", ("0", "1e-4", "1", "3", "100"), "temperature"),
    _request("top_k", ("off", "1", "few", "40"), "top_k"),
    _request("top_p", ("off", "low", "high"), "top_p"),
    _request("min_p", ("off", "on"), "min_p"),
    _request("repetition", ("off", "below 1", "above 1"), "repetition_penalty"),
    _request("count penalties", ("off", "positive", "negative"), "presence_ and frequency_penalty"),
    _request("bias", ("off", "on"), "logit_bias of the answer's tokens and of others"),
    _request("allowed ids", ("all", "many", "few"), "allowed_token_ids"),
    _request("bad words", ("off", "ids", "text"), "words of the plain answer"),
    _request("min_tokens", ("0", "some"), "min_tokens near the place of a stop"),
    _request("stop", ("length", "ids", "end of sequence", "string"), "why the answer ends"),
    _request("n", ("1", "2", "3"), "completions"),
    _request("logprobs", ("off", "0", "3"), "logprobs"),
    _request("prompt logprobs", ("off", "0", "3"), "prompt_logprobs"),
    _request("grammar", ("off", "choice", "regex", "json"), "structured_outputs"),
    _request(
        "prompt",
        ("ids", "template", "thought cut", "thought ends"),
        "token ids, or a chat template; the answer's thought ends by its budget or by a bias",
    ),
    _request(
        "prompt size",
        ("part of a page", "1", "64n - 1", "64n", "64n + 1", "window to a page end", "3 splits"),
        "tokens of the prompt",
        state=True,
    ),
    _request(
        "answer size",
        ("few", "1", "past a page end", "past 64", "cut"),
        "tokens of the answer; max_model_len may cut it",
        state=True,
    ),
    _request(
        "prefix",
        ("new", "on device", "in host memory", "generated", "without a snapshot"),
        "prompts that run first; their pages may be evicted before the request comes",
        state=True,
    ),
    _request(
        "preempted",
        ("never", "waiting", "in the prompt", "after the prompt", "in the answer", "twice"),
        "the row moves to host memory in this phase",
        state=True,
    ),
    _request(
        "return",
        ("at once", "another row", "later"),
        "where and when a preempted request gets a row",
        state=True,
    ),
    _request(
        "aborted",
        ("never", "waiting", "in the prompt", "in the answer", "in flight", "in host memory"),
        "the request is aborted in this phase",
        state=True,
    ),
    _request("id", ("once", "again"), "a second request has the id of the ended one"),
    _request("priority", ("0", "urgent", "late"), "priority"),
    _request("salt", ("none", "own"), "cache_salt"),
    _request("adapter", ("none", "first", "second"), "LoRA adapter"),
    _request("forced", ("none", "some", "all"), "forced_token_ids from the plain answer"),
    _request("speculate", ("yes", "no"), "whether the request's drafts are verified"),
    _request("seed", ("small", "64 bits", "negative"), "seed"),
    _request("text", ("plain", "ids only", "special tokens"), "detokenization of the answer"),
)
"""Features of every check; values that depend on the checkpoint are added by feature_table()."""

COMPANION_DRAFTERS = ("ngram", "suffix", "prediction", "mtp")
"""Drafters that need no files, so that the companions can have them."""
_DRAFTING = ("1", "2", "3", "7", "15")
_CACHED = ("on device", "in host memory", "generated", "without a snapshot")
_MOVED = ("in the prompt", "after the prompt", "in the answer", "twice")
THOUGHTS = ("thought cut", "thought ends")
"""Values of "prompt" whose answers begin with a thought."""


def _excludes(
    first: tuple[str, str | tuple[str, ...]], second: tuple[str, str | tuple[str, ...]], reason: str
) -> Exclusion:
    pairs = [
        (name, (values,) if isinstance(values, str) else values) for name, values in (first, second)
    ]
    return Exclusion(pairs[0], pairs[1], reason)


EXCLUSIONS: tuple[Exclusion, ...] = (
    _excludes(
        ("drafter", NO_DRAFTER), ("drafts", _DRAFTING), "an engine without a drafter drafts nothing"
    ),
    _excludes(
        ("drafts", "0"), ("draft counts", "changing"), "an engine without a drafter drafts nothing"
    ),
    _excludes(
        ("numerics", tuple(NUMERICS)[1:]),
        ("model", SERVED),
        "the user chooses the formats of the served model",
    ),
    _excludes(("model", ATTENTION), ("drafter", "mtp"), "the attention-only model has no MTP"),
    _excludes(
        ("model", ATTENTION),
        ("snapshots", ("16", "2", "1", "0")),
        "a model without state has no snapshot",
    ),
    _excludes(
        ("model", ATTENTION), ("numerics", "bf16 state"), "a model without state has no snapshot"
    ),
    _excludes(
        ("model", ATTENTION),
        ("prefix", "without a snapshot"),
        "a model without state has no snapshot",
    ),
    _excludes(("model", MIXTURE), ("snapshots", NO_STATE), "the mixture has recurrent layers"),
    _excludes(
        ("chunk", ("64", "65", "127")),
        ("prefix", "without a snapshot"),
        "chunks of one page leave a snapshot at each page",
    ),
    _excludes(("prefix cache", "off"), ("prefix", _CACHED), "the cache is off"),
    _excludes(("host tier", "none"), ("host slabs", "several"), "there is no host memory"),
    _excludes(("host tier", "none"), ("prefix", "in host memory"), "there is no host memory"),
    _excludes(
        ("pages", "all"), ("prefix", "in host memory"), "a cache that fits all prompts evicts none"
    ),
    _excludes(
        ("snapshots", "16"),
        ("prefix", "in host memory"),
        "snapshots of two prompts must evict each other",
    ),
    _excludes(
        ("prompt logprobs", ("0", "3")),
        ("prefix", _CACHED),
        "log-probabilities of a prompt need all of its positions computed",
    ),
    _excludes(
        ("prompt size", ("1", "part of a page")),
        ("prefix", _CACHED),
        "only whole pages are cached",
    ),
    _excludes(
        ("drafts", "0"),
        ("prompt size", "window to a page end"),
        "a window without drafts is one token",
    ),
    _excludes(
        (
            "prompt size",
            ("1", "part of a page", "64n - 1", "64n", "64n + 1", "window to a page end"),
        ),
        ("answer size", "cut"),
        "only the longest prompts reach max_model_len soon",
    ),
    _excludes(
        ("prompt size", "1"), ("prompt", ("template", *THOUGHTS)), "a template writes many tokens"
    ),
    _excludes(
        ("prompt size", "window to a page end"),
        ("prompt", ("template", *THOUGHTS)),
        "a template has its own number of tokens",
    ),
    _excludes(
        ("prompt size", ("1", "part of a page")),
        ("preempted", "in the prompt"),
        "the prompt is one chunk",
    ),
    _excludes(
        ("prompt size", ("1", "part of a page")),
        ("aborted", "in the prompt"),
        "the prompt is one chunk",
    ),
    _excludes(("chunk", "whole"), ("preempted", "in the prompt"), "the prompt is one chunk"),
    _excludes(("chunk", "whole"), ("aborted", "in the prompt"), "the prompt is one chunk"),
    _excludes(
        ("steps in flight", "1"),
        ("preempted", "after the prompt"),
        "results are read before the next schedule",
    ),
    _excludes(
        ("steps in flight", "1"),
        ("aborted", "in flight"),
        "results are read before the next schedule",
    ),
    _excludes(
        ("answer size", "1"),
        ("preempted", ("after the prompt", "in the answer", "twice")),
        "the answer ends with its first token",
    ),
    _excludes(
        ("answer size", "1"),
        ("aborted", ("in the answer", "in flight", "in host memory")),
        "the answer ends with its first token",
    ),
    _excludes(
        ("preempted", ("never", "waiting")),
        ("return", ("another row", "later")),
        "nothing returns that was not preempted",
    ),
    _excludes(
        ("preempted", ("never", "waiting")),
        ("aborted", "in host memory"),
        "nothing is in host memory that was not preempted",
    ),
    _excludes(
        ("return", ("at once", "another row")),
        ("aborted", "in host memory"),
        "the request returns before it can be aborted",
    ),
    _excludes(
        ("preempted", _MOVED), ("aborted", "waiting"), "the request ends before it is preempted"
    ),
    _excludes(
        ("return", ("another row", "later")),
        ("aborted", "waiting"),
        "the request ends before it is preempted",
    ),
    _excludes(
        ("preempted", ("after the prompt", "in the answer", "twice")),
        ("aborted", "in the prompt"),
        "the request ends before it is preempted",
    ),
    _excludes(
        ("preempted", "twice"), ("aborted", "in host memory"), "the request ends before it returns"
    ),
    _excludes(
        ("forced", "all"), ("preempted", ("in the answer", "twice")), "the answer is one window"
    ),
    _excludes(
        ("forced", "all"), ("aborted", ("in the answer", "in flight")), "the answer is one window"
    ),
    _excludes(("adapters", "no"), ("adapter", ("first", "second")), "the engine has no adapters"),
    _excludes(
        ("grammar", ("choice", "regex", "json")),
        ("min_tokens", "some"),
        "the grammar defines where the answer ends",
    ),
    _excludes(
        ("grammar", ("choice", "regex", "json")),
        ("allowed ids", ("many", "few")),
        "the two may leave no token",
    ),
    _excludes(
        ("grammar", ("choice", "regex", "json")),
        ("bad words", ("ids", "text")),
        "the two may leave no token",
    ),
    _excludes(
        ("grammar", ("choice", "regex", "json")),
        ("answer size", ("past a page end", "past 64")),
        "the grammar ends the answer",
    ),
    _excludes(
        ("prompt", "thought ends"), ("allowed ids", "few"), "the bias must decide the first token"
    ),
    _excludes(("bad words", "text"), ("allowed ids", "few"), "the two may leave no token"),
    _excludes(("stop", "string"), ("text", "ids only"), "only a text can contain a stop string"),
    _excludes(
        ("stop", ("ids", "end of sequence", "string")),
        ("answer size", "1"),
        "the answer ends with its first token",
    ),
    _excludes(("min_tokens", "some"), ("answer size", "1"), "the answer ends with its first token"),
    _excludes(("stop", "length"), ("min_tokens", "some"), "only a stop can come before min_tokens"),
)
"""Pairs of values that no scenario has, by reason."""


@dataclass(frozen=True)
class FeatureTable:
    """Features of one check, and the exclusions among their values."""

    features: tuple[Feature, ...]
    exclusions: tuple[Exclusion, ...] = EXCLUSIONS


def feature_table(
    models: Iterable[str],
    numerics: Iterable[str],
    drafters: Sequence[str],
    graphs: Sequence[str],
    has_state: bool,
    has_text: bool,
    has_thoughts: bool,
    has_adapters: bool = True,
    has_one_rank: bool = True,
) -> FeatureTable:
    """Return the features of a check.

    models, numerics: checkpoints and their formats that the check may build. drafters: drafters
    that the served checkpoint supports. graphs: graph modes of the device. has_state: the served
    model has recurrent layers. has_text: it has a tokenizer. has_thoughts: it has a chat template
    and a parser of thoughts. has_adapters: engines with LoRA adapters can be built. has_one_rank:
    engines have one rank; of several, all end where one raises.
    """
    names = (NO_DRAFTER, oracle_drafter.NAME, *drafters)
    allowed: dict[str, tuple[str, ...]] = {
        "model": tuple(models),
        "numerics": tuple(numerics),
        "drafter": names,
        "graph": tuple(graphs),
    }
    if "suffix" not in names:
        allowed["answers kept"] = ("many",)
    if not has_adapters:
        allowed |= {"adapters": ("no",), "adapter": ("none",)}
    if not has_one_rank:
        allowed[FAILURE] = ("none",)
    only_served = allowed["model"] == (SERVED,)
    if only_served:
        allowed["snapshots"] = ("16", "2", "1", "0") if has_state else (NO_STATE,)
    if only_served and not has_state:
        allowed["prefix"] = ("new", "on device", "in host memory", "generated")
    if not has_text:
        allowed |= {
            "bad words": ("off", "ids"),
            "stop": ("length", "ids", "end of sequence"),
            "grammar": ("off",),
            "prompt": ("ids",),
        }
    elif not has_thoughts:
        allowed["prompt"] = ("ids",)
    features = tuple(
        replace(feature, values=allowed.get(feature.name, feature.values)) for feature in FEATURES
    )
    return FeatureTable(features, _exclusions(drafters, has_state, only_served))


def _exclusions(
    drafters: Sequence[str], has_state: bool, only_served: bool
) -> tuple[Exclusion, ...]:
    """Return the exclusions of a check. The arguments are those of feature_table().

    only_served: the check has no companions.
    """
    names = (NO_DRAFTER, oracle_drafter.NAME, *drafters)
    no_mtp = _excludes(
        ("drafter", "mtp"), ("snapshots", NO_STATE), "the attention-only model has no MTP"
    )
    exclusions: list[Exclusion] = [
        *EXCLUSIONS,
        *([] if only_served or not has_state else [no_mtp]),
        _excludes(
            ("drafts", "0"),
            ("drafter", names[1:]),
            "an engine with a drafter has one draft or more",
        ),
        _excludes(
            ("drafter", NO_DRAFTER),
            ("prompt size", "window to a page end"),
            "a window without drafts is one token",
        ),
        _excludes(
            ("drafter", NO_DRAFTER),
            ("draft counts", "changing"),
            "an engine without a drafter drafts nothing",
        ),
        _excludes(
            ("answers kept", "few"),
            ("drafts", "0"),
            "an engine without a drafter drafts nothing",
        ),
        _excludes(
            ("snapshots", NO_STATE),
            ("numerics", "bf16 state"),
            "a model without state has no snapshot",
        ),
        _excludes(
            ("snapshots", NO_STATE),
            ("prefix", "without a snapshot"),
            "a model without state has no snapshot",
        ),
        _excludes(
            ("answers kept", "few"),
            ("drafter", tuple(name for name in names if name != "suffix")),
            "only the suffix drafter keeps answers",
        ),
        _excludes(
            ("model", (ATTENTION, MIXTURE)),
            ("drafter", tuple(name for name in drafters if name not in COMPANION_DRAFTERS)),
            "the drafter belongs to the served model",
        ),
        _excludes(
            ("model", SERVED),
            ("snapshots", NO_STATE if has_state else ("16", "2", "1", "0")),
            "the served model has recurrent layers"
            if has_state
            else "a model without state has no snapshot",
        ),
    ]
    return tuple(exclusions)
