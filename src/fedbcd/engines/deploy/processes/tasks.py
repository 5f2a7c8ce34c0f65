"""What a process does beside its events, and how it ends."""

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any

from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.errors import FedBCDError, Refused


class Tasks:
    """Coroutines that nobody waits for. An error that nobody expects ends the process."""

    def __init__(self, log: RoleLog) -> None:
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()

    @property
    def is_ending(self) -> bool:
        """Whether the process has been told to stop, or has failed: what is asked of it now does
        not happen.
        """
        return self.ended.done()

    def end(self, code: ExitCode) -> None:
        """Stop: what is durable stays, what is under way is started again next time."""
        if not self.is_ending:
            self.ended.set_result(code)

    def fail(self, error: Exception) -> None:
        if self.is_ending:
            return
        if isinstance(error, FedBCDError):
            self.end(self.complain(error))
        else:
            self._log.error(
                "bug", sentence=str(error), trace="".join(traceback.format_exception(error))
            )
            self.end(ExitCode.BUG)

    def complain(self, error: FedBCDError) -> ExitCode:
        code = ExitCode(error.exit_code)
        self._log.error("failed", code=int(code), meaning=code.name, sentence=str(error))
        return code

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as error:
            self._log.warning("refused_own", sentence=str(error))
        except Exception as error:  # noqa: BLE001  whatever it is, the process must not go on half dead
            self.fail(error)

    async def settle(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await self.settle()
