"""precision: what TF32 and bfloat16 products cost in accuracy: the paper's CIFAR-10 run (50 active
ResNet-20s) in each, on one GPU.

usage: python benchmarks/precision.py --folder CIFAR10 [--algorithm fedavg] [--rounds 200]
[--compile tf32] [--json] [--out FILE] Same seed, draws and schedule; global and personal accuracy
at several rounds, seconds per round, share of evaluation.
"""

import time
from pathlib import Path
from typing import Any

import torch
from harness import finish, options

import fedbcd as fb
from fedbcd.experiments.paper import Setting, fig3d


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the files of CIFAR-10 are"
    )
    parser.add_argument("--algorithm", default="fedbcd")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--precision", action="append", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--compile", action="append", default=[], help="precisions to compile for")
    chosen = parser.parse_args()
    base = next(
        job
        for job in fig3d(Setting(str(chosen.folder), chosen.rounds, "cuda")).jobs
        if job.spec.algorithm.name == chosen.algorithm
    )
    federation = base.make_federation()
    rows: list[dict[str, Any]] = []
    for precision in chosen.precision or ("tf32", "bfloat16", "float32"):
        times: list[float] = []
        began = time.perf_counter()
        run = fb.train(
            federation,
            base.spec,
            rounds=chosen.rounds,
            looks=chosen.looks,
            certify_every=0,
            precision=precision,
            compile=precision in chosen.compile,
            on_round=lambda _, times=times: times.append(time.perf_counter()),
        )
        torch.cuda.synchronize()
        row = {
            "precision": precision,
            "compiled": precision in chosen.compile,
            "algorithm": base.spec.algorithm.name,
            "first_round_s": round(times[0] - began, 1),
            "ms_per_round": round((times[-2] - times[0]) / (len(times) - 2) * 1e3, 1),
            "evaluation_share": run.summary["evaluation_share"],
            "rounds": [r.round for r in run.history],
            "global_accuracy": [round(r.global_accuracy, 4) for r in run.history],
            "personal_accuracy": [round(r.personal_accuracy, 4) for r in run.history],
        }
        rows.append(row)
        print(row, flush=True)
        finish("precision", chosen, rows, unit="accuracy", device="cuda")


if __name__ == "__main__":
    main()
