"""Many runs, in parallel processes, each computed once: results are kept by the hash of what was
asked, and interrupted runs resume.
"""

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from multiprocessing import active_children, get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import torch

from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.data.federation import Federation
from fedbcd.engines.result import Run
from fedbcd.engines.setup import find_torch_device
from fedbcd.errors import ConfigError, FedBCDError, RecordError
from fedbcd.experiments.job import Federations, Job, parse
from fedbcd.record.eventlog import LogReader
from fedbcd.record.history import History
from fedbcd.record.names import MODELS
from fedbcd.record.runfolder import writing_to
from fedbcd.record.start import named
from fedbcd.recorded import in_record, shortened
from fedbcd.spec import OPTIONS, Place, RunSpec, default_of, plain

CHECKPOINT_EVERY = 200  # rounds
# to be raised when a correction changes what runs compute by more than rounding: old results are
# then not used any more
RESULTS = 1
NAMED = ("seed", "dtype")  # keys hold them even at their defaults, as they did in 0.1.0
BESIDE = {
    "checkpoint_every",
    "checkpoint_seconds",
    *(f.name for f in fields(Place)),
}  # options that are not in keys


@dataclass(frozen=True)
class Task:
    """A run that is to be computed: of a job file, or of a federation and a spec made in Python."""

    name: str
    spec: RunSpec
    key: str  # a hash of everything that changes the result
    # computes, or goes on with what is in a folder, and tells remarks to a listener
    run: Callable[[Path, Callable[[str], None]], Run]
    record: Mapping[str, Any]  # what its result says of it
    # what makes it in a process that shares nothing with this one; without it only a fork has it
    portable: str | None = None


@dataclass(frozen=True)
class Result:
    """What is kept of a run: its table, its summary, and the scores of every device at the end."""

    name: str
    spec: RunSpec
    history: History
    summary: dict[str, Any]
    personal: dict[int, float]  # device -> score of its own model
    home: dict[int, float]  # and of its server's, on the same samples
    notices: tuple[str, ...] = ()  # remarks on the run


def task_of(job: Job, made: Federations) -> Task:
    """The run of a job; `made` has its federation."""
    # a result names no place of this machine
    placeless = replace(job, data=replace(job.data, folder=None), modules="")
    return Task(
        job.name,
        job.spec,
        job_key(job),
        lambda place, note: _sparing(job).run(
            place, resume=True, federation=made.of(job), on_notice=note
        ),
        placeless.to_table(),
        json.dumps(job.to_table()),
    )


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
    made, of_key = Federations(), {job_key(job): job for job in jobs}
    tasks = [task_of(job, made) for job in jobs]
    return run_tasks(tasks, folder, workers, lambda task: on_done(of_key[task.key]))


