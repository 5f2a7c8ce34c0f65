"""Every algorithm x protocol against the float64 oracle, which shares nothing with the package
(SPEC, DESIGN decision 4).
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
import oracle
from fedbcd.algorithm.fused.library import ChainTrainer, library
from support.methods import method_of
from support.rounding import of_run

# The boxes are so tight that weights sit on their border, and one server alone is a mix of the
# paper's, if none that spreads anything.
pytestmark = pytest.mark.filterwarnings(
    "ignore::fedbcd.errors.BorderWarning", "ignore:.*never mixes:fedbcd.errors.DivergenceWarning"
)

DEVICES, SERVERS, FEATURES, CLASSES = 15, 3, 5, 3
SIZES = [4 + (3 * i) % 7 for i in range(DEVICES)]


def _data(device: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + device)
    inputs = torch.randn(SIZES[device], FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (SIZES[device],), generator=generator)


class Net(nn.Module):
    activation = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)
        self.second = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x)))


class ReluNet(Net):
    """There is compiled code for this one."""

    activation = staticmethod(torch.relu)


@dataclass
class Case:
    algorithm: fb.Algorithm
    cloud: fb.Cloud
    active: int | tuple[int, ...] = 2
    rounds: int = 8
    joins: tuple[tuple[int, int], ...] = ()
    leaves: tuple[tuple[int, int], ...] = ()
    clock: fb.Clock = fb.Clock()  # noqa: RUF009
    uploads: tuple[fb.Clip | fb.Integers, ...] = ()
    deadline: fb.Deadline | None = None


GAMMA = [0.3 + 0.1 * (i % 5) for i in range(DEVICES)]
BCD = fb.FedBCD(penalty=GAMMA, device_step=0.1, batch=3, projection=fb.Box(-0.4, 0.4))
BCDI = fb.FedBCDI(
    penalty=[g / 3 for g in GAMMA],
    device_step=0.1,
    batch=3,
    projection=fb.Box(-0.4, 0.4),
    offline_limit=2,
    offline_time="free",
)
TIMED = replace(BCDI, offline_time="timed")
BCDI_3 = fb.FedBCDI(device_step=0.1, batch=3, available=3, offline_time="free")
CLOUDS = {
    "sync": fb.SyncCloud(),
    "async": fb.AsyncCloud(first=2),
    "async-1": fb.AsyncCloud(first=1),
    "rigorous": fb.RigorousCloud(first=2),
}
SLOW = fb.Clock(
    classes=(
        fb.DeviceClass(share=0.3, step=5.0, arrival=0.5),
        fb.DeviceClass(servers=(2,), step=2.0, transfer=3.0),
        fb.DeviceClass(devices=(1, 11), step=7.0),
        fb.DeviceClass(share=0.4, step=0.25),
    ),
    speeds=fb.LogNormal(1.0, 0.7),
    bandwidth=fb.Bandwidth(up=100.0, down=tuple(50.0 + 20 * i for i in range(DEVICES))),
    dropout=0.3,
)
UNSTEADY = fb.Clock(day=fb.Day(period=20.0, night=4.0), dropout=0.5)
PATHS = fb.DynamicGraph([[(1, 0), (1, 2)], [(0, 2)]], first=2, link_failure=0.3, seed=3)
CASES = {f"{a.name}-{name}": Case(a, cloud) for a in (BCD, BCDI) for name, cloud in CLOUDS.items()}
CASES |= {
    "fedavg-sync": Case(
        fb.FedAvg(device_step=0.1, batch=3, projection=fb.Box(-0.4, 0.4)), fb.SyncCloud()
    ),
    "fedavg-plain-average": Case(fb.FedAvg(device_step=0.1, batch=3, weight="one"), fb.SyncCloud()),
    "fedprox-sync": Case(
        fb.FedProx(device_step=0.1, batch=3, penalty=GAMMA, projection=fb.Box(-0.4, 0.4)),
        fb.SyncCloud(),
    ),
    "exact-gradients": Case(
        fb.FedBCD(device_step=0.1, batch="all", projection=fb.Ball(1.0)), fb.AsyncCloud(first=2)
    ),
    "exact-gradients-fedbcd-i": Case(
        fb.FedBCDI(device_step=0.1, batch="all", projection=fb.NoProjection()),
        fb.RigorousCloud(first=1),
    ),
    "three-cloud-iterations-sync": Case(
        fb.FedBCD(device_step=0.1, batch=3, cloud_iterations=3), fb.SyncCloud()
    ),
    "three-cloud-iterations-async": Case(
        fb.FedBCD(device_step=0.1, batch=3, cloud_iterations=3), fb.AsyncCloud(first=2)
    ),
    "two-cloud-iterations-rigorous": Case(
        fb.FedBCDI(device_step=0.1, batch=3, cloud_iterations=2), fb.RigorousCloud(first=2)
    ),
    "join-and-leave-sync": Case(
        BCD, fb.SyncCloud(), joins=((3, 4), (9, 2)), leaves=((0, 5), (7, 3))
    ),
    "join-and-leave-fedbcd-i": Case(
        BCDI_3, fb.SyncCloud(), joins=((3, 4),), leaves=((7, 3),), active=1
    ),
    "join-async": Case(BCD, fb.AsyncCloud(first=2), joins=((3, 4), (9, 2))),
    "dynamic-graph": Case(BCD, PATHS),
    "dynamic-graph-fedbcd-i": Case(replace(BCDI, cloud_iterations=2), replace(PATHS, first=3)),
    "other-delays": Case(
        BCD, fb.AsyncCloud(first=2), clock=fb.Clock(fb.Weibull(0.7, 2.0), fb.Uniform(0.5, 2.0))
    ),
    "slow-devices": Case(BCD, fb.AsyncCloud(first=2), clock=SLOW),
    "slow-devices-sync": Case(BCD, fb.SyncCloud(), clock=SLOW, active=5),
    "slow-devices-fedbcd-i": Case(BCDI_3, fb.AsyncCloud(first=2), clock=SLOW, active=3),
    "own-active": Case(BCDI_3, fb.AsyncCloud(first=2), clock=UNSTEADY, active=(3, 1, 2)),
    "night-and-dropouts": Case(BCD, fb.RigorousCloud(first=2), clock=UNSTEADY, active=4),
    "pull-as-momentum": Case(replace(BCDI, momentum_after_contact="pull"), fb.AsyncCloud(first=2)),
    "momentum-restarted": Case(
        replace(BCDI, momentum_after_contact="restart"), fb.AsyncCloud(first=2)
    ),
    "momentum-kept-free": Case(
        replace(BCDI, projection=fb.NoProjection()), fb.RigorousCloud(first=2)
    ),
    **{f"timed-{name}": Case(TIMED, cloud) for name, cloud in CLOUDS.items()},
    "timed-join-and-leave": Case(
        replace(BCDI_3, offline_time="timed"),
        fb.AsyncCloud(first=2),
        joins=((3, 4),),
        leaves=((7, 3),),
        active=1,
    ),
    "timed-and-slow": Case(TIMED, fb.AsyncCloud(first=2), clock=SLOW),
    "epochs-sync": Case(replace(BCD, steps=None, epochs=(1, 2)), fb.SyncCloud()),
    "epochs-prox": Case(
        fb.FedProx(device_step=0.1, batch=3, penalty=GAMMA, epochs=(1, 3)), fb.SyncCloud()
    ),
    "epochs-exact": Case(
        fb.FedBCD(device_step=0.1, batch="all", epochs=(1, 3)), fb.AsyncCloud(first=2)
    ),
    "epochs-free": Case(replace(BCDI, steps=None, epochs=(1, 2)), fb.SyncCloud()),
    "epochs-and-pulls": Case(
        replace(TIMED, steps=None, epochs=(1, 2), pull_steps=(2, 4)), fb.AsyncCloud(first=2)
    ),
    "pulls-free": Case(replace(BCDI, pull_steps=(2, 3)), fb.SyncCloud()),
    "one-step-each": Case(
        fb.FedBCDI(device_step=0.1, batch=3, steps=(1, 1)), fb.AsyncCloud(first=2)
    ),
}


# Without a projection, the default; weights are beyond the box of the other cases from the start.
FREE: tuple[fb.Algorithm, ...] = (
    fb.FedBCD(device_step=0.2, batch=3, penalty=GAMMA),
    fb.FedBCDI(device_step=0.2, batch=3, offline_limit=2),
    fb.FedProx(device_step=0.2, batch=3, penalty=GAMMA),
    fb.FedAvg(device_step=0.4, batch=3),
)
CASES |= {f"free-{a.name}-{name}": Case(a, cloud) for a in FREE for name, cloud in CLOUDS.items()}


# layers on uploads, of devices that differ in weight, some of which come and go
LAID = fb.FedBCD(device_step=0.2, batch=3, penalty=[0.25 + 0.125 * (i % 5) for i in range(DEVICES)])
LAYERS = (fb.Clip(0.1), fb.Integers(2.0**-20))
CASES |= {
    "integers-async": Case(LAID, fb.AsyncCloud(first=2), joins=((3, 4),), uploads=LAYERS[1:]),
    "clipped-integers-sync": Case(LAID, fb.SyncCloud(), leaves=((7, 3),), uploads=LAYERS),
    "clipped-integers-fedbcd-i": Case(BCDI_3, fb.RigorousCloud(first=2), uploads=LAYERS),
    "clipped-fedavg": Case(FREE[3], fb.SyncCloud(), uploads=LAYERS[:1]),
}


# beyond the paper: phases end with those that have come, and let in more than they need
SHORT, SPARE = fb.Deadline(2.0, 1), fb.Deadline(spare=2)
CASES |= {
    "deadline-and-spare-sync": Case(
        BCD, CLOUDS["sync"], active=3, rounds=20, clock=SLOW, deadline=fb.Deadline(4.0, 2, 1)
    ),
    "deadline-async": Case(BCD, CLOUDS["async"], active=3, clock=SLOW, deadline=SHORT),
    "deadline-rigorous": Case(
        BCD, CLOUDS["rigorous"], active=4, clock=UNSTEADY, deadline=fb.Deadline(3.0, 2, 1)
    ),
    "deadline-fedavg": Case(FREE[3], CLOUDS["sync"], active=3, deadline=fb.Deadline(2.0, 1, 1)),
    "spare-fedprox": Case(FREE[2], CLOUDS["async"], clock=SLOW, deadline=SPARE),
}


# beyond the paper: weight decay, steps that change from session to session, other optimizers
DECAY: dict[str, Any] = {"weight_decay": 0.3, "schedule": fb.Stairs(every=2, times=0.5)}
ADAM = fb.Adam(beta1=0.8, beta2=0.9, epsilon=1e-3)
STEPPED = {
    "decay": Case(replace(BCD, weight_decay=0.3), CLOUDS["async"]),
    "stairs": Case(replace(BCD, **DECAY), CLOUDS["rigorous"]),
    "cosine-fedbcd-i": Case(replace(TIMED, schedule=fb.Cosine(3, 0.2)), CLOUDS["async"]),
    "adam-fedavg": Case(replace(FREE[3], optimizer=ADAM, **DECAY), CLOUDS["sync"]),
    "sgd-fedavg": Case(replace(FREE[3], optimizer=fb.SGD(0.7)), CLOUDS["async"]),
    "adam-fedprox": Case(replace(FREE[2], optimizer=ADAM, **DECAY), CLOUDS["async"]),
    "sgd-fedprox": Case(replace(FREE[2], optimizer=fb.SGD(0.5)), CLOUDS["sync"]),
}


def _federation(dtype: torch.dtype, model: type[Net] = Net) -> fb.Federation:
    data = [(x.to(dtype), y) for x, y in map(_data, range(DEVICES))]
    return fb.Federation(
        model=model, loss=nn.functional.cross_entropy, devices=data, servers=SERVERS
    )


def _gradient(
    device: int, params: np.ndarray, positions: list[int] | None, relu: bool = False
) -> np.ndarray:
    """Softmax regression with one tanh or ReLU layer, by hand in NumPy: not even autograd is
    shared.
    """
    x, y = (t.numpy() for t in _data(device))
    if positions is not None:
        x, y = x[positions], y[positions]
    w1, rest = params[: 4 * FEATURES].reshape(4, FEATURES), params[4 * FEATURES :]
    b1, w2, b2 = rest[:4], rest[4 : 4 + 4 * CLASSES].reshape(CLASSES, 4), rest[4 + 4 * CLASSES :]
    h = x @ w1.T + b1
    h = np.maximum(h, 0) if relu else np.tanh(h)
    logits = h @ w2.T + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    d = (p - np.eye(CLASSES)[y]) / len(y)
    dh = (d @ w2) * ((h > 0) if relu else (1 - h**2))
    return np.concatenate([(dh.T @ x).ravel(), dh.sum(0), (d.T @ h).ravel(), d.sum(0)])


def _expected(
    case: Case, seed: int, model: type[Net] = Net, earlier: fb.Run | None = None
) -> oracle.Result:
    a = case.algorithm
    federation = _federation(torch.float64, model)
    module = federation.make_model(seed).double()
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    method = method_of(a, SIZES)
    penalty = method.penalty if isinstance(method.penalty, tuple) else [method.penalty] * DEVICES

    def project(v: np.ndarray) -> np.ndarray:
        return a.projection.project(torch.from_numpy(v)).numpy()

    gradient = partial(_gradient, relu=model is ReluNet)
    problem = oracle.Problem(
        federation.servers, dict(enumerate(SIZES)), gradient, project(start.numpy()), project
    )
    if earlier is not None:
        problem.earlier = [*earlier.personal_NF.numpy()], [*earlier.global_VF.numpy()]
    settings = oracle.Settings(
        algorithm=a.name,
        cloud=case.cloud.name,
        first=getattr(case.cloud, "first", SERVERS),
        active=case.active,
        available=method.available_of(5),
        offline_limit=method.offline_limit or 4,
        penalty=dict(enumerate(penalty)),
        device_step=a.device_step,
        momentum=method.momentum,
        server_step=getattr(a, "server_step", 1.0),
        steps=a.epochs or a.steps,
        epochs=a.epochs is not None,
        pull_steps=method.pull_steps,
        offline_time=method.offline_time,
        weight=str(getattr(a, "weight", "size")),
        batch=None if a.batch == "all" else a.batch,
        cloud_iterations=method.cloud_iterations,
        rounds=case.rounds,
        seed=seed,
        arrival_quantile=lambda u: float(case.clock.arrival.quantile(np.array([u]))[0]),
        step_quantile=lambda u: float(case.clock.step.quantile(np.array([u]))[0]),
        joins=dict(case.joins),
        leaves=dict(case.leaves),
        momentum_after_contact=getattr(a, "momentum_after_contact", "kept"),
        clip=next((each.norm for each in case.uploads if isinstance(each, fb.Clip)), np.inf),
        scale=next((each.scale for each in case.uploads if isinstance(each, fb.Integers)), 0.0),
        links=[list(links) for links in getattr(case.cloud, "edges", ())],
        link_failure=getattr(case.cloud, "link_failure", 0.0),
        link_seed=getattr(case.cloud, "seed", 0),
        **({} if case.deadline is None else _waits(case.deadline)),
        **_stepped(a),
        **_slow(case.clock, sum(p.numel() for p in module.parameters())),
    )
    return oracle.run(problem, settings)


def _stepped(a: Any) -> dict[str, Any]:
    by = getattr(a, "optimizer", None)
    found = {"weight_decay": a.weight_decay}
    if a.schedule is not None:
        found["factor"] = a.schedule.factor
    match by:
        case fb.SGD():
            return {**found, "optimizer": by.name, "betas": (by.momentum, 0.0)}
        case fb.Adam():
            of_adam = {"betas": (by.beta1, by.beta2), "epsilon": by.epsilon}
            return {**found, "optimizer": by.name, **of_adam}
    return found


def _waits(deadline: fb.Deadline) -> dict[str, Any]:
    after = np.inf if deadline.after is None else deadline.after
    return {"deadline": after, "least": deadline.least, "spare": deadline.spare}


def _slow(clock: fb.Clock, size: int) -> dict[str, Any]:
    """What the clock says beyond the paper, in the oracle's words; models are float64."""
    band, speeds = clock.bandwidth, clock.speeds
    rates = [
        np.broadcast_to(rate, DEVICES)
        for rate in (getattr(band, "up", None), getattr(band, "down", None))
        if rate is not None
    ]
    return {
        "classes": [
            oracle.Class(
                {name: getattr(c, name) for name in ("arrival", "step", "transfer")},
                c.share,
                c.devices,
                c.servers,
            )
            for c in clock.classes
        ],
        "speed_quantile": None
        if speeds is None
        else lambda u: float(speeds.quantile(np.array([u]))[0]),
        "night": clock.day.night if clock.day else 1.0,
        "period": clock.day.period if clock.day else 1.0,
        "transfer": {i: sum(8 * size / rate[i] for rate in rates) for i in range(DEVICES)},
        "dropout": clock.dropout,
    }


