"""The paper's figures: one function per panel that returns what to run. `fedbcd paper fig3a --data
DIR` draws it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedbcd.algorithm.methods import Algorithm, FedAvg, FedBCD, FedBCDI, FedProx
from fedbcd.algorithm.projection import Box
from fedbcd.data.measure import Measure
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import DataPart, Job, ModelPart
from fedbcd.protocol.clouds import AsyncCloud, Cloud, SyncCloud
from fedbcd.spec import RunSpec

MEASURE: Measure = (
    "pooled-labels"  # "edge devices test local models on test data that have the same diversity"
)
SYNC_ROUND = 15.0  # mean clock time of a Sync round of 10 servers with 3 active devices each


@dataclass(frozen=True)
class Panel:
    """One panel of Figure 3 or 4: its runs (of one seed), and what is on its axes."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    axis: Literal["round", "clock"]
    columns: tuple[str, ...]

    def with_seeds(self, seeds: int) -> list[Job]:
        if seeds < 1:
            raise ConfigError(f"seeds={seeds} must be 1 or more")
        return [job.changed(seed=seed) for job in self.jobs for seed in range(seeds)]


@dataclass(frozen=True)
class Setting:
    """What the user may change: where the data are, how long, on what."""

    folder: str | None = None
    rounds: int | None = None  # of the Sync-cloud; Figure 4 turns it into clock time
    torch_device: str = "cpu"

    def rounds_or(self, default: int) -> int:
        """As many rounds as asked for, or the panel's own."""
        return default if self.rounds is None else self.rounds


BOX = Box(-2, 2)  # X in all of the paper's experiments
AVG, PROX, BCD, BCDI = (
    FedAvg(projection=BOX),
    FedProx(projection=BOX),
    FedBCD(projection=BOX),
    FedBCDI(projection=BOX),
)
ALL: tuple[tuple[str, Algorithm], ...] = (
    ("FedAvg", AVG),
    ("FedProx", PROX),
    ("FedBCD", BCD),
    ("FedBCD-I", BCDI),
)
CLOUDS: tuple[tuple[str, Cloud], ...] = (
    ("Sync", SyncCloud()),
    *((f"Async, beta {b / 10:g}", AsyncCloud(b)) for b in (7, 5, 3)),
)


def fig3a(setting: Setting) -> Panel:
    """MNIST, 3 active devices per server, diversity 3."""
    return _against_rounds(
        "fig3a", "MNIST, active 3, diversity 3", _mnist(setting, diversity=3, active=3, rounds=500)
    )


def fig3b(setting: Setting) -> Panel:
    """MNIST, 3 active devices per server, diversity 6."""
    return _against_rounds(
        "fig3b", "MNIST, active 3, diversity 6", _mnist(setting, diversity=6, active=3, rounds=500)
    )


def fig3c(setting: Setting) -> Panel:
    """MNIST, 6 active devices per server, diversity 3."""
    return _against_rounds(
        "fig3c", "MNIST, active 6, diversity 3", _mnist(setting, diversity=3, active=6, rounds=500)
    )


def fig3d(setting: Setting) -> Panel:
    """CIFAR-10 with ResNet-20, 5 active devices per server, diversity 3."""
    base = Job(
        data=DataPart(name="cifar10", folder=setting.folder, diversity=3, samples=500),
        model=ModelPart(name="resnet20"),
        spec=_spec(setting, active=5, rounds=300),
    )
    return _against_rounds("fig3d", "CIFAR-10, active 5, diversity 3", base)


def fig4a(setting: Setting) -> Panel:
    """MNIST, diversity 3: FedBCD on each cloud, against clock time."""
    return _against_clock(
        "fig4a", "FedBCD, diversity 3", BCD, _mnist(setting, diversity=3, active=3, rounds=133)
    )


def fig4b(setting: Setting) -> Panel:
    """MNIST, diversity 3: FedBCD-I on each cloud, against clock time."""
    return _against_clock(
        "fig4b", "FedBCD-I, diversity 3", BCDI, _mnist(setting, diversity=3, active=3, rounds=133)
    )


def fig4c(setting: Setting) -> Panel:
    """MNIST, diversity 6: FedBCD on each cloud, against clock time."""
    return _against_clock(
        "fig4c", "FedBCD, diversity 6", BCD, _mnist(setting, diversity=6, active=3, rounds=133)
    )


def fig4d(setting: Setting) -> Panel:
    """MNIST, diversity 6: FedBCD-I on each cloud, against clock time."""
    return _against_clock(
        "fig4d", "FedBCD-I, diversity 6", BCDI, _mnist(setting, diversity=6, active=3, rounds=133)
    )


PANELS: Mapping[str, Callable[[Setting], Panel]] = {
    panel.__name__: panel for panel in (fig3a, fig3b, fig3c, fig3d, fig4a, fig4b, fig4c, fig4d)
}


def panels(names: Sequence[str], setting: Setting) -> list[Panel]:
    for name in names:
        if name != "all" and name not in PANELS:
            raise ConfigError(f"there is no panel {name!r}; there are {', '.join(PANELS)} and all")
    chosen = PANELS if "all" in names else dict.fromkeys(names)
    return [PANELS[name](setting) for name in chosen]


def _mnist(setting: Setting, diversity: int, active: int, rounds: int) -> Job:
    return Job(
        data=DataPart(name="mnist", folder=setting.folder, diversity=diversity, samples=600),
        model=ModelPart(name="mlp", hidden=(128, 64)),
        spec=_spec(setting, active, rounds),
    )


def _spec(setting: Setting, active: int, rounds: int) -> RunSpec:
    spec = RunSpec(
        FedBCD(),
        active=active,
        rounds=setting.rounds_or(rounds),
        looks=20,
        torch_device=setting.torch_device,
        measure=MEASURE,
    )
    spec.check_values("run.")
    return spec


def _against_rounds(name: str, title: str, base: Job) -> Panel:
    jobs = tuple(
        replace(base.changed(algorithm=algorithm), title=title) for title, algorithm in ALL
    )
    return Panel(name, title, jobs, "round", ("personal_accuracy", "global_accuracy"))


def _against_clock(name: str, title: str, algorithm: Algorithm, base: Job) -> Panel:
    assert base.spec.rounds is not None
    timed = base.changed(until_clock=SYNC_ROUND * base.spec.rounds, looks=40)
    jobs = tuple(
        replace(timed.changed(algorithm=algorithm, cloud=cloud), title=title)
        for title, cloud in CLOUDS
    )
    prox = replace(timed.changed(algorithm=PROX), title="FedProx, Sync")
    return Panel(name, title, (*jobs, prox), "clock", ("global_accuracy",))
