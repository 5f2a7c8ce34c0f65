"""What a letter costs on its way: links over loopback, in plain text and with TLS, against the
codec alone and a plain copy of the bytes.

usage: python benchmarks/wire.py [--json] [--out FILE] [--repeats 5] [--sizes 0,109386,11173962] A
device in a process of its own sends models of so many float32 parameters (0: requests without a
model) to a server in this one. MB are 10^6 bytes of model; every letter is encoded, checked and
decoded, with TLS also encrypted.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from harness import Contestant, alternate, finish, options

from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.codec import Declared, WireLimits, decode, encode
from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import Listener, only
from fedbcd.engines.deploy.links.tls import Credentials, Plain, Security
from fedbcd.engines.deploy.links.traffic import LinkOptions
from fedbcd.protocol.messages import Acknowledged, UpdateRequested, Uploaded

SERVER, DEVICE = "server/0", "device/0"
BYTES, LETTERS = (
    4e8,
    1000,
)  # of one measurement: as many letters as make up so many bytes, between 3 and so many
UNLIMITED = LinkOptions(letters_per_s=1e9, burst=10**9)


def declared(size: int) -> Declared:
    return Declared((("weight", (size,)),))


def letter(model: torch.Tensor, number: int = 0) -> Letter:
    if len(model) == 0:
        return Letter(DEVICE, SERVER, UpdateRequested(device=0, activation=number), None, 0.0)
    event = Uploaded(device=0, activation=number, model=f"x/0/{number}")
    return Letter(DEVICE, SERVER, event, model, 0.0)


def count_of(size: int) -> int:
    return int(min(max(BYTES // max(4 * size, 1), 3), LETTERS))


# ------------------------------------------------------------------------------------------------
# the device
async def send_when_asked(folder: str, port: int, size: int) -> None:
    """The device: for every acknowledgement of activation n it sends n letters, as fast as they
    go.
    """
    model = torch.randn(size, generator=torch.Generator().manual_seed(0))
    asked: asyncio.Queue[int] = asyncio.Queue()

    async def on_letter(order: Letter) -> None:
        assert isinstance(order.event, Acknowledged)
        asked.put_nowait(order.event.activation)

    security: Security = Credentials(Path(folder), DEVICE) if folder else Plain()
    dialer = Dialer(
        DEVICE,
        SERVER,
        [f"127.0.0.1:{port}"],
        model=declared(size),
        security=security,
        on_letter=on_letter,
        options=UNLIMITED,
    )
    task = asyncio.create_task(dialer.run())
    while not task.done():
        for number in range(await asked.get()):
            while not await dialer.send(letter(model, number)):
                await asyncio.sleep(0.0002)


# ------------------------------------------------------------------------------------------------
# the server
class Server:
    """Counts the letters that come."""

    def __init__(self, size: int, folder: str) -> None:
        self.size = size
        self.folder = folder
        self.came = 0
        self.wanted = 0
        self.ready, self.done = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> "Server":
        security: Security = Credentials(Path(self.folder), SERVER) if self.folder else Plain()
        common: dict[str, Any] = {
            "model": declared(self.size),
            "security": security,
            "options": UNLIMITED,
        }
        hooks: dict[str, Any] = {"on_letter": self.on_letter, "on_connect": self.on_connect}
        self.listener = Listener(SERVER, "127.0.0.1:0", welcomes=only({DEVICE}), **common, **hooks)
        port = await self.listener.start()
        words = [sys.executable, __file__, "--device", self.folder, str(port), str(self.size)]
        self.device = await asyncio.create_subprocess_exec(*words)
        await self.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.device.kill()
        await self.device.wait()
        await self.listener.stop()

    async def on_connect(self, *_: object) -> None:
        self.ready.set()

    async def on_letter(self, _letter: Letter) -> None:
        self.came += 1
        if self.came == self.wanted:
            self.done.set()

    async def receive(self, count: int) -> float:
        """The seconds from asking for so many letters until the last is here."""
        self.came, self.wanted = 0, count
        self.done.clear()
        began = time.perf_counter()
        await self.listener.send(Letter(SERVER, DEVICE, Acknowledged(activation=count), None, 0.0))
        await self.done.wait()
        return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------
# contestants
def copying(model: torch.Tensor, count: int) -> tuple[float, float]:
    target = torch.empty_like(model)
    began = time.perf_counter()
    for _ in range(count):
        target.copy_(model)
    return time.perf_counter() - began, count


def coding(model: torch.Tensor, count: int) -> tuple[float, float]:
    limits, sent = WireLimits.of(declared(len(model))), letter(model)
    began = time.perf_counter()
    for _ in range(count):
        decode(encode(sent), limits, DEVICE, SERVER)
    return time.perf_counter() - began, count


async def measure(size: int, folder: str, repeats: int) -> list[dict[str, Any]]:
    """All contestants in turn, for one size."""
    model, count = torch.randn(size, generator=torch.Generator().manual_seed(0)), count_of(size)
    loop = asyncio.get_running_loop()
    async with Server(size, "") as plain, Server(size, folder) as tls:

        def over(server: Server) -> Callable[[], tuple[float, float]]:
            return lambda: (wait(server.receive(count)), count)

        def wait(work: Awaitable[float]) -> float:
            return asyncio.run_coroutine_threadsafe(work, loop).result()  # type: ignore[arg-type]

        contestants = [Contestant("tls", over(tls)), Contestant("plain text", over(plain))]
        contestants.append(Contestant("codec", lambda: coding(model, count)))
        if size:
            contestants.append(Contestant("copy", lambda: copying(model, count)))
        measured = await asyncio.to_thread(alternate, contestants, repeats)
    return [
        {
            "parameters": size,
            "who": m.name,
            "letters_per_s": round(1 / m.median, 1),
            "mb_per_s": round(4e-6 * size / m.median, 1),
            "best_ms": round(1e3 * m.best, 3),
            "median_ms": round(1e3 * m.median, 3),
            "worst_ms": round(1e3 * m.worst, 3),
        }
        for m in measured.values()
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--sizes", default="0,109386,11173962", help="parameters: none, the recipes' MLP, ResNet-18"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder) / "certs")
        for identity in (SERVER, DEVICE):
            authority.issue(identity)
        for size in map(int, chosen.sizes.split(",")):
            rows += asyncio.run(measure(size, str(authority.folder), chosen.repeats))
    finish("wire", chosen, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--device"]:
        torch.set_num_threads(1)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(send_when_asked(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
