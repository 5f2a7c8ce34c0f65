"""A deployment whose devices train your own module on data that never leave them, in five processes
on this machine.

run: python examples/own_device.py            everything: certificates, a coordinator, a server,
three devices
     python examples/own_device.py device 2   what runs on device 2, and nothing else
"""

import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from fedbcd.deploy import device, personal_model

JOB = """
[federation]
servers = 1
devices = 3
active = 2

[model]
name = "own_device:Net"     # the server and the coordinator make x(0) from it

[algorithm]
name = "fedbcd"
device_step = 0.05

[cloud]
name = "sync"

[run]
rounds = 12

[deploy]
samples = 80                # each device brings so many of its own
folder = "state"
certificates = "certs"
coordinator = "127.0.0.1:{0}"
servers = ["127.0.0.1:{1}"]
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def readings(number: int, samples: int = 80) -> tuple[Tensor, Tensor]:
    """The private data of a device: it sees two of four activities, through a sensor of its own."""
    generator = torch.Generator().manual_seed(number)
    activity = torch.tensor([number % 4, (number + 1) % 4])[
        torch.randint(2, (samples,), generator=generator)
    ]
    return (
        2.0 * torch.eye(4, 8)[activity]
        + 0.7 * torch.randn(samples, 8, generator=generator)
        + 0.3 * number,
        activity,
    )


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [probe.getsockname()[1] for probe in probes]


def everything(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.format(*free_ports(2)))
    fedbcd = [sys.executable, "-c", "from fedbcd.cli import main; main()"]
    here = str(Path(__file__).parent)
    environment = {"PYTHONPATH": ":".join([here, *sys.path]), "OMP_NUM_THREADS": "1"}
    for command in (["init"], ["issue", "operator", "coordinator", "server/0", "device/0-2"]):
        subprocess.run([*fedbcd, "certs", *command], cwd=folder, env=environment, check=True)
    commands = [
        [*fedbcd, "coordinator", "job.toml", "--rounds", "12"],
        [*fedbcd, "server", "job.toml", "--id", "0"],
    ]
    commands = [
        [*command, "--init"] for command in commands
    ]  # the very first start: they begin their stores
    commands += [[sys.executable, __file__, "device", str(i)] for i in range(3)]
    log = (folder / "log.jsonl").open("w")
    processes = [
        subprocess.Popen(command, cwd=folder, env=environment, stderr=log) for command in commands
    ]
    try:
        while '"finished": true' not in (folder / "log.jsonl").read_text():
            assert all(process.poll() is None for process in processes), (
                folder / "log.jsonl"
            ).read_text()
            time.sleep(0.2)
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait() for process in processes]
        log.close()
    print("exit codes", codes)


def main() -> None:
    if sys.argv[1:2] == ["device"]:
        number = int(sys.argv[2])
        sys.exit(
            device("job.toml", number, data=readings(number), loss=nn.functional.cross_entropy)
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everything(folder)
        inputs, targets = readings(1)
        with torch.no_grad():
            model = personal_model(folder / "job.toml", 1, model=Net, folder=str(folder / "state"))
            print(
                "device 1 after 12 rounds:"
                f" {(model(inputs).argmax(1) == targets).float().mean():.2f} of its readings right"
            )


if __name__ == "__main__":
    main()
