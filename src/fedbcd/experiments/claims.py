"""The paper's claims, each a small function from curves to a verdict. The verdict is what the data
say.

A claim's effect is a number whose sign decides: positive, the claim holds. It is computed per seed;
the verdict is on the mean, and `clear` says whether the mean differs from zero by more than chance
would have it in 5 of 100 cases (Student's t). Personal accuracy is as the recipes read the paper,
measure = "pooled-labels", which its panels name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev

from fedbcd.record.history import GLOBAL, PERSONAL, History

Curves = Mapping[str, Mapping[str, Sequence[History]]]  # panel -> run -> one history per seed
CLOSE = 0.01  # two accuracies that differ by less are "almost the same"
SIMILAR = 0.02  # two curves whose mean heights differ by less are "similar"


@dataclass(frozen=True)
class ClaimVerdict:
    """What became of a claim."""

    claim: int
    part: str
    holds: bool
    clear: bool
    effect: float  # mean over seeds; the claim asks for more than 0
    spread: float  # standard deviation over seeds
    seeds: int
    meaning: str  # of the effect


def _verdict(claim: int, part: str, effects: Sequence[float], meaning: str) -> ClaimVerdict:
    effect, spread = mean(effects), stdev(effects) if len(effects) > 1 else 0.0
    clear = (
        len(effects) > 1 and abs(effect) > _student(len(effects) - 1) * spread / len(effects) ** 0.5
    )
    return ClaimVerdict(claim, part, effect > 0, clear, effect, spread, len(effects), meaning)


def _student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def consensus_methods_have_one_accuracy(curves: Curves) -> list[ClaimVerdict]:
    """1. FedAvg and FedProx: "the personalized and global performance ... is almost the same"."""
    return [
        _verdict(
            1,
            f"{run}, {panel}",
            [CLOSE - abs(h.last[PERSONAL] - h.last[GLOBAL]) for h in curves[panel][run]],
            f"{CLOSE} minus the final difference of personal and global accuracy",
        )
        for panel in _present(curves, "fig3")
        for run in ("FedAvg", "FedProx")
    ]


def personal_models_are_better(curves: Curves) -> list[ClaimVerdict]:
    """2. FedBCD and FedBCD-I "provide better personalized performance"."""
    return [
        _verdict(
            2,
            f"{run}, {panel}",
            [
                a - max(b, c)
                for a, b, c in zip(
                    *(_final(curves[panel][r], PERSONAL) for r in (run, "FedAvg", "FedProx")),
                    strict=True,
                )
            ],
            "final personal accuracy minus the better of FedAvg's and FedProx's",
        )
        for panel in _present(curves, "fig3")
        for run in ("FedBCD", "FedBCD-I")
    ]


def fedbcd_is_slow_but_ahead_of_fedavg(curves: Curves) -> list[ClaimVerdict]:
    """3. FedBCD "suffers from slow update progress when |Q_n(t)| is low and is only faster than
    FedAvg" (global accuracy).
    """
    meaning = "mean global accuracy along the curve, {} minus {}"
    verdicts = []
    for panel in _present(curves, "fig3"):
        areas = {
            run: [_area(h, "round") for h in curves[panel][run]]
            for run in ("FedAvg", "FedProx", "FedBCD")
        }
        for a, b in (("FedProx", "FedBCD"), ("FedBCD", "FedAvg")):
            effects = [x - y for x, y in zip(areas[a], areas[b], strict=True)]
            verdicts.append(
                _verdict(3, f"{a} ahead of {b}, {panel}", effects, meaning.format(a, b))
            )
    return verdicts


def cifar_fedbcd_i_is_comparable_and_more_personal(curves: Curves) -> list[ClaimVerdict]:
    """4. CIFAR-10: "FedBCD-I has global performance comparable to FedProx, while giving much better
    personalized performance".
    """
    if "fig3d" not in curves:
        return []
    ours, theirs = (curves["fig3d"][run] for run in ("FedBCD-I", "FedProx"))
    margin, much = 0.05, 0.05
    gaps = [a - b for a, b in zip(_final(ours, GLOBAL), _final(theirs, GLOBAL), strict=True)]
    gains = [a - b for a, b in zip(_final(ours, PERSONAL), _final(theirs, PERSONAL), strict=True)]
    return [
        _verdict(
            4,
            "global comparable",
            [gap + margin for gap in gaps],
            f"final global accuracy minus FedProx's, plus {margin}",
        ),
        _verdict(
            4,
            "personal much better",
            [gain - much for gain in gains],
            f"final personal accuracy minus FedProx's, minus {much}",
        ),
    ]


def async_takes_less_clock_time(curves: Curves) -> list[ClaimVerdict]:
    """5. "the Async-cloud update is clearly more efficient"; "beta = 0.3 or 0.5 seems to strike a
    good balance".
    """
    verdicts = []
    for panel in _present(curves, "fig4"):
        runs = curves[panel]
        for beta in ("0.3", "0.5", "0.7"):
            speedups = [
                _time_saved(s, a)
                for s, a in zip(runs["Sync"], runs[f"Async, beta {beta}"], strict=True)
            ]
            verdicts.append(
                _verdict(
                    5,
                    f"beta {beta}, {panel}",
                    speedups,
                    "share of Sync's clock time saved to the same global accuracy",
                )
            )
        best = {
            b: [_area(h, "clock") for h in runs[f"Async, beta {b}"]] for b in ("0.3", "0.5", "0.7")
        }
        better = max(
            "0.3", "0.5", key=lambda b: mean(best[b])
        )  # over all seeds: the better of each seed would always look good
        effects = [x - z for x, z in zip(best[better], best["0.7"], strict=True)]
        verdicts.append(
            _verdict(
                5,
                f"0.3 or 0.5 best, {panel}",
                effects,
                f"mean global accuracy along the clock, {better} minus 0.7",
            )
        )
    return verdicts


def async_fedbcd_i_beats_fedprox(curves: Curves) -> list[ClaimVerdict]:
    """6. "by using the asynchronous update, our scheme could outperform FedProx even for the global
    performance in terms of runtime".
    """
    if "fig4d" not in curves:
        return []
    runs = curves["fig4d"]
    return [
        _verdict(
            6,
            f"beta {beta}, fig4d",
            [
                _area(a, "clock") - _area(p, "clock")
                for a, p in zip(runs[f"Async, beta {beta}"], runs["FedProx, Sync"], strict=True)
            ],
            "mean global accuracy along the clock, FedBCD-I minus FedProx",
        )
        for beta in ("0.3", "0.5", "0.7")
    ]


def diversity_smooths_the_curve(curves: Curves) -> list[ClaimVerdict]:
    """7. "the higher diversity leads to a smoother improvement of the global performance"."""
    verdicts = []
    for low, high in (("smooth3", "smooth6"),):
        if low in curves and high in curves:
            for run in curves[low]:
                pairs = zip(curves[low][run], curves[high][run], strict=True)
                effects = [_roughness(a) - _roughness(b) for a, b in pairs]
                verdicts.append(
                    _verdict(
                        7,
                        f"{run}, {low} against {high}",
                        effects,
                        "total fall of the global curve, diversity 3 minus 6",
                    )
                )
    return verdicts


def fedbcd_i_is_more_competitive(curves: Curves) -> list[ClaimVerdict]:
    """8. "FedBCD-I turns out to be more competitive", the abstract's "variant that performs
    empirically better": along the curve, in both models.
    """
    return [
        _verdict(
            8,
            f"{column.removesuffix('_accuracy')}, {panel}",
            [
                _area(a, "round", column) - _area(b, "round", column)
                for a, b in zip(curves[panel]["FedBCD-I"], curves[panel]["FedBCD"], strict=True)
            ],
            f"mean {column.replace('_', ' ')} along the curve, FedBCD-I minus FedBCD",
        )
        for panel in _present(curves, "fig3")
        for column in (GLOBAL, PERSONAL)
    ]


def rigorous_async_is_similar(curves: Curves) -> list[ClaimVerdict]:
    """9. Appendix A: "these protocols give rise to similar performance"."""
    runs = curves.get("rigorous", {})
    return [
        _verdict(
            9,
            f"{who}, beta {beta}",
            [
                SIMILAR - abs(_area(a, "clock") - _area(b, "clock"))
                for a, b in zip(
                    *(runs[f"{who}, {which}, beta {beta}"] for which in ("first B", "rigorous")),
                    strict=True,
                )
            ],
            f"{SIMILAR} minus the difference of mean global accuracy along the clock",
        )
        for who in ("FedBCD", "FedBCD-I") * bool(runs)
        for beta in ("0.3", "0.5")
    ]


def aspg_converges_faster(curves: Curves) -> list[ClaimVerdict]:
    """10. "Empirically, the ASPG update is observed to converge faster": in the models that devices
    train.
    """
    runs = curves.get("aspg", {})
    return [
        _verdict(
            10,
            who,
            [
                _area(a, "round", PERSONAL) - _area(b, "round", PERSONAL)
                for a, b in zip(runs[f"{who}, ASPG"], runs[f"{who}, plain steps"], strict=True)
            ],
            "mean personal accuracy along the curve, with extrapolation minus without",
        )
        for who in ("FedProx", "FedBCD", "FedBCD-I") * bool(runs)
    ]


def smaller_beta_is_worse(curves: Curves) -> list[ClaimVerdict]:
    """11. "beta = 0.3 or 0.5 seems to strike a good balance": better than a smaller one, too."""
    runs = curves.get("beta", {})
    return [
        _verdict(
            11,
            f"0.3 against {beta}",
            [
                _area(a, "clock") - _area(b, "clock")
                for a, b in zip(runs["Async, beta 0.3"], runs[f"Async, beta {beta}"], strict=True)
            ],
            f"mean global accuracy along the clock, beta 0.3 minus {beta}",
        )
        for beta in ("0.2", "0.1") * bool(runs)
    ]


def personal_models_converge_faster(curves: Curves) -> list[ClaimVerdict]:
    """12. Abstract: "faster convergence for personalized models on the edge devices, compared to
    the state of the art".
    """
    areas = {
        panel: {
            run: [_area(h, "round", PERSONAL) for h in histories]
            for run, histories in curves[panel].items()
        }
        for panel in _present(curves, "fig3")
    }
    return [
        _verdict(
            12,
            f"{run}, {panel}",
            [a - max(b, c) for a, b, c in zip(of[run], of["FedAvg"], of["FedProx"], strict=True)],
            "mean personal accuracy along the curve minus the better of FedAvg's and FedProx's",
        )
        for panel, of in areas.items()
        for run in ("FedBCD", "FedBCD-I")
    ]


def fedprox_is_faster_in_rounds(curves: Curves) -> list[ClaimVerdict]:
    """13. "FedProx ... is generally faster than our methods for the global performance", on
    Sync-cloud; against FedBCD it is claim 3.
    """
    return [
        _verdict(
            13,
            panel,
            [
                _area(p, "round") - _area(own, "round")
                for p, own in zip(curves[panel]["FedProx"], curves[panel]["FedBCD-I"], strict=True)
            ],
            "mean global accuracy along the curve, FedProx minus FedBCD-I",
        )
        for panel in _present(curves, "fig3")
    ]


CLAIMS: tuple[Callable[[Curves], list[ClaimVerdict]], ...] = (
    consensus_methods_have_one_accuracy,
    personal_models_are_better,
    fedbcd_is_slow_but_ahead_of_fedavg,
    cifar_fedbcd_i_is_comparable_and_more_personal,
    async_takes_less_clock_time,
    async_fedbcd_i_beats_fedprox,
    diversity_smooths_the_curve,
    fedbcd_i_is_more_competitive,
    rigorous_async_is_similar,
    aspg_converges_faster,
    smaller_beta_is_worse,
    personal_models_converge_faster,
    fedprox_is_faster_in_rounds,
)


def judge(curves: Curves) -> list[ClaimVerdict]:
    """Every claim that the panels at hand can speak to."""
    return [verdict for claim in CLAIMS for verdict in claim(curves)]


def _present(curves: Curves, prefix: str) -> list[str]:
    return sorted(panel for panel in curves if panel.startswith(prefix))


def _final(histories: Sequence[History], column: str) -> list[float]:
    return [h.last[column] for h in histories]


def _area(history: History, axis: str, column: str = GLOBAL) -> float:
    """The mean height of a curve over its axis (trapezoids)."""
    x, y = history.column(axis), history.column(column)
    area = sum((b - a) * (u + v) / 2 for a, b, u, v in zip(x, x[1:], y, y[1:], strict=False))
    return area / (x[-1] - x[0])


def _time_saved(sync: History, other: History) -> float:
    """1 - (clock time of `other` / clock time of `sync`) to 90 % of the best accuracy that both
    reach.
    """
    goal = 0.9 * min(max(h.column(GLOBAL)) for h in (sync, other))
    theirs, ours = (_first_time(h, goal) for h in (sync, other))
    return 1 - ours / theirs


def _first_time(history: History, goal: float) -> float:
    """When the curve first reaches `goal`, between two looks by a straight line."""
    rows = list(history)
    for before, after in pairwise(rows):
        if after[GLOBAL] >= goal:
            rise = max(after[GLOBAL] - before[GLOBAL], 1e-12)
            share = min(1.0, max(0.0, (goal - before[GLOBAL]) / rise))
            return before["clock"] + share * (after["clock"] - before["clock"])
    return rows[-1]["clock"]


def _roughness(history: History) -> float:
    """How far the global curve falls in total, from look to look."""
    y = history.column(GLOBAL)
    return sum(max(0.0, a - b) for a, b in pairwise(y))
