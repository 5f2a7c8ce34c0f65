"""Methods side by side: means and deviations over seeds, who gains and who loses against a
baseline, and when a common score is reached.
"""

import csv
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbcd.algorithm.method import Facts, Method
from fedbcd.config import convert, nearest, writing_file
from fedbcd.describe import flat
from fedbcd.errors import ConfigError
from fedbcd.experiments.figures import draw_bands
from fedbcd.experiments.pool import Result
from fedbcd.record.history import (
    ENDS,
    PLACE,
    WORK,
    History,
    UnknownColumn,
    better_of,
    column_of,
    in_words,
)
from fedbcd.record.html import html_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

COSTS = (*PLACE[1:], *WORK)


@dataclass(frozen=True)
class Against:
    """A method beside a baseline, on the same seeds and devices.

    gain       mean over seeds of how much better its personal models are (in the direction of the
               measure), and `deviation` over seeds
    p_seeds    of a paired t-test over seeds: how likely so large a mean difference would be if
               another choice of seeds were as likely to turn it round. NaN with one seed. It is
               about the methods on data like these, and few seeds can show large effects only
    p_devices  of Wilcoxon's signed-rank test over devices, each with its difference averaged over
               seeds: whether devices gain more often and by more than they lose. Devices of one
               seed share servers, models and a split, so they are not independent, and this p is
               smaller than it should be: it is about these devices in these runs
    harmed     share of the devices, over all seeds, that have a worse personal model than with the
               baseline, and `harmed_deviation` over seeds
    """

    title: str
    baseline: str
    gain: float
    deviation: float
    p_seeds: float
    p_devices: float
    harmed: float
    harmed_deviation: float
    seeds: int
    devices: int

    @property
    def sentence(self) -> str:
        over = f"{self.seeds} seeds" if self.seeds > 1 else "one seed"
        chance = "" if math.isnan(self.p_seeds) else f", p = {self.p_seeds:.2g} over seeds"
        return (
            f"{self.title} against {self.baseline}: {self.gain:+.3f} in the mean of {over}{chance},"
            f" {self.p_devices:.2g} over devices; {self.harmed:.0%} of devices lose"
        )