@cache
def _expected_of(name: str, seed: int, model: type[Net] = Net) -> oracle.Result:
    return _expected((CASES | STEPPED)[name], seed, model)


def _carrying(clock: fb.Clock, dtype: torch.dtype) -> fb.Clock:
    """Links on which models of this type take as long as float64 ones do on those of the case."""
    if clock.bandwidth is None or dtype == torch.float64:
        return clock
    down, up = clock.bandwidth.down, clock.bandwidth.up
    assert isinstance(down, tuple)
    assert isinstance(up, float)
    return replace(clock, bandwidth=fb.Bandwidth(tuple(rate / 2 for rate in down), up / 2))


def _actual(
    case: Case,
    seed: int,
    dtype: torch.dtype,
    max_batch: int | None,
    model: type[Net] = Net,
    **more: Any,
) -> fb.Run:
    return fb.train(
        _federation(dtype, model),
        case.algorithm,
        cloud=case.cloud,
        rounds=case.rounds,
        active=case.active,
        clock=_carrying(case.clock, dtype),
        seed=seed,
        joins=dict(case.joins),
        leaves=dict(case.leaves),
        dtype=dtype,
        max_batch=max_batch,
        uploads=case.uploads,
        looks=1,
        certify_every=0,
        deadline=case.deadline,
        **more,
    )


