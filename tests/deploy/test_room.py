"""Room for models under way: given in turn, and lost by who does not use it."""

import asyncio

from fedbcd.engines.deploy.links.room import MemoryBudget, Share
from support.waiting import eventually


def test_models_that_arrive_wait_for_room_in_turn() -> None:
    async def scenario() -> None:
        room, go = MemoryBudget(10), asyncio.Event()
        order: list[str] = []

        async def use(name: str, size: int) -> None:
            taken = await room.take(size)
            order.append(name)
            await go.wait()
            room.give_back(taken)

        tasks = [
            asyncio.create_task(use(name, size))
            for name, size in (("a", 6), ("b", 6), ("huge", 99), ("c", 1))
        ]
        await eventually(lambda: order == ["a"])
        tasks[1].cancel()
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "huge", "c"]
        assert room._free == 10

    asyncio.run(scenario())


def test_who_does_not_use_its_room_loses_it_to_those_who_wait() -> None:
    """A member that announces and does not send blocks the others for a while, and only once: it
    comes after all of them from then on. While nobody waits, it may take its time.
    """

    async def scenario() -> None:
        room, cuts = MemoryBudget(10, least_rate=1e9, grace_s=0.0), []
        slow = await room.take(10, "slow", cuts.append)
        room._look()
        assert not cuts
        other = await room.take(10, "other")
        assert len(cuts) == 1
        assert "slow sends a model of 10 bytes with less than 1e+09 bytes a second" in cuts[0]
        order: list[str] = []

        async def wait(peer: str) -> Share:
            taken = await room.take(10, peer)
            order.append(peer)
            return taken

        again, third = (asyncio.create_task(wait(peer)) for peer in ("slow", "third"))
        await asyncio.sleep(0)
        room.give_back(slow)  # once more, by a connection that has ended
        assert not order
        room.give_back(other)
        room.give_back(await third)
        room.give_back(await again)
        assert order == ["third", "slow"]
        assert room._free == 10

    asyncio.run(scenario())


def test_a_member_has_room_for_one_model_at_a_time() -> None:
    async def scenario() -> None:
        room = MemoryBudget(10, grace_s=600.0)
        first = await room.take(4, "device/7")
        second = asyncio.create_task(room.take(4, "device/7"))
        third = await room.take(4, "device/8")
        assert not second.done()
        room.give_back(first)
        room.give_back(await second)
        room.give_back(third)
        assert room._free == 10

    asyncio.run(scenario())
