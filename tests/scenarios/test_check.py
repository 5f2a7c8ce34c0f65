"""`fedbcd check`: verdicts, numbers, remedies, exit codes; and bad input named in a sentence."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.smoothness import RANDOM, bias, estimate
from fedbcd.engines.participation import planned_participation, recorded_participation
from fedbcd.errors import RecordError
from fedbcd.experiments.check import check_job
from fedbcd.experiments.job import parse
from fedbcd.models import logistic
from fedbcd.spec import RunSpec
from fedbcd.theory import assumptions
from fedbcd.theory.assumptions import Verdict
from fedbcd.theory.curvature import softmax_smoothness
from support.methods import method_of
from support.runs import CASES, fedbcd, federation, job_table, train, write_job

SOUND: dict[str, Any] = {
    "algorithm.device_step": 0.01,
    "algorithm.steps": [1, 1],
    "algorithm.momentum": 0.5,
    "algorithm.projection": {"name": "box", "low": -2, "high": 2},
    "run.rounds": 40,
}


def verdicts(**changes: Any) -> dict[str, Any]:
    report = check_job(parse(job_table(**{**SOUND, **changes}))[0], devices=2)
    return {finding.assumption: finding for finding in report.findings}


def test_logistic_regression_with_small_steps_is_covered(tmp_path: Path) -> None:
    """Its L_i is known for all weights, so nothing is left to estimates."""
    path = write_job(tmp_path / "job.toml", **SOUND)
    answer = fedbcd("check", path, "--json")
    assert answer.code == 0
    assert answer.summary["fails"] == 0
    found = {f["assumption"]: f for f in answer.summary["jobs"][0]["findings"]}
    assert {f["verdict"] for f in found.values()} == {"holds"}
    assert list(found) == [
        "-",
        "1(i)",
        "1(ii)",
        "2(i)",
        "2(ii)",
        "3(i)",
        "3(ii)",
        "4(i)",
        "4(ii)",
        "4(iii)",
        "5",
    ]
    text = " ".join(fedbcd("check", path).out.split())
    assert "Theorem 1 for T = 40: means over the rounds, at most" in text
    assert "with |V| = 1, |Q| = 16, p = " in text
    assert (
        "everything holds: Theorem 1 covers this job. Delays are random: p and q were seen on this"
        " schedule only" in text
    )


def test_what_lies_beyond_the_planned_rounds_is_not_known() -> None:
    job = parse(
        job_table(**{**SOUND, "run.rounds": 60, "cloud": {"name": "rigorous", "first": 3}})
    )[0]
    cut, whole = (
        {f.assumption: f for f in check_job(job, devices=1, rounds=most).findings}
        for most in (50, 60)
    )
    for name in ("1(i)", "1(ii)"):
        assert cut[name].verdict is Verdict.UNKNOWN
        assert "over 50 rounds (planned)" in cut[name].found
        assert "the run has 60" in cut[name].found
        assert whole[name].verdict is Verdict.HOLDS
    assert "for T = 60" in cut["4(ii)"].found
    timed = parse(job_table(**{**SOUND, "run.rounds": None, "run.until_clock": 1e4}))[0]
    found = {f.assumption: f for f in check_job(timed, devices=1, rounds=50).findings}
    assert "the run at 10000 of the clock" in found["1(i)"].found
    assert "T is not known" in found["4(ii)"].found


def test_graphs_that_come_round_again_are_known_to_the_end_and_fixed_delays_are_not_random() -> (
    None
):
    ring = [[0.5, 0.25, 0, 0.25], [0.25, 0.5, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]]
    constant = {"name": "constant", "value": 1.0}
    table = job_table(
        **{
            **SOUND,
            "cloud": {"name": "graph", "mixing": ring},
            "clock": {"arrival": constant, "step": constant},
        }
    )
    report = check_job(parse(table)[0], devices=1, rounds=30)
    found = {f.assumption: f for f in report.findings}
    assert found["1(ii)"].verdict is Verdict.HOLDS
    assert found["1(i)"].verdict is Verdict.UNKNOWN
    assert not report.random
    assert "Delays are random" not in report.sentence


def test_too_large_a_step_fails_with_the_one_that_would_pass() -> None:
    finding = verdicts(**{"algorithm.device_step": 5.0})["4(i)"]
    assert finding.verdict is Verdict.FAILS
    nearest = float(finding.remedy.removeprefix("device_step <= "))
    assert verdicts(**{"algorithm.device_step": nearest})["4(i)"].verdict is not Verdict.FAILS


def test_a_relu_network_is_not_smooth_and_its_numbers_say_where(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", **SOUND, **{"model.name": "mlp", "model.hidden": [8]})
    answer = fedbcd("check", path, "--devices", "2")
    assert answer.code == 1
    assert "kinks" in answer.out
    assert "random point" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("cloud", "verdict"), [("async", Verdict.FAILS), ("rigorous", Verdict.HOLDS)]
)
def test_the_async_cloud_of_the_main_text_breaks_4_ii_and_the_rigorous_one_does_not(
    cloud: str, verdict: Verdict
) -> None:
    found = verdicts(cloud={"name": cloud, "first": 3}, **{"run.rounds": 100})
    assert found["4(ii)"].verdict is verdict
    assert found["1(ii)"].found.startswith("q = ")
    assert found["3(i)"].found == "c = 0.3333"


def test_p_and_q_are_those_of_the_planned_and_of_the_recorded_schedule(tmp_path: Path) -> None:
    train("fedbcd-rigorous", rounds=30, evaluate_every=30, out=tmp_path / "run")
    algorithm, cloud = CASES["fedbcd-rigorous"]
    planned = planned_participation(RunSpec(algorithm, cloud, active=2), federation(), 30, None)
    recorded = recorded_participation(tmp_path / "run" / "events.jsonl")
    assert planned == recorded
    assert planned.rounds == 30
    assert all(len(first) == 2 for first in planned.mixes)
    assert max(planned.watched.values()) == 30  # servers that lag have finished fewer


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedbcd-graph", "fedbcd-i-async"])
def test_every_upload_is_an_activation_of_some_round(case: str) -> None:
    algorithm, cloud = CASES[case]
    timeline = planned_participation(RunSpec(algorithm, cloud, active=2), federation(), 12, None)
    mixed = sum(len(first) for first in timeline.mixes)
    assert sum(map(len, timeline.active.values())) == 2 * mixed


def test_the_schedule_of_a_log_is_used_when_one_is_given(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", **SOUND)
    assert fedbcd("run", path, "--out", tmp_path / "run").code == 0
    answer = fedbcd("check", path, "--log", tmp_path / "run", "--json")
    assert answer.code == 0
    assert "over 40 rounds (recorded)" in json.dumps(answer.summary)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"federation.devices": 5}, "servers: "),
        ({"cloud": {"name": "rigorous", "first": 2}}, "cloud.name: sync there, rigorous here"),
        ({"algorithm.momentum": 0.4}, "algorithm.momentum: 0.5 there, 0.4 here"),
        ({"federation.active": 3}, "active: 2 there, 3 here"),
        ({"run.seed": 7}, "seed: 0 there, 7 here"),
        ({"clock": {"step": {"name": "constant", "value": 2.0}}}, "clock.step."),
    ],
)
def test_the_log_of_another_run_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    path = write_job(tmp_path / "job.toml", **{**SOUND, "run.rounds": 2})
    assert fedbcd("run", path, "--out", tmp_path / "run").code == 0
    answer = fedbcd(
        "check",
        write_job(tmp_path / "other.toml", **{**SOUND, **changes}),
        "--log",
        tmp_path / "run",
    )
    assert answer.code == 4
    assert "records no run of this job" in answer.err
    assert difference in answer.err
    with pytest.raises(RecordError, match="records another run than"):
        check_job(
            parse(job_table(**{**SOUND, **changes}))[0], log=tmp_path / "run" / "events.jsonl"
        )


def test_of_several_runs_only_the_recorded_one_is_judged(tmp_path: Path) -> None:
    runs = [{"title": "sync"}, {"title": "rigorous", "cloud": {"name": "rigorous", "first": 2}}]
    assert (
        fedbcd("run", write_job(tmp_path / "job.toml", **SOUND), "--out", tmp_path / "run").code
        == 0
    )
    answer = fedbcd(
        "check",
        write_job(tmp_path / "both.toml", runs=runs, **SOUND),
        "--log",
        tmp_path / "run",
        "--json",
    )
    assert [job["title"] for job in answer.summary["jobs"]] == ["sync"]
    assert "rigorous was not judged: the log records another run (cloud" in answer.err


def test_a_log_that_ends_in_the_middle_of_a_line_is_used_up_to_there(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", **SOUND)
    assert fedbcd("run", path, "--out", tmp_path / "run").code == 0
    log = tmp_path / "run" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:20])
    answer = fedbcd("check", path, "--log", log, "--json")
    assert "the log's last line is not whole and was left out" in json.dumps(answer.summary)
    log.write_bytes(b"".join(lines[:50]) + b"{broken\n" + b"".join(lines[50:]))
    assert "line 51 is damaged" in fedbcd("check", path, "--log", log).err


def test_devices_that_never_get_their_turn_are_named() -> None:
    finding = verdicts(**{"run.rounds": 1})["1(i)"]
    assert finding.verdict is Verdict.FAILS
    assert "8 of 16 devices never active in 1 rounds (planned)" in finding.found


def theorem(**changes: Any) -> dict[str, Any]:
    job = parse(job_table(**{**SOUND, **changes}))[0]
    found = check_job(job, devices=1, rounds=200).to_table()["theorem"]
    return found if isinstance(found, dict) else {"none": found}


def test_the_bounds_of_theorem_1_are_said_with_this_jobs_constants() -> None:
    """Sync-cloud, exact gradients: Remark 5, all of it bounded and not seen."""
    found = theorem(**{"algorithm.batch": "all"})
    c = found["constants"]
    assert math.isclose(found["bounds"]["pull"], c["Delta*"] / (c["eta_z"] * 40))
    assert (c["|V|"], c["|Q|"], c["rho"], found["bounds"]["spread"]) == (1, 16, 0, 0)
    assert found["bounded"]
    assert c["L"] == max(
        softmax_smoothness(data.transform(data.pool.inputs[data.owned(i)], torch.float32))
        for data in [parse(job_table(**SOUND))[0].make_federation()]
        for i in range(16)
    )
    assert 40 < found["telling"]["gap"] < 400
    assert "T = 40 is not large enough: for gap the theorem says no more" in found["sentence"]
    more = theorem(**{"algorithm.batch": "all", "run.rounds": 400})
    assert "is large enough for all three" in more["sentence"]
    assert "p and q are those of the first 200 rounds" in more["sentence"]


def test_mini_batches_keep_a_bound_up_and_the_printed_constants_ask_for_more_rounds() -> None:
    found = theorem(cloud={"name": "rigorous", "first": 3})
    assert found["telling"]["pull"] is None
    assert "no T is large enough for gap and pull: the noise of mini-batches" in found["sentence"]
    assert found["paper_rounds"] > 40
    assert found["constants"]["c"] == pytest.approx(1 / 3)
    seen = theorem(
        **{"model.name": f"{__name__}:Smooth", "algorithm.device_step": 1e-6}
    )  # L_i is only seen
    assert not seen["bounded"]
    assert "seen on some devices" in seen["sentence"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"algorithm.projection": None}, "no bounds: they all hold the diameter D_X of a compact"),
        ({"algorithm.steps": [1, 2]}, "no bounds: they ask for steps = [1, 1]"),
        ({"algorithm.device_step": 5.0}, "no bounds: 4(i) fails"),
        ({"run.leaves": [[0, 9]]}, "no bounds: they ask for no joins, leaves or churn"),
        ({"algorithm.device_step": 5.0, "run.rounds": 1}, "no bounds: 1(i), 4(i) fail"),
    ],
)
def test_where_the_theorem_has_no_bounds_it_is_said_why(changes: Any, why: str) -> None:
    assert theorem(**changes)["none"].startswith(why)


def test_where_every_device_comes_or_goes_their_waits_say_nothing() -> None:
    devices = {"servers": 1, "devices": 2, "active": 1}
    moves = {"run.joins": [[1, 3]], "run.leaves": [[0, 9]]}
    found = verdicts(federation=devices, **moves)
    assert found["1(i)"].verdict is Verdict.UNKNOWN
    assert "every device joins or leaves" in found["1(i)"].found
    assert found["-"].verdict is Verdict.UNKNOWN


class Smooth(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 10))


class Quartic(nn.Module):
    """g_i(x) = sum of x^4, with curvature 12 x^2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(9))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.x.pow(4).sum().expand(len(inputs))


