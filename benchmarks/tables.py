"""The files of docs/results, and what documents take from them: tables and figures.

usage: python benchmarks/tables.py [--draw]       fill the tables of the documents from the files;
                                                  with --draw their figures, too

A file holds the runs of a panel under one reading: of each its settings in full, a probe
(`evidence.probe`), and per seed the columns of its history, with what it was made with. A table in
a document stands between <!-- evidence: NAME --> and <!-- end -->, and is what `TABLES[NAME]` says.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import slow

from fedbcd.experiments.claims import ClaimVerdict, diversity_smooths_the_curve, judge
from fedbcd.experiments.figures import draw_panel
from fedbcd.experiments.paper import PANELS, Setting
from fedbcd.experiments.readings import READINGS as ANSWERS, read_as
from fedbcd.record.history import History, Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (RESULTS / "README.md", RESULTS / "claims.md")
FILLED = (
    *DOCUMENTS,
    ROOT / "README.md",
    ROOT / "docs" / "planner.md",
    RESULTS / "deployed" / "README.md",
)  # these have tables from files
SLOW = ROOT / "benchmarks" / "results" / "slow.json"
DEFAULT_JOB = ROOT / "benchmarks" / "results" / "default_job.json"
COLUMNS = ("round", "clock", "global_accuracy", "personal_accuracy", "worst_decile")
Runs = Mapping[str, Mapping[int, History]]  # title -> seed -> history


# ------------------------------------------------------------------------------------------------
# files
def path_of(file: str) -> Path:
    return RESULTS / ("cifar10" if file.startswith("fig3d") else "mnist") / f"{file}.json"


def files() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob("*/*.json") if _is_of_a_panel(path))


def _is_of_a_panel(path: Path) -> bool:
    return path.parent.name != "deployed" and path.stem.split("-")[0] in PANELS


def read(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path_of(file).read_text())
    return found


def write(file: str, content: Mapping[str, Any]) -> None:
    """As people can read it: a list of numbers is one line."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\s+([-+\d.eNa][^][{}\"]*?)\s+\]", _in_one_line, text)
    path_of(file).write_text(text + "\n")
    runs_of.cache_clear()


def _in_one_line(found: re.Match[str]) -> str:
    return f"[{', '.join(part.strip() for part in found[1].split(','))}]"


@cache
def runs_of(file: str) -> Runs:
    """Nothing where there is no such file."""
    if not path_of(file).exists():
        return {}
    return {
        run["title"]: {int(seed): history_of(one) for seed, one in run["seeds"].items()}
        for run in read(file)["runs"]
    }


def history_of(columns: Mapping[str, list[float]]) -> History:
    """As it is kept: its columns alone."""
    rows = zip(*(columns[name] for name in COLUMNS), strict=True)
    return History([Row(dict(zip(COLUMNS, (int(row[0]), *row[1:]), strict=True))) for row in rows])


# ------------------------------------------------------------------------------------------------
# curves, as claims want them
READINGS = ("", "dealt", "epochs", "timed", "pull", "restart", "absolute", "as-published")
NAMES = {"": "the recipes", "as-published": "as published"}


def unchanged(panel: str, reading: str) -> list[str]:
    """The runs of a panel that a reading leaves as they are."""
    if reading not in ANSWERS:
        return []
    return [job.title for job in PANELS[panel](Setting()).jobs if read_as((reading,), job) == job]


def curves_of(reading: str) -> dict[str, dict[str, list[History]]]:
    """Panel -> run -> a history per seed. Runs that a reading leaves as they are come from the
    recipes' file; of each panel, those seeds that all of its runs have.
    """
    found = {}
    for panel in PANELS:
        own = runs_of(f"{panel}-{reading}" if reading else panel)
        recipes = runs_of(panel)
        same = {title: recipes[title] for title in unchanged(panel, reading) if title in recipes}
        runs = {**same, **own}
        seeds = set.intersection(*(set(seeds) for seeds in runs.values())) if own else set()
        if seeds and len(runs) == len(PANELS[panel](Setting()).jobs):
            cut = min(h.last.round for seeds in own.values() for h in seeds.values())
            found[panel] = {
                title: [_until(runs[title][seed], panel, cut) for seed in sorted(seeds)]
                for title in _in_order(panel, runs)
            }
    return found


def _until(history: History, panel: str, round_: int) -> History:
    """Curves against rounds are compared as far as the shorter of two readings goes."""
    if PANELS[panel](Setting()).axis == "clock":
        return history
    return History([row for row in history if row.round <= round_])


