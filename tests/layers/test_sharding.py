"""Output columns of each rank: shares, replicated KV heads, indivisible sizes."""

import pytest
import torch

from lockstep.errors import CheckpointError, ConfigError
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear
from lockstep.layers.sharding import Columns, Rank, count_columns
from lockstep.quantization import WeightSink


def test_rank_has_its_share_of_every_part() -> None:
    columns = Columns(((4, 2), (2, 3)))
    assert columns.total == 14
    assert columns.ranges(Rank()) == ()
    assert columns.ranges(Rank(0, 2)) == ((0, 4), (8, 11))
    assert columns.ranges(Rank(1, 2)) == ((4, 8), (11, 14))
    assert count_columns(columns, Rank(1, 2)) == 7
    assert count_columns(5, Rank(1, 2)) == 5


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    columns = Columns.of(2, 16, replicate=True)
    retained = [columns.ranges(Rank(index, 4)) for index in range(4)]
    assert retained == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


@pytest.mark.parametrize(
    ("columns", "allowed"),
    [(Columns.of(6, 4), "1, 2, 3, 6"), (Columns.of(3, 4, replicate=True), "1, 3, 6, 9")],
    ids=["query heads", "KV heads"],
)
def test_indivisible_sizes_error_names_valid_ones(columns: Columns, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=4 .*allowed: {allowed}"):
        columns.ranges(Rank(0, 4))


def test_split_k_depends_on_the_full_weight() -> None:
    ranks = [Rank(), Rank(0, 2), Rank(1, 4)]
    layers = [
        Linear(
            BuildContext("cpu", torch.bfloat16, 1, 1, rank=rank),
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
