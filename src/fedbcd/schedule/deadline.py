"""When a phase stops waiting for those who have not come."""

import math
from dataclasses import dataclass

from fedbcd.config import fit
from fedbcd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Deadline:
    """A server's phase ends `after` so much time with the uploads that have come, once they are
    `least`; and it lets in `spare` more devices than it needs, for those that do not come in time.
    What is under way when it ends counts in the next phase.

    `after` is in the units of the clock, in a deployment in seconds (times `--time-scale`); None
    is no deadline.
    """

    after: float | None = None
    least: int = 1
    spare: int = 0

    def __post_init__(self) -> None:
        fit(self, "deadline.")
        if self.after is not None and not 0 < self.after < math.inf:
            raise ConfigError(
                f"deadline.after={self.after} must be finite and above 0, the time from the opening"
                " of a phase; leave it out for no deadline"
            )
        if self.least < 1:
            raise ConfigError(
                f"deadline.least={self.least} must be 1 or more: a phase ends with somebody's"
                " upload"
            )
        if self.spare < 0:
            raise ConfigError(
                f"deadline.spare={self.spare} must be 0 or more, the devices let in beyond those"
                " that are needed"
            )
