"""Identity of a server's answers: it goes on with answers of an equal identity only."""

from dataclasses import asdict

from lockstep.text.settings import TextSettings
from lockstep.worker.agreement import digest, model_digest
from lockstep.worker.executor import Facts


def identity(facts: Facts, text: TextSettings) -> dict[str, str]:
    """Return the identity of an engine's answers. Reads parts of the checkpoint's files."""
    texts = [asdict(text), text.template()]
    return {
        "model": facts.config.model or "the bundled model",
        "weights": model_digest(facts.config, facts.plan),
        "system_fingerprint": facts.fingerprint,
        "text settings": digest([repr(texts).encode()]),
    }
