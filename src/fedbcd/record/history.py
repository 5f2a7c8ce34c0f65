"""The table of a run: one row per evaluation. Which columns there are is said here, and nowhere
else: measures are named in a run, and their columns are made of these names.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, overload

from fedbcd.config import nearest, writing_file
from fedbcd.errors import ConfigError, RecordError
from fedbcd.record.html import html_table

if TYPE_CHECKING:
    import pandas

Scored = Literal["global", "personal", "worst", "validation"]
# what stands in the columns of a measure
SCORED: dict[Scored, str] = {
    "global": "the servers' models on the common test samples, their mean",
    "personal": "each device's own model on its own test samples, the mean over devices",
    "worst": "the mean of the worst tenth of the devices",
    "validation": "each device's own model on its validation samples, the mean over devices",
}
# round: mixes of the coordinator; clock: virtual time; activations: uploads
PLACE = ("round", "clock", "activations")
# taken and moved so far: gradient steps of devices, samples in their mini-batches, and bytes of
# models between devices and servers
WORK = ("gradient_steps", "samples_seen", "bytes_up", "bytes_down")
# mean loss of personal models on training samples of their devices
TRAIN_LOSS = "train_loss"
# mean over servers of ||zbar - z_n||; mean over devices of ||x_i - z_n||
APART = ("disagreement", "distance")
# mean first-order gap of the personal models, over a sample of devices (Theorem 1, first line; it
# needs a compact X, and is the norm of the gradient mapping without one), and the largest gap of
# that sample; || sum gamma_i (zbar - x_i) ||^2 (second line); the largest || zbar - z_n || (third)
CERTIFICATES = ("gap", "worst_gap", "pull", "spread")
WHOLE = (*PLACE[::2], *WORK)  # columns of whole numbers
ACCURACY = "accuracy"


def column_of(scored: Scored, measure: str) -> str:
    """The name of a column."""
    if scored == "worst":
        return "worst_decile" if measure == ACCURACY else f"worst_decile_{measure}"
    return f"{scored}_{measure}"


def scored_in(column: str, measures: Iterable[str]) -> tuple[Scored, str] | None:
    """What a column holds of which measure; None: it is of none."""
    found = ((each, name) for name in measures for each in SCORED)
    return next((pair for pair in found if column_of(*pair) == column), None)


def better_of(column: str, measures: Mapping[str, str]) -> str:
    """Which values of a column are better; of those that are of no measure, the lower ones."""
    found = scored_in(column, measures)
    return "lower" if found is None else measures[found[1]]


def judged_on(column: str, measures: Iterable[str]) -> str:
    """By which samples a column is computed."""
    found = scored_in(column, measures)
    if found is None:
        return "training samples and models"
    return "validation samples" if found[0] == "validation" else "test samples"


def deciding(column: str, measures: Iterable[str], validation: bool) -> str:
    """The column that is said; else that of personal models by the first measure, on validation
    samples where there are some.
    """
    return column or column_of("validation" if validation else "personal", next(iter(measures)))


def in_words(column: str) -> str:
    """A column as people read it."""
    return "clock time" if column == "clock" else column.replace("_", " ")


def columns_of(measures: Iterable[str], validation: bool = False) -> tuple[str, ...]:
    """All columns of a run with these measures, in order."""
    scored = [each for each in SCORED if validation or each != "validation"]
    scores = [column_of(each, measure) for measure in measures for each in scored]
    return (*PLACE, *WORK, *scores, TRAIN_LOSS, *APART, *CERTIFICATES)


# what tables of ends show of a measure, with its titles there; of accuracy, what the paper shows
ENDS: dict[Scored, str] = {"global": "global", "personal": "personal", "worst": "worst"}
GLOBAL, PERSONAL, WORST = (column_of(each, ACCURACY) for each in ENDS)
# of version 0.1.0, in order; the certificates came later
FIRST_COLUMNS = (
    *PLACE,
    *(GLOBAL, PERSONAL, WORST),
    *APART,
    *CERTIFICATES,
)


class Row(Mapping[str, float]):
    """Named numbers, by attribute or by key: where a run stood after some round. A score is NaN
    where there is nothing to test on, a certificate where it was not computed.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, float] | None = None, **more: float) -> None:
        self._values = {**(values or {}), **more}

    def __getitem__(self, name: str) -> float:
        try:
            return self._values[name]
        except KeyError:
            raise UnknownColumn(name, self._values) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(str(UnknownColumn(name, self._values))) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def changed(self, **values: float) -> "Row":
        """With other values."""
        return Row({**self._values, **values})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return self._values.keys() == other._values.keys() and all(
            a == b or (math.isnan(a) and math.isnan(b))
            for a, b in ((self[name], other[name]) for name in self)
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._values,)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value:.6g}' for name, value in self.items())})"


