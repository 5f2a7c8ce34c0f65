"""`make golden`: every case with the wheel of 0.1.0 and with the tree, on this machine; names the
cases whose bits differ.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from golden import everyday
from golden.cases import Case, all_cases
from golden.jobs import job_cases
from golden.meant import Meant, meant_for
from golden.outcome import differences, farthest
from golden.recorded import recorded_cases
from golden.wheel import unpack

TESTS = Path(__file__).parents[1]
SHOWN = 5  # differences of a case
Outcome = dict[str, Any]
# Processes of their own, for what is chosen once in a process.
GROUPS: dict[str, dict[str, str]] = {
    "torch": {"FEDBCD_FUSED": "0"},
    "compiled": {},
    "compiled avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "compiled portable": {"ATEN_CPU_CAPABILITY": "default"},
    "cluster": {"FEDBCD_FUSED": "0"},
    "processes": {"FEDBCD_FUSED": "0"},
}


class Worker:
    """A process with one of the two fedbcds."""

    def __init__(self, which: str, source: Path, group: str) -> None:
        self.which, self.source = which, source
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("FEDBCD_", "RAY_", "ATEN_"))
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(source), str(TESTS)]),
            "OMP_NUM_THREADS": "1",
            **GROUPS[group],
        }
        command = [sys.executable, "-m", "golden.worker", which, group]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about: dict[str, str] = {}

    def ready(self) -> None:
        """Wait until it has come up, with the fedbcd that was meant."""
        self.about = self.take()
        if Path(self.about.get("fedbcd", "")) != self.source / "fedbcd":
            raise SystemExit(f"the process for {self.which} uses {self.about}, not {self.source}")

    def ask(self, case: Case, folder: Path, given: Path | None) -> None:
        """Let it begin."""
        question = {
            "case": case,
            "folder": str(folder),
            "given": None if given is None else str(given),
        }
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()

    def take(self) -> dict[str, Any]:
        """What it answers."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = (
            json.loads(line)
            if line
            else {"error": f"the process for {self.which} has ended ({self.process.wait()})"}
        )
        return found

    def answer(self, case: Case, folder: Path, given: Path | None) -> dict[str, Any]:
        """Let it begin, and wait."""
        self.ask(case, folder, given)
        return self.take()

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


