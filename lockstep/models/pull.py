"""Download of a checkpoint from the hub: the files that are read, and no others.

The hub's client keeps each file that has arrived whole, so a download that broke off goes on there.
"""

import glob
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lockstep.errors import CheckpointError, ConfigError, brief
from lockstep.models.gguf.folder import PART, SUFFIX
from lockstep.models.hub import (
    HUB_FILE,
    HUB_ID,
    TEXT_FILES,
    WEIGHTS,
    fetch_gguf,
    gguf_patterns,
    weight_patterns,
)
from lockstep.models.json_files import brief_list
from lockstep.models.weight_files import find_weight_files

Progress = Callable[[str, int, int], None]
"""Callback with (step, bytes that have arrived, bytes in total)."""
DOWNLOADING = "downloading"
ANSWER_SECONDS = 15.0
"""Timeout of the hub's answer about a model."""
POLL_SECONDS = 0.2
"""Seconds between two progress updates."""
SPARE_BYTES = 64 << 20
"""Disk space that a download leaves free for the file system and small files."""


@dataclass(frozen=True)
class PullRequest:
    """Files to download.

    model: a hub id. file: the name of a GGUF file, or the type at its end; None for a whole
    checkpoint. include: patterns of the weights instead of all *.safetensors.
    """

    model: str
    revision: str | None = None
    local_dir: Path | None = None
    file: str | None = None
    include: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        name: str,
        revision: str | None = None,
        local_dir: str | None = None,
        include: Sequence[str] = (),
    ) -> "PullRequest":
        """Read NAME, OWNER/NAME, NAME:FILE.gguf or NAME:TYPE of a GGUF file.

        Raise ConfigError where it is none of these.
        """
        match = HUB_FILE.fullmatch(name)
        if match is None and not HUB_ID.fullmatch(name):
            exists = Path(name).exists()
            raise ConfigError(
                f"model={brief(name)} is not allowed; allowed: a hub id, such as Qwen/Qwen3-8B, or "
                f"one with a file or a type of GGUF, OWNER/NAME:FILE{SUFFIX} or OWNER/NAME:Q4_K_M. "
                + ("It is a local path: serve it as it is." if exists else "Name one of them.")
            )
        folder = None if local_dir is None else Path(local_dir)
        model, file = (name, None) if match is None else (match["model"], match["file"])
        return cls(model, revision, folder, file, tuple(include))

    def fetch(self, names: Sequence[str]) -> Path:
        """Download the files of these names, and return their folder."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.model,
            revision=self.revision,
            local_dir=self.local_dir,
            allow_patterns=[glob.escape(name) for name in names],
        )
        return Path(folder)


@dataclass(frozen=True)
class PullResult:
    """A checkpoint on this machine. path: its folder or GGUF file; served_as: what `lockstep serve`
    takes."""

    path: Path
    served_as: str


def pull(request: PullRequest, progress: Progress, note: Callable[[str], None]) -> PullResult:
    """Download a checkpoint, or what is missing of it.

    note: called with a line about what will be done. Raises ConfigError where the hub refuses, is
    not reached or breaks off, where the disk has no room, and where there is nothing to read.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _offline(request)
    with _plain_errors(request), _quiet():
        sizes = _listing(request)
        # Settings come first: the index among them says which files hold the weights.
        texts = [] if request.file else _matching(sizes, TEXT_FILES)
        folder = request.fetch(texts) if texts else None
        weights = _weights(request, sizes, folder)
        wanted = {name: sizes[name] for name in (*texts, *weights)}
        missing = {name: size for name, size in wanted.items() if not _is_here(request, name, size)}
        _check_room(missing, request.local_dir or Path(constants.HF_HUB_CACHE))
        here = sum(wanted.values()) - sum(missing.values())
        note(
            f"{request.model}: {len(wanted)} files, {sum(wanted.values()) / 1e9:.2f} GB, of which "
            f"{here / 1e9:.2f} GB are here"
        )
        with _shown(request, wanted, progress):
            folder = request.fetch([*wanted])
    lost = [name for name, size in wanted.items() if not _has_size(folder / name, size)]
    if lost:
        raise ConfigError(
            f"{request.model} did not arrive whole: {brief_list(lost)}. Run the same command "
            "again: the files that are whole are kept."
        )
    return _pulled(request, folder / weights[0] if request.file else folder)


