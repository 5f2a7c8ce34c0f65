"""What Prometheus may scrape from a role; each role has a registry of its own.

Names are stable and explained in docs/operations.md.
"""

from contextlib import suppress
from typing import Any

import torch

from fedbcd.engines.deploy.links.refusals import MissingExtra
from fedbcd.protocol.messages import Actor, MixModels, StepGlobal

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as missing:
    raise MissingExtra(missing.name or "prometheus_client") from None

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """The numbers of one role. `rounds` means mixes (coordinator), phases (server) or acknowledged
    uploads (device).
    """

    def __init__(self, actor: Actor) -> None:
        self.registry = registry = CollectorRegistry()
        kind = actor.partition("/")[0]
        labels = {"role": kind}
        self.up = Gauge("fedbcd_up", "1 while the role runs", list(labels), registry=registry)
        self.up.labels(**labels).set(1)
        self.rounds = Gauge(
            "fedbcd_rounds",
            "Mixes (coordinator), phases (server) or acknowledged uploads (device)",
            registry=registry,
        )
        self.waiting = Counter(
            "fedbcd_waiting_seconds",
            "Seconds spent waiting, by cause",
            ["cause"],
            registry=registry,
        )
        self.bytes = Counter(
            "fedbcd_bytes", "Bytes of messages and models", ["direction"], registry=registry
        )
        self.letters = Counter(
            "fedbcd_letters", "Messages", ["direction", "event"], registry=registry
        )
        self.refused = Counter(
            "fedbcd_refused_inputs",
            "Inputs that were refused, by reason",
            ["reason"],
            registry=registry,
        )
        self.undone = Counter(
            "fedbcd_undone",
            "Activations and offline rounds of a device that were undone, by reason",
            ["reason"],
            registry=registry,
        )
        self.retries = Counter("fedbcd_retries", "Messages that were said again", registry=registry)
        self.lost = Counter(
            "fedbcd_devices_lost", "Activated devices that were given up", registry=registry
        )
        self.connections = Gauge(
            "fedbcd_connections", "Peers that are connected", registry=registry
        )
        self.clock_skew = Gauge(
            "fedbcd_clock_skew_seconds",
            "How far the clock of a peer is ahead (or, below 0, behind); the worst one",
            registry=registry,
        )
        self.clock_ahead = Gauge(
            "fedbcd_clock_ahead_seconds",
            "How far this role's time is ahead of the clock of its machine",
            registry=registry,
        )
        self.staleness = Histogram(
            "fedbcd_staleness_rounds",
            "Rounds of the coordinator between two mixes of a server, less one",
            buckets=(0, 1, 2, 3, 5, 8, 13, 21, 34),
            registry=registry,
        )
        self.disagreement = Gauge(
            "fedbcd_disagreement",
            "||zbar - z_n|| of the models last heard",
            ["server"],
            registry=registry,
        )
        self.handling = Histogram(
            "fedbcd_handling_seconds",
            "Seconds to handle and store one event",
            buckets=SECONDS,
            registry=registry,
        )
        self.training = Histogram(
            "fedbcd_training_seconds",
            "Seconds of one local computation",
            buckets=SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """One number, 0 where nothing was counted yet."""
        with suppress(TypeError):
            return float(self.registry.get_sample_value(name, labels) or 0.0)
        return 0.0


class Mixing:
    """What the coordinator sees of its servers: how stale each is when it is mixed, and how far
    apart their models are.

    `since` is the round in which this process began to look; what was before it is not known.
    """

    def __init__(self, metrics: Metrics, since: int = 0) -> None:
        self._metrics = metrics
        self._models: dict[int, torch.Tensor] = {}  # server -> the model last heard
        self._mixed: dict[int, int] = {}  # server -> round of its last mix
        self._before = since - 1

    def heard(self, server: int, model: torch.Tensor) -> None:
        """A server has reported with this model."""
        self._models[server] = model

    def mixed(self, command: MixModels | StepGlobal) -> None:
        """A round has ended. With Sync-cloud all servers hold the same model, so there is nothing
        to measure.
        """
        if isinstance(command, StepGlobal):
            return
        for server in command.servers:
            self._metrics.staleness.observe(
                command.round - self._mixed.get(server, self._before) - 1
            )
            self._mixed[server] = command.round
        if command.iteration == 0:
            self._measure()

    def _measure(self) -> None:
        mean = sum(model.double() for model in self._models.values()) / max(len(self._models), 1)
        for server, model in self._models.items():
            self._metrics.disagreement.labels(server=str(server)).set(
                float((model.double() - mean).norm())
            )


def totals(metrics: Metrics) -> dict[str, Any]:
    """The counters that `fedbcd status` shows."""
    refused = [
        s
        for family in metrics.refused.collect()
        for s in family.samples
        if s.name.endswith("_total")
    ]
    waiting = [
        s
        for family in metrics.waiting.collect()
        for s in family.samples
        if s.name.endswith("_total")
    ]
    return {
        "bytes_out": metrics.value("fedbcd_bytes_total", direction="out"),
        "bytes_in": metrics.value("fedbcd_bytes_total", direction="in"),
        "retries": metrics.value("fedbcd_retries_total"),
        "refused": {s.labels["reason"]: s.value for s in refused},
        "waiting_s": {s.labels["cause"]: round(s.value, 3) for s in waiting},
    }
