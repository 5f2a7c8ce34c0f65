"""A hybrid logical clock: near to real time, and never earlier than anything that was heard or said before."""

TICK = 1e-6  # seconds between two events of one role at least, and between cause and effect


class HybridClock:
    """Seconds since the run began. Events in order of this time are in an order in which causes come before effects.

    `last` is the time of the latest event; who takes a time for an event says so by setting it.
    """

    def __init__(self, last: float = 0.0) -> None:
        self.last = last

    def at(self, now: float) -> float:
        """The time of an event that comes from within, at local time `now`."""
        return max(now, self.last + TICK)

    def after(self, sent: float, now: float) -> float:
        """The time of an event that a letter brings which was sent at `sent`."""
        return self.at(max(now, sent + TICK))
