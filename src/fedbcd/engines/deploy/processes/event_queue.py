"""The calls of a role: one at a time, in order, in a thread of their own.

What has come while the disk was busy is handled together and shares the next write to it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.processes.tasks import Tasks
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.errors import ProtocolError

SHARED_WRITE_CALLS = 64  # calls that share one write to disk, at most
GOODBYE_S = 5.0  # how long a process that was told to stop waits for what is under way

Call = Callable[[float], list[Letter]]  # of a role, at a time
Handled = Callable[[list[Letter] | ProtocolError, float], Awaitable[None]]
Group = Sequence[tuple[Call, "asyncio.Future[None]"]]


class EventQueue:
    """Calls of a role. `handled` is told what each gave once it is durable, or why it was refused,
    and how long that took; any other error ends the process.
    """

    def __init__(
        self, role: Role, now: Callable[[], float], tasks: Tasks, handled: Handled
    ) -> None:
        self._role = role
        self._now = now
        self._process = tasks
        self._handled = handled
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="role")
        self.turn = asyncio.Lock()  # one group of events at a time
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self._events: set[asyncio.Task[None]] = set()  # under way, or waiting for their turn
        self._earliest = 0.0  # that the event under way may be

    def settled(self) -> float:
        """No event that is yet to come will be earlier than this."""
        return self._earliest if self.turn.locked() else self._role.earliest(self._now())

    async def do(self, call: Call) -> None:
        """One call of the role, in its turn and in its thread; then its letters go out.

        Once begun it is brought to its end, also when the connection that brought the letter is
        gone meanwhile: what the role has taken in must have its consequences (letters, timers,
        work), or nobody would ever see to them.
        """
        event = asyncio.get_running_loop().create_task(self._do(call))
        self._events.add(event)
        event.add_done_callback(self._events.discard)
        await asyncio.shield(event)

    async def _do(self, call: Call) -> None:
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, handled))
        async with self.turn:
            if not handled.done():  # nobody before took it along
                await self._handle_next()
        await handled

    async def _handle_next(self) -> None:
        group = [
            self._waiting.popleft() for _ in range(min(len(self._waiting), SHARED_WRITE_CALLS))
        ]
        try:
            if not self._process.is_ending:
                await self._handle(group)
        except Exception as error:
            # machine and disk may disagree now: end, and recover from the disk
            self._process.fail(error)
            raise
        finally:
            for _, handled in group:
                if not handled.done():
                    handled.set_result(None)

    async def _handle(self, group: Group) -> None:
        began, self._earliest = time.perf_counter(), self._role.earliest(self._now())
        calls = [partial(call, self._now()) for call, _ in group]
        outcomes = await asyncio.get_running_loop().run_in_executor(
            self._worker, self._role.handle_group, calls
        )
        took_s = time.perf_counter() - began
        for outcome, (_, handled) in zip(outcomes, group, strict=True):
            await self._handled(outcome, took_s)
            if isinstance(outcome, ProtocolError):
                handled.set_exception(outcome)

    async def close(self, hang_up: Callable[[], Awaitable[None]]) -> None:
        """Hang up once the event under way is durable, if that does not take too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                async with self.turn:
                    await hang_up()

    async def stop(self) -> None:
        await asyncio.gather(*self._events, return_exceptions=True)
        self._worker.shutdown(wait=True)