def test_l_i_is_measured_where_gradients_are_taken_which_is_beyond_x() -> None:
    """Assumption 2(ii): on "the feasible set extended by the momentum update"."""
    data = [(torch.zeros(2, 1), torch.zeros(2))] * 2
    own = fb.Federation(Quartic, lambda out, _: out.mean(), data, 1)
    objective = Objective(own.make_model(0), own.loss)
    start = objective.layout.flatten(own.make_model(0), torch.float32)

    def at_random(momentum: float) -> float:
        method = method_of(
            fb.FedBCD(projection=fb.Box(-1, 1), momentum=momentum, device_step=0.01), own.sizes
        )
        seen = estimate(own, method, objective, start).seen[RANDOM]
        return max(curvature.smoothness for curvature in seen.values())

    assert at_random(0.0) <= 12
    assert 12 < at_random(0.9) <= 12 * 2.8**2


def test_baselines_and_fedbcd_i_are_out_of_scope(tmp_path: Path) -> None:
    for name in ("fedavg", "fedavg-ft", "local"):
        report = check_job(parse(job_table(algorithm={"name": name}))[0])
        assert [f.assumption for f in report.findings] == ["-"]
        assert report.fails == 1
    assert (
        check_job(
            parse(job_table(algorithm={"name": "fedbcd-i"}, **{"run.rounds": 3}))[0], devices=1
        ).fails
        >= 1
    )


