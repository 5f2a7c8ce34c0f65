"""`round`, `epoch` and `scale`: one kind of work at three sizes, done by three contestants."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from floor import SIZE, Floor
from harness import (
    Contestant,
    alternate,
    as_rows,
    bandwidth,
    finish,
    matrix_rate,
    options,
    synchronise,
    timed,
)
from plain import PlainLoop

import fedbcd as fb
from fedbcd.compute.ahead import Ahead, AheadWithEvents
from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.compute.players import EventPlayer, Player
from fedbcd.compute.workers import workers
from fedbcd.data.partition import Partition
from fedbcd.engines.setup import (
    make_machines,
    make_numbers,
    make_reader,
    make_schedule,
    products_in,
)
from fedbcd.models import mlp
from fedbcd.record.eventlog import LogWriter
from fedbcd.schedule.arrays import Outline
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation

ALGORITHMS = {
    "fedbcd": fb.FedBCD,
    "fedbcd-i": partial(fb.FedBCDI, offline_time="free"),  # once a round, as the loops do
    "fedprox": fb.FedProx,
}
BATCH = 32
BOX = fb.Box(-2, 2)  # the other contestants clamp as well
WARM_UP = 3  # measurements, until the shapes that come up have been traced


class Setting:
    """The data of a federation, and draws of who does what for the two contestants without a
    protocol.
    """

    def __init__(
        self,
        devices: int,
        servers: int,
        samples: int,
        active: int,
        steps: tuple[int, int],
        make_model: Callable[[], Any] = mlp,
        seed: int = 0,
    ) -> None:
        self.devices, self.servers, self.samples, self.active, self.steps = (
            devices,
            servers,
            samples,
            active,
            steps,
        )
        self.make_model = make_model
        self.rng = np.random.default_rng(seed)
        pool = min(devices * samples, 60_000)
        self.inputs = self.rng.integers(0, 256, (pool, 784), dtype=np.uint8)
        self.targets = self.rng.integers(0, 10, pool)
        self.owned = [np.arange(i * samples, (i + 1) * samples) % pool for i in range(devices)]
        self.q = servers * active

    def federation(self) -> fb.Federation:
        partition = Partition(tuple(self.owned), tuple((0, 1, 2) for _ in self.owned))
        pool = fb.Samples(torch.from_numpy(self.inputs), torch.from_numpy(self.targets))
        return fb.Federation.from_partition(
            self.make_model,
            torch.nn.functional.cross_entropy,
            pool,
            partition,
            self.servers,
            transform=fb.Scale(255.0),
        )

    def work(self, count: int) -> list[tuple[int, np.ndarray]]:
        """`count` devices with the positions of their mini-batches, one row per step."""
        chosen = self.rng.choice(self.devices, count, replace=False)
        low, high = self.steps
        return [
            (int(i), self.rng.choice(self.owned[i], (self.rng.integers(low, high + 1), BATCH)))
            for i in chosen
        ]


def play(player: Player, rounds: int, device: str) -> float:
    """So many rounds, to the end of the last; how many."""
    for _ in range(rounds):
        player.play_round()
    synchronise(device)
    return rounds


def ours(
    setting: Setting, algorithm: str, rounds: int, device: str = "cpu", **options: Any
) -> Callable[[], tuple[float, float]]:
    """Rounds of a simulation, protocol and all, as in the middle of a run."""
    federation = setting.federation()
    spec = fb.RunSpec(
        ALGORITHMS[algorithm](steps=setting.steps, projection=BOX), active=setting.active, **options
    )
    numbers = make_numbers(spec, federation, torch.device(device))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    numbers.trainer.objective.TRACE_AFTER = (
        4  # as in the middle of a run, when the shapes that come up have been traced
    )
    schedule = make_schedule(spec, federation)
    reader = make_reader(spec, federation)
    player = EventPlayer(
        numbers, Simulation(Driver(make_machines(spec, federation), reader), schedule)
    )

    def run() -> tuple[float, float]:
        with workers(torch.get_num_threads() if device == "cpu" else 1) as crew:
            numbers.use(crew)
            return timed(lambda: play(player, rounds, device))

    for _ in range(WARM_UP):
        run()
    return run


def ours_ahead(
    setting: Setting,
    algorithm: str,
    rounds: int,
    device: str,
    precision: str = "float32",
    compile: bool = True,
    **options: Any,
) -> Callable[[], tuple[float, float]]:
    """The same on a GPU: rounds planned ahead, recorded and replayed; everything included, to the
    last upload.
    """
    federation = setting.federation()
    spec = fb.RunSpec(
        ALGORITHMS[algorithm](steps=setting.steps, projection=BOX), active=setting.active, **options
    )
    with products_in(precision):
        numbers = make_numbers(spec, federation, torch.device(device))
        numbers.trainer.check_vectorised(numbers.global_VF()[0])
        schedule = make_schedule(spec, federation)
        simulation = Ahead(numbers, Outline(federation.servers, schedule, spec.cloud), compile)
        began = time.perf_counter()
        simulation.play_round()
        simulation.settle()
        print(
            f"{algorithm}, {precision}, compile={compile}: first round"
            f" {time.perf_counter() - began:.1f} s",
            file=sys.stderr,
        )

    def run() -> tuple[float, float]:
        with products_in(precision):
            return timed(lambda: play(simulation, rounds, device))

    return run


def ours_logged(
    setting: Setting, algorithm: str, rounds: int, device: str, ahead: bool = True
) -> Callable[[], tuple[float, float]]:
    """The same with an event log, as `train` does it with `out`: events beside rounds planned
    ahead, or event by event.
    """
    federation = setting.federation()
    spec = fb.RunSpec(
        ALGORITHMS[algorithm](steps=setting.steps, projection=BOX), active=setting.active
    )
    numbers = make_numbers(spec, federation, torch.device(device))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    schedule = make_schedule(spec, federation)
    reader = make_reader(spec, federation)
    log = LogWriter(Path(mkdtemp()) / "events.jsonl", {})
    events = Simulation(Driver(make_machines(spec, federation), reader, log), schedule)
    player: Player = EventPlayer(numbers, events)
    if ahead:
        planned = Ahead(numbers, Outline(federation.servers, schedule, spec.cloud), compile=True)
        player = AheadWithEvents(planned, events, reader)

    return lambda: timed(lambda: play(player, rounds, device))


def plain(
    setting: Setting, algorithm: str, rounds: int, device: str = "cpu"
) -> Callable[[], tuple[float, float]]:
    inputs = (torch.from_numpy(setting.inputs).float() / 255).to(device)
    targets = torch.from_numpy(setting.targets).to(device)
    loop = PlainLoop(mlp().to(device), inputs, targets, setting.devices, algorithm != "fedprox")

    def tensors(work: list[tuple[int, np.ndarray]]) -> list[tuple[int, torch.Tensor]]:
        return [(i, torch.from_numpy(batches).to(device)) for i, batches in work]

    rounds = rounds if device == "cpu" else max(1, rounds // 100)

    def run() -> tuple[float, float]:
        def all_rounds() -> float:
            for _ in range(rounds):
                if algorithm == "fedbcd-i":
                    loop.fedbcd_i(
                        tensors(setting.work(setting.devices * 8 // 10)),
                        [(i, len(b)) for i, b in setting.work(setting.q)],
                    )
                else:
                    getattr(loop, algorithm)(tensors(setting.work(setting.q)))
            synchronise(device)
            return rounds

        return timed(all_rounds)

    return run


def floor(
    setting: Setting, algorithm: str, rounds: int, device: str = "cpu"
) -> Callable[[], tuple[float, float]]:
    if device != "cpu":
        return lambda: (rounds * hardware_floor(setting, algorithm, device), rounds)
    start = torch.nn.utils.parameters_to_vector(mlp().parameters()).detach().numpy()
    loop = Floor(setting.inputs, setting.targets, start, setting.devices, algorithm != "fedprox")

    def run() -> tuple[float, float]:
        def all_rounds() -> float:
            for _ in range(rounds):
                if algorithm == "fedbcd-i":
                    loop.fedbcd_i(
                        setting.work(setting.devices * 8 // 10),
                        [(i, len(b)) for i, b in setting.work(setting.q)],
                    )
                else:
                    getattr(loop, algorithm)(setting.work(setting.q))
            return rounds

        return timed(all_rounds)

    return run


def hardware_floor(setting: Setting, algorithm: str, device: str) -> float:
    """Seconds per round if memory and matrix units did nothing but what must be done, one after the
    other's slower.
    """
    steps = (
        sum(setting.steps)
        / 2
        * (setting.devices * 8 / 10 if algorithm == "fedbcd-i" else setting.q)
    )
    at_work = setting.q + (setting.devices * 8 / 10 if algorithm == "fedbcd-i" else 0)
    moved = (
        4 * SIZE * (2 * at_work * (2 if algorithm != "fedprox" else 1) + 4 * steps)
    )  # models in and out; x, prev, z in, x out per step
    operations = 6 * BATCH * SIZE * steps  # forward, and backward for weights and inputs
    return max(moved / bandwidth(device), operations / matrix_rate(device))


def main(
    name: str,
    doc: str | None,
    *,
    devices: int,
    servers: int,
    samples: int,
    active: int,
    steps: tuple[int, int],
    rounds: int,
    algorithms: tuple[str, ...] = tuple(ALGORITHMS),
    default: tuple[str, ...] = (),
) -> None:
    parser = options(doc)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds in one measurement")
    parser.add_argument("--algorithm", choices=algorithms, action="append", help="only this one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only", action="append", help="only this contestant, e.g. ours, plain loop, floor"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()
    rows = []
    for algorithm in chosen.algorithm or default or algorithms:
        setting = Setting(devices, servers, samples, active, steps)
        makers: dict[str, Any] = {"ours": ours, "plain loop": plain, "floor": floor}
        if chosen.device != "cpu":
            makers |= {
                "ours": ours_ahead,
                "ours, tf32": partial(ours_ahead, precision="tf32"),
                "ours, not compiled": partial(ours_ahead, compile=False),
                "ours, with a log": ours_logged,
                "ours, event by event, with a log": partial(ours_logged, ahead=False),
            }
        chosen_makers = {
            who: make for who, make in makers.items() if who in (chosen.only or makers)
        }
        contestants = [
            Contestant(who, make(setting, algorithm, chosen.rounds, chosen.device))
            for who, make in chosen_makers.items()
        ]
        rows += as_rows(alternate(contestants, chosen.repeats), 1e3, algorithm=algorithm)
    finish(
        name,
        chosen,
        rows,
        unit="milliseconds per round",
        device=chosen.device,
        rounds=chosen.rounds,
        repeats=chosen.repeats,
    )
