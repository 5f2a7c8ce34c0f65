"""What plays the rounds of a run: a player has a clock, and brings the numbers up to it."""

from collections.abc import Iterator
from typing import Protocol

from fedbcd.compute.numbers import Numbers
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.work import Round

NONE = Round(0, 0.0, 0, ())  # before the first


class Player(Protocol):
    """Plays rounds."""

    @property
    def now(self) -> float:
        """The virtual clock."""
        ...

    @property
    def round(self) -> int:
        """Rounds played."""
        ...

    @property
    def activations(self) -> int:
        """Uploads so far."""
        ...

    @property
    def done(self) -> Effort:
        """What devices have done so far."""
        ...

    def play_round(self) -> None:
        """One more round."""
        ...

    def settle(self) -> None:
        """Bring the numbers up to this moment of the clock."""
        ...


class EventPlayer:
    """Rounds as their events make them."""

    def __init__(
        self, numbers: Numbers, rounds: Iterator[Round], done: Effort, last: Round = NONE
    ) -> None:
        """`done` counts what is done in `rounds`; `last`: where they go on."""
        self._numbers, self._rounds, self._last, self.done = numbers, rounds, last, done

    @property
    def now(self) -> float:
        """The virtual clock."""
        return self._last.clock

    @property
    def round(self) -> int:
        """Rounds played."""
        return self._last.number

    @property
    def activations(self) -> int:
        """Uploads so far."""
        return self._last.activations

    def play_round(self) -> None:
        """One more round."""
        self._last = next(self._rounds)
        self._numbers.play(self._last)

    def settle(self) -> None:
        """Bring the numbers up to this moment of the clock."""
        self._numbers.settle()
