"""Partitioners and manifests: what each promises, addressed draws, and the same split on another
machine.
"""

import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from fedbcd.algorithm import draws
from fedbcd.cli import app
from fedbcd.config import dump_toml
from fedbcd.data.datasets import load_dataset
from fedbcd.data.dealing import fill, parts, proportions
from fedbcd.data.manifest import hash_of_indices
from fedbcd.data.partition import (
    IID,
    PARTITIONS,
    Dirichlet,
    Diversity,
    Natural,
    Partition,
    Partitioner,
    QuantitySkew,
    Shards,
    diversity,
)
from fedbcd.data.preview import draw_partition
from fedbcd.errors import ConfigError, DataError
from fedbcd.experiments.job import parse
from support.exploring import examples

EXACT = examples(20)
TARGETS = torch.arange(600) * 7 % 10  # sixty of each label
WRITERS = (np.arange(600) * 13) % 24
KINDS: dict[str, Partitioner] = {
    "diversity": Diversity(labels=3, samples=20),
    "diversity, dealt": Diversity(labels=3, samples=50, dealt=True),
    "dirichlet": Dirichlet(alpha=0.5),
    "dirichlet, samples": Dirichlet(alpha=0.5, samples=30),
    "iid": IID(),
    "iid, samples": IID(samples=30),
    "shards": Shards(per_device=2),
    "quantity-skew, alpha": QuantitySkew(alpha=1.0, minimum=2),
    "quantity-skew, power": QuantitySkew(power=1.0),
    "natural": Natural(WRITERS),
}
DEALT = (
    "diversity, dealt",
    "dirichlet",
    "iid",
    "shards",
    "quantity-skew, alpha",
    "quantity-skew, power",
)
DRAWN = {"diversity": 20, "dirichlet, samples": 30, "iid, samples": 30}


