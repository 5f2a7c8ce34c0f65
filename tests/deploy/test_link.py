"""Links over real sockets with real TLS: letters of any size both ways, reconnecting, and what is refused."""

import asyncio
from pathlib import Path

import pytest
import torch

from wire_helpers import DEVICE, SERVER, declared, down, eventually, linked, make_authority, up


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder, "device/8", "operator")
    return folder


@pytest.mark.parametrize("size", [0, 1, 109_386, 30_000_000])
def test_letters_arrive_bit_for_bit_both_ways(certs: Path, size: int) -> None:
    model = torch.randn(size, generator=torch.Generator().manual_seed(size))

    async def scenario() -> None:
        async with linked(certs, model=declared(size)) as (server, here, device, there):
            assert await device.send(up(model))
            assert await server.send(down(model.double()))
            assert await server.send(down(None))
            await eventually(lambda: here.letters and len(there.letters) == 2)
            (got,) = here.letters
            assert got.model is not None
            assert torch.equal(got.model, model)
            assert (got.event, got.sender, got.to, got.clock) == (up(model).event, DEVICE, SERVER, 1.0)
            assert torch.equal(there.letters[0].model, model.double())
            assert there.letters[1] == down(None)

    asyncio.run(scenario())
