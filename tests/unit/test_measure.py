"""Personal accuracy: each device's test samples are weighted by its own shares of labels, or pooled
as in the recipes.
"""

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.algorithm.fused.library import library
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.workers import OneWorker
from fedbcd.data.measure import Measure
from fedbcd.data.partition import Dirichlet, Diversity, Partition, Partitioner
from fedbcd.data.samples import Samples
from fedbcd.errors import ConfigError, DataError, RecordError
from fedbcd.experiments.job import default_table, parse
from fedbcd.experiments.paper import PANELS, Setting, panels
from fedbcd.experiments.pool import job_key
from fedbcd.report.advice import advice
from fedbcd.report.view import read_run, run_view

MEASURES = tuple(name for name in get_args(Measure) if name != "own-tests")
SPLITS = [Dirichlet(alpha=0.3), Dirichlet(alpha=0.3, samples=30), Diversity(3, 30)]
DIGITS = fb.load_dataset("digits")


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def split_digits(partitioner: Partitioner, devices: int = 12, seed: int = 0) -> fb.Federation:
    split = partitioner.split(DIGITS.train.targets, devices, seed)
    return of_partition(split, DIGITS.test)


def of_partition(split: Partition, test: Samples) -> fb.Federation:
    given = {"test": test, "transform": DIGITS.transform}
    return fb.Federation.from_partition(
        linear, nn.functional.cross_entropy, DIGITS.train, split, 4, **given
    )


def oracle(federation: fb.Federation, device: int, module: nn.Module, measure: str) -> float:
    """One sample after another, in float64, from the words of the definition; NaN where no label of
    the device has test samples.
    """
    test = federation.test
    assert test is not None
    assert federation.labels is not None
    layer = module[1]  # type: ignore[index]
    weight, bias = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
    own = federation.pool.targets[federation.owned(device)].tolist()
    right: dict[int, list[bool]] = {}
    for sample, label in zip(
        federation.transform(test.inputs, torch.float64).flatten(1).numpy(),
        test.targets.tolist(),
        strict=True,
    ):
        right.setdefault(label, []).append(int(np.argmax(weight @ sample + bias)) == label)
    if measure == "pooled-labels":
        pooled = [hit for label in federation.labels[device] for hit in right.get(label, [])]
        return sum(pooled) / len(pooled) if pooled else math.nan
    tested = [label for label in own if label in right]  # a label as often as the device has it
    return (
        sum(sum(right[label]) / len(right[label]) for label in tested) / len(tested)
        if tested
        else math.nan
    )


def models_near(federation: fb.Federation, count: int) -> torch.Tensor:
    objective = Objective(linear(), federation.loss)
    start = objective.layout.flatten(federation.make_model(0), torch.float32)
    return start + 0.3 * torch.randn(count, len(start), generator=torch.Generator().manual_seed(1))


def module_of(flat: torch.Tensor) -> nn.Module:
    module = linear()
    return Objective(module, nn.functional.cross_entropy).layout.load(module, flat)


