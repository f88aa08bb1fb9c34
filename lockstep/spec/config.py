"""Keys of speculative_config that every drafter has. A drafter's file adds its own."""

from dataclasses import MISSING, dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from lockstep.settings import Settings, setting

MAX_DRAFTS = 15
"""Maximum drafts per row and step: with the token before them, a window of 16."""
AUTO = "auto"
"""Value of speculative_config that selects the checkpoint's own draft module, if it has one."""
AUTO_DRAFTS = 3
"""K of the checkpoint's own draft module."""
LENGTHS = (0, 1, 3, 7)
"""Numbers of drafts below K that an adaptive step may have."""
EXAMPLE = '{"method": "mtp", "num_speculative_tokens": 3}'


@dataclass(frozen=True)
class SpeculativeConfig(Settings):
    """Drafting settings, in vLLM's keys. lockstep.spec.read makes the class of the method."""

    within: ClassVar[str] = "speculative_config "

    method: str = setting(
        MISSING,
        "the drafter",
        allowed="a drafter's name, e.g. mtp",
        remedy="Name one of lockstep.spec.DRAFTERS.",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFTS)] = setting(
        3,
        "K: maximum draft tokens of a row and step",
        remedy="Choose K in that range, or leave speculative_config out to draft nothing.",
    )
    adaptive: bool = setting(
        True,
        "choose the drafts of each step, up to K, that are fastest at the running acceptance",
        remedy="Choose true, or false for the same number of drafts in every step.",
    )
    synthetic_acceptance: Annotated[float, Field(ge=0.0, le=1.0)] | None = setting(
        None,
        "with random weights only: accept each next draft with this probability, instead of "
        "comparing it with the target's token",
        remedy="Choose a probability, or leave it out to verify drafts.",
    )

    @property
    def synthetic_length(self) -> float | None:
        """Return the mean acceptance length that synthetic_acceptance implies with K drafts."""
        p = self.synthetic_acceptance
        return None if p is None else sum(p**i for i in range(self.num_speculative_tokens + 1))

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Return the numbers of drafts that a step may have, ascending."""
        max_drafts = self.num_speculative_tokens
        if not self.adaptive:
            return (max_drafts,)
        # Every length has its own CUDA graphs, hence only a few lengths.
        return (*(k for k in LENGTHS if k < max_drafts), max_drafts)
