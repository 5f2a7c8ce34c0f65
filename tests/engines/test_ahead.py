"""Rounds planned ahead give the numbers of the event loop, up to the order of float64 sums; here
without a GPU, so neither is recorded.
"""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.augment import FlipCrop
from fedbcd.algorithm.objective import Objective
from fedbcd.compute import ahead as module
from fedbcd.compute.evaluate import Evaluator
from fedbcd.compute.workers import OneWorker
from fedbcd.data.partition import Partition
from fedbcd.errors import ConfigError, NumericalError, RecordError
from fedbcd.models import logistic, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*never mixes:fedbcd.errors.DivergenceWarning")


@pytest.fixture(scope="module")
def digits() -> fb.Federation:
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, 20, 3, 40)
    make, loss = (lambda: mlp(64, 10, (16,))), nn.functional.cross_entropy
    return fb.Federation.from_partition(
        make, loss, data.train, split, 4, test=data.test, transform=data.transform
    )


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 64, 10),
        )


@pytest.fixture(scope="module")
def pictures() -> fb.Federation:
    rng = np.random.default_rng(0)
    pool = fb.Samples(
        torch.from_numpy(rng.integers(0, 256, (600, 3, 8, 8), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 10, 600)),
    )
    owned = tuple(np.arange(30 * i, 30 * i + 30) for i in range(20))
    partition = Partition(owned, tuple((0, 1) for _ in owned))
    return fb.Federation.from_partition(
        Convolutional,
        nn.functional.cross_entropy,
        pool,
        partition,
        4,
        test=pool,
        transform=lambda x, dtype: x.to(dtype) / 255 - 0.5,
        augment=FlipCrop(),
    )


def both(federation: fb.Federation, algorithm, **options):
    options = {
        "active": 2,
        "rounds": 7,
        "evaluate_every": 3,
        "dtype": torch.float64,
        "certify_every": 0,
        "seed": 3,
    } | options
    return [fb.train(federation, algorithm, ahead=ahead, **options) for ahead in (False, True)]


def assert_alike(one, other, bound: float = 1e-12) -> None:
    assert float((one.personal_NF - other.personal_NF).abs().max()) <= bound
    assert float((one.global_VF - other.global_VF).abs().max()) <= bound
    for a, b in zip(one.history, other.history, strict=True):
        assert (a.round, a.activations) == (b.round, b.activations)
        assert a.clock == pytest.approx(b.clock, rel=1e-14)
        assert a.global_accuracy == pytest.approx(b.global_accuracy, abs=1e-9)
        assert a.personal_accuracy == pytest.approx(b.personal_accuracy, abs=1e-9)
        assert a.distance == pytest.approx(b.distance, rel=1e-9, abs=1e-12)


FREE = fb.FedBCDI(offline_time="free")
CASES = [
    (fb.FedBCD(), fb.SyncCloud()),
    (fb.FedBCD(cloud_iterations=3), fb.SyncCloud()),
    (fb.FedBCD(server_step=0.02, server_step_form="absolute"), fb.SyncCloud()),
    (fb.FedBCD(penalty=[0.1 * (i + 1) for i in range(20)]), fb.AsyncCloud(first=3)),
    (fb.FedBCD(cloud_iterations=2, steps=(3, 3)), fb.AsyncCloud(first=1)),
    (fb.FedBCD(server_step=0.02, server_step_form="absolute"), fb.AsyncCloud(first=2)),
    (FREE, fb.SyncCloud()),
    (replace(FREE, offline_limit=1, available=3, pull_steps=(2, 3)), fb.SyncCloud()),
    (replace(FREE, momentum_after_contact="pull"), fb.SyncCloud()),
    (replace(FREE, momentum_after_contact="restart"), fb.SyncCloud()),
    (fb.FedProx(), fb.SyncCloud()),
    (fb.FedAvg(steps=(2, 2)), fb.SyncCloud()),
    (fb.FedProx(), fb.AsyncCloud(first=3)),
    (fb.FedBCD(epochs=(1, 2)), fb.AsyncCloud(first=2)),
]


@pytest.mark.parametrize(("algorithm", "cloud"), CASES, ids=lambda value: f"{value.name}")
@pytest.mark.parametrize("grouped", [False, True], ids=["together", "grouped by steps"])
def test_numbers_of_the_event_loop(digits, algorithm, cloud, grouped, monkeypatch) -> None:
    if grouped:
        monkeypatch.setattr(module, "MASKED_JOBS", 1)
        monkeypatch.setattr(module, "GROUP_JOBS", 6)
        monkeypatch.setattr(module, "BLOCK_JOBS", 3)
    assert_alike(*both(digits, algorithm, cloud=cloud))


