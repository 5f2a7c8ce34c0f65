"""The page: data, style and script in one HTML file that needs no network and lets none of its data
run as code.
"""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedbcd.palette import style_sheet
from fedbcd.record.tensorfile import write_whole
from fedbcd.report.advice import advice
from fedbcd.report.baseline import best_baseline, job_folders
from fedbcd.report.first import first_screen
from fedbcd.report.planning import arrivals_of, plan_view
from fedbcd.report.runs import find_runs
from fedbcd.report.view import RunRecord, devices_view, read_run, run_view, together

# of all pages, in order
SCRIPTS = (
    "uPlot.iife.min.js",
    "core.js",
    "charts.js",
    "runs.js",
    "timeline.js",
    "sections.js",
    "view.js",
)
MOST_PLANS = 3  # runs that are planned for; a plan takes a second or two


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    plan: bool = True,
    on_notice: Callable[[str], None] = lambda _: None,
) -> int:
    """Write the report on these runs, or on all in these folders; how many there are."""
    records = [read_run(folder) for folder in find_runs(paths)]
    for record in records:
        for notice in record.notices:
            on_notice(notice)
    write_whole(out, page(view_of(records, plan)).encode())
    return len(records)


def view_of(records: Sequence[RunRecord], plan: bool) -> dict[str, Any]:
    runs = [
        run_view(record, str(number), still=still)
        for number, (record, still) in enumerate(zip(records, _still(records), strict=True))
    ]
    planned: dict[str, Any] = {}
    for record, run in zip(records, runs, strict=True):
        if plan and record.group not in planned and len(planned) < MOST_PLANS:
            planned[record.group] = plan_view(arrivals_of(record))
        run["plan"] = planned.get(record.group)
        run["advice"] = advice(run)
    beside = together(runs)
    first = first_screen(runs)
    return {"kind": "report", "title": _title(runs), "runs": runs, "first": first, **beside}


def _still(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    shown = [record.folder for record in records]
    for record in records:
        among = [*shown, *job_folders(record.folder)]
        found = best_baseline(record.identity, among, record.extras.judged)
        yield devices_view(record, found)


def _title(runs: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(run["name"] for run in runs))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def page(view: dict[str, Any]) -> str:
    """The HTML of a view. Scripts and styles are allowed by their hash only, so that nothing else
    can run or be fetched.
    """
    scripts, style = [static(name) for name in SCRIPTS], styles()
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}"
    )
    return PAGE.format(
        title=html.escape(f"{view['title']} · fedbcd"),
        policy=html.escape(policy),
        style=style,
        data=as_script_data(view),
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def as_script_data(view: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts hold."""
    text = json.dumps(view, separators=(",", ":"), allow_nan=False)
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
    )


def styles() -> str:
    return static("uPlot.min.css") + style_sheet() + static("view.css")


def static(name: str) -> str:
    return (files("fedbcd.report") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<div id="page"></div>
<noscript><p class="notice">This page draws its tables and charts with
JavaScript, which is switched off here. Its data are in the page source.</p></noscript>
<script type="application/json" id="data">{data}</script>
{scripts}</body>
</html>
"""