def _pulled(request: PullRequest, path: Path) -> PullResult:
    """Return a checkpoint, to be served by its path where the hub id does not mean it."""
    if request.local_dir is not None or request.revision is not None or request.include:
        return PullResult(path, str(path))
    return PullResult(path, f"{request.model}:{request.file}" if request.file else request.model)


def _offline(request: PullRequest) -> PullResult:
    """Return the copy that was fetched before. Raise ConfigError where it is not whole."""
    config = _local_path(request, "config.json")
    with suppress(CheckpointError, ConfigError):
        if request.file and request.local_dir is None:
            return _pulled(request, fetch_gguf(request.model, request.file))
        if config is not None and not request.file and find_weight_files(config.parent):
            return _pulled(request, config.parent)
    raise ConfigError(
        f"{request.model} is not here, and HF_HUB_OFFLINE forbids to fetch it. {elsewhere(request)}"
    )


def elsewhere(request: PullRequest) -> str:
    """Return what to do on a machine that does not reach the hub."""
    return (
        f"On a machine that reaches the hub run: lockstep pull {request.model} --local-dir DIR; "
        "copy DIR here and serve it: lockstep serve DIR. lockstep list shows what is here; "
        "HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy."
    )


def _listing(request: PullRequest) -> dict[str, int]:
    """Return the size of each file of the model, in bytes."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(
        request.model, revision=request.revision, files_metadata=True, timeout=ANSWER_SECONDS
    )
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _matching(names: Mapping[str, int], patterns: Sequence[str]) -> list[str]:
    """Return the names that match; a pattern without a folder means files of the main one."""
    return [
        name
        for name in names
        if any(
            fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
            for pattern in patterns
        )
    ]


def _weights(request: PullRequest, sizes: Mapping[str, int], folder: Path | None) -> list[str]:
    """Return the files of weights to download. Raise ConfigError where there is none."""
    chosen = gguf_patterns(request.file) if request.file else request.include
    patterns = chosen or (WEIGHTS if folder is None else weight_patterns(folder))
    weights = _matching(sizes, patterns)
    models = {name if (part := PART.fullmatch(name)) is None else part[1] for name in weights}
    if request.file and len(models) > 1:
        raise ConfigError(
            f"{request.model}:{request.file} means {len(models)} models: {brief_list(weights)}. "
            "Name the file of one."
        )
    if weights:
        return weights
    readable = [name for name in sizes if name.endswith((SUFFIX, ".safetensors"))]
    if chosen:
        meant = [request.file] if request.file else list(chosen)
        reason = f"has no file {brief_list(meant)}; it has {brief_list(readable) or 'no weights'}"
        raise ConfigError(f"{request.model} {reason}. Change the name of the file.")
    ggufs = [name for name in readable if name.endswith(SUFFIX)]
    if ggufs:
        raise ConfigError(
            f"{request.model} has no *.safetensors, but {brief_list(ggufs)}. Name one of them: "
            f"lockstep pull {request.model}:{ggufs[0]}"
        )
    raise ConfigError(
        f"{request.model} has no *.safetensors and no *{SUFFIX} file, which are all that is read. "
        "Name another model, or a conversion of this one."
    )


def _is_here(request: PullRequest, name: str, size: int) -> bool:
    """Return whether a file was downloaded before."""
    path = _local_path(request, name)
    return path is not None and _has_size(path, size)


def _local_path(request: PullRequest, name: str) -> Path | None:
    """Return where a file is on this machine; None where it is not."""
    from huggingface_hub import constants, try_to_load_from_cache

    if request.local_dir is not None:
        path = request.local_dir / name
        return path if path.exists() else None
    cached = try_to_load_from_cache(
        request.model, name, cache_dir=constants.HF_HUB_CACHE, revision=request.revision
    )
    return Path(cached) if isinstance(cached, str) else None


def _has_size(path: Path, size: int) -> bool:
    """Return whether a file is there and, where its size is known, has it."""
    with suppress(OSError):
        return path.stat().st_size == size or size == 0
    return False


def _check_room(missing: Mapping[str, int], target: Path) -> None:
    """Raise ConfigError if the disk has no space for the files that are missing."""
    # The target may not exist yet: ask the nearest folder that does.
    existing = next(parent for parent in (target, *target.absolute().parents) if parent.exists())
    needed = sum(missing.values())
    free = shutil.disk_usage(existing).free
    if missing and needed + SPARE_BYTES > free:
        raise ConfigError(
            f"the download needs {needed / 1e9:.2f} GB in {target}, where {free / 1e9:.2f} GB are "
            "free. Free some, or name a folder on another disk: --local-dir DIR for this model, "
            "HF_HOME for all."
        )


@contextmanager
def _shown(request: PullRequest, wanted: Mapping[str, int], progress: Progress) -> Iterator[None]:
    """Show how many bytes have arrived, while the files are downloaded."""
    ended = threading.Event()
    partial = _partial_folder(request)
    # A download that was killed leaves its partial file, which counts for nothing.
    stale = {path for path in partial.rglob("*.incomplete")} if partial.is_dir() else set()

    def watch() -> None:
        # The client's progress callbacks change with its releases; sizes of files do not.
        while not ended.wait(POLL_SECONDS):
            done = sum(size for name, size in wanted.items() if _is_here(request, name, size))
            for path in partial.rglob("*.incomplete"):
                with suppress(OSError):  # it was just moved to its place
                    done += 0 if path in stale else path.stat().st_size
            progress(DOWNLOADING, done, sum(wanted.values()))

    thread = threading.Thread(target=watch, name="lockstep-pull", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _partial_folder(request: PullRequest) -> Path:
    """Return the folder in which the hub's client keeps partial downloads."""
    from huggingface_hub import constants

    if request.local_dir is not None:
        return request.local_dir / ".cache" / "huggingface"
    return Path(constants.HF_HUB_CACHE) / f"models--{request.model.replace('/', '--')}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars of the hub's client."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()


