"""What has changed from one view to the next, so that what is sent once a second is small."""

from collections import OrderedDict
from typing import Any

View = dict[str, Any]
MOST_KEPT = 16  # views, for pages that ask with an older one
GROWING = ("history",)  # tables of columns of which mostly rows are new


class Sent:
    """The last views, by their versions. A page that has one of them is told what is new since."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, View] = OrderedDict()

    def answer(self, view: View, version: str, theirs: str | None) -> View:
        """What to send to a page that has this version of theirs, if any."""
        before = self._views.get(theirs or "")
        self._views[version] = view
        while len(self._views) > MOST_KEPT:
            self._views.popitem(last=False)
        found = view if before is None else changes(before, view)
        return {**found, "version": version}


def changes(before: View, now: View) -> View:
    """`now` without what is as it was `before`: its names are in `same`, in a view and in each of
    its runs; of tables that have grown, `grown` has the new rows.
    """
    old = {run["key"]: run for run in before["runs"]}
    runs = [_run(old[run["key"]], run) if run["key"] in old else run for run in now["runs"]]
    return {**_without_same(before, {k: v for k, v in now.items() if k != "runs"}), "runs": runs}


def _run(before: View, now: View) -> View:
    found = _without_same(before, now) | {"key": now["key"]}
    grown = {
        name: rows
        for name in GROWING
        if name in found and name in before and (rows := _new_rows(before[name], now[name]))
    }
    for name in grown:
        del found[name]
    return found | ({"grown": grown} if grown else {})


def _without_same(before: View, now: View) -> View:
    same = [name for name, value in now.items() if name in before and before[name] == value]
    return {name: value for name, value in now.items() if name not in same} | {"same": same}


def _new_rows(before: View, now: View) -> View | None:
    """What was added to each column; None where anything else is different."""
    if before.keys() != now.keys():
        return None
    if any(now[name][: len(rows)] != rows for name, rows in before.items()):
        return None
    return {name: rows[len(before[name]) :] for name, rows in now.items()}