# ------------------------------------------------------------------------------------------------
# the oracle
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("split", SPLITS, ids=["dirichlet", "dirichlet-30", "diversity"])
@pytest.mark.parametrize("path", ["compiled", "torch", "in parts", "together"])
def test_every_way_to_test_gives_the_scores_of_the_definition(
    path: str, split: Partitioner, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Personal models on their devices, and what they are compared with: their servers' models, by
    the same weights.
    """
    federation = split_digits(split)
    models, homes = models_near(federation, 12), {device: device // 3 for device in range(12)}
    if path == "torch":
        monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    evaluator = Evaluator(
        federation,
        Objective(linear(), federation.loss),
        torch.device("cpu"),
        path == "together",
        measure,
    )
    evaluator.outputs.keep = 0 if path == "in parts" else evaluator.outputs.keep
    found = evaluator.scores(models[:4], dict(enumerate(models)), OneWorker(), homes)
    assert (evaluator.outputs.tester is not None) == (path == "compiled" and library() is not None)
    for device in range(12):
        assert found.devices[device] == pytest.approx(
            oracle(federation, device, module_of(models[device]), measure), abs=1e-12
        )
        assert found.homes[device] == pytest.approx(
            oracle(federation, device, module_of(models[device // 3]), measure), abs=1e-12
        )
    alone = evaluator.personal_scores({5: models[5]}, OneWorker())[5]
    assert alone.test == pytest.approx(found.of_devices[5].test, abs=1e-12)


def test_a_model_that_has_not_changed_is_not_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that records every round ("the two types of performance are recorded every round")
    tests the devices that were active; the scores are those of a test of all.
    """
    federation = split_digits(SPLITS[0])
    objective = Objective(linear(), federation.loss)
    models = models_near(federation, 12)
    evaluator = Evaluator(federation, objective, torch.device("cpu"))
    tested: list[int] = []
    of = evaluator.outputs.of
    monkeypatch.setattr(evaluator.outputs, "of", lambda *given: tested.append(1) or of(*given))

    def look() -> Scores:
        tested.clear()
        return evaluator.scores(models[:2], dict(enumerate(models[2:])), OneWorker())

    before = look()
    assert len(tested) == 12
    assert look() == before
    assert not tested
    models[1] *= -1.0  # a server's, in place
    models[7] *= -1.0
    after = look()
    assert len(tested) == 2
    anew = Evaluator(federation, objective, torch.device("cpu"))
    assert after == anew.scores(models[:2], dict(enumerate(models[2:])), OneWorker())
    assert [i for i in range(10) if after.devices[i] != before.devices[i]] == [5]


def test_measures_agree_where_shares_are_equal_and_each_label_has_one_test_sample() -> None:
    first = [int((DIGITS.test.targets == label).nonzero()[0]) for label in range(10)]
    places = [
        [
            int(k)
            for label in (d % 10, (d + 3) % 10)
            for k in (DIGITS.train.targets == label).nonzero()[:7, 0]
        ]
        for d in range(12)
    ]
    split = Partition.of(DIGITS.train.targets, [np.array(own) for own in places])
    federation = of_partition(split, Samples(DIGITS.test.inputs[first], DIGITS.test.targets[first]))
    models = dict(enumerate(models_near(federation, 12)))
    objective = Objective(linear(), federation.loss)
    own, pooled = (
        Evaluator(federation, objective, torch.device("cpu"), False, m)
        .scores(models[0][None], models, OneWorker())
        .devices
        for m in MEASURES
    )
    assert own == pytest.approx(pooled, abs=1e-12)


# ------------------------------------------------------------------------------------------------
# untested labels
def test_shares_are_of_the_labels_that_are_tested_and_it_is_said() -> None:
    """Labels 0 and 1 are not in the test set; device 0 owns nothing else, so no average is about
    it.
    """
    targets = DIGITS.train.targets

    def of(*labels: tuple[int, int]) -> Any:
        return np.array(
            [int(k) for label, count in labels for k in (targets == label).nonzero()[:count, 0]]
        )

    owned = [of((0, 5), (1, 5)), of((0, 20), (2, 9), (3, 1)), of((2, 5)), of((4, 5), (5, 5))]
    rest = DIGITS.test.targets > 1
    federation = of_partition(
        Partition.of(targets, owned), Samples(DIGITS.test.inputs[rest], DIGITS.test.targets[rest])
    )
    said: list[str] = []
    run = fb.train(
        federation, fb.FedBCD(device_step=0.1), rounds=2, active=1, on_notice=said.append
    )
    assert sorted(run.personal_scores) == sorted(run.global_scores) == [1, 2, 3]
    for device, score in run.personal_scores.items():
        assert score == pytest.approx(
            oracle(federation, device, run.personal_model(device), "own-shares"), abs=1e-12
        )
    assert run.history.last.personal_accuracy == pytest.approx(
        np.mean(list(run.personal_scores.values())), abs=1e-12
    )
    (text,) = said
    assert text.startswith("the test set has no samples of labels 0, 1, which 2 of 4 devices own: ")
    assert text.endswith(" other labels, without those that have no other (1)")


# ------------------------------------------------------------------------------------------------
# what it is good for
def trained(measure: Measure | None, out: Path) -> fb.Run:
    """On a split that is not the paper's: some labels make up most of a device's data, of others it
    has one sample or two.
    """
    federation = split_digits(Dirichlet(alpha=0.3), devices=20)
    algorithm = fb.FedBCD(device_step=0.05, penalty=0.2)
    return fb.train(
        federation, algorithm, rounds=30, measure=measure, looks=2, certify_every=0, out=out
    )


@pytest.mark.parametrize("measure", [None, "own-shares"])
def test_models_that_are_better_for_their_devices_have_the_better_accuracy(
    measure: Measure | None, tmp_path: Path
) -> None:
    run = trained(measure, tmp_path)
    federation, last = run.federation, run.history.last
    for device, server in ((device, device // 5) for device in range(20)):
        assert run.personal_scores[device] == pytest.approx(
            oracle(federation, device, run.personal_model(device), "own-shares"), abs=1e-12
        )
        assert run.global_scores[device] == pytest.approx(
            oracle(federation, device, run.server_model(server), "own-shares"), abs=1e-12
        )
    gains = [run.personal_scores[device] - run.global_scores[device] for device in range(20)]
    assert sum(gain > 0 for gain in gains) >= 15
    assert last.personal_accuracy == pytest.approx(
        np.mean(list(run.personal_scores.values())), abs=1e-12
    )
    assert last.personal_accuracy > last.global_accuracy + 0.03
    assert last.worst_decile == pytest.approx(
        np.mean(sorted(run.personal_scores.values())[:2]), abs=1e-12
    )
    view = run_view(read_run(tmp_path), "0")
    assert view["summary"]["measure"] == run.summary["measure"] == "own-shares"
    assert view["personal"]["gain"]["better"] == sum(gain > 0 for gain in gains)
    assert (
        view["personal"]["mean"]
        == view["summary"]["personal"]
        == pytest.approx(last.personal_accuracy)
    )
    assert not any(
        "would do better with their server's global model" in text for text in advice(view)
    )


def test_the_papers_measure_has_the_same_models_look_worse(tmp_path: Path) -> None:
    """Why it is not the default: it counts the labels of which a device has one sample as much as
    those it has hundreds of.
    """
    run, other = trained("pooled-labels", tmp_path), trained("own-shares", tmp_path / "other")
    assert run.digest == other.digest
    assert run.history.last.personal_accuracy < run.history.last.global_accuracy - 0.05
    assert run.history.last.global_accuracy == other.history.last.global_accuracy
    assert any(
        "of 20 devices would do better with their server's global model" in text
        for text in advice(run_view(read_run(tmp_path), "0"))
    )


# ------------------------------------------------------------------------------------------------
# its name
def words(devices: int, length: int = 6) -> list[tuple[fb.Samples, fb.Samples]]:
    """Sequences of numbers that go on by a step of the device's own; what a device learns from, and
    what it is tested on.
    """
    found = []
    for device in range(devices):
        starts = torch.arange(12 + device)[:, None]
        text = (starts + (device + 1) * torch.arange(length + 1)) % 7
        own = fb.Samples(text[:, :-1], text[:, 1:])
        found.append((fb.Samples(own.inputs[:8], own.targets[:8]), own))
    return found


def tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def guesser() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7))


def guessed(module: nn.Module, own: fb.Samples) -> float:
    return float((module(own.inputs).argmax(-1) == own.targets).double().mean())


@pytest.mark.parametrize("together", [False, True])
def test_devices_that_bring_tests_are_tested_on_them_and_on_every_token(together: bool) -> None:
    """Targets of shape (N, T) give accuracy per token; without a test set for all, global models
    are tested on all of theirs.
    """
    given = words(6)
    federation = fb.Federation(guesser, tokens, given, 2)
    run = fb.train(federation, fb.FedBCD(device_step=0.5), rounds=6, active=2)
    assert run.summary["measure"] == "own-tests"
    for device, (_, own) in enumerate(given):
        mine, theirs = guessed(run.personal_model(device), own), guessed(run.global_model, own)
        assert run.personal_scores[device] == pytest.approx(mine, abs=1e-12)
        assert run.global_scores[device] == pytest.approx(theirs, abs=1e-12)
    everything = fb.Samples(
        torch.cat([own.inputs for _, own in given]), torch.cat([own.targets for _, own in given])
    )
    last = run.history.last
    assert last.global_accuracy == pytest.approx(guessed(run.global_model, everything), abs=1e-12)
    assert last.personal_accuracy == pytest.approx(np.mean([*run.personal_scores.values()]))
    objective = Objective(guesser(), tokens)
    evaluator = Evaluator(federation, objective, torch.device("cpu"), together, "own-tests")
    models = {device: run.personal_NF[device] for device in range(6)}
    found = evaluator.scores(run.global_VF, models, OneWorker())
    assert found.devices == pytest.approx(run.personal_scores)
    assert found.servers == pytest.approx([last.global_accuracy] * 2)


def test_who_has_no_test_of_its_own_is_left_out_and_what_is_for_all_is_for_global_models(
    tmp_path: Path,
) -> None:
    given: list[Any] = [*words(4)]
    for_all = given[0][1]
    given[3] = (given[3][0], None)
    said: list[str] = []
    federation = fb.Federation(guesser, tokens, given, 2, test=for_all)
    for rounds in (1, 2):  # also of a run that goes on
        how = {"rounds": rounds, "resume": rounds > 1, "on_notice": said.append}
        run = fb.train(federation, fb.FedBCD(device_step=0.5), active=1, out=tmp_path, **how)
    assert fb.replay(tmp_path, federation)["digest"] == run.summary["digest"]
    assert sorted(run.personal_scores) == [0, 1, 2]
    assert run.history.last.global_accuracy == pytest.approx(guessed(run.global_model, for_all))
    assert any("1 of 4 devices have no test samples of their own" in line for line in said)
    view = run_view(read_run(tmp_path), "0")
    assert view["summary"]["measure"] == "own-tests"


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ((torch.zeros(3, 5).long(), torch.zeros(3, 6).long()), r"device 1 has inputs of shape"),
        ((torch.zeros(3, 6), torch.zeros(3, 6).long()), "torch.float32.*bring them to that"),
        ((torch.zeros(0, 6).long(), torch.zeros(0, 6).long()), "device 1 is empty; give None"),
        ((torch.zeros(3, 6).long(), torch.zeros(2, 6).long()), "the test set of device 1"),
    ],
)
def test_a_test_set_of_another_kind_is_refused(test: Any, sentence: str) -> None:
    first, second = words(2)
    with pytest.raises(DataError, match=sentence):
        fb.Federation(guesser, tokens, [first, (second[0], test)], 1)


