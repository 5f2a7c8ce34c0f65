"""What people meet on the command line with methods and rules of other people: files, checks,
plans, exports, and what a record may not import.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.config import dump_toml
from fedbcd.record.tensorfile import read_tensors
from support.naive import example
from support.runs import Answer, fedbcd, job_table

SCAFFOLD = {"name": "scaffold:Scaffold", "step": 0.05}
FEDBUFF = {"name": "fedbuff:FedBuff", "at_once": 2}
BUFFERED = {"algorithm": FEDBUFF, "cloud": {"name": "async", "first": 2}, "federation.active": 1}


@pytest.fixture(autouse=True)
def _found() -> None:
    """Where Python looks for modules."""
    for name in ("scaffold", "fedbuff", "own_availability"):
        example(name)


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "job.toml"
    path.write_text(dump_toml(job_table(**{"federation.servers": 2, **changes})))
    return path


def complaint(answer: Answer) -> str:
    assert answer.code == 2, answer
    return " ".join(answer.err.split())


def test_a_run_and_what_is_made_of_it(tmp_path: Path) -> None:
    """Of a bundle {z, c} the part z is exported; a record's code is imported only if told."""
    job, out = written(tmp_path, algorithm=SCAFFOLD), tmp_path / "run"
    assert fedbcd("run", job, "--out", out).code == 0
    assert "--trust" in complaint(fedbcd("export", out, "--global", "--format", "safetensors"))
    export = ("export", out, "--global", "--format", "safetensors", "--trust")
    assert fedbcd(*export).code == 0
    tensors = read_tensors(out / "export" / "global.safetensors")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = fb.load_job(job).run(tmp_path / "again")
    assert {**tensors}.keys() == dict(run.global_model.named_parameters()).keys()
    assert sum(t.numel() for t in tensors.values()) == run.global_VF.shape[1]
    assert fedbcd("report", out).code == 0
    assert fedbcd("replay", out, "--trust", "--json").summary["digest"] == run.digest
    inputs = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", inputs=inputs, targets=np.arange(4))
    newcomer = ("personalise", out, "--data", tmp_path / "new.npz", "--trust")
    assert "scaffold keeps and sends no models" in complaint(fedbcd(*newcomer))
    resumed = ("run", "--resume", "--out", out)
    assert "--trust" in complaint(fedbcd(*resumed))
    assert fedbcd(*resumed, "--trust").code == 0


def test_checks_plans_and_backends(tmp_path: Path) -> None:
    job = written(tmp_path, algorithm=SCAFFOLD)
    checked = fedbcd("check", job, "--json")
    assert checked.code == 1
    (report,) = checked.summary["jobs"]
    assert "scaffold is another algorithm" in report["findings"][0]["found"]
    explained = fedbcd("run", job, "--explain-backend")
    assert "-> vectorised" in explained.err
    assert "it knows plans that are one loop of steps, and this method's is more" in explained.err
    assert "waits for all servers" in fedbcd("plan", job).out
    assert "at_once=2: how long" in complaint(fedbcd("plan", written(tmp_path, **BUFFERED)))
    assert "package.module:Name" in fedbcd("algorithms").out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": {"name": "scaffold:Nothing"}}, "'scaffold:Nothing' cannot be imported"),
        ({"algorithm": {"name": "scafold:Scaffold"}}, "'scafold:Scaffold' cannot be imported"),
        ({"algorithm": {"name": "broken:Method"}}, "cannot be imported (division by zero)"),
        ({"algorithm": {"name": "scaffold:fb"}}, "must be a dataclass"),
        (
            {"algorithm": {"name": "scaffold:Move", "eta": 1.0}},
            "has no method(facts); give a value of",
        ),
        ({"algorithm": SCAFFOLD | {"steep": 1}}, "unknown key 'steep' (did you mean 'step'?)"),
        ({"algorithm": SCAFFOLD, "cloud": {"name": "async", "first": 2}}, "use the sync cloud"),
        (BUFFERED | {"cloud": {"name": "sync"}}, "use the async cloud"),
        (BUFFERED | {"federation.active": 3}, "at_once=2 must be active=3 or more"),
        ({"run.availability": {"name": "chance"}}, "needs probability"),
        ({"run.availability": {"name": "shift"}}, "run.availability.name = 'shift' is unknown"),
        (
            {"run.availability": {"name": "scaffold:Scaffold"}},
            "has no available(members, round_, u)",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = written(tmp_path, **changes)
    assert says in complaint(fedbcd("run", job, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_rule_that_a_record_names_is_not_imported(tmp_path: Path) -> None:
    job = written(tmp_path, **{"run.availability": {"name": "own_availability:Shifts"}})
    out = tmp_path / "run"
    assert fedbcd("run", job, "--out", out).code == 0
    assert "own_availability:Shifts" in complaint(fedbcd("replay", out))
    assert fedbcd("replay", out, "--trust").code == 0
