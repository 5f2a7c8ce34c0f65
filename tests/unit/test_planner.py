"""The planner's parts: server times from a model and from a log, timelines against machines, plans,
pilots, and one round explained.
"""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedbcd as fb
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import parse
from fedbcd.planner import pilots, server_time
from fedbcd.planner.explain import explain
from fedbcd.planner.order_statistics import Empirical, expected
from fedbcd.planner.pilots import (
    Pilot,
    Recommendation,
    candidates,
    pilot_spec,
    planned_cloud,
    run_pilots,
)
from fedbcd.planner.plan import every_first, make_plan
from fedbcd.planner.record import read_record
from fedbcd.planner.round_time import async_rounds, rigorous_rounds
from fedbcd.planner.server_time import (
    DeviceModel,
    KnownTime,
    Observed,
    device_model,
    fits,
    with_losses,
)
from fedbcd.planner.slowest import lonely, slowest
from fedbcd.record.eventlog import LogWriter
from fedbcd.record.timeline import read_timeline
from fedbcd.report.advice import advice
from fedbcd.report.view import read_run, run_view
from fedbcd.schedule.delays import Delay
from support.planner import CLOCK, DELAYS, recorded, recorded_times, simulation
from support.runs import BCD, federation, job_table, train


def test_staleness_is_the_rounds_since_the_last_mix_of_those_left_out() -> None:
    """Two of three servers, all equally fast: the one left out is always one round old. Ties go to
    the one longest left out.
    """
    constant = np.full((4, 400), 2.0)
    pair = async_rounds(constant, 3, 2)
    assert (pair.staleness, pair.staleness_high) == (1.0, 1.0)
    one = async_rounds(constant, 4, 1)
    assert one.staleness == pytest.approx(2.0)  # 1, 2 and 3 rounds old
    assert one.mean == pytest.approx(0.5, rel=0.05)
    assert async_rounds(constant, 4, 4).mean == 2.0


def test_exactly_b_of_servers_that_end_together_are_in_a_rigorous_mix() -> None:
    """All end at once: of four the two that were left out come next, and are then one round old; of
    three, one at a time, 1 or 2.
    """
    constant = np.full((4, 400), 2.0)
    pair = rigorous_rounds(constant, 4, 2)
    assert (pair.mean, pair.staleness, pair.staleness_high) == (2.0, 1.0, 1.0)
    assert rigorous_rounds(constant, 3, 1).staleness == pytest.approx(1.5, abs=0.02)


# ------------------------------------------------------------------------------------------------
# server times
@pytest.mark.parametrize(("members", "active"), [(1, 1), (10, 3), (10, 10), (1000, 2)])
def test_the_device_model_has_the_law_of_the_definition(members: int, active: int) -> None:
    """tau_n = max over the q earliest of arrival + K * step, drawn here with all members."""
    rng = np.random.default_rng(2)
    arrival = np.sort(rng.exponential(2, (3000, members)), axis=1)[:, :active]
    literal = (
        arrival + rng.integers(1, 6, (3000, active)) * rng.exponential(1, (3000, active))
    ).max(axis=1)
    drawn = DeviceModel(CLOCK, members, active).sample(4, 2000, seed=9)
    assert drawn.shape == (4, 2000)
    assert stats.ks_2samp(literal, drawn.ravel()).pvalue > 0.01