def run_tasks(
    tasks: Sequence[Task],
    folder: Path,
    workers: int = 1,
    on_done: Callable[[Task], None] = lambda _: None,
    keep: Mapping[str, Path] | None = None,
) -> list[Result]:
    """Run what is not known yet, `workers` at a time, and return the results in the order of
    `tasks`. `keep` names, by key, the folders of runs that are to be left whole, with models and
    log.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers} must be 1 or more")
    for name in {task.spec.torch_device for task in tasks}:
        find_torch_device(name)  # also where all results are known
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kept = keep or {}
    todo = {task.key: task for task in tasks if not _is_done(task, folder, kept)}
    for task in tasks:
        if task.key not in todo:
            on_done(task)
    one_by_one = workers == 1 or len(todo) <= 1 or not _can_share(todo.values())
    if one_by_one:
        for task in todo.values():
            _compute(task, folder, kept.get(task.key))
            on_done(task)
    else:
        _in_processes(todo, folder, workers, on_done, kept)
    return [_read(folder, task) for task in tasks]


def _is_done(task: Task, folder: Path, kept: Mapping[str, Path]) -> bool:
    there = task.key not in kept or (kept[task.key] / MODELS).exists()
    return there and _result_file(folder, task.key).exists()


# ------------------------------------------------------------------------------------------------
# processes
_HELD: dict[str, Task] = {}  # of a forked process: what its parent had


def _can_share(tasks: Iterable[Task]) -> bool:
    """Whether other processes can have these. A federation made in Python cannot travel, so they
    must be forked, which a process that uses a GPU, and one on macOS, must not do. Threads are no
    way out: initial weights are drawn by torch's one generator.
    """
    if all(task.portable is not None for task in tasks):
        return True
    can_fork = "fork" in get_all_start_methods() and sys.platform != "darwin"
    return can_fork and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _in_processes(
    todo: dict[str, Task],
    folder: Path,
    workers: int,
    on_done: Callable[[Task], None],
    kept: Mapping[str, Path],
) -> None:
    fresh = all(task.portable is not None for task in todo.values())
    held = {} if fresh else todo
    with _pool(min(workers, len(todo)), "spawn" if fresh else "fork", held) as submit:
        futures = {
            submit(_work, key, task.portable, str(folder), kept.get(key)): task
            for key, task in todo.items()
        }
        for future in as_completed(futures):
            try:
                future.result()
            except FedBCDError as error:
                raise error from None  # without the traces of the other process
            except BrokenProcessPool:
                raise RecordError(
                    f"a process that computed {futures[future].name!r} or another run was killed,"
                    " perhaps for want of memory; go on with fewer workers"
                ) from None
            on_done(futures[future])


@contextmanager
def _pool(
    workers: int, start: str, held: Mapping[str, Task]
) -> Iterator[Callable[..., Future[None]]]:
    """Processes, of which none outlives an error or Ctrl-C: what they did is in checkpoints."""
    before = set(active_children())
    context = get_context(start)
    gc.collect()  # here, where the threads are that what is left over may wait for
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any fork with threads: children use none of their parent's
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(held,)) as pool:
            try:
                yield pool.submit
            except BaseException:
                for process in set(active_children()) - before:
                    process.terminate()
                pool.shutdown(cancel_futures=True)
                raise


def _begin(held: Mapping[str, Task]) -> None:
    """In a process of its own: one thread each, so that processes do not wait for each other's;
    and what a forked one has of its parent is never collected, since it may wait for threads that
    only its parent has.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    torch.set_num_threads(1)
    keep_freed_memory()
    _HELD.update(held)


def _work(key: str, portable: str | None, folder: str, kept: Path | None) -> None:
    if portable is None:
        task = _HELD[key]
    else:
        task = task_of(parse(without_none(json.loads(portable)))[0], Federations())
    _compute(task, Path(folder), kept)


# ------------------------------------------------------------------------------------------------
# results
def _compute(task: Task, folder: Path, kept: Path | None) -> None:
    place = kept or folder / f"{task.key}.run"
    notices: list[str] = []
    run = task.run(place, notices.append)
    if run.interrupted:
        raise KeyboardInterrupt
    found = {
        "job": dict(task.record),
        "summary": run.summary,
        "history": run.history.plain(),
        "personal": list(run.personal_scores.values()),
        "devices": list(run.personal_scores),
        "home": [run.global_scores.get(device) for device in run.personal_scores],
        "notices": notices,
        "made_with": {
            "results": RESULTS,
            "torch": torch.__version__,
            "device": str(task.spec.torch_device),
        },
    }
    temporary = _result_file(folder, task.key).with_suffix(".tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(_result_file(folder, task.key))
    if kept is None:
        shutil.rmtree(place)


def _sparing(job: Job) -> Job:
    """The same job with fewer checkpoints: a run in a series is short, and its models are not
    kept.
    """
    return job.changed(checkpoint_every=job.spec.checkpoint_every or CHECKPOINT_EVERY)


def _result_file(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _read(folder: Path, task: Task) -> Result:
    path = _result_file(folder, task.key)
    try:
        kept = json.loads(path.read_text())
        history = History.of_plain(kept["history"])
        devices = kept.get("devices") or range(len(kept["personal"]))  # 0.1.0 named none
        personal = dict(zip(devices, kept["personal"], strict=True))
        home = {i: v for i, v in zip(devices, kept.get("home", ()), strict=False) if v is not None}
        notices = tuple(kept.get("notices", ()))
        return Result(task.name, task.spec, history, kept["summary"], personal, home, notices)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}); remove it, and the run will be repeated"
        ) from None


def workers_that_fit(federation: Federation) -> int:
    """How many processes memory and cores allow: two copies of every personal model, the data, and
    torch itself.
    """
    parameters = sum(p.numel() for p in federation.make_model(0).parameters())
    need = 3 * federation.devices * parameters * 4 + 800 * 2**20
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
