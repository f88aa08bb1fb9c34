"""Every engine belongs to one section, and --sections selects them by name."""

from itertools import product

import pytest

from lockstep.check.matrix.setups import PHASES, Setup, setups
from lockstep.check.sections import SECTIONS, section_names, section_of
from lockstep.config import GRAPH_MODES
from lockstep.errors import ConfigError


def test_sections_are_selected_in_their_order() -> None:
    assert section_names("") == tuple(SECTIONS)
    assert section_names("cache, kernels") == ("kernels", "cache")
    with pytest.raises(ConfigError, match=r"sections='' is not allowed; allowed: kernels, "):
        section_names("tokens,")


@pytest.mark.parametrize(("phase", "graph"), list(product(PHASES, GRAPH_MODES)))
def test_graphs_belong_to_capture(phase: str, graph: str) -> None:
    section = section_of(Setup("mtp", 3, phase, graph))
    assert (section == "capture") == (graph != "none")


@pytest.mark.parametrize("size", ["quick", "default", "full"])
def test_a_gpu_has_engines_in_every_section_of_the_matrix(size: str) -> None:
    engines = setups(size, ("ngram", "suffix", "mtp"), GRAPH_MODES)
    sections = {section_of(setup) for setup in engines}
    assert sections >= {"cache", "capture"}
