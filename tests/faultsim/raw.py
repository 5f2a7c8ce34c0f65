"""The long forms of the tests under fault, with all that they print kept.

`python -m faultsim.raw [NAME ...]` writes docs/results/reliability/NAME.txt, each with its command,
commit, hardware and seconds at the head, and the table of docs/reliability.md that quotes them.
`--short` takes half an hour instead of two; `--list` fills the table only.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from faultsim.told import environment

ROOT = Path(__file__).parents[2]
RAW = ROOT / "docs" / "results" / "reliability"
PAGE = ROOT / "docs" / "reliability.md"
MARKED = re.compile(r"(<!-- raw -->\n).*?(<!-- end -->)", re.S)
FAULTS = re.compile(r"(<!-- faults of the network -->\n).*?(<!-- end -->)", re.S)

# name -> what is run, long and short
PARTS: dict[str, tuple[str, str]] = {
    "seeds": ("faultsim --seeds 0:100000", "faultsim --seeds 0:100000 --seconds 600"),
    "mutations": ("faultsim.mutations", "faultsim.mutations"),
    "killing": ("faultsim.killing --all", "faultsim.killing --all"),
    "chaos": ("faultsim.chaos --seconds 300", "faultsim.chaos --seconds 120"),
    "fuzz": ("faultsim.fuzz --seconds 120", "faultsim.fuzz --seconds 20"),
    "hosts": ("faultsim.hosts --seconds 8", "faultsim.hosts --seconds 8"),
    "network": (
        "faultsim.network --within 15",
        "faultsim.network --within 15 --seconds 10",
    ),
    "big": ("faultsim.big --megabytes 1000 --active 1 --no-replay", "faultsim.big --megabytes 64"),
    "load": (
        "faultsim.load --devices 1000 --seconds 60",
        "faultsim.load --devices 300 --seconds 20",
    ),
    "load-10": (
        "faultsim.load --servers 10 --devices 1000 --seconds 90",
        "faultsim.load --servers 4 --devices 300 --seconds 30",
    ),
    "load-slow-disk": (
        "faultsim.load --devices 200 --active 200 --values 250000 --seconds 40 --slow-sync 0.1",
        "faultsim.load --devices 50 --active 50 --values 250000 --seconds 20 --slow-sync 0.1",
    ),
    "growth": ("faultsim.growth --rounds 10000", "faultsim.growth --rounds 2000"),
    "soak": (
        "faultsim.load --devices 50 --active 10 --seconds 3600 --every 300",
        "faultsim.load --devices 50 --active 10 --seconds 900 --every 180",
    ),
}


def run(name: str, command: str) -> int:
    """One part, told as it goes and kept when it is done; its exit status."""
    began, day, lines = time.monotonic(), time.strftime("%Y-%m-%d"), []
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT / "tests", env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    status = process.wait()
    head = {
        "command": f"python -m {command}",
        "commit": commit(),
        "on": f"{platform.machine()}, {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[2]:.1f}; Python {platform.python_version()}, torch {torch.__version__}",
        "date": day,
        "seconds": f"{time.monotonic() - began:.0f}",
        "exit status": str(status),
    }
    RAW.mkdir(exist_ok=True)
    text = "".join(f"{key}: {value}\n" for key, value in head.items())
    (RAW / f"{name}.txt").write_text(f"{text}\n{''.join(lines)}")
    return status


def commit() -> str:
    """With "changed" where the tree is not that of the commit."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests")
    return git("rev-parse", "--short", "HEAD") + (" changed" if changed else "")


# ------------------------------------------------------------------------------------------------
# what the page says of it
def parts_of(path: Path) -> tuple[dict[str, str], list[str]]:
    """The head and the lines of a file."""
    head, _, body = path.read_text().partition("\n\n")
    return dict(line.split(": ", 1) for line in head.splitlines()), body.splitlines()


