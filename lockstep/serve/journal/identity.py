"""Identity of a server's answers: it goes on with answers of an equal identity only."""

import os
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from lockstep.text.settings import TextSettings
from lockstep.worker.executor import Facts

NUM_SAMPLES = 8
"""Parts of a file that are hashed. Weights of fine-tunes differ everywhere, and sizes do not."""
SAMPLE_BYTES = 1 << 16


def identity(facts: Facts, text: TextSettings) -> dict[str, str]:
    """Return the identity of an engine's answers. Reads parts of the checkpoint's files."""
    config = facts.config
    settings = [config.load_format, config.seed, config.lora_modules]
    texts = [asdict(text), text.template()]
    return {
        "model": config.model or "the bundled model",
        "weights": _digest([*_samples(Path(facts.plan.model_path)), repr(settings).encode()]),
        "system_fingerprint": facts.fingerprint,
        "text settings": _digest([repr(texts).encode()]),
    }


def _samples(path: Path) -> Iterable[bytes]:
    """Yield names, sizes and parts of the files of a checkpoint."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        yield f"{file.name}:{size}".encode()
        with file.open("rb") as content:
            for number in range(NUM_SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1), os.SEEK_SET)
                yield content.read(SAMPLE_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
