"""The runs behind docs/results: what is wanted, what is there, what is stale; and making it.

usage: python benchmarks/evidence.py --data DIR           compute what is stale, on this machine
       python benchmarks/evidence.py --list               what that is
       ... --only fig3a,fig3b-dealt                       of these panels and readings
       ... --on cuda --workers 14 --seconds 380 --out DIR --commit ID
                                                          as much as there is time for, into
                                                          DIR/runs.jsonl and nowhere else
       ... --take FILE                                    put such runs into docs/results

DIR has the four MNIST files. There is one file per panel and reading in docs/results/mnist, called
PANEL[-READING].json; a reading that changes only some runs of a panel has these only. Every run is
kept as soon as it is done, so that it can be interrupted at any time.
"""

import argparse
import ast
import gc
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    import safetensors  # noqa: F401
except ImportError:  # models are neither saved nor read here
    for missing in ("safetensors", "safetensors.torch"):
        sys.modules[missing] = ModuleType(missing)
        for said in ("SafetensorError", "safe_open", "save", "load", "save_file", "load_file"):
            setattr(sys.modules[missing], said, type(said, (Exception,), {}))

import numpy as np
import tables
import torch
from as_published import Published, Training, played
from tables import COLUMNS

import fedbcd as fb
from fedbcd.config import nearest
from fedbcd.data.samples import LoadedDataset, Samples, Scale
from fedbcd.errors import ConfigError, FedBCDError
from fedbcd.experiments.job import Job, ModelPart, parse
from fedbcd.experiments.paper import Setting, panels
from fedbcd.experiments.pool import without_none
from fedbcd.experiments.readings import READINGS
from fedbcd.spec import Place, Watch

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "evidence" / "runs.jsonl"  # of an interrupted run, until a file is whole
FIGURES = ("fig3a", "fig3b", "fig3c", "fig4a", "fig4b", "fig4c", "fig4d")
TEXT = ("beta", "rigorous", "aspg", "smooth3", "smooth6")
READ = ("fig3a", "fig3b", "fig3c", "fig4c", "fig4d", "smooth3", "smooth6")  # under other readings
PUBLISHED = "as-published"
SLOW = {"epochs": (3, 100)}  # readings with fewer seeds, and rounds of Sync-cloud
SEEDS, PUBLISHED_SEEDS = 5, 3


@dataclass(frozen=True)
class Wanted:
    """One run of one seed."""

    panel: str
    reading: str  # "": as the recipes are
    title: str
    seed: int
    job: Job | Published

    @property
    def file(self) -> str:
        return f"{self.panel}-{self.reading}" if self.reading else self.panel

    @property
    def key(self) -> str:
        return key_of(settings_of(self.job), self.seed)


BESIDE = {f.name for part in (Place, Watch) for f in fields(part)} - {"looks", "evaluate_every"}


def settings_of(job: Job | Published) -> dict[str, Any]:
    """All that is asked for, with no default left out; no seeds, folders, places or titles."""
    if isinstance(job, Published):
        return {PUBLISHED: asdict(job)}
    table = json.loads(json.dumps(job.to_table()))
    del table["title"], table["data"]["folder"], table["run"]["seed"]
    table["run"] = {name: value for name, value in table["run"].items() if name not in BESIDE}
    return dict(table)


