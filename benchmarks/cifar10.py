"""Figure 3(d) on a GPU within a given time: CIFAR-10, ResNet-20, 5 active devices per server.

usage: python benchmarks/cifar10.py --data DIR [--rounds 500] [--seeds 3] [--seconds 600]
[--precision tf32] [--initial kaiming] [--device cuda] [--out FILE]

All four methods of one seed after another, as many as there is time for: a run is begun where the
longest so far would still end in time. FILE is written anew after each run: per run the table of
its history, the final accuracies, its seconds and precision; and with what all were made.
"""

import argparse
import json
import platform
import subprocess
import time
from dataclasses import astuple, replace
from pathlib import Path

import torch
from torch import nn

import fedbcd as fb
from fedbcd.experiments.job import Federations, Job, ModelPart
from fedbcd.experiments.paper import Setting, fig3d
from fedbcd.models import resnet20

ORDER = ("fedbcd-i", "fedprox", "fedbcd", "fedavg")  # the first is what changed since 0.1.0


def resnet20_by_torch() -> nn.Module:
    """Weights as torch draws them for each layer, in place of Kaiming's normal ones."""
    module = resnet20()
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    return module


MODELS = {
    "kaiming": ModelPart(name="resnet20"),
    "torch": ModelPart(name="cifar10:resnet20_by_torch"),
}


def trained(job: Job, federation: fb.Federation, precision: str, seed: int) -> dict[str, object]:
    began = time.perf_counter()
    on_gpu = job.spec.torch_device != "cpu"
    run = fb.train(
        federation, job.spec, seed=seed, precision=precision, compile=on_gpu, certify_every=0
    )
    last = run.history.last
    return {
        "algorithm": job.spec.algorithm.name,
        "seed": seed,
        "precision": precision,
        "seconds": round(time.perf_counter() - began, 1),
        "global": last.global_accuracy,
        "personal": last.personal_accuracy,
        "worst tenth": last.worst_decile,
        "history": [astuple(row) for row in run.history],
    }


def made_with(device: str) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor()
    return {"commit": commit, "torch": torch.__version__, "device": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--initial", choices=MODELS, default="kaiming")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began, longest = time.perf_counter(), 0.0
    panel = fig3d(Setting(given.data, given.rounds, given.device))
    jobs = {job.spec.algorithm.name: job for job in panel.jobs}
    result = {"made with": made_with(given.device), "rounds": given.rounds, "runs": []}
    made = Federations()
    for seed in range(given.seeds):
        for name in ORDER:
            left = given.seconds - (time.perf_counter() - began)
            if left < longest:
                print(f"no time for {name}, seed {seed}: {left:.0f} s left", flush=True)
                continue
            job = replace(jobs[name].changed(seed=seed), model=MODELS[given.initial])
            found = trained(job, made.of(job), given.precision, seed)
            longest = max(longest, found["seconds"])
            result["runs"].append(found | {"initial": given.initial})
            given.out.write_text(json.dumps(result))
            print({k: v for k, v in found.items() if k != "history"}, flush=True)


if __name__ == "__main__":
    main()
