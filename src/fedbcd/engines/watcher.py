"""Looking at a run: a row of its history from time to time, as often as its spec says, with
certificates as often as they are cheap.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbcd.compute.certify import (
    CALL_COST_SAMPLES,
    DEVICES,
    CertificateBudget,
    Certificates,
    Certifier,
)
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.players import Player
from fedbcd.compute.rows import ManyModels
from fedbcd.data.federation import Federation
from fedbcd.data.measure import measure_for
from fedbcd.engines.best import Keeper
from fedbcd.engines.look import (
    all_personal,
    device_table,
    members_of,
    row_of,
    scores_of,
    summary_of,
    work_of,
)
from fedbcd.engines.setup import rounds_between_looks, samples_per_round
from fedbcd.record.history import DeviceTable, History, better_of, deciding, judged_on
from fedbcd.record.names import devices_file
from fedbcd.schedule.driver import Machines
from fedbcd.spec import RunSpec

MOST_LOOKS, FEWEST_LOOKS = 20, 4  # where the user has not said
# on a GPU, training between two looks takes at least this number of times as long as a look: it
# tests models faster than it takes small steps
GPU_TRAINING_PER_LOOK = 10.0


@dataclass(frozen=True)
class Looks:
    """When to look at the models, and with which certificates."""

    spec: RunSpec
    # rounds between two looks at least, where the user has not said how many there are to be
    apart: int

    def fraction(self, round_: int, clock: float) -> float:
        rounds, until = self.spec.rounds, self.spec.until_clock
        return min(1.0, round_ / rounds if rounds is not None else clock / (until or 1.0))

    def is_done(self, round_: int, clock: float) -> bool:
        return self.fraction(round_, clock) >= 1.0

    def is_look(
        self, last: tuple[int, float], before: tuple[int, float], after: tuple[int, float]
    ) -> bool:
        """Whether an evaluation falls due between two rounds, the last look having been at
        `last`.
        """
        if self.is_done(*after):
            return True
        rounds, looks, every = self.spec.rounds, self.spec.looks, self.spec.evaluate_every
        if every is not None:
            return after[0] % every == 0
        if looks is None:
            progress = self.fraction(*after) - self.fraction(*last) + 1e-9
            return progress >= 1 / FEWEST_LOOKS or (
                progress >= 1 / MOST_LOOKS and after[0] - last[0] >= self.apart
            )
        if rounds is not None:
            return after[0] % max(1, rounds // looks) == 0
        return int(self.fraction(*before) * looks) < int(self.fraction(*after) * looks)


class Watcher:
    """Looks at the models of a run, and keeps what it has seen and how long that took."""

    def __init__(
        self, federation: Federation, spec: RunSpec, numbers: Numbers, machines: Machines
    ) -> None:
        self.spec, self.numbers, self.machines = spec, numbers, machines
        self.federation = federation
        trainer, where = numbers.trainer, numbers.sums.total_VU.device
        slower = () if where.type == "cpu" else (GPU_TRAINING_PER_LOOK,)
        self.looks = Looks(spec, rounds_between_looks(federation, spec, *slower))
        together = where.type != "cpu" and not trainer.one_by_one
        self.measure = measure_for(federation, spec.measure)
        self.evaluator = Evaluator(federation, trainer.objective, where, together, self.measure)
        self.certifier = Certifier(numbers, federation.sizes)
        longest = numbers.method.lengths(offline=bool(numbers.method.offline))[1]
        work = longest * CALL_COST_SAMPLES + samples_per_round(federation, spec)
        self._certificate_budget = CertificateBudget(federation.sizes, work)
        self.history = History()
        self.scores = Scores()
        self.seconds = 0.0  # that went into tests of models
        self.keeper: Keeper | None = None
        self.tables: dict[int, DeviceTable] = {}  # of devices, by round
        self._folder: Path | None = None
        self._judged, self._levelled = 0, False  # how many rows, and what came of it

    def test(self) -> None:
        self.scores = scores_of(self.numbers, self.machines, self.evaluator)
        self.history.judged_by(self.scores.measures)

    def keep_best(self, folder: Path | None) -> None:
        """From here on, if the run is to; in this folder, as tables of devices are."""
        self._folder = folder
        best, stop = self.spec.best, self.spec.stop
        column = stop.column if best is None and stop is not None else best
        if column is not None or self.federation.validation:
            column = self._deciding(column or "")
            lower = better_of(column, self.evaluator.measures) == "lower"
            self.keeper = Keeper(self.federation, self.spec.seed, column, lower, folder)

    def _deciding(self, column: str) -> str:
        return deciding(column, self.evaluator.measures, bool(self.federation.validation))

    def go_on(self, history: History) -> str | None:
        """After a resume; a sentence on what cannot go on as it was."""
        self.history = history
        self.test()
        return None if self.keeper is None else self.keeper.go_on(history)

    def is_over(self, player: Player) -> bool:
        """Whether the run has come to its end, or no longer gets better."""
        stop = self.spec.stop
        if stop is not None and len(self.history) != self._judged:
            column = self._deciding(stop.column)
            lower = better_of(column, self.evaluator.measures) == "lower"
            self._levelled = stop.is_over(self.history, column, lower=lower)
            self._judged = len(self.history)
        return self._levelled or self.looks.is_done(player.round, player.now)

    def look(self, player: Player) -> None:
        player.settle()
        began = time.perf_counter()
        self.test()
        found = (self.numbers, self.machines, self.scores, player.now)
        row = row_of(*found, player.done, Certificates())
        self.seconds += time.perf_counter() - began
        certificates = asdict(self._certificates(player.round))
        now: dict[str, float] = {"round": player.round, "activations": player.activations}
        now |= work_of(self.numbers, player.activations, player.done)
        self.history.append(row.changed(**now, **certificates))
        if self.keeper is not None:
            self.keeper.saw(self.history, self._all_models)
        if self.spec.device_tables:
            self._keep_table(player.round)

    def _keep_table(self, round_: int) -> None:
        table = self.tables[round_] = device_table(self.federation, self.scores)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            table.write_csv(self._folder / devices_file(round_))

    def _all_models(self) -> tuple[ManyModels, Tensor]:
        numbers = self.numbers
        return all_personal(numbers, self.machines.home), numbers.global_VF().cpu()

    def last_certificates(self, rounds: int) -> dict[str, float]:
        """Those of the final models, for the summary; empty where there are none."""
        last = self.history.last
        found = Certificates(last.gap, last.worst_gap, last.pull, last.spread)
        if math.isnan(last.pull) and self.spec.certify_every != 0:
            members = self.members()
            devices = self._certificate_budget.devices_at_the_end(
                members, rounds, self._certified()
            )
            found = self.certifier.certificates(members, self.spec.certify_devices or devices)
        return {name: value for name, value in asdict(found).items() if not math.isnan(value)}

    def members(self) -> list[int]:
        return [device for device, _ in members_of(self.machines)]

    def _certificates(self, rounds: int) -> Certificates:
        spec, members = self.spec, self.members()
        if spec.certify_every is None and spec.certify_devices is None:
            devices = self._certificate_budget.devices(members, rounds, self._certified())
        else:
            every = 1 if spec.certify_every is None else spec.certify_every
            is_due = every > 0 and len(self.history) % every == 0
            devices = (spec.certify_devices or DEVICES) if is_due else 0
        return self.certifier.certificates(members, devices) if devices else Certificates()

    def _certified(self) -> int:
        return sum(not math.isnan(row.pull) for row in self.history)

    def summary(self, seconds: float) -> Mapping[str, Any]:
        """What the run's summary says of looks, of a run that took `seconds` in all."""
        z_VF = self.numbers.global_VF()
        mean = z_VF.double().mean(0).to(self.spec.dtype)

        def share(part: float) -> float:
            return round(part / max(seconds, part, 1e-9), 3)

        return {
            **summary_of(self.scores, self.history.last, self.evaluator.score(mean)),
            "measure": self.measure,
            **self._decided(),
            "evaluation_share": share(self.seconds),
            "certificate_share": share(self.certifier.seconds),
        }

    def _decided(self) -> dict[str, Any]:
        """What ended the run before its budget, and which models were the best, by which column."""
        best = None if self.keeper is None else self.keeper.best(self.history)
        found: dict[str, Any] = {}
        if self._levelled and self.spec.stop is not None:
            column = self._deciding(self.spec.stop.column)
            by = judged_on(column, self.evaluator.measures)
            found["stopped"] = asdict(self.spec.stop) | {"column": column, "by": by}
        if best is not None:
            found["best"] = {
                "round": best.row.round,
                "column": best.column,
                "value": best.row[best.column],
                "by": judged_on(best.column, self.evaluator.measures),
            }
        return found
