"""Several parts of a batch at the same time, on CPU: one thread each and none inside an operation.

Operations on small models are too short to share between threads; whole devices are not. Results do
not depend on who does what.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Workers(Protocol):
    """Calls a function on many things and gives the results in their order."""

    @property
    def count(self) -> int:
        """How many work at the same time."""
        ...

    def map(self, function: Callable[..., T], /, *things: Iterable[object]) -> Iterable[T]:
        """As the built-in `map`."""
        ...


class OneWorker:
    """One after another."""

    count = 1

    def map(self, function: Callable[..., T], /, *things: Iterable[object]) -> Iterable[T]:
        """The built-in `map`."""
        return map(function, *things)


class ThreadWorkers(ThreadPoolExecutor):
    """Threads that know how many they are."""

    def __init__(self, count: int) -> None:
        super().__init__(count, thread_name_prefix="fedbcd-worker")
        self.count = count


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """As many workers; torch's own threads are put aside meanwhile."""
    if count <= 1:
        yield OneWorker()
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadWorkers(count) as crew:
            yield crew
    finally:
        torch.set_num_threads(before)