def refusal(call: Callable[[], Any], kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def sizes(split: Partition) -> list[int]:
    return [len(positions) for positions in split.samples]


def same(one: Partition, other: Partition) -> bool:
    return one.labels == other.labels and hash_of_indices(one.samples) == hash_of_indices(
        other.samples
    )


# ------------------------------------------------------------------------------------------------
# all of them
@pytest.mark.parametrize("kind", KINDS)
def test_positions_ascend_without_repeats_and_labels_are_those_of_the_samples(kind: str) -> None:
    split = KINDS[kind].split(TARGETS, 12, seed=3)
    assert len(split.samples) == len(split.labels) == 12
    for positions, labels in zip(split.samples, split.labels, strict=True):
        assert positions.dtype == np.int64
        assert len(positions) > 0
        assert (np.diff(positions) > 0).all()
        assert set(TARGETS[positions].tolist()) <= set(labels)
        assert list(labels) == sorted(labels)


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_is_a_function_of_its_seed_alone(kind: str) -> None:
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    one = KINDS[kind].split(TARGETS, 12, seed=3)
    torch.manual_seed(2)
    assert same(one, KINDS[kind].split(TARGETS.clone(), 12, seed=3))
    assert not same(one, KINDS[kind].split(TARGETS, 12, seed=4))


@pytest.mark.parametrize("kind", DEALT)
def test_a_pool_that_is_dealt_out_goes_to_each_device_once(kind: str) -> None:
    split = KINDS[kind].split(TARGETS, 12, seed=0)
    assert np.sort(np.concatenate(split.samples)).tolist() == list(range(600))


@pytest.mark.parametrize("kind", DRAWN)
def test_where_samples_are_given_every_device_draws_as_many(kind: str) -> None:
    assert sizes(KINDS[kind].split(TARGETS, 50, seed=0)) == [DRAWN[kind]] * 50


@pytest.mark.parametrize(
    ("kind", "devices", "digest"),
    [
        ("diversity", 12, "aedcf20210938ca8"),
        ("diversity, dealt", 12, "1810eab4fd0c3f47"),
        ("dirichlet", 12, "9d0a08c947853724"),
        ("dirichlet, samples", 12, "26f3f97c9c708713"),
        ("iid", 12, "0ca031fe1e3a3e6d"),
        ("iid, samples", 12, "7004c05b4f4536eb"),
        ("shards", 12, "4e90c821c0c1b4a2"),
        ("quantity-skew, alpha", 12, "93967ac26d7c9588"),
        ("quantity-skew, power", 12, "3d204ba6440458f1"),
        ("natural", 12, "7563df93a44f1928"),
    ],
)
def test_the_same_split_on_every_machine(kind: str, devices: int, digest: str) -> None:
    assert hash_of_indices(KINDS[kind].split(TARGETS, devices, seed=0).samples)[:16] == digest


@pytest.mark.parametrize("kind", KINDS)
def test_split_refuses_what_cannot_be_split(kind: str) -> None:
    assert "devices=0 must be 1 or more" in refusal(lambda: KINDS[kind].split(TARGETS, 0, 0))
    assert "one whole-number label per sample" in refusal(
        lambda: KINDS[kind].split(torch.randn(600), 3, 0)
    )
    assert "one whole-number label per sample" in refusal(
        lambda: KINDS[kind].split(torch.zeros(0, dtype=torch.int64), 3, 0)
    )


def test_the_registry_names_them_all() -> None:
    assert list(PARTITIONS) == [
        "diversity",
        "dirichlet",
        "iid",
        "shards",
        "quantity-skew",
        "natural",
    ]
    assert {kind.name for kind in KINDS.values()} == set(PARTITIONS)


@EXACT
@given(
    st.lists(st.integers(0, 4), min_size=30, max_size=90),
    st.integers(1, 12),
    st.integers(-(2**65), 2**65),
    st.data(),
)
def test_any_pool_is_dealt_out_or_refused_by_device(
    labels: list[int], devices: int, seed: int, data: st.DataObject
) -> None:
    kind = data.draw(
        st.sampled_from(
            [Dirichlet(0.3), IID(), Shards(2), QuantitySkew(alpha=0.2), QuantitySkew(power=2.0)]
        )
    )
    try:
        split = kind.split(torch.tensor(labels), devices, seed)
    except DataError:
        assert isinstance(kind, Dirichlet), (
            "only a Dirichlet split of labels can leave a device with nothing"
        )
    else:
        assert np.sort(np.concatenate(split.samples)).tolist() == list(range(len(labels)))
        assert min(sizes(split)) >= 1


# ------------------------------------------------------------------------------------------------
# one by one
def diversity_as_written(
    targets: np.ndarray, devices: int, labels: int, samples: int, seed: int
) -> list[list[int]]:
    """SPEC: "each device draws d of the ten labels, then its samples at random from the training
    images of those labels".
    """
    owned = []
    for device in range(devices):
        names = sorted(
            range(10), key=lambda label: draws.unit_one(seed, draws.LABELS, device, label)
        )[:labels]
        candidates = [k for k in range(len(targets)) if targets[k] in names]
        owned.append(
            sorted(
                sorted(candidates, key=lambda k: draws.unit_one(seed, draws.SAMPLES, device, k))[
                    :samples
                ]
            )
        )
    return owned


def test_the_draws_of_diversity_are_those_of_the_page() -> None:
    split = diversity(TARGETS, devices=5, labels=3, samples=20, seed=11)
    assert [p.tolist() for p in split.samples] == diversity_as_written(
        TARGETS.numpy(), 5, 3, 20, 11
    )
    assert same(split, Diversity(3, 20).split(TARGETS, 5, 11))
    assert {len(labels) for labels in split.labels} == {3}


def test_diversity_owns_its_labels_even_where_no_sample_shows_one() -> None:
    assert {len(labels) for labels in Diversity(3, 1).split(TARGETS, 20).labels} == {3}


def test_diversity_names_the_device_that_cannot_be_served() -> None:
    assert "device 0 should own 121 samples" in refusal(
        lambda: diversity(TARGETS, 3, labels=2, samples=121)
    )
    assert "diversity=11 must be between 1 and the 10 labels" in refusal(
        lambda: diversity(TARGETS, 3, labels=11, samples=5)
    )
    assert "diversity=0 must be" in refusal(lambda: diversity(TARGETS, 3, labels=0, samples=5))


def test_a_small_alpha_gives_few_labels_and_a_large_one_even_shares() -> None:
    targets = torch.arange(20_000) % 10
    skewed, even = (Dirichlet(alpha).split(targets, 20).counts(targets) for alpha in (0.1, 1e6))
    assert np.median((skewed >= 50).sum(1)) <= 3
    assert (abs(even - 100) <= 2).all()
    drawn = Dirichlet(0.1, samples=100).split(targets, 20).counts(targets)
    assert np.median(drawn.max(1)) > 60


def test_dirichlet_names_the_device_that_gets_nothing() -> None:
    said = refusal(lambda: Dirichlet(0.01).split(TARGETS, 100, seed=5))
    assert (
        "of 100 gets no sample from {'name': 'dirichlet', 'alpha': 0.01, 'samples': None} with"
        " seed 5" in said
    )


def test_a_device_that_wants_more_of_a_label_than_there_is_takes_others() -> None:
    split = Dirichlet(0.01, samples=200).split(TARGETS, 5)
    assert sizes(split) == [200] * 5
    assert split.counts(TARGETS).max() == 60
    assert sizes(Dirichlet(0.01, samples=600).split(TARGETS, 2)) == [600, 600]


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 4.0])
def test_proportions_have_the_moments_of_a_dirichlet(alpha: float) -> None:
    """Mean 1/n and variance (n - 1) / (n^2 (n alpha + 1)) of each part."""
    rows, n = 4000, 5
    shares = proportions(0, alpha, rows, n)
    variance = (n - 1) / (n**2 * (n * alpha + 1))
    assert np.allclose(shares.sum(1), 1)
    assert (abs(shares.mean(0) - 1 / n) < 5 * (variance / rows) ** 0.5).all()
    assert np.allclose(shares.var(0), variance, rtol=0.15)