def _largest_difference(run: fb.Run, expected: oracle.Result) -> float:
    x = max(np.abs(run.personal_NF[i].double().numpy() - v).max() for i, v in expected.x.items())
    z = max(np.abs(run.global_VF[n].double().numpy() - v).max() for n, v in enumerate(expected.z))
    return float(max(x, z))


@pytest.mark.parametrize(("seed", "max_batch"), [(0, None), (7, 1)], ids=["together", "one by one"])
@pytest.mark.parametrize("name", CASES | STEPPED)
def test_every_algorithm_on_every_cloud_agrees_with_the_oracle_in_float64(
    name: str, seed: int, max_batch: int | None
) -> None:
    expected = _expected_of(name, seed)
    run = _actual((CASES | STEPPED)[name], seed, torch.float64, max_batch)
    assert run.summary["clock"] == pytest.approx(expected.clock, rel=1e-12)
    assert _largest_difference(run, expected) < 1e-9


@pytest.mark.parametrize("name", ["fedbcd-sync", "fedbcd-i-rigorous", "timed-async"])
def test_a_run_that_begins_with_earlier_models_agrees_with_the_oracle(
    name: str, tmp_path: Path
) -> None:
    earlier = _actual(CASES["fedbcd-async"], 3, torch.float64, None, out=tmp_path)
    run = _actual(CASES[name], 0, torch.float64, None, start=tmp_path)
    expected = _expected(CASES[name], 0, earlier=earlier)
    assert _largest_difference(run, expected) < 1e-9
    assert _largest_difference(run, _expected_of(name, 0)) > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if "integers" in name])
