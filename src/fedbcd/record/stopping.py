"""When a history no longer gets better, and which of its rows is the best: both follow from the
table alone, so a run that was stopped and resumed ends where one does that went through.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedbcd.config import fit
from fedbcd.errors import ConfigError
from fedbcd.record.history import Row


@dataclass(frozen=True)
class Plateau:
    """Ends a run after some looks at its models in which a measure has not become better.

    column    of the history that decides; by default that of personal models by the first measure,
              on validation samples where there are some
    patience  rows in a row that are no better than the best before them
    least     by how much a row must be better to count as better
    """

    column: str = ""
    patience: int = 5
    least: float = 0.0

    def __post_init__(self) -> None:
        fit(self, "stop.")
        if self.patience < 1:
            raise ConfigError(f"stop.patience = {self.patience} must be 1 or more")
        if not 0 <= self.least < math.inf:
            raise ConfigError(f"stop.least = {self.least:g} must be a finite number, 0 or more")

    def is_over(self, history: Sequence[Row], column: str, *, lower: bool) -> bool:
        """`lower`: the lower a value, the better. Rows without a value do not count."""
        sign, best, without = -1 if lower else 1, -math.inf, 0
        for row in with_value(history, column):
            value = sign * row[column]
            better = value > best + self.least
            best, without = (value, 0) if better else (best, without + 1)
        return without >= self.patience


def best_row(history: Sequence[Row], column: str, *, lower: bool) -> Row | None:
    """The first of those with the best value; None where no row has one."""
    rows, sign = with_value(history, column), -1 if lower else 1
    return max(rows, key=lambda row: sign * row[column], default=None)


def with_value(history: Sequence[Row], column: str) -> list[Row]:
    """The rows in which this column is a number."""
    return [row for row in history if not math.isnan(row.get(column, math.nan))]
