"""Launch epochs: serial numbers of the host, generations of the device."""

import itertools

import torch

from lockstep.kernels.epochs import SERIALS, LaunchEpochs, launch_epochs


def test_launches_have_serial_numbers_of_their_own() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    assert [epochs.next_serial() for _ in range(3)] == [1, 2, 3]


def test_serial_numbers_stay_positive_where_they_repeat() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    epochs._launches = itertools.count(SERIALS - 1)
    assert [epochs.next_serial() for _ in range(2)] == [SERIALS, 1]


def test_generations_are_counted_on_the_device() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    for _ in range(2):
        epochs.advance()
    assert epochs.generation.tolist() == [2]


def test_launches_of_a_device_share_their_epochs() -> None:
    assert launch_epochs(torch.device("cpu")) is launch_epochs(torch.device("cpu"))


def test_epochs_made_in_inference_mode_count_outside_of_it() -> None:
    with torch.inference_mode():
        epochs = LaunchEpochs(torch.device("cpu"))
        epochs.advance()
    epochs.advance()
    assert epochs.generation.tolist() == [2]
