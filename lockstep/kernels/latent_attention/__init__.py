"""Multi-head latent attention (MLA): the ops' contracts, references and backends."""

from lockstep.kernels.latent_attention.contract import latent_attention, latent_rope_and_cache

__all__ = ["latent_attention", "latent_rope_and_cache"]
