"""What Prometheus may scrape from a role; each role has a registry of its own.

Names are stable and explained in docs/operations.md.
"""

from collections.abc import Sequence
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
ROUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34)
TEXTS = {
    "up": "1 while the role runs",
    "rounds": "Mixes (coordinator), phases (server) or acknowledged uploads (device)",
    "waiting_seconds": "Seconds spent waiting, by cause",
    "bytes": "Bytes of messages and models",
    "letters": "Messages",
    "refused_inputs": "Inputs that were refused, by reason",
    "undone": "Activations and offline rounds of a device that were undone, by reason",
    "retries": "Messages that were said again",
    "devices_lost": "Activated devices that were given up",
    "absent_devices": "Devices of a server that have not been connected for long",
    "certificate_seconds_left": "Seconds until the certificate or its authority expires",
    "revocation_list_age_seconds": "Seconds since the revocation list in force was made",
    "connections": "Peers that are connected",
    "clock_skew_seconds": (
        "How far the clock of a peer is ahead (or, below 0, behind); the worst one"
    ),
    "clock_ahead_seconds": "How far this role's time is ahead of the clock of its machine",
    "staleness_rounds": "Rounds of the coordinator between two mixes of a server, less one",
    "disagreement": "||zbar - z_n|| of the models last heard",
    "handling_seconds": "Seconds to handle and store one event",
    "training_seconds": "Seconds of one local computation",
}


class Metrics:
    """The numbers of one role. `rounds` means mixes (coordinator), phases (server) or acknowledged
    uploads (device).
    """

    def __init__(self, actor: Actor) -> None:
        self.registry = CollectorRegistry()
        self.up = self._gauge("up", "role")
        self.up.labels(role=actor.partition("/")[0]).set(1)
        self.rounds = self._gauge("rounds")
        self.waiting = self._counter("waiting_seconds", "cause")
        self.bytes = self._counter("bytes", "direction")
        self.letters = self._counter("letters", "direction", "event")
        self.refused = self._counter("refused_inputs", "reason")
        self.undone = self._counter("undone", "reason")
        self.retries = self._counter("retries")
        self.lost = self._counter("devices_lost")
        self.absent = self._gauge("absent_devices")
        self.certificate_left = self._gauge("certificate_seconds_left")
        self.list_age = self._gauge("revocation_list_age_seconds")
        self.connections = self._gauge("connections")
        self.clock_skew = self._gauge("clock_skew_seconds")
        self.clock_ahead = self._gauge("clock_ahead_seconds")
        self.staleness = self._histogram("staleness_rounds", ROUNDS)
        self.disagreement = self._gauge("disagreement", "server")
        self.handling = self._histogram("handling_seconds", SECONDS)
        self.training = self._histogram("training_seconds", SECONDS)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(f"fedbcd_{name}", TEXTS[name], labels, registry=self.registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"fedbcd_{name}", TEXTS[name], labels, registry=self.registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"fedbcd_{name}", TEXTS[name], buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def value(self, name: str, **labels: str) -> float:
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
    return {
        "bytes_out": metrics.value("fedbcd_bytes_total", direction="out"),
        "bytes_in": metrics.value("fedbcd_bytes_total", direction="in"),
        "retries": metrics.value("fedbcd_retries_total"),
        "refused": _totals_by("reason", metrics.refused),
        "waiting_s": {k: round(v, 3) for k, v in _totals_by("cause", metrics.waiting).items()},
    }


def _totals_by(label: str, counter: Counter) -> dict[str, float]:
    samples = (s for family in counter.collect() for s in family.samples)
    return {s.labels[label]: s.value for s in samples if s.name.endswith("_total")}
