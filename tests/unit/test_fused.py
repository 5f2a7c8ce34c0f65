"""Compiled sessions (`algorithm/fused`): which models they are for, and that they compute eq. (4)
and nothing else.
"""

import ctypes
import math
import os
import shutil
from collections.abc import Callable
from importlib.metadata import distributions
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional

import fedbcd as fb
from fedbcd.algorithm.cloud import absorb
from fedbcd.algorithm.device import Contact, Iterates, Work, penalty_steps
from fedbcd.algorithm.fused.chain import LinearLayer
from fedbcd.algorithm.fused.library import (
    PORTABLE,
    ChainSessions,
    ChainTester,
    ChainTrainer,
    ModelRows,
    _Task,
    library,
    load,
)
from fedbcd.algorithm.objective import Objective
from fedbcd.compute.evaluate import Evaluator, Scores
from fedbcd.compute.workers import OneWorker
from fedbcd.data.samples import Scale
from fedbcd.engines.setup import make_numbers
from fedbcd.errors import ConfigError
from fedbcd.models import logistic, mlp
from support.chains import RULE, Example, builds, runs_here
from support.exploring import examples
from support.rounding import Rule, U, exact_outputs, exact_step, of_run
from support.runs import BCD, CASES, federation, largest_difference, train

needs_library = pytest.mark.skipif(library() is None, reason="the compiled code was not built")
BUILDS = ("_chain_avx512", "_chain_avx2", PORTABLE)


def test_it_was_built_where_it_can_be() -> None:
    """An installation without a compiler does without; with one, a build that fails must not go
    unnoticed.
    """
    installed = any(found.metadata["Name"] == "fedbcd" for found in distributions())
    if not installed or shutil.which("cc") is None or os.environ.get("FEDBCD_FUSED") == "0":
        pytest.skip("not installed, or no C compiler, or not wanted")
    assert library() is not None