@pytest.mark.parametrize("algorithm", [fb.FedBCD(), FREE, fb.FedAvg()], ids=lambda a: a.name)
def test_buffers_and_augmentation(pictures, algorithm) -> None:
    assert_alike(*both(pictures, algorithm))


def test_models_kept_in_bfloat16_round_alike(digits) -> None:
    one, other = both(digits, fb.FedBCD(), storage=torch.bfloat16)
    assert (
        float((one.personal_NF - other.personal_NF).abs().max()) <= 0.02
    )  # where 1e-16 falls on the other side of a rounding
    assert float((one.personal_NF == other.personal_NF).double().mean()) > 0.999


def test_compiled_numbers_are_the_same(digits) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, 4, 3, 40)
    small = fb.Federation.from_partition(
        lambda: logistic(64, 10),
        nn.functional.cross_entropy,
        data.train,
        split,
        2,
        test=data.test,
        transform=data.transform,
    )
    options = {"active": 1, "rounds": 2, "dtype": torch.float64, "certify_every": 0}
    plain = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True}  # nothing is tried of the processor
    with warnings.catch_warnings(), torch._inductor.config.patch(plain):
        warnings.simplefilter("ignore")
        compiled = fb.train(small, fb.FedBCD(steps=(1, 2)), ahead=True, compile=True, **options)
    assert_alike(fb.train(small, fb.FedBCD(steps=(1, 2)), **options), compiled)


