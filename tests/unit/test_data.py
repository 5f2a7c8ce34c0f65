"""Data: what ships, what is read from disk, how it is split (diversity d), and federations made of
all kinds of inputs.
"""

import gzip
import math
import struct
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fedbcd as fb
from fedbcd.algorithm import draws
from fedbcd.data.datasets import Scale
from fedbcd.errors import ConfigError, DataError
from support.exploring import examples

EXACT = examples(15)


# ------------------------------------------------------------------------------------------------
# the digits
def test_the_digits_ship_with_the_package() -> None:
    digits = fb.load_dataset("digits")
    assert (len(digits.train), len(digits.test), digits.classes) == (1198, 599, 10)
    labels = torch.cat([digits.train.targets, digits.test.targets])
    assert len(labels) == 1797
    assert set(labels.tolist()) == set(range(10))
    assert digits.train.inputs.shape[1:] == (8, 8)
    assert digits.train.inputs.dtype == torch.uint8
    assert (int(digits.train.inputs.min()), int(digits.train.inputs.max())) == (0, 16)


def test_both_parts_of_the_digits_have_every_label_about_evenly() -> None:
    digits = fb.load_dataset("digits")
    for part in (digits.train, digits.test):
        counts = torch.bincount(part.targets, minlength=10)
        assert int(counts.min()) > 0.7 * len(part) / 10


def test_the_digits_come_with_their_attribution() -> None:
    """The licence of the digits asks for it."""
    text = (files("fedbcd.data") / "DIGITS.md").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text


def test_the_transform_maps_the_digits_to_minus_one_to_one() -> None:
    digits = fb.load_dataset("digits")
    ready = digits.transform(digits.train.inputs, torch.float64)
    assert ready.dtype == torch.float64
    assert (float(ready.min()), float(ready.max())) == (-1.0, 1.0)


def test_scale_is_value_by_divisor_less_mean_by_deviation() -> None:
    """SPEC, Experiments: MNIST input is (v/255 - 0.1307)/0.3081."""
    ready = Scale(255.0, 0.1307, 0.3081)(torch.tensor([0, 255], dtype=torch.uint8), torch.float64)
    assert ready.tolist() == pytest.approx([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081])


def test_an_unknown_data_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"unknown data set 'digitz'.*digits.*mnist"):
        fb.load_dataset("digitz")


# ------------------------------------------------------------------------------------------------
# IDX files
NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]
RAW_IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
RAW_LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)