@pytest.mark.parametrize(
    ("own", "measure"), [(True, "own-shares"), (True, "pooled-labels"), (False, "own-tests")]
)
def test_a_measure_without_its_tests_is_refused(own: bool, measure: Measure) -> None:
    devices = [pair if own else pair[0] for pair in words(2)]
    federation = fb.Federation(guesser, tokens, devices, 1)
    with pytest.raises(ConfigError, match=f"measure='{measure}', but devices have brought"):
        fb.train(federation, fb.FedBCD(), rounds=1, measure=measure)


def test_a_measure_is_known_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match="measure = 'shares' must be one of 'own-shares', 'pooled-labels', 'own-tests'",
    ):
        fb.train(split_digits(Diversity(3, 30)), fb.FedBCD(), rounds=1, active=1, measure="shares")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"run\.measure"):
        parse({**default_table(), "run": {"rounds": 1, "measure": "shares"}})


def test_a_job_names_the_measure_or_has_own_shares() -> None:
    table = {key: value for key, value in default_table().items() if key != "runs"}
    silent, named = (
        parse({**table, "run": {"rounds": 1, **run}})[0]
        for run in ({}, {"measure": "pooled-labels"})
    )
    assert (silent.spec.chosen_measure, named.spec.chosen_measure) == MEASURES
    assert (
        silent.to_table()["run"]["measure"] == "own-shares"
    )  # said in records, whatever the default is when they are read


