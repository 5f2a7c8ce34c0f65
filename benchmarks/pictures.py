"""Every picture under docs/images, made anew from what they show: pages of real runs, figures of
real runs, and those of benchmarks from what these left. None is made by hand.

usage: python benchmarks/pictures.py [--out docs/images] [--only report,devices] [--data DIR]

`--data` names the folder of the four MNIST files, without which the plan on MNIST stays as it is:
its pilots take minutes. Runs are kept in runs/pictures, so that a second call draws only.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import approximation
import screenshots
import slow
import theory_bounds

from fedbcd.planner.order_statistics import distribution_of

ROOT = Path(__file__).parents[1]
RUNS = Path("runs/pictures")  # below it: pages show this path


def fedbcd(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "fedbcd", *map(str, words)], check=True)


def made(name: str, *words: str | Path) -> Path:
    """The folder of a run that has been made, or is now."""
    folder = RUNS / name
    if not (folder / "report.html").is_file():
        fedbcd("run", *words, "--out", folder)
    return folder


def pages(out: Path) -> None:
    """Reports and the dashboard, in a browser."""
    screenshots.take(made("diversity", "examples/diversity.toml"), made("default"), out)


def devices(out: Path) -> None:
    script = ROOT / "benchmarks" / "devices_picture.py"
    words = [sys.executable, script, made("default"), "--out", out / "devices.png"]
    subprocess.run(words, check=True)


def default_job(out: Path) -> None:
    shutil.copy(made("default") / "curves.png", out / "default-job.png")


def bounds(out: Path) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "theory_bounds.json").read_text())
    theory_bounds.draw(kept["runs"], out / "theory-bounds.png")


def slow_devices(out: Path) -> None:
    kept = ROOT / "benchmarks" / "results" / "slow.json"
    slow.draw(json.loads(kept.read_text()), out / "slow.png")


def large_n(out: Path) -> None:
    kinds = {name: distribution_of(delay) for name, delay in approximation.DELAYS.items()}
    found = approximation.draw_approximation(
        kinds, approximation.BETAS, approximation.SIZES, out / "large-n-error.png"
    )
    assert found, "pip install 'fedbcd[report]' brings matplotlib"


def tutorial(out: Path) -> None:
    place = RUNS / "tutorial"
    place.mkdir(parents=True, exist_ok=True)
    script = ROOT / "examples" / "tutorial.py"
    subprocess.run([sys.executable, script], check=True, cwd=place, stdout=subprocess.DEVNULL)
    shutil.copy(place / "tutorial.png", out / "tutorial.png")


def plan(out: Path, data: Path) -> None:
    """The plan of docs/planner.md, by the job that stands there."""
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    job = page.partition("SPEC's MNIST setting")[2].partition("```toml\n")[2].partition("```")[0]
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "mnist.toml").write_text(job)
    where = RUNS / "plan-mnist"
    fedbcd("plan", RUNS / "mnist.toml", "--data", data, "--pilots", "5", "--out", where)
    shutil.copy(where / "plan.png", out / "plan-mnist.png")


MADE: dict[str, Callable[[Path], None]] = {
    "report": pages,
    "devices": devices,
    "default-job": default_job,
    "theory-bounds": bounds,
    "slow": slow_devices,
    "large-n-error": large_n,
    "tutorial": tutorial,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default=",".join(MADE), help=", ".join(MADE))
    options = parser.parse_args()
    options.out = options.out.resolve()
    os.chdir(ROOT)
    for name in options.only.split(","):
        print(name, flush=True)
        MADE[name](options.out)
    if options.data is not None:
        plan(options.out, options.data)


if __name__ == "__main__":
    main()