def objects(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def _seeds(lines: Sequence[str]) -> str:
    return next(line for line in reversed(lines) if " seeds in " in line)


def _mutations(lines: Sequence[str]) -> str:
    seeds = [int(n) for n in re.findall(r"caught by seed (-?\d+)", "\n".join(lines))]
    caught = sum(seed >= 0 for seed in seeds)
    return f"{caught} of {len(seeds)} breaks caught, the slowest by seed {max(seeds)}"


def _killing(lines: Sequence[str]) -> str:
    killed = objects(lines)[1:]
    return f"{sum(one['good'] for one in killed)} of {len(killed)} end with the models undisturbed"


def _fuzz(lines: Sequence[str]) -> str:
    found = objects(lines)
    inputs = ", ".join(f"{one['target']} {one['inputs']:,}" for one in found)
    return f"inputs: {inputs}; {sum(len(one['findings']) for one in found)} findings"


def _growth(lines: Sequence[str]) -> str:
    found = [one for one in objects(lines) if "rounds" in one]
    first, last = found[0], found[-1]
    grown = ", ".join(
        f"{role} {there['events']:,} events in {there['rows']} rows and"
        f" {there['archive_kib']:g} KiB of archive, {first[role]['all_kib']:,} to"
        f" {there['all_kib']:,} KiB in all"
        for role, there in last.items()
        if isinstance(there, dict)
    )
    return f"rounds {first['rounds']:,} to {last['rounds']:,}: {grown}"


def _hosts(lines: Sequence[str]) -> str:
    found = objects(lines)[-1]
    cut = ", ".join(
        f"{one['host']} cut off: {one['rounds_during']} rounds meanwhile, two more"
        f" {one['two_more_rounds_s']} s after"
        for one in found["troubles"]
    )
    return f"{found['rounds']} rounds, {found['restarts']} restarts, {cut}"


def _network(lines: Sequence[str]) -> str:
    """How long it took after the faults, in a sentence; `network_table` has each."""
    came = [one for one in objects(lines) if "fault" in one]
    worst = max(came, key=lambda one: one["recovered_s"])
    return (
        f"{len(came)} faults, {objects(lines)[-1]['restarts']} restarts; two more rounds at most"
        f" {worst['recovered_s']} s after ({worst['fault']}, {worst['host']})"
    )


def network_table() -> str:
    """Fault by fault: the time without a round, and the time to recover."""
    rows = [
        "| fault | host | lasted | rounds meanwhile | longest without a round | two more"
        " rounds after its end |",
        "|---|---|---|---|---|---|",
    ]
    path = RAW / "network.txt"
    for one in objects(parts_of(path)[1]) if path.exists() else ():
        if "fault" in one:
            lasted = f"{one['lasted_s']:g} s" if one["lasted_s"] else "for good"
            without, after = one["without_a_round_s"], one["recovered_s"]
            rows.append(
                f"| {one['fault']} | {one['host']} | {lasted} | {one['rounds_meanwhile']} |"
                f" {without} s | {after} s |"
            )
    return "\n".join(rows)


def _last(*names: str) -> Callable[[Sequence[str]], str]:
    """Some entries of the last object."""

    def said(lines: Sequence[str]) -> str:
        last = objects(lines)[-1]
        return ", ".join(f"{name} {_plain(last[name])}" for name in names if name in last)

    return said


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " / ".join(map(_plain, value))
    return "yes" if value is True else str(value)


LOAD = _last(
    *("uploads_per_s", "request_ms", "upload_ms", "server_cpu_share", "server_mib", "most_mib"),
    *("mib_per_minute_all", "files_per_minute", "threads_per_minute"),
)
SAID: dict[str, Callable[[Sequence[str]], str]] = {
    "seeds": _seeds,
    "mutations": _mutations,
    "killing": _killing,
    "chaos": _last(
        *("rounds", "restarts", "troubles", "transitions"),
        *("recovery_median_s", "recovery_worst_s", "replayed"),
    ),
    "fuzz": _fuzz,
    "growth": _growth,
    "hosts": _hosts,
    "network": _network,
    "big": _last("model_bytes", "rounds", "most_memory_in_models", "bytes_over_least", "replayed"),
}


def table() -> str:
    """Of all files that are there."""
    rows = ["| what | what came of it | seconds | commit |", "|---|---|---|---|"]
    for name in PARTS:
        path = RAW / f"{name}.txt"
        if path.exists():
            head, lines = parts_of(path)
            said = SAID.get(name, LOAD)(lines)
            what = head["command"].removeprefix("python -m ")
            where = f"[`{what}`](results/reliability/{path.name})"
            rows.append(f"| {where} | {said} | {head['seconds']} | {head['commit']} |")
    return "\n".join(rows)


def filled(text: str) -> str:
    """The page with its tables as the files have them."""
    text = FAULTS.sub(lambda m: f"{m[1]}\n{network_table()}\n\n{m[2]}", text)
    return MARKED.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[2]}", text)


def main() -> int:
    """0 if every part held."""
    parser = argparse.ArgumentParser(prog="python -m faultsim.raw", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PARTS, []], metavar="NAME")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--arguments", help="in place of a part's own, such as '--seeds 0:9'")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    bad = 0
    for name in () if asked.list else asked.names or PARTS:
        command = PARTS[name][asked.short]
        if asked.arguments is not None:
            command = f"{command.split()[0]} {asked.arguments}"
        bad += run(name, command) != 0
    PAGE.write_text(filled(PAGE.read_text()))
    print(table())
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
