"""Multi-head latent attention (MLA): the ops' contracts, references and backends."""

from lockstep.kernels.latent_attention.contract import (
    SEGMENT,
    latent_attention,
    latent_rope_and_cache,
)

__all__ = ["SEGMENT", "latent_attention", "latent_rope_and_cache"]