# ------------------------------------------------------------------------------------------------
# which models
class OwnStyle(nn.Module):
    """A chain, written by somebody who likes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3, bias=False)
        self.first = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x.view(len(x), -1)))
        return (hidden.reshape(-1, 2, 2).flatten(1)) @ self.last.weight.T


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.b(x + torch.relu(self.a(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.relu(self.a(x.flatten(1))))))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.flatten(1))


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    module[1].weight.requires_grad_(False)
    return module


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def _chain(
    module: nn.Module, loss: Callable[..., Tensor] = functional.cross_entropy
) -> tuple[LinearLayer, ...] | None:
    objective = Objective(module, loss)
    flat = objective.layout.flatten(module, torch.float32)
    return objective.chain(flat, torch.randn(5, 2, 3), torch.tensor([0, 1, 2, 1, 0]))


def test_a_chain_is_known_however_it_is_written() -> None:
    expected = (LinearLayer(6, 4, 0, 24, True), LinearLayer(4, 3, 28, 40, False))
    assert _chain(mlp(6, 3, (4,))) == expected
    assert _chain(mlp(6, 3, (4,)), nn.CrossEntropyLoss()) == expected
    assert (
        _chain(
            mlp(6, 3, (4,)), lambda out, y: functional.nll_loss(functional.log_softmax(out, -1), y)
        )
        == expected
    )
    assert _chain(logistic(6, 3)) == (LinearLayer(6, 3, 0, 18, False),)
    assert _chain(_layers(nn.Linear(6, 4), nn.Linear(4, 3))) == (
        LinearLayer(6, 4, 0, 24, False),
        LinearLayer(4, 3, 28, 40, False),
    )
    assert _chain(OwnStyle()) == (LinearLayer(6, 4, 12, 36, True), LinearLayer(4, 3, 0, -1, False))


OTHERS = {
    "another activation": _layers(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
    "dropout": _layers(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 3)),
    "batch norm": _layers(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "relu at the end": _layers(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()),
    "a convolution": nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 3, (2, 3)), nn.Flatten()),
    "layers on parts of a sample": nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 3)),
    "two ways": Branching(),
    "a layer twice": Tied(),
    "a layer never": Unused(),
    "a layer that stays": _frozen(),
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "smoothed labels": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weights of classes": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
    "the sum": nn.CrossEntropyLoss(reduction="sum"),
    "an ignored class": nn.CrossEntropyLoss(ignore_index=2),
    "a scaled loss": lambda out, y: 2 * functional.cross_entropy(out, y),
    "temperature": lambda out, y: functional.cross_entropy(out / 2, y),
    "a regulariser": lambda out, y: functional.cross_entropy(out, y) + out.square().mean(),
    "other targets": lambda out, y: functional.cross_entropy(out, y.flip(0)),
    "squares": lambda out, y: functional.mse_loss(out, functional.one_hot(y, 3).float()),
    "softmax over samples": lambda out, y: functional.nll_loss(functional.log_softmax(out, 0), y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_torch(name: str) -> None:
    assert _chain(OTHERS[name]) is None


@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_are_left_to_torch(name: str) -> None:
    assert _chain(mlp(6, 3, (4,)), LOSSES[name]) is None


def test_products_in_bfloat16_are_left_to_torch() -> None:
    module = mlp(6, 3, (4,))
    objective = Objective(module, functional.cross_entropy, torch.bfloat16)
    assert (
        objective.chain(
            objective.layout.flatten(module, torch.float32),
            torch.randn(5, 6),
            torch.tensor([0, 1, 2, 1, 0]),
        )
        is None
    )


def _compiled_for(targets: list[int]) -> object:
    devices = [(torch.randn(4, 6), torch.tensor(targets))] * 2
    setting = fb.RunSpec(fb.FedBCD(batch=2), active=1)
    numbers = make_numbers(
        setting,
        fb.Federation(lambda: mlp(6, 3, (4,)), functional.cross_entropy, devices, 1),
        torch.device("cpu"),
    )
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    return numbers.trainer.compiled


@needs_library
def test_targets_that_are_no_class_are_left_to_torch_or_refused() -> None:
    """-100 is cross_entropy's own way to leave a sample out; 3 of 3 classes is an error."""
    assert _compiled_for([0, 1, 2, -100]) is None
    with pytest.raises(ConfigError, match="the loss fails on 3"):
        _compiled_for([0, 1, 2, 3])


@needs_library
@pytest.mark.parametrize(("features", "fused"), [(2**18, True), (2**21, False)])
def test_very_large_batches_are_left_to_torch(features: int, fused: bool) -> None:
    devices = [(torch.zeros(3, features), torch.tensor([0, 1, 2]))] * 2
    setting = fb.RunSpec(fb.FedBCD(batch="all"), active=1)
    numbers = make_numbers(
        setting,
        fb.Federation(lambda: logistic(features, 3), functional.cross_entropy, devices, 1),
        torch.device("cpu"),
    )
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    assert (numbers.trainer.compiled is not None) is fused


# ------------------------------------------------------------------------------------------------
# what it computes
EXAMPLES = st.builds(
    Example,
    widths=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    samples=st.integers(1, 70),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    bytes_=st.booleans(),
    anchored=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)


def check_steps(example: Example, build: ctypes.CDLL, rule: Rule = RULE) -> tuple[Tensor, ...]:
    """Each step by itself, from where it begins, and all of them at once; what these give."""
    found = example.fused(build, rule=rule)
    x, prev, losses = (
        example.rows.x_NP.clone(),
        example.rows.prev_NP.clone(),
        torch.zeros_like(found[2]),
    )
    for k in range(max(example.steps)):
        at_work = [i for i, count in enumerate(example.steps) if count > k]
        before = Iterates(x.clone(), prev.clone())
        x[at_work], prev[at_work], losses[at_work, k : k + 1] = example.part(
            at_work, k, before
        ).fused(build, rule=rule)
        for i in at_work:
            step = exact_step(example.layers, example.given(i, k, before), rule)
            assert step.times_the_bound(x[i], losses[i, k]) <= 1, f"step {k} of device {i}"
    assert all(map(torch.equal, found, (x, prev, losses)))
    return found


