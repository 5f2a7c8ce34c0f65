"""The cluster engine gives the simulation's run: same schedule and draws, numbers within rounding,
on two nodes.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbcd as fb
from fedbcd.compute.rows import Rows
from fedbcd.engines.cluster import engine, options
from fedbcd.engines.cluster.actors import part_of
from fedbcd.engines.cluster.options import expected_work, shards_of
from fedbcd.errors import ConfigError, NumericalError
from fedbcd.spec import RunSpec
from support.clusters import QUIET, TWO
from support.naive import CASES as OWN_CASES, lines, own
from support.runs import (
    BCD,
    CASES,
    LOGISTIC,
    SERVERS,
    fedbcd,
    federation,
    largest_difference,
    log_lines,
    train,
    write_job,
)

pytestmark = QUIET
BOUND = 1e-11  # float64: sums over devices are added in another order


def both(case: str, **more: Any) -> tuple[fb.Run, fb.Run]:
    settings = {"rounds": 8, "looks": 2, "dtype": torch.float64, **more}
    return train(case, **settings), train(case, **settings, engine=TWO)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_on_every_cloud_as_in_the_simulation(case: str) -> None:
    here, there = both(case)
    assert largest_difference(here, there) < BOUND
    assert there.summary["clock"] == here.summary["clock"]
    for a, b in zip(here.history, there.history, strict=True):
        assert (a.round, a.clock, a.activations, a.global_accuracy) == (
            b.round,
            b.clock,
            b.activations,
            b.global_accuracy,
        )
        assert a.distance == pytest.approx(b.distance, rel=1e-9)
        for name in ("gap", "pull"):
            assert getattr(a, name) == pytest.approx(
                getattr(b, name), rel=1e-6, abs=1e-9, nan_ok=True
            )
    assert there.personal_scores == here.personal_scores


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("case", OWN_CASES)
def test_methods_of_other_people(case: str, tmp_path: Path) -> None:
    """Bundles, several sums, the age of an upload; their modules are not where actors look."""

    def trained(rounds: int = 6, **more: Any) -> fb.Run:
        return fb.train(lines(), own(case), rounds=rounds, dtype=torch.float64, **more)

    here = trained()
    trained(3, engine=TWO, out=tmp_path)
    there = trained(engine=TWO, out=tmp_path, resume=True)
    assert largest_difference(here, there) < BOUND


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-i-rigorous"])
def test_devices_that_join_and_leave(case: str) -> None:
    assert largest_difference(*both(case, joins={3: 4, 9: 2}, leaves={7: 3, 0: 5})) < BOUND


@pytest.mark.usefixtures("two_nodes")
def test_with_integers_every_bit_is_that_of_the_simulation_on_one_actor_and_on_two() -> None:
    settings: dict[str, Any] = {"rounds": 3, "looks": 1, "certify_every": 0, "max_batch": 1}
    settings |= {"uploads": [fb.Clip(0.2), fb.Integers()], "joins": {3: 2}, "leaves": {7: 1}}
    here = train("fedbcd-async", **settings)
    for actors in (1, 2):
        there = train("fedbcd-async", **settings, engine=fb.Cluster(actors=actors, cpus=0.25))
        assert there.digest == here.digest


@pytest.mark.usefixtures("two_nodes")
def test_exact_gradients_and_one_device_at_a_time() -> None:
    for algorithm, more in ((replace(BCD, batch="all"), {}), (BCD, {"max_batch": 1})):
        settings: dict[str, Any] = {"rounds": 5, "active": 2, "dtype": torch.float64, **more}
        here = fb.train(federation(), algorithm, **settings)
        assert (
            largest_difference(here, fb.train(federation(), algorithm, **settings, engine=TWO))
            < BOUND
        )


@pytest.mark.usefixtures("two_nodes")
def test_personal_models_in_files_of_the_actors(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def look(p: fb.Progress) -> None:
        seen.append(torch.cat([w.flatten() for w in p.personal_model(5).parameters()]))

    memory = train("fedbcd-async", engine=TWO, best="worst_decile", on_round=look)
    files = train("fedbcd-async", engine=TWO, best="worst_decile", state=tmp_path)
    assert files.digest == memory.digest
    assert torch.equal(seen[-1], memory.personal_NF[5].detach())
    assert files.best is not None
    assert memory.best is not None
    assert torch.equal(torch.as_tensor(files.best.personal_NF), memory.best.personal_NF[:])
    assert isinstance(files.personal_NF, Rows)
    assert torch.equal(torch.cat(list(files.personal_NF.blocks())), memory.personal_NF)


def moved_in(rounds: int, cloud: fb.Cloud, copies: int = 1) -> dict[str, int]:
    """Bytes in a run of logistic regressions (650 parameters), with so many times the devices."""
    few = federation(LOGISTIC)
    data = [
        (few.pool.inputs[few.owned(i)].float() / 16, few.pool.targets[few.owned(i)])
        for i in range(few.devices)
    ] * copies
    many = fb.Federation(LOGISTIC, torch.nn.functional.cross_entropy, data, SERVERS)
    run = fb.train(
        many,
        BCD,
        cloud=cloud,
        rounds=rounds,
        active=2,
        engine=TWO,
        evaluate_every=rounds,
        certify_every=0,
    )
    found: dict[str, int] = run.summary["cluster"]["bytes"]
    return found


@pytest.mark.usefixtures("two_nodes")
def test_what_the_driver_moves_in_a_round_does_not_depend_on_the_number_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, size, actors = 6, 650, 2
    few, many = moved_in(rounds, fb.SyncCloud()), moved_in(rounds, fb.SyncCloud(), copies=5)
    for found in (few, many):
        assert found["sums"] == rounds * actors * size * 8, "Sync-cloud: one sum per actor"
        assert found["models"] == rounds * actors * size * 4, (
            "Sync-cloud: one z a round, small enough to go with the call"
        )
        # a session is six numbers, an upload three
        assert found["work"] <= rounds * SERVERS * 2 * (6 + 3) * 8, "of each active device"
    assert few["work"] == many["work"]
    monkeypatch.setattr(engine, "LARGEST_ARGUMENT_BYTES", 0)
    large = moved_in(rounds, fb.SyncCloud())
    assert large["models"] == rounds * size * 4, "once into the object store"
    mixed = moved_in(rounds, fb.AsyncCloud(first=2))
    assert 0 < mixed["sums"] <= (rounds + 1) * (SERVERS + actors - 1) * size * 8
    assert mixed["models"] <= (SERVERS + rounds * 2) * size * 4, "each z_n once"


@pytest.mark.usefixtures("two_nodes")
def test_actors_are_on_both_nodes_and_the_report_shows_who_did_how_much() -> None:
    report = train("fedbcd-sync", engine=TWO).summary["cluster"]
    assert report["actors"] == 2
    assert [shard["devices"] for shard in report["shards"]] == [8, 8]
    assert len({shard["node"] for shard in report["shards"]}) == 2
    assert all(
        shard["expected_share"] == 0.5 and shard["seconds"] > 0 for shard in report["shards"]
    )


@pytest.mark.usefixtures("two_nodes")
def test_numbers_that_are_not_finite_are_named_as_in_the_simulation() -> None:
    algorithm = fb.FedBCD(device_step=1e30, projection=fb.NoProjection())
    with pytest.raises(NumericalError, match=r"use a smaller device_step \(now 1e\+30\)"):
        fb.train(federation(), algorithm, rounds=10, active=2, engine=TWO, on_notice=lambda _: None)


@pytest.mark.usefixtures("two_nodes")
def test_log_and_progress_on_the_command_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml")
    here = fedbcd("run", job, "--out", tmp_path / "here", "--json")
    there = fedbcd(
        "run", job, "--out", tmp_path / "there", "--engine", "cluster", "--actors", "1", "--json"
    )
    assert (here.code, there.code) == (0, 0), there.err
    assert log_lines(tmp_path / "here") == log_lines(tmp_path / "there")
    assert there.summary["cluster"]["actors"] == 1
    assert math.isclose(
        here.summary["global_accuracy"], there.summary["global_accuracy"], abs_tol=0.02
    )


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    "wrong", [{"gpus": 2.0}, {"gpus": 0.5, "actors": 3}, {"actors": 9}, {"cpus": 64.0}]
)
def test_actors_that_would_wait_for_ever_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"the cluster has [14] [CG]PU, but \d actors? asks? for [\d.]+ each"
    ):
        train("fedbcd-sync", engine=fb.Cluster(**wrong))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("two_nodes")
def test_an_actor_uses_the_gpu_that_ray_gives_it_and_says_so_where_there_is_none() -> None:
    """The second node says that it has a GPU. So the actor is placed there, and asks torch for
    it.
    """
    with pytest.raises(ConfigError, match="device='cuda' cannot be used here"):
        train("fedbcd-sync", engine=fb.Cluster(actors=1, cpus=0.25, gpus=1.0))


# ------------------------------------------------------------------------------------------------
# without a cluster
def test_shards_have_equal_work_and_few_servers_each() -> None:
    fed, spec = federation(), RunSpec(replace(BCD, batch="all"), active=2)
    for actors in (1, 2, 3, 5):
        shards = shards_of(fed, spec, actors)
        assert sorted(device for shard in shards for device in shard) == list(range(16))
        work = expected_work(fed, spec)
        shares = [work[shard].sum() / work.sum() for shard in shards]
        assert max(shares) < 1 / actors + 1 / 16
        homes = [
            {n for n, members in enumerate(fed.servers) if set(members) & set(shard)}
            for shard in shards
        ]
        assert sum(map(len, homes)) <= SERVERS + actors - 1
    assert len(shards_of(fed, spec, 99)) == 16, "no actor without devices"


def test_a_shard_has_its_own_data_and_no_other() -> None:
    fed = federation()
    part = part_of(fed, [3, 12])
    assert len(part.pool) <= 60
    for device in (3, 12):
        assert torch.equal(part.pool.inputs[part.owned(device)], fed.pool.inputs[fed.owned(device)])


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(options.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'fedbcd\[cluster\]'"):
        train("fedbcd-sync", engine="cluster")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"engine": "spark"}, "engine='spark' is unknown"),
        (
            {"engine": "cluster", "torch_device": "meta"},
            "cannot be used here|the driver needs none",
        ),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train("fedbcd-sync", **wrong)
    for bad in ({"actors": 0}, {"cpus": -1.0}, {"cpus": 0.0}):
        with pytest.raises(ConfigError, match="must be"):
            fb.Cluster(**bad)


def test_an_address_belongs_to_a_cluster(tmp_path: Path) -> None:
    answer = fedbcd(
        "run", write_job(tmp_path / "job.toml"), "--out", tmp_path / "out", "--address", "auto"
    )
    assert answer.code == 2
    assert "add --engine cluster" in answer.err
