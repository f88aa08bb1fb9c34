"""The rule that compiled kernels are held to sees what Triton 3.6 adds wrongly."""

import pytest

from tests.kernels.layouts import lost_sums

TEXT = """#linear = #ttg.linear<{{register = [], lane = {lane}, warp = {warp}, block = []}}>
#mma = #ttg.nvidia_mma<{{versionMajor = 3}}>
    %total = "tt.reduce"(%pairs) <{{axis = 2 : i32}}> ({{
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %c : f32
    }}) : (tensor<1x2x2x1024xf32, #linear>) -> tensor<1x2x1024xf32, #ttg.slice<{{dim = 2}}>>
    %top = "tt.reduce"(%scores) <{{axis = 0 : i32}}> ({{
    }}) : (tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice<{{dim = 0, parent = #mma}}>>
"""
SIDE_BY_SIDE = "[[0, 0, 0, 2], [0, 0, 1, 0], [0, 1, 0, 0]]"
IN_TURNS = "[[0, 0, 0, 1024], [0, 0, 1, 0], [0, 0, 0, 32]]"


@pytest.mark.parametrize(
    ("lane", "warp", "lost"),
    [
        (SIDE_BY_SIDE, IN_TURNS, True),
        (SIDE_BY_SIDE, "[[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 32]]", False),
        (IN_TURNS, "[[0, 0, 1, 0], [0, 1, 0, 0]]", True),
        (IN_TURNS, "[[0, 1, 0, 0], [0, 2, 0, 0]]", False),
        (SIDE_BY_SIDE, "[[0, 1, 0, 0], [0, 0, 0, 1], [0, 2, 0, 0]]", False),
        (SIDE_BY_SIDE, "[[0, 0, 0, 0], [0, 0, 1, 0]]", False),
    ],
)
def test_sums_across_warps_whose_dimensions_take_turns_are_seen(
    lane: str, warp: str, lost: bool
) -> None:
    assert bool(lost_sums(TEXT.format(lane=lane, warp=warp))) == lost