@contextmanager
def _plain_errors(request: PullRequest) -> Iterator[None]:
    """Convert errors of the hub's client to ConfigError with a remedy."""
    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:  # the client passes on whatever its transport raises
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(". ")
        message = f"{request.model} cannot be fetched: {line}. {_remedy(request, error)}"
        raise ConfigError(message) from None


def _remedy(request: PullRequest, error: Exception) -> str:
    """Return what to do about an error of the hub's client."""
    from huggingface_hub import constants

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    page = f"{constants.ENDPOINT}/{request.model}"
    if type(error).__name__ == "GatedRepoError":
        return (
            f"Its owner grants access: accept the terms at {page}, and set HF_TOKEN to a token of "
            "that account."
        )
    if type(error).__name__ == "RevisionNotFoundError":
        return f"revision={brief(request.revision)} is a branch, tag or commit: see {page}/commits."
    if status in (401, 404):
        return (
            "Check how it is spelled, case included. A private model needs HF_TOKEN, a token of an "
            f"account that may read it ({constants.ENDPOINT}/settings/tokens)."
        )
    if status == 403:
        return "The token in HF_TOKEN may not read it: give it the right to, or take another."
    if status is not None:
        return "The hub is at fault or busy: run the same command again later."
    if isinstance(error, OSError) and error.errno is not None:
        return (
            "Free room on the disk or change the permissions of the folder, or name another folder "
            "by --local-dir or HF_HOME."
        )
    return (
        "Run the same command again: the files that are whole are kept. Where the hub is out of "
        f"reach: {elsewhere(request)}"
    )
