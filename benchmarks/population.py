"""population: 100,000 personal MLPs resident on one GPU, 10,000 of them active in a round.

usage: python benchmarks/population.py [--device cuda] [--devices 100000] [--storage bfloat16]
[--json] [--out FILE] [--repeats 3] Two copies of each model (x and x_prev) in float32 take 81 GiB,
in bfloat16 half of it. Device-steps per second: ours; a plain loop, which does a hundredth of the
work on a hundredth of the devices; and the floor that bandwidth and matrix units allow.
"""

from collections.abc import Callable

import torch
from harness import alternate, finish, options
from rounds import Contestant, Setting, hardware_floor, ours, ours_ahead, plain


def plain_loop(setting: Setting, device: str) -> Callable[[], tuple[float, float]]:
    """A round of a hundredth of the federation, as so much of a whole round."""
    part = Setting(
        max(10, setting.devices // 100), 10, 600, max(1, setting.active // 100), setting.steps
    )
    run = plain(part, "fedbcd", 1, device)

    def share() -> tuple[float, float]:
        seconds, rounds = run()
        return seconds, rounds * part.q / setting.q

    return share


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--devices", type=int, default=100_000)
    parser.add_argument("--storage", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--precision",
        choices=("float32", "tf32"),
        default="tf32",
        help="of matrix products on a GPU",
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    setting = Setting(chosen.devices, 10, 600, chosen.devices // 100, (1, 5))
    storage = getattr(torch, chosen.storage)
    if chosen.device == "cpu":
        run = ours(setting, "fedbcd", 2, chosen.device, storage=storage)
    else:
        run = ours_ahead(setting, "fedbcd", 5, chosen.device, chosen.precision, storage=storage)
    contestants = [
        Contestant("ours", run),
        Contestant("plain loop", plain_loop(setting, chosen.device)),
        Contestant("floor", lambda: (hardware_floor(setting, "fedbcd", chosen.device), 1)),
    ]
    measured = alternate(contestants, chosen.repeats)
    steps = setting.q * sum(setting.steps) / 2
    rows = [
        {
            "who": m.name,
            "seconds_per_round": round(m.median, 4),
            "device_steps_per_second": round(steps / m.median),
        }
        for m in measured.values()
    ]
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    finish(
        "population",
        chosen,
        rows,
        devices=chosen.devices,
        active=setting.q,
        storage=chosen.storage,
        precision=chosen.precision,
        gpu_peak_gib=gpu,
    )


if __name__ == "__main__":
    main()