def as_now(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a record, which may not know options that were added since."""
    if PUBLISHED in settings:
        return settings_of(Published(**settings[PUBLISHED]))
    return settings_of(parse(without_none(settings), recorded=True)[0])


def key_of(settings: dict[str, Any], seed: int) -> str:
    """Of a run."""
    text = json.dumps([settings, seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# what is wanted
def of_reading(names: Sequence[str], reading: str, data: str | None = None) -> list[Wanted]:
    """The runs of some panels; under a reading, those that it changes."""
    seeds, rounds = SLOW.get(reading, (SEEDS, None))
    read = panels(names, Setting(data, rounds, readings=(reading,) if reading else ()))
    plain = panels(names, Setting(data, rounds))
    return [
        Wanted(panel.name, reading, job.title, seed, job)
        for panel, before in zip(read, plain, strict=True)
        for job, old in zip(panel.jobs, before.jobs, strict=True)
        if not reading or rounds is not None or job != old
        for seed in range(seeds)
    ]


def published() -> list[Wanted]:
    """Figures 3(a), 3(b) and 4(d) by `as_published`."""
    found = []
    for panel, diversity in (("fig3a", 3), ("fig3b", 6)):
        for name in ("FedAvg", "FedProx", "FedBCD", "FedBCD-I"):
            found.append((panel, name, Published(name, diversity, rounds=500)))
    clock = 7.5 * 133  # a Sync round takes 7.5 on average
    for title, name, first in (
        ("Sync", "FedBCD-I", 0),
        *((f"Async, beta {b / 10:g}", "FedBCD-I", b) for b in (7, 5, 3)),
        ("FedProx, Sync", "FedProx", 0),
    ):
        found.append(("fig4d", title, Published(name, 6, first=first, until_clock=clock, looks=40)))
    return [
        Wanted(panel, PUBLISHED, title, seed, job)
        for panel, title, job in found
        for seed in range(PUBLISHED_SEEDS)
    ]


@cache
def wanted() -> tuple[Wanted, ...]:
    """All of it, the most important first."""
    others = [name for name, reading in READINGS.items() if not reading.default]
    read = {name: of_reading(("fig3a", "fig3b") if name in SLOW else READ, name) for name in others}
    plain, text = of_reading(FIGURES, ""), of_reading(TEXT, "")
    early = [w for name in others for w in read[name] if w.panel in ("fig3a", "fig3b", "fig4d")]
    late = [w for name in others for w in read[name]]
    order = [
        [w for w in plain if w.panel.startswith("fig3") and w.title == "FedBCD-I"],
        [w for w in plain if w.panel.startswith("fig3")],
        [w for name in ("fig4d", "fig4c", "fig4b", "fig4a") for w in plain if w.panel == name],
        [w for w in early if w.seed < 3 and w.reading not in SLOW],
        [w for w in early if w.reading in SLOW],
        [w for w in text if w.seed < 3],
        [w for w in late if w.seed < 3],
        [*early, *text, *late],
    ]
    runs = list({(w.file, w.title, w.seed): w for part in order for w in part}.values())
    for number, run in enumerate(published()):  # on a CPU also where the others are on a GPU
        runs.insert(5 * number, run)
    return tuple(runs)


def different(runs: Iterable[Wanted]) -> list[Wanted]:
    """Without those that are the same run as an earlier one, in another panel."""
    first: dict[str, Wanted] = {}
    for run in runs:
        first.setdefault(run.key, run)
    return list(first.values())


# ------------------------------------------------------------------------------------------------
# what numbers depend on
SOURCES = (
    *("algorithm/**/*.py", "algorithm/fused/chain.c", "models/mlp.py"),
    *(f"compute/{name}.py" for name in ("numbers", "devices", "players", "batch", "steps", "rows")),
    *(f"compute/{name}.py" for name in ("ahead", "graphs", "fused", "evaluate")),
    *(f"schedule/{name}.py" for name in ("work", "driver", "events", "arrays", "delays")),
    *(f"protocol/{name}.py" for name in ("clouds", "coordinator", "server", "device")),
    *(f"data/{name}.py" for name in ("partition", "dealing", "federation", "idx", "samples")),
    *("data/measure.py", "experiments/paper.py", "experiments/readings.py"),
)


@cache
def sources(published: bool = False) -> str:
    """A hash of the code that decides a run's numbers; without comments and docstrings."""
    package = ROOT / "src" / "fedbcd"
    files = [path for pattern in SOURCES for path in sorted(package.glob(pattern))]
    digest = hashlib.sha256()
    for path in [ROOT / "benchmarks" / "as_published.py"] if published else files:
        digest.update(path.name.encode())
        digest.update(_code(path.read_text(), path.suffix).encode())
    return digest.hexdigest()[:16]


def _code(text: str, suffix: str) -> str:
    if suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.unparse(tree)


def tiny_data(*_: Any) -> LoadedDataset:
    """5,000 samples of four numbers and ten labels, for probes."""
    label = torch.arange(5000) % 10
    wave = torch.sin(torch.arange(20_000, dtype=torch.float64).view(-1, 4) * 0.37)
    samples = Samples(wave + torch.cos(label[:, None] * torch.arange(1, 5)), label)
    return LoadedDataset(samples, None, Scale(1.0, 0.0, 1.0), 10)  # there is nothing to test


TINY: dict[Any, fb.Federation] = {}


def probe(job: Job | Published) -> list[float] | str:
    """What three rounds of this kind come to, on a tiny model and in float64: the mean sizes of
    global and personal parameters, and the clock. Where this differs from what a file says, the
    file is older than its sources.
    """
    if isinstance(job, Published):
        return sources(published=True)
    key = key_of(settings_of(job), 0)
    if key not in PROBED:
        PROBED[key] = _probed(job)
    return PROBED[key]


PROBED: dict[str, list[float]] = {}


def _probed(job: Job) -> list[float]:
    spec = replace(job.spec, dtype=torch.float64, rounds=3, until_clock=None, looks=1)
    spec = replace(spec, evaluate_every=None, certify_every=0)
    data = replace(job.data, samples=40, folder=None)
    job = replace(job, spec=spec, data=data, model=ModelPart(hidden=(6,)))
    if data not in TINY:
        TINY[data] = job.make_federation(tiny_data)
    run = job.run(federation=TINY[data], on_notice=lambda _: None)
    z, x = (float(torch.as_tensor(part).abs().mean()) for part in (run.global_VF, run.personal_NF))
    return [float(f"{v:.12g}") for v in (z, x, run.history.last.clock)]


# ------------------------------------------------------------------------------------------------
# one run
@cache
def dataset(folder: str) -> Any:
    return fb.load_dataset("mnist", Path(folder))


FEDERATIONS: dict[Any, fb.Federation] = {}


def federation_of(job: Job, folder: str) -> fb.Federation:
    key = (job.data, job.federation, job.model, job.spec.seed)
    if key not in FEDERATIONS:
        FEDERATIONS[key] = job.make_federation(lambda *_: dataset(folder))
    return FEDERATIONS[key]


@cache
def flat(folder: str) -> tuple[Any, ...]:
    """Training and test set as `as_published` wants them: inputs, targets."""
    data = dataset(folder)
    return tuple(
        (
            data.transform(part.inputs, torch.float32).reshape(len(part.inputs), -1).numpy(),
            part.targets.numpy(),
        )
        for part in (data.train, data.test)
    )


def made(run: Wanted, folder: str, on: str, end: float) -> dict[str, Any] | None:
    """Its line: what was run, and the columns of its history; None: there was no time."""
    began = time.perf_counter()

    def too_late() -> bool:
        return time.time() > end

    if isinstance(run.job, Published):
        (inputs, targets), test = flat(folder)
        split = fb.diversity(torch.from_numpy(targets), 100, run.job.diversity, 600, seed=run.seed)
        own = [np.asarray(samples) for samples in split.samples]
        columns = played(Training(run.job, inputs, targets, own, run.seed), test, too_late)
        where = "cpu"
    else:
        job = run.job.changed(seed=run.seed, certify_every=0, torch_device=on)
        federation = federation_of(job, folder)
        result = job.run(federation=federation, on_notice=lambda _: None, should_stop=too_late)
        columns = {name: result.history.column(name) for name in COLUMNS}
        columns = columns if result.finished else None
        where = on
    if columns is None:
        return None
    return {
        "file": run.file,
        "title": run.title,
        "seed": run.seed,
        "settings": settings_of(run.job),
        "probe": probe(run.job),
        "seconds": round(time.perf_counter() - began, 1),
        "on": where,
        "columns": {name: [_rounded(v, name) for v in columns[name]] for name in COLUMNS},
    }


def _rounded(value: float, column: str) -> float:
    return int(value) if column == "round" else round(float(value), 2 if column == "clock" else 5)


# ------------------------------------------------------------------------------------------------
# many runs
FAILURES = (
    *(FedBCDError, RuntimeError, ValueError, ArithmeticError, LookupError, TypeError),
    *(ImportError, AttributeError, AssertionError, OSError),
)


def work(pipe: Connection, todo: Sequence[Wanted], folder: str, on: str, end: float) -> None:
    """In a process of its own: the runs that it is given, one after another."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
    while True:
        number = pipe.recv()
        if number is None:
            return
        try:
            answer: Any = made(todo[number], folder, on, end)
        except FAILURES as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        pipe.send(answer)
        if isinstance(answer, str):
            return
        gc.collect()
        if on != "cpu":
            torch.cuda.empty_cache()


MOST_FAILURES = 30


class Crew:
    """Processes that stay alive: packages and data are loaded once, and forked where no GPU has to
    be told apart.
    """

    def __init__(self, todo: list[Wanted], folder: str, on: str, workers: int, end: float) -> None:
        self.todo, self.end, self.next = todo, end, 0
        self._given = (todo, folder, on, end)
        self._context = get_context("fork" if on == "cpu" else "spawn")
        self.busy: dict[Connection, tuple[int, float]] = {}
        self.longest: dict[Any, float] = {}
        self.processes: list[Any] = []
        self.most = workers + MOST_FAILURES
        for _ in range(workers):
            self._start()

    def _start(self) -> None:
        if len(self.processes) < self.most:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=work, args=(theirs, *self._given), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._give(ours)

    def _kind(self, number: int) -> Any:
        run = self.todo[number]
        return (run.panel, run.reading in SLOW, run.reading == PUBLISHED, run.title)

    def _give(self, pipe: Connection) -> None:
        """The next run that would still end in time."""
        while self.next < len(self.todo):
            number, self.next = self.next, self.next + 1
            if time.time() + self.longest.get(self._kind(number), 0.0) < self.end:
                self.busy[pipe] = (number, time.time())
                pipe.send(number)
                return
        pipe.send(None)

    def lines(self) -> Iterator[tuple[Wanted, Any]]:
        """Each run as it is done: its line, a sentence if it failed, None if there was no time."""
        try:
            while self.busy and time.time() < self.end + 15:
                for pipe in wait(list(self.busy), timeout=min(15, self.end + 15 - time.time())):
                    assert isinstance(pipe, Connection)
                    number, began = self.busy.pop(pipe)
                    kind = self._kind(number)
                    try:
                        answer = pipe.recv()
                    except EOFError:
                        answer = "its process died"
                    if isinstance(answer, str):  # a GPU is of no use to a process after an error
                        self._start()
                    else:
                        spent = time.time() - began
                        self.longest[kind] = max(self.longest.get(kind, 0.0), spent)
                        self._give(pipe)
                    yield self.todo[number], answer
        finally:
            for process in self.processes:
                process.kill()


def compute(todo: list[Wanted], given: argparse.Namespace, out: Path) -> None:
    """Into a file of lines, with what they were made with at its head."""
    began = time.time()
    dataset(given.data)
    if any(isinstance(run.job, Published) for run in todo):
        flat(given.data)
    out.parent.mkdir(parents=True, exist_ok=True)
    end = began + given.seconds
    done, failed = 0, 0
    with out.open("a") as file:
        head = json.dumps({"made with": made_with(given)})
        file.write(f"\n{head}\n")  # a new line, should the last have been cut off
        for run, answer in Crew(todo, given.data, given.on, given.workers, end).lines():
            if isinstance(answer, dict):
                done += 1
                file.write(json.dumps(answer) + "\n")
                file.flush()
            elif answer is not None:
                failed += 1
            spent = time.time() - began
            left = min(spent / max(1, done) * (len(todo) - done), end - time.time())
            what = f"{answer['seconds']} s" if isinstance(answer, dict) else answer or "no time"
            name = f"{run.file}, {run.title}, seed {run.seed}: {what}"
            print(f"{spent:6.0f} s, {left:.0f} left, {done}/{len(todo)}  {name}", flush=True)
    print(f"{done} runs done, {failed} failed, {len(todo) - done - failed} left", flush=True)


def made_with(given: argparse.Namespace) -> dict[str, Any]:
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    if given.on != "cpu":
        hardware = f"{share_gpu()}, {hardware}"
    return {
        "commit": given.commit or commit(),
        "sources": [sources(), sources(published=True)],
        "hardware": hardware,
        "workers": given.workers,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def share_gpu() -> str:
    """Let the kernels of several processes run side by side, by NVIDIA's MPS where that is there;
    the GPU's name. It is asked in a process of its own: who has asked a GPU cannot be forked.
    """
    control = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:{DRIVER}")
    folder = {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
    if control is not None:
        os.environ.update(dict.fromkeys(folder, tempfile.mkdtemp()))
        subprocess.run([control, "-d"], check=False, timeout=30)
        name = _gpu_name(40)
        if name:
            return f"{name} with MPS"
        for variable in folder:
            del os.environ[variable]
    return _gpu_name(120)


DRIVER = "/usr/local/nvidia/bin"


def _gpu_name(seconds: float) -> str:
    ask = "import torch; torch.ones(1).cuda().item(); print(torch.cuda.get_device_name())"
    try:
        found = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True, text=True, check=False, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return found.stdout.strip()


def commit() -> str:
    """With "changed" where the tree is not that of the commit."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + (" changed" if changed else "")


# ------------------------------------------------------------------------------------------------
# what there is
Lines = dict[str, tuple[dict[str, Any], dict[str, Any]]]  # key -> its line, and what made it


def lines_of(path: Path) -> Lines:
    found: Lines = {}
    head: dict[str, Any] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = _line(text)
        if "made with" in line:
            head = line["made with"]
        elif line:
            found[key_of(as_now(line["settings"]), line["seed"])] = (line, head)
    return found


def _line(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:  # cut off, by an interrupt
        return {}


def lines_of_files() -> Lines:
    found: Lines = {}
    for file in tables.files():
        content = tables.read(file)
        for run in content["runs"] if not file.startswith("fig3d") else ():
            for seed, one in run["seeds"].items():
                columns = {name: one[name] for name in COLUMNS}
                line = {"settings": run["settings"], "probe": run["probe"], "columns": columns}
                line |= {"seed": int(seed), "seconds": one["seconds"], "on": one["on"]}
                key = key_of(as_now(run["settings"]), int(seed))
                found[key] = (line, content["made"][one["made"]])
    return found


def is_stale(run: Wanted, lines: Lines) -> bool:
    """Not there, or made by a code that computed other numbers."""
    return run.key not in lines or not agree(lines[run.key][0]["probe"], probe(run.job))


def agree(known: list[float] | str, now: list[float] | str) -> bool:
    if isinstance(known, str) or isinstance(now, str):
        return known == now
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(known, now, strict=True))


def take(lines: Lines) -> None:
    """Write the files of all runs that are there, here or in a file already, and not stale."""
    have = lines_of_files() | lines
    kept: set[str] = set()
    for file in dict.fromkeys(run.file for run in wanted()):
        runs = [run for run in wanted() if run.file == file]
        there = [run for run in runs if not is_stale(run, have)]
        if kept.issuperset(run.key for run in there):  # nothing that is not in another panel
            tables.path_of(file).unlink(missing_ok=True)
            continue
        kept.update(run.key for run in there)
        tables.write(file, _content(file, there, have))
        missing = len(runs) - len(there)
        print(f"{file}: {len(there)} runs" + (f", {missing} missing" if missing else ""))


def _content(file: str, there: Sequence[Wanted], have: Lines) -> dict[str, Any]:
    heads = list({json.dumps(have[run.key][1]): have[run.key][1] for run in there}.values())
    runs: dict[str, dict[str, Any]] = {}
    for run in there:
        line, head = have[run.key]
        about = {"title": run.title, "settings": as_now(line["settings"]), "probe": line["probe"]}
        one = {"made": heads.index(head), "on": line["on"], "seconds": line["seconds"]}
        runs.setdefault(run.title, {**about, "seeds": {}})["seeds"][str(run.seed)] = (
            one | line["columns"]
        )
    return {
        "panel": there[0].panel,
        "reading": there[0].reading,
        "command": f"python benchmarks/evidence.py --only {file} --data DIR",
        "made": heads,
        "runs": list(runs.values()),
    }


# seconds of a run on one core, roughly, for an estimate where none has been made on a CPU
SECONDS = {"fig3": 60.0, "fig4": 60.0, "beta": 70.0, "rigo": 70.0, "aspg": 60.0, "smoo": 60.0}


def show(todo: Sequence[Wanted], lines: Lines, workers: int) -> None:
    """What is stale, and how long it will take."""
    print(f"sources {sources()}, as published {sources(published=True)}")
    total = 0.0
    for file in dict.fromkeys(run.file for run in todo):
        runs = [run for run in todo if run.file == file]
        stale = [run for run in runs if is_stale(run, lines)]
        heads = [lines[run.key][1] for run in runs if run.key in lines]
        older = any(head.get("sources", ["", ""])[run_kind(file)] != sources(run_kind(file) == 1)
                    for head in heads)  # fmt: skip
        slow = 2.0 if file.split("-")[-1] in SLOW else 1.0
        seconds = len(stale) * SECONDS[file[:4]] * slow
        total += seconds
        said = f"{len(stale)} to compute, about {seconds / 60:.0f} minutes" if stale else "there"
        said += ", made by other sources that compute the same" if older and not stale else ""
        print(f"{file}: {len(runs)} runs, {said}")
    print(f"about {total / 60 / workers:.0f} minutes on {workers} free cores")


def run_kind(file: str) -> int:
    """Which of the two hashes of sources is about a file."""
    return int(file.endswith(PUBLISHED))


def chosen(only: str) -> list[Wanted]:
    """The runs of some files, named with commas between them; without a name all."""
    names, known = only.split(",") if only else [], {w.file for w in wanted()}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--only {name}: there is no such panel and reading{nearest(name, known)}; --list"
                " names them"
            )
    return [w for w in wanted() if not names or w.file in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("FEDBCD_DATA"))
    parser.add_argument("--on", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--take", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    todo = chosen(given.only)
    todo = [w for w in todo if given.seeds is None or w.seed < given.seeds]
    if given.take:
        take(lines_of(given.take))
    elif given.list:
        show(todo, lines_of_files() | lines_of(KEPT), given.workers)
    elif given.data is None:
        sys.exit("say where the four MNIST files are, with --data DIR or FEDBCD_DATA")
    elif given.out:
        compute(different(todo), given, given.out / "runs.jsonl")
    else:
        have = lines_of_files() | lines_of(KEPT)
        compute([run for run in different(todo) if is_stale(run, have)], given, KEPT)
        take(lines_of(KEPT))
    if given.take or not (given.out or given.list):
        tables.draw()
        tables.fill()


if __name__ == "__main__":
    try:
        main()
    except FedBCDError as error:
        sys.exit(f"error: {error}")
