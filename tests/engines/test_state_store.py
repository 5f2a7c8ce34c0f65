"""Personal models in files: only active rows are resident, and every bit is that of a run in
memory.
"""

from itertools import islice
from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.compute.rows import Rows
from fedbcd.compute.store import StoredRows, devices_of_rounds
from fedbcd.engines.result import Run
from fedbcd.engines.setup import make_machines, make_reader
from fedbcd.errors import ConfigError, RecordError
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Schedule, Simulation
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.runs import CASES, fedbcd, federation, train, write_job

pytestmark = pytest.mark.usefixtures("both_ways")


def all_rows(models: torch.Tensor | Rows) -> torch.Tensor:
    return torch.cat(list(models.blocks())) if isinstance(models, Rows) else models


# ------------------------------------------------------------------------------------------------
# rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_in_files_are_read_and_written_like_a_tensor(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    start = torch.arange(7).to(dtype)
    tensor, rows = (
        start.repeat(20, 1),
        StoredRows(tmp_path, 20, start, shard=3 * 7 * dtype.itemsize),
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        chosen = torch.randperm(20, generator=generator)[:6]
        values = torch.randn(6, 7, generator=generator).to(dtype)
        tensor.index_copy_(0, chosen, values)
        rows.index_copy_(0, chosen, values)
        rows.will_need(chosen.tolist())
        rows.release()
        assert torch.equal(
            rows.index_select(0, chosen.flip(0)), tensor.index_select(0, chosen.flip(0))
        )
    rows[4] = tensor[4] = values[0]
    assert torch.equal(rows[4], tensor[4])
    assert torch.equal(all_rows(rows), tensor)
    assert (len(rows), rows.shape, rows.dtype) == (20, (20, 7), dtype)


def test_rows_that_nobody_wrote_take_no_room_and_files_leave_no_trace(tmp_path: Path) -> None:
    rows = StoredRows(tmp_path, 10**6, torch.ones(1000))  # 4 GB, if it were written
    rows[5] = torch.zeros(1000)
    assert rows.written().tolist() == [5]
    assert torch.equal(
        rows.index_select(0, torch.tensor([999_999, 5]))[:, 0], torch.tensor([1.0, 0.0])
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="choose another folder for `state`"):
        train("fedbcd-sync", state=tmp_path / "file")


# ------------------------------------------------------------------------------------------------
# runs
@pytest.mark.parametrize("case", CASES)
def test_the_digest_is_that_of_a_run_in_memory(case: str, tmp_path: Path) -> None:
    here, there = train(case, rounds=8, looks=2), train(case, rounds=8, looks=2, state=tmp_path)
    assert there.digest == here.digest
    assert there.history == here.history
    assert there.personal_scores == here.personal_scores
    if method_of(CASES[case][0]).has_personal:
        assert torch.equal(all_rows(there.personal_NF), here.personal_NF)


def test_joining_leaving_and_storage_in_half_the_memory(tmp_path: Path) -> None:
    options = {"rounds": 8, "joins": {3: 4}, "leaves": {7: 3}, "storage": torch.bfloat16}
    assert (
        train("fedbcd-sync", **options, state=tmp_path).digest
        == train("fedbcd-sync", **options).digest
    )


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_resume_with_and_without_files(first: bool, second: bool, tmp_path: Path) -> None:
    """A checkpoint holds the rows that are no longer x(0); either kind of run goes on from it."""
    whole = train("fedbcd-async", rounds=10)
    state = tmp_path / "state"
    train("fedbcd-async", rounds=4, out=tmp_path / "run", state=state if first else None)
    parts = train(
        "fedbcd-async",
        rounds=10,
        out=tmp_path / "run",
        resume=True,
        state=state if second else None,
    )
    assert parts.digest == whole.digest
    saved = Run.load(tmp_path / "run", federation())
    assert torch.equal(all_rows(saved.personal_NF), whole.personal_NF)
    assert fb.replay(tmp_path / "run" / "events.jsonl", federation())["digest"] == whole.digest


def test_a_personal_model_as_a_module(tmp_path: Path) -> None:
    here, there = train("fedbcd-sync"), train("fedbcd-sync", state=tmp_path)
    for a, b in zip(
        here.personal_model(5).parameters(), there.personal_model(5).parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_rounds_planned_ahead_need_models_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kept in files"):
        train("fedbcd-sync", state=tmp_path, ahead=True)


def test_a_job_file_can_name_the_folder(tmp_path: Path) -> None:
    plain = fedbcd("run", write_job(tmp_path / "a.toml"), "--out", tmp_path / "a", "--json")
    kept = fedbcd(
        "run",
        write_job(tmp_path / "b.toml", **{"run.state": str(tmp_path / "s")}),
        "--out",
        tmp_path / "b",
        "--json",
    )
    assert plain.code == kept.code == 0
    assert plain.summary["digest"] == kept.summary["digest"]


# ------------------------------------------------------------------------------------------------
# foresight
@pytest.mark.parametrize(
    "case", ["fedbcd-sync", "fedbcd-i-sync", "fedbcd-rigorous", "fedbcd-i-async"]
)
def test_who_works_next_is_known_ahead(case: str) -> None:
    algorithm, cloud = CASES[case]
    spec, fed = RunSpec(algorithm, cloud, active=2), federation()
    schedule = Schedule(method_of(algorithm), spec.clock, 0, 2)
    ahead = devices_of_rounds(fed.servers, lambda: make_machines(spec, fed), schedule, cloud)
    driver = Driver(make_machines(spec, fed), make_reader(spec, fed))
    for planned, played in zip(islice(ahead, 12), Simulation(driver, schedule), strict=False):
        assert set(played.devices) == set(planned)


@pytest.mark.parametrize("devices", [1, 3, 257, 700])
@pytest.mark.parametrize("written", [0, 1, 2, 300])
def test_distances_are_those_of_rows_in_memory_to_the_bit(
    devices: int, written: int, tmp_path: Path
) -> None:
    """Rows that nobody wrote are compared once; the sum is formed as if each had been."""
    generator = torch.Generator().manual_seed(devices + written)
    start, z_VF = torch.randn(301, generator=generator), torch.randn(3, 301, generator=generator)
    rows = StoredRows(tmp_path, devices, start)
    chosen = torch.randperm(devices, generator=generator)[:written]
    rows.index_copy_(0, chosen, torch.randn(len(chosen), 301, generator=generator))
    members = [(device, device % 3) for device in range(devices)]
    assert rows.total_distance(z_VF, members) == Rows.total_distance(rows, z_VF, members)