def test_the_papers_panels_name_the_papers_measure_and_their_results_keep_their_keys() -> None:
    jobs = [job for panel in panels(list(PANELS), Setting()) for job in panel.jobs]
    assert {job.spec.chosen_measure for job in jobs} == {"pooled-labels"}
    run = jobs[0].to_table()["run"]
    assert "measure" in run
    keys = [job_key(parse_with(jobs[0].to_table(), measure)) for measure in MEASURES]
    assert keys[1] == job_key(jobs[0]) != keys[0]


def test_a_run_goes_on_with_the_measure_it_was_begun_with(tmp_path: Path) -> None:
    """As recorded where nothing is said; a record that says nothing is of version 0.1.0, which knew
    the paper's only.
    """
    federation, algorithm = split_digits(Diversity(3, 30)), fb.FedBCD(device_step=0.05)
    fb.train(federation, algorithm, rounds=1, active=1, measure="pooled-labels", out=tmp_path)
    header = (tmp_path / "events.jsonl").read_text().splitlines()[0]
    assert "measure" not in header  # so that the identity of a run, and its hash, are as they were
    run = fb.train(federation, algorithm, rounds=2, active=1, out=tmp_path, resume=True)
    assert run.summary["measure"] == "pooled-labels"
    assert fb.replay(tmp_path / "events.jsonl", federation)["digest"] == run.digest
    with pytest.raises(RecordError, match="measure: pooled-labels there, own-shares here"):
        fb.train(
            federation,
            algorithm,
            rounds=3,
            active=1,
            measure="own-shares",
            out=tmp_path,
            resume=True,
        )


def test_a_job_goes_on_with_the_measure_of_the_record() -> None:
    table = {"run": {"rounds": 1}}
    (silent,) = parse(table)
    (named,) = parse({"run": {"rounds": 1, "measure": "own-shares"}})
    assert (
        silent.going_on({"algorithm": {"name": "fedbcd"}}).spec.chosen_measure == "pooled-labels"
    )  # the identity of a run
    assert silent.going_on(silent.to_table()).spec.chosen_measure == "own-shares"
    assert named.going_on({"algorithm": {"name": "fedbcd"}}).spec.chosen_measure == "own-shares"
    assert silent.going_on({}).spec.chosen_measure == "own-shares"
    assert parse(table, recorded=True)[0].spec.chosen_measure == "pooled-labels"


def parse_with(table: dict[str, Any], measure: str) -> Any:
    from fedbcd.experiments.pool import without_none

    return parse(without_none({**table, "run": {**table["run"], "measure": measure}}))[0]
