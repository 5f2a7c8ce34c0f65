"""What devices have done so far, counted from the schedule alone."""

from collections.abc import Sequence

from fedbcd.algorithm.method import Method
from fedbcd.algorithm.plan import gradients_of


class Effort:
    """Gradient steps that devices have taken so far, in sessions that have ended, and samples in
    their mini-batches.
    """

    def __init__(self, method: Method | None = None, sizes: Sequence[int] = ()) -> None:
        """Of a method on devices with so many samples; without one, nothing is counted."""
        self.gradient_steps = self.samples = 0
        self._method, self._sizes = method, sizes
        self._known: dict[tuple[int, bool], int] = {}  # gradients of a session

    def add(self, devices: Sequence[int], steps: int, *, offline: bool) -> None:
        """A session of each of these devices."""
        if self._method is None:
            return
        key = (steps, offline)
        if key not in self._known:
            plan = self._method.offline if offline else self._method.plan
            self._known[key] = gradients_of(plan, steps)
        gradients, batch = self._known[key], self._method.batch
        self.gradient_steps += gradients * len(devices)
        self.samples += gradients * (
            sum(self._sizes[i] for i in devices) if batch == "all" else batch * len(devices)
        )
