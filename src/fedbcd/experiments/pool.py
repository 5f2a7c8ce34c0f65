"""Many jobs, in parallel processes, each computed once: results are kept by the hash of what was
asked, and interrupted runs resume.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.engines.setup import find_torch_device
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Federations, Job, parse
from fedbcd.record.eventlog import LogReader
from fedbcd.record.history import History
from fedbcd.record.runfolder import writing_to
from fedbcd.record.start import named
from fedbcd.recorded import in_record, shortened
from fedbcd.spec import OPTIONS, Place, default_of, plain

CHECKPOINT_EVERY = 200  # rounds
# to be raised when a correction changes what runs compute by more than rounding: old results are
# then not used any more
RESULTS = 1
NAMED = ("seed", "dtype")  # keys hold them even at their defaults, as they did in 0.1.0
BESIDE = {"checkpoint_every", *(f.name for f in fields(Place))}  # options that are not in keys


@dataclass(frozen=True)
class Result:
    """What is kept of a run: its table, its summary, and the accuracy of every personal model at
    the end.
    """

    job: Job
    history: History
    summary: dict[str, Any]
    personal: tuple[float, ...]


def job_key(job: Job) -> str:
    """A hash of everything that changes the result: not titles, folders, places or checkpoints. An
    option at its default is left out, so that new ones leave the keys of known results as they are.
    """
    table = without_none(
        json.loads(json.dumps(job.to_table() | {"algorithm": in_record(job.spec.algorithm)}))
    )
    if RESULTS > 1:
        table["results"] = RESULTS
    del table["title"]
    table.pop("modules", None)
    data = table["data"] = shortened(table["data"], "data")
    data.pop("folder", None)
    table["model"] = shortened(table["model"], "model")
    if ":" in job.data.name:
        data["made"] = _made_by(job)
    if "partition" in data:
        data["partition"] = shortened(data["partition"], data["partition"]["name"])
    table["run"] = {
        name: value
        for name, value in shortened(table["run"], "run").items()
        if name not in BESIDE and (name in NAMED or value != plain(default_of(OPTIONS[name])))
    }
    if job.spec.start is not None:  # the same of models
        table["run"]["start"] = named(job.spec.start)
    if job.data.manifest is not None:  # what it says counts, not where it lies
        table["data"]["manifest"] = hashlib.sha256(Path(job.data.manifest).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _made_by(job: Job) -> list[str | None]:
    """What data of one's own come from: the module, where it lies beside the job, and a folder."""
    module = job.data.name.partition(":")[0]
    file = Path(job.modules, *module.split(".")).with_suffix(".py")
    text = file.read_bytes() if file.is_file() else b""
    return [hashlib.sha256(text).hexdigest(), job.data.folder]


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    workers: int = 1,
    on_done: Callable[[Job], None] = lambda _: None,
) -> list[Result]:
    """Run what is not known yet, `workers` at a time, and return the results in the order of
    `jobs`.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers} must be 1 or more")
    for name in {job.spec.torch_device for job in jobs}:
        find_torch_device(name)  # also where all results are known
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    todo = {job_key(job): job for job in jobs if not _result_file(folder, job).exists()}
    for job in jobs:
        if job_key(job) not in todo:
            on_done(job)
    if workers == 1 or len(todo) <= 1:
        made = Federations()
        for job in todo.values():
            _compute(job, folder, made)
            on_done(job)
    else:
        _in_processes(todo, folder, workers, on_done)
    return [_read(folder, job) for job in jobs]


def _in_processes(
    todo: dict[str, Job], folder: Path, workers: int, on_done: Callable[[Job], None]
) -> None:
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(_work, json.dumps(job.to_table()), str(folder)): job
            for job in todo.values()
        }
        try:
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _work(table: str, folder: str) -> None:
    """In a process of its own: one thread each, so that processes do not wait for each other's."""
    torch.set_num_threads(1)
    keep_freed_memory()
    _compute(parse(without_none(json.loads(table)))[0], Path(folder), Federations())


def _compute(job: Job, folder: Path, made: Federations) -> None:
    place = folder / f"{job_key(job)}.run"
    run = _sparing(job).run(place, resume=True, federation=made.of(job))
    kept = {
        "job": (
            replace(job, data=replace(job.data, folder=None), modules="").to_table()
        ),  # a result names no place of this machine
        "summary": run.summary,
        "history": run.history.plain(),
        "personal": list(run.personal_scores.values()),
        "made_with": {
            "results": RESULTS,
            "torch": torch.__version__,
            "device": str(job.spec.torch_device),
        },
    }
    temporary = _result_file(folder, job).with_suffix(".tmp")
    temporary.write_text(json.dumps(kept))
    temporary.replace(_result_file(folder, job))
    shutil.rmtree(place)


def _sparing(job: Job) -> Job:
    """The same job with fewer checkpoints: a run in a series is short, and its models are not
    kept.
    """
    return job.changed(checkpoint_every=job.spec.checkpoint_every or CHECKPOINT_EVERY)


def _result_file(folder: Path, job: Job) -> Path:
    return folder / f"{job_key(job)}.json"


def _read(folder: Path, job: Job) -> Result:
    path = _result_file(folder, job)
    try:
        kept = json.loads(path.read_text())
        history = History.of_plain(kept["history"])
        return Result(job, history, kept["summary"], tuple(kept["personal"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}); remove it, and the run will be repeated"
        ) from None


def workers_that_fit(job: Job) -> int:
    """How many processes memory and cores allow: two copies of every personal model, the data, and
    torch itself.
    """
    parameters = sum(p.numel() for p in job.make_federation().make_model(0).parameters())
    devices = job.federation.servers * job.federation.devices
    need = 3 * devices * parameters * 4 + 800 * 2**20
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, int(0.8 * free / need)))


def recorded_job(log: Path, hint: str) -> Job:
    """The job that a log names; `hint` says what to do with one that names none."""
    table = LogReader(log).header.get("job")
    if not (table and isinstance(table, dict)):
        raise RecordError(
            f"{log} was not made by 'fedbcd run', so it does not name its data and model; {hint}"
        )
    return parse(without_none(table), recorded=True)[0]


def without_none(table: Any) -> Any:
    """Plain data without the keys whose value is None, which TOML cannot say."""
    if isinstance(table, dict):
        return {key: without_none(value) for key, value in table.items() if value is not None}
    return table