def test_proportions_survive_alphas_at_which_gamma_variates_vanish() -> None:
    for alpha in (1e-4, 1e8):
        shares = proportions(0, alpha, 50, 10)
        assert np.isfinite(shares).all()
        assert np.allclose(shares.sum(1), 1)


def test_iid_parts_differ_by_one_at_most() -> None:
    assert set(sizes(IID().split(TARGETS, 7))) == {85, 86}


def test_shards_give_a_device_at_most_its_number_of_labels() -> None:
    """600 samples, 20 shards of 30: each shard lies within one label of 60."""
    split = Shards(2).split(TARGETS, 10)
    assert sizes(split) == [60] * 10
    assert max(len(labels) for labels in split.labels) <= 2


def test_quantity_skew_is_uneven_in_size_and_never_below_its_minimum() -> None:
    zipf = sorted(sizes(QuantitySkew(power=1.0, minimum=5).split(TARGETS, 10)), reverse=True)
    expected = [5 + 550 / (k + 1) / sum(1 / (j + 1) for j in range(10)) for k in range(10)]
    assert np.allclose(zipf, expected, atol=1)
    assert min(sizes(QuantitySkew(alpha=0.05, minimum=5).split(TARGETS, 10))) == 5
    ranks = [
        int(np.argmax(sizes(QuantitySkew(power=1.0).split(TARGETS, 10, seed)))) for seed in range(5)
    ]
    assert len(set(ranks)) > 1, "which device is the largest is drawn, too"


def test_natural_gives_each_writer_a_device() -> None:
    split = Natural(WRITERS).split(TARGETS, 24, seed=9)
    assert [set(WRITERS[positions]) for positions in split.samples] == [{k} for k in range(24)]
    assert sum(sizes(split)) == 600


def test_natural_draws_among_more_writers_than_devices() -> None:
    chosen = [
        tuple(int(WRITERS[p[0]]) for p in Natural(WRITERS).split(TARGETS, 5, seed).samples)
        for seed in range(6)
    ]
    assert all(len(set(owners)) == 5 for owners in chosen)
    assert len(set(chosen)) > 1


