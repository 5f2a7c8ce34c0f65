"""The report: what is read out of a run folder, what is said about it, and that the page is whole,
closed and harmless.
"""

import itertools
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedbcd as fb
from fedbcd.errors import RecordError
from fedbcd.planner.explain import explain
from fedbcd.record.runfolder import RunFolder, is_at_work
from fedbcd.record.timeline import Timeline
from fedbcd.report.advice import advice
from fedbcd.report.follow import LogFollower
from fedbcd.report.page import page, view_of, write_report
from fedbcd.report.protocol_view import device_page, timeline_view
from fedbcd.report.runs import find_runs, read_extras
from fedbcd.report.standing import standing
from fedbcd.report.view import RunRecord, differences, read_run, run_view, settings_in
from support.runs import CASES, DEVICES, MLP, SERVERS, fedbcd, train, write_job

ASYNC = "fedbcd-i-async"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run of each kind, made once."""
    base = tmp_path_factory.mktemp("runs")

    def make(case: str) -> Path:
        if not (base / case).exists():
            train(case, rounds=8, evaluate_every=2, certify_every=1, out=base / case)
        return base / case

    return make


def _timeline(path: Path) -> Timeline:
    timeline = read_run(path).timeline
    assert timeline is not None
    return timeline


# ------------------------------------------------------------------------------------------------
# the event log
@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedbcd-rigorous"])
def test_the_longest_round_is_explained_as_fedbcd_explain_does(
    case: str, folder: Callable[[str], Path]
) -> None:
    story = explain(folder(case))
    longest = run_view(read_run(folder(case)), "0")["rounds"]["longest"][0]
    assert longest["round"] == story.round
    assert longest["length"] == pytest.approx(story.length)
    assert (longest["server"], longest["device"]) == (story.last.server, story.last.last_device)
    assert longest["work"] == pytest.approx(story.last.work)


@pytest.mark.parametrize("case", CASES)
def test_every_moment_of_every_server_has_one_cause(
    case: str, folder: Callable[[str], Path]
) -> None:
    """arrival + work + waiting + aggregation is the whole of each server's time."""
    record = read_run(folder(case))
    assert record.timeline is not None
    spent = run_view(record, "0")["spent"]
    totals = np.sum(
        [spent["per_server"][cause] for cause in ("arrival", "work", "waiting", "aggregation")],
        axis=0,
    )
    assert totals == pytest.approx([record.timeline.now] * SERVERS, abs=1e-3)
    assert sum(spent["share"].values()) == pytest.approx(1.0, abs=1e-3)


def test_traffic_counts_every_model_that_was_sent(folder: Callable[[str], Path]) -> None:
    """By hand, from the sync run: q uploads and downloads of float32, one float64 sum and one model
    per server and round.
    """
    view = run_view(read_run(folder("fedbcd-sync")), "0")
    values = view["summary"]["values"]
    per_round = SERVERS * (2 * (4 + 4) + 8 + 4) * values
    assert view["history"]["round"] == [0, 2, 4, 6, 8]
    assert view["history"]["bytes"] == [per_round * k for k in (0, 2, 4, 6, 8)]


def test_devices_and_servers_stand_where_the_log_leaves_them(folder: Callable[[str], Path]) -> None:
    record = read_run(folder(ASYNC))
    assert record.timeline is not None
    view = run_view(record, "0")
    uploads = view["history"]["activations"][-1]
    assert sum(server["uploads"] for server in view["servers"]) == uploads
    page_ = device_page(record.timeline, record.homes, "activations", True, 0, 5)
    assert [row[4] for row in page_["rows"]] == sorted(
        (row[4] for row in page_["rows"]), reverse=True
    )
    assert sum(device.activations for device in record.timeline.devices.values()) == uploads
    mixed = sum(view["staleness"]["count"])
    assert mixed == 8 * 2  # rounds times B