def _in_order(panel: str, runs: Runs) -> list[str]:
    return [job.title for job in PANELS[panel](Setting()).jobs if job.title in runs]


def verdicts_of(reading: str) -> dict[tuple[int, str], ClaimVerdict]:
    curves = curves_of(reading)
    pairs = ("smooth3", "smooth6")
    if not all(panel in curves for panel in pairs):
        curves = {panel: runs for panel, runs in curves.items() if panel not in pairs}
    elif len({len(h) for panel in pairs for h in curves[panel].values()}) > 1:
        least = min(len(h) for panel in pairs for h in curves[panel].values())
        for panel in pairs:
            curves[panel] = {title: h[:least] for title, h in curves[panel].items()}
    return {(v.claim, v.part): v for v in judge(curves)}


# ------------------------------------------------------------------------------------------------
# tables
def number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    spread = f" ({number(stdev(values))})" if len(values) > 1 else ""
    return number(mean(values)) + spread


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(text or '-' for text in line)} |" for line in lines)


def final_accuracy(*asked: tuple[str, Iterable[str]]) -> str:
    """At the last look, of some panels of some readings."""
    rows = []
    for reading, panels in asked:
        for panel in panels:
            runs = runs_of(f"{panel}-{reading}" if reading else panel)
            for title in _in_order(panel, runs):
                last = [h.last for h in runs[title].values()]
                columns = ([getattr(row, name) for row in last] for name in COLUMNS[2:])
                about = [panel, NAMES.get(reading, reading), title]
                rows.append([*about, *map(_mean, columns), str(last[0].round), str(len(last))])
    head = ("panel", "reading", "run", "global", "personal", "worst tenth", "rounds", "seeds")
    return table(head, rows)


def cell(verdict: ClaimVerdict | None) -> str:
    if verdict is None:
        return ""
    spread = f" ({verdict.spread:.3f}; {verdict.seeds})" if verdict.seeds > 1 else ""
    return f"{_word(verdict)} {verdict.effect:+.3f}{spread}"


def _word(verdict: ClaimVerdict) -> str:
    if verdict.seeds == 1:
        return "one seed"
    return ("holds" if verdict.holds else "**does not**") if verdict.clear else "within noise"


def claims_by_reading() -> str:
    found = {reading: verdicts_of(reading) for reading in READINGS}
    keys = list(dict.fromkeys(key for reading in READINGS for key in found[reading]))
    shown = [reading for reading in READINGS if found[reading]]
    rows = [
        [str(key[0]), key[1], *(cell(found[reading].get(key)) for reading in shown)]
        for key in sorted(keys, key=lambda key: key[0])
    ]
    return table(("claim", "on", *(NAMES.get(r, r) for r in shown)), rows)


def verdicts_of_recipes() -> str:
    """Of each claim, under the recipes as they are."""
    rows = []
    for verdict in sorted(verdicts_of("").values(), key=lambda v: v.claim):
        spread = f"{verdict.spread:.3f}" if verdict.seeds > 1 else ""
        numbers = (f"{verdict.effect:+.3f}", spread, str(verdict.seeds), verdict.meaning)
        rows.append([str(verdict.claim), verdict.part, _word(verdict), *numbers])
    return table(("claim", "on", "verdict", "effect", "spread", "seeds", "the effect is"), rows)


def summary_by_reading() -> str:
    """Of each claim: in how many comparisons it holds, cannot be told, does not hold."""
    found = {reading: verdicts_of(reading) for reading in READINGS}
    shown = [reading for reading in READINGS if found[reading]]

    def counted(reading: str, claim: int) -> str:
        mine = [v for (number_, _), v in found[reading].items() if number_ == claim]
        if not mine:
            return ""
        clear = [v for v in mine if v.clear]
        holds = sum(v.holds for v in clear)
        return f"{holds} / {len(mine) - len(clear)} / {len(clear) - holds}"

    claims = sorted({claim for reading in shown for claim, _ in found[reading]})
    rows = [[f"{c}. {CLAIMS[c]}", *(counted(r, c) for r in shown)] for c in claims]
    return table(("claim", *(NAMES.get(r, r) for r in shown)), rows)