@dataclass(frozen=True, repr=False)
class Comparison:
    """What several methods gave on the same seeds.

    results    title -> one result per seed: history, summary, scores of devices
    baselines  titles that others are compared with, device by device
    """

    results: Mapping[str, tuple[Result, ...]]
    baselines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for title in self.baselines:
            self._of(title)

    # ---------------------------------------------------------------------------------------------
    # numbers
    @property
    def titles(self) -> list[str]:
        return list(self.results)

    @property
    def seeds(self) -> list[int]:
        return [result.spec.seed for result in next(iter(self.results.values()))]

    @property
    def columns(self) -> list[str]:
        """All that has a mean: columns of the history at the end, numbers of the summary."""
        found: dict[str, None] = {}
        for results in self.results.values():
            found |= dict.fromkeys(_ends(results[0]))
        return list(found)

    @property
    def lower(self) -> bool:
        """Whether lower scores are better, by the first measure."""
        history = _one_of(self)
        return better_of(history.ends[0], history.measures) == "lower"

    def values(self, title: str, column: str) -> list[float]:
        """Of every seed, at the end; NaN where a run has no such number."""
        if column not in self.columns:
            raise UnknownColumn(column, self.columns)
        return [_ends(result).get(column, math.nan) for result in self._of(title)]

    def mean(self, title: str, column: str) -> float:
        return fmean(self.values(title, column))

    def deviation(self, title: str, column: str) -> float:
        """Standard deviation over seeds; NaN with one seed."""
        return spread(self.values(title, column))

    def against(self, baseline: str) -> list[Against]:
        """Every other method beside this one."""
        others = [title for title in self.titles if title != baseline]
        return [beside(self._of(title), self._of(baseline), self.lower) for title in others]

    def reached(self, column: str = "", goal: float | None = None) -> dict[str, dict[str, float]]:
        """What it took until the column was as good as `goal` for the first time, per method and
        in the mean of its seeds: clock time, activations, and what else a history counts. NaN where
        not every seed got there. Without a goal: what all of them reach in all seeds; without a
        column: personal models by the first measure.
        """
        column = column or _one_of(self).ends[0]
        goal = self.common(column) if goal is None else float(convert(goal, float, "goal"))
        found = {}
        for title, results in self.results.items():
            rows = [_first(result, column, goal, _is_lower(self, column)) for result in results]
            found[title] = {
                cost: fmean(math.nan if row is None else row[cost] for row in rows)
                for cost in COSTS
                if cost in _one_of(self).columns
            }
        return found

    def common(self, column: str = "") -> float:
        """The best score that all methods reach in all seeds."""
        column = column or _one_of(self).ends[0]
        best, worst = (min, max) if _is_lower(self, column) else (max, min)
        ends = [best(r.history.column(column)) for rs in self.results.values() for r in rs]
        return float(worst(ends))

    def _of(self, title: str) -> tuple[Result, ...]:
        if title not in self.results:
            raise ConfigError(
                f"no method is called {title!r}{nearest(title, self.titles)}; there are"
                f" {', '.join(map(repr, self.titles))}"
            )
        return self.results[title]

    # ---------------------------------------------------------------------------------------------
    # tables
    def rows(self, *columns: str) -> list[dict[str, Any]]:
        """A row for each method: mean and deviation of these columns, or of all, and the share of
        devices harmed against each baseline.
        """
        found = []
        for title in self.titles:
            row: dict[str, Any] = {"title": title, "seeds": len(self.seeds)}
            for column in columns or self.columns:
                row[column] = self.mean(title, column)
                row[f"{column}_deviation"] = self.deviation(title, column)
            for baseline in self.baselines:
                one = beside(self._of(title), self._of(baseline), self.lower)
                row[f"harmed against {baseline}"] = math.nan if title == baseline else one.harmed
            found.append(row)
        return found

    def to_csv(self, path: str | Path | None = None) -> str:
        """All columns, mean and deviation, as CSV."""
        text = io.StringIO()
        rows = self.rows()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return _written(text.getvalue(), path)

    def to_pandas(self) -> "pandas.DataFrame":
        """All columns, mean and deviation, by title. Needs pandas: pip install 'fedbcd[pandas]'."""
        import pandas

        return pandas.DataFrame(self.rows()).set_index("title")

    def to_markdown(self, *columns: str) -> str:
        """A table of mean and deviation; of the scores where no columns are named."""
        head, *rows = cells_of(self, columns, " ± ")
        lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
        return "".join("| " + " | ".join(_piped(line)) + " |\n" for line in lines)

    def to_latex(self, *columns: str, path: str | Path | None = None) -> str:
        """The same as a tabular of LaTeX."""
        head, *rows = cells_of(self, columns, " ± ")
        body = [" & ".join(map(_escaped, line)) + r" \\" for line in (head, *rows)]
        begin = r"\begin{tabular}{l" + "r" * (len(head) - 1) + "}"
        lines = [begin, r"\hline", body[0], r"\hline", *body[1:], r"\hline", r"\end{tabular}"]
        return _written("\n".join(lines) + "\n", path)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        columns: Sequence[str] = (),
        axis: str = "clock",
    ) -> "Figure":
        """A figure with a curve for each method, the mean over seeds, and their deviation as a
        band; also written, where a path is given.
        """
        curves = {t: [result.history for result in rs] for t, rs in self.results.items()}
        return draw_bands(curves, columns or _one_of(self).ends[:2], axis, path)

    def __repr__(self) -> str:
        return aligned(cells_of(self, (), " ± "))

    def _repr_html_(self) -> str:
        head, *rows = cells_of(self, (), " ± ")
        return html_table(head, rows)


def _one_of(comparison: Comparison) -> History:
    """A history, for its measures."""
    return next(iter(comparison.results.values()))[0].history


def _is_lower(comparison: Comparison, column: str) -> bool:
    """Whether lower values of this column are better."""
    return better_of(column, _one_of(comparison).measures) == "lower"


# ------------------------------------------------------------------------------------------------
# baselines
def usual_baselines(results: Mapping[str, Sequence[Result]]) -> tuple[str, ...]:
    """The first method whose devices learn alone, and the first without personal models."""
    found: dict[str, str] = {}
    for title, of in results.items():
        method = _method(of[0])
        kind = "alone" if not method.sends else "" if method.has_personal else "one model"
        if kind:
            found.setdefault(kind, title)
    return tuple(found.values())


def _method(result: Result) -> Method:
    devices = len(result.personal)
    return result.spec.algorithm.method(Facts(devices, (1,) * devices))


