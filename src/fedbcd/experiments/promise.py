"""What Theorem 1 promises for one job: its bounds, with this job's constants, and how many rounds
they ask for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from fedbcd.algorithm.method import Method
from fedbcd.compute.smoothness import Constants
from fedbcd.engines.participation import Participation
from fedbcd.theory.assumptions import Smoothness
from fedbcd.theory.bounds import (
    CertificateBounds,
    Problem,
    certificate_bounds,
    paper_accumulation,
    telling_rounds,
    trivial_bounds,
)
from fedbcd.theory.mixing import activation_period, connection_period, lemma_rate

MEANING = {
    "gap": "first-order gap of a personal model",
    "pull": "|| sum gamma_i (zbar - x_i) ||^2",
    "spread": "|| zbar - z_n ||",
}


@dataclass(frozen=True)
class Promise:
    """Theorem 1 for a run of T rounds; means over its rounds."""

    rounds: int  # T
    constants: Mapping[str, float]
    bounds: CertificateBounds
    trivial: CertificateBounds  # what any points of X satisfy
    telling: Mapping[str, int | None]  # from which T on a bound is below that
    paper_rounds: float | None  # T of the accumulation lemma; None with one server: Remark 5
    bounded: bool  # every constant of the costs is a bound, none was only seen
    watched: int  # rounds on which p and q were seen

    @property
    def sentence(self) -> str:
        """Whether T is large enough, and for what."""
        late = [name for name, needed in self.telling.items() if (needed or math.inf) > self.rounds]
        never = [name for name in late if self.telling[name] is None]
        if never:
            says = (
                f"no T is large enough for {_and(never)}: the noise of mini-batches keeps the bound"
                ' up (docs/errata.md, 7); batch = "all", or a batch that grows with T'
            )
        elif late:
            needed = max(self.telling[name] or 0 for name in late)
            says = (
                f"T = {self.rounds} is not large enough: for {_and(late)} the theorem says no more"
                f" than that points are in X; it says more from T = {needed:.3g} on"
            )
        else:
            says = f"T = {self.rounds} is large enough for all three to say something"
        if self.paper_rounds is not None and self.paper_rounds > self.rounds:
            says += f". The printed constants ask for T >= {self.paper_rounds:.3g} with this d"
        if self.watched < self.rounds:
            says += f". p and q are those of the first {self.watched} rounds"
        if not self.bounded:
            says += (
                ". L, rho, D_g, Delta* and sigma were seen on some devices at some points: the"
                " bounds are as large as this or larger"
            )
        return says + "."

    def to_table(self) -> dict[str, Any]:
        table = {**asdict(self), "constants": dict(self.constants), "telling": dict(self.telling)}
        if self.paper_rounds is not None and not math.isfinite(self.paper_rounds):
            table["paper_rounds"] = None
        return table | {"sentence": self.sentence}


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True)
class Graphs:
    """Who was mixed with whom in each round, and with which weights."""

    matrices: Sequence[Tensor]
    edges: Sequence[Sequence[tuple[int, int]]]

    @property
    def servers(self) -> int:
        return len(self.matrices[0])

    @property
    def least_weight(self) -> float:
        """c."""
        return min(float(matrix[matrix > 0].min()) for matrix in self.matrices)


def promise_of(
    method: Method,
    penalties: Sequence[float],
    server_steps: Mapping[str, float],
    members: int,
    graphs: Graphs,
    seen: Participation,
    known: Smoothness,
    costs: Constants,
    diameter: float,
    rounds: int,
) -> Promise:
    """The bounds for a job of which no assumption fails; `server_steps` are absolute."""
    q = connection_period(graphs.servers, graphs.edges) or 1
    smoothness = max(
        known.bounds or [c.smoothness for at in known.seen.values() for c in at.values()]
    )
    rho = max(-c.low - penalties[i] for at in known.seen.values() for i, c in at.items())
    noise = 0.0 if method.batch == "all" else costs.sigma / math.sqrt(method.batch)
    problem = Problem(
        servers=graphs.servers,
        members=members,
        penalty=max(penalties),
        smoothness=smoothness,
        nonconvexity=0.0 if known.convex else max(0.0, rho),
        diameter=diameter,
        gradient=costs.gradient,
        excess=costs.excess,
        noise=noise,
        device_step=method.device_step,
        momentum=method.momentum,
        server_step=max(server_steps.values()),
        mixing=lemma_rate(graphs.least_weight, graphs.servers, q),
        period=max(activation_period(seen.active[i], n) or n for i, n in seen.watched.items()),
    )
    return Promise(
        rounds,
        _by_letter(problem, graphs.least_weight, q),
        certificate_bounds(problem, rounds),
        trivial_bounds(problem),
        telling_rounds(problem, rounds),
        None if graphs.servers == 1 else paper_accumulation(problem, rounds).enough_rounds,
        costs.bounded,
        seen.rounds,
    )


def _by_letter(p: Problem, c: float, q: int) -> dict[str, float]:
    return {
        "|V|": p.servers,
        "|Q|": p.members,
        "p": p.period,
        "q": q,
        "c": c,
        "D_X": p.diameter,
        "gamma": p.penalty,
        "L": p.smoothness,
        "rho": p.nonconvexity,
        "D_g": p.gradient,
        "Delta*": p.excess,
        "sigma/sqrt(R)": p.noise,
        "eta_x": p.device_step,
        "zeta": p.momentum,
        "eta_z": p.server_step,
    }
