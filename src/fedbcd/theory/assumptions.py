"""Assumptions 1 to 5, judged: each holds, fails, lapses, or cannot be known, with the numbers and
the nearest values that would pass.

A failure is shown by an instance, so it is certain. That something holds is said only where it
follows from the settings or was seen on the whole schedule; what is only estimated from below, such
as L_i at some points, "cannot be known" when it does not fail.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from fedbcd.theory.bounds import device_step_limit, momentum_limit, server_step_limit
from fedbcd.theory.curvature import Curvature
from fedbcd.theory.mixing import activation_period, connection_period, cut_off


class Verdict(StrEnum):
    """What can be said of an assumption."""

    HOLDS = "holds"
    FAILS = "fails"
    LAPSES = "lapses"  # it was not asked for, and what builds on it says nothing
    UNKNOWN = "cannot be known"


@dataclass(frozen=True)
class Finding:
    """One assumption, judged."""

    assumption: str  # e.g. "4(i)"
    says: str  # what it asks for
    verdict: Verdict
    found: str  # the numbers
    remedy: str = ""  # the nearest values that would pass


@dataclass(frozen=True)
class Smoothness:
    """What is known of L_i and rho_i: the curvature seen on some devices at some points, or bounds
    that hold everywhere.
    """

    seen: Mapping[
        str, Mapping[int, Curvature]
    ]  # where -> device -> the ends of its Hessian's spectrum there
    bounds: Sequence[
        float
    ] = ()  # of every device: an L_i that holds for all points, where one is known
    convex: bool = False  # every g_i is known to be convex
    kinks: bool = False  # the model is known not to be smooth

    @property
    def devices(self) -> int:
        return len(next(iter(self.seen.values())))


# ------------------------------------------------------------------------------------------------
# Assumption 1
def activation(
    rounds_active: Mapping[int, Sequence[int]],
    rounds: Mapping[int, int],
    source: str,
    beyond: str = "",
) -> Finding:
    """1(i): each device is active at least once in p rounds. `rounds` says for how many rounds each
    device was watched.

    `beyond` names the rounds of the run that were not seen, if there are any: of those, nothing can
    be known.
    """
    says = "each device is active at least once in p rounds"
    if not rounds:
        why = "every device joins or leaves, so that their waits say nothing"
        return Finding("1(i)", says, Verdict.UNKNOWN, why)
    periods = {
        device: activation_period(rounds_active.get(device, ()), rounds[device])
        for device in rounds
    }
    never = sorted(device for device, period in periods.items() if period is None)
    most = max(rounds.values(), default=0)
    if never:
        names = ", ".join(map(str, never[:5])) + (" ..." if len(never) > 5 else "")
        found = (
            f"{len(never)} of {len(rounds)} devices never active in {most} rounds ({source}):"
            f" {names}"
        )
        return _as_far_as_seen(
            Finding(
                "1(i)", says, Verdict.FAILS, found, "more active devices per phase, or more rounds"
            ),
            beyond,
        )
    slowest = max(periods, key=lambda device: (periods[device] or 0, -device))
    found = (
        f"p = {periods[slowest]} over {most} rounds ({source}); the longest wait is device"
        f" {slowest}'s"
    )
    return _as_far_as_seen(Finding("1(i)", says, Verdict.HOLDS, found), beyond)


def _as_far_as_seen(finding: Finding, beyond: str) -> Finding:
    if not beyond:
        return finding
    return replace(
        finding,
        verdict=Verdict.UNKNOWN,
        found=f"{finding.found}; {beyond}",
        remedy="--rounds that reaches the end of the run",
    )


def connectivity(
    servers: int, edges: Sequence[Sequence[tuple[int, int]]], source: str, beyond: str = ""
) -> Finding:
    """1(ii): over any q rounds the servers' graphs together are strongly connected; `beyond` as for
    `activation`.
    """
    says = "the servers' graphs of any q rounds are jointly connected"
    period = connection_period(servers, edges)
    if period is not None:
        return _as_far_as_seen(
            Finding(
                "1(ii)", says, Verdict.HOLDS, f"q = {period} over {len(edges)} rounds ({source})"
            ),
            beyond,
        )
    parts = cut_off(servers, {pair for round_ in edges for pair in round_})
    apart = "; ".join(
        "{" + ", ".join(map(str, part[:6])) + (", ..." if len(part) > 6 else "") + "}"
        for part in parts[:3]
    )
    found = (
        f"disconnected: {len(parts)} groups of servers never mix in {len(edges)} rounds ({source}):"
        f" {apart}"
    )
    remedy = f"let a server of {parts[1][:3]} mix with one of {parts[0][:3]}"
    return _as_far_as_seen(Finding("1(ii)", says, Verdict.FAILS, found, remedy), beyond)


# ------------------------------------------------------------------------------------------------
# Assumption 2
WITHOUT_D_X = (
    "X is not bounded, so what holds D_X says nothing: all three lines of Theorem 1, and the gap;"
    " certificates have the norm of the gradient mapping in its place. What is left: steps descend,"
    " up to noise and spread; with Sync-cloud and exact gradients, gradients and pull go to 0"
)


def compactness(diameter: float | None) -> Finding:
    """2(i): X is convex and compact."""
    says = "X is convex and compact"
    if diameter is None:
        return Finding(
            "2(i)", says, Verdict.UNKNOWN, "the set is one of your own, whose diameter is not known"
        )
    if diameter == math.inf:
        return Finding(
            "2(i)",
            says,
            Verdict.LAPSES,
            WITHOUT_D_X,
            'projection = { name = "box", low = -2, high = 2 }',
        )
    return Finding("2(i)", says, Verdict.HOLDS, f"diameter D_X = {diameter:.4g}")


def smoothness(known: Smoothness | None, why_not: str = "") -> Finding:
    """2(ii): g_i is L_i-smooth on the extended set, bounded, with a bounded gradient."""
    says = "g_i is L_i-smooth"
    if known is None:
        return Finding("2(ii)", says, Verdict.UNKNOWN, f"L_i could not be estimated: {why_not}")
    found = f"L_i seen ({known.devices} devices): " + "; ".join(
        _range(where, at.values()) for where, at in known.seen.items()
    )
    if known.bounds:
        return Finding(
            "2(ii)", says, Verdict.HOLDS, f"L_i <= {max(known.bounds):.3g} everywhere; {found}"
        )
    if known.kinks:
        found += "; the model has kinks (ReLU, max-pooling), where no finite L_i exists"
        return Finding(
            "2(ii)", says, Verdict.FAILS, found, "a smooth activation, such as GELU or tanh"
        )
    return Finding("2(ii)", says, Verdict.UNKNOWN, found)


def _range(where: str, seen: Iterable[Curvature]) -> str:
    all_ = sorted(seen, key=lambda c: c.smoothness)
    return (
        f"{all_[0].smoothness:.3g} to {all_[-1].smoothness:.3g} +- {max(c.error for c in all_):.1g}"
        f" {where}"
    )


# ------------------------------------------------------------------------------------------------
# Assumption 3
def mixing_weights(matrices: Sequence[Tensor]) -> list[Finding]:
    """3(i): a_nm is 0 or at least c; 3(ii): doubly stochastic. Also a_nn >= c, which the matrix
    convergence lemma needs.
    """
    least = min(float(m[m > 0].min()) if bool((m > 0).any()) else 0.0 for m in matrices)
    lonely = [
        (k, int(m.diagonal().argmin()))
        for k, m in enumerate(matrices)
        if float(m.diagonal().min()) <= 0
    ]
    says = "a_nm is 0 or at least c, and a_nn at least c"
    if lonely:
        k, n = lonely[0]
        found = (
            f"c = {least:.4g}, but a_nn = 0 for server {n} in matrix {k}: a pair that only swaps"
            " models never agrees"
        )
        first = Finding("3(i)", says, Verdict.FAILS, found, "(a + identity)/2 in place of a")
    else:
        first = Finding("3(i)", says, Verdict.HOLDS, f"c = {least:.4g}")
    worst = max(float((m.sum(axis) - 1).abs().max()) for m in matrices for axis in (0, 1))
    negative = min(float(m.min()) for m in matrices)
    says = "a is doubly stochastic"
    if worst <= 1e-9 and negative >= 0:
        return [
            first,
            Finding("3(ii)", says, Verdict.HOLDS, f"rows and columns sum to 1 within {worst:.1e}"),
        ]
    found = (
        f"an entry is {negative:g}"
        if negative < 0
        else f"a row or column sum is off 1 by {worst:.3g}"
    )
    return [
        first,
        Finding(
            "3(ii)",
            says,
            Verdict.FAILS,
            found,
            "Metropolis weights: a_nm = 1/(1 + max degree of n and m)",
        ),
    ]


# ------------------------------------------------------------------------------------------------
# Assumption 4
def device_step(step: float, penalties: Sequence[float], known: Smoothness | None) -> Finding:
    """4(i): eta_x <= min 1/(L_i + gamma_i), each L_i with the gamma_i of its own device."""
    says = "eta_x <= 1/(L_i + gamma_i)"
    limits = {
        "where g_i is flat": min(device_step_limit(0.0, gamma) for gamma in penalties)
    }  # whatever L_i is
    if known is None and step <= limits["where g_i is flat"]:
        return Finding("4(i)", says, Verdict.UNKNOWN, f"eta_x = {step:g}; L_i is not known")
    if known is not None and known.bounds:
        limit = min(
            device_step_limit(bound, gamma)
            for bound, gamma in zip(known.bounds, penalties, strict=True)
        )
        if step <= limit:
            found = f"eta_x = {step:g}, at most {limit:.3g} for L_i <= {max(known.bounds):.3g}"
            return Finding("4(i)", says, Verdict.HOLDS, found)
    if known is not None:
        measured = {
            where: min(device_step_limit(c.smoothness, penalties[i]) for i, c in at.items())
            for where, at in known.seen.items()
        }
        limits = measured if min(measured.values()) <= min(limits.values()) else measured | limits
    found = f"eta_x = {step:g}; L_i asks for at most " + ", ".join(
        f"{limit:.3g} {where}" for where, limit in limits.items()
    )
    if step > min(limits.values()):
        remedy = f"device_step <= {_rounded_down(min(limits.values()))}"
        return Finding("4(i)", says, Verdict.FAILS, found, remedy)
    found += "; not contradicted, but L_i may be larger elsewhere in X"
    return Finding("4(i)", says, Verdict.UNKNOWN, found)


def server_step(
    absolute: Mapping[str, float], penalty: float, members: int, total_rounds: int | None
) -> Finding:
    """4(ii): a common, constant eta_z = d/sqrt(T) <= 1/(max gamma_i max |Q_n|). `absolute` has
    eta_z per server group, as printed.

    `total_rounds` is T; None where a run that ends by the clock was not seen to its end.
    """
    says = "eta_z = d/sqrt(T) <= 1/(max gamma_i max |Q_n|), the same everywhere"
    limit = server_step_limit(penalty, members)
    low, high = min(absolute.values()), max(absolute.values())
    d = (
        "T is not known"
        if total_rounds is None
        else f"d = {high * total_rounds**0.5:.3g} for T = {total_rounds}"
    )
    found = f"eta_z = {high:.4g}, at most {limit:.4g}; {d}"
    if high > limit * (1 + 1e-9):
        return Finding(
            "4(ii)", says, Verdict.FAILS, found, f"server_step <= {limit:.4g} in absolute form"
        )
    if high > low * (1 + 1e-9):
        found = f"eta_z differs between servers: {low:.4g} to {high:.4g}"
        return Finding(
            "4(ii)",
            says,
            Verdict.FAILS,
            found,
            f"server_step_form = absolute, server_step = {limit:.4g}, or equal servers",
        )
    return Finding("4(ii)", says, Verdict.HOLDS, found)


def unequal_server_steps() -> Finding:
    """4(ii) on the Async-cloud of the main text: eta_z is 0 for servers that are not among the
    first B.
    """
    says = "eta_z = d/sqrt(T) <= 1/(max gamma_i max |Q_n|), the same everywhere"
    found = (
        "the Async-cloud leaves servers out of a round (eta_z = 0 for them), as the paper says"
        " itself"
    )
    return Finding("4(ii)", says, Verdict.FAILS, found, 'cloud = { name = "rigorous", first = B }')


def momentum(
    zeta: float,
    step: float,
    penalties: Sequence[float],
    known: Smoothness | None,
    step_fails: bool = False,
) -> Finding:
    """4(iii): zeta <= omega/sqrt(1 + rho_i eta_x) for an omega below 1; rho_i is the weak convexity
    of f_i = g_i + penalty, of each device with its own gamma_i.

    rho_i <= L_i + gamma_i <= 1/eta_x bounds rho_i by the step, unless 4(i) fails (`step_fails`).
    """
    says = "zeta < 1/sqrt(1 + rho_i eta_x)"
    if known is not None and known.convex:
        return Finding(
            "4(iii)", says, Verdict.HOLDS, f"zeta = {zeta:g}, below 1: g_i is convex, rho_i = 0"
        )
    worst = momentum_limit(1 / step, step)
    if zeta < worst and not step_fails:
        return Finding(
            "4(iii)",
            says,
            Verdict.HOLDS,
            f"zeta = {zeta:g}, below {worst:.3g}, which is enough for any rho_i that 4(i) allows",
        )
    enough = f"momentum < {worst:.3g} is always enough" + (" once 4(i) holds" if step_fails else "")
    if known is None:
        return Finding(
            "4(iii)", says, Verdict.UNKNOWN, f"zeta = {zeta:g}; rho_i is not known", enough
        )
    worst_at = {
        where: max(at.items(), key=lambda item: -item[1].low - penalties[item[0]])
        for where, at in known.seen.items()
    }
    rho = {where: max(0.0, -c.low - penalties[i]) for where, (i, c) in worst_at.items()}
    limits = {where: momentum_limit(value, step) for where, value in rho.items()}
    found = f"zeta = {zeta:g}; rho_i asks for less than " + ", ".join(
        f"{limit:.3g} {where} (rho_i = {rho[where]:.3g} +- {worst_at[where][1].low_error:.1g})"
        for where, limit in limits.items()
    )
    if zeta >= min(limits.values()):
        return Finding(
            "4(iii)",
            says,
            Verdict.FAILS,
            found,
            f"momentum < {_rounded_down(min(limits.values()))}",
        )
    return Finding("4(iii)", says, Verdict.UNKNOWN, found + "; not contradicted", enough)


def _rounded_down(value: float) -> str:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(value / unit) * unit:.3g}"


# ------------------------------------------------------------------------------------------------
# Assumption 5
@dataclass(frozen=True)
class Bias:
    """Why mini-batch gradients may be biased, and what was measured of it on one device, at the
    start.
    """

    reasons: tuple[str, ...]
    remedies: tuple[str, ...]
    measured: float | None = None  # the length of the mean error of mini-batch gradients
    error: float = 0.0  # of its square, by chance
    gradient: float = 0.0  # the length of the exact gradient

    @property
    def is_clear(self) -> bool:
        """Whether what was measured is no chance: its square is more than four standard errors
        above 0.
        """
        return self.measured is not None and self.measured**2 > 4 * self.error

    def __str__(self) -> str:
        text = "; ".join(self.reasons)
        if self.measured is None:
            return f"{text}; the bias was not measured"
        size = f"{self.measured:.3g} on a gradient of length {self.gradient:.3g}"
        return f"{text}; bias measured on a device, at the start: {size}" + (
            "" if self.is_clear else ", no more than chance"
        )


def noise(
    sigma: float | None, batch: int | None, devices: int, bias: Bias | None = None
) -> Finding:
    """5: mini-batch gradients are unbiased with variance at most sigma^2."""
    says = "mini-batch gradients are unbiased, with bounded variance"
    if batch is None and bias is None:
        return Finding("5", says, Verdict.HOLDS, "gradients are exact: sigma = 0")
    if bias is not None:
        return Finding(
            "5",
            says,
            Verdict.FAILS if bias.is_clear else Verdict.UNKNOWN,
            str(bias),
            "; ".join(bias.remedies),
        )
    if sigma is None or batch is None:
        return Finding(
            "5",
            says,
            Verdict.HOLDS,
            "samples are drawn evenly from finite data, so sigma is finite; it was not estimated",
        )
    found = (
        f"unbiased by construction; sigma = {sigma:.3g} at the start ({devices} devices), so"
        f" sigma/sqrt(R) = {sigma / batch**0.5:.3g}"
    )
    return Finding("5", says, Verdict.HOLDS, found)
