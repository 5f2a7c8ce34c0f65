"""Diversity dealt out: exactly so many labels and samples per device, and each sample to one device
at most; or a sentence on what runs out.
"""

import itertools
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

import fedbcd as fb
from fedbcd.data.dealing import deal_counts
from fedbcd.data.manifest import hash_of_indices
from fedbcd.errors import ConfigError, DataError
from fedbcd.experiments.job import Job, parse
from fedbcd.experiments.pool import job_key, without_none
from support.exploring import examples
from support.runs import fedbcd, job_table

TARGETS = torch.arange(600) * 7 % 10  # sixty of each label
MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def dealt(targets: torch.Tensor, devices: int, labels: int, samples: int, seed: int = 0):
    return fb.diversity(targets, devices, labels, samples, seed, dealt=True)


def can_be(room: tuple[int, ...], devices: int, labels: int, samples: int) -> bool:
    """By trying everything: what is left of each label, device after device."""
    shares = [
        share
        for share in itertools.product(range(samples + 1), repeat=len(room))
        if sum(share) == samples and sum(map(bool, share)) == labels
    ]
    left = {room}
    for _ in range(devices):
        left = {
            tuple(sorted(after))
            for before in left
            for share in shares
            if min(after := [a - b for a, b in zip(before, share, strict=True)]) >= 0
        }
    return bool(left)


@examples(30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_a_deal_is_exact_and_is_refused_only_where_there_is_none(
    room: list[int], devices: int, labels: int, samples: int, seed: int
) -> None:
    labels = min(labels, len(room))
    of_label = dict(enumerate(room))
    if not can_be(tuple(room), devices, labels, samples):
        with pytest.raises(DataError):
            deal_counts(of_label, devices, labels, samples, seed)
        return
    try:
        counts = deal_counts(of_label, devices, labels, samples, seed)
    except DataError:
        assume(devices * samples < sum(room))  # it may miss one that takes the very last sample
        raise
    assert (counts.sum(axis=1) == samples).all()
    assert ((counts > 0).sum(axis=1) == labels).all()
    assert (counts.sum(axis=0) <= room).all()


@examples(15)
@given(
    st.lists(st.integers(0, 4), min_size=40, max_size=120),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(-(2**63), 2**63 - 1),
)
def test_every_sample_goes_to_one_device_at_most(
    targets: list[int], devices: int, labels: int, samples: int, seed: int
) -> None:
    try:
        split = dealt(torch.tensor(targets), devices, labels, samples, seed)
    except DataError:
        return
    everything = np.concatenate(split.samples)
    assert len(np.unique(everything)) == len(everything) == devices * samples
    assert {len(own) for own in split.samples} == {samples}
    for own, mine in zip(split.samples, split.labels, strict=True):
        assert {targets[k] for k in own} == set(mine)
        assert len(mine) == labels


def test_shares_are_even_where_they_can_be() -> None:
    split = dealt(TARGETS, 12, 3, 30)  # 360 of 600: there is room
    assert {tuple(sorted(Counter(TARGETS[own].tolist()).values())) for own in split.samples} == {
        (10, 10, 10)
    }


def test_labels_are_drawn_and_not_dealt_in_turn() -> None:
    owned = Counter(dealt(TARGETS, 60, 3, 10).labels)
    assert len(owned) > 30  # of 120 sets of three labels


def test_the_same_deal_on_every_machine() -> None:
    assert hash_of_indices(dealt(TARGETS, 12, 3, 50).samples)[:16] == "1810eab4fd0c3f47"
    assert dealt(TARGETS, 12, 3, 50, seed=1).labels != dealt(TARGETS, 12, 3, 50).labels


@pytest.mark.parametrize(
    ("devices", "labels", "samples", "says"),
    [
        (12, 3, 60, "12 devices with 60 samples each need 720, but there are only 600"),
        (12, 3, 2, "samples=2 are too few for 3 labels; use samples >= 3"),
        (11, 1, 50, "label 0 runs out, of which there are 60 samples for 2 devices"),
        (3, 0, 5, "diversity=0 must be between 1 and the 10 labels"),
    ],
)
def test_what_cannot_be_dealt_is_said(devices: int, labels: int, samples: int, says: str) -> None:
    with pytest.raises(DataError) as caught:
        dealt(TARGETS, devices, labels, samples)
    assert says in str(caught.value)


def test_a_rare_label_is_named() -> None:
    targets = torch.tensor([4] * 50 + [7] * 50 + [9] * 2)
    with pytest.raises(
        DataError, match=r"label 9 .* there are 2 samples, so that at most 2 devices"
    ):
        dealt(targets, 5, 3, 10)


@pytest.mark.skipif(not MNIST.exists(), reason="MNIST is not at hand")
@pytest.mark.parametrize("labels", [3, 6])
def test_all_of_mnist_is_dealt_to_100_devices_in_a_second(labels: int) -> None:
    targets = fb.load_dataset("mnist", MNIST.parent).train.targets
    began = time.process_time()
    split = dealt(targets, 100, labels, 600)
    assert time.process_time() - began < 1
    assert np.sort(np.concatenate(split.samples)).tolist() == list(range(60_000))
    assert {len(mine) for mine in split.labels} == {labels}


# ------------------------------------------------------------------------------------------------
# in job files and on the command line
def split_of(**data: object) -> Job:
    return parse(job_table(**{f"data.{key}": value for key, value in data.items()}))[0]


def test_a_job_file_asks_for_it_in_two_ways() -> None:
    short = split_of(dealt=True)
    long = split_of(
        partition={"name": "diversity", "labels": 3, "samples": 20, "dealt": True},
    )
    one, other = (job.make_federation() for job in (short, long))
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != split_of().make_federation().fingerprint()
    assert parse(without_none(short.to_table()))[0].data == short.data


def test_two_splits_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="dealt = true is about diversity and samples"):
        split_of(dealt=True, partition={"name": "iid"})


def test_keys_and_manifests_of_drawn_splits_are_as_before() -> None:
    drawn = split_of(partition={"name": "diversity", "labels": 3, "samples": 20})
    assert job_key(split_of(dealt=False)) == job_key(split_of())
    assert job_key(split_of(dealt=True)) != job_key(split_of())
    named = split_of(
        partition={"name": "diversity", "labels": 3, "samples": 20, "dealt": False},
    )
    assert job_key(named) == job_key(drawn)
    origin = fb.diversity(TARGETS, 4, 3, 20).origin
    assert origin is not None
    assert origin.partitioner == {"name": "diversity", "labels": 3, "samples": 20}
    origin = dealt(TARGETS, 4, 3, 20).origin
    assert origin is not None
    assert origin.partitioner["dealt"] is True


def test_data_show_deals(tmp_path: Path) -> None:
    answer = fedbcd(
        *("data", "show", "digits", "--devices", "10", "--json"),
        *("--partition", "diversity labels=3 samples=100 dealt=true"),
    )
    assert answer.summary["partition"]["used"] == 1000
