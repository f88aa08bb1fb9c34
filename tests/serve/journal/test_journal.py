"""Journals: what is kept where space is short, whose it is, and what is not resumed."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ConfigError
from lockstep.outputs import ForcedMismatch, Logprob, RequestMetrics
from lockstep.serve.journal import journal as journal_module
from lockstep.serve.journal.journal import Journal
from lockstep.serve.journal.saved_answer import (
    SavedAnswer,
    SavedEnd,
    SavedRequest,
    UpdateEncoder,
    decode,
)

SIZE = 1 << 20
IDENTITY = {"model": "tiny", "system_fingerprint": "ls-1"}


def request_of(name: str, owner: str = "", body: str = "{}") -> SavedRequest:
    return SavedRequest(
        kind="chat",
        id=name,
        engine_id=f"engine-{name}",
        owner=owner,
        created=5,
        deadline=None,
        arrival=1.5,
        prompts=[[1, 2, 3]],
        seeds=[-7],
        max_tokens=[None],
        body=body,
    )


def update_of(token_ids: list[int], **more: Any) -> TokenUpdate:
    metrics = RequestMetrics(arrival_time=1.5, num_steps=len(token_ids), num_cached_tokens=2)
    update = TokenUpdate(
        token_ids, None, None, None, metrics, None, None, ("plain",) * len(token_ids)
    )
    return update._replace(**more)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def opened(path: str, size: int = SIZE, identity: dict[str, str] = IDENTITY) -> Journal:
    journal = Journal(path, size)
    journal.start(identity)
    return journal


def write(journal: Journal, name: str, num_bytes: int, end: bool, owner: str = "") -> None:
    """Write an answer of this size."""
    recorder = journal.begin(request_of(name, owner, "x" * num_bytes))
    if recorder is not None:
        recorder.add(0, update_of([4, 5]))
        if end:
            recorder.end()


def find(journal: Journal, owner: str, name: str) -> SavedAnswer | None:
    records = journal.records(owner, name)
    return None if records is None else journal.read(records)


def kept(journal: Journal, names: Iterator[str] | list[str]) -> list[str]:
    return [name for name in names if find(journal, "", name) is not None]


def test_updates_are_read_as_they_were() -> None:
    scores = [{7: Logprob(-0.1234567890123, 1), 9: Logprob(float("-inf"), 3)}]
    metrics = RequestMetrics(1.5, 2.25, None, 3, 4, 1, 2, 0, 1.75)
    updates = [
        (0, TokenUpdate([7], scores, None, None, metrics, [None, *scores], None, ("plain",))),
        (1, update_of([1, 2, 3], token_sources=("draft", "bonus", "forced"))),
        (0, update_of([], error="why", finish_reason="error")),
        (
            1,
            update_of(
                [4],
                finish_reason="stop",
                stop_reason=4,
                metrics=RequestMetrics(1.5, num_steps=9, forced_mismatch=ForcedMismatch(3, 4, -1)),
            ),
        ),
    ]
    encoder = UpdateEncoder()
    records = [request_of("a").to_record(), *(encoder.encode(*update) for update in updates)]
    assert decode(records) == SavedAnswer(request_of("a"), updates)
    end = SavedEnd(3.5, ("DeadlineError", "late \udcff"))
    assert decode([*records, end.to_record()]) == SavedAnswer(request_of("a"), updates, end)


def test_open_and_complete_answers_are_found_again(path: str) -> None:
    first = opened(path)
    write(first, "open", 10, end=False)
    write(first, "complete", 10, end=True)
    write(first, "dropped", 10, end=False)
    first.remove("", "dropped")
    first.close()
    second = opened(path)
    (answer,) = second.take_open_answers()
    assert (answer.request.id, answer.end) == ("open", None)
    assert [update.token_ids for _, update in answer.updates] == [[4, 5]]
    complete = find(second, "", "complete")
    assert complete is not None and complete.end is not None and complete.end.error is None
    recorder = second.resume(answer)
    assert recorder is not None and second.resume(complete) is None
    recorder.add(0, update_of([6]))
    recorder.end()
    recorder.end()
    second.close()
    third = opened(path)
    assert third.take_open_answers() == [] and find(third, "", "dropped") is None
    saved = find(third, "", "open")
    assert saved is not None and [u.token_ids for _, u in saved.updates] == [[4, 5], [6]]
    third.close()


def test_the_oldest_complete_answers_make_room(path: str) -> None:
    journal = opened(path)
    write(journal, "open", 100_000, end=False)
    names = [f"n{number}" for number in range(20)]
    for name in names:
        write(journal, name, 100_000, end=True)
    assert kept(journal, names) == names[11:]
    assert find(journal, "", "open") is not None
    journal.close()
    journal = opened(path)
    write(journal, "later", 100_000, end=True)
    assert kept(journal, names) == names[12:], "the order outlives the process"
    assert [answer.request.id for answer in journal.take_open_answers()] == ["open"]
    journal.close()


def test_open_answers_are_never_dropped_for_others(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(path)
    names = [f"n{number}" for number in range(12)]
    for name in names:
        write(journal, name, 100_000, end=False)
    assert kept(journal, names) == names[:10]
    assert "full of open answers: n10 cannot be resumed" in caplog.text
    # An answer that grows is given up itself.
    recorder = journal.begin(request_of("grows"))
    assert recorder is not None
    for _ in range(2000):
        recorder.add(0, update_of([1] * 50))
    recorder.end()
    assert find(journal, "", "grows") is None
    assert caplog.text.count("cannot be resumed") == 3
    journal.close()
    journal = opened(path)
    assert [answer.request.id for answer in journal.take_open_answers()] == names[:10]
    journal.close()


def test_an_answer_that_never_fits_drops_no_other(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(path)
    names = [f"n{number}" for number in range(5)]
    for name in names:
        write(journal, name, 100_000, end=True)
    write(journal, "open", 400_000, end=False)
    write(journal, "large", 700_000, end=True)
    assert "large cannot be resumed" in caplog.text
    assert kept(journal, names) == names
    write(journal, "fits", 300_000, end=True)
    assert kept(journal, names) == names[2:]
    journal.close()


def test_a_long_name_of_a_model_fits(path: str) -> None:
    identity = {"model": "/" + "\N{SNOWMAN}" * 2000, "system_fingerprint": "ls-1"}
    journal = opened(path, identity=identity)
    write(journal, "one", 10, end=True)
    journal.close()
    journal = opened(path, identity=identity)
    assert find(journal, "", "one") is not None
    journal.close()


def test_an_answer_belongs_to_an_api_key(path: str) -> None:
    journal = opened(path)
    owner, other = journal.owner("digest of a key"), journal.owner("of another")
    assert len({owner, other, journal.owner("")}) == 3 and journal.owner("") == ""
    write(journal, "one", 10, end=True, owner=owner)
    write(journal, "one", 20, end=True, owner=other)
    for name, size in ((owner, 10), (other, 20)):
        saved = find(journal, name, "one")
        assert saved is not None and len(saved.request.body) == size
    assert find(journal, "", "one") is None
    journal.close()
    assert b"digest of a key" not in Path(path).read_bytes()
    journal = opened(path)
    assert journal.owner("digest of a key") == owner, "the salt is in the file"
    journal.close()


@pytest.mark.parametrize("name", IDENTITY)
def test_another_model_is_named_and_not_resumed(
    path: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    journal = opened(path)
    write(journal, "open", 10, end=False)
    write(journal, "complete", 10, end=True)
    journal.close()
    journal = opened(path, identity={**IDENTITY, name: "another"})
    assert "(1 were open)" in caplog.text
    assert f"{name} was {IDENTITY[name]}, and is another" in caplog.text
    assert not journal.take_open_answers() and find(journal, "", "complete") is None
    journal.close()
    assert b"engine-open" not in Path(path).read_bytes()


def test_old_answers_are_erased(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(path)
    write(journal, "complete", 10, end=True)
    assert find(journal, "", "complete") is not None
    journal.drop_expired()
    assert find(journal, "", "complete") is not None
    write(journal, "later", 10, end=True)
    monkeypatch.setattr(journal_module, "MAX_AGE", -1.0)
    journal.drop_expired()
    assert not kept(journal, ["complete", "later"])
    write(journal, "last", 10, end=True)
    journal.close()
    data = Path(path).read_bytes()
    assert b"engine-complete" not in data and b"engine-last" in data
    opened(path).close()
    assert b"engine-last" not in Path(path).read_bytes(), "the next process erases it"


def test_another_size_keeps_answers(path: str) -> None:
    journal = opened(path, 4 * SIZE)
    names = [f"n{number}" for number in range(12)]
    for name in names:
        write(journal, name, 200_000, end=name != "n3")
    journal.close()
    journal = opened(path, SIZE)
    assert os.path.getsize(path) <= SIZE
    assert kept(journal, names) == ["n3", "n8", "n9", "n10", "n11"]
    for number in range(4):
        write(journal, f"open{number}", 200_000, end=False)
    journal.close()
    journal = Journal(path, SIZE // 2)
    with pytest.raises(ConfigError, match="journal_size=0 MiB is less than the open answers"):
        journal.start(IDENTITY)
    journal.close()


def test_wrong_files_are_errors(path: str, tmp_path: Path) -> None:
    journal = opened(path)
    with pytest.raises(ConfigError, match="is in use by another process.*--journal"):
        Journal(path, SIZE)
    journal.close()
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not a journal that this release can read.*delete"):
        Journal(str(tmp_path / "notes"), SIZE)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal(str(tmp_path / "none" / "journal"), SIZE)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal(str(tmp_path), SIZE)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal("\0", SIZE)


def test_a_disk_that_fails_ends_the_journal_and_no_answer(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = opened(path)
    recorder = journal.begin(request_of("open"))
    assert recorder is not None

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for _ in range(3):
            recorder.add(0, update_of([1]))
        recorder.end()
        assert journal.begin(request_of("next")) is None
    assert caplog.text.count("No space left on device") == 1
    journal.close()


@pytest.mark.parametrize(
    ("name", "model"), [("pwrite", "tiny"), ("pwrite", "another"), ("pread", "another")]
)
def test_a_disk_that_fails_at_the_start_is_an_error(
    path: str, monkeypatch: pytest.MonkeyPatch, name: str, model: str
) -> None:
    journal = opened(path)
    write(journal, "complete", 10, end=True)
    journal.close()
    journal = Journal(path, SIZE)

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(ConfigError, match="journal=.* cannot be read or written: Input/output"):
            journal.start({**IDENTITY, "model": model})
    journal.close()


def test_answers_of_another_release_are_erased(path: str, caplog: pytest.LogCaptureFixture) -> None:
    journal = opened(path)
    write(journal, "open", 10, end=False)
    number = journal._file.create()
    journal._file.append(number, b'["request", {"kind": "chat"}]')
    journal._file.append(number, b'["end", 3.5, null, "a field that this release does not know"]')
    journal.close()
    journal = opened(path, identity={**IDENTITY, "system_fingerprint": "ls-2"})
    assert "(1 were open)" in caplog.text
    journal.close()


def test_damaged_answers_are_dropped(path: str, caplog: pytest.LogCaptureFixture) -> None:
    journal = opened(path)
    write(journal, "good", 10, end=True)
    journal._file.append(journal._file.create(), b'["request", {"kind": "chat"}]')
    journal.close()
    caplog.set_level(logging.WARNING)
    journal = opened(path)
    assert "cannot be read, and is dropped" in caplog.text
    assert find(journal, "", "good") is not None and not journal.take_open_answers()
    journal.close()
