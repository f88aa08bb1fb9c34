"""Record of an audit that found a difference: everything that running the request again needs."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from os.path import exists  # Path.exists raises where a name is too long
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from lockstep.answer import Answer, ExactLogprobs
from lockstep.config import EngineConfig, Plan
from lockstep.errors import ConfigError
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request

VERSION = 1
"""Version of the file format; it changes with the fields of the class below."""
PREFIX = "lockstep-audit-"
"""Start of the name of a record's file."""
SUFFIX = ".json"
UNFINISHED = ".unfinished"
"""End of the name of a file whose record is being written."""
UNFINISHED_SECONDS = 3600.0
"""Age from which an unfinished file counts as left by a process that was killed while it wrote."""
MAX_RECORDS = 16
"""Maximum records in all folders. Engines that are started again and again, and replicas, share
them."""
LEFT_OUT = ("audit", "kv_events_config", "nnodes", "node_rank", "master_addr", "master_port")
"""Settings that a replay leaves out: no answer depends on them, and they need other hosts."""


@dataclass(frozen=True)
class AuditRecord:
    """Request whose audit differed, with its engine's settings and both answers, as plain data.

    settings: arguments of EngineConfig.read. numerics: name of the engine's numerics. params:
    fields of SamplingParams. num_resumed: as in Request. grammar: fields of the recipe of its
    grammar, None without one. served, repeated: answers of the request and of its audit, without
    texts. what: their first difference.
    """

    settings: dict[str, Any]
    numerics: str
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    eos_token_ids: list[int]
    seed: int
    adapter: str
    num_resumed: int
    grammar: dict[str, Any] | None
    served: dict[str, Any]
    repeated: dict[str, Any]
    what: str

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        plan: Plan,
        request: Request,
        served: Answer,
        repeated: Answer,
        what: str,
    ) -> "AuditRecord":
        """Return the record of a request. Raises TypeError for a recipe that is no dataclass."""
        params = request.params.to_json()
        # The grammar's recipe replaces them; the forms of tool calls have no other plain form.
        params |= {"structured_outputs": None, "thinking_token_budget": None}
        recipe: Any = None if request.grammar is None else request.grammar.recipe
        return cls(
            settings=_settings(config),
            numerics=plan.numerics,
            request_id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            params={k: v for k, v in params.items() if v != _default(k)},
            eos_token_ids=sorted(request.eos_token_ids),
            seed=request.seed,
            adapter=request.adapter,
            num_resumed=request.num_resumed,
            grammar=None if recipe is None else asdict(recipe),
            served=_plain(served),
            repeated=_plain(repeated),
            what=what,
        )

    def write(self, folder: Path) -> Path:
        """Write the record to a new file and return its path.

        Other processes see the whole record or none. Only the file's owner may read it, since it
        has a client's prompt.
        """
        text = json.dumps({"version": VERSION, "audit": asdict(self)})
        descriptor, name = mkstemp(UNFINISHED, PREFIX, folder.absolute())
        unfinished = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            return unfinished.rename(unfinished.with_suffix(SUFFIX))
        except OSError:  # of a full disk: half a record is of no use
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, data: dict[str, Any]) -> "AuditRecord":
        """Return the record of a file's data. Raises ConfigError."""
        version = data.get("version")
        if version != VERSION:
            raise ConfigError(
                f"version={version!r} of an audit is not allowed; allowed: {VERSION}. Write the "
                "file with this release of Lockstep."
            )
        try:
            record = cls(**data["audit"])
            record.request("check")
            for answer in (record.served, record.repeated):
                answer_of_plain(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the audit is malformed: {error!r}. Name a file that an audit wrote."
            ) from None
        return record

    def request(self, request_id: str) -> Request:
        """Return the request under another id, without its grammar. Raises RequestError."""
        params = dict(self.params)
        if params.get("logit_bias"):  # keys of JSON are texts
            params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
        return Request(
            request_id,
            list(map(int, self.prompt_token_ids)),
            SamplingParams(**params),
            eos_token_ids=frozenset(map(int, self.eos_token_ids)),
            seed=int(self.seed),
            adapter=self.adapter,
            num_resumed=self.num_resumed,
        )


def records_in(folder: Path) -> list[Path]:
    """Return the paths of the records in a folder; none where it cannot be read."""
    return _matching(folder, SUFFIX)


def remove_unfinished(folder: Path) -> None:
    """Remove the files of killed processes in a folder, since each has a part of a client's prompt.

    Files that other processes are writing stay, and files of other users.
    """
    oldest = time.time() - UNFINISHED_SECONDS
    for path in _matching(folder, UNFINISHED):
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()


def _matching(folder: Path, suffix: str) -> list[Path]:
    """Return the paths of a folder's files of audits; none where it cannot be read."""
    try:
        return sorted(folder.resolve().glob(f"{PREFIX}*{suffix}"))
    except OSError:  # of a working directory that was deleted
        return []


def _default(name: str) -> Any:
    """Return the default of a field of SamplingParams."""
    return SamplingParams.__dataclass_fields__[name].default


def _settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as JSON values."""
    changed = {
        setting.name: getattr(config, setting.name)
        for setting in fields(config)
        if setting.name not in LEFT_OUT and getattr(config, setting.name) != setting.default
    }
    if config.model is not None and exists(config.model):
        changed["model"] = str(Path(config.model).absolute())
    if config.speculative_config is not None:
        changed["speculative_config"] = asdict(config.speculative_config)
    return changed


def _plain(answer: Answer) -> dict[str, Any]:
    """Return the observed parts of an answer as plain data."""
    return {k: v for k, v in asdict(answer).items() if k not in ("digests", "text")}


def answer_of_plain(data: dict[str, Any]) -> Answer:
    """Return an answer of a record, without its metrics."""

    def exact(positions: list[list[list[Any]]]) -> ExactLogprobs:
        return tuple(tuple((t, v, rank) for t, v, rank in entry) for entry in positions)

    finish_reason, stop_reason = data["ending"]
    return Answer(
        tuple(data["tokens"]),
        exact(data["logprobs"]),
        RequestMetrics(),
        ending=(finish_reason, stop_reason),
        prompt_logprobs=exact(data["prompt_logprobs"]),
    )