class Table(Sequence[Row]):
    """Rows; `to_pandas()` makes a DataFrame, `column(name)` a list, `write_csv(path)` a file. A row
    without some column has NaN there.
    """

    what: ClassVar[str] = "table of this version"
    whole: ClassVar[tuple[str, ...]] = ()  # columns of whole numbers
    begins: ClassVar[tuple[str, ...]] = ()  # the first columns

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = list(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """In the order of the latest row; then what only earlier ones have."""
        longest = [self._rows[-1], *self._rows] if self._rows else []
        return tuple(dict.fromkeys(name for row in longest for name in row))

    def append(self, row: Row) -> None:
        self._rows.append(row)

    def column(self, name: str) -> list[float]:
        if name not in self.columns:
            raise UnknownColumn(name, self.columns)
        return [row.get(name, math.nan) for row in self._rows]

    @property
    def last(self) -> Row:
        return self._rows[-1]

    def to_pandas(self) -> "pandas.DataFrame":
        """A DataFrame with a row for each. Needs pandas: pip install 'fedbcd[pandas]'."""
        import pandas

        columns = self.columns
        rows = [[row.get(name, math.nan) for name in columns] for row in self._rows]
        return pandas.DataFrame(rows, columns=list(columns))

    def write_csv(self, path: str | Path) -> None:
        """Write as CSV; floats in full precision."""
        with writing_file(path), Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            columns = self.columns
            writer.writerow(columns)
            writer.writerows([row.get(name, math.nan) for name in columns] for row in self)

    @classmethod
    def read_csv(cls, path: Path) -> Self:
        try:
            with path.open(newline="") as file:
                reader = csv.DictReader(file, strict=True)
                cls._check(tuple(reader.fieldnames or ()))
                return cls(cls._row(record) for record in reader)
        except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
            raise RecordError(f"{path} is not a {cls.what}: {error}") from None

    @classmethod
    def _check(cls, columns: tuple[str, ...]) -> None:
        if columns[: len(cls.begins)] != cls.begins:
            raise ValueError(f"its columns are {columns}, not {', '.join(cls.begins)} ...")

    @classmethod
    def _row(cls, record: Mapping[str, str]) -> Row:
        if None in record or None in record.values():
            raise ValueError("a row has another number of values than there are columns")
        return Row(
            {
                name: int(text) if name in cls.whole and text != "nan" else float(text)
                for name, text in record.items()
            }
        )

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    @overload
    def __getitem__(self, index: str) -> list[float]: ...
    def __getitem__(self, index: int | slice | str) -> "Row | Self | list[float]":
        if isinstance(index, str):
            return self.column(index)
        return self._like(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def _like(self, rows: Iterable[Row]) -> Self:
        return type(self)(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, Table) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(block) for block in _blocks(self))

    def _repr_html_(self) -> str:
        names = self.columns
        return html_table(names, ([_text(row.get(n, math.nan)) for n in names] for row in self))


class History(Table):
    """Rows in order of rounds. `measures` says of each measure which is better, "higher" or
    "lower"; the first is what a run is judged by.
    """

    what, whole, begins = "history of this version", WHOLE, PLACE

    def __init__(self, rows: Iterable[Row] = (), measures: Mapping[str, str] | None = None) -> None:
        super().__init__(rows)
        self._measures = None if measures is None else dict(measures)

    @property
    def columns(self) -> tuple[str, ...]:
        return super().columns or columns_of(self._measures or ())

    @property
    def measures(self) -> dict[str, str]:
        """Of each, which is better; "higher" where nobody has said."""
        if self._measures is not None:
            return dict(self._measures)
        start = column_of("personal", "")
        return {
            name.removeprefix(start): "lower" if name.endswith("loss") else "higher"
            for name in self.columns
            if name.startswith(start)
        }

    def judged_by(self, measures: Mapping[str, str]) -> None:
        """From here on: a run that goes on may be measured by more."""
        self._measures = dict(measures)

    @property
    def first_measure(self) -> str:
        """What it is judged by."""
        return next(iter(self.measures), ACCURACY)

    @property
    def ends(self) -> list[str]:
        """The columns of the first measure: personal models, global ones, the worst tenth."""
        kinds: tuple[Scored, ...] = ("personal", "global", "worst")
        return [column_of(each, self.first_measure) for each in kinds]

    def scores(self, scored: Scored, measure: str = "") -> list[float]:
        """A column of a measure, of the first by default; NaN where it is not there."""
        name = column_of(scored, measure or self.first_measure)
        return [row.get(name, math.nan) for row in self]

    def known_by(self, notes: Mapping[str, str]) -> Self:
        """The same with its measures as the notes of a record name them. Version 0.1.0 called the
        columns of every metric those of accuracy.
        """
        if "measures" in notes:
            return type(self)(self, json.loads(notes["measures"]))
        metric = json.loads(notes.get("metric", "{}"))
        if not metric:
            return type(self)(self, {ACCURACY: "higher"})
        names = {column_of(each, ACCURACY): column_of(each, metric["name"]) for each in SCORED}
        rows = [Row({names.get(name, name): row[name] for name in row}) for row in self]
        return type(self)(rows, {metric["name"]: metric["better"]})

    def _like(self, rows: Iterable[Row]) -> Self:
        return type(self)(rows, self._measures)

    def plain(self) -> dict[str, Any]:
        """As a record holds it."""
        columns = self.columns
        rows = [[row.get(name, math.nan) for name in columns] for row in self]
        return {"columns": list(columns), "rows": rows, "measures": self.measures}

    @classmethod
    def of_plain(cls, found: Any) -> Self:
        """From a record, also one that holds rows without names. ValueError, TypeError, KeyError:
        it is none.
        """
        if isinstance(found, list):
            found = {"columns": FIRST_COLUMNS, "rows": found}
        columns, rows = found["columns"], found["rows"]
        if not all(len(PLACE) < len(row) <= len(columns) for row in rows):
            raise ValueError(f"rows must have up to {len(columns)} values")
        return cls(
            [_with_certificates(dict(zip(columns, row, strict=False))) for row in rows],
            found.get("measures"),
        )

    @classmethod
    def _row(cls, record: Mapping[str, str]) -> Row:
        return _with_certificates(super()._row(record))


class DeviceTable(Table):
    """A row for each device: its server, its samples, each measure by its own model and by its
    server's global model, and what the own one gains.
    """

    what, whole = "table of devices", ("device", "server", "samples")
    begins = whole


class UnknownColumn(ConfigError, KeyError):
    """A table has no such column."""

    def __init__(self, name: str, columns: Iterable[str]) -> None:
        super().__init__(name, tuple(columns))

    def __str__(self) -> str:
        name, columns = self.args
        there = f"; there are {', '.join(columns)}"
        return f"no column {name!r}{nearest(str(name), columns)}{there}"


def _with_certificates(values: Mapping[str, float]) -> Row:
    return Row({**values, **{name: values.get(name, math.nan) for name in CERTIFICATES}})


# ------------------------------------------------------------------------------------------------
# as text
WIDTH, DIGITS = 100, 6


def _blocks(table: Table) -> Iterator[list[str]]:
    """Lines that fit the width: columns side by side, those that do not fit below, each time after
    the first column. Columns in which there is nothing are left out.
    """
    names = [n for n in table.columns if not all(map(math.isnan, table.column(n)))]
    texts = {name: [name, *(_text(value) for value in table.column(name))] for name in names}
    cells = {
        name: [text.rjust(max(map(len, column))) for text in column]
        for name, column in texts.items()
    }
    first, block = names[:1], names[:1]
    for name in names[1:]:
        width = sum(len(cells[each][0]) + 1 for each in (*block, name)) - 1
        if width > WIDTH and len(block) > 1:
            yield _lines(cells, block)
            block = [*first]
        block.append(name)
    yield _lines(cells, block)


def _lines(cells: Mapping[str, Sequence[str]], names: Sequence[str]) -> list[str]:
    return [" ".join(row) for row in zip(*(cells[name] for name in names), strict=True)]


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.{DIGITS}g}"
