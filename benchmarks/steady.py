"""steady: what a round costs when the population grows and the active devices do not, and whether
memory grows with rounds.

usage: python benchmarks/steady.py [--rounds 1000] [--hidden 2] [--json] [--out FILE] [--repeats 3]
[--threads 2] FedBCD on the MLP, 30 active devices under 10 servers, in a population of 100, 500 and
2,000; then `--rounds` rounds with 100 devices, with the resident memory of the process on the way
and its slope.
"""

import resource
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Contestant, alternate, finish, options
from rounds import Setting, ours

from fedbcd.compute.allocator import keep_freed_memory
from fedbcd.models import mlp

POPULATIONS = (100, 500, 2_000)


def resident_mib() -> float:
    """Memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument(
        "--hidden",
        type=int,
        help="units of the only hidden layer, for many short rounds; otherwise the recipes' MLP",
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_freed_memory()
    model = mlp if chosen.hidden is None else partial(mlp, 784, 10, (chosen.hidden,))
    contestants = [
        Contestant(str(n), ours(Setting(n, 10, 60, 3, (1, 5), model), "fedbcd", 10))
        for n in POPULATIONS
    ]
    measured = alternate(contestants, chosen.repeats)
    rows = [
        {"devices": int(name), "ms_per_round": round(1e3 * m.median, 2)}
        for name, m in measured.items()
    ]
    del contestants
    run = ours(Setting(100, 10, 60, 3, (1, 5), model), "fedbcd", 10)
    seen = []
    for k in range(chosen.rounds // 10):
        run()
        seen.append((10 * (k + 1), resident_mib()))
    later = np.array(seen[len(seen) // 5 :])  # all shapes have been seen by then
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0])
    rows.append(
        {
            "rounds": chosen.rounds,
            "mib_first": round(later[0, 1], 1),
            "mib_last": round(later[-1, 1], 1),
        }
    )
    finish("steady", chosen, rows, mib_per_1000_rounds=round(1000 * slope, 2))


if __name__ == "__main__":
    main()
