"""Differences from 0.1.0 that are meant: the one list of them. Everything else is a fault."""

import math
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meant:
    """What may differ, by how much, and since which commit."""

    cases: str  # how their names begin
    fields: str  # a pattern of whole places in an outcome, such as history[3].clock
    tolerance: float  # relative, of a number
    commit: str
    why: str

    def covers(self, place: str, before: Any, after: Any) -> bool:
        """Whether this difference is one of them."""
        return (
            re.fullmatch(self.fields, place) is not None
            and isinstance(before, float)
            and isinstance(after, float)
            and math.isclose(before, after, rel_tol=self.tolerance)
        )


MEANT = (
    Meant(
        cases="clock-weibull-gamma: ",
        fields=r"(history\[\d+\]|summary)\.clock",
        tolerance=1e-13,
        commit="2f34877",
        why="gamma delays by scipy, which is nearer to the truth in the last bits",
    ),
)


def meant_for(case: str) -> tuple[Meant, ...]:
    """What is meant in a case of this name."""
    return tuple(each for each in MEANT if case.startswith(each.cases))
