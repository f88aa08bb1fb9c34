"""How long a step takes, known when its results are: on a GPU between two events of its stream."""

import time

import torch


class StepTimer:
    """Begins when it is made. end() is called when all is launched; wait() before ms is read."""

    def __init__(self, device: str) -> None:
        self.events = None
        self.began = time.perf_counter()
        self.ended = self.began
        if device == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()

    def end(self) -> None:
        """Marks the end, in the order of device work."""
        self.ended = time.perf_counter()
        if self.events:
            self.events[1].record()

    def wait(self) -> None:
        """Until the device has come to the end."""
        if self.events:
            self.events[1].synchronize()

    @property
    def ms(self) -> float:
        """From beginning to end, ms."""
        if self.events:
            return self.events[0].elapsed_time(self.events[1])
        return 1000 * (self.ended - self.began)
