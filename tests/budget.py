"""Run pytest, count the CPU time of everything that it starts, and fail when that is more than the
budget.

`make test` runs this file instead of pytest; arguments go on to pytest. Counted are user and system
time of pytest, its workers and every process below them, including those whose parent ended first:
on Linux this process adopts them (`PR_SET_CHILD_SUBREAPER`), so that the kernel hands it their
usage as they end. One kind the kernel forgets: children of a process that ignores SIGCHLD, as Ray's
raylet does. Those are looked at twice a second, and what was last seen is added.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS_S = {
    "tests/unit": 60.0,
    "tests": 720.0,
}  # the first that holds everything that was asked for
# The same work counts up to a third more on a busy machine: 669 s became 794 s at a load of 16 on
# two cores (1.19 times), 1.24 times were seen at a load of eight, and 752 s, with a few tests more,
# were 957 s at a load of 9 to 20 (1.27 times).
LEEWAY = 4 / 3
EVERY_S = 0.5
PATIENCE_S = 30.0  # processes that have been told to stop may take this long
NAMED = 10  # files
TABLE = ROOT / ".pytest_cache" / "cpu.txt"  # all of them
NOTES = "PYTEST_CPU_NOTES"
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


def spent(who: int) -> float:
    """CPU seconds, user and system."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


class Notes:
    """A plugin in every worker of pytest: which file took how much, in this process and in children
    that it waited for.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / str(os.getpid())
        self.spent: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = spent(resource.RUSAGE_SELF) + spent(resource.RUSAGE_CHILDREN)
        result = yield
        self.spent[item.nodeid.partition("::")[0]] += (
            spent(resource.RUSAGE_SELF) + spent(resource.RUSAGE_CHILDREN) - before
        )
        return result

    def pytest_sessionfinish(self) -> None:
        self.path.write_text("".join(f"{seconds} {name}\n" for name, seconds in self.spent.items()))


@dataclass
class Sight:
    """A process below this one, as it was last seen."""

    parent: int
    began: int
    seconds: float  # with children that it has waited for
    forgotten: bool  # its parent ignores SIGCHLD: nobody will be told what it used
    file: str  # whose test started it


@dataclass
class Below:
    """All processes below this one."""

    seen: dict[int, Sight] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)  # seconds of forgotten processes, by file
    adopted: Counter[str] = field(
        default_factory=Counter
    )  # seconds of processes that outlived their parent, by file

    def look(self) -> None:
        """Who is there now; forgotten processes that have gone are added up."""
        found = {sight[0]: sight[1:] for sight in _processes()}
        below = _below(os.getpid(), {pid: parent for pid, (parent, _, _) in found.items()})
        ignoring = {pid for pid in {found[pid][0] for pid in below} if _ignores_children(pid)}
        before, self.seen = self.seen, {}
        for pid in below:
            parent, began, seconds = found[pid]
            known = before.get(pid)
            file = known.file if known and known.began == began and known.file else _file_of(pid)
            self.seen[pid] = Sight(parent, began, seconds, parent in ignoring, file)
        for pid, sight in before.items():
            if sight.forgotten and (pid not in self.seen or self.seen[pid].began != sight.began):
                self.lost[sight.file] += sight.seconds

    def reap(self, main: int) -> int | None:
        """Take the usage of all that have ended; the status of the main process if that is among
        them.
        """
        status = None
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == main:
                status = os.waitstatus_to_exitcode(code)
            elif pid:
                sight = self.seen.pop(pid, None)
                self.adopted[sight.file if sight else ""] += usage.ru_utime + usage.ru_stime
            else:
                return status

    def stop(self) -> list[str]:
        """End what is left; which they were."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.reap(-1)
            self.look()
            if not self.seen:
                return []
            time.sleep(0.1)
        left = [
            f"{pid} ({_read(pid, 'cmdline')[:100]}) of {sight.file or 'no test'}"
            for pid, sight in self.seen.items()
        ]
        while self.seen:
            for pid in self.seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            self.reap(-1)
            self.look()
        return left


def _processes() -> Iterable[tuple[int, int, int, float]]:
    """Process, parent, when it began, and CPU seconds with children that it has waited for."""
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit() and (text := _read(int(name), "stat")):
            columns = text.rpartition(")")[2].split()
            yield (
                int(name),
                int(columns[1]),
                int(columns[19]),
                sum(map(int, columns[11:15])) / TICKS,
            )


def _below(root: int, parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, rest = [], [root]
    while rest:
        new = children.get(rest.pop(), [])
        found += new
        rest += new
    return found


def _read(pid: int, name: str) -> str:
    """Empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _ignores_children(pid: int) -> bool:
    mask = _read(pid, "status").partition("SigIgn:")[2].split()
    return bool(mask) and bool(int(mask[0], 16) >> (signal.SIGCHLD - 1) & 1)


def _file_of(pid: int) -> str:
    """The test that was running when it was started, which pytest puts into the environment."""
    return _read(pid, "environ").partition("PYTEST_CURRENT_TEST=")[2].partition("::")[0]


def budget_of(arguments: Iterable[str]) -> tuple[str, float]:
    """The smallest budget that is meant for these arguments of pytest."""
    asked = [Path(a.partition("::")[0]).resolve() for a in arguments if not a.startswith("-")]
    asked = [path for path in asked if path.exists()]
    for name, seconds in BUDGETS_S.items():
        if asked and all(path.is_relative_to(ROOT / name) for path in asked):
            return name, seconds
    return "tests", BUDGETS_S["tests"]


def _told_of_children() -> int:
    """A pipe that can be read as soon as a child has ended."""
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    return ended


def run(arguments: list[str]) -> int:
    """Pytest with these arguments; its exit status, or 1 when it took too much."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    name, most = budget_of(arguments)
    below = Below()
    with tempfile.TemporaryDirectory() as folder:
        # A hundred processes would each compile the package anew where bytecode is not to be kept.
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        } | {NOTES: folder}
        main = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=environment)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest hears it as well, and ends in order
        signal.signal(signal.SIGTERM, lambda *_: main.terminate())
        ended = _told_of_children()
        while (status := below.reap(main.pid)) is None:
            below.look()
            if select.select([ended], [], [], EVERY_S)[0]:
                os.read(ended, 4096)
        main.returncode = status
        left = below.stop()
        by_file = below.adopted + below.lost
        for note in Path(folder).iterdir():
            for line in note.read_text().splitlines():
                seconds, _, file = line.partition(" ")
                by_file[file] += float(seconds)
    total = spent(resource.RUSAGE_SELF) + spent(resource.RUSAGE_CHILDREN) + below.lost.total()
    return _judge(status, total, most, name, by_file, left)


def _judge(
    status: int, total: float, most: float, name: str, by_file: Counter[str], left: list[str]
) -> int:
    by_file.pop("", None)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("".join(f"{seconds:8.1f} {file}\n" for file, seconds in by_file.most_common()))
    files = ", ".join(f"{file} {seconds:.0f} s" for file, seconds in by_file.most_common(NAMED))
    print(
        f"CPU time: {total:.1f} s, of which starting and collecting {total - by_file.total():.0f}"
        f" s; most in {files or 'no test'}"
    )
    if left:
        print("Processes that a test left behind were killed: " + "; ".join(left))
    if total > most:
        print(
            f"Over the budget: {name} may take {most:.0f} s of CPU, and fails beyond"
            f" {LEEWAY * most:.0f} s. Make the files named above cheaper."
        )
    else:
        print(f"Within the budget of {most:.0f} s of CPU for {name}.")
    return status or int(total > LEEWAY * most or bool(left))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
