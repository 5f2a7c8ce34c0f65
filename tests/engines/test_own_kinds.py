"""Kinds of other people, by object in Python and as `package.module:Name` in a job file: a cloud
whose mixing varies with the round, a delay law, a set to project onto, a partition.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedbcd as fb
from fedbcd.algorithm.fused.library import bounds_of
from fedbcd.algorithm.projection import diameter, is_within, on_bound, project_, projected
from fedbcd.cli import main
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.errors import ConfigError, DataError
from fedbcd.experiments.check import check_job
from fedbcd.experiments.job import load_job, parse
from support.runs import federation, job_table, largest_difference

THEIRS = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedbcd.data.partition import Partitioner
from fedbcd.protocol.coordinator import AsyncCoordinator


@dataclass(frozen=True)
class Gossip:
    """In even rounds neighbours 0-1 and 2-3 mix, in odd ones 1-2 and 3-0."""

    share: float = 0.5
    name: ClassVar[str] = "gossip"
    sync: ClassVar[bool] = False

    def coordinator(self, servers, iterations):
        return AsyncCoordinator(range(servers), servers, iterations, alike=False)

    def weights(self, round_, servers):
        a = np.eye(4) * (1 - self.share)
        for n in range(0, 4, 2):
            i, j = (n + round_) % 4, (n + 1 + round_) % 4
            a[i, j] = a[j, i] = self.share
        return tuple(tuple(float(a[n, k]) for k in servers) for n in servers)


@dataclass(frozen=True)
class Triangular:
    """Between 0 and `most`, mostly short."""

    most: float = 2.0

    def quantile(self, u):
        return self.most * (1 - np.sqrt(1 - np.asarray(u)))


@dataclass(frozen=True)
class Halfspace:
    """Models whose numbers do not add up to more than `most`."""

    most: float = 1.0

    def project(self, x):
        over = (x.sum(-1, keepdim=True) - self.most).clamp(min=0)
        return x - over / x.shape[-1]


@dataclass(frozen=True)
class Turns(Partitioner):
    """Every so-manyth sample."""

    says: str = ""

    def deal(self, pool, devices, seed):
        dealt = [np.arange(device, len(pool), devices) for device in range(devices)]
        wrong = {
            "": (dealt, None),
            "one": dealt,
            "few": (dealt[:3], None),
            "twice": ([np.array([1, 1])] * devices, None),
            "halves": ([np.array([0.5])] * devices, None),
        }
        return wrong[self.says]


def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


class NotFrozen:
    pass
'''
JOB = """
[data]
name = "digits"
partition = {name = "theirs:Turns"}
[federation]
servers = 4
devices = 16
active = 2
[algorithm]
name = "fedbcd"
projection = {name = "theirs:Halfspace", most = 0.5}
[cloud]
name = "theirs:Gossip"
share = 0.25
[clock]
step = {name = "theirs:Triangular", most = 3.0}
[run]
rounds = 4
dtype = "float64"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    return tmp_path