# ------------------------------------------------------------------------------------------------
# logs that grow
def test_a_growing_log_is_read_piece_by_piece_to_the_same_story(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = (folder(ASYNC) / "events.jsonl").read_bytes()
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"")
    follower = LogFollower(path)
    assert not follower.poll()
    for stop in (100, len(whole) // 3, len(whole) // 3 + 7, len(whole)):
        path.write_bytes(whole[:stop])
        follower.poll()
        assert follower.notice is None
    assert follower.timeline is not None
    assert timeline_view(follower.timeline) == timeline_view(_timeline(folder(ASYNC)))
    assert follower.timeline.end is not None
    assert not follower.poll()


def test_a_log_that_a_resume_cut_back_is_read_again(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = (folder(ASYNC) / "events.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines[:200]))
    follower = LogFollower(path)
    follower.poll()
    path.write_bytes(b"".join(lines[:50] + lines[60:300]))  # longer than before, and different
    follower.poll()
    assert follower.version == 290


@pytest.mark.parametrize(
    "damage",
    [b"\x00\xff\n", b"{}\n", b'{"t":1,"on":"nobody","event":{"Started":{}},"do":[]}\n', b"[1]\n"],
)
def test_a_damaged_log_is_shown_up_to_there_with_a_notice(
    damage: bytes, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = (folder("fedbcd-async") / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join([*lines[:120], damage, *lines[120:]]))
    record = read_run(tmp_path)
    assert re.search(r"line 121 is damaged .*shown is what comes before it", record.notices[0])
    view = run_view(record, "0")
    assert view["timeline"]["phases"]["server"]
    assert "line 121 is damaged" in page(view_of([record], plan=False))


def test_a_half_written_line_is_waited_for(folder: Callable[[str], Path], tmp_path: Path) -> None:
    whole = (folder("fedbcd-async") / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole[: len(whole) // 2])
    assert read_run(tmp_path).notices == ()
    (tmp_path / "events.jsonl").write_bytes(whole[:40])
    assert "has no whole line yet" in read_run(tmp_path).notices[0]


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"hello": 1}\n')
    assert "no event log" in read_run(tmp_path).notices[0]
    with pytest.raises(RecordError, match="holds no run"):
        find_runs([tmp_path / "nowhere"])


def test_a_run_that_goes_on_shows_its_last_checkpoint(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing but log and checkpoint: curves, scores, split and machine are all there."""
    train(ASYNC, rounds=8, evaluate_every=2, out=tmp_path / "run", should_stop=_after(5))
    for name in ("models.safetensors", "history.csv"):
        (tmp_path / "run" / name).unlink()
    extras = read_extras(tmp_path / "run")
    assert [row.round for row in extras.history] == [0, 2, 4]
    assert len(extras.personal) == len(extras.home) == DEVICES
    assert extras.environment["torch"]
    view = run_view(read_run(tmp_path / "run"), "0")
    assert not view["summary"]["finished"]
    assert view["partition"]["devices"] == DEVICES


def _after(rounds: int) -> Callable[[], bool]:
    calls = iter(range(1000))
    return lambda: next(calls) + 1 >= rounds


@pytest.mark.parametrize("name", ["models.safetensors", "checkpoint.safetensors", "history.csv"])
def test_a_damaged_file_beside_the_log_is_a_notice(name: str, tmp_path: Path) -> None:
    train("fedbcd-sync", rounds=2, out=tmp_path)
    (tmp_path / name).write_bytes(b"\xff" * 40)
    assert any(name in notice for notice in read_run(tmp_path).notices)


# ------------------------------------------------------------------------------------------------
# devices
def test_gains_are_personal_scores_less_those_of_the_servers_model(tmp_path: Path) -> None:
    """Checked against a test of both models on the device's own labels, weighted by its shares of
    them, done by hand.
    """
    run = train("fedbcd-async", rounds=6, out=tmp_path)
    test = run.federation.test
    assert test is not None
    inputs = run.federation.transform(test.inputs, run.global_VF.dtype)
    for device in (0, 5, 15):
        right = run.server_model(device // 4)(inputs).argmax(1).numpy() == test.targets.numpy()
        own = run.federation.pool.targets[run.federation.owned(device)].tolist()
        score = np.mean([right[test.targets.numpy() == label].mean() for label in own])
        assert run.global_scores[device] == pytest.approx(score, abs=1e-12)
    gains = np.array([run.personal_scores[d] - run.global_scores[d] for d in range(DEVICES)])
    found = run_view(read_run(tmp_path), "0")["personal"]["gain"]
    assert (found["better"], found["same"], found["worse"]) == (
        (gains > 0).sum(),
        (gains == 0).sum(),
        (gains < 0).sum(),
    )
    assert found["mean"] == pytest.approx(gains.mean())
    assert fb.Run.load(tmp_path, run.federation).global_scores == run.global_scores


def test_gain_is_against_the_best_run_of_the_job_without_personal_models(tmp_path: Path) -> None:
    """Device by device, whichever runs are on the page; a run with another seed, or one that did
    not finish, is none to compare with.
    """
    folder = tmp_path / "job"
    runs = {
        case: train(case, rounds=rounds, out=folder / case)
        for case, rounds in (("fedavg-sync", 1), ("fedprox-sync", 9), ("fedbcd-sync", 9))
    }
    train("fedprox-sync", rounds=20, seed=1, out=folder / "seed")
    train("fedprox-sync", rounds=20, should_stop=_after(15), out=folder / "stopped")
    best = max(
        ("fedavg-sync", "fedprox-sync"),
        key=lambda case: np.mean(list(runs[case].global_scores.values())),
    )
    expected = np.mean(
        [
            runs["fedbcd-sync"].personal_scores[d] - runs[best].global_scores[d]
            for d in range(DEVICES)
        ]
    )
    view = view_of([read_run(path) for path in find_runs([folder])], plan=False)
    found = {Path(run["folder"]).name: run["personal"] for run in view["runs"]}
    assert found["fedbcd-sync"]["gain"]["against"] == best
    assert found["fedbcd-sync"]["gain"]["mean"] == pytest.approx(expected)
    for row in found["fedbcd-sync"]["worst"]:
        assert row["against"] == pytest.approx(runs[best].global_scores[row["device"]])
    assert {name: found[name]["gain"] for name in ("fedavg-sync", "fedprox-sync")} == {
        "fedavg-sync": None,
        "fedprox-sync": None,
    }
    assert not found["fedprox-sync"]["own"]
    alone = view_of([read_run(folder / "fedbcd-sync")], plan=False)["runs"][0]["personal"]["gain"]
    assert alone["against"] is None  # the folder is not that of one job
    (folder / "config.toml").touch()
    assert (
        view_of([read_run(folder / "fedbcd-sync")], plan=False)["runs"][0]["personal"]["gain"]
        == found["fedbcd-sync"]["gain"]
    )


def test_labels_that_nobody_owns_are_counted_and_limit_global_accuracy(tmp_path: Path) -> None:
    data = fb.load_dataset("digits")
    split = fb.diversity(data.train.targets, 2, 3, 30)
    test = fb.Samples(data.test.inputs, data.test.targets)
    federation = fb.Federation.from_partition(
        MLP,
        torch.nn.functional.cross_entropy,
        data.train,
        split,
        2,
        test=test,
        transform=data.transform,
    )
    fb.train(federation, fb.FedBCD(batch=8), rounds=2, active=1, out=tmp_path / "run")
    record = read_run(tmp_path / "run")
    part = run_view(record, "0")["partition"]
    owned = {
        label
        for counts in part["counts"]
        for label, count in zip(part["labels"], counts, strict=True)
        if count
    }
    assert part["labels"] == list(range(10))
    assert set(part["unowned"]) == set(range(10)) - owned != set()
    assert part["ceiling"] == pytest.approx(
        float(np.isin(test.targets.numpy(), list(owned)).mean())
    )
    assert (
        f"about {100 * part['ceiling']:.1f} % is the most"
        in view_of([record], plan=False)["runs"][0]["advice"][0]
    )


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedprox-sync"])
def test_uploads_per_device_name_only_what_there_was(
    case: str, folder: Callable[[str], Path]
) -> None:
    devices = run_view(read_run(folder(case)), "0")["devices"]
    story = _timeline(folder(case))
    counts = [device.activations for device in story.devices.values()] + [0] * (
        DEVICES - len(story.devices)
    )
    assert devices["activations"]["times"] == sorted(set(counts))
    assert devices["never"] == counts.count(0)


def test_certificates_at_the_end_are_those_of_the_curve(tmp_path: Path) -> None:
    """The summary of a run may have taken them on fewer devices: then its gap is another number,
    and no end of the curve.
    """
    run = train(
        "fedbcd-sync", rounds=9, evaluate_every=2, certify_every=2, certify_devices=8, out=tmp_path
    )
    run.summary["certificates"] = {"gap": 1.0, "worst_gap": 1.0, "pull": 1.0, "spread": 1.0}
    run.save(tmp_path)
    view = run_view(read_run(tmp_path), "0")
    gaps = [
        (r, gap)
        for r, gap in zip(view["history"]["round"], view["history"]["gap"], strict=True)
        if gap is not None
    ]
    assert (
        view["summary"]["certificates"]["round"],
        view["summary"]["certificates"]["gap"],
    ) == gaps[-1]
    assert gaps[-1][0] < 9


def test_a_run_without_certificates_says_why(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def why(path: Path) -> str:
        return str(run_view(read_run(path), "0")["summary"]["certificates"]["none"])

    assert why(folder("fedprox-sync")) == "its algorithm keeps no personal models"
    train("fedbcd-sync", rounds=2, certify_every=0, out=tmp_path / "run")
    assert why(tmp_path / "run") == "none were asked for"
    (tmp_path / "run" / "deploy.toml").touch()
    assert why(tmp_path / "run") == "a deployment takes none"


# ------------------------------------------------------------------------------------------------
# how a run stands
def _cut(path: Path, out: Path) -> Path:
    """A run whose log just stops."""
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    out.mkdir(parents=True)
    (out / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    return out


def _stands(path: Path) -> tuple[str, str]:
    view = run_view(read_run(path), "0")
    return view["summary"]["state"], view["summary"]["standing"]


def test_a_run_has_finished_or_stopped_or_goes_on(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    assert _stands(folder("fedbcd-async")) == ("finished", "finished, 8 rounds")
    path = _cut(folder("fedbcd-async"), tmp_path / "job" / "run")
    rounds = len(_timeline(path).mixes)
    assert _stands(path) == (
        "stopped",
        f"stopped at round {rounds}; go on with train(..., out={str(path)!r}, resume=True)",
    )
    assert f"stopped at round {rounds}" in run_view(read_run(path), "0")["notices"][0]
    with RunFolder(path, {}, {}).locked():
        assert _stands(path) == ("running", f"round {rounds}")


def test_a_header_of_any_kind_has_a_standing(folder: Callable[[str], Path], tmp_path: Path) -> None:
    _, *lines = (folder("fedbcd-sync") / "events.jsonl").read_bytes().splitlines(keepends=True)
    identity = {"algorithm": {"name": []}, "active": "x", "servers": [[0], [1]], "data": None}
    header = {
        "fedbcd_log": 1,
        "identity": identity,
        "job": {"run": {"until_clock": "soon", "rounds": []}},
    }
    (tmp_path / "events.jsonl").write_bytes(
        b"".join([json.dumps(header).encode(), b"\n", *lines[:-1]])
    )
    (view,) = view_of([read_run(tmp_path)], plan=False)["runs"]
    assert view["advice"][0].startswith("stopped at round 8; go on with")


def test_a_run_that_goes_on_is_not_told_to_go_on_for_longer() -> None:
    rising = {"history__personal_accuracy": [0.1, 0.5, 0.6, 0.7, 0.78, 0.8]}
    assert any("still rising" in text for text in advice(_view(**rising)))
    assert not any("rising" in text for text in advice(_view(summary__state="running", **rising)))


def test_until_a_clock_is_how_far_a_run_has_come(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    log = (folder("fedbcd-sync") / "events.jsonl").read_bytes().splitlines(keepends=True)
    header = json.loads(log[0]) | {"job": {"run": {"rounds": None, "until_clock": 900.0}}}
    (tmp_path / "events.jsonl").write_bytes(
        b"".join([json.dumps(header).encode(), b"\n", *log[1:-1]])
    )
    assert _stands(tmp_path)[1].startswith(
        f"stopped at clock {_timeline(tmp_path).now:.4g} of 900; "
    )


def test_a_run_that_stopped_names_the_command_that_goes_on(tmp_path: Path) -> None:
    file = write_job(tmp_path / "job.toml", **{"run.rounds": 6})
    fedbcd("run", file, "--out", tmp_path / "whole")
    path = _cut(tmp_path / "whole", tmp_path / "my runs" / "a")
    rounds = len(_timeline(path).mixes)
    for name, command in (
        ("a/config.toml", f"fedbcd run --resume --out '{path}'"),
        ("config.toml", f"fedbcd run --resume --out '{path.parent}'"),
        ("a/deploy.toml", f"fedbcd up --resume --out '{path}'"),
    ):
        (path.parent / name).touch()
        assert _stands(path) == ("stopped", f"stopped at round {rounds} of 6; go on with {command}")


def _ended(result: dict[str, Any]) -> float:
    return float(fb.History.of_plain(result["history"]).last.personal_accuracy)


def test_of_a_series_the_means_over_its_seeds_are_said(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", title="mine")
    fedbcd("run", job, "--seeds", "2", "--workers", "1", "--out", tmp_path / "out")
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    results = [json.loads(path.read_text()) for path in (tmp_path / "out" / "results").iterdir()]
    view = view_of([read_run(folder)], plan=False)
    mean = sum(_ended(result) for result in results) / 2
    assert view["runs"][0]["series"]["personal"] == pytest.approx(mean)
    assert view["first"]["tiles"][0]["value"] == f"{100 * mean:.1f} %"
    assert "means of 2 seeds; curves and devices of seed 0" in view["first"]["facts"]
    assert not any("seed" in step["words"] for step in view["first"]["next"])


def test_a_run_that_failed_says_why_until_it_goes_on(tmp_path: Path) -> None:
    steep = {"algorithm.device_step": 1e30, "algorithm.projection": {"name": "none"}}
    job = write_job(tmp_path / "job.toml", **steep)
    assert fedbcd("run", job, "--out", tmp_path / "run").code == 5
    found = read_run(tmp_path / "run")
    stands = standing(found.folder, found.timeline, found.job)
    assert stands.state == "failed"
    assert "use a smaller device_step (now 1e+30)" in stands.words
    assert stands.command == f"fedbcd check {tmp_path / 'run' / 'config.toml'}"
    first = view_of([found], plan=False)["first"]
    assert first["words"].startswith("Failed at round 1 of 4: the loss of device ")
    assert [step["command"] for step in first["next"]] == [stands.command]
    with RunFolder(tmp_path / "new", {}, {}).locked():
        (tmp_path / "new" / "failure.txt").write_text("no")
        RunFolder(tmp_path / "new", {}, {}).open(None, resume=True).close()
    assert not (tmp_path / "new" / "failure.txt").exists()


def test_looking_whether_a_run_goes_on_keeps_nobody_from_starting_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = threading.Event()
        looking = pool.submit(lambda: [is_at_work(tmp_path) for _ in iter(done.is_set, True)])
        for _ in range(200):
            with RunFolder(tmp_path, {}, {}).locked():
                pass
        done.set()
        looking.result()
    assert not is_at_work(tmp_path / "nowhere")


def test_the_split_is_what_the_devices_own(tmp_path: Path) -> None:
    run = train("fedbcd-sync", rounds=1, out=tmp_path)
    part = run_view(read_run(tmp_path), "0")["partition"]
    for device, counts in enumerate(part["counts"]):
        owned = run.federation.pool.targets[run.federation.owned(device)].tolist()
        assert counts == [owned.count(label) for label in part["labels"]]


def test_a_federation_without_labels_or_test_has_a_report(tmp_path: Path) -> None:
    from torch import nn

    data = [(torch.randn(9, 3), torch.randn(9, 1)) for _ in range(4)]
    federation = fb.Federation(lambda: nn.Linear(3, 1), nn.functional.mse_loss, data, servers=2)
    fb.train(federation, fb.FedBCD(), rounds=3, out=tmp_path / "run")
    view = view_of([read_run(tmp_path / "run")], plan=False)
    assert view["runs"][0]["personal"] is None
    assert view["runs"][0]["history"]["global_mse"] == [None] * 4
    assert page(view)


# ------------------------------------------------------------------------------------------------
# in words
def _view(**changes: Any) -> dict[str, Any]:
    history = {
        name: [0.5, 0.8, 0.8, 0.8, 0.8, 0.8] for name in ("global_accuracy", "personal_accuracy")
    }
    view: dict[str, Any] = {
        "summary": {"algorithm": "fedbcd", "cloud": "sync", "servers": 10, "devices": 100},
        "settings": [
            ["algorithm.penalty", "1.0"],
            ["algorithm.device_step", "0.02"],
            ["cloud.first", "3"],
        ],
        "history": {
            "round": [0, 1, 2, 3, 4, 5],
            "distance": [0, 1, 1, 1],
            "disagreement": [0, 0.1],
            "gap": [],
            **history,
        },
        "spent": {"share": {"arrival": 0.1, "work": 0.8, "waiting": 0.1, "aggregation": 0.0}},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = view
        for name in sections:
            place = place.setdefault(name, {})
        place[key] = value
    return view


GOOD = {"mean": 0.9, "worst_decile": 0.88, "worst": [], "gain": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"personal": GOOD},
            (
                "nothing stands out in these numbers: accuracy has levelled off, no device is left"
                " behind and little time is lost"
            ),
        ),
        (
            {},
            (
                "nothing stands out in these numbers: accuracy has levelled off and little time is"
                " lost; how single devices do is not known"
            ),
        ),
        (
            {"history__global_accuracy": [None] * 6, "history__personal_accuracy": [None] * 6},
            (
                "nothing stands out in these numbers: little time is lost; how accuracy moves and"
                " how single devices do is not known"
            ),
        ),
        (
            {
                "spent__share": {"arrival": 0.0, "work": 0.0, "waiting": 0.0, "aggregation": 0.0},
                "personal": GOOD,
            },
            (
                "nothing stands out in these numbers: accuracy has levelled off and no device is"
                " left behind; where the time goes is not known"
            ),
        ),
        (
            {"spent": {}, "history__global_accuracy": [0.5, 0.8], "history__personal_accuracy": []},
            (
                "there is nothing to say yet: how accuracy moves, how single devices do and where"
                " the time goes is not known"
            ),
        ),
        (  # no remark fits this cloud, but a third of the time is not little
            {
                "spent__share": {"arrival": 0.1, "work": 0.5, "waiting": 0.4, "aggregation": 0.0},
                "summary__cloud": "graph",
                "personal": GOOD,
            },
            (
                "nothing stands out in these numbers: accuracy has levelled off and no device is"
                " left behind"
            ),
        ),
    ],
)
def test_a_run_without_problems_is_told_what_was_looked_at(
    changes: dict[str, Any], words: str
) -> None:
    assert advice(_view(**changes)) == [words]


def test_what_must_come_first_does_and_leaves_no_all_clear() -> None:
    assert advice(_view(), ["the coordinator does not answer"]) == [
        "the coordinator does not answer"
    ]
    stopped = _view(
        summary__state="stopped",
        summary__standing="stopped at round 3 of 9; go on with x",
        spent__share={"waiting": 0.6},
    )
    assert advice(stopped)[0] == "stopped at round 3 of 9; go on with x"


def test_labels_without_an_owner_are_the_first_remark() -> None:
    view = _view(
        partition={"unowned": [4, 7], "ceiling": 0.79},
        history__global_accuracy=[0.1, 0.9, 0.9, 0.8, 0.8, 0.8],
    )
    assert advice(view)[0].startswith(
        "no device owns labels 4 and 7, 21 % of the test samples, so about 79.0 % is the most"
    )
    many = advice(_view(partition={"unowned": list(range(30)), "ceiling": None}))[0]
    assert many.startswith(
        "no device owns labels 0, 1, 2, 3, 4, 5, 6, 7, 8 and 21 more: more devices"
    )


@pytest.mark.parametrize(
    ("active", "words"),
    [(3, "ones: more rounds bring them on"), (2, "more uploads per phase (active) or more rounds")],
)
def test_more_uploads_are_advised_only_where_some_device_is_left(active: int, words: str) -> None:
    view = _view(
        history__personal_accuracy=[0.5, 0.95, 0.95, 0.95, 0.95, 0.95],
        summary__active=active,
        summary__largest_server=3,
    )
    view["history"]["distance"] = [1.0, 0.5, 0.4]
    assert any(words in remark for remark in advice(view)), advice(view)


def test_a_run_without_personal_models_is_told_nothing_of_theirs() -> None:
    changes = {
        "history__personal_accuracy": [0.5, 0.95, 0.95, 0.95, 0.95, 0.95],
        "summary__algorithm": "fedavg",
    }
    assert not any("personal" in remark for remark in advice(_view(**changes)))


@pytest.mark.parametrize(("active", "advised"), [(1, False), (2, True)])
def test_a_smaller_active_is_advised_only_where_there_is_one(active: int, advised: bool) -> None:
    (remark,) = advice(_view(spent__share={"arrival": 0.7}, summary__active=active))
    assert ("a smaller active" in remark) == advised


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"history__global_accuracy": [0.1, 0.9, 0.9, 0.8, 0.8, 0.8]},
            "fell from 90.0 % in round 1 to 80.0 %: try a smaller device_step",
        ),
        (
            {"history__personal_accuracy": [0.1, 0.5, 0.6, 0.7, 0.78, 0.8]},
            "personal accuracy by 2.0 points over the last fifth",
        ),
        (
            {"spent__share": {"waiting": 0.6}},
            (
                'spent 60 % of their time waiting for other servers: try cloud = { name = "async",'
                " first = 3 }"
            ),
        ),
        (
            {"spent__share": {"waiting": 0.4}, "summary__cloud": "async"},
            "a smaller B than first = 3 waits less",
        ),
        (
            {"spent__share": {"waiting": 0.4}, "summary__algorithm": "fedprox"},
            "these algorithms need all of them",
        ),
        (
            {"spent__share": {"arrival": 0.7}},
            "70 % of server time went into waiting for devices to arrive",
        ),
        (
            {
                "personal": {
                    "mean": 0.9,
                    "worst_decile": 0.88,
                    "worst": [],
                    "gain": {"better": 70, "same": 0, "worse": 30},
                }
            },
            (
                "30 of 100 devices would do better with their server's global model than with their"
                " own: try a larger penalty (now 1.0)"
            ),
        ),
        (
            {
                "personal": {
                    "mean": 0.9,
                    "worst_decile": 0.5,
                    "worst": [{"device": 7}],
                    "gain": None,
                }
            },
            "has 50.0 % against a mean of 90.0 % (worst: devices 7)",
        ),
        (
            {
                "personal": {
                    **GOOD,
                    "gain": {"better": 70, "same": 0, "worse": 30, "against": "FedProx, sync"},
                }
            },
            "30 of 100 devices would do better with the model of FedProx, sync than with their own",
        ),
        (
            {"history__personal_accuracy": [0.5, 0.95, 0.95, 0.95, 0.95, 0.95]},
            "global models are 15.0 points behind the personal ones",
        ),
        (
            {"history__disagreement": [0, 0.9], "summary__cloud": "async"},
            "servers disagree by 0.9, against 1",
        ),
        (
            {"devices": {"never": 4, "activations": {"times": [0, 3], "devices": [4, 96]}}},
            "4 of 100 devices never uploaded",
        ),
        (
            {"devices": {"never": 0, "activations": {"times": [1, 20], "devices": [10, 90]}}},
            "uploaded 1.0 times, the mean is 18.1",
        ),
        ({"history__gap": [1.0, 2.0, 3.0]}, "grew from 1 to 3"),
        ({"events": {"devices lost": 3}}, "3 activations were given up"),
    ],
)
def test_each_remark_comes_from_its_numbers(changes: dict[str, Any], words: str) -> None:
    assert any(words in remark for remark in advice(_view(**changes))), advice(_view(**changes))


def test_differences_are_the_settings_that_differ() -> None:
    one, two = (
        {"title": "a", "run": {"seed": 1, "rounds": 3}},
        {"title": "b", "run": {"seed": 2, "rounds": 3}, "extra": True},
    )
    assert differences([settings_in(one), settings_in(two)]) == [
        {"key": "run.seed", "values": ["1", "2"]},
        {"key": "extra", "values": [None, "true"]},
    ]


def test_runs_that_differ_by_seed_are_of_one_group(tmp_path: Path) -> None:
    for seed in "01":
        fedbcd(
            "run",
            write_job(tmp_path / "job.toml"),
            "--seed",
            seed,
            "--out",
            tmp_path / "runs" / seed,
        )
    fedbcd(
        "run",
        write_job(tmp_path / "job.toml", **{"algorithm.batch": 4}),
        "--out",
        tmp_path / "runs" / "other",
    )
    records = [read_run(path) for path in find_runs([tmp_path / "runs"])]
    assert [record.seed for record in records] == [0, 1, 0]
    assert records[0].group == records[1].group != records[2].group


# ------------------------------------------------------------------------------------------------
# the page
def test_the_page_is_one_closed_file(folder: Callable[[str], Path], tmp_path: Path) -> None:
    assert (
        write_report([folder(ASYNC), folder("fedbcd-sync")], tmp_path / "r.html", plan=False) == 2
    )
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", text)
    assert not re.search(r"@import|url\(", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    assert [run["name"] for run in data["runs"]] == [ASYNC, "fedbcd-sync"]


def test_texts_of_a_job_are_data_and_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028"
    fedbcd("run", write_job(tmp_path / "job.toml", title=evil), "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in text
    assert "<img" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data.group(1))["runs"][0]["name"] == evil


def test_the_command_writes_into_the_run_folder_and_prints_json(tmp_path: Path) -> None:
    fedbcd("run", write_job(tmp_path / "job.toml", **{"run.rounds": 6}), "--out", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    answer = fedbcd("report", tmp_path / "run", "--json")
    assert answer.code == 0, answer.err
    assert answer.summary == {"report": str(tmp_path / "run" / "report.html"), "runs": 1}
    text = (tmp_path / "run" / "report.html").read_text()
    assert '"round_time":[' in text  # the plan for every B


def test_a_folder_without_runs_is_a_sentence_with_the_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "events.out.tfevents.1").touch()
    for name, words in (
        ("empty", "is empty and holds no run"),
        ("foreign", "holds events.out.tfevents.1, but it holds no run"),
        ("foreign/events.out.tfevents.1", "is a file and no folder of a run"),
        ("nowhere", "does not exist"),
    ):
        answer = fedbcd("report", tmp_path / name)
        assert answer.code == RecordError.exit_code
        assert f"{name} {words}" in answer.err
        assert f"fedbcd run --out {tmp_path / name}-run makes one" in answer.err


def test_a_long_log_is_cut_to_the_longest_rounds_and_the_last(tmp_path: Path) -> None:
    train("fedbcd-i-async", rounds=240, evaluate_every=60, out=tmp_path)
    story = _timeline(tmp_path)
    cut = timeline_view(story, most=300)
    kept, time = set(cut["mixes"]["round"]), np.asarray(story.mixes.time)
    lengths = np.diff(time, prepend=0.0)
    assert set(np.argsort(lengths)[-5:]) <= kept
    assert set(range(190, 240)) <= kept
    assert len(kept) < 240
    assert cut["total_phases"] == len(story.phases) > 300 >= len(cut["phases"]["server"])
    assert all(low < high <= after for (low, high), (after, _) in itertools.pairwise(cut["known"]))
    assert set(cut["visits"]["phase"]) <= set(range(len(cut["phases"]["server"])))
    shares = np.array(cut["overview"]["collecting"]) + np.array(cut["overview"]["waiting"])
    assert shares == pytest.approx(np.full_like(shares, 100), abs=1)
    fewer = timeline_view(story, most=5)
    assert len(fewer["phases"]["server"]) == 5
    assert fewer["known"] == [[pytest.approx(fewer["phases"]["opened"][0]), round(story.now, 4)]]


def test_a_window_of_the_timeline_holds_what_overlaps_it(folder: Callable[[str], Path]) -> None:
    story = _timeline(folder("fedbcd-async"))
    middle = story.now / 2
    part = timeline_view(story, middle, middle + 1)
    whole = timeline_view(story)["phases"]
    expected = [
        k
        for k, (opened, released) in enumerate(zip(whole["opened"], whole["released"], strict=True))
        if opened <= middle + 1 and (released >= middle or released < 0)
    ]
    assert part["phases"]["opened"] == [whole["opened"][k] for k in expected]


def test_a_record_without_a_log_header_still_has_a_name(tmp_path: Path) -> None:
    assert RunRecord(tmp_path / "run-7", None, read_extras(tmp_path)).name == "run-7"
