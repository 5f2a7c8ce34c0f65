"""The large-N formula of eq. (8) against exact order statistics: its error against N, as a table
and a picture.

usage: python benchmarks/approximation.py [--json] [--out PICTURE.png]
"""

import argparse
import json
from pathlib import Path

import fedbcd as fb
from fedbcd.planner.order_statistics import distribution_of
from fedbcd.planner.pictures import approximation_error, draw_approximation

DELAYS = {
    "exponential": fb.Exponential(2.0),
    "uniform": fb.Uniform(0.0, 4.0),
    "Weibull, shape 0.7": fb.Weibull(0.7),
    "gamma, shape 2": fb.Gamma(2.0),
    "log-normal, sigma 1": fb.LogNormal(2.0, 1.0),
}
BETAS, SIZES = (0.3, 0.5, 0.9), (10, 20, 50, 100, 200, 500, 1000)


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