def command(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fedbcd", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_job_file_may_name_kinds_of_its_own(folder: Path) -> None:
    run = load_job(folder / "job.toml").run(folder / "out")
    assert float(run.personal_NF.sum(-1).max()) <= 0.5 + 1e-12
    assert run.federation.owned(3)[:3].tolist() == [3, 67, 131]
    head = json.loads((folder / "out" / "events.jsonl").read_text().partition("\n")[0])
    assert head["identity"]["cloud"] == {"name": "theirs:Gossip", "share": 0.25}
    assert head["identity"]["clock"]["step"] == {"name": "theirs:Triangular", "most": 3.0}
    theirs = sys.modules["theirs"]
    again = fb.train(
        run.federation,
        fb.FedBCD(projection=theirs.Halfspace(0.5)),
        cloud=theirs.Gossip(0.25),
        clock=fb.Clock(step=theirs.Triangular(3.0)),
        active=2,
        rounds=4,
        dtype=run.global_VF.dtype,
    )
    assert again.digest == run.digest, "by object it is the same run"


def test_mixing_weights_of_one_s_own_vary_with_the_round(folder: Path) -> None:
    """Server 0 mixes with 1 in round 0, and with 3 in round 1."""
    sys.path.append(str(folder))
    from theirs import Gossip

    cloud = Gossip(0.5)
    assert cloud.weights(0, range(4))[0] == (0.5, 0.5, 0.0, 0.0)
    assert cloud.weights(1, range(4))[0] == (0.5, 0.0, 0.0, 0.5)
    mixed = fb.train(federation(), fb.FedBCD(steps=(1, 2)), cloud=cloud, active=2, rounds=2)
    alone = fb.train(federation(), fb.FedBCD(steps=(1, 2)), cloud=Gossip(0.0), active=2, rounds=2)
    assert mixed.digest != alone.digest


def test_a_record_imports_nothing_unless_it_is_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_job(folder / "job.toml").run(folder / "out")
    for words in (("replay", folder / "out"), ("run", "--resume", "--out", folder / "out")):
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        assert command(*words, monkeypatch=monkeypatch) != 0
        assert "theirs" not in sys.modules
        assert "--trust" in capsys.readouterr().err
    assert command("replay", folder / "out", "--trust", monkeypatch=monkeypatch) == 0


def test_the_model_of_a_record_is_imported_only_where_it_is_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head of a log that names some program must not run it."""
    job = '[data]\nname = "digits"\nsamples = 12\n[federation]\nservers = 2\ndevices = 2\n'
    job += 'active = 1\n[model]\nname = "theirs:net"\n[run]\nrounds = 1\n'
    (folder / "job.toml").write_text(job)
    load_job(folder / "job.toml").run(folder / "out")
    data = fb.load_dataset("digits")
    np.savez(folder / "me.npz", inputs=data.train.inputs[:9], targets=data.train.targets[:9])
    commands: dict[str, tuple[object, ...]] = {
        "replay": (),
        "export": ("--global", "--format", "safetensors"),
        "personalise": ("--data", folder / "me.npz", "--steps", "1"),
    }
    for name, words in commands.items():
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        assert command(name, folder / "out", *words, monkeypatch=monkeypatch) != 0
        assert "theirs" not in sys.modules
        assert "--trust" in capsys.readouterr().err
        assert command(name, folder / "out", *words, "--trust", monkeypatch=monkeypatch) == 0
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    assert command("run", "--resume", "--out", folder / "out", monkeypatch=monkeypatch) != 0
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("theirs:Gosip", "cannot be imported .*Gosip"),
        ("thiers:Gossip", "cannot be imported .*thiers"),
        ("theirs:NotFrozen", "must be a dataclass"),
        ("theirs:Triangular", "has no name; .* with name, sync, coordinator"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_runs(
    folder: Path, name: str, says: str
) -> None:
    job = JOB.replace("theirs:Gossip", name).replace("share = 0.25\n", "")
    (folder / "job.toml").write_text(job)
    with pytest.raises(ConfigError, match=says):
        load_job(folder / "job.toml").run(folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        ("Turns', says = 'one", "must return two things"),
        ("Turns', says = 'halves", "must return two things"),
        ("Turns', says = 'few", "positions of 3 devices; there are 64"),
        ("Turns', says = 'twice", "gives device 0 a sample twice"),
        ("Triangular", "let it extend fedbcd.data.partition.Partitioner"),
    ],
)
def test_a_deal_that_is_none_is_refused(folder: Path, partition: str, sentence: str) -> None:
    job = JOB.replace('"theirs:Turns"', f"'theirs:{partition}'")
    (folder / "job.toml").write_text(job)
    with pytest.raises((ConfigError, DataError), match=sentence):
        load_job(folder / "job.toml").run(folder / "out")


def test_code_is_tried_where_a_job_is_checked_before_the_first_of_several_is_trained(
    folder: Path,
) -> None:
    (folder / "job.toml").write_text(f"{JOB}[model]\nmetric = 'theirs:net'")
    job = load_job(folder / "job.toml")
    with pytest.raises(ConfigError, match=r"the metric fails .*net\(\) takes 0 positional"):
        job.check(job.make_federation(), folder / "out", resume=False)


def test_mixing_weights_of_a_later_round_are_looked_at(folder: Path) -> None:
    """A share beyond 1 is none in any round; one that grows is none from round 2 on."""
    sys.path.append(str(folder))
    from theirs import Gossip

    class Growing(Gossip):
        def weights(self, round_: int, servers: Any) -> Any:
            return Gossip(0.6 * round_).weights(round_, servers)

    with pytest.raises(ConfigError, match="mixing matrix"):
        fb.train(federation(), fb.FedBCD(), cloud=Growing(), active=2, rounds=1)


def test_a_set_that_only_projects_is_asked_for_the_nearest_point(folder: Path) -> None:
    """Servers check that uploads lie in X."""
    sys.path.append(str(folder))
    from theirs import Halfspace

    inside, outside = torch.full((4,), 0.1), torch.full((4,), 0.5)
    assert is_within(Halfspace(1.0), inside, 1e-6)
    assert not is_within(Halfspace(1.0), outside, 1e-6)
    assert is_within(Halfspace(1.0), Halfspace(1.0).project(outside), 1e-6)


@dataclass(frozen=True)
class Rowwise:
    """A ball whose author has read that rows come, and computes in place."""

    radius: float = 0.5

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_((self.radius / x.norm(dim=1, keepdim=True)).clamp(max=1.0))


def test_a_set_is_given_rows_wherever_it_is_asked() -> None:
    vector = torch.ones(4)
    assert torch.equal(projected(Rowwise(), vector), torch.full((4,), 0.25))
    assert torch.equal(vector, torch.ones(4))
    assert not is_within(Rowwise(), vector, 1e-6)
    spec = fb.RunSpec(fb.FedBCD(projection=Rowwise(), batch=8), active=2)
    start = Blueprint.of(spec, federation()).start
    assert float(start.norm()) == pytest.approx(0.5)
    job = parse(job_table())[0].changed(algorithm=spec.algorithm, active=2)
    assert check_job(job, federation=federation(), devices=1, rounds=20).findings


@dataclass(frozen=True)
class Slack(fb.Box):
    """Not the box that it extends: half of it."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(self.low / 2, self.high / 2)


@dataclass(frozen=True)
class Coin:
    """One of two times, so that events fall together."""

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return 1.0 + (np.asarray(u) < 0.5)


def test_a_set_made_of_one_of_ours_is_another_set() -> None:
    """Compiled code, certificates and reports know more of a box than its nearest points."""
    x, own = torch.tensor([[1.0, -4.0]]), Slack(-2, 2)
    assert project_(own, x).tolist() == [[1.0, -1.0]]
    assert bounds_of(own) is on_bound(own, x) is diameter(own, 2) is None
    assert bounds_of(fb.Box(-2, 2)) == (-2.0, 2.0)
    made = [
        fb.train(
            federation(),
            fb.FedBCD(projection=own, device_step=0.05, batch=8),
            rounds=2,
            max_batch=one_by_one,
        )
        for one_by_one in (None, 1)
    ]
    assert largest_difference(*made) < 1e-6


def test_a_law_that_may_repeat_is_not_drawn_ahead() -> None:
    with pytest.raises(ConfigError, match="repeat"):
        fb.train(
            federation(), fb.FedBCD(batch=2), clock=fb.Clock(step=Coin()), rounds=1, ahead=True
        )