def test_natural_takes_a_column_by_name_or_as_numbers_of_any_kind() -> None:
    by_numbers = Natural(WRITERS).split(TARGETS, 24)
    columns = {"writer": torch.from_numpy(WRITERS)}
    assert same(by_numbers, Natural("writer").split(TARGETS, 24, columns=columns))
    assert same(by_numbers, Natural(torch.from_numpy(WRITERS) - 1000).split(TARGETS, 24))
    assert "no column 'author'; its columns are: writer" in refusal(
        lambda: Natural("author").split(TARGETS, 3, columns=columns)
    )
    assert "only 24 different values" in refusal(lambda: Natural(WRITERS).split(TARGETS, 25))
    assert "there are 600 samples" in refusal(lambda: Natural(WRITERS[:-1]).split(TARGETS, 3))
    assert "one whole number per sample" in refusal(lambda: Natural(WRITERS / 2))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Dirichlet(0.0), "alpha=0.0 must be a finite number above 0"),
        (lambda: Dirichlet(float("nan")), "alpha=nan"),
        (lambda: Dirichlet(1.0, samples=0), "samples=0 must be 1 or more"),
        (lambda: IID(samples=-1), "samples=-1 must be 1 or more"),
        (lambda: Shards(0), "per_device=0 must be 1 or more"),
        (lambda: QuantitySkew(), "needs one of alpha and power"),
        (lambda: QuantitySkew(alpha=1.0, power=1.0), "needs one of alpha and power"),
        (lambda: QuantitySkew(alpha=-1.0), "alpha=-1.0"),
        (lambda: QuantitySkew(power=-1.0), "power=-1.0 must be a finite number from 0 up"),
        (lambda: QuantitySkew(power=1.0, minimum=0), "minimum=0 must be 1 or more"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], Partitioner], sentence: str) -> None:
    assert sentence in refusal(make, ConfigError)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (IID(), "of 601 gets no sample"),
        (IID(samples=601), "samples=601 exceeds the 600 samples"),
        (Dirichlet(1.0, samples=601), "samples=601 exceeds the 600 samples"),
        (Shards(1), "601 devices with 1 shards each need 601 samples"),
        (QuantitySkew(power=0.0), "601 devices with 1 samples or more need 601"),
    ],
)
def test_more_than_there_is_is_refused(kind: Partitioner, sentence: str) -> None:
    assert sentence in refusal(lambda: kind.split(TARGETS, 601, 0))


@EXACT
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 0),
    st.integers(0, 10**6),
)
def test_parts_sum_to_the_total_and_are_in_proportion(weights: list[float], total: int) -> None:
    w = np.array(weights)
    counts = parts(w, total)
    assert counts.sum() == total
    assert (abs(counts - w / w.sum() * total) <= 1 + 1e-9 * total).all()


@EXACT
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=10), st.data())
def test_fill_never_exceeds_the_room(pairs: list[tuple[float, int]], data: st.DataObject) -> None:
    weights, room = np.array([w for w, _ in pairs]), np.array([r for _, r in pairs])
    total = data.draw(st.integers(0, int(room.sum())))
    counts = fill(weights, total, room)
    assert counts.sum() == total
    assert (counts <= room).all()
    assert (counts >= 0).all()


# ------------------------------------------------------------------------------------------------
# manifests
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_gives_the_same_split(kind: str, tmp_path: Path) -> None:
    split = KINDS[kind].split(TARGETS, 12, seed=3)
    split.save(tmp_path / "new" / "manifest.json")
    loaded = Partition.load(str(tmp_path / "new" / "manifest.json"), TARGETS)
    assert same(split, loaded)
    assert loaded.origin == split.origin
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (
        tmp_path / "new" / "manifest.json"
    ).read_bytes()
    assert sorted(p.name for p in tmp_path.rglob("*.json*")) == ["again.json", "manifest.json"]


def test_a_manifest_says_how_it_was_made(tmp_path: Path) -> None:
    Dirichlet(0.5).split(TARGETS, 12, seed=3).save(tmp_path / "m.json")
    table = json.loads((tmp_path / "m.json").read_text())
    assert table["partitioner"] == {"name": "dirichlet", "alpha": 0.5, "samples": None}
    assert (table["seed"], table["targets"], len(table["devices"])) == (3, 600, 12)
    assert list(table["devices"][5]) == ["device", "labels", "indices"]
    by_hand = Natural(WRITERS).split(TARGETS, 3)
    assert by_hand.origin is not None
    assert str(by_hand.origin.partitioner["column"]).startswith("sha256 ")


