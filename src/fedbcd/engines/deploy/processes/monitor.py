"""What those see who watch a role: metrics, health and status."""

import os
import time
from typing import TYPE_CHECKING, Any

from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.links.refusals import Counts
from fedbcd.engines.deploy.links.tls import Credentials
from fedbcd.engines.deploy.processes.clock import OFF_S
from fedbcd.engines.deploy.processes.health import Health, note_port
from fedbcd.engines.deploy.processes.metrics import Metrics, totals
from fedbcd.engines.deploy.processes.skew import Skews

if TYPE_CHECKING:
    from fedbcd.engines.deploy.processes.base import Process


class Monitor:
    """Watches one process."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self.metrics = Metrics(process.role.actor)
        self.skews = Skews(self.metrics, process.log)
        self.counts = Counts()  # of the links
        self._health = Health(self._text, self.status, process.is_ready)
        self._warned = False  # that certificates expire
        self._waits_for: tuple[str, float] | None = None  # what, since when

    async def start(self) -> int:
        options = self._process.options
        port = await self._health.start(*split_address(options.health, "deploy.health"))
        note_port(options.folder_of(self._process.role.actor), port)
        return port

    async def close(self) -> None:
        await self._health.close()

    def note_wait(self) -> None:
        """Count the time since this was called last under what the role has waited for."""
        cause, now = self._process.waits_for(), time.monotonic()
        if self._waits_for is not None:
            before, since = self._waits_for
            self.metrics.waiting.labels(cause=before).inc(now - since)
        self._waits_for = (cause, now)

    def refresh(self) -> None:
        self.note_wait()
        self._look_at_certificates()
        process, value = self._process, self.metrics.value
        self.skews.note_own(process.events.settled() - process.clock.on_the_wall())
        for direction, seen in (("in", self.counts.bytes_in), ("out", self.counts.bytes_out)):
            known = value("fedbcd_bytes_total", direction=direction)
            self.metrics.bytes.labels(direction=direction).inc(seen - known)
        for reason, seen in self.counts.refused.items():
            known = value("fedbcd_refused_inputs_total", reason=reason)
            self.metrics.refused.labels(reason=reason).inc(seen - known)

    def _look_at_certificates(self) -> None:
        security = self._process.peers.security
        if isinstance(security, Credentials):
            self.metrics.certificate_left.set(security.seconds_left)
            self.metrics.list_age.set(security.list_age_s)
            for sentence in security.trouble if not self._warned else ():
                self._warned = True
                self._process.log.warning("certificate_expires", sentence=sentence)

    def status(self) -> dict[str, Any]:
        self.refresh()
        process = self._process
        now, settled = process.clock.now(), process.events.settled()
        return {
            "actor": process.role.actor,
            "ready": process.is_ready(),
            "waits_for": process.waits_for(),
            "clock": round(now, 3),
            "settled": settled,
            "events": process.role.store.length,
            "pid": os.getpid(),
            # since what it has recorded is far ahead of its clock
            "counting": settled > now + OFF_S,
            **self.skews.status(),
            "trouble": process.trouble(),
            "peers": len(process.peers.connected),
            **process.status(),
            "totals": totals(self.metrics),
        }

    def _text(self) -> bytes:
        self.refresh()
        return self.metrics.text()
