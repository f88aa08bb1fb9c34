"""The device row table equals a model of it in plain Python, and rows are saved, restored and reset
completely."""

import pytest
import torch
from torch import Tensor

from lockstep.errors import RequestError
from lockstep.kernels import sampling
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request, check_ids
from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepShape
from lockstep.worker import rows
from tests.worker.row_table_model import PAGE, VOCAB, Walk, make_table, null_line


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_row_table_random_walk(seed: int, query_len: int) -> None:
    walk = Walk(seed, query_len)
    acts = [walk.admit, walk.chunk, walk.decode, walk.force, walk.preempt, walk.restore]
    acts += [walk.release]
    weights = [4, 5, 10, 8, 2, 3, 1]
    for _ in range(300):
        walk.draw.choices(acts, weights)[0]()
        walk.check()
    minimum = {"prompts": 6, "restored": 6, "released": 6, "forced": 4}
    assert all(walk.done[name] >= count for name, count in minimum.items()), walk.done
    for accepted in range(query_len):
        assert walk.done[f"accepted {accepted} of {query_len - 1}"], walk.done


@pytest.mark.parametrize("query_len", [1, 4])
def test_restored_row_equals_saved_row(query_len: int) -> None:
    """Every tensor of the row, drafts and penalties included, is restored into a used row."""
    walk = Walk(5, query_len)
    walk.admit()
    line = walk.lines[0]
    while line.in_prompt:
        walk.chunk()
    while line.forced:
        walk.force()
    walk.decode()
    table = walk.table
    table.drafts[line.row] = torch.arange(query_len - 1)
    before = [tensor[line.row].clone() for tensor in table.row_tensors()]
    old = line.row
    walk.preempt()
    for tensor in table.row_tensors():
        tensor[1:] = 1
    walk.free_rows.discard(old)
    walk.restore()
    assert line.row != old
    for tensor, was in zip(table.row_tensors(), before, strict=True):
        assert torch.equal(tensor[line.row], was)
    parts = {id(tensor) for tensor in vars(table).values() if isinstance(tensor, Tensor)}
    parts |= {id(tensor) for tensor in table.sampling.tensors()}
    parts.discard(id(table.allowed))  # of a step, not of a row
    index = {id(table.page_table), id(table.state_slots)}
    assert {id(tensor) for tensor in table.row_tensors()} == parts - index, "a part is not saved"


@pytest.mark.parametrize("bucket", [1, 3, 6])
@pytest.mark.parametrize("query_len", [1, 4, 8])
def test_step_of_null_rows_changes_nothing(bucket: int, query_len: int) -> None:
    table = make_table(query_len)
    before = [tensor.clone() for tensor in table.row_tensors()]
    null = null_line(table)
    assert not any(int(null[name].sum()) for name in ("computed", "page_table", "state_slots"))
    table.inputs.fill()
    shapes = [StepShape.uniform(bucket, query_len), StepShape(1, 7, 7, prompt=True)]
    for shape in shapes:
        step = table.prepare(shape)
        assert (step.slot_mapping < PAGE).all() and not step.page_table.any()
        window = 1 if shape.prompt else shape.query_len
        table.accept_and_commit(step, torch.full((shape.rows, window), 3))
    for name, now in null_line(table).items():
        assert torch.equal(now, null[name]), name
    for tensor, was in zip(table.row_tensors(), before, strict=True):
        assert torch.equal(tensor[1:], was[1:])


def test_row_keeps_no_parameters_of_previous_request() -> None:
    """A row first used with every sampling parameter, then with none."""
    table = make_table(4)
    all_params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={3: 9.0},
        allowed_token_ids=[1, 2, 3],
        bad_words_ids=[[4]],
        min_tokens=5,
    )
    rows.write_row(table, 2, RowSpec.of(Request("a", [1, 2, 3], all_params, seed=9)), 0)
    everything = sampling.BIAS | sampling.PENALTIES | sampling.MIN_TOKENS | sampling.BAD_WORDS
    everything |= sampling.FILTERS | sampling.NOISE
    assert int(table.sampling.flags[2]) == everything
    table.sampling.counts[2] = 4
    table.drafts[2] = 8
    rows.write_row(table, 2, RowSpec.of(Request("b", [5, 6], SamplingParams(temperature=0))), 0)
    rows.write_row(table, 3, RowSpec.of(Request("b", [5, 6], SamplingParams(temperature=0))), 0)
    assert int(table.sampling.flags[2]) == 0
    used = ("temperature", "top_p", "min_p", "repetition", "top_k", "seed", "counts", "in_prompt")
    for name in used:
        tensor = getattr(table.sampling, name)
        assert torch.equal(tensor[2], tensor[3]), name
    assert (table.drafts[2] == -1).all()


def test_penalties_of_a_cached_prompt_include_its_cached_tokens() -> None:
    table = make_table(1)
    spec = RowSpec.of(Request("a", [1, 2, 3, 4], SamplingParams(repetition_penalty=2.0)))
    rows.write_row(table, 2, spec, 3)
    assert table.sampling.in_prompt[2].nonzero().flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1e-4, 100.0])
def test_temperatures_have_no_bounds(temperature: float) -> None:
    table = make_table(1)
    spec = RowSpec.of(Request("a", [1], SamplingParams(temperature=temperature)))
    rows.write_row(table, 2, spec, 0)
    assert float(table.sampling.temperature[2]) == pytest.approx(temperature)


@pytest.mark.parametrize(
    ("name", "prompt", "params"),
    [
        ("prompt", [1, VOCAB], {}),
        ("allowed_token_ids", [1], {"allowed_token_ids": [VOCAB]}),
        ("logit_bias", [1], {"logit_bias": {-1: 1.0}}),
        ("bad_words", [1], {"bad_words_ids": [[1, VOCAB]]}),
        ("stop_token_ids", [1], {"stop_token_ids": [VOCAB + 5]}),
    ],
)
def test_token_ids_outside_vocabulary_are_refused(
    name: str, prompt: list[int], params: dict[str, object]
) -> None:
    request = Request("r", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{name} has token id .*; allowed: 0 to 49") as caught:
        check_ids(request, VOCAB)
    assert caught.value.field == name