DEEP = Example(
    [13, 47, 17, 41, 47], samples=1, steps=[2, 1], bytes_=False, anchored=False, bias=False, seed=0
)
SHALLOW = Example(
    [20, 12, 5], samples=9, steps=[2, 1], bytes_=True, anchored=True, bias=True, seed=0
)


@needs_library
@examples(10)
@given(example=EXAMPLES)
@hypothesis.example(DEEP)
def test_every_build_takes_the_steps_of_eq_4(example: Example) -> None:
    """Widths, batches and steps of every kind: each step is the exact one from where it began, up
    to rounding.

    How far rounding may go is derived in `support/rounding.py`, from the magnitudes of the example
    and for any order of summation, so it holds on every processor;
    `test_a_wrong_step_is_told_from_rounding` shows that it is not far. Steps are compared one by
    one, since what one leaves is magnified by those that follow; and a session has the bits of its
    steps.
    """
    known: list[tuple[Tensor, ...]] = []
    for build in builds():
        found = example.fused(build)
        if not any(
            all(map(torch.equal, found, other)) for other in known
        ):  # the same bits need no second look
            known.append(check_steps(example, build))


@needs_library
@pytest.mark.parametrize(
    ("example", "wrong"), [(DEEP, 0.01), (SHALLOW, 1e-4)], ids=["five layers", "three layers"]
)
def test_a_wrong_step_is_told_from_rounding(example: Example, wrong: float) -> None:
    """Numbers of eq. (4) that are wrong by a hundredth where rounding counts most, or by less,
    exceed the bound.
    """
    for build in builds():
        x, _, losses = example.part([0, 1], 0, example.rows).fused(build)
        for i in range(2):
            given = example.given(i, 0, example.rows)
            for name in RULE._fields:
                other = RULE._replace(**{name: getattr(RULE, name) * (1 + wrong)})
                assert (
                    exact_step(example.layers, given, other).times_the_bound(x[i], losses[i, 0]) > 1
                ), name
            if given.anchor is not None:
                other_pull = given._replace(penalty=given.penalty * (1 + 10 * wrong))
                assert (
                    exact_step(example.layers, other_pull, RULE).times_the_bound(x[i], losses[i, 0])
                    > 1
                )
            other_batch = example.given(i, 1, example.rows)
            assert (
                exact_step(example.layers, other_batch, RULE).times_the_bound(x[i], losses[i, 0])
                > 1
            )