def smoothness() -> str:
    """Claim 7 between the looks of Figure 4, where no run has recorded every round."""
    curves = curves_of("")
    rows = []
    for low, high in (("fig4a", "fig4c"), ("fig4b", "fig4d")):
        if low in curves and high in curves:
            pair = {"smooth3": curves[low], "smooth6": curves[high]}
            for verdict in diversity_smooths_the_curve(pair):
                rows.append([f"{low}, {high}", verdict.part.split(", smooth")[0], cell(verdict)])
    return table(("panels", "run", "diversity 3 minus 6"), rows)


CLAIMS = {
    1: "FedAvg, FedProx: personal and global accuracy almost the same",
    2: "FedBCD, FedBCD-I: better personal accuracy than both",
    3: "FedBCD: global progress slower than FedProx, ahead of FedAvg",
    4: "CIFAR-10: FedBCD-I comparable to FedProx in global, much better in personal accuracy",
    5: "Async takes less clock time; beta 0.3 or 0.5 best",
    6: "Async FedBCD-I beats FedProx's global accuracy in clock time",
    7: "higher diversity: a smoother global curve",
    8: "FedBCD-I more competitive than FedBCD, in both models",
    9: "rigorous and first-B Async perform alike",
    10: "ASPG converges faster than plain steps",
    11: "beta smaller than 0.3 is worse",
    12: "FedBCD, FedBCD-I: personal models converge faster than both",
    13: "FedProx: global progress faster than FedBCD-I's, in rounds",
}


def where_made() -> str:
    rows = []
    for file in files():
        content = read(file)
        made = content["made"]
        seconds = sum(
            one["seconds"] or 0 for run in content["runs"] for one in run["seeds"].values()
        )
        on = {one["on"] for run in content["runs"] for one in run["seeds"].values()}
        seeds = sorted({len(run["seeds"]) for run in content["runs"]})
        runs = sum(len(run["seeds"]) for run in content["runs"])
        name = path_of(file).relative_to(RESULTS)
        rows.append(
            [
                f"[{file}]({name})",
                " or ".join(map(str, seeds)),
                f"{runs} runs, {seconds:,.0f} s",
                " or ".join(sorted(on)),
                "; ".join(dict.fromkeys(m["hardware"] for m in made)),
                "; ".join(dict.fromkeys(f"torch {m['torch']}" for m in made)),
                "; ".join(dict.fromkeys(m["commit"] for m in made)),
            ]
        )
    return table(("file", "seeds", "computed in", "on", "of", "with", "commit"), rows)


def slow_ones() -> str:
    """What slow devices and servers cost, and whom: of `slow.py`."""
    found = json.loads(SLOW.read_text())
    lines = [
        [
            row["world"],
            row["cloud"],
            f"{row['rounds']:.0f}",
            f"{number(row['global'], 3)} ({number(row['global_sd'], 3)})",
            f"{row['reached']:.0f}",
            *(number(row[name], 3) for name in ("personal_slow", "personal_others")),
            *(f"{row[name]:.2g}" for name in ("uploads_slow", "uploads_others")),
        ]
        for row in slow.rows(found["runs"], found["until"], 0.3)
    ]
    head = ("world", "cloud", "rounds", "global (sd)", "clock at .3", "personal: slow", "others")
    return table((*head, "uploads: slow", "others"), lines)


SAID = {  # the runs of the default job, as the README calls them
    "Local": "Local: everybody alone",
    "FedAvg": "FedAvg: z is everybody's own",
    "FedAvg + tuning": "FedAvg, fine-tuned by each",
    "FedBCD, sync": "FedBCD, sync cloud",
    "FedBCD-I, async": "FedBCD-I, async cloud",
}


def default_job() -> str:
    """What learning together is worth: of `default_job.py`."""
    rows = json.loads(DEFAULT_JOB.read_text())["job"]
    best = max(row["personal_accuracy"] for row in rows)

    def cell(row: Mapping[str, Any], column: str) -> str:
        text = f"{number(row[column], 3)} ± {number(row[f'{column}_deviation'], 3)}"
        return f"**{text}**" if column == "personal_accuracy" and row[column] == best else text

    lines = [
        [
            SAID[row["title"]],
            " " if row["title"] == "Local" else cell(row, "global_accuracy"),  # nobody uses it
            *(cell(row, column) for column in ("personal_accuracy", "worst_decile")),
            *(
                " " if share is None else f"{100 * share:.0f} %"
                for share in (row["harmed against Local"], row["harmed against FedAvg"])
            ),
        ]
        for row in rows
    ]
    head = ("method", "z, all digits", "own model, own mix", "worst tenth", "lose to Local")
    return table((*head, "to FedAvg"), lines)


