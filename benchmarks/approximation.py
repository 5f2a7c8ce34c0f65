"""The large-N formula of eq. (8) against exact order statistics: its error against N, as a table
and a picture.

usage: python benchmarks/approximation.py [--json] [--out PICTURE.png]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import fedbcd as fb
from fedbcd.data.preview import COLOURS
from fedbcd.planner.order_statistics import (
    Distribution,
    distribution_of,
    expected,
    normal_approximation,
)

DELAYS = {
    "exponential": fb.Exponential(2.0),
    "uniform": fb.Uniform(0.0, 4.0),
    "Weibull, shape 0.7": fb.Weibull(0.7),
    "gamma, shape 2": fb.Gamma(2.0),
    "log-normal, sigma 1": fb.LogNormal(2.0, 1.0),
}
BETAS, SIZES = (0.3, 0.5, 0.9), (10, 20, 50, 100, 200, 500, 1000)


def draw_approximation(
    distributions: Mapping[str, Distribution],
    betas: Sequence[float],
    sizes: Sequence[int],
    path: Path,
) -> bool:
    """How far eq. (8)'s F^-1(beta) is from E[tau_(beta N)], relative to it, against N: one panel
    per beta.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(betas), figsize=(4.6 * len(betas), 3.8), sharey=True, layout="constrained"
    )
    for panel, beta in zip(axes, betas, strict=True):
        for colour, (name, distribution) in zip(
            COLOURS * len(distributions), distributions.items(), strict=False
        ):
            panel.plot(
                sizes,
                [approximation_error(distribution, beta, n) for n in sizes],
                "o-",
                color=colour,
                label=name,
                markersize=3,
            )
        panel.set(title=f"beta = {beta:g}", xlabel="N", xscale="log", yscale="log")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    axes[0].set_ylabel("relative error of F^-1(beta)")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def approximation_error(distribution: Distribution, beta: float, n: int) -> float:
    """|F^-1(beta) - E[tau_(beta N)]| / E[tau_(beta N)]."""
    k = round(beta * n)
    exact = expected(distribution, k, n)
    return abs(normal_approximation(distribution, k, n).mean - exact) / exact


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object on the last line")
    parser.add_argument("--out", type=Path, help="draw the picture to this file")
    options = parser.parse_args()
    kinds = {name: distribution_of(delay) for name, delay in DELAYS.items()}
    table = {
        name: {beta: [approximation_error(kind, beta, n) for n in SIZES] for beta in BETAS}
        for name, kind in kinds.items()
    }
    for name, rows in table.items():
        for beta, errors in rows.items():
            print(f"{name:20} beta {beta:<4}", *(f"{100 * error:8.3f} %" for error in errors))
    if options.out is not None and not draw_approximation(kinds, BETAS, SIZES, options.out):
        print("no picture was drawn: pip install 'fedbcd[report]' brings matplotlib")
    if options.json:
        print(json.dumps({"sizes": SIZES, "relative_error": table}))


if __name__ == "__main__":
    main()
