"""A newcomer whom nobody named: from its server's z, the local steps of the run's own algorithm
give it a personal model, and samples that it did not train on say what that gains.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from fedbcd.algorithm import draws
from fedbcd.algorithm.trees import outputs_of
from fedbcd.config import convert
from fedbcd.data.federation import DeviceData, Federation, as_samples
from fedbcd.data.measures import ACCURACY
from fedbcd.data.samples import Pool, Samples
from fedbcd.engines.joining import models_from
from fedbcd.engines.replay import recorded_spec
from fedbcd.engines.result import Run
from fedbcd.errors import ConfigError, DataError, RecordError
from fedbcd.experiments.pool import recorded_job
from fedbcd.own import imports
from fedbcd.record.eventlog import LogReader
from fedbcd.record.names import LOG, MODELS
from fedbcd.record.tensorfile import opened
from fedbcd.spec import RunSpec

STEPS = 100  # of a newcomer, where nobody says
HELD_OUT = 0.25  # of its samples, where there are no others to test on
SAMPLES_AT_ONCE = 1000  # samples in one forward pass
HINT = "give the federation that it was trained with: personalise(folder, data, federation=...)"


@dataclass(frozen=True)
class Newcomer:
    """What a newcomer has got, and how it compares with z on samples that it did not train on."""

    model: nn.Module
    x: Tensor  # the same as a flat vector
    steps: int
    trained_on: int  # samples
    tested_on: int
    score: float  # of its own model: the mean of the federation's metric
    global_score: float  # of z
    error: float  # standard error of the difference, sample by sample; NaN of one sample

    @property
    def sentence(self) -> str:
        """Which is better, and whether that can be told."""
        gain = self.score - self.global_score
        told = "better than z" if gain > 0 else "worse than z" if gain < 0 else "no better than z"
        if gain and not abs(gain) > 2 * self.error:
            told += ", which so few samples do not show"
        return (
            f"after {self.steps} steps on {self.trained_on} samples the newcomer's own model has"
            f" {self.score:.3f} on {self.tested_on} others, z has {self.global_score:.3f}:"
            f" {abs(gain):.3f} (standard error {self.error:.3f}) {told}"
        )


def personalise(
    run: Run | str | Path,
    data: DeviceData,
    *,
    steps: int = STEPS,
    test: DeviceData | None = None,
    held_out: float = HELD_OUT,
    server: int | None = None,
    seed: int | None = None,
    spec: RunSpec | None = None,
    federation: Federation | None = None,
    trust: bool = False,
) -> Newcomer:
    """A personal model for somebody who was not in a run, by the local steps of its algorithm.

    run         that of `train`, or its folder
    data        the newcomer's own: (inputs, targets) or a Dataset, like that of any device
    steps       of the device, in sessions as long as those of the run
    test        what to compare on; without it a share `held_out` of the data, drawn by `seed`
    server      whose z to begin with; by default the mean of the servers' models
    seed        of draws; by default that of the run
    spec        of a run that was loaded and does not know its own
    federation  of a folder whose log does not name data and model
    trust       code that the folder names, model and kinds of other people, may be imported
    """
    if isinstance(run, str | Path):
        with imports(allowed=trust):
            run, spec = _run_in(Path(run), federation)
    if not isinstance(run, Run):
        raise ConfigError(
            f"{run!r:.60} is neither a run nor the folder of one; give what train made"
        )
    spec = spec or run.spec
    if spec is None:
        raise ConfigError(
            "this run does not know how it was trained; give the folder of train(out=...), or"
            " spec=RunSpec(...), which a run that was just trained has as run.spec"
        )
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps={steps!r} must be a whole number, 1 or more")
    seed = spec.seed if seed is None else convert(seed, int, "seed")
    own = _fitting(as_samples("the newcomer's data", data), run.federation.pool)
    if test is None:
        own, rest = _divided(own, held_out, seed)
    else:
        rest = _fitting(as_samples("the test data", test), run.federation.pool)
    z = _global(run, server)
    _scores(run, z, own)  # refuses labels that no output stands for
    scores_z = _scores(run, z, rest)
    x = models_from(z, run.federation, spec, [own], steps, seed)[0]
    scores_x = _scores(run, x, rest)
    gains = scores_x - scores_z
    return Newcomer(
        run.model_of(x),
        x,
        steps,
        len(own),
        len(rest),
        float(scores_x.mean()),
        float(scores_z.mean()),
        float(gains.std() / math.sqrt(len(gains))) if len(gains) > 1 else math.nan,
    )


def _run_in(folder: Path, federation: Federation | None) -> tuple[Run, RunSpec]:
    log = folder / LOG
    if not log.is_file() and (folder / MODELS).is_file():
        kept = None if federation is None else Run.load(folder, federation)
        if kept is not None and kept.spec is not None:
            return kept, kept.spec
        raise RecordError(
            f"{folder} has models but no events.jsonl, as Run.save leaves them, so it does not name"
            f" its data and model; {HINT}, and spec=... where it is of an earlier version"
        )
    if not log.is_file():
        raise RecordError(
            f"{folder} is not the folder of a run (it has no events.jsonl); give one that"
            " 'fedbcd run' or train(out=...) has made"
        )
    federation = federation or recorded_job(log, HINT).make_federation()
    spec = recorded_spec(LogReader(log), federation)
    return Run.load(folder, federation), spec


def _global(run: Run, server: int | None) -> Tensor:
    servers = len(run.global_VF)
    if server is not None and server not in range(servers):
        raise ConfigError(f"server {server!r} is not in this run, which has 0 to {servers - 1}")
    z = run.global_VF.double().mean(0) if server is None else run.global_VF[server]
    return z.to(run.global_VF.dtype)


# ------------------------------------------------------------------------------------------------
# data
def samples_in(path: Path) -> Samples:
    """Arrays called inputs and targets in a file of NumPy (.npz) or of safetensors."""
    try:
        if path.suffix == ".safetensors":
            with opened(path) as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                found = {name: torch.from_numpy(archive[name]) for name in archive.files}
    except (OSError, ValueError, TypeError, AttributeError, BadZipFile) as error:
        said = str(error).partition(" If you trust")[0].rstrip(".")  # nothing is unpickled here
        raise DataError(
            f"{path} cannot be read ({said}); write arrays inputs and targets as .npz, or as"
            " .safetensors"
        ) from None
    if missing := [name for name in ("inputs", "targets") if name not in found]:
        raise DataError(
            f"{path} has no array {missing[0]!r}, but {', '.join(found) or 'none at all'}; name"
            " them inputs and targets"
        )
    return Samples(found["inputs"], found["targets"])


def _fitting(given: Pool, pool: Pool) -> Pool:
    """Samples like those of the run."""
    if not (isinstance(given, Samples) and isinstance(pool, Samples)):
        return given  # read when needed, and then refused
    return Samples(
        _like("inputs", given.inputs, pool.inputs), _like("targets", given.targets, pool.targets)
    )


def _like(kind: str, mine: Tensor, theirs: Tensor) -> Tensor:
    """Of another width where that changes no number: int32 for int64, float64 for float32."""
    changed = mine.to(theirs.dtype)
    floats = mine.is_floating_point() and theirs.is_floating_point()
    whole = not (mine.is_floating_point() or theirs.is_floating_point())
    same = floats or (whole and torch.equal(changed.to(mine.dtype), mine))
    if mine.shape[1:] != theirs.shape[1:] or not same:
        raise DataError(
            f"the newcomer has {kind} of shape {tuple(mine.shape[1:])} ({mine.dtype}), the"
            f" devices of the run {tuple(theirs.shape[1:])} ({theirs.dtype}); bring them to"
            " the run's"
        )
    return changed


def _divided(data: Pool, held_out: float, seed: int) -> tuple[Pool, Pool]:
    """What to train on, and what to test on."""
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out={held_out:g} must be between 0 and 1")
    if len(data) < 2:
        raise DataError(
            f"the newcomer has {len(data)} samples; give 2 or more, or others to test on (test=...)"
        )
    h = draws.address(seed, draws.HELD_OUT, np.arange(len(data)))
    order = torch.from_numpy(np.argsort(draws.unit(h), kind="stable"))
    count = min(len(data) - 1, max(1, round(held_out * len(data))))
    rest, own = order[:count], order[count:]
    return data.only(own), data.only(rest)


# ------------------------------------------------------------------------------------------------
# scores
def _scores(run: Run, flat: Tensor, data: Pool) -> Tensor:
    """The first measure of a model on each sample, float64."""
    federation, module = run.federation, run.model_of(flat)
    found = []
    for start in range(0, len(data), SAMPLES_AT_ONCE):
        part = torch.arange(start, min(len(data), start + SAMPLES_AT_ONCE))
        inputs, targets = data.take(part)
        with torch.no_grad():
            outputs = outputs_of(module, federation.transform(inputs, flat.dtype))
        measure = federation.measures(outputs, targets)[0]
        if measure is ACCURACY:
            _check_labels(targets, outputs.shape[-1])
        found.append(measure.by_sample(outputs, targets))
    return torch.cat(found)


def _check_labels(targets: Tensor, classes: int) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"the newcomer has a label {high if high >= classes else low}, but the model of the"
            f" run knows 0 to {classes - 1}; leave those samples out"
        )
