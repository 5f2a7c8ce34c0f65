"""The end of a deployment on one machine: its logs become one, which is replayed; so models, table
and digest are proven and cost the run nothing. The folder is then like that of `fedbcd run`, with
seconds for a clock.
"""

import time
from pathlib import Path
from typing import Any

import torch

from fedbcd.compute.certify import Certificates
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.data.federation import Federation
from fedbcd.data.measure import measure_for
from fedbcd.engines.deploy.local.account import account
from fedbcd.engines.deploy.local.growing_log import GrowingLog
from fedbcd.engines.deploy.local.merged_log import header_of
from fedbcd.engines.deploy.local.up import actors_of
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.engines.look import device_table, row_of, scores_of, summary_of, tested
from fedbcd.engines.replay import Replaying, replay
from fedbcd.engines.result import Run
from fedbcd.engines.warnings import at_the_border
from fedbcd.errors import ReplayMismatch
from fedbcd.record.history import History
from fedbcd.record.names import LOG
from fedbcd.spec import RunSpec

LOOKS = 20


def conclude(
    out: Path,
    federation: Federation,
    spec: RunSpec,
    options: Deploy,
    job: dict[str, Any],
    facts: dict[str, Any],
) -> Run:
    """Merge, replay, evaluate, write; raises `ReplayMismatch` if the replay does not end with the
    deployment's own models.
    """
    end = merge_stores(out, federation, spec, options, job)
    looks = _TimedEvaluations(federation, spec, [end["clock"] * k / LOOKS for k in range(LOOKS)])
    began = time.perf_counter()
    log = out / LOG  # written here: it names what the job has named
    found = replay(log, federation, exact=True, on_step=looks.before, trust=True)
    if found["digest"] != end["digest"]:
        raise ReplayMismatch(
            f"the replay of {out / LOG} ends with {found['digest']}, the deployment with"
            f" {end['digest']}"
        )
    run = looks.result(end, {**facts, "replay_seconds": round(time.perf_counter() - began, 3)})
    times, method = spec.times(federation), spec.method_of(federation)
    run.summary["deployment"] |= account(log, times, options, method)
    run.save(out)
    return run


def merge_stores(
    out: Path, federation: Federation, spec: RunSpec, options: Deploy, job: dict[str, Any]
) -> dict[str, Any]:
    """The stores of all roles as `events.jsonl`, as far as it has not grown before; its end."""
    log = growing_log(out, federation, spec, options, job)
    try:
        return log.finish()
    finally:
        log.close()


def growing_log(
    out: Path, federation: Federation, spec: RunSpec, options: Deploy, job: dict[str, Any]
) -> GrowingLog:
    blueprint = Blueprint.of(spec, federation)
    folders = {actor: options.folder_of(actor) for actor in actors_of(blueprint)}
    return GrowingLog(out / LOG, header_of(spec, federation, job), blueprint, folders)


class _TimedEvaluations:
    """Evaluates the models as they were at chosen times."""

    def __init__(self, federation: Federation, spec: RunSpec, times: list[float]) -> None:
        self._federation = federation
        self._spec = spec
        self._times = times
        self._evaluator: Evaluator | None = None
        self._at: Replaying | None = None
        self.history = History()
        self.scores = Scores()

    def before(self, clock: float, at: Replaying) -> None:
        self._at = at
        while self._times and self._times[0] <= clock:
            self._look(self._times.pop(0))

    def _look(self, clock: float) -> None:
        assert self._at is not None
        numbers, machines = self._at.numbers, self._at.machines
        if self._evaluator is None:
            self._evaluator = Evaluator(
                self._federation,
                numbers.trainer.objective,
                torch.device("cpu"),
                measure=measure_for(self._federation, self._spec.measure),
            )
        self.scores = scores_of(numbers, machines, self._evaluator)
        self.history.judged_by(self.scores.measures)
        found = (numbers, machines, self.scores, clock, self._at.done, Certificates())
        self.history.append(row_of(*found))

    def result(self, end: dict[str, Any], deployment: dict[str, Any]) -> Run:
        assert self._at is not None
        self._look(end["clock"])
        numbers, machines = self._at.numbers, self._at.machines
        assert self._evaluator is not None
        homes = {device: machines.home[device] for device in range(self._federation.devices)}
        personal = torch.stack([*tested(numbers, homes).values()])
        z_VF, border = numbers.global_VF(), at_the_border(numbers, range(self._federation.devices))
        mean = z_VF.double().mean(0).to(self._spec.dtype)
        summary = {
            "algorithm": numbers.method.name,
            "cloud": self._spec.cloud.name,
            "seed": self._spec.seed,
            "rounds": end["rounds"],
            "clock": end["clock"],
            **summary_of(self.scores, self.history.last, self._evaluator.score(mean)),
            "measure": measure_for(self._federation, self._spec.measure),
            "seconds": round(end["clock"], 3),
            "digest": end["digest"],
            "deployment": deployment,
            **({} if border is None else {"notices": [border]}),
        }
        return Run(
            self._federation,
            self.history,
            personal,
            z_VF,
            summary,
            self.scores.devices,
            True,
            self.scores.homes,
            self._spec,
            devices=device_table(self._federation, self.scores),
        )