def test_a_disconnected_graph_is_named() -> None:
    apart = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]
    finding = verdicts(cloud={"name": "graph", "mixing": apart})["1(ii)"]
    assert finding.verdict is Verdict.FAILS
    assert (
        "disconnected: 2 groups of servers never mix in 40 rounds (planned): {0, 1}; {2, 3}"
        in finding.found
    )


def test_a_dynamic_graph_is_judged_on_the_schedule(tmp_path: Path) -> None:
    """Assumption 3: who is mixed with whom depends on who is ready, and on the links that fail."""
    ring = {"name": "dynamic-graph", "first": 3, "edges": [[0, 1], [1, 2], [2, 3], [3, 0]]}
    whole = verdicts(cloud=ring)
    failing = verdicts(cloud=ring | {"link_failure": 0.6})
    assert {whole[k].verdict for k in ("1(ii)", "3(i)", "3(ii)")} == {Verdict.HOLDS}
    q, longer = (int(f["1(ii)"].found.split()[2]) for f in (whole, failing))
    assert 1 < q < longer
    apart = ring | {"edges": [[0, 1], [2, 3]]}
    answer = fedbcd("check", write_job(tmp_path / "job.toml", cloud=apart))
    assert answer.code == 2
    assert "edges never connect servers [2, 3] with servers [0, 1]" in answer.err


