"""Output columns of each rank: shares, replicated KV heads, indivisible sizes."""

import pytest
import torch

from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.exchange.group import DryGroup
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear
from lockstep.layers.sharding import Columns, Part, Rank, count_columns
from lockstep.quantization import WeightSink


def test_rank_has_its_share_of_every_part() -> None:
    columns = Columns((Part(4, 2), Part(4, 3, sharing=2)))
    assert columns.total == 14
    assert columns.ranges(Rank()) == ()
    assert columns.ranges(Rank(0, 2)) == ((0, 4), (8, 11))
    assert columns.ranges(Rank(1, 2)) == ((4, 8), (11, 14))
    assert count_columns(columns, Rank(1, 2)) == 7
    assert count_columns(5, Rank(1, 2)) == 5


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    columns = Columns.heads(4, 16, sharing=2)
    actual = [columns.ranges(Rank(index, 4)) for index in range(4)]
    assert actual == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


def test_heads_that_cover_shared_units_in_part_have_a_copy_each() -> None:
    # 6 value heads, three for each of 2 key heads, over 3 ranks: 0 0 | 0 1 | 1 1.
    part = Part(6, 16, sharing=3)
    assert [part.units(Rank(index, 3)) for index in range(3)] == [[0, 0], [0, 1], [1, 1]]
    assert Columns((part,)).ranges(Rank(0, 3)) == ((0, 16), (0, 16))
    assert Columns((part,)).ranges(Rank(1, 3)) == ((0, 32),)


@pytest.mark.parametrize(
    ("columns", "size", "allowed"),
    [
        (Columns.heads(6, 4), 4, "1, 2, 3, 6"),
        (Columns.heads(24, 4, sharing=6), 5, "1, 2, 3, 4, 6, 8, 12, 24"),
        (Columns.of(3), 4, "1 to 3"),
    ],
    ids=["query heads", "KV heads", "columns"],
)
def test_indivisible_sizes_error_names_valid_ones(
    columns: Columns, size: int, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size} .*allowed: {allowed}"):
        columns.ranges(Rank(0, size))


@pytest.mark.parametrize(
    ("width", "shares"),
    [
        (5120, [1792, 1664, 1664]),
        (448, [192, 128, 128]),
        (12, [4, 4, 4]),
        (7, [3, 2, 2]),
    ],
)
def test_columns_without_heads_are_cut_in_the_largest_granule(
    width: int, shares: list[int]
) -> None:
    columns = Columns.of(width)
    assert [count_columns(columns, Rank(index, 3)) for index in range(3)] == shares
    ends = [columns.ranges(Rank(index, 3))[0] for index in range(3)]
    assert ends[0][0] == 0 and ends[-1][1] == width
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


def test_split_k_depends_on_the_full_weight() -> None:
    ranks = [Rank(), Rank(0, 2), Rank(1, 4)]
    layers = [
        Linear(
            BuildContext("cpu", torch.bfloat16, 1, 1, group=DryGroup(rank.index, rank.size)),
            4096,
            {"up": Columns.of(256), "gate": 8},
        )
        for rank in ranks
    ]
    assert [sum(layer.outputs) for layer in layers] == [264, 136, 72]
    assert len({layer.gemms[0].split_k for layer in layers}) == 1


def test_range_within_a_packed_word_is_refused() -> None:
    sink = WeightSink((16, 3), (torch.int32,), torch.device("cpu"), print, 1, 8, ((0, 12),))
    with pytest.raises(CheckpointError, match="columns 0 to 12 .* groups of 8"):
        sink.narrow(torch.zeros(16, 3, dtype=torch.int32))
