"""What people write in Python: it works where it was reasonable, and else is refused in a sentence
that names it, before anything runs or is written.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.method import Facts, Method, Relative, Slot
from fedbcd.algorithm.plan import Custom, Set, Steps
from fedbcd.errors import ConfigError, FedBCDError
from fedbcd.protocol.coordinator import AsyncCoordinator
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
    ({"start": 3}, "start = 3 is no path; give the folder of a finished run"),
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
    (lambda: fb.FedBCD(lr=0.1), r"FedBCD takes no 'lr' \(did you mean 'device_step'\?\)"),  # type: ignore[call-arg]
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
    data = [
        ((torch.arange(12.0).reshape(4, 3) + i) / 15, torch.tensor([0, 1, 0, 1])) for i in range(4)
    ]
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


# ------------------------------------------------------------------------------------------------
# what others have written
@dataclass(frozen=True)
class Made:
    """A method with this in it."""

    changes: dict[str, Any]

    def method(self, facts: Facts) -> Method:
        return Method(**{"name": "made", "plan": (Steps(0.1),), "batch": 2, **self.changes})


def gives(found: Any) -> Callable[..., Any]:
    """A function that returns it, whatever it is given."""
    return lambda *_: found


def custom(found: Any) -> dict[str, Any]:
    return {"plan": (Steps(0.1), Custom(gives(found), reads=("x",), writes=("y",)))}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan": ()}, r"plan=\(\) does nothing in an activation"),
        ({"slots": ("x",)}, r"made: slots\[0\] = 'x' must be a Slot"),
        ({"by_tensor": [1]}, "made: by_tensor = .* must be a list"),
        ({"by_tensor": {"a": "b"}}, r"made: by_tensor\['a'\] = 'b' must be a number"),
        ({"step": None}, "made: step = None has no __call__"),
        ({"step": Relative}, "made: step = Relative is a class"),
        ({"step": Relative(of="dd")}, "server step is of 'dd', which is not sent; there is x"),
        ({"weight": "sizee"}, "made: weight = 'sizee' must be 'one' or 'size' or 'penalty'"),
        ({"weight": [1.0, 2.0]}, "weight has 2 values for 4 devices"),
        ({"weight": [1.0, 1.0, 1.0, -1.0]}, "weight of device 3 is -1.0; it must be .* above 0"),
        ({"weight": [1.0, 1.0, 0.0, 1.0]}, "weight of device 2 is 0.0"),
        ({"weight": [1.0, float("nan"), 1.0, 1.0]}, "weight of device 1 is nan"),
        ({"weight": "penalty"}, "weight of device 0 is 0.0"),
        ({"penalty": -1.0}, "penalty of device 0 is -1.0; it must be a finite number, 0 or more"),
        ({"penalty": float("nan")}, "penalty of device 0 is nan"),
        ({"penalty": "1"}, "made: penalty = '1' must be a number"),
        ({"cloud_iterations": 0}, "cloud_iterations=0 must be 1 or more"),
        ({"available": -1}, "available=-1 must be a number of members"),
        ({"step": gives({"zz": torch.zeros(8)})}, r"server step returns {'zz'"),
        ({"step": gives(None)}, "server step returns None; it must return a mapping of z"),
        ({"step": gives({"z": torch.zeros(3)})}, "to tensors as wide as before"),
        ({"step": lambda w, sums: {"z": sums.totals["q"]}}, "server step fails .KeyError: 'q'"),
        (custom(None), "its function returns None; it must return a mapping of y"),
        (custom({"q": torch.zeros(1, 8)}), "must return a mapping of y, as `writes` says"),
        (custom({"y": torch.zeros(7, 8)}), "a row for each of the 1 devices"),
    ],
)
def test_a_method_that_cannot_be_played(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(Made(changes), small(), active=1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Steps(-0.1), r"Steps step=-0.1 must be a finite number above 0"),
        (lambda: Steps("0.1"), "Steps step = '0.1' must be a number"),
        (lambda: Steps(0.1, pulls=("z",)), r"Steps pulls\[0\] = 'z' must be a Toward"),
        (lambda: Steps(0.1, projection=3), "Steps projection = 3 has no project"),
        (lambda: Set("x", (1.0, "z")), r"Set terms\[0\] = 1.0 must be a list"),
        (
            lambda: Custom(gives(None)),
            r"Kept.method\(facts\) fails .*'writes', test_.* line \d",
        ),
        (lambda: 1 / 0, r"fails \(ZeroDivisionError: .* line \d+\); facts has devices and sizes"),
        (lambda: Steps(0.1, only=("1.*",)), r"only=\['1.\*'\] fits none of .*; it has weight"),
    ],
)
def test_an_operation_that_is_none(make: Callable[[], Any], sentence: str, tmp_path: Path) -> None:
    """Said where the run is checked, before the first of several is trained."""

    @dataclass(frozen=True)
    class Kept:
        def method(self, facts: Facts) -> Method:
            return Method(name="kept", plan=(make(),))

    with pytest.raises(ConfigError, match=sentence):
        fb.RunSpec(Kept(), active=1).check(small())


def test_weights_may_come_as_an_array() -> None:
    run = train(Made({"weight": np.array([1, 2, 3, 4])}), small(), active=1)
    assert run.digest == train(Made({"weight": (1.0, 2.0, 3.0, 4.0)}), small(), active=1).digest


def test_a_vector_of_an_unknown_width() -> None:
    with pytest.raises(ConfigError, match="Slot width = 'modell' must be 'model'"):
        Slot("x", "modell")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Law:
    """A delay law that gives this."""

    gives: Callable[[np.ndarray], Any] = field(repr=False)

    def quantile(self, u: np.ndarray) -> Any:
        return self.gives(u)


@dataclass(frozen=True)
class Within:
    """A set that gives this."""

    gives: Callable[[torch.Tensor], Any] = field(repr=False)

    def project(self, x: torch.Tensor) -> Any:
        return self.gives(x)


@pytest.mark.parametrize("found", [None, 1.0, "x", np.zeros(3)])
def test_a_delay_law_that_gives_no_delays(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"the delay law Law\(\)"):
        train(fed=small(), active=1, clock=fb.Clock(step=Law(lambda _: found)))


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_delays_that_are_none(factor: float) -> None:
    """Also those that come up only for some draws, in a run: here below a quarter."""
    for least, law in ((0.25, "step"), (1.0, "arrival")):
        wrong = Law(lambda u, least=least: np.where(u < least, factor, 1.0))  # type: ignore[misc]
        with pytest.raises(ConfigError, match=r"Law\(\) gives .*; it must give a finite time"):
            train(fed=small(), active=1, rounds=20, clock=fb.Clock(**{law: wrong}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (lambda _: None, r"Within\(\) gives NoneType for 2 rows of 8 numbers"),
        (lambda x: x.numpy(), "gives ndarray for 2 rows"),
        (lambda x: x[0], r"gives shape \(8,\) for 2 rows"),
        (lambda x: x @ x, "fails on 2 rows of 8 numbers .RuntimeError: .*python.py line"),
        (lambda x: x / 2, "moves what it has projected, so it is none"),
    ],
)
def test_a_set_that_gives_no_points(found: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(fb.FedBCD(projection=Within(found)), small(), active=1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mixed:
    """A cloud for all servers, with these weights and this coordinator."""

    weighs: Any = None
    sync: bool = False
    name: str = "mixed"

    def coordinator(self, servers: int, iterations: int) -> Any:
        return AsyncCoordinator(range(servers), servers, iterations, alike=False)

    def weights(self, round_: int, servers: Any) -> Any:
        return self.weighs(round_) if callable(self.weighs) else self.weighs


def late(round_: int) -> Any:
    """Doubly stochastic, but for round 6."""
    return [[1.0, 0.0], [0.0, 1.0]] if round_ != 6 else [[2.0, -1.0], [-1.0, 2.0]]


@pytest.mark.parametrize(
    ("cloud", "sentence"),
    [
        (Mixed(weighs=[[1.0]]), r"has rows of \[1\] numbers; 2 servers need 2 rows of 2"),
        (Mixed(weighs=[[1.0, 1.0], [0.0, 0.0]]), "row 0 of the mixing matrix sums to 2"),
        (Mixed(weighs=late), r"weights\(6, .*the mixing matrix has a negative"),
        (Mixed(weighs="x"), "= 'x' must be a list"),
        (Mixed(weighs=lambda t: {}[t]), r"weights\(0, .* fails .KeyError: 0, test_given.* line"),
        (Mixed(sync=True), "has sync=True, but its coordinator is AsyncCoordinator"),
    ],
)
def test_a_cloud_of_ones_own_that_is_none(cloud: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(fed=small(), active=1, rounds=8, cloud=cloud)


def test_a_coordinator_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for coordinates, sentence in (
        (lambda *_: None, "its coordinator is None; it must have round, handle"),
        (lambda _: None, r"it needs coordinator\(servers, iterations\)"),
    ):
        monkeypatch.setattr(Mixed, "coordinator", staticmethod(coordinates))
        with pytest.raises(ConfigError, match=sentence):
            train(fed=small(), active=1, cloud=Mixed())


@dataclass(frozen=True)
class Present:
    """An availability rule that gives this."""

    gives: Callable[..., Any] = field(repr=False)

    def available(self, members: np.ndarray, round_: int, u: np.ndarray) -> Any:
        return self.gives(members)


@dataclass(frozen=True)
class Layered:
    """A layer that sends and reads this."""

    sends: Callable[..., Any] = field(repr=False)
    reads: Callable[..., Any] = field(repr=False, default=lambda x: x)
    whole: bool = False

    def send(self, message: torch.Tensor, sender: Any) -> Any:
        return self.sends(message)

    def read(self, total: torch.Tensor) -> Any:
        return self.reads(total)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"availability": Present(gives(True))}, r"gives bool of shape \(\) for 2 devices"),
        ({"availability": Present(lambda m: m[9])}, r"Present\(\) fails .IndexError: .* line \d"),
        ({"uploads": [Layered(gives(None))]}, r"the layer Layered\(.*: send gives None; send.mess"),
        ({"uploads": [Layered(lambda x: x[1:])]}, "send gives tensor"),
        ({"uploads": [Layered(lambda x: x.float())]}, "take a vector of float64"),
        ({"uploads": [Layered(lambda x: x, gives(0.0))]}, "read gives 0.0"),
        ({"uploads": [Layered(lambda x: x.q)]}, "fails .AttributeError: .* line"),
        ({"uploads": [Layered(lambda x: x, whole=True)]}, "has whole=True, but sends tensor"),
    ],
)
def test_a_rule_or_a_layer_that_is_none(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fb.RunSpec(fb.FedBCD(), active=1, **options).check(small())


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ({"test": (torch.rand(4, 5), torch.zeros(4, dtype=torch.int64))}, {}, "on test inputs of"),
        ({"transform": lambda x: x / 255}, {}, "the transform fails on inputs of shape"),
        ({"metric": lambda _, __: torch.ones(3)}, {}, r"gives shape \(3,\) for 2 samples"),
        ({"metric": lambda _: 1}, {}, "the metric fails on outputs of shape"),
        ({}, {"cloud": Mixed(weighs=gives(None))}, "cannot be written down"),
        ({}, {"record": {"by": gives(None)}}, "cannot be written down"),
    ],
)
def test_a_folder_is_begun_only_when_all_fits(
    given: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """The corrected call is then not refused."""
    out = tmp_path / "out"
    with pytest.raises(FedBCDError, match=sentence):
        train(fed=small(**given), active=1, out=out, **options)
    assert not out.exists()
    train(fed=small(), active=1, out=out)