def test_servers_that_only_swap_are_named() -> None:
    swap = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    finding = verdicts(cloud={"name": "graph", "mixing": swap})["3(i)"]
    assert finding.verdict is Verdict.FAILS
    assert "a_nn = 0 for server 0" in finding.found


def test_a_matrix_that_is_not_doubly_stochastic_is_refused_in_a_sentence(tmp_path: Path) -> None:
    wrong = [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.25, 0.5, 0.25], [0, 0, 0.25, 0.5]]
    path = write_job(tmp_path / "job.toml", cloud={"name": "graph", "mixing": wrong})
    answer = fedbcd("check", path)
    assert answer.code == 2
    assert "row 3 of the mixing matrix sums to 0.75, not 1" in answer.err


def test_logs_without_a_schedule_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"fedbcd_log":1,"identity":{}}\n')
    with pytest.raises(RecordError, match="does not say how its run was set up"):
        recorded_participation(path)
    path.write_text('{"fedbcd_log":1,"identity":{"servers":[[0]],"cloud":{"name":"sync"}}}\n')
    with pytest.raises(RecordError, match="holds no finished round"):
        recorded_participation(path)
    answer = fedbcd("check", write_job(tmp_path / "job.toml"), "--log", tmp_path / "nothing")
    assert answer.code == 4
    assert "there is no event log at" in answer.err


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    answer = fedbcd("check", write_job(tmp_path / "job.toml"), "--devices", "0")
    assert answer.code == 2
    assert "devices=0 and rounds=2000 must be 1 or more" in answer.err


