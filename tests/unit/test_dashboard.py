"""The dashboard's server: what it answers, to whom, and that it changes nothing."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the dashboard is tested with the extra 'dashboard'")

from fedbcd.dashboard.app import make_app
from fedbcd.dashboard.deployment import WatchedDeployment, addresses_in
from fedbcd.dashboard.library import Library
from fedbcd.errors import ConfigError
from fedbcd.record.runfolder import RunFolder
from fedbcd.report.view import read_run, run_view
from support.roles import Roles, over
from support.runs import fedbcd, hash_folder, train
from support.waiting import wait_for
from support.web import Site, serving

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    for case in ("fedbcd-sync", "fedbcd-async"):
        train(case, rounds=8, evaluate_every=2, out=base / case)
    return base


@pytest.fixture(scope="module")
def site(runs: Path) -> Iterator[Site]:
    with serving(make_app(Library([runs]))) as found:
        yield found


def _key(site: Site, name: str) -> str:
    return next(str(run["key"]) for run in site.get("/api/runs") if run["name"] == name)


# ------------------------------------------------------------------------------------------------
# answers
def test_runs_are_listed_with_the_latest_first(site: Site) -> None:
    found = site.get("/api/runs")
    assert [run["name"] for run in found] == ["fedbcd-async", "fedbcd-sync"]
    assert all(run["finished"] for run in found)
    assert [run["cloud"] for run in found] == ["async", "sync"]


def test_a_view_is_that_of_the_report(site: Site, runs: Path) -> None:
    key = _key(site, "fedbcd-async")
    (found,) = site.get("/api/view", runs=key)["runs"]
    expected = json.loads(json.dumps(run_view(read_run(runs / "fedbcd-async"), key)))
    assert {name: found[name] for name in expected} == expected
    assert found["advice"]


def test_nothing_new_is_an_empty_answer(site: Site) -> None:
    key = _key(site, "fedbcd-sync")
    version = site.get("/api/view", runs=key)["version"]
    assert site.ask("/api/view", runs=key, version=version).status == 204


def test_two_runs_are_compared(site: Site) -> None:
    keys = [_key(site, name) for name in ("fedbcd-sync", "fedbcd-async")]
    view = site.get("/api/view", runs=",".join(keys))
    assert [run["key"] for run in view["runs"]] == keys
    assert {"key": "cloud.name", "values": ["sync", "async"]} in view["differences"]


def test_windows_pages_and_plans(site: Site) -> None:
    key = _key(site, "fedbcd-async")
    whole = site.get("/api/view", runs=key)["runs"][0]["timeline"]
    part = site.get("/api/timeline", run=key, begin=0, end=whole["end"] / 4)
    assert 0 < len(part["phases"]["server"]) < len(whole["phases"]["server"])
    page = site.get("/api/devices", run=key, sort="contact", down="1")
    contacts = [row[3] for row in page["rows"]]
    assert contacts == sorted(contacts, reverse=True)
    plan = site.get("/api/plan", run=key)
    assert plan["first"] == [1, 2, 3, 4]
    assert plan["round_time"] == sorted(plan["round_time"])


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/api/timeline", {"run": "none", "begin": 0, "end": 1}, 404),
        ("/api/timeline", {"run": "none", "begin": "x", "end": 1}, 400),
        ("/api/timeline", {"run": "none", "begin": "nan", "end": 1}, 400),
        ("/api/devices", {"run": "../../etc"}, 404),
        ("/api/plan", {"run": ""}, 404),
        ("/static/../app.py", {}, 404),
        ("/static/view.py", {}, 404),
        ("/elsewhere", {}, 404),
    ],
)
def test_what_is_not_there_is_refused(
    site: Site, path: str, query: dict[str, Any], status: int
) -> None:
    assert site.ask(path, **query).status == status


def test_unknown_runs_are_left_out(site: Site) -> None:
    assert site.get("/api/view", runs="nobody,../../x")["runs"] == []


# ------------------------------------------------------------------------------------------------
# live and broken
def test_a_growing_run_is_followed(runs: Path, tmp_path: Path) -> None:
    whole = (runs / "fedbcd-async" / "events.jsonl").read_bytes()
    log = tmp_path / "live" / "events.jsonl"
    log.parent.mkdir()
    log.write_bytes(whole[: len(whole) // 2])
    with serving(make_app(Library([tmp_path]))) as site:
        key = _key(site, "live")
        first = site.get("/api/view", runs=key)
        log.write_bytes(whole)
        second = site.get("/api/view", runs=key, version=first["version"])
        assert not first["runs"][0]["summary"]["finished"]
        assert second["runs"][0]["summary"]["finished"]
        assert second["runs"][0]["summary"]["rounds"] > first["runs"][0]["summary"]["rounds"]


def _whole(answer: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """As the page puts it together."""

    def filled(part: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in part.items() if name not in ("same", "grown")}
        found |= {name: old[name] for name in part.get("same", ())}
        for name, rows in part.get("grown", {}).items():
            found[name] = {column: old[name][column] + more for column, more in rows.items()}
        return found

    old = {run["key"]: run for run in before["runs"]}
    runs = [filled(run, old.get(run["key"], {})) for run in answer["runs"]]
    return filled(answer, before) | {"runs": runs}


def test_a_page_is_sent_what_has_changed_and_nothing_else(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedbcd-async", tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").unlink()  # its history is the newer one
    log, history = tmp_path / "run" / "events.jsonl", tmp_path / "run" / "history.csv"
    lines, rows = log.read_bytes().splitlines(keepends=True), history.read_text().splitlines(True)
    log.write_bytes(b"".join(lines[:-40]))
    history.write_text("".join(rows[:-4]))
    with serving(make_app(Library([tmp_path]))) as site:
        key = site.get("/api/runs")[0]["key"]
        before = site.get("/api/view", runs=key)
        with log.open("ab") as file:
            file.write(b"".join(lines[-40:]))
        history.write_text("".join(rows))
        answer = site.get("/api/view", runs=key, version=before["version"])
        fresh = site.get("/api/view", runs=key, version="unknown")
    (run,) = answer["runs"]
    assert {"settings", "environment", "partition", "measures"} <= set(run["same"])
    assert len(run["grown"]["history"]["round"]) == 4
    assert len(json.dumps(answer)) < 0.8 * len(json.dumps(fresh))
    assert _whole(answer, before) == fresh


def test_a_broken_log_is_a_notice_and_a_missing_one_too(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    lines = (runs / "fedbcd-sync" / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "broken" / "events.jsonl").write_bytes(
        b"".join([*lines[:99], b"{]\n", *lines[99:]])
    )
    with serving(make_app(Library([tmp_path]))) as site:
        key = _key(site, "broken")
        (run,) = site.get("/api/view", runs=key)["runs"]
        assert "line 100 is damaged" in run["notices"][0]
        assert run["unread"] == 0
        (tmp_path / "broken" / "events.jsonl").unlink()
        assert "there is no event log" in site.get("/api/view", runs=key)["notices"][0]


def test_a_folder_that_is_still_empty_is_no_error(tmp_path: Path) -> None:
    library = Library([tmp_path])
    assert library.runs() == []
    train("fedbcd-sync", rounds=1, out=tmp_path / "later")
    assert [run["name"] for run in library.runs()] == ["later"]


# ------------------------------------------------------------------------------------------------
# safety
def test_nothing_is_changed_by_looking(site: Site, runs: Path) -> None:
    before = hash_folder(runs)
    key = _key(site, "fedbcd-async")
    for path in ("/", "/api/runs", "/api/view", "/api/devices", "/api/plan"):
        site.ask(path, run=key, runs=key)
    assert hash_folder(runs) == before


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_reading_is_answered(site: Site, method: str) -> None:
    for path in ("/", "/api/runs", "/api/view"):
        assert site.ask(path, method).status == 405


def test_every_answer_forbids_what_the_page_does_not_need(site: Site) -> None:
    for path in ("/", "/api/runs", "/static/view.js", "/nowhere"):
        headers = site.ask(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "192.168.1.7:8050"]
)
def test_without_a_token_a_foreign_name_is_refused(site: Site, host: str) -> None:
    """A web page elsewhere that points its own name at this machine gets nothing."""
    assert site.ask("/api/runs", headers={"Host": host}).status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8050", "127.0.0.1", "[::1]:8050"])
def test_loopback_names_are_answered(site: Site, host: str) -> None:
    assert site.ask("/api/runs", headers={"Host": host}).status == 200


def test_with_a_token_only_those_who_bring_it_are_answered(runs: Path) -> None:
    with serving(make_app(Library([runs]), token=TOKEN)) as site:
        assert site.ask("/").status == 401
        assert site.ask("/api/runs", headers={"Authorization": "Bearer wrong"}).status == 401
        assert site.ask("/api/runs", headers={"Cookie": "fedbcd_token=wrong"}).status == 401
        assert site.ask("/", token="wrong").status == 401
        assert site.ask("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
        welcome = site.ask("/", token=TOKEN)
        assert (welcome.status, welcome.headers["location"]) == (303, "/")
        cookie = welcome.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert site.ask("/", headers={"Cookie": cookie.partition(";")[0]}).status == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["--connect", "somewhere"], "must be host:port"),
        (["--host", "0.0.0.0", "--token", "short"], "too easy to guess"),
        (["--connect", "localhost:1", "--port", "99999"], "cannot listen at 127.0.0.1:99999"),
    ],
)
def test_impossible_wishes_are_sentences(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = fedbcd("dashboard", *arguments)
    assert answer.code == 2
    assert words in answer.err


# ------------------------------------------------------------------------------------------------
# deployments
COLLECTING, WAITING = "in its response-and-update phase", "waiting for the coordinator"


@pytest.fixture
def roles() -> Iterator[Roles]:
    found = Roles()
    yield found
    found.close()


def _deployment(roles: Roles) -> WatchedDeployment:
    addresses = [roles.add("coordinator", clock=0.0, round=0, rounds=9, released={})]
    addresses += [
        roles.add(
            f"server/{n}",
            clock=0.0,
            phase=0,
            state=COLLECTING,
            received=1,
            active=2,
            members=4,
            devices=3,
        )
        for n in range(2)
    ]
    return WatchedDeployment(addresses)


def test_a_deployment_is_followed_through_its_statuses(roles: Roles) -> None:
    deployment = _deployment(roles)
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
        roles.say("server/0", clock=2.0, phase=0, state=WAITING, active=2)
        deployment.ask(pool)
        roles.say("server/0", clock=3.0, phase=1, state=COLLECTING, active=2)
        roles.say("coordinator", clock=3.0, round=1, rounds=9, released={"0": 0})
        deployment.ask(pool)
    _, view = deployment.view()
    run = view["run"]
    assert run["summary"]["rounds"] == 1
    assert run["summary"]["fraction"] == pytest.approx(1 / 9)
    assert run["timeline"]["phases"]["ended"][0] == 2.0
    assert run["timeline"]["mixes"] == {"round": [0], "time": [3.0], "servers": [[0]]}
    assert [(s["server"], s["state"], s["missed"]) for s in run["servers"]] == [
        (0, "collecting", 0),
        (1, "collecting", 1),
    ]
    assert [role["actor"] for role in view["roles"]] == ["coordinator", "server/0", "server/1"]
    assert view["roles"][0]["totals"]["refused"] == {"too far": 2.0}
    assert view["metrics"] == {
        'fedbcd_disagreement{server="0"}': 0.25,
        "fedbcd_staleness_rounds_sum": 6.0,
        "fedbcd_staleness_rounds_count": 4.0,
    }


def test_a_dead_coordinator_is_the_first_remark_and_there_is_no_all_clear(roles: Roles) -> None:
    """Nothing was tested and nothing is mixed: the page must not say that accuracy has levelled
    off.
    """
    deployment = _deployment(roles)
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
        _, before = deployment.view()
        assert "levelled off" not in before["run"]["advice"][0]
        roles.stop("coordinator")
        deployment.ask(pool)
    _, view = deployment.view()
    assert view["standing"]["state"] == "running"
    (remark,) = view["run"]["advice"]
    assert re.fullmatch(
        r"coordinator \(for \d+ s\) does not answer: if it is down, nothing is mixed until it is"
        r" back",
        remark,
    )


def test_a_deployment_of_which_nobody_answers_says_so_and_how_far_it_was(roles: Roles) -> None:
    deployment = _deployment(roles)
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
        roles.say("coordinator", clock=3.0, round=4, rounds=9, released={})
        deployment.ask(pool)
        for actor in ("coordinator", "server/0", "server/1"):
            roles.stop(actor)
        deployment.ask(pool)
    _, view = deployment.view()
    assert view["standing"] == {
        "state": "silent",
        "words": "no role answers; last seen at round 4 of 9",
        "command": "",
    }
    assert [remark.split(" ")[0] for remark in view["run"]["advice"]] == ["coordinator", "server/0"]
    assert "server/1" in view["run"]["advice"][1]


def test_a_deployment_that_said_it_has_finished_is_finished_when_its_roles_are_gone(
    roles: Roles,
) -> None:
    deployment = _deployment(roles)
    roles.say("coordinator", clock=3.0, round=9, rounds=9, finished=True, released={})
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
        roles.stop("coordinator")
        deployment.ask(pool)
    _, view = deployment.view()
    assert view["standing"]["state"] == "finished"
    assert view["standing"]["words"] == "finished, 9 rounds"
    assert view["dead"] == view["run"]["notices"] == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (True, "finished, 8 rounds"),
        (False, "stopped at round 8; go on with fedbcd up --resume --out "),
    ],
)
def test_the_folder_of_a_deployment_that_is_over_says_how_it_ended(
    end: bool, words: str, runs: Path, tmp_path: Path
) -> None:
    """The log tells; that nobody answers any more is no trouble then, whether or not the run is
    picked.
    """
    folder = over(runs / "fedbcd-async", tmp_path / "up", end)
    deployment = WatchedDeployment(folder=folder)
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
    with serving(make_app(Library([folder]), deployment)) as site:
        assert site.get("/api/view")["standing"]["words"].startswith(words)
        view = site.get("/api/view", runs=_key(site, "up"))
        assert [bool(role["error"]) for role in view["deployment"]] == [True, True]
        assert view["standing"]["state"] == ("finished" if end else "stopped")
        assert not any(
            "does not answer" in text
            for text in (*view["runs"][0]["advice"], *view["runs"][0]["notices"])
        )
        assert site.get("/api/runs")[0]["state"] == ("finished" if end else "stopped")
        with RunFolder(folder, {}, {}).locked():
            assert site.get("/api/runs")[0]["state"] == ("finished" if end else "goes on")
            view = site.get("/api/view", runs=_key(site, "up"))
            first = view["runs"][0]["advice"][0]
            assert first.startswith("coordinator (never heard) does not answer") != end
            assert view["standing"]["state"] == ("finished" if end else "running")


def test_gain_in_the_dashboard_follows_which_runs_are_looked_at(runs: Path, tmp_path: Path) -> None:
    train("fedprox-sync", rounds=8, out=tmp_path / "fedprox-sync")
    with serving(make_app(Library([runs, tmp_path]))) as site:
        mine, other = _key(site, "fedbcd-sync"), _key(site, "fedprox-sync")
        for _ in range(2):
            gains = {
                run["name"]: run["personal"]["gain"]
                for run in site.get("/api/view", runs=f"{mine},{other}")["runs"]
            }
            assert gains["fedprox-sync"] is None
            assert gains["fedbcd-sync"]["against"] == "fedprox-sync"
            assert (
                site.get("/api/view", runs=mine)["runs"][0]["personal"]["gain"]["against"] is None
            )


def test_a_role_that_does_not_answer_is_named(roles: Roles) -> None:
    deployment = _deployment(roles)
    with ThreadPoolExecutor(2) as pool:
        deployment.ask(pool)
        roles.stop("server/1")
        deployment.ask(pool)
    _, view = deployment.view()
    assert "no answer from 127.0.0.1:" in view["run"]["notices"][0]
    assert [bool(role["error"]) for role in view["roles"]] == [False, False, True]


@pytest.mark.parametrize(
    "answer",
    [
        [],
        "text",
        {"actor": "server/0"},
        {"actor": "server/x", "clock": 1, "phase": 0},
        {"actor": 7},
        {},
    ],
)
def test_strange_statuses_do_no_harm(answer: Any, roles: Roles) -> None:
    address = roles.add("server/0")
    roles.statuses["server/0"] = answer
    deployment = WatchedDeployment([address])
    with ThreadPoolExecutor(1) as pool:
        deployment.ask(pool)
    assert len(deployment.view()[1]["roles"]) == 1


def test_a_deployment_is_served_beside_runs(roles: Roles, runs: Path) -> None:
    deployment = _deployment(roles)
    deployment.start()
    try:
        with serving(make_app(Library([runs]), deployment)) as site:
            wait_for(lambda: len(site.get("/api/view")["deployment"]) == 3)
            view = site.get("/api/view", runs=_key(site, "fedbcd-sync"))
            assert view["runs"][0]["key"] == "deployment"
            assert len(view["runs"]) == 2
            assert site.get("/api/timeline", run="deployment", begin=0, end=1)["servers"] == 2
            assert site.get("/api/plan", run="deployment") is None
    finally:
        deployment.stop()


def test_the_folder_of_a_deployment_names_its_roles(tmp_path: Path) -> None:
    for place, text in (
        ("coordinator", '{"port": 5}'),
        ("server/0", '{"port": 6}'),
        ("server/1", "half"),
    ):
        (tmp_path / "state" / place).mkdir(parents=True)
        (tmp_path / "state" / place / "health.json").write_text(text)
    assert addresses_in(tmp_path) == {"coordinator": "127.0.0.1:5", "server/0": "127.0.0.1:6"}


def test_a_deployment_with_a_growing_log_is_shown_from_that(tmp_path: Path) -> None:
    deployment = WatchedDeployment(folder=tmp_path)
    assert deployment.view()[1]["run"] is not None
    (tmp_path / "events.jsonl").touch()
    assert deployment.view()[1]["run"] is None


def test_addresses_are_checked() -> None:
    make: Callable[[str], WatchedDeployment] = lambda address: WatchedDeployment([address])  # noqa: E731
    for wrong in ("host", "host:", ":5", "host:port"):
        with pytest.raises(ConfigError, match="must be host:port"):
            make(wrong)
