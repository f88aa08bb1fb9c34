"""Timer of a step; on a GPU between two events of its stream."""

import time

import torch


class StepTimer:
    """Timer that starts when it is made. Call end() after the launch and wait() before ms."""

    def __init__(self, device: str) -> None:
        self.events = None
        self.began = time.perf_counter()
        self.ended = self.began
        if device == "cuda":  # host clocks would time the launch only
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()

    def end(self) -> None:
        """Record the end, in the order of device work."""
        self.ended = time.perf_counter()
        if self.events:
            self.events[1].record()

    def wait(self) -> None:
        """Wait until the device has reached the end."""
        if self.events:
            self.events[1].synchronize()

    @property
    def ms(self) -> float:
        """Return the time from start to end in ms."""
        if self.events:
            return self.events[0].elapsed_time(self.events[1])
        return 1000 * (self.ended - self.began)