# ------------------------------------------------------------------------------------------------
# statistics
def spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def paired_t(differences: Sequence[float]) -> float:
    """The two-sided p of their mean being 0; NaN of fewer than two."""
    from scipy.special import stdtr

    count = len(differences)
    if count < 2:
        return math.nan
    mean, error = fmean(differences), spread(differences) / math.sqrt(count)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stdtr(count - 1, -abs(mean) / error))


def wilcoxon(differences: Any) -> float:
    """The two-sided p of the signed-rank test; 1 where nobody differs."""
    from scipy import stats

    apart = differences[differences != 0]
    if len(apart) == 0:
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on ties: the normal approximation is what is wanted then
        return float(stats.wilcoxon(apart).pvalue)


def beside(mine: Sequence[Result], theirs: Sequence[Result], lower: bool) -> Against:
    """A method and a baseline, seed by seed and device by device."""
    gains = [_gains(*pair, lower) for pair in zip(mine, theirs, strict=True)]
    means = [fmean(gain.values()) for gain in gains]
    harmed = [fmean(value < 0 for value in gain.values()) for gain in gains]
    devices = sorted(set.intersection(*(set(gain) for gain in gains)))
    each = np.array([fmean(gain[device] for gain in gains) for device in devices])
    return Against(
        mine[0].name,
        theirs[0].name,
        fmean(means),
        spread(means),
        paired_t(means),
        wilcoxon(each),
        fmean(harmed),
        spread(harmed),
        len(gains),
        len(devices),
    )


def _gains(mine: Result, theirs: Result, lower: bool) -> dict[int, float]:
    """Per device that both have: how much better its own model is."""
    sign = -1 if lower else 1
    both = [i for i in mine.personal if i in theirs.personal]
    if not both:
        raise ConfigError(
            f"{mine.name!r} and {theirs.name!r} have no device with a score in common; give the"
            " federation test samples"
        )
    return {i: sign * (mine.personal[i] - theirs.personal[i]) for i in both}


def _ends(result: Result) -> dict[str, float]:
    """Where a run ended, in numbers."""
    numbers = dict(result.history.last) | flat(result.summary)
    return {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "seed"
    }


def _first(result: Result, column: str, goal: float, lower: bool) -> dict[str, float] | None:
    for k, score in enumerate(result.history.column(column)):
        if score <= goal if lower else score >= goal:
            return {cost: result.history[k].get(cost, math.nan) for cost in COSTS}
    return None


# ------------------------------------------------------------------------------------------------
# text
def cells_of(comparison: Comparison, columns: Sequence[str], between: str) -> list[list[str]]:
    """Of a table: a head, and a line for each method."""
    measure = _one_of(comparison).first_measure
    ends = {
        column_of(each, measure): f"{title} {in_words(measure)}" for each, title in ENDS.items()
    }
    shown = list(columns) or scores_shown(comparison)
    head = ["", *(ends.get(name, in_words(name)) for name in shown)]
    lines = [[*head, *(f"lose to {baseline}" for baseline in comparison.baselines)]]
    for row in comparison.rows(*shown):
        cells = [in_digits(row[name], row[f"{name}_deviation"], between) for name in shown]
        shares = (row[f"harmed against {baseline}"] for baseline in comparison.baselines)
        cells += ["" if math.isnan(share) else f"{share:.0%}" for share in shares]
        lines.append([row["title"], *cells])
    return lines


def scores_shown(comparison: Comparison) -> list[str]:
    """The columns of the first measure, as tables of ends show them."""
    names = [column_of(each, _one_of(comparison).first_measure) for each in ENDS]
    return [name for name in names if name in comparison.columns]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Words to the left, numbers to the right."""
    wide = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in lines
    )


SMALL = 0.01  # below, three decimals would leave nothing


def in_digits(mean: float, deviation: float, between: str = " ± ") -> str:
    """Three decimals of scores, whole numbers of what is large, three digits of what is small."""
    if 0 < abs(mean) < SMALL:
        return f"{mean:.3g}" if math.isnan(deviation) else f"{mean:.3g}{between}{deviation:.2g}"
    digits = 3 if abs(mean) < 10 else 1 if abs(mean) < 100 else 0
    text = f"{mean:.{digits}f}"
    return text if math.isnan(deviation) else f"{text}{between}{deviation:.{digits}f}"


def _escaped(text: str) -> str:
    for sign in "&%_#${}":
        text = text.replace(sign, f"\\{sign}")
    return text.replace(" ± ", r" $\pm$ ")


def _piped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        with writing_file(path):
            Path(path).write_text(text)
    return text
