"""The check of compiled kernels detects the layouts that Triton 3.6 adds incorrectly."""

import pytest

from tests.kernels.layouts import incorrect_sums

TEXT = """#linear = #ttg.linear<{{register = [], lane = {lane}, warp = {warp}, block = []}}>
#mma = #ttg.nvidia_mma<{{versionMajor = 3}}>
    %total = "tt.reduce"(%pairs) <{{axis = 2 : i32}}> ({{
    ^bb0(%a: f32, %b: f32):
      tt.reduce.return %c : f32
    }}) : (tensor<1x2x2x1024xf32, #linear>) -> tensor<1x2x1024xf32, #ttg.slice<{{dim = 2}}>>
    %top = "tt.reduce"(%scores) <{{axis = 0 : i32}}> ({{
    }}) : (tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice<{{dim = 0, parent = #mma}}>>
"""
CONTIGUOUS = "[[0, 0, 0, 2], [0, 0, 1, 0], [0, 1, 0, 0]]"
INTERLEAVED = "[[0, 0, 0, 1024], [0, 0, 1, 0], [0, 0, 0, 32]]"


@pytest.mark.parametrize(
    ("lane", "warp", "incorrect"),
    [
        (CONTIGUOUS, INTERLEAVED, True),
        (CONTIGUOUS, "[[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 32]]", False),
        (INTERLEAVED, "[[0, 0, 1, 0], [0, 1, 0, 0]]", True),
        (INTERLEAVED, "[[0, 1, 0, 0], [0, 2, 0, 0]]", False),
        (CONTIGUOUS, "[[0, 1, 0, 0], [0, 0, 0, 1], [0, 2, 0, 0]]", False),
        (CONTIGUOUS, "[[0, 0, 0, 0], [0, 0, 1, 0]]", False),
    ],
)
def test_interleaved_sums_across_warps_are_detected(lane: str, warp: str, incorrect: bool) -> None:
    assert bool(incorrect_sums(TEXT.format(lane=lane, warp=warp))) == incorrect