def test_coarse_integers_agree_with_the_oracle(name: str) -> None:
    """So coarse that every digit of a sum shows how it was rounded."""
    case = replace(CASES[name], uploads=(fb.Clip(0.3), fb.Integers(2.0**-5)))
    run = _actual(case, 0, torch.float64, None)
    assert _largest_difference(run, _expected(case, 0)) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_the_oracle_within_rounding(name: str) -> None:
    run = _actual(CASES[name], 0, torch.float32, None)
    assert _largest_difference(run, _expected_of(name, 0)) < of_run(CASES[name].rounds)


@pytest.mark.parametrize("number", ["momentum", "device_step", "server_step"])
def test_a_number_that_is_wrong_by_a_hundredth_is_told_from_rounding(number: str) -> None:
    case = CASES["fedbcd-i-async"]
    wrong = replace(case.algorithm, **{number: 0.99 * getattr(case.algorithm, number)})
    run = _actual(replace(case, algorithm=wrong), 0, torch.float32, None)
    assert _largest_difference(run, _expected(case, 0)) > of_run(case.rounds)


@pytest.mark.skipif(library() is None, reason="the compiled code was not built")
@pytest.mark.parametrize(
    ("name", "threads"), [*((name, 3) for name in CASES), ("fedbcd-i-rigorous", 1)]
)
def test_compiled_sessions_agree_with_the_oracle_within_rounding(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    train = ChainTrainer.train
    monkeypatch.setattr(
        ChainTrainer,
        "train",
        lambda self, *given, **more: calls.append(given) or train(self, *given, **more),
    )
    torch.set_num_threads(threads)
    try:
        run = _actual(CASES[name], 0, torch.float32, None, ReluNet)
    finally:
        torch.set_num_threads(1)
    assert bool(calls) == (not isinstance(CASES[name].algorithm.projection, fb.Ball)), (
        "compiled code knows boxes"
    )
    assert _largest_difference(run, _expected_of(name, 0, ReluNet)) < of_run(CASES[name].rounds)
