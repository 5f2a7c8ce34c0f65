"""The paper's figures, and what its text says without one: a function per panel, of what to run.
`fedbcd paper fig3a --data DIR` draws it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedbcd.algorithm.methods import Algorithm, FedAvg, FedBCD, FedBCDI, FedProx
from fedbcd.algorithm.projection import Box
from fedbcd.data.measure import Measure
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import DataPart, Job, ModelPart
from fedbcd.experiments.readings import read_as
from fedbcd.protocol.clouds import AsyncCloud, Cloud, RigorousCloud, SyncCloud
from fedbcd.record.history import GLOBAL, PERSONAL
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
    readings: tuple[str, ...] = ()  # names of `readings.READINGS`, changed in every job

    def rounds_or(self, default: int) -> int:
        """As many rounds as asked for, or the panel's own."""
        return default if self.rounds is None else self.rounds


BOX = Box(-2, 2)  # X in all of the paper's experiments
AVG, PROX, BCD, BCDI = (
    FedAvg(projection=BOX),
    FedProx(projection=BOX),
    FedBCD(projection=BOX),
    FedBCDI(projection=BOX, offline_time="free"),
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


# ------------------------------------------------------------------------------------------------
# what the text says without a figure
def beta(setting: Setting) -> Panel:
    """MNIST, diversity 6: FedBCD-I where the coordinator waits for fewer servers than in Figure 4;
    with B = 1 servers never mix.
    """
    clouds = (*CLOUDS, ("Async, beta 0.2", AsyncCloud(2)), ("Async, beta 0.1", AsyncCloud(1)))
    base = _mnist(setting, diversity=6, active=3, rounds=133)
    return _against_clock("beta", "FedBCD-I, diversity 6", BCDI, base, clouds)


def rigorous(setting: Setting) -> Panel:
    """MNIST, diversity 6: the two asynchronous protocols of Appendix A."""
    base = _timed(_mnist(setting, diversity=6, active=3, rounds=133))
    kinds = (("first B", AsyncCloud), ("rigorous", RigorousCloud))
    jobs = tuple(
        replace(
            base.changed(algorithm=algorithm, cloud=kind(b)),
            title=f"{name}, {which}, beta {b / 10:g}",
        )
        for name, algorithm in (("FedBCD", BCD), ("FedBCD-I", BCDI))
        for which, kind in kinds
        for b in (3, 5)
    )
    title = "first-B and rigorous Async, diversity 6"
    return Panel("rigorous", title, jobs, "clock", (GLOBAL,))


def aspg(setting: Setting) -> Panel:
    """MNIST, diversity 3, Sync: with extrapolation (ASPG), and without."""
    base = _mnist(setting, diversity=3, active=3, rounds=500)
    jobs = tuple(
        replace(base.changed(algorithm=replace(algorithm, momentum=m)), title=f"{name}, {which}")
        for name, algorithm in (("FedProx", PROX), ("FedBCD", BCD), ("FedBCD-I", BCDI))
        for which, m in (("ASPG", 0.9), ("plain steps", 0.0))
    )
    title = "with and without extrapolation, diversity 3"
    return Panel("aspg", title, jobs, "round", (PERSONAL, GLOBAL))


def smooth3(setting: Setting) -> Panel:
    """MNIST, diversity 3, the first clock time of Figure 4 with every round recorded."""
    return _every_round("smooth3", setting, diversity=3)


def smooth6(setting: Setting) -> Panel:
    """MNIST, diversity 6, the first clock time of Figure 4 with every round recorded."""
    return _every_round("smooth6", setting, diversity=6)


PANELS: Mapping[str, Callable[[Setting], Panel]] = {
    panel.__name__: panel
    for panel in (
        *(fig3a, fig3b, fig3c, fig3d, fig4a, fig4b, fig4c, fig4d),
        *(beta, rigorous, aspg, smooth3, smooth6),
    )
}


def panels(names: Sequence[str], setting: Setting) -> list[Panel]:
    for name in names:
        if name != "all" and name not in PANELS:
            raise ConfigError(f"there is no panel {name!r}; there are {', '.join(PANELS)} and all")
    chosen = PANELS if "all" in names else dict.fromkeys(names)
    return [_read(PANELS[name](setting), setting.readings) for name in chosen]


def without_effect(names: Sequence[str], readings: Sequence[str]) -> list[tuple[str, str]]:
    """Panels, and readings that leave all of their runs as the recipes have them."""
    return [
        (plain.name, reading)
        for reading in readings
        for plain, read in zip(
            panels(names, Setting()), panels(names, Setting(readings=(reading,))), strict=True
        )
        if read.jobs == plain.jobs
    ]


def _read(panel: Panel, readings: Sequence[str]) -> Panel:
    return replace(panel, jobs=tuple(read_as(readings, job) for job in panel.jobs))


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
    return Panel(name, title, jobs, "round", (PERSONAL, GLOBAL))


def _timed(base: Job) -> Job:
    """As long as the job's rounds take with Sync-cloud."""
    assert base.spec.rounds is not None
    return base.changed(until_clock=SYNC_ROUND * base.spec.rounds, looks=40)


def _against_clock(
    name: str,
    title: str,
    algorithm: Algorithm,
    base: Job,
    clouds: Sequence[tuple[str, Cloud]] = CLOUDS,
) -> Panel:
    timed = _timed(base)
    jobs = tuple(
        replace(timed.changed(algorithm=algorithm, cloud=cloud), title=title)
        for title, cloud in clouds
    )
    prox = replace(timed.changed(algorithm=PROX), title="FedProx, Sync")
    return Panel(name, title, (*jobs, prox), "clock", (GLOBAL,))


def _every_round(name: str, setting: Setting, diversity: int) -> Panel:
    base = _timed(_mnist(setting, diversity, active=3, rounds=40))
    base = replace(base, spec=replace(base.spec, looks=None, evaluate_every=1))
    jobs = tuple(
        replace(base.changed(algorithm=algorithm, cloud=cloud), title=f"{who}, {where}")
        for who, algorithm in (("FedBCD", BCD), ("FedBCD-I", BCDI))
        for where, cloud in (("Sync", SyncCloud()), ("Async, beta 0.3", AsyncCloud(3)))
    )
    prox = replace(base.changed(algorithm=PROX), title="FedProx, Sync")
    title = f"every round, diversity {diversity}"
    return Panel(name, title, (*jobs, prox), "clock", (GLOBAL,))