def test_what_blows_up_is_noticed(digits) -> None:
    wild = fb.FedBCD(device_step=1e30, projection=fb.NoProjection())
    with pytest.raises(NumericalError, match="device_step"):
        fb.train(
            digits,
            wild,
            rounds=20,
            active=2,
            ahead=True,
            evaluate_every=5,
            on_notice=lambda _: None,
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ahead": True, "cloud": fb.RigorousCloud(first=2)}, "rigorous"),
        ({"ahead": True, "max_batch": 1}, "one after another"),
        ({"ahead": True, "joins": {1: 2}}, "join"),
        ({"compile": True, "ahead": False}, "ahead=False"),
        ({"compile": True, "cloud": fb.RigorousCloud(first=2)}, "rigorous"),
        ({"precision": "float8"}, "float8"),
        ({"precision": "tf32", "dtype": torch.float64}, "float64"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(digits, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        fb.train(digits, fb.FedBCD(), rounds=2, active=2, **options)


LOGGED = [CASES[0], CASES[3], CASES[4], CASES[6], CASES[8]]


def log_of(folder: Path) -> list[str]:
    """All lines but the last, which says how the run ended."""
    return (folder / "events.jsonl").read_text().splitlines()[:-1]


@pytest.mark.parametrize(("algorithm", "cloud"), LOGGED, ids=lambda value: value.name)
def test_the_log_is_that_of_the_event_loop(digits, algorithm, cloud, tmp_path) -> None:
    folders = [tmp_path / "events", tmp_path / "ahead"]
    options = {
        "active": 2,
        "rounds": 9,
        "cloud": cloud,
        "dtype": torch.float64,
        "certify_every": 0,
        "looks": 3,
    }
    one, other = (
        fb.train(digits, algorithm, ahead=k == 1, out=folder, **options)
        for k, folder in enumerate(folders)
    )
    assert_alike(one, other)
    assert log_of(folders[0]) == log_of(folders[1])
    replayed = fb.replay(folders[1] / "events.jsonl", digits)
    assert (replayed["rounds"], replayed["clock"], replayed["complete"]) == (
        9,
        one.history.last.clock,
        True,
    )
    assert replayed["engine"] == "ahead"


@pytest.fixture(scope="module", params=LOGGED, ids=lambda case: "-".join(c.name for c in case))
def undisturbed(request, digits, tmp_path_factory) -> tuple:
    """Algorithm and options of a run by the event loop, its folder, and the run."""
    algorithm, cloud = request.param
    options = {
        "active": 2,
        "rounds": 11,
        "cloud": cloud,
        "dtype": torch.float64,
        "certify_every": 0,
        "evaluate_every": 4,
    }
    out = tmp_path_factory.mktemp("whole")
    return algorithm, options, out, fb.train(digits, algorithm, ahead=False, out=out, **options)


@pytest.mark.parametrize(
    "ways", [(True, True), (True, False), (False, True)], ids=["ahead", "then events", "then ahead"]
)
def test_a_run_goes_on_from_its_checkpoint(digits, undisturbed, ways, tmp_path) -> None:
    algorithm, options, folder, whole = undisturbed
    rounds = iter(range(100))
    first, then = ways
    stopped = fb.train(
        digits,
        algorithm,
        ahead=first,
        out=tmp_path / "run",
        should_stop=lambda: next(rounds) == 5,
        **options,
    )
    assert stopped.summary["rounds"] == 6
    resumed = fb.train(digits, algorithm, ahead=then, out=tmp_path / "run", resume=True, **options)
    assert_alike(whole, resumed)
    assert log_of(folder) == log_of(tmp_path / "run")
    assert fb.replay(tmp_path / "run" / "events.jsonl", digits)["engine"] == "ahead"


def test_checkpoints_between_looks_hold_the_models_of_their_round(digits, tmp_path) -> None:
    options = {
        "active": 2,
        "dtype": torch.float64,
        "certify_every": 0,
        "evaluate_every": 50,
        "cloud": fb.AsyncCloud(first=2),
    }
    killed = iter(range(100))

    def on_round(_: object) -> None:
        if next(killed) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.train(
            digits,
            fb.FedBCD(),
            ahead=True,
            rounds=12,
            checkpoint_every=3,
            out=tmp_path,
            on_round=on_round,
            **options,
        )
    resumed = fb.train(
        digits,
        fb.FedBCD(),
        ahead=True,
        rounds=12,
        checkpoint_every=3,
        out=tmp_path,
        resume=True,
        **options,
    )
    assert_alike(fb.train(digits, fb.FedBCD(), ahead=False, rounds=12, **options), resumed)


def test_exact_gradients_need_events(digits) -> None:
    with pytest.raises(ConfigError, match="exact gradients"):
        fb.train(digits, fb.FedBCD(batch="all"), rounds=2, active=2, ahead=True)


def test_tf32_is_allowed_for_the_run_only(digits) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    seen = []
    fb.train(
        digits,
        fb.FedBCD(),
        rounds=1,
        active=2,
        precision="tf32",
        on_round=lambda _: seen.append(
            (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        ),
    )
    assert seen == [("high", True)]
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("which", ["digits", "pictures"])
def test_bfloat16_products_stay_near(which, request) -> None:
    federation = request.getfixturevalue(which)
    full, less = (
        fb.train(federation, fb.FedBCD(), rounds=10, active=2, precision=precision, certify_every=0)
        for precision in ("float32", "bfloat16")
    )
    moved = (
        full.personal_NF
        - fb.train(
            federation, fb.FedBCD(device_step=1e-9), rounds=1, active=2, certify_every=0
        ).personal_NF
    )
    difference = float((full.personal_NF - less.personal_NF).norm() / moved.norm())
    assert 0 < difference < 0.1
    assert less.personal_NF.dtype == torch.float32


def test_precision_is_part_of_what_a_run_is(digits, tmp_path) -> None:
    fb.train(digits, fb.FedBCD(), rounds=2, active=2, precision="bfloat16", out=tmp_path / "run")
    result = fb.replay(tmp_path / "run" / "events.jsonl", digits)
    assert result["complete"]
    with pytest.raises(RecordError):
        fb.train(digits, fb.FedBCD(), rounds=4, active=2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("which", ["digits", "pictures"])
def test_all_models_tested_together_score_as_one_by_one(which, request, monkeypatch) -> None:
    monkeypatch.setattr(
        "fedbcd.compute.outputs.INPUT_VALUES_AT_ONCE", 5_000
    )  # several calls per label
    federation = request.getfixturevalue(which)
    objective = Objective(federation.make_model(0), federation.loss)
    flat = objective.layout.flatten(federation.make_model(1), torch.float32)
    models = flat + 0.1 * torch.randn(20, len(flat), generator=torch.Generator().manual_seed(0)) * (
        torch.arange(len(flat)) < objective.layout.size_P
    )
    personal = dict(enumerate(models))
    scores = [
        Evaluator(federation, objective, torch.device("cpu"), together).scores(
            models[:4], personal, OneWorker()
        )
        for together in (False, True)
    ]
    # Where two outputs are as near as rounding takes them, one sample may fall on either side.
    labels = federation.test.targets.bincount()
    assert scores[0].servers == pytest.approx(scores[1].servers, abs=1.01 / len(federation.test))
    devices = [[score.devices[i] for i in range(20)] for score in scores]
    assert devices[0] == pytest.approx(devices[1], abs=1.01 / int(labels[labels > 0].min()))
