"""Those who come after a run: from z, the local steps of the run's own algorithm give each of them
a model of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from fedbcd.algorithm.interpret import Registers
from fedbcd.algorithm.method import Method
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.batch import Trainer
from fedbcd.compute.evaluate import Evaluator
from fedbcd.compute.workers import OneWorker
from fedbcd.data.federation import Federation
from fedbcd.data.measure import measure_for
from fedbcd.data.samples import Pool
from fedbcd.engines.result import Run
from fedbcd.errors import ConfigError
from fedbcd.schedule.work import Session
from fedbcd.spec import RunSpec


def joined(run: Run, spec: RunSpec, newcomers: Federation, steps: int) -> dict[str, float]:
    """How devices that were kept out of a run do with what it found: the mean over them of z's
    score, of their own models after `steps` steps from z, and after as many from x(0), alone.
    """
    federation = run.federation
    owned = [newcomers.pool.only(newcomers.owned(i)) for i in range(newcomers.devices)]
    objective = Objective(federation.make_model(spec.seed).to(spec.dtype), newcomers.loss)
    z = run.global_VF.double().mean(0).to(spec.dtype)
    x0 = objective.layout.flatten(federation.make_model(spec.seed), spec.dtype)
    measure = measure_for(newcomers, spec.measure)
    evaluator = Evaluator(newcomers, objective, torch.device("cpu"), measure=measure)
    evaluator.check(z)
    homes = dict.fromkeys(range(newcomers.devices), 0)
    found = {}
    for name, start in (("own", z), ("alone", x0)):
        x_NF = models_from(start, federation, spec, owned, steps, spec.seed)
        scores = evaluator.scores(z[None], dict(enumerate(x_NF)), OneWorker(), homes)
        found[name] = fmean(scores.devices.values())
    found["global"] = fmean(scores.homes.values())
    return {"devices": newcomers.devices, "steps": steps, **found}


def models_from(
    z: Tensor,
    federation: Federation,
    spec: RunSpec,
    owned: Sequence[Pool],
    steps: int,
    seed: int,
) -> Tensor:
    """x after `steps` steps from z, a row for each of those who own these samples; they begin as
    devices that join late do.
    """
    method = _as_before(federation, spec, steps)
    home = Federation(
        federation.make_model(spec.seed),
        federation.loss,
        owned,
        1,
        transform=federation.transform,
        augment=federation.augment,
    )
    z = z.to(spec.dtype)
    objective = Objective(home.make_model(0).to(spec.dtype), home.loss)
    trainer = Trainer(home, method, objective, seed, z, len(owned))
    trainer.check_vectorised(z)
    return _played(trainer, method, z, len(owned), steps)


def _as_before(federation: Federation, spec: RunSpec, steps: int) -> Method:
    """The run's method for devices more. Who begins every session at z goes on from it in one,
    since the next would begin at z again.
    """
    method = spec.method_of(federation)
    offline = bool(method.offline)
    anew = not method.has_personal or bool(method.at_evaluation)
    length = steps if anew else method.lengths(offline=offline)[1]
    if not method.has_personal and (not method.sends or method.sends[0].difference):
        raise ConfigError(
            f"{method.name} keeps and sends no models, so it has none for a newcomer; export z"
        )
    penalty = float(method.penalties(federation.devices).mean())
    counts = min(length, steps), min(length, steps)
    return replace(method, steps=counts, passes=(), penalty=penalty, weight="one", discount=None)


def _played(trainer: Trainer, method: Method, z: Tensor, devices: int, steps: int) -> Tensor:
    """Its sessions, one after another."""
    bound = trainer.bound
    first = bound.first_upload(z)
    heard = bound.heard.views(bound.first_model(z)[: bound.heard.size].repeat(devices, 1))
    kept: Registers = {
        slot.name: bound.begun(slot, first, z).repeat(devices, 1) for slot in method.slots
    }
    after: Registers = {}
    for number, (offline, count) in enumerate(_sessions(method, steps)):
        work = [Session(device, number, count, None, offline) for device in range(devices)]
        after = trainer.run(work, kept if offline else {**kept, **heard})
        kept = {name: after[name] for name in kept}
    return after[method.personal if method.has_personal else method.sends[0].name]


def _sessions(method: Method, steps: int) -> Iterator[tuple[bool, int]]:
    """As long as those of the run: whether offline, and how many steps. Who trains offline hears
    from its server when it would wait for that, after as many rounds as the run's devices go on.
    """
    length = method.steps[0]
    for number, done in enumerate(range(0, steps, length)):
        if number and method.offline_limit and number % method.offline_limit == 0:
            yield False, method.lengths(offline=False)[1]
        yield bool(method.offline), min(length, steps - done)
