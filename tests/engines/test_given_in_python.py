"""What people write in Python: it works where it was reasonable, and else is refused in a sentence
that names it, before anything runs or is written.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.errors import ConfigError, FedBCDError
from support.runs import federation

RING = [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]
LINKS = [(0, 1), (1, 2), (2, 3)]


def train(algorithm: Any = None, fed: Any = None, **options: Any) -> fb.Run:
    options = {"rounds": 1, "active": 2, "certify_every": 0} | options
    return fb.train(fed or federation(), algorithm or fb.FedBCD(batch=2), **options)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"cloud": fb.SyncCloud}, r"cloud = SyncCloud is a class; give a value of it"),
    ({"cloud": "asynk"}, r"cloud.name = 'asynk' is unknown \(did you mean 'async'\?\)"),
    ({"cloud": 5}, r"cloud = 5 has no name; give a value of fb.SyncCloud, fb.AsyncCloud"),
    ({"clock": fb.Exponential(2)}, r"\[clock\] must be a table, not Expon.*; in Python, a Clock"),
    ({"rounds": "2"}, "rounds = '2' must be a whole number"),
    ({"rounds": 2.5}, "rounds = 2.5 must be a whole number"),
    ({"rounds": None, "until_clock": "9"}, "until_clock = '9' must be a number"),
    ({"threads": "2"}, "threads = '2' must be a whole number"),
    ({"seed": 1.5}, "seed = 1.5 must be a whole number"),
    ({"seed": True}, "seed = True must be a whole number"),
    ({"joins": {"1": 1}}, r"joins\[0\]\[0\] = '1' must be a whole number; write pairs"),
    ({"joins": 3}, "joins = 3 must be a list; write pairs"),
    ({"leaves": [(1, 2), (1, 3)]}, "leaves names device 1 twice"),
    ({"dtype": "int8"}, "dtype = 'int8' must be one of 'float32'"),
    ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating-point dtype"),
    ({"uploads": [fb.Clip]}, r"uploads\[0\] = Clip is a class"),
    ({"uploads": fb.Clip(1.0)}, r"uploads = Clip\(norm=1.0\) must be a list of layers"),
    ({"churn": 0.1}, r"\[churn\] must be a table, not 0.1; in Python, a Churn"),
    ({"engine": 3}, "engine = 3 must be a text or a Cluster"),
    ({"compile": "yes"}, "compile = 'yes' must be true or false"),
    ({"torch_device": 0}, "torch_device = 0 must be a text or a device"),
    ({"resume": True}, "resume=True goes on with what is in a folder: give it, out=..."),
]


@pytest.mark.parametrize(("said", "sentence"), OPTIONS)
def test_an_option_of_another_type_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(**said)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ("fedbdc", r"algorithm.name = 'fedbdc' is unknown \(did you mean 'fedbcd'\?\)"),
        (fb.FedBCD, r"algorithm = FedBCD is a class; give a value of it, FedBCD\(\.\.\.\)"),
        (7, r"algorithm = 7 has no method\(facts\); give a value of fb.FedBCD, fb.FedBCDI"),
    ],
)
def test_no_algorithm(algorithm: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(algorithm)
    with pytest.raises(ConfigError, match="algorithm = None has no method"):
        fb.train(federation(), None, rounds=1)  # type: ignore[arg-type]


VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: fb.FedBCD(lr=0.1), r"unknown key 'lr' \(did you mean 'device_step'\?\)"),  # type: ignore[call-arg]
    (lambda: fb.FedProx(gamma=1.0), r"'gamma' \(did you mean 'penalty'\?\)"),  # type: ignore[call-arg]
    (lambda: fb.FedBCD(steps=(1.0, 3.5)), r"steps\[0\] = 1.0 must be a whole number"),  # type: ignore[arg-type]
    (lambda: fb.FedBCD(steps=(1, 2, 3)), r"steps = \[1, 2, 3\] must have 2 values"),  # type: ignore[arg-type]
    (lambda: fb.FedBCD(penalty="1"), "penalty = '1' must be a number or a list"),  # type: ignore[arg-type]
    (lambda: fb.FedBCD(penalty=[1.0, "a"]), r"penalty\[1\] = 'a' must be a number"),  # type: ignore[list-item]
    (lambda: fb.FedBCD(device_step=None), "device_step = None must be a number"),  # type: ignore[arg-type]
    (lambda: fb.FedBCD(projection=fb.Box), r"projection = Box is a class"),  # type: ignore[arg-type]
    (lambda: fb.Box("1", 2), "box low = '1' must be a number"),  # type: ignore[arg-type]
    (lambda: fb.AsyncCloud(1.5), "first = 1.5 must be a whole number"),  # type: ignore[arg-type]
    (lambda: fb.AsyncCloud("2"), "first = '2' must be a whole number"),  # type: ignore[arg-type]
    (lambda: fb.GraphCloud("x"), r"mixing = 'x' must be a list|mixing\[0\] = 'x' must be a list"),  # type: ignore[arg-type]
    (lambda: fb.GraphCloud([["a"]]), r"mixing\[0\]\[0\]\[0\] = 'a' must be a number"),  # type: ignore[list-item]
    (lambda: fb.DynamicGraph(LINKS, 2, link_failure="x"), "link_failure = 'x' must be a number"),  # type: ignore[arg-type]
    (lambda: fb.DynamicGraph(5, 2), r"edges\[0\] = 5 must be a list"),  # type: ignore[arg-type]
    (lambda: fb.Exponential("2"), "exponential mean = '2' must be a number"),  # type: ignore[arg-type]
    (lambda: fb.Clock(step=None), r"clock.step = None has no quantile\(u\) or at"),  # type: ignore[arg-type]
    (lambda: fb.Clock(step=fb.Exponential), "clock.step = Exponential is a class"),  # type: ignore[arg-type]
    (lambda: fb.Clock(arrival=2.0), r"clock.arrival = 2.0 has no quantile\(u\) or at"),  # type: ignore[arg-type]
    (lambda: fb.Clock(classes=[{"devices": 3}]), r"clock.classes\[0\].devices = 3 must be a list"),  # type: ignore[list-item]
    (lambda: fb.Churn(joins="x"), "churn.joins = 'x' must be a number"),  # type: ignore[arg-type]
    (lambda: fb.Clip("x"), "clip norm = 'x' must be a number"),  # type: ignore[arg-type]
    (lambda: fb.Cluster(actors="2"), "engine: actors = '2' must be a whole number"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "sentence"), VALUES)
def test_a_setting_of_another_type_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("made", "meant"),
    [
        (lambda: fb.FedBCD(steps=3), fb.FedBCD(steps=(3, 3))),
        (lambda: fb.FedBCD(steps=np.array([1, 3])), fb.FedBCD(steps=(1, 3))),
        (lambda: fb.FedBCD(penalty=torch.tensor([1, 2])), fb.FedBCD(penalty=(1.0, 2.0))),
        (lambda: fb.FedBCD(device_step=np.float64(0.5)), fb.FedBCD(device_step=0.5)),
        (lambda: fb.GraphCloud(np.array(RING)), fb.GraphCloud(RING)),
        (lambda: fb.GraphCloud(torch.tensor(RING)), fb.GraphCloud(RING)),
        (lambda: fb.GraphCloud([*torch.tensor(RING)]), fb.GraphCloud(RING)),
        (lambda: fb.GraphCloud(np.array([RING, RING])), fb.GraphCloud([RING, RING])),
        (lambda: fb.DynamicGraph(np.array(LINKS), 2), fb.DynamicGraph(LINKS, 2)),
        (lambda: fb.AsyncCloud(np.int64(2)), fb.AsyncCloud(2)),
        (lambda: fb.RunSpec(fb.FedBCD(), cloud="async"), fb.RunSpec(fb.FedBCD(), fb.AsyncCloud(2))),
        (lambda: fb.RunSpec("fedbcd"), fb.RunSpec(fb.FedBCD())),
        (
            lambda: fb.RunSpec(fb.FedBCD(), dtype="float64", storage="bfloat16"),
            fb.RunSpec(fb.FedBCD(), dtype=torch.float64, storage=torch.bfloat16),
        ),
        (
            lambda: fb.RunSpec(fb.FedBCD(), joins=[(1, 2)], churn={}, rounds=np.int64(3)),
            fb.RunSpec(fb.FedBCD(), joins={1: 2}, churn=fb.Churn(), rounds=3),
        ),
    ],
)
def test_what_is_reasonable_works(made: Callable[[], Any], meant: Any) -> None:
    """Beyond equality: it is recorded alike."""
    found = made()
    assert found == meant
    assert repr(found) == repr(meant)


def test_whole_numbers_stay_as_they_are_recorded() -> None:
    """Of a run made in Python, an identity says mean = 2 where 2 was given: it is hashed so."""
    assert repr(fb.Exponential(2)) == "Exponential(mean=2)"
    assert repr(fb.FedBCD(penalty=(1, 2.0)).penalty) == "(1, 2.0)"
    assert repr(fb.FedBCD(penalty=[1, 2.0]).penalty) == "(1.0, 2.0)"


# ------------------------------------------------------------------------------------------------
# a federation
def small(**changes: Any) -> fb.Federation:
    data = [(torch.rand(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(4)]
    given = {"servers": 2, "test": data[0]} | changes
    return fb.Federation(lambda: nn.Linear(3, 2), nn.functional.cross_entropy, data, **given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"servers": 2.5}, "servers = 2.5 must be a whole number or a list"),
        ({"servers": 2.0}, "servers = 2.0 must be a whole number or a list"),
        ({"servers": {"a": 0}}, "servers: 'a' = 'a' must be a whole number"),
        ({"servers": {0: 0, 1: 1}}, "device 2 appears 0 times"),
    ],
)
def test_servers_that_are_none(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        small(**changes)


def test_a_mapping_says_whose_device_is_whose() -> None:
    assert small(servers={0: 0, 1: 5, 2: 0, 3: 5}).servers == [[0, 2], [1, 3]]


def test_models_of_nobody() -> None:
    run = train(fed=small(), active=1)
    for ask, sentence in (
        (run.personal_model, "there is no device 99; there are devices 0 to 3"),
        (run.server_model, "there is no server 99; there are servers 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ask(99)


def test_data_by_plain_values() -> None:
    labels = [0, 1] * 8
    split, meant = (fb.diversity(given, 4, 1, 4) for given in (labels, torch.tensor(labels)))
    assert [p.tolist() for p in split.samples] == [p.tolist() for p in meant.samples]
    with pytest.raises(FedBCDError, match=r"nowhere"):
        fb.load_dataset("mnist", "nowhere")
