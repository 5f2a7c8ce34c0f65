"""How a case is run with the tree. Where its interface differs from that of 0.1.0 (`before.py`),
this file says how.
"""

import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fedbcd as fb
from fedbcd.algorithm.fused.library import build_name
from fedbcd.algorithm.methods import ALGORITHMS
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.projection import PROJECTIONS
from fedbcd.cli import main
from fedbcd.engines.cluster.engine import actors_kept
from fedbcd.experiments.deployed import one_job
from fedbcd.protocol.clouds import CLOUDS
from fedbcd.record.history import FIRST_COLUMNS
from fedbcd.schedule.delays import DELAYS
from fedbcd.spec import RENAMED
from golden import data
from golden.jobs import as_toml

SUMMARY = ("algorithm", "cloud", "seed", "rounds", "clock", "measure")
SUMMARY += ("global_accuracy", "personal_accuracy")
SUMMARY += ("server_accuracy", "mean_model_accuracy", "certificates")
Case = dict[str, Any]


def about() -> dict[str, str]:
    """Which fedbcd this is, and what it computes with."""
    return {
        "fedbcd": str(Path(fb.__file__).parent),
        "compiled": build_name(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """One Ray for all cases."""
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**27,
    )
    try:
        with actors_kept():
            yield
    finally:
        ray.shutdown()


def perform(case: Case, folder: Path, given: Path | None) -> dict[str, Any]:
    """Run a case in an empty folder; `given`: what another has left there, to go on with. Models,
    table, log: as plain values.
    """
    torch.set_num_threads(case["threads"])
    case = _by_todays_names(case)
    if case["kind"] == "replay":
        return _replay(case["path"], _federation(case["federation"]), case["exact"])
    if case["kind"] == "command":
        return _command(case, folder)
    if case["kind"] == "deployment":
        return _deployment(case, folder)
    federation = _federation(case["federation"])
    settings = _settings(case, federation, folder)
    if case["kind"] == "resume":
        run = _in_two(case, federation, settings, folder, given)
    else:
        run = fb.train(federation, _method(case["method"]), **settings)
    found = _found(run, federation)
    if case["log"]:
        found["log"] = _log(folder / "run" / "events.jsonl")
        replayed = fb.replay(
            folder / "run" / "events.jsonl", federation, torch_device="cpu", exact=case["exact"]
        )
        found["replay"] = {key: replayed[key] for key in ("rounds", "clock", "complete", "digest")}
    return found


def _in_two(
    case: Case,
    federation: fb.Federation,
    settings: dict[str, Any],
    folder: Path,
    given: Path | None,
) -> fb.Run:
    """Stop after some rounds, and go on, here or with what another has left."""
    if given is None:
        first = {**settings, "rounds": case["first"], "resume": False}
        fb.train(federation, _method(case["method"]), **first)
        shutil.copytree(folder / "run", folder / "half")
    else:
        shutil.copytree(given / "half", folder / "run")
    return fb.train(federation, _method(case["method"]), **{**settings, "resume": True})


def _replay(path: Path, federation: fb.Federation, exact: bool) -> dict[str, Any]:
    """A recorded log, computed again."""
    drivers: list[Any] = []
    result = fb.replay(
        path,
        federation,
        torch_device="cpu",
        exact=exact,
        on_step=lambda _, driver: drivers.append(driver),
    )
    numbers = drivers[-1].numbers
    models = {"x": numbers.personal_NF.clone(), "z": numbers.global_VF().clone()}
    return {
        "digest": result["digest"],
        "models": models,
        "tensors": _tensors(federation),
        "replay": result,
    }


def _command(case: Case, folder: Path) -> dict[str, Any]:
    """`fedbcd run` with a job file, and `fedbcd replay`."""
    out = folder / "run"
    (folder / "job.toml").write_text(as_toml(case["job"]))
    _fedbcd("run", folder / "job.toml", "--out", out)
    _fedbcd("replay", out)
    federation = one_job(case["job"]).make_federation()
    return _found(fb.Run.load(out, federation), federation) | {"log": _log(out / "events.jsonl")}


def _fedbcd(*arguments: str | Path) -> None:
    """The command line, in this process."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fedbcd", *map(str, arguments)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(
                    f"fedbcd {arguments[0]} ended with {end.code}: {said.getvalue()[-500:]}"
                ) from None


def _deployment(case: Case, folder: Path) -> dict[str, Any]:
    """Coordinator, servers and devices as processes; the digest is that of what they have
    stored.
    """
    (folder / "job.toml").write_text(as_toml(case["job"]))
    scale = () if case["time_scale"] is None else ("--time-scale", str(case["time_scale"]))
    code = "from fedbcd.cli import main; main()"  # a parent of its own: it forks
    command = [
        sys.executable,
        "-c",
        code,
        "up",
        str(folder / "job.toml"),
        "--out",
        str(folder / "run"),
        *scale,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fedbcd up ended with {done.returncode}: {done.stderr[-500:]}")
    federation = one_job(case["job"]).make_federation()
    found = _found(fb.Run.load(folder / "run", federation), federation)
    return {
        "digest": found["digest"],
        "models": {"z": found["models"]["z"]},
        "tensors": found["tensors"],
    }


def _found(run: fb.Run, federation: fb.Federation) -> dict[str, Any]:
    x = run.personal_NF
    everything = torch.arange(federation.devices)
    return {
        "digest": run.digest,
        "models": {
            "x": (x if isinstance(x, torch.Tensor) else x.index_select(0, everything)).clone(),
            "z": run.global_VF.clone(),
        },
        "tensors": _tensors(federation),
        "history": [asdict_row(row) for row in run.history],
        "summary": {key: run.summary.get(key) for key in SUMMARY},
        "scores": [sorted(run.personal_scores.items()), sorted(run.global_scores.items())],
        "finished": run.finished,
    }


def asdict_row(row: fb.Row) -> dict[str, float]:
    """A row of the table, as the wheel has it."""
    names = (name for name in FIRST_COLUMNS if name in row)
    return {name: row[name] for name in names}


def _tensors(federation: fb.Federation) -> list[tuple[str, int, int]]:
    """Where each tensor of a model is in its row."""
    layout = Layout(federation.make_model(0))
    return [(slot.name, slot.start, slot.stop) for slot in (*layout.parameters, *layout.buffers)]


def _log(path: Path) -> dict[str, Any]:
    """The identity in the head, without what only tells versions apart; and all other lines."""
    head, *lines = path.read_text().splitlines()
    return {"identity": json.loads(head)["identity"], "lines": lines}


def _federation(name: str) -> fb.Federation:
    given = data.given(name)
    options: dict[str, Any] = {"metric": data.squared if given.metric == "squared" else fb.accuracy}
    options |= {"augment": None if given.augment is None else fb.FlipCrop(padding=given.augment)}
    if given.transform == "scale":
        options["transform"] = fb.Scale(divisor=255.0, mean=0.5, deviation=0.5)
    if not given.partitioned:
        return fb.Federation(
            given.model, given.loss, given.devices, given.servers, test=given.test, **options
        )
    pool = fb.Samples(*(torch.cat(parts) for parts in zip(*given.devices, strict=True)))
    ends = list(itertools.accumulate(len(y) for _, y in given.devices))
    owned = [torch.arange(a, b).numpy() for a, b in itertools.pairwise([0, *ends])]
    labels = tuple(tuple(sorted(set(y.tolist()))) for _, y in given.devices)
    assert given.test is not None
    partition = fb.Partition(tuple(owned), labels)
    return fb.Federation.from_partition(
        given.model,
        given.loss,
        pool,
        partition,
        given.servers,
        test=fb.Samples(*given.test),
        **options,
    )


def _of(kinds: dict[str, Any], table: dict[str, Any]) -> Any:
    """A value of the kind that is named; nothing may be left to a default."""
    kind = kinds[table["name"]]
    settings = {key: value for key, value in table.items() if key != "name"}
    silent = {f.name for f in fields(kind) if f.init} - settings.keys()
    assert not silent, f"{table} leaves {silent} to defaults"
    return kind(
        **{
            key: tuple(map(tuple, v)) if key == "segments" else tuple(v) if key == "steps" else v
            for key, v in settings.items()
        }
    )


def _by_todays_names(case: Case) -> Case:
    def today(options: dict[str, Any]) -> dict[str, Any]:
        return {RENAMED.get(key, key): value for key, value in options.items()}

    if "job" in case:
        job = case["job"]
        offline = {"offline_time": "free"} if job["algorithm"]["name"] == "fedbcd-i" else {}
        algorithm = {**job["algorithm"], **offline}
        return {**case, "job": {**job, "algorithm": algorithm, "run": today(job["run"])}}
    return {**case, "train": today(case["train"])} if "train" in case else case


def _method(table: dict[str, Any]) -> fb.Algorithm:
    """What version 0.1.0 did not know is as it did."""
    later: dict[str, Any] = {"epochs": None, "weight_decay": 0.0, "schedule": None}
    if table["name"] in ("fedavg", "fedprox"):
        later |= {"weight": "size", "optimizer": None}
    if table["name"] == "fedbcd-i":
        later |= {"offline_time": "free", "pull_steps": None}
    table = {**later, **table, "projection": _of(PROJECTIONS, table["projection"])}
    return _of(ALGORITHMS, table)


def _settings(case: Case, federation: fb.Federation, folder: Path) -> dict[str, Any]:
    """What `train` is told, all of it."""
    told = dict(case["train"])
    told |= {"cloud": _of(CLOUDS, case["cloud"]), "dtype": getattr(torch, told["dtype"])}
    told |= {"storage": None if told["storage"] is None else getattr(torch, told["storage"])}
    told |= {
        key: {int(device): when for device, when in told[key].items()}
        for key in ("joins", "leaves")
    }
    told |= {"clock": fb.Clock(**{key: _of(DELAYS, value) for key, value in told["clock"].items()})}
    told |= {
        "state": folder / "state" if told["state"] else None,
        "out": folder / "run" if case["log"] else None,
        "resume": False,
    }
    if told["engine"] == "cluster":
        told["engine"] = fb.Cluster(address=None, actors=1, cpus=1.0, gpus=0.0)
    return told | {"record": {}, "on_round": None, "on_notice": lambda _: None, "should_stop": None}


os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