@dataclass
class Golden:
    """Where it stands."""

    before: Path
    tree: Path
    scratch: Path
    cases: list[Case]
    done: int = 0
    bad: list[str] = field(default_factory=list)
    meant: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        """All cases, group after group."""
        for group in GROUPS:
            cases = [case for case in self.cases if case["group"] == group]
            if cases:
                with self._pair(group) as pair:
                    self._group(group, cases, *pair)

    @contextlib.contextmanager
    def _pair(self, group: str) -> Iterator[tuple[Worker, Worker]]:
        workers = Worker("before", self.before, group), Worker("tree", self.tree, group)
        try:
            for worker in workers:
                worker.ready()
            yield workers
        finally:
            for worker in workers:
                worker.close()

    def _group(self, group: str, cases: list[Case], before: Worker, tree: Worker) -> None:
        builds = before.about["compiled"], tree.about["compiled"]
        print(
            f"{group}: {len(cases)} cases; torch {tree.about['torch']}, {tree.about['capability']},"
            f" compiled: {builds[1]}",
            flush=True,
        )
        if group.startswith("compiled") and builds[0] == "no":
            self.skipped += [case["name"] for case in cases]
            print("  left out: there is no C compiler here")
            return
        if builds[0] != builds[1]:
            self._say(
                group,
                [
                    f"the tree computes with the build {builds[1]!r}, the wheel with {builds[0]!r};"
                    " install the tree anew"
                ],
                0.0,
            )
            return
        for case in cases:
            self._case(case, before, tree)

    def _case(self, case: Case, before: Worker, tree: Worker) -> None:
        began = time.perf_counter()
        folders = {worker.which: self.scratch / worker.which for worker in (before, tree)}
        if case["kind"] == "deployment":  # the wheel computes again what the tree's processes did
            found = tree.answer(case, folders["tree"], None)
            expected = before.answer(case, folders["before"], folders["tree"])
        elif case["handover"]:
            expected = before.answer(case, folders["before"], None)
            found = tree.answer(case, folders["tree"], folders["before"])
        else:
            for worker in (before, tree):
                worker.ask(case, folders[worker.which], None)
            expected, found = before.take(), tree.take()
        self._judge(case["name"], expected, found, began)
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _judge(self, name: str, expected: Outcome, found: Outcome, began: float) -> None:
        folders = self.scratch / "before", self.scratch / "tree"
        known = meant_for(name)
        wrong = list(compared(expected, found, *folders, known))
        differs = wrong or (known and list(compared(expected, found, *folders)))
        reasons = [f"meant since {each.commit}: {each.why}" for each in known]
        self._say(name, wrong, time.perf_counter() - began, [] if not differs else reasons)

    def _say(
        self, name: str, wrong: list[str], seconds: float, reasons: Sequence[str] = ()
    ) -> None:
        self.done += 1
        word = "DIFFERS" if wrong else "meant  " if reasons else "same   "
        print(
            f"{self.done:5d}/{len(self.cases)}  {word} {seconds:5.2f} s  {name}",
            flush=True,
        )
        if reasons and not wrong:
            self.meant.append(name)
            print(*(f"          {line}" for line in reasons), sep="\n")
        for line in wrong[:SHOWN]:
            print(f"          {line}")
        if len(wrong) > SHOWN:
            print(f"          and {len(wrong) - SHOWN} more differences")
        if wrong:
            self.bad.append(name)

    def summary(self, seconds: float) -> int:
        """The last lines; the exit status."""
        print(
            f"\n{self.done} of {len(self.cases)} cases in {seconds:.0f} s, {len(self.bad)} differ,"
            f" {len(self.meant)} differ as is meant, {len(self.skipped)} left out"
        )
        for name in self.bad:
            print(f"  DIFFERS  {name}")
        return 1 if self.bad else 0


def compared(
    expected: Outcome, found: Outcome, before: Path, tree: Path, meant: Sequence[Meant] = ()
) -> Iterator[str]:
    """Where the outcome of the tree is another than is meant; how far its models are from the
    others comes first.
    """
    errors = [
        f"{which}: {outcome['error']}"
        for which, outcome in (("wheel", expected), ("tree", found))
        if "error" in outcome
    ]
    if errors:
        yield from errors
        yield from str(found.get("traceback", "")).splitlines()[-3:-1]
        return
    wrong = list(differences(expected, found, meant=meant))
    if wrong and expected["models"] != found["models"]:
        yield farthest(*(torch.load(folder / "models.pt") for folder in (before, tree)))
    yield from wrong


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="make golden", description=__doc__)
    parser.add_argument(
        "--only", default="", help="cases with this in their name (ARGS='--only async')"
    )
    parser.add_argument("--group", choices=GROUPS, help="cases of this group of processes only")
    parser.add_argument(
        "--every", type=int, default=1, help="each so-many-th case only, for a quick look"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write down what the tree computes now as what `make test` compares with",
    )
    parser.add_argument(
        "--tree", type=Path, default=TESTS.parent / "src", help="the source that is compared"
    )
    options = parser.parse_args()
    if options.record:
        return everyday.record()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        cases = [*all_cases(), *job_cases(), *recorded_cases(scratch / "recorded")]
        cases = [case for case in cases if options.only in case["name"]]
        cases = [case for case in cases if options.group in (None, case["group"])]
        cases = cases[:: options.every]
        golden = Golden(unpack(scratch / "wheel"), options.tree.resolve(), scratch, cases)
        golden.run()
        return golden.summary(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