def deployed(name: str) -> str:
    """Experiment II with 111 processes, of `experiment2.py`; seconds are of the wall clock."""
    rows = []
    for cloud, run in json.loads((RESULTS / "deployed" / f"{name}.json").read_text())[
        "runs"
    ].items():
        summary, cost = run["summary"], run["summary"]["deployment"]
        rows.append(
            [
                cloud,
                *(str(number) for number in (summary["rounds"], cost["activations"])),
                *(f"{summary[score]:.3f}" for score in ("global_accuracy", "personal_accuracy")),
                f"{cost['round_s']:.3f}",
                f"{run['planned_round_s']:.3f}",
                f"{cost['round_overhead_s']:.3f}",
                f"{cost['phase_overhead_s']:.3f} ({cost['phase_overhead_s_p95']:.3f})",
                f"{cost['answer_s']:.3f}",
                f"{cost['memory_bytes'] / 2**30:.2f} GiB",
                f"{cost['cpu_seconds']:.0f} s",
                f"{cost['bytes_over_least']:.2%}",
                f"{run['load_before']:.1f}, {run['load_after']:.1f}",
            ]
        )
    head = ("cloud", "rounds", "activations", "global", "personal", "s per round", "planned")
    costs = ("overhead per round", "of a phase (95 %)", "of an answer", "memory (PSS)", "CPU")
    return table((*head, *costs, "bytes above the least", "load before, after"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "final": lambda: final_accuracy(("", ("fig3a", "fig3b", "fig3c"))),
    "cifar10": lambda: final_accuracy(("", ("fig3d",)), ("pull", ("fig3d",))),
    "readings": lambda: final_accuracy(*((r, ("fig3a", "fig3b")) for r in READINGS[1:-1])),
    "published": lambda: final_accuracy(("as-published", ("fig3a", "fig3b", "fig4d"))),
    "claims": claims_by_reading,
    "summary": summary_by_reading,
    "smoothness": smoothness,
    "verdicts": verdicts_of_recipes,
    "claimed": lambda: "\n".join(f"{number}. {claim}" for number, claim in CLAIMS.items()),
    "made": where_made,
    "slow": slow_ones,
    "default-job": default_job,
    "deployed": lambda: deployed("fedbcd"),
    "deployed-quiet": lambda: deployed("quiet"),
}
MARKED = re.compile(r"(<!-- evidence: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def filled(text: str) -> str:
    """A document with its tables as the files have them."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


# ------------------------------------------------------------------------------------------------
# figures
# reading -> what is added to a panel's title; FedBCD-I on CIFAR-10 is there as of 0.1.0 only
DRAWN = {"": "", "as-published": ", as published", "pull": ", FedBCD-I as of 0.1.0 (pull)"}


def pictures() -> list[str]:
    """The files that have a picture."""
    return [
        file
        for file in files()
        for panel, _, reading in [file.partition("-")]
        if ((reading in DRAWN and reading != "pull") or file == "fig3d-pull")
        and panel in curves_of(reading)
    ]


def fingerprint(file: str) -> str:
    """Of the curves that the picture of a file is drawn from."""
    panel, _, reading = file.partition("-")
    curves = {
        title: [[h.column(name) for name in COLUMNS] for h in histories]
        for title, histories in curves_of(reading)[panel].items()
    }
    return hashlib.sha256(json.dumps(curves).encode()).hexdigest()[:16]


def drawn_from() -> dict[str, str]:
    path = RESULTS / "drawn_from.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def draw() -> None:
    """Pictures of what has changed since they were drawn."""
    known = drawn_from()
    for file in pictures():
        panel, _, reading = file.partition("-")
        if known.get(file) == fingerprint(file):
            continue
        shown = PANELS[panel](Setting())
        shown = replace(shown, title=shown.title + DRAWN[reading])
        if draw_panel(shown, curves_of(reading)[panel], path_of(file)):
            known[file] = fingerprint(file)
    (RESULTS / "drawn_from.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def fill() -> None:
    for path in FILLED:
        text = path.read_text()
        if filled(text) != text:
            path.write_text(filled(text))
            print(f"tables of {path.relative_to(ROOT)} renewed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true")
    if parser.parse_args().draw:
        draw()
    fill()


if __name__ == "__main__":
    main()
