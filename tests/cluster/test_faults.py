"""Actors, nodes and drivers that die: the run ends with the digest of the undisturbed one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.cluster.engine import ShardActors
from fedbcd.errors import RecordError
from support.clusters import QUIET, TWO
from support.runs import federation, log_lines, train

pytestmark = QUIET


class Killer:
    """Kills the actor of a shard right after it has been asked to work for the n-th time, or has
    the node of it removed.

    With `times` also the actors that come in its place, as soon as they are asked. It is no use to
    kill one twice, and how often one that is dead is still asked depends on when that is noticed.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        at: int,
        times: int = 1,
        shard: int = 1,
        cluster: Any = None,
    ) -> None:
        self.at, self.times, self.shard, self.asked, self.cluster = at, times, shard, 0, cluster
        self.dead: list[Any] = []
        call = ShardActors._call

        def deadly(
            shards: ShardActors, number: int, method: str, arguments: tuple[Any, ...]
        ) -> Any:
            ref = call(shards, number, method, arguments)
            if method == "work" and number == self.shard:
                self.asked += 1
                actor = shards.shards[number].actor
                if self.asked >= self.at and len(self.dead) < self.times and actor not in self.dead:
                    self.dead.append(actor)
                    self._strike(shards, number)
            return ref

        monkeypatch.setattr(ShardActors, "_call", deadly)

    def _strike(self, shards: ShardActors, number: int) -> None:
        if self.cluster is None:
            shards.ray.kill(shards.shards[number].actor)
        else:
            self.cluster.remove_node(self.cluster.second)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("fedbcd-sync", {"checkpoint_every": 4}),
        ("fedbcd-sync", {"checkpoint_every": 100}),
        ("fedbcd-i-async", {"checkpoint_every": 3}),
        ("fedavg-sync", {"checkpoint_every": 3}),
        ("fedbcd-sync", {"checkpoint_every": 4, "joins": {15: 2}, "leaves": {12: 5}}),
    ],
)
def test_an_actor_that_dies_in_the_middle_of_a_round_changes_nothing(
    case: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(case, rounds=8, engine=TWO, out=tmp_path / "whole", **more)
    killer = Killer(monkeypatch, at=6)
    hit = train(case, rounds=8, engine=TWO, out=tmp_path / "hit", **more)
    assert killer.asked > 6
    assert hit.digest == whole.digest
    assert hit.summary["cluster"]["rebuilt"] == 1
    assert log_lines(tmp_path / "hit") == log_lines(tmp_path / "whole")


@pytest.mark.usefixtures("two_nodes")
def test_an_actor_that_dies_again_while_it_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("fedbcd-async", rounds=6, engine=TWO)
    Killer(monkeypatch, at=3, times=3)
    hit = train("fedbcd-async", rounds=6, engine=TWO, out=tmp_path / "hit")
    assert hit.digest == whole.digest
    assert hit.summary["cluster"]["rebuilt"] == 3


@pytest.mark.usefixtures("two_nodes")
def test_without_a_folder_there_is_nothing_to_bring_an_actor_back_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Killer(monkeypatch, at=3)
    with pytest.raises(RecordError, match="give `out` a folder"):
        train("fedbcd-sync", rounds=6, engine=TWO)


class Crash(Exception):
    """The driver dies."""


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(("first", "second"), [(TWO, TWO), ("simulate", TWO), (TWO, "simulate")])
def test_a_driver_that_dies_is_resumed_on_either_engine(
    first: Any, second: Any, tmp_path: Path
) -> None:
    def crash(progress: fb.Progress) -> None:
        if progress.round == 6:
            raise Crash

    settings: dict[str, Any] = {"rounds": 9, "checkpoint_every": 4, "dtype": torch.float64}
    whole = train("fedbcd-async", **settings, engine=second)
    with pytest.raises(Crash):
        train("fedbcd-async", **settings, engine=first, out=tmp_path / "run", on_round=crash)
    again = train("fedbcd-async", **settings, engine=second, out=tmp_path / "run", resume=True)
    if first == second:
        assert again.digest == whole.digest
    assert float((again.personal_NF - whole.personal_NF).abs().max()) < 1e-11


@pytest.mark.usefixtures("two_nodes")
def test_a_polite_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    stops = iter([False, False, True])
    first = train(
        "fedbcd-sync", rounds=6, engine=TWO, out=tmp_path / "run", should_stop=lambda: next(stops)
    )
    assert (first.finished, first.summary["rounds"]) == (False, 3)
    again = train("fedbcd-sync", rounds=6, engine=TWO, out=tmp_path / "run", resume=True)
    assert again.digest == train("fedbcd-sync", rounds=6, engine=TWO).digest


def test_a_log_of_a_cluster_replays_within_rounding(tmp_path: Path, two_nodes: Any) -> None:
    """The log is the schedule; only the order of sums differs, so the digests may."""
    assert two_nodes is not None
    run = train(
        "fedbcd-i-sync",
        rounds=4,
        engine=TWO,
        out=tmp_path / "run",
        max_batch=1,
        dtype=torch.float64,
    )
    found = fb.replay(tmp_path / "run" / "events.jsonl", federation())
    assert found["complete"]
    assert (found["rounds"], found["clock"]) == (run.summary["rounds"], run.summary["clock"])


def test_zz_a_node_that_dies_changes_nothing(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last in this folder: the second node does not come back. Its actors do, on the first."""
    whole = train("fedbcd-sync", rounds=6, engine=TWO)
    ray = pytest.importorskip("ray")
    second = two_nodes.second.node_id
    on_second = [
        k
        for k, shard in enumerate(whole.summary["cluster"]["shards"])
        if second.startswith(shard["node"])
    ]
    assert on_second, "actors are spread over the nodes"
    Killer(monkeypatch, at=3, shard=on_second[0], cluster=two_nodes)
    hit = train("fedbcd-sync", rounds=6, engine=TWO, out=tmp_path / "hit", checkpoint_every=2)
    assert hit.digest == whole.digest
    assert hit.summary["cluster"]["rebuilt"] >= 1
    assert sum(node["Alive"] for node in ray.nodes()) == 1
