"""Folder of what Lockstep keeps between runs and can compute again."""

from pathlib import Path


def cache_folder() -> Path:
    """Return Lockstep's folder among the assets of Hugging Face's cache; it need not exist.

    So it follows HF_HOME, as checkpoints do.
    """
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE) / "lockstep"