def test_a_manifest_of_another_data_set_is_refused(tmp_path: Path) -> None:
    IID().split(TARGETS, 4).save(tmp_path / "m.json")
    other = TARGETS.clone()
    other[17] = 0
    said = refusal(lambda: Partition.load(tmp_path / "m.json", other))
    assert f"{tmp_path / 'm.json'} splits another data set" in said
    assert "splits another data set: 600 targets" in refusal(
        lambda: Partition.load(tmp_path / "m.json", TARGETS[:-1])
    )


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "an index": lambda t: t["devices"][0]["indices"].__setitem__(0, 599),
    "a label": lambda t: t["devices"][0]["labels"].append(11),
    "the seed": lambda t: t.update(seed=8),
    "the settings": lambda t: t["partitioner"].update(alpha=2.0),
    "a device": lambda t: t["devices"].pop(),
    "the order of devices": lambda t: t["devices"].reverse(),
    "no hash": lambda t: t.pop("sha256"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    Dirichlet(0.5).split(TARGETS, 12).save(path)
    table = json.loads(path.read_text())
    EDITS[edit](table)
    path.write_text(json.dumps(table))
    assert f"{path} was edited or damaged" in refusal(lambda: Partition.load(path, TARGETS))


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json", '{"format": "fedbcd partition 99"}'])
def test_what_is_no_manifest_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    assert f"{tmp_path / 'm.json'} is not a manifest" in refusal(
        lambda: Partition.load(tmp_path / "m.json", TARGETS)
    )


def test_manifests_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    assert f"cannot read {tmp_path / 'none.json'}" in refusal(
        lambda: Partition.load(tmp_path / "none.json", TARGETS)
    )
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(
        lambda: IID().split(TARGETS, 3).save(tmp_path / "file" / "m.json")
    )


def test_a_partition_by_hand_can_be_saved_once_it_knows_its_data(tmp_path: Path) -> None:
    positions = [np.array([0, 10]), np.array([1, 2, 3])]
    assert "Partition.of(targets, samples)" in refusal(
        lambda: Partition(tuple(positions), ((0,), (1,))).save(tmp_path / "m.json")
    )
    split = Partition.of(TARGETS, positions)
    split.save(tmp_path / "m.json")
    assert same(split, Partition.load(tmp_path / "m.json", TARGETS))
    assert split.labels == ((0,), (1, 4, 7))
    assert "device 1 owns a sample outside 0 .. 599" in refusal(
        lambda: Partition.of(TARGETS, [np.array([0]), np.array([600])])
    )
    assert "device 0 has no samples" in refusal(
        lambda: Partition.of(TARGETS, [np.array([], dtype=np.int64)])
    )


# ------------------------------------------------------------------------------------------------
# pictures and jobs
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    split = Dirichlet(0.5).split(TARGETS, 12)
    assert split.counts(TARGETS).shape == (12, 10)
    assert split.counts(TARGETS).sum() == 600
    assert draw_partition(split, TARGETS, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def job(**data: Any) -> Any:
    return parse({"data": data, "federation": {"servers": 2, "devices": 6}, "run": {"rounds": 3}})[
        0
    ]


@pytest.mark.parametrize("name", ["dirichlet", "iid", "shards", "quantity-skew", "diversity"])
def test_a_job_names_its_partition_and_writes_it_down(name: str) -> None:
    given_settings = {
        "dirichlet": {"alpha": 1},
        "quantity-skew": {"power": 1.0},
        "diversity": {"labels": 2, "samples": 30},
    }.get(name, {})
    made = job(partition={"name": name, **given_settings})
    targets = load_dataset("digits").train.targets
    expected = PARTITIONS[name](**given_settings).split(targets, 12, 0)
    assert made.make_federation().sizes == sizes(expected)
    table = json.loads(json.dumps(made.to_table()))
    assert table["data"]["partition"]["name"] == name
    assert parse(tomllib.loads(dump_toml(table)))[0].data == made.data


def test_a_job_without_a_partition_is_split_as_before() -> None:
    expected = diversity(load_dataset("digits").train.targets, 12, 4, 30, seed=0)
    federation = job(diversity=4, samples=30).make_federation()
    assert [federation.owned(k).tolist() for k in range(12)] == [
        p.tolist() for p in expected.samples
    ]


def test_a_job_takes_its_split_from_a_manifest_whatever_its_seed(tmp_path: Path) -> None:
    split = Shards(1).split(load_dataset("digits").train.targets, 12, seed=77)
    split.save(tmp_path / "m.json")
    federation = job(manifest=str(tmp_path / "m.json")).make_federation()
    assert [federation.owned(k).tolist() for k in range(12)] == [p.tolist() for p in split.samples]
    wrong = parse({"data": {"manifest": str(tmp_path / "m.json")}, "run": {"rounds": 3}})[0]
    assert "is of 12 devices, but [federation] has 100" in refusal(
        wrong.make_federation, ConfigError
    )


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"partition": {"name": "dirichlett"}}, "did you mean 'dirichlet'?"),
        ({"partition": {"name": "dirichlet"}}, "[data.partition] needs alpha"),
        ({"partition": {"name": "dirichlet", "alfa": 1}}, "did you mean 'alpha'?"),
        (
            {"partition": {"name": "dirichlet", "alpha": "much"}},
            "data.partition.alpha = 'much' must be a number",
        ),
        ({"partition": {"name": "dirichlet", "alpha": -1}}, "alpha=-1.0 must be"),
        ({"partition": {}}, "[data.partition] needs a name"),
        ({"partition": {"name": "iid"}, "manifest": "m.json"}, "both a partition and manifest"),
    ],
)
def test_impossible_partitions_in_a_job_are_refused(data: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(lambda: job(**data), ConfigError)


def test_a_job_splits_by_a_column_of_its_data_set(tmp_path: Path) -> None:
    """Fifteen writers in a Parquet file, twelve devices: each device is one writer."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    file = io.BytesIO()
    Image.new("L", (2, 2), 9).save(file, "PNG")
    writers = [f"w{k % 15:02d}" for k in range(60)]
    table = pyarrow.table(
        {
            "image": [{"bytes": file.getvalue()}] * 60,
            "label": [k % 4 for k in range(60)],
            "writer": writers,
        }
    )
    for part in ("train", "test"):
        parquet.write_table(table, tmp_path / f"{part}-0.parquet")
    federation = job(
        name="parquet", folder=str(tmp_path), partition={"name": "natural", "column": "writer"}
    ).make_federation()
    owners = [{writers[k] for k in federation.owned(device).tolist()} for device in range(12)]
    assert all(len(owner) == 1 for owner in owners)
    assert len(set.union(*owners)) == 12


def test_a_job_that_splits_by_a_column_that_is_not_there_is_refused() -> None:
    made = job(partition={"name": "natural", "column": "writer"})
    assert "no column 'writer'; its columns are: none" in refusal(made.make_federation)


# ------------------------------------------------------------------------------------------------
# the command line
def show(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", "show", "digits", *arguments])


def test_show_saves_a_split_that_a_job_can_use(tmp_path: Path) -> None:
    result = show(
        "--partition",
        "dirichlet alpha=0.8",
        "--devices",
        "12",
        "--seed",
        "4",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "partition.png"]
    expected = Dirichlet(0.8).split(load_dataset("digits").train.targets, 12, 4)
    assert job(manifest=str(tmp_path / "manifest.json")).make_federation().sizes == sizes(expected)
    again = show("--manifest", str(tmp_path / "manifest.json"), "--json")
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["partition"]["indices_sha256"] == hash_of_indices(expected.samples)
    assert (summary["train"], summary["classes"], summary["partition"]["used"]) == (1198, 10, 1198)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--partition", "irid"), "did you mean 'iid'?"),
        (("--partition", ""), "partition.name = '' is unknown"),
        (("--partition", "shards per=2"), "unknown key 'per'"),
        (("--partition", "shards per_device=two"), "per_device = 'two' must be a whole number"),
        (("--out", "x"), "--out saves a split; say which"),
        (("--partition", "iid", "--manifest", "m.json"), "give one of them"),
    ],
)
def test_show_refuses_what_makes_no_sense(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in str(show(*arguments).exception)
