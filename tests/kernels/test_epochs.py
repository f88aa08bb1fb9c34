"""Launch epochs: serial numbers on the host, generations on the device."""

import itertools

import torch

from lockstep.kernels.epochs import SERIALS, LaunchEpochs, launch_epochs


def test_serial_numbers_are_unique() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    assert [epochs.next_serial() for _ in range(3)] == [1, 2, 3]


def test_serial_numbers_wrap_to_one() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    epochs._launches = itertools.count(SERIALS - 1)
    assert [epochs.next_serial() for _ in range(2)] == [SERIALS, 1]


def test_advance_increments_device_generation() -> None:
    epochs = LaunchEpochs(torch.device("cpu"))
    for _ in range(2):
        epochs.advance()
    assert epochs.generation.tolist() == [2]


def test_launch_epochs_is_one_per_device() -> None:
    assert launch_epochs(torch.device("cpu")) is launch_epochs(torch.device("cpu"))


def test_epochs_created_in_inference_mode_advance_outside() -> None:
    with torch.inference_mode():
        epochs = LaunchEpochs(torch.device("cpu"))
        epochs.advance()
    epochs.advance()
    assert epochs.generation.tolist() == [2]