def test_exact_gradients_have_no_noise_and_other_sets_their_diameter() -> None:
    found = verdicts(
        **{"algorithm.batch": "all", "algorithm.projection": {"name": "ball", "radius": 3}}
    )
    assert found["5"].found == "gradients are exact: sigma = 0"
    assert found["2(i)"].found == "diameter D_X = 6"


def test_without_a_projection_statements_lapse_and_the_check_does_not_fail(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", **{**SOUND, "algorithm.projection": None})
    answer = fedbcd("check", path, "--json")
    assert answer.code == 0
    (report,) = answer.summary["jobs"]
    assert {f["assumption"]: f["verdict"] for f in report["findings"]}["2(i)"] == "lapses"
    assert report["sentence"].startswith(
        "nothing fails, but 2(i) lapses: Theorem 1 is about another problem, with a compact X."
    )
    text = " ".join(fedbcd("check", path, "--devices", "1").out.split())
    assert "norm of the gradient mapping" in text


def test_a_penalty_per_device_meets_the_curvature_of_its_own_device() -> None:
    """The steepest device has the smallest penalty: 4(i) asks for the smallest 1/(L_i + gamma_i),
    of no two devices together.
    """
    gamma = [1.0] * 15 + [200.0]
    data = parse(job_table(**SOUND))[0].make_federation()
    bounds = [
        softmax_smoothness(data.transform(data.pool.inputs[data.owned(i)], torch.float32))
        for i in range(16)
    ]
    limit = min(1 / (bound + g) for bound, g in zip(bounds, gamma, strict=True))
    mixed = 1 / (max(bounds) + max(gamma))
    assert mixed < limit
    for step, verdict in (((mixed + limit) / 2, Verdict.HOLDS), (1.1 / 200, Verdict.FAILS)):
        finding = verdicts(**{"algorithm.device_step": step, "algorithm.penalty": gamma})["4(i)"]
        assert finding.verdict is verdict, finding


class Normalised(nn.Sequential):
    """Of samples that know of each other."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)
        )


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("model", "verdict", "reason"),
    [
        ("Normalised", Verdict.FAILS, "batch normalisation"),
        ("Dropping", Verdict.UNKNOWN, "random numbers"),
    ],
)
def test_gradients_are_not_said_to_be_unbiased_where_they_are_not(
    model: str, verdict: Verdict, reason: str
) -> None:
    finding = verdicts(**{"model.name": f"{__name__}:{model}"})["5"]
    assert finding.verdict is verdict
    assert reason in finding.found
    assert ("bias measured on a device" in finding.found) == (verdict is Verdict.FAILS)
    exact = verdicts(**{"model.name": f"{__name__}:Normalised", "algorithm.batch": "all"})["5"]
    assert exact.verdict is Verdict.HOLDS


@dataclass(frozen=True)
class Mirrored:
    """A picture or its mirror image."""

    name: ClassVar[str] = "mirrored"

    def apply(self, inputs: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.where((h & 1).bool()[..., None, None, None], inputs.flip(-1), inputs)


def test_augmentation_and_coupled_losses_bias_the_gradient_of_the_samples() -> None:
    def judged(
        augment: Any = None, loss: Any = nn.functional.cross_entropy
    ) -> assumptions.Bias | None:
        given = parse(job_table())[0].make_federation()
        pictures = fb.Samples(given.pool.inputs.reshape(-1, 1, 8, 8), given.pool.targets)
        data = [
            (pictures.inputs[given.owned(i)], pictures.targets[given.owned(i)]) for i in range(4)
        ]
        own = fb.Federation(
            partial(logistic, 64, 10), loss, data, 1, transform=given.transform, augment=augment
        )
        objective = Objective(own.make_model(0), own.loss)
        start = objective.layout.flatten(own.make_model(0), torch.float32)
        return bias(own, method_of(fb.FedBCD(batch=8), own.sizes), objective, start)

    assert judged() is None
    turned = judged(augment=Mirrored())
    assert turned is not None
    assert turned.is_clear
    assert "augmentation (mirrored)" in str(turned)
    coupled = judged(
        loss=lambda out, y: nn.functional.cross_entropy(out, y) + out.mean(0).square().sum()
    )
    assert coupled is not None
    assert "not the mean of its samples' gradients" in str(coupled)
