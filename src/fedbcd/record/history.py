"""The table of a run: one row per evaluation."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, overload

from fedbcd.errors import RecordError
from fedbcd.record.html import html_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Row:
    """Where a run stood after some round. Accuracies are NaN without a test set, certificates where
    they were not computed.
    """

    round: int  # mixes of the coordinator so far
    clock: float  # virtual time
    activations: int  # uploads so far
    global_accuracy: float  # mean over servers, on the whole test set
    personal_accuracy: float  # mean over devices, each on its own labels (`data.measure`)
    worst_decile: float  # mean personal accuracy of the worst tenth of the devices
    disagreement: float  # mean over servers of ||zbar - z_n||
    distance: float  # mean over devices of ||x_i - z_n||
    # mean first-order gap of the personal models, over a sample of devices (Theorem 1, first line).
    # It needs a compact X; without one: the norm of the gradient mapping, which is that of the
    # gradient where there is no X at all
    gap: float = math.nan
    worst_gap: float = math.nan  # the largest gap of that sample
    pull: float = math.nan  # || sum gamma_i (zbar - x_i) ||^2 (second line)
    spread: float = math.nan  # the largest || zbar - z_n || (third line)


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Row))
OPTIONAL = ("gap", "worst_gap", "pull", "spread")  # not in the tables of version 0.1.0
_WHOLE = ("round", "activations")


class History(Sequence[Row]):
    """Rows in order of rounds; `to_pandas()` makes a DataFrame, `column(name)` a list."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = list(rows)

    def append(self, row: Row) -> None:
        self._rows.append(row)

    def column(self, name: str) -> list[float]:
        if name not in COLUMNS:
            raise KeyError(f"no column {name!r}; there are {', '.join(COLUMNS)}")
        return [getattr(row, name) for row in self._rows]

    @property
    def last(self) -> Row:
        return self._rows[-1]

    def to_pandas(self) -> "pandas.DataFrame":
        """A DataFrame with one row per evaluation. Needs pandas: pip install 'fedbcd[pandas]'."""
        import pandas

        return pandas.DataFrame([astuple(row) for row in self._rows], columns=list(COLUMNS))

    def write_csv(self, path: Path) -> None:
        """Write as CSV; floats in full precision."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(astuple(row) for row in self._rows)

    @classmethod
    def read_csv(cls, path: Path) -> "History":
        try:
            with path.open(newline="") as file:
                reader = csv.DictReader(file, strict=True)
                if tuple(reader.fieldnames or ()) not in (COLUMNS, COLUMNS[: -len(OPTIONAL)]):
                    raise ValueError(
                        f"its columns are {reader.fieldnames}, not {', '.join(COLUMNS)}"
                    )
                return cls([_row(record) for record in reader])
        except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
            raise RecordError(f"{path} is not a history of this version: {error}") from None

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    def __getitem__(self, index: int | slice) -> "Row | History":
        return History(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self._rows, other._rows))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [" ".join(f"{name:>17}" for name in COLUMNS)]
        lines += [" ".join(f"{value:>17.6g}" for value in astuple(row)) for row in self._rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(COLUMNS, ([f"{value:.6g}" for value in astuple(row)] for row in self))


def _row(record: dict[str, str]) -> Row:
    present = (name for name in COLUMNS if name in record)
    return Row(*(int(record[name]) if name in _WHOLE else float(record[name]) for name in present))  # type: ignore[arg-type]


def _same(a: Row, b: Row) -> bool:
    return all(
        x == y or (math.isnan(x) and math.isnan(y))
        for x, y in zip(astuple(a), astuple(b), strict=True)
    )