def test_times_are_addressed_draws() -> None:
    source = DeviceModel(CLOCK, 10, 3)
    assert np.array_equal(source.sample(2, 50, 1), source.sample(2, 50, 1))
    assert not np.array_equal(source.sample(2, 50, 1), source.sample(2, 50, 2))


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
def test_draws_do_not_depend_on_how_many_are_made_at_once(
    delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DeviceModel(fb.Clock(delay, delay), 10, 3)
    whole = source.sample(3, 50, 1)
    for chunk in (1, 20, 100):
        monkeypatch.setattr(server_time, "DEVICES_AT_ONCE", chunk)
        assert np.array_equal(source.sample(3, 50, 1), whole)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of sixty Async rounds, ten servers of ten devices; no models."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    writer = LogWriter(path, {})
    played = simulation(10, fb.AsyncCloud(3), log=writer)
    for _ in range(60):
        played.play_round()
    writer.close()
    return path


def test_a_log_gives_the_server_times_that_were_drawn(log: Path) -> None:
    record = read_record(log)
    assert record.servers == 10
    assert [mix.round for mix in record.mixes] == list(range(60))
    times = recorded_times(record)
    assert len(times) == sum(phase.ended is not None for phase in record.phases) >= 60 * 3
    for phase in record.phases:
        if phase.ended is not None:
            assert len(phase.complete) == 3
            assert phase.ended == max(visit.uploaded or 0 for visit in phase.complete)
    drawn = DeviceModel(CLOCK, 10, 3).sample(1, 4000, seed=0)[0]
    assert stats.ks_2samp(times, drawn).pvalue > 0.01


def test_a_smaller_q_can_be_read_off_a_log(log: Path) -> None:
    record = read_record(log)
    assert recorded_times(record, 3) == pytest.approx(recorded_times(record))
    drawn = DeviceModel(CLOCK, 10, 1).sample(1, 4000, seed=0)[0]
    assert stats.ks_2samp(recorded_times(record, 1), drawn).pvalue > 0.01
    with pytest.raises(
        ConfigError,
        match=(
            r"q=4 cannot be read off .* whose phases saw 3 arrivals; use q <= 3, or a delay model"
        ),
    ):
        recorded_times(record, 4)


@pytest.mark.parametrize("name", ["exponential", "weibull", "gamma", "lognormal"])
def test_the_nearest_fit_is_the_distribution_that_was_drawn_from(name: str) -> None:
    kinds = {
        "weibull": stats.weibull_min(3.0, scale=2),
        "gamma": stats.gamma(3, scale=2),
        "lognormal": stats.lognorm(0.8, scale=3),
    }
    drawn = kinds.get(name, stats.expon(scale=2)).ppf(np.random.default_rng(4).random(4000))
    found = fits(Observed(drawn, np.ones(4000, dtype=bool)))
    assert {fit.name for fit in found} == {"exponential", "weibull", "gamma", "lognormal"}
    assert [fit.distance for fit in found] == sorted(fit.distance for fit in found)
    nearest = {fit.name: fit.distance for fit in found}
    assert nearest[name] < 0.02
    if name != "exponential":  # which is a Weibull and a gamma distribution too
        assert found[0].name == name


def test_kaplan_meier_by_hand() -> None:
    """Ends at 1, 3 and 4 with 5, 3 and 1 phases that lasted so long, 2+ and 3+ under way: S = 4/5,
    4/5 2/3, 0.
    """
    sample = Observed(
        np.array([3.0, 1.0, 2.0, 4.0, 3.0]), np.array([True, True, False, True, False])
    ).distribution()
    assert sample.values.tolist() == [1.0, 3.0, 4.0]
    assert np.diff(sample.share) == pytest.approx([1 / 5, 4 / 15, 8 / 15])
    last = Observed(np.array([1.0, 5.0]), np.array([True, False])).distribution()
    assert last.mean() == 3.0  # the longest is under way: taken to end there


def test_fits_count_phases_under_way() -> None:
    drawn = np.random.default_rng(4).weibull(1.5, 4000) * 2
    found = {fit.name: fit for fit in fits(Observed(np.minimum(drawn, 2.5), drawn < 2.5))}
    assert found["weibull"].parameters == pytest.approx({"shape": 1.5, "scale": 2.0}, rel=0.05)
    assert min(fit.distance for fit in found.values()) == found["weibull"].distance


# ------------------------------------------------------------------------------------------------
# plans
def test_a_plan_has_a_row_for_every_b_and_q() -> None:
    plan = make_plan({q: DeviceModel(CLOCK, 10, q) for q in (1, 3)}, 6, clock_seconds=2.0)
    assert [(row.active, row.first) for row in plan.rows] == [
        (q, b) for q in (1, 3) for b in range(1, 7)
    ]
    for row in plan.rows:
        assert row.beta == row.first / 6
        assert row.rounds_per_hour == pytest.approx(1800 / row.round_time)
        assert row.updates_per_hour == pytest.approx(row.first * row.rounds_per_hour)
        assert 0 < row.error < 0.02 * row.round_time
        assert row.reduction <= 1
    assert plan.rows[5].ratio == plan.rows[5].reduction == 1.0


def test_a_known_distribution_is_shown_with_its_exact_order_statistics() -> None:
    plan = make_plan({1: KnownTime(stats.expon(scale=2))}, 4)
    assert [row.order_statistic for row in plan.rows] == pytest.approx(
        [2 * sum(1 / j for j in range(5 - k, 5)) for k in range(1, 5)]
    )


def test_times_without_a_variance_have_no_error_bar_and_all_servers_are_exact() -> None:
    plan = make_plan({1: KnownTime(stats.pareto(1.5))}, 4)
    assert [row.error for row in plan.rows] == [None, None, None, 0.0]
    assert all(row.spread is None for row in plan.rows)
    assert not plan.has_bars
    assert plan.rows[-1].round_time == pytest.approx(expected(stats.pareto(1.5), 4, 4))
    assert plan.server_time == pytest.approx(3.0)
    assert make_plan({1: KnownTime(stats.pareto(2.5))}, 4).has_bars


def test_of_many_servers_fifty_b_are_planned() -> None:
    assert every_first(100) == list(range(1, 101))
    many = every_first(1000)
    assert (len(many), many[0], many[-1]) == (50, 1, 1000)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: make_plan({1: KnownTime(stats.expon())}, 4, firsts=[5]),
            "B=5 of 4 servers cannot be waited for; use 1 <= B <= 4",
        ),
        (lambda: make_plan({1: KnownTime(stats.expon())}, 0), "servers=0 must be 1 or more"),
        (
            lambda: make_plan({1: KnownTime(stats.expon())}, 4, cloud="sync"),
            "waits for all servers, so there is no B to choose",
        ),
        (
            lambda: make_plan({1: KnownTime(stats.expon())}, 4, clock_seconds=0),
            "clock_seconds=0 must be a finite number above 0",
        ),
        (
            lambda: make_plan({1: KnownTime(stats.expon())}, 4, rounds=0),
            "rounds=0 must be 1 or more",
        ),
        (lambda: make_plan({1: KnownTime(Empirical([0.0]))}, 4), "every server time is 0"),
        (lambda: KnownTime(stats.cauchy()), "has no mean"),
        (lambda: KnownTime(stats.norm(5)), "server times cannot be negative"),
        (lambda: DeviceModel(CLOCK, 10, 11), "q=11 devices of 10 cannot take part"),
        (lambda: DeviceModel(CLOCK, 10, 3, (2, 1)), "must be 1 <= low <= high"),
    ],
)
def test_plans_that_cannot_be_are_named(call: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()  # type: ignore[operator]


def test_logs_that_hold_nothing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    LogWriter(path, {}).close()
    with pytest.raises(
        RecordError,
        match="has no arrivals: no device asked to take part; record at least one round",
    ):
        read_record(path)
    for times, words in (
        (np.ones(5), "without any spread"),
        (np.array([0.0, 1.0]), "cannot be fitted by a distribution above 0"),
    ):
        with pytest.raises(RecordError, match=words):
            fits(Observed(times, np.ones(times.size, dtype=bool)))


# ------------------------------------------------------------------------------------------------
# pilots
def test_pilots_try_each_b_and_recommend_the_best() -> None:
    job = parse(job_table(run={"until_clock": 160.0}, cloud={"name": "async", "first": 2}))[0]
    told: list[tuple[int, int]] = []
    found = run_pilots(
        job, [1, 2, 4], seeds=2, on_done=lambda pilot, stop: told.append((pilot.first, stop))
    )
    assert found.stops == (10.0, 20.0, 40.0)
    assert {first for first, stop in told if stop == 0} == {1, 2, 4}
    assert found.pilots[0].first == found.first
    assert len(found.pilots[0].scores) == 3
    for pilot in found.pilots:
        assert (pilot.stopped_at is None) == (len(pilot.scores) == 3)
        assert all(len(scores) == 2 for scores in pilot.scores)
    finalists = [pilot.score for pilot in found.pilots if pilot.stopped_at is None]
    assert finalists == sorted(finalists, reverse=True)
    assert f"wait for B = {found.first}: global accuracy" in found.sentence


def test_a_pilot_that_goes_on_is_where_a_run_at_once_would_be() -> None:
    job = parse(job_table(run={"until_clock": 160.0}, cloud={"name": "async", "first": 2}))[0]
    found = run_pilots(job, [2], seeds=1)
    whole = fb.train(
        job.make_federation(),
        job.spec.algorithm,
        cloud=fb.AsyncCloud(2),
        until_clock=40,
        active=2,
        seed=0,
    )
    assert found.pilots[0].scores[-1] == (whole.history.last.global_accuracy,)
    assert found.pilots[0].rounds == whole.history.last.round


def test_pilots_run_on_the_cloud_that_is_planned_for() -> None:
    job = parse(job_table(run={"until_clock": 80.0}))[0]
    ends = {}
    for cloud in (fb.AsyncCloud(2), fb.RigorousCloud(2)):
        found = run_pilots(job, [2], seeds=1, cloud=cloud.name)
        whole = fb.train(
            job.make_federation(), job.spec.algorithm, cloud=cloud, until_clock=20, active=2, seed=0
        )
        assert found.cloud == cloud.name
        ends[cloud.name] = (found.pilots[0].rounds, found.pilots[0].scores[-1])
        assert ends[cloud.name] == (whole.history.last.round, (whole.history.last.global_accuracy,))
    assert ends["async"] != ends["rigorous"]


def test_a_dynamic_graph_is_planned_for_as_it_is() -> None:
    """Its rounds take as long as those of the Async-cloud; pilots mix along its links."""
    ring = fb.DynamicGraph([(0, 1), (1, 2), (2, 3), (3, 0)], first=3, link_failure=0.1)
    job = parse(job_table(run={"until_clock": 40.0}))[0].changed(cloud=ring)
    source = {2: DeviceModel(fb.Clock(), 4, 2)}
    plans = [make_plan(source, 4, firsts=[2], cloud=name) for name in ("async", ring.name)]
    assert plans[0].rows == plans[1].rows
    assert planned_cloud(job) == ring.name
    found = run_pilots(job, [2], seeds=1)
    whole = fb.train(job.make_federation(), pilot_spec(job.spec, replace(ring, first=2), 10.0))
    assert found.pilots[0].scores[-1] == (whole.history.last.global_accuracy,)


def test_a_plan_says_how_many_servers_of_a_mix_have_a_link() -> None:
    """On a path of four servers whose links fail half of the time; counted in 3,000 mixes."""
    path = fb.DynamicGraph([[(0, 1), (1, 2), (2, 3)], [(0, 3), (3, 0)]], 2, link_failure=0.5)
    plan = make_plan({1: KnownTime(stats.expon())}, 4, cloud=path.name, links=path)
    for row in plan.rows:
        groups = [*combinations(range(4), row.first)]
        met = [
            sum(a > 0 for a in row_of) > 1
            for k in range(3000)
            for row_of in path.weights(k, groups[(k // 2) % len(groups)])
        ]
        assert row.linked == pytest.approx(np.mean(met), abs=4 * 0.5 / math.sqrt(3000))
    assert [plan.rows[k].linked for k in (0, 3)] == [0.0, pytest.approx((0.625 + 0.25) / 2)]


def test_a_mixing_matrix_is_not_planned_for_unless_another_cloud_is_named() -> None:
    mixing = [[0.25] * 4] * 4
    job = parse(job_table(cloud={"name": "graph", "mixing": mixing}, run={"until_clock": 40.0}))[0]
    with pytest.raises(
        ConfigError,
        match="mixes all servers along its matrix, so there is no B to choose; name the cloud",
    ):
        run_pilots(job, [2], seeds=1)
    assert planned_cloud(job, "rigorous") == "rigorous"
    with pytest.raises(
        ConfigError, match="cloud='ring' cannot be planned for; use 'async' or 'rigorous'"
    ):
        planned_cloud(job, "ring")


def test_the_clearly_worse_are_stopped_and_the_doubtful_go_on() -> None:
    from fedbcd.planner.pilots import _without_hopeless

    pilots = [
        Pilot(1, [(0.50, 0.54)]),
        Pilot(2, [(0.49, 0.53)]),
        Pilot(3, [(0.48, 0.53)]),
        Pilot(4, [(0.10, 0.14)]),
    ]
    assert [pilot.first for pilot in _without_hopeless(pilots, 9.0)] == [1, 2, 3]
    assert pilots[3].stopped_at == 9.0
    single = [Pilot(k, [(0.5 - 0.01 * k,)]) for k in range(4)]
    assert [pilot.first for pilot in _without_hopeless(single, 9.0)] == [
        0,
        1,
    ]  # one seed: plain halving


def test_pilots_are_compared_where_both_were() -> None:
    best = Pilot(3, [(0.30, 0.32), (0.40, 0.42), (0.60, 0.62)])
    stopped = Pilot(5, [(0.20, 0.22), (0.30, 0.32)], stopped_at=20.0)
    found = Recommendation(3, "global_accuracy", (10.0, 20.0, 40.0), (best, stopped), True, "async")
    told = "B = 5 had 0.310 at clock 20, where B = 3 had 0.410, and was stopped"
    assert found.sentence == f"wait for B = 3: global accuracy 0.610 at clock 40; {told}"
    other = Pilot(5, [(0.20, 0.22), (0.30, 0.32), (0.50, 0.52)])
    assert Recommendation(
        3, "global_accuracy", (10.0, 20.0, 40.0), (best, other), True, "async"
    ).sentence.endswith("B = 5 had 0.510 at clock 40")


def test_pilots_keep_the_storage_of_the_job_and_take_no_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[fb.RunSpec] = []

    def noted(federation: fb.Federation, spec: fb.RunSpec, **options: Any) -> fb.Run:
        asked.append(spec)
        return fb.train(federation, spec, **options)

    monkeypatch.setattr(pilots, "train", noted)
    run_pilots(parse(job_table(run={"until_clock": 40.0, "storage": "bfloat16"}))[0], [2], seeds=1)
    assert {(spec.storage, spec.certify_every) for spec in asked} == {(torch.bfloat16, 0)}


def test_pilots_try_few_b() -> None:
    assert candidates(10) == [1, 3, 5, 7, 10]
    assert candidates(2) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"firsts": [5]}, "B=5 of 4 servers cannot be waited for"),
        ({}, {"seeds": 0}, "seeds=0 must be 1 or more"),
        ({}, {"until_clock": 0}, "until_clock=0 must be a finite number above 0"),
    ],
)
def test_pilots_that_cannot_be_are_named(
    changes: dict[str, object], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_pilots(parse(job_table(**changes))[0], **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# explain
def test_a_round_is_explained_by_its_last_server_and_that_servers_last_device(log: Path) -> None:
    record = read_record(log)
    for round_ in (0, 7, 59):
        story = explain(log, round_)
        mix = record.mixes[round_]
        assert story.ended == mix.time == story.last.ready
        assert {part.server for part in story.mixed} == set(mix.servers)
        assert len(story.mixed) + len(story.left_out) == 10
        assert [part.waited for part in story.mixed] == pytest.approx(
            [mix.time - part.ready for part in story.mixed]
        )
        last = story.last
        assert last.opened + last.arrival + last.work == pytest.approx(mix.time)
        assert last.steps in range(1, 6)
        assert f"server {last.server}, number 3 of 3, was ready" in story.sentences[1]
    assert explain(log, 0).began == 0.0
    longest = explain(log)
    ends = [0.0, *(mix.time for mix in record.mixes)]
    assert longest.length == max(after - before for before, after in pairwise(ends))


@pytest.mark.parametrize(
    "case", ["fedbcd-sync", "fedbcd-rigorous", "fedbcd-graph", "fedbcd-i-async"]
)
def test_logs_of_every_cloud_can_be_read_and_explained(case: str, tmp_path: Path) -> None:
    run = train(case, rounds=5, out=tmp_path)
    record = read_record(tmp_path)
    assert record.mixes[-1].time == run.summary["clock"]
    story = explain(tmp_path, 4)
    assert story.ended == run.summary["clock"] == story.last.ready
    assert len(story.mixed) == (4 if case in ("fedbcd-sync", "fedbcd-graph") else 2)
    assert all(math.isfinite(time) and time > 0 for time in recorded_times(record))
    assert recorded(record).sample(2, 3, 0).shape == (2, 3)


def test_a_round_that_is_not_there_is_named(log: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"round 60 is not in .*events.jsonl, which has rounds 0 to 59"
    ):
        explain(log, 60)


SLOW = fb.Clock(classes=(fb.DeviceClass(servers=(2,), step=8.0),))


def test_a_log_tells_who_was_slow_and_why(tmp_path: Path) -> None:
    """`explain` of the longest round, and the sentence of a report."""
    train("fedbcd-sync", rounds=6, out=tmp_path / "run", clock=SLOW)
    timeline, _ = read_timeline(tmp_path / "run" / "events.jsonl")
    said = slowest(timeline)
    assert said.startswith("server 2 was the slowest: its phases took ")
    assert said.endswith("by its class (step x 8)")
    story = explain(tmp_path / "run")
    assert story.last.server == 2
    assert "It differs from others by its class (step x 8)" in story.sentences[1]
    assert said in advice(run_view(read_run(tmp_path / "run"), "a"))


def test_servers_without_a_link_in_a_mix_are_named(tmp_path: Path) -> None:
    """Of a star only the middle has links: who meets without it steps alone."""
    cloud = fb.DynamicGraph([(0, 1), (0, 2), (0, 3)], first=2)
    fb.train(federation(), BCD, cloud=cloud, rounds=12, out=tmp_path / "run", active=1)
    timeline, _ = read_timeline(tmp_path / "run" / "events.jsonl")
    apart = [k for k in range(12) if 0 not in timeline.mixes.members(k)]
    assert 0 < len(apart) < 12
    said = explain(tmp_path / "run", apart[0]).sentences[-1]
    assert said.startswith("without a link to the others of this mix")
    assert lonely(timeline).startswith(f"{len(apart) / 12:.0%} of the servers that were mixed")


def test_servers_that_differ_are_planned_and_the_slowest_named() -> None:
    table = {"run": {"rounds": 4}, "cloud": {"name": "async", "first": 2}}
    job = parse(job_table(**table))[0].changed(clock=SLOW)
    source = device_model(job)
    plan = make_plan({2: source}, 4, firsts=[2, 4])
    assert int(np.argmax(plan.by_server)) == 2
    assert plan.slowest.startswith("server 2 is the slowest: E[tau_n] = ")
    assert plan.slowest.endswith("by its class (step x 8)")
    assert plan.rows[0].round_time < plan.rows[1].round_time / 3
    with pytest.raises(ConfigError, match="the 4 servers of the job differ"):
        make_plan({2: source}, 5)
    with pytest.raises(ConfigError, match="q=5 devices of the 4 of server 0 cannot take"):
        device_model(job, 5)


def test_the_place_of_a_lost_device_goes_to_the_next() -> None:
    """Two places, five devices: the first is lost after half its work, at 1 + 2, and the third
    takes its place; the second has its own.
    """
    arrival, work = np.array([1.0, 2.0, 2.5, 8.0, 9.0]), np.array([4.0, 3.0, 5.0, 1.0, 1.0])
    lost = np.array([0.5, 2.0, 2.0, 2.0, 0.1])
    two, one = np.zeros(2, dtype=bool), np.array([False, True])
    assert with_losses(arrival, work, lost, two) == 3.0 + 5.0
    assert with_losses(arrival, work, np.full(5, 2.0), two) == 5.0
    assert with_losses(arrival, work, lost, one) == 3.0 + 3.0
