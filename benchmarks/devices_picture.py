"""The picture of the README: each device of the default job, its own model against its server's and
against the one it finds alone.

    fedbcd run --out runs/default && python benchmarks/devices_picture.py runs/default \
        --out docs/images/devices.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fedbcd.data.preview import COLOURS, new_figure, tidy

SHOWN, ALONE = "fedbcd-i", "local"  # methods
Scores = dict[tuple[int, int], tuple[float, float]]  # seed, device -> its server's model, its own


def scores_of(folder: Path, method: str) -> Scores:
    """Of the default job's runs of a method, one for each seed."""
    found: Scores = {}
    for path in sorted((folder / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if result["job"]["algorithm"]["name"] == method:
            seed = result["summary"]["seed"]
            pairs = zip(result["home"], result["personal"], strict=True)
            found |= {(seed, i): pair for i, pair in zip(result["devices"], pairs, strict=True)}
    return found


def draw(axes: Any, x: list[float], y: list[float], against: str, colour: str) -> None:
    """A point for each device of each seed, and how many of them are above the line."""
    better = sum(b > a for a, b in zip(x, y, strict=True))
    worse = sum(b < a for a, b in zip(x, y, strict=True))
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, zorder=0)
    axes.scatter(x, y, s=22, color=colour, alpha=0.55, linewidths=0)
    axes.text(0.52, 0.99, f"own model better: {better}", va="top", fontsize=9)
    axes.text(0.99, 0.52, f"worse: {worse}", ha="right", fontsize=9)
    axes.set(xlim=(0.5, 1.01), ylim=(0.5, 1.01), xlabel=against, aspect="equal")
    tidy(axes)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of a run of the default job")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    scores, alone = (scores_of(asked.folder, method) for method in (SHOWN, ALONE))
    own = [scores[key][1] for key in sorted(scores)]
    figure, (left, right) = new_figure((8.4, 4.2), 2)
    home = [scores[key][0] for key in sorted(scores)]
    draw(left, home, own, "accuracy of its server's global model", COLOURS[0])
    draw(right, [alone[key][1] for key in sorted(scores)], own, "accuracy alone", COLOURS[1])
    left.set_ylabel("accuracy of the device's own model")
    seeds = len({seed for seed, _ in scores})
    figure.suptitle(f"FedBCD-I: {len(own) // seeds} devices, {seeds} seeds", fontsize=11)
    figure.savefig(asked.out, dpi=110)


if __name__ == "__main__":
    main()
