"""Settings of latent attention in DeepSeek-V3's files and in those of draft heads."""

from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.layers.latent_attention import LatentAttention
from lockstep.layers.rotary import Rotary
from lockstep.models.config_reader import ConfigReader
from lockstep.models.rope import Rope, YarnRope, read_rope


@dataclass(frozen=True)
class LatentConfig:
    """Settings of lockstep.layers.latent_attention.

    q_rank: width of the queries' latent, None if one projection makes the queries. latent: width of
    the cached latent. nope_dim, rope_dim: dims of a head's query without and with position. value:
    dims of a head's output. scale: factor of the scores. rope: rotary settings.
    """

    heads: int
    q_rank: int | None
    latent: int
    nope_dim: int
    rope_dim: int
    value: int
    scale: float
    rope: Rope

    @classmethod
    def read(cls, c: ConfigReader) -> "LatentConfig":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c.one_of("attention_bias", False, default=False)
        c.one_of("rope_interleave", True, None, default=True)
        nope_dim = c.size("qk_nope_head_dim")
        rope_dim = c.size("qk_rope_head_dim")
        rope = read_rope(c, rope_dim, 1.0)
        factor = rope.score_factor if isinstance(rope, YarnRope) else 1.0
        # Only yarn applies mscale_all_dim to the scores; elsewhere it must not be ignored.
        if type(rope) not in (Rope, YarnRope):
            for part in ("rope_scaling", "rope_parameters"):
                c.part(part).one_of("mscale_all_dim", 0, 0.0, None, default=None)
        return cls(
            heads=c.size("num_attention_heads"),
            q_rank=None if c.raw.get("q_lora_rank") is None else c.size("q_lora_rank"),
            latent=c.size("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value=c.size("v_head_dim"),
            scale=(nope_dim + rope_dim) ** -0.5 * factor,
            rope=rope,
        )

    def mixer(
        self, build: BuildContext, hidden: int | tuple[int, int], rotary: Rotary
    ) -> LatentAttention:
        """Build the mixer. hidden: width of input and output, or both if they differ."""
        return LatentAttention(
            build,
            hidden,
            self.heads,
            q_rank=self.q_rank,
            latent=self.latent,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value=self.value,
            rotary=rotary,
            scale=self.scale,
        )


def read_latent_common(c: ConfigReader) -> dict[str, Any]:
    """Read the fields of DecoderConfig from config.json, and `latents`."""
    c.one_of("hidden_act", "silu", default="silu")
    latents = LatentConfig.read(c)
    return dict(
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("hidden_size"),
        intermediate_size=c.size("intermediate_size"),
        heads=latents.heads,
        kv_heads=latents.heads,
        head_dim=latents.nope_dim + latents.rope_dim,
        eps=c.positive("rms_norm_eps"),
        rope=latents.rope,
        tied=c.get("tie_word_embeddings", bool, False),
        latents=latents,
    )