@needs_library
@examples(12)
@given(example=EXAMPLES)
def test_neither_threads_nor_the_memory_nor_the_vectors_of_the_processor_change_a_bit(
    example: Example,
) -> None:
    compiled = library()
    assert compiled is not None
    alone = example.fused(compiled)
    wide, narrow = load("_chain_avx512"), load("_chain_avx2")
    others = [
        example.fused(compiled, threads=3),
        example.fused(compiled, how="in place"),
        example.fused(compiled, threads=2, how="in place"),
    ]
    if wide is not None and narrow is not None and runs_here("_chain_avx512"):
        others += [example.fused(wide), example.fused(narrow)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@needs_library
def test_a_device_is_trained_alike_whoever_else_is() -> None:
    many = Example([20, 9, 4], 8, [3, 1, 4, 2, 5], True, True, True, seed=3)
    compiled = library()
    assert compiled is not None
    together = many.fused(compiled)
    for i in range(5):
        alone = Example([20, 9, 4], 8, [3, 1, 4, 2, 5], True, True, True, seed=3)
        alone.rows = Iterates(*(part[i : i + 1] for part in alone.rows))
        alone.steps, alone.positions, alone.penalty = (
            alone.steps[i : i + 1],
            alone.positions[i : i + 1],
            alone.penalty[i : i + 1],
        )
        assert alone.anchor is not None
        alone.anchor = alone.anchor[i : i + 1]
        x, prev, _ = alone.fused(compiled)
        assert torch.equal(x[0], together[0][i])
        assert torch.equal(prev[0], together[1][i])


@needs_library
def test_no_projection_is_compiled_as_well_with_the_bits_of_a_box_that_nothing_reaches() -> None:
    """And eq. (4) without a projection, where weights go past the box that was the default."""
    how: dict[str, Any] = {"rounds": 12, "looks": 1, "certify_every": 0}
    free, wide = (
        train("fedbcd-sync", projection=chosen, **how)
        for chosen in (fb.NoProjection(), fb.Box(-1e3, 1e3))
    )
    assert free.digest == wide.digest
    numbers = make_numbers(fb.RunSpec(BCD, active=2), federation(), torch.device("cpu"))
    numbers.trainer.check_vectorised(numbers.global_VF()[0])
    assert isinstance(BCD.projection, fb.NoProjection)
    assert numbers.trainer.compiled is not None
    steep, compiled = Example([20, 9, 4], 8, [3, 1, 4, 2], False, True, True, seed=4), library()
    assert compiled is not None
    steep.rows = Iterates(*(10 * part for part in steep.rows))
    x, *_ = check_steps(steep, compiled, RULE._replace(low=-math.inf, high=math.inf))
    assert float(x.abs().max()) > 2


@needs_library
def test_only_the_rows_of_the_devices_change_and_copies_are_kept() -> None:
    example = Example([20, 9, 4], 8, [3, 1, 4], False, True, True, seed=5)
    compiled = library()
    assert compiled is not None
    expected_x, expected_prev, _ = example.fused(compiled)
    size = example.rows.x_NP.shape[1]
    x_table, prev_table = torch.full((9, size), 7.0), torch.full((9, size), 8.0)
    devices = torch.tensor([6, 0, 3])
    x_table[devices], prev_table[devices] = example.rows
    before, after = torch.empty(3, size), torch.empty(3, size)
    ChainTrainer(example.layers, size, compiled).train(
        ModelRows(x_table, prev_table, x_table, prev_table, devices, before, after),
        ChainSessions(example.steps, example.pool, example.positions),
        example.anchor,
        example.penalty[:, 0],
        OneWorker(),
        step=0.05,
        momentum=0.9,
        bounds=(-0.6, 0.7),
    )
    assert torch.equal(before, example.rows.x_NP)
    assert torch.equal(after, expected_x)
    assert torch.equal(x_table[devices], expected_x)
    assert torch.equal(prev_table[devices], expected_prev)
    others = torch.tensor([1, 2, 4, 5, 7, 8])
    assert bool((x_table[others] == 7).all())
    assert bool((prev_table[others] == 8).all())


@needs_library
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("momentum", ["kept", "pull", "restart"])
@pytest.mark.parametrize("steps", [[1, 2, 3], [5, 1, 1]])
def test_steps_of_the_penalty_alone(steps: list[int], momentum: Contact, in_place: bool) -> None:
    """Algorithm 2, lines 14-18."""
    example = Example([20, 9, 4], 8, steps, False, True, True, seed=8)
    compiled = library()
    assert compiled is not None
    assert example.anchor is not None
    order = sorted(range(3), key=lambda i: -steps[i])
    x, prev = example.rows.x_NP[order], example.rows.prev_NP[order]
    work = Work(
        sorted(steps, reverse=True),
        lambda _, ex: ex,
        example.anchor[order].double(),
        example.penalty[order].double(),
    )
    expected = penalty_steps(Iterates(x.double(), prev.double()), work, fb.Box(-0.6, 0.7), momentum)
    models = (
        ModelRows(x, prev, x, prev)
        if in_place
        else ModelRows(x, prev, torch.empty_like(x), torch.empty_like(x))
    )
    # Four roundings a step, of numbers up to |x| + gamma |z - x|; what came before is magnified by
    # |1 - gamma| <= 1/2, so twice that in all. Momentum that is kept takes two more, of such
    # numbers.
    sizes = [float(part.abs().max()) for part in (x, prev, example.anchor)]
    trainer, bounds = ChainTrainer(example.layers, x.shape[1], compiled), (-0.6, 0.7)
    given = (
        models,
        ChainSessions(work.steps),
        example.anchor[order],
        example.penalty[order][:, 0],
        OneWorker(),
    )
    trainer.train(*given, bounds=bounds, contact=momentum)
    magnitude = 2.5 * sizes[0] + sizes[1] + 1.5 * sizes[2]
    torch.testing.assert_close(models.new_x.double(), expected.x_NP, rtol=0, atol=8 * U * magnitude)
    torch.testing.assert_close(
        models.new_prev.double(), expected.prev_NP, rtol=0, atol=10 * U * magnitude
    )


@needs_library
@pytest.mark.parametrize("with_before", [True, False])
def test_sums_have_the_bits_of_the_general_way(with_before: bool) -> None:
    compiled = library()
    assert compiled is not None
    total, after, before = (
        torch.randn(1001, dtype=torch.float64),
        torch.randn(1001),
        torch.randn(1001) if with_before else None,
    )
    expected = total.clone()
    absorb(expected, 0.37, after, before)
    ChainTrainer((LinearLayer(1, 1, 0, -1, False),), 1, compiled).absorb(total, 0.37, after, before)
    assert torch.equal(total, expected)


def test_a_library_of_another_version_of_its_source_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An installation in place whose source has been updated keeps the old library until it is
    built again.
    """
    assert any(load(name) is not None for name in BUILDS) == (library() is not None)
    monkeypatch.setattr(
        "fedbcd.algorithm.fused.library._Task",
        type("_Later", (ctypes.Structure,), {"_fields_": [*_Task._fields_, ("x", ctypes.c_int64)]}),
    )
    assert all(load(name) is None for name in BUILDS)


# ------------------------------------------------------------------------------------------------
# testing
@needs_library
@examples(12)
@given(
    widths=st.lists(st.integers(1, 50), min_size=2, max_size=5),
    samples=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_every_build_gives_the_outputs_of_the_model(
    widths: list[int], samples: int, seed: int
) -> None:
    torch.manual_seed(seed)
    relu = [module for a, b in pairwise(widths) for module in (nn.Linear(a, b), nn.ReLU())]
    module = nn.Sequential(*relu[:-1])
    objective = Objective(module, functional.cross_entropy)
    flat, inputs = objective.layout.flatten(module, torch.float32), torch.randn(samples, widths[0])
    layers = objective.chain(flat, inputs[[0, 0]], torch.zeros(2, dtype=torch.int64), testing=True)
    assert layers is not None
    found = []
    for build in builds():
        tester = ChainTester(layers, len(flat), build)
        blocks = tester.blocks_of(inputs)
        chosen = torch.arange(len(blocks)).flip(0)
        found.append(tester.outputs(flat, blocks, chosen).flip(0).flatten(0, 1)[:samples])
    exact, bound = exact_outputs(layers, flat, inputs)
    with torch.no_grad():
        assert torch.allclose(exact, module.double()(inputs.double()), rtol=1e-12, atol=1e-12)
    for outputs in found:
        assert bool(((outputs - exact).norm(dim=1) <= bound).all())


@needs_library
def test_scores_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several labels, which begin with new blocks, and test sets too large to keep. Accuracies are
    the same; losses, which are means of -log softmax, follow the outputs at most sqrt(2) times as
    far as these may be apart.
    """
    given = federation()
    assert given.labels is not None
    objective = Objective(given.make_model(0), functional.cross_entropy)
    start = objective.layout.flatten(given.make_model(0), torch.float32)
    models = start + 0.05 * torch.randn(16, len(start), generator=torch.Generator().manual_seed(1))

    def scores(where: str) -> Scores:
        evaluator = Evaluator(given, objective, torch.device("cpu"))
        evaluator.outputs.keep = 0 if where == "in parts" else evaluator.outputs.keep
        found = evaluator.scores(
            models[:4], dict(enumerate(models)), OneWorker(), {i: i // 4 for i in range(16)}
        )
        assert (evaluator.outputs.tester is not None) == (where == "compiled")
        return found

    compiled, in_parts = scores("compiled"), scores("in parts")
    monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    by_torch = scores("by torch")
    assert given.test is not None
    inputs = given.transform(given.test.inputs, torch.float32)
    layers = objective.chain(start, inputs[:2], given.test.targets[:2], testing=True)
    assert layers is not None
    apart = 2 * max(float(exact_outputs(layers, flat, inputs)[1].max()) for flat in models)
    for found in (in_parts, by_torch):
        for one, other in zip(_tested(compiled), _tested(found), strict=True):
            assert one[0] == other[0]
            assert one[1] == pytest.approx(other[1], rel=32 * U, abs=2**0.5 * apart)


def _tested(scores: Scores) -> list[tuple[float, float]]:
    """Accuracy and loss of each model that was tested."""
    assert list(scores.measures) == ["accuracy", "loss"]
    devices = [tested.test for tested in scores.of_devices.values()]
    assert all(tested.validation == () for tested in scores.of_devices.values())
    return [(v[0], v[1]) for v in (*scores.of_servers, *devices, *scores.of_homes.values())]


class OtherwiseInTests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.flatten(1))
        return out if self.training else out.tanh()


def test_a_module_that_is_a_chain_in_training_only_is_tested_by_torch() -> None:
    objective = Objective(OtherwiseInTests(), functional.cross_entropy)
    example = (
        objective.layout.flatten(OtherwiseInTests(), torch.float32),
        torch.randn(2, 6),
        torch.tensor([0, 1]),
    )
    assert objective.chain(*example) is not None
    assert objective.chain(*example, testing=True) is None


# ------------------------------------------------------------------------------------------------
# in whole runs
@needs_library
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_but_for_rounding(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = train(case, rounds=15)
    monkeypatch.setattr("fedbcd.compute.fused.library", lambda: None)
    by_torch = train(case, rounds=15)
    assert compiled.digest != by_torch.digest, "another way to round"
    assert largest_difference(compiled, by_torch) < 2 * of_run(15)
    assert compiled.summary["clock"] == by_torch.summary["clock"]


@needs_library
def test_samples_may_come_as_bytes_as_numbers_or_by_a_function_of_the_user() -> None:
    """Three ways to the same inputs: all in compiled code, with the same bits."""
    given = federation()
    as_bytes = given.pool
    numbers = fb.Samples(given.transform(as_bytes.inputs, torch.float32), as_bytes.targets)
    digests = set()
    for pool, transform in (
        (as_bytes, given.transform),
        (as_bytes, lambda x, dtype: given.transform(x, dtype)),
        (numbers, None),
    ):
        other = federation()
        other.pool = pool
        if transform is not None:
            other.transform = transform
        else:
            other.transform = fb.Federation(
                lambda: mlp(6, 3),
                functional.cross_entropy,
                [(torch.randn(2, 6), torch.zeros(2).long())],
                1,
            ).transform
        for threads in (1, 2):
            torch.set_num_threads(threads)
            digests.add(
                fb.train(other, fb.FedBCD(batch=8), rounds=5, active=2, evaluate_every=5).digest
            )
    torch.set_num_threads(1)
    assert isinstance(given.transform, Scale)
    assert len(digests) == 1
