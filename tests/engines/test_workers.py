"""Several workers on one machine: the same bits, whoever does what, and errors come back."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

import fedbcd as fb
from fedbcd.compute import batch
from fedbcd.compute.workers import workers
from fedbcd.errors import NumericalError
from support.runs import CASES, MLP, federation, train

both_ways = pytest.mark.usefixtures("both_ways")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of this size at a time, so that there are many parts to share."""
    monkeypatch.setattr(batch, "CACHED_PARAMETERS", 2 * 910)


@both_ways
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_the_number_of_workers(case: str) -> None:
    digests, histories = set(), set()
    for count in (1, 3):
        torch.set_num_threads(count)
        run = train(case, rounds=6, evaluate_every=2)
        digests.add(run.digest)
        histories.add(repr(list(run.history)))
        assert torch.get_num_threads() == count, "torch's own threads are back"
    assert len(digests) == len(histories) == 1


@both_ways
@pytest.mark.usefixtures("_small_parts")
def test_parts_that_fit_the_cache_agree_with_one_device_at_a_time() -> None:
    alone = train("fedbcd-sync", rounds=10, dtype=torch.float64, max_batch=1)
    torch.set_num_threads(2)
    parts = train("fedbcd-sync", rounds=10, dtype=torch.float64)
    torch.testing.assert_close(parts.personal_NF, alone.personal_NF, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.global_VF, alone.global_VF, rtol=0, atol=1e-12)


@both_ways
@pytest.mark.usefixtures("_small_parts")
def test_batch_norm_is_safe_in_several_workers() -> None:
    def model() -> nn.Module:  # made anew, from the run's seed
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
        )

    digests = set()
    for count in (1, 3):
        torch.set_num_threads(count)
        digests.add(train("fedbcd-async", rounds=6, model=model).digest)
    assert len(digests) == 1


@both_ways
@pytest.mark.filterwarnings("ignore::fedbcd.errors.DivergenceWarning")
@pytest.mark.usefixtures("_small_parts")
def test_an_error_in_a_worker_is_the_users_error() -> None:
    torch.set_num_threads(3)
    with pytest.raises(NumericalError, match=r"use a smaller device_step \(now 1e\+30\)"):
        fb.train(
            federation(MLP),
            fb.FedBCD(device_step=1e30, projection=fb.NoProjection()),
            rounds=10,
            active=2,
        )
    assert torch.get_num_threads() == 3


def test_one_worker_needs_no_thread() -> None:
    with workers(1) as one:
        assert list(one.map(lambda a, b: a + b, [1, 2], [3, 4])) == [4, 6]


# ------------------------------------------------------------------------------------------------
# looks
def test_by_default_looks_are_so_far_apart_that_training_dominates() -> None:
    """A look costs little here, so it is the bound of 20 looks that spaces them: 10 rounds of
    200.
    """
    run = train("fedbcd-sync", rounds=200)
    rounds = [row.round for row in run.history]
    assert rounds[0] == 0
    assert rounds[-1] == 200
    assert 6 <= len(rounds) <= 22
    assert all(b - a >= 10 for a, b in pairwise(rounds[:-1])), "20 looks at most"


def test_with_much_to_test_and_little_to_train_there_are_four_looks() -> None:
    large = federation()
    assert large.test is not None
    large.test = fb.Samples(
        torch.cat([large.test.inputs] * 50), torch.cat([large.test.targets] * 50)
    )
    run = fb.train(large, fb.FedBCD(batch=1, steps=(1, 1)), rounds=25, active=1)
    assert [row.round for row in run.history] == [0, 7, 14, 21, 25]


def test_a_number_of_looks_that_was_asked_for_is_kept() -> None:
    assert [row.round for row in train("fedbcd-sync", rounds=12, looks=6).history] == [
        0,
        2,
        4,
        6,
        8,
        10,
        12,
    ]