def idx(values: np.ndarray, kind: int = 8) -> bytes:
    """An IDX file: two zero bytes, the type, the number of axes, their lengths, the values."""
    return (
        bytes([0, 0, kind, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


def contents() -> dict[str, bytes]:
    small = (RAW_IMAGES[:2], RAW_LABELS[:2])
    return dict(zip(NAMES, map(idx, (RAW_IMAGES, RAW_LABELS, *small)), strict=True))


def write_set(
    folder: Path, replaced: dict[str, bytes | None] | None = None, zipped: bool = False
) -> Path:
    """Four files; `replaced` gives some another content, or leaves them out (None)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in {**contents(), **(replaced or {})}.items():
        if data is not None:
            (folder / f"{name}{'.gz' if zipped else ''}").write_bytes(
                gzip.compress(data) if zipped else data
            )
    return folder


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_idx_files_are_read_plain_or_gzipped_here_or_in_mnist_raw(
    tmp_path: Path, place: str, zipped: bool
) -> None:
    write_set(tmp_path / place, zipped=zipped)
    data = fb.load_dataset("mnist", tmp_path)
    assert torch.equal(data.train.inputs, torch.from_numpy(RAW_IMAGES))
    assert data.train.targets.tolist() == RAW_LABELS.tolist()
    assert data.train.targets.dtype == torch.int64
    assert (len(data.test), data.classes) == (2, 10)
    assert data.transform == Scale(255.0, 0.1307, 0.3081)


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBCD_DATA", str(write_set(tmp_path)))
    assert len(fb.load_dataset("mnist").train) == 5


def test_without_a_folder_the_complaint_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDBCD_DATA", raising=False)
    with pytest.raises(DataError, match=r"mnist does not ship .*FEDBCD_DATA=DIR"):
        fb.load_dataset("mnist")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 3, 4, 7, 8, -1])
def test_a_file_that_is_cut_short_is_refused_by_its_name(
    tmp_path: Path, name: str, cut: int
) -> None:
    write_set(tmp_path, {name: contents()[name][:cut]})
    with pytest.raises(DataError, match=name):
        fb.load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b"\x00",  # one value too many
        lambda data: b"\x00\x00\x0d" + data[3:],  # floats, not bytes
        lambda data: b"PK\x03\x04" + data,
        lambda data: data[:3] + bytes([9]) + data[4:],  # nine axes
        lambda data: data[:4] + b"\xff\xff\xff\xff" + data[8:],  # four thousand million samples
    ],
    ids=["longer", "floats", "zip", "axes", "count"],
)
def test_a_file_that_is_no_such_idx_file_is_refused_by_its_name(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    write_set(tmp_path, {name: damage(contents()[name])})
    with pytest.raises(DataError, match=name):
        fb.load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 12, 40, -4])
def test_a_gzip_file_that_is_cut_short_is_refused_by_its_name(tmp_path: Path, cut: int) -> None:
    write_set(tmp_path, zipped=True)
    path = tmp_path / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=NAMES[0]):
        fb.load_dataset("mnist", tmp_path)


def test_a_damaged_gzip_file_is_refused_by_its_name_wherever_the_damage_is(tmp_path: Path) -> None:
    """Every kind of damage that gzip can notice: header, deflate stream, checksum."""
    write_set(tmp_path, zipped=True)
    path = tmp_path / f"{NAMES[1]}.gz"
    whole = bytearray(path.read_bytes())
    for place in range(len(whole)):
        if place in (4, 5, 6, 7, 8, 9):
            continue  # time stamp and system: not part of the content
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=NAMES[1]):
            fb.load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_set(tmp_path, {name: None})
    with pytest.raises(DataError, match=name):
        fb.load_dataset("mnist", tmp_path)


@pytest.mark.parametrize("name", [NAMES[1], NAMES[3]])
def test_as_many_labels_as_images(tmp_path: Path, name: str) -> None:
    write_set(tmp_path, {name: idx(RAW_LABELS[:3])})
    with pytest.raises(DataError, match=name):
        fb.load_dataset("mnist", tmp_path)


def test_labels_in_the_place_of_images_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, {NAMES[0]: contents()[NAMES[1]]})
    with pytest.raises(DataError, match=NAMES[0]):
        fb.load_dataset("mnist", tmp_path)


# ------------------------------------------------------------------------------------------------
# diversity d
def pool_of(count: int = 300, labels: int = 10) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, labels, count))


@EXACT
@given(
    devices=st.integers(1, 12),
    labels=st.integers(1, 10),
    samples=st.integers(1, 15),
    seed=st.integers(0, 2**31),
)
def test_each_device_owns_exactly_d_labels_and_no_sample_twice(
    devices: int, labels: int, samples: int, seed: int
) -> None:
    """SPEC, Experiments: 'each device draws d of the ten labels, then its samples at random ... (no
    repeats within a device)'.
    """
    targets = pool_of()
    partition = fb.diversity(targets, devices, labels, samples, seed)
    assert len(partition.samples) == len(partition.labels) == devices
    for positions, mine in zip(partition.samples, partition.labels, strict=True):
        assert len(set(mine)) == labels
        assert len(positions) == samples
        assert np.unique(positions).size == samples
        assert set(targets[torch.from_numpy(positions)].tolist()) <= set(mine)


def test_a_partition_is_a_function_of_its_arguments() -> None:
    one, again, other = (fb.diversity(pool_of(), 8, 3, 20, seed) for seed in (4, 4, 5))
    assert one.labels == again.labels
    assert all(np.array_equal(a, b) for a, b in zip(one.samples, again.samples, strict=True))
    assert one.labels != other.labels
    assert any(not np.array_equal(a, b) for a, b in zip(one.samples, other.samples, strict=True))


def test_a_device_owns_the_same_whoever_else_there_is() -> None:
    """Addressed draws: device 3 of 5 owns what device 3 of 50 owns."""
    few, many = (fb.diversity(pool_of(), devices, 3, 20, 1) for devices in (5, 50))
    assert few.labels == many.labels[:5]
    assert all(np.array_equal(a, b) for a, b in zip(few.samples, many.samples[:5], strict=True))


def test_the_split_is_the_one_of_the_determinism_page() -> None:
    """docs/determinism.md, streams LABELS and SAMPLES: those with the smallest unit(h)."""
    targets, seed = pool_of(), 9
    partition = fb.diversity(targets, 2, 3, 10, seed)
    for device in range(2):
        labels = sorted(
            sorted(range(10), key=lambda v: draws.unit_one(seed, draws.LABELS, device, v))[:3]
        )
        candidates = [k for k, target in enumerate(targets.tolist()) if target in labels]
        samples = sorted(
            sorted(candidates, key=lambda k: draws.unit_one(seed, draws.SAMPLES, device, k))[:10]
        )
        assert list(partition.labels[device]) == labels
        assert partition.samples[device].tolist() == samples


def test_labels_and_samples_are_drawn_evenly() -> None:
    partition = fb.diversity(pool_of(), 1000, 3, 10, 0)
    counts = np.bincount([label for mine in partition.labels for label in mine], minlength=10)
    assert counts.sum() == 3000
    assert abs(counts - 300).max() < 6 * (1000 * 0.3 * 0.7) ** 0.5
    assert np.unique(np.concatenate(partition.samples)).size == 300, (
        "two devices may share a sample, and all are used"
    )


def test_more_samples_than_there_are_is_refused_with_the_number_there_are() -> None:
    targets = torch.tensor([0] * 5 + [1] * 7)
    with pytest.raises(
        DataError,
        match=(
            r"device \d should own 8 samples of labels \[\d\], but there are only \d; use samples"
            r" <= \d"
        ),
    ):
        fb.diversity(targets, 3, 1, 8)
    assert len(fb.diversity(targets, 3, 2, 12).samples[0]) == 12


@pytest.mark.parametrize("labels", [0, -1, 11])
def test_a_diversity_beyond_the_labels_is_refused(labels: int) -> None:
    with pytest.raises(DataError, match=f"diversity={labels} must be between 1 and the 10 labels"):
        fb.diversity(pool_of(), 2, labels, 5)


@pytest.mark.parametrize("samples", [0, -1])
def test_less_than_one_sample_per_device_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples={samples} must be 1 or more"):
        fb.diversity(pool_of(), 2, 3, samples)


# ------------------------------------------------------------------------------------------------
# federations
class Pairs(Dataset[tuple[Tensor, int]]):
    """A Dataset of (input, target), as torch wants it."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index])


def model() -> nn.Module:
    return nn.Linear(3, 2)


def data(device: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(device)
    return torch.randn(size, 3, generator=generator), torch.arange(size) % 2


def federation(devices: list[Any], servers: Any = 1, **more: Any) -> fb.Federation:
    return fb.Federation(model, F.cross_entropy, devices, servers, **more)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "dataset": Pairs,
    "tensor dataset": TensorDataset,
    "samples": fb.Samples,
    "list of pairs": lambda x, y: [(x[k], y[k]) for k in range(len(x))],
}


@pytest.mark.parametrize("form", FORMS)
def test_data_may_come_in_any_usual_form(form: str) -> None:
    """The same data in any form are the same federation."""
    expected = federation([data(0), data(1, size=2)], test=data(2))
    made = federation(
        [FORMS[form](*data(0)), FORMS[form](*data(1, size=2))], test=FORMS[form](*data(2))
    )
    assert made.fingerprint() == expected.fingerprint()
    assert made.sizes == [4, 2]
    assert made.devices == 2
    assert made.labels == [(0, 1), (0, 1)]
    assert torch.equal(made.pool.take(made.owned(1))[0], data(1, size=2)[0])
    assert torch.equal(made.pool.take(made.owned(0))[1], data(0)[1])


def test_a_partition_owns_positions_of_one_pool() -> None:
    pool = fb.Samples(torch.arange(30.0).reshape(10, 3), torch.arange(10) % 2)
    partition = fb.diversity(pool.targets, 3, 1, 4, seed=2)
    made = fb.Federation.from_partition(model, F.cross_entropy, pool, partition, 3)
    assert made.pool is pool
    assert made.labels == partition.labels
    for device in range(3):
        assert made.owned(device).tolist() == partition.samples[device].tolist()


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1], [2, 3, 4]]),
        (5, [[0], [1], [2], [3], [4]]),
        ([[4, 0], [1, 3, 2]], [[4, 0], [1, 3, 2]]),
    ],
)
def test_devices_are_shared_evenly_or_as_given(servers: Any, expected: list[list[int]]) -> None:
    assert federation([data(k) for k in range(5)], servers).servers == expected


@EXACT
@given(devices=st.integers(1, 40), data_=st.data())
def test_even_shares_differ_by_one_at_most(devices: int, data_: st.DataObject) -> None:
    servers = data_.draw(st.integers(1, devices))
    groups = federation([data()] * devices, servers).servers
    assert sorted(device for group in groups for device in group) == list(range(devices))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize(
    ("servers", "complaint"),
    [
        (0, "servers=0 must be between 1 and the 3 devices"),
        (4, "servers=4 must be between 1 and the 3 devices"),
        ([[0, 1], [1, 2]], "device 1 appears 2 times"),
        ([[0], [2]], "device 1 appears 0 times"),
        ([[0, 1, 2, 3]], "there is no device 3"),
        ([[0, 1, 2], []], "server 1 is empty"),
        ([[0, 1, 2], [-1]], "there is no device -1"),
    ],
)
def test_servers_that_do_not_share_the_devices_are_refused(servers: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        federation([data(k) for k in range(3)], servers)


def with_value(value: float) -> tuple[Tensor, Tensor]:
    inputs, targets = data(1)
    inputs[2, 1] = value
    return inputs, targets


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ((torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)), "device 1 has no samples"),
        (Pairs(torch.zeros(0, 3), torch.zeros(0)), "device 1 cannot be used: it has no samples"),
        (with_value(math.nan), "device 1 has a value that is not finite in input 2"),
        (with_value(math.inf), "device 1 has a value that is not finite in input 2"),
        (
            (data(1)[0].double(), data(1)[1]),
            r"device 1 has inputs of torch.float64, device 0 of torch.float32",
        ),
        (
            (data(1)[0], data(1)[1].float()),
            r"device 1 has targets of torch.float32, device 0 of torch.int64",
        ),
        (
            (torch.zeros(4, 5), data(1)[1]),
            r"device 1 has inputs of shape \(5,\), device 0 of \(3,\)",
        ),
        (
            (data(1)[0], torch.zeros(4, 2, dtype=torch.int64)),
            r"device 1 has targets of shape \(2,\), device 0 of \(\)",
        ),
        ((data(1)[0], data(1)[1][:3]), "device 1 cannot be used: 4 inputs but 3 targets"),
        ((["a", "b"], [0, 1]), "device 1 cannot be used"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "device 1 cannot be used"),
        ((torch.tensor(1.0), torch.tensor(1)), "device 1 cannot be used"),
        (7, "device 1 cannot be used: a int has no length"),
        ([data(1)[0], *data(1)], "device 1 cannot be used"),
    ],
)
def test_bad_data_are_refused_by_the_number_of_the_device(bad: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        federation([data(0), bad])


def test_a_float_target_that_is_not_finite_is_refused_too() -> None:
    targets = torch.tensor([1.0, math.nan, 2.0, 3.0])
    with pytest.raises(DataError, match="device 0 has a value that is not finite in target 1"):
        federation([(data()[0], targets)])


def test_a_bad_test_set_is_refused_as_such() -> None:
    with pytest.raises(DataError, match="the test set has a value that is not finite in input 2"):
        federation([data()], test=with_value(math.nan))


def test_a_federation_without_devices_is_refused() -> None:
    with pytest.raises(DataError, match="needs at least one device"):
        federation([])


def test_the_initial_model_belongs_to_the_seed_and_leaves_the_generator_alone() -> None:
    made = federation([data()])
    before = torch.get_rng_state()
    one, again, other = (made.make_model(seed).state_dict()["weight"] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_given_module_is_copied_and_its_weights_are_the_start() -> None:
    module = model()
    made = fb.Federation(module, F.cross_entropy, [data()], 1)
    copied = made.make_model(5)
    assert copied is not module
    assert torch.equal(copied.state_dict()["weight"], module.state_dict()["weight"])


def test_a_factory_that_makes_no_module_is_refused() -> None:
    made = fb.Federation(lambda: 3, F.cross_entropy, [data()], 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"model\(\) returned int"):
        made.make_model(0)


# ------------------------------------------------------------------------------------------------
# fingerprint
def changed(kind: str) -> fb.Federation:
    one, two = data(0), data(1)
    match kind:
        case "input":
            one[0][3, 2] += 1e-6
        case "target":
            one[1][0] = 1
        case "dtype":
            one, two = (one[0].double(), one[1]), (two[0].double(), two[1])
        case "order":
            one, two = two, one
        case "owner":
            return federation(
                [
                    (torch.cat([one[0], two[0][:1]]), torch.cat([one[1], two[1][:1]])),
                    (two[0][1:], two[1][1:]),
                ],
                2,
            )
        case "servers":
            return federation([one, two], [[1], [0]])
        case "one server":
            return federation([one, two], 1)
    return federation([one, two], 2)


def test_the_fingerprint_is_a_function_of_the_data() -> None:
    assert changed("nothing").fingerprint() == changed("nothing").fingerprint()


@pytest.mark.parametrize(
    "kind", ["input", "target", "dtype", "order", "owner", "servers", "one server"]
)
def test_the_fingerprint_changes_with_data_and_ownership(kind: str) -> None:
    assert changed(kind).fingerprint() != changed("nothing").fingerprint()
