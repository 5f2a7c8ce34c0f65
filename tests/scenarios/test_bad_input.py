"""Every way to ask for the impossible: a sentence that names the value and the remedy, the
documented code, nothing written.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from support.runs import Answer, fedbcd, hash_folder, write_job

CONFIG, DATA, RECORD = 2, 3, 4  # exit codes, as drawn in fedbcd/errors.py


def _assert_refused(
    place: Path, code: int, *words: str, arguments: tuple[str | Path, ...] = (), out: str = "out"
) -> Answer:
    """Run job.toml. Exit code, one sentence with these words, no trace of a trace, and not a byte
    on disk has changed.
    """
    before = hash_folder(place)
    answer = fedbcd("run", *(arguments or (place / "job.toml",)), "--out", place / out, "--json")
    assert answer.code == code, answer
    assert answer.out == ""
    sentence = " ".join(answer.err.split())
    assert sentence.startswith("error: "), answer.err
    assert sentence.count("error:") == 1
    assert "Traceback" not in sentence
    for word in words:
        assert word in sentence
    assert hash_folder(place) == before
    return answer


def _refuse(place: Path, code: int, changes: dict[str, Any], *words: str) -> None:
    """The same for the small job with some keys changed, as one run and as two."""
    write_job(place / "job.toml", **changes)
    _assert_refused(place, code, *words)
    write_job(place / "job.toml", **changes, runs=[{"title": "first"}, {"title": "second"}])
    _assert_refused(place, code, *words)


# ------------------------------------------------------------------------------------------------
# keys and sections
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.penality": 1.0},
        "[algorithm] has an unknown key 'penality'",
        "did you mean 'penalty'?",
        "known:",
    )


def test_an_unknown_section_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algoritm": {"name": "fedbcd"}},
        "unknown key 'algoritm'",
        "did you mean 'algorithm'?",
    )


def test_an_unknown_key_of_one_run_is_named_with_its_number(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml", runs=[{"title": "a"}, {"title": "b", "sead": 1}])
    _assert_refused(tmp_path, CONFIG, "[runs #2] has an unknown key 'sead'")


@pytest.mark.parametrize(
    "section", ["data", "federation", "model", "algorithm", "cloud", "clock", "run"]
)
def test_a_section_that_is_no_table_is_named(tmp_path: Path, section: str) -> None:
    write_job(tmp_path / "job.toml", **{section: 5})
    for options in ((), ("--rounds", "3", "--seed", "1", "--data", str(tmp_path))):
        _assert_refused(
            tmp_path, CONFIG, f"[{section}]", arguments=(tmp_path / "job.toml", *options)
        )


@pytest.mark.parametrize("runs", [5, [], [1, 2], "x"])
def test_runs_that_are_no_tables_are_named(tmp_path: Path, runs: Any) -> None:
    write_job(tmp_path / "job.toml", runs=runs)
    _assert_refused(
        tmp_path,
        CONFIG,
        "runs must be a list of tables, written [[runs]]",
        arguments=(tmp_path / "job.toml", "--rounds", "3"),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run.rounds": "ten"}, "run.rounds = 'ten' must be a whole number"),
        ({"run.rounds": 2.5}, "run.rounds = 2.5 must be a whole number"),
        ({"run.seed": True}, "run.seed = True must be a whole number"),
        ({"federation.servers": "4"}, "federation.servers = '4' must be a whole number"),
        ({"model.hidden": 64}, "model.hidden = 64 must be a list"),
        ({"algorithm.batch": "some"}, "algorithm.batch = 'some' must be a whole number or 'all'"),
        ({"run.dtype": "int8"}, "run.dtype = 'int8' must be one of 'float32', 'float64'"),
    ],
)
def test_a_value_of_another_type_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    _refuse(tmp_path, CONFIG, {"model": {"name": "mlp"}, **changes}, words)


def test_a_title_that_is_no_text(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml", title=5)
    _assert_refused(tmp_path, CONFIG, "title = 5 must be a text")


# ------------------------------------------------------------------------------------------------
# the cloud
def test_more_first_servers_than_there_are(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"cloud": {"name": "async", "first": 5}},
        "first=5 must be between 1 and the 4 servers",
        "SyncCloud()",
    )


def test_no_first_server(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"cloud": {"name": "rigorous", "first": 0}},
        "first=0 must be between 1 and the 4 servers",
    )


def test_a_setting_left_out(tmp_path: Path) -> None:
    cloud = {"name": "dynamic-graph", "edges": [[0, 1]]}
    _refuse(tmp_path, CONFIG, {"cloud": cloud}, "[cloud] needs first, e.g. first = 1")


@pytest.mark.parametrize(
    ("cloud", "words"),
    [
        ({}, "[cloud] needs edges, e.g. edges = [[0, 1], [1, 2]]"),
        ({"edges": [0, 1]}, "cloud.edges = [0, 1] must be a list; e.g. [[0, 1], [1, 2]]"),
        ({"edges": [[0, 1], [1, 2], [2, 3]], "first": 9}, "to wait for all, use first=4"),
    ],
)
def test_an_example_of_links_would_do(tmp_path: Path, cloud: dict[str, Any], words: str) -> None:
    _refuse(tmp_path, CONFIG, {"cloud": {"name": "dynamic-graph", "first": 2, **cloud}}, words)


def test_a_weight_that_is_none(tmp_path: Path) -> None:
    changes = {"algorithm": {"name": "fedavg", "weight": "none"}}
    _refuse(tmp_path, CONFIG, changes, "algorithm.weight = 'none' must be one of 'size', 'one'")


@pytest.mark.parametrize(
    ("mixing", "words"),
    [
        ([[0.5, 0.5, 0, 0]] * 4, "column 0 of the mixing matrix sums to 2, not 1"),
        (
            [[0.6, 0.5, 0, 0], [0.4, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
            "row 0 of the mixing matrix sums to 1.1, not 1",
        ),
        (
            [[2.0, -1.0, 0, 0], [-1.0, 2.0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
            "the mixing matrix has a negative entry, -1",
        ),
        ([[float("nan")] * 4] * 4, "of the mixing matrix sums to nan, not 1"),
        ([[1.0]], "mixing has rows of [1] numbers; 4 servers need 4 rows of 4 numbers"),
        ([[0.5, 0.5], [0.5, 0.5, 0.0], [], [1.0]], "mixing has rows of [2, 3, 0, 1] numbers"),
        ([1.0, 2.0], "cloud.mixing = [1.0, 2.0] must be a list"),
        ([], "mixing has rows of [] numbers"),
    ],
)
def test_a_mixing_matrix_that_is_not_doubly_stochastic(
    tmp_path: Path, mixing: Any, words: str
) -> None:
    _refuse(tmp_path, CONFIG, {"cloud": {"name": "graph", "mixing": mixing}}, words)


# ------------------------------------------------------------------------------------------------
# who takes part
def test_more_active_devices_than_members(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"federation.active": 5},
        "federation.active = 5 exceeds the 4 devices of a server; use active <= 4",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run.lr": 0.1}, "unknown key 'lr' (did you mean 'device_step' in [algorithm]?)"),
        ({"run.momentum": 0.5}, "unknown key 'momentum', which belongs in [algorithm]"),
        (
            {"federation.clients": 4},
            "unknown key 'clients' (did you mean 'devices'?); known: active",
        ),
        (
            {"algorithm.optimizer": "adam"},
            "[algorithm] has 'optimizer', which 'fedbcd' does not take; it is a setting of",
        ),
        (
            {"cloud.first": 2},
            "has 'first', which 'sync' does not take; it is a setting of 'async',",
        ),
        (
            {"clock.step": 2},
            '[clock.step] must be a table with a name, such as { name = "exponential" }, not 2;',
        ),
        ({"clock.step": "uniform"}, "[clock.step] needs low, e.g. low = 1"),
        ({"run.availability": 0.5}, 'give a table such as { name = "chance", ... }'),
        ({"model.hidden": 64}, "model.hidden = 64 must be a list, such as [64]"),
    ],
)
def test_what_others_call_so_or_others_have(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    _refuse(tmp_path, CONFIG, changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"federation.devices": [4, 2]},
            "federation.devices = [4, 2] has 2 numbers, but federation.servers = 4; give one for"
            " each server",
        ),
        ({"federation.devices": [4, 0, 2, 2]}, "federation.devices = 0 must be 1 or more"),
        (
            {"federation.devices": [4, 1, 2, 2]},
            "federation.active = 2 exceeds the 1 devices of server 1; use active <= 1",
        ),
        (
            {"federation.active": [2, 5, 1, 1]},
            "federation.active = 5 exceeds the 4 devices of server 1; use active <= 4",
        ),
        (
            {"federation.active": [2, 2]},
            "federation.active = [2, 2] has 2 numbers, but federation.servers = 4; give one for"
            " each server, or one for all",
        ),
        (
            {"federation.active": "two"},
            "federation.active = 'two' must be a whole number or a list",
        ),
        ({"federation.active": [1, 2.5, 1]}, "federation.active[1] = 2.5 must be a whole number"),
    ],
)
def test_numbers_of_each_server(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    _refuse(tmp_path, CONFIG, changes, words)


def test_more_active_devices_than_available_ones(tmp_path: Path) -> None:
    changes = {"algorithm": {"name": "fedbcd-i", "available": 2}, "federation.active": 3}
    _refuse(
        tmp_path,
        CONFIG,
        changes,
        "active=3 exceeds the 2 available devices of a server; use active <= 2",
    )


@pytest.mark.parametrize("key", ["servers", "devices", "active"])
@pytest.mark.parametrize("value", [0, -1])
def test_nobody_takes_part(tmp_path: Path, key: str, value: int) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {f"federation.{key}": value},
        f"federation.{key} = {value} must be 1 or more",
    )


# ------------------------------------------------------------------------------------------------
# the algorithm
@pytest.mark.parametrize("steps", [[0, 5], [5, 1], [-1, -1]])
def test_steps_out_of_range(tmp_path: Path, steps: list[int]) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.steps": steps},
        f"steps={steps} must be [low, high] with 1 <= low <= high, e.g. [1, 5]",
    )


def test_steps_and_epochs(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.steps": [1, 5], "algorithm.epochs": [1, 2]},
        "steps=[1, 5] and epochs=[1, 2] both say how long local work is; keep one of them",
    )


def test_steps_that_are_no_pair(tmp_path: Path) -> None:
    _refuse(tmp_path, CONFIG, {"algorithm.steps": [5]}, "algorithm.steps = [5] must have 2 values")


@pytest.mark.parametrize("key", ["device_step", "server_step", "penalty"])
@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_sizes_that_are_not_finite_and_positive(tmp_path: Path, key: str, value: float) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {f"algorithm.{key}": value},
        f"{key}={value} must be a finite number above 0",
    )


def test_a_relative_server_step_above_one(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.server_step": 1.5},
        "server_step=1.5 in relative form must be at most 1",
    )


def test_an_absolute_server_step_beyond_the_bound_of_the_paper(tmp_path: Path) -> None:
    """SPEC 4, the trap: 16 devices on the sync cloud, gamma 2, so eta_z must be at most 1/32."""
    changes = {
        "algorithm.server_step_form": "absolute",
        "algorithm.server_step": 0.5,
        "algorithm.penalty": 2.0,
    }
    bound = (
        "exceeds 0.03125 = 1/(gamma_max * |Q_n|_max) = 1/(2 * 16), the bound of Assumption 4(ii)"
    )
    _refuse(
        tmp_path,
        CONFIG,
        changes,
        "server_step=0.5 in absolute form",
        bound,
        "use server_step <= 0.03125",
    )


@pytest.mark.parametrize("value", [1.0, 1.5, -0.1, float("nan")])
def test_momentum_out_of_range(tmp_path: Path, value: float) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.momentum": value},
        f"momentum={value} must be at least 0 and below 1",
    )


def test_one_penalty_too_few(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.penalty": [1.0] * 15},
        "penalty has 15 values for 16 devices; give one for all or one each",
    )


def test_an_empty_batch(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.batch": 0},
        "batch=0 must be 1 or more, or 'all' for exact gradients",
    )


def test_a_box_inside_out(tmp_path: Path) -> None:
    projection = {"name": "box", "low": 1.0, "high": -1.0}
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm.projection": projection},
        "box low=1.0 must be below high=-1.0; swap them",
    )


def test_an_unknown_algorithm_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"algorithm": {"name": "fedbdc"}},
        "algorithm.name = 'fedbdc' is unknown",
        "did you mean 'fedbcd'?",
        "known:",
    )


def test_an_unknown_cloud_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"cloud": {"name": "asinc"}},
        "cloud.name = 'asinc' is unknown",
        "did you mean 'async'?",
    )


def test_an_unknown_delay_and_an_impossible_one(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"clock": {"arrival": {"name": "exponental", "mean": 2}}},
        "did you mean 'exponential'?",
    )
    _refuse(
        tmp_path,
        CONFIG,
        {"clock": {"arrival": {"name": "exponential", "mean": -2.0}}},
        "exponential mean=-2.0 must be a finite number",
    )


# ------------------------------------------------------------------------------------------------
# the run
@pytest.mark.parametrize(
    "key", ["rounds", "evaluate_every", "checkpoint_every", "max_batch", "threads"]
)
def test_zero_of_something(tmp_path: Path, key: str) -> None:
    _refuse(tmp_path, CONFIG, {f"run.{key}": 0}, f"run.{key} = 0 must be 1 or more")


def test_zero_rounds_on_the_command_line(tmp_path: Path) -> None:
    _assert_refused(
        tmp_path, CONFIG, "run.rounds = 0 must be 1 or more", arguments=("--rounds", "0")
    )


def test_both_rounds_and_until_clock(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"run.until_clock": 100.0},
        "[run] has both rounds = 4 and until_clock = 100; keep one of them",
    )


def test_neither_rounds_nor_until_clock(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"run.rounds": None},
        "[run] needs rounds or until_clock, to say when to stop, e.g. rounds = 100",
    )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_never_ends(tmp_path: Path, value: float) -> None:
    run = {"until_clock": value}
    _refuse(
        tmp_path, CONFIG, {"run": run}, f"run.until_clock = {value} must be a finite number above 0"
    )


def test_a_seed_beyond_64_bits(tmp_path: Path) -> None:
    _refuse(tmp_path, CONFIG, {"run.seed": 2**63}, f"run.seed = {2**63} must fit in 64 bits")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"run.torch_device": device},
        f"torch_device='{device}' cannot be used here",
        "use 'cpu'",
    )


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [
        ({"algorithm": {"steps": [3, 1]}}, CONFIG, "steps=[3, 1]"),
        ({"run": {"rounds": 0}}, CONFIG, "run.rounds = 0"),
        ({"data": {"samples": 5000}}, DATA, "should own 5000 samples"),
    ],
)
def test_an_impossible_second_run_is_refused_before_the_first_begins(
    tmp_path: Path, second: dict[str, Any], code: int, words: str
) -> None:
    write_job(
        tmp_path / "job.toml",
        cloud={"name": "async", "first": 2},
        runs=[{"title": "one"}, {"title": "two", **second}],
    )
    _assert_refused(tmp_path, code, words)


def test_two_runs_with_one_title(tmp_path: Path) -> None:
    write_job(
        tmp_path / "job.toml", runs=[{"title": "same"}, {"title": "same", "run": {"seed": 1}}]
    )
    _assert_refused(tmp_path, CONFIG, "two runs are called 'same'; give each a title of its own")


# ------------------------------------------------------------------------------------------------
# the file
def test_text_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[data\nname = digits\n")
    _assert_refused(tmp_path, CONFIG, f"{tmp_path / 'job.toml'} is not valid TOML", "line 1")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe\x00")
    _assert_refused(tmp_path, CONFIG, "is not valid TOML")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    _assert_refused(
        tmp_path,
        CONFIG,
        f"cannot read {tmp_path / 'job.toml'}: No such file or directory; give the path of a TOML"
        " file",
    )


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    _assert_refused(tmp_path, CONFIG, f"cannot read {tmp_path}", arguments=(tmp_path,))


# ------------------------------------------------------------------------------------------------
# the data
def test_an_unknown_data_set_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"data.name": "digit"},
        "data.name = 'digit' is unknown",
        "did you mean 'digits'?",
        "known:",
    )


@pytest.mark.parametrize("value", [11, 0, -1])
def test_more_labels_per_device_than_there_are(tmp_path: Path, value: int) -> None:
    _refuse(
        tmp_path,
        DATA,
        {"data.diversity": value},
        f"diversity={value} must be between 1 and the 10 labels",
    )


def test_more_samples_per_device_than_there_are(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        DATA,
        {"data.samples": 5000},
        "should own 5000 samples of labels",
        "use samples <=",
        "or a higher diversity",
    )


def test_no_samples(tmp_path: Path) -> None:
    _refuse(tmp_path, CONFIG, {"data.samples": 0}, "data.samples = 0 must be 1 or more")


def test_mnist_without_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDBCD_DATA", raising=False)
    _refuse(
        tmp_path,
        DATA,
        {"data.name": "mnist"},
        "mnist does not ship with fedbcd",
        "--data DIR or FEDBCD_DATA=DIR",
    )
    (tmp_path / "empty").mkdir()
    write_job(tmp_path / "job.toml", **{"data.name": "mnist"})
    _assert_refused(
        tmp_path,
        DATA,
        "train-images-idx3-ubyte",
        arguments=(tmp_path / "job.toml", "--data", tmp_path / "empty"),
    )


# ------------------------------------------------------------------------------------------------
# the model
def test_an_unknown_model_is_named_with_the_nearest(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": "logistics"}},
        "model.name = 'logistics' is unknown",
        "did you mean 'logistic'?",
    )


@pytest.mark.parametrize("name", ["no_such_package:net", "math:no_such_name", ":net", "..:net"])
def test_a_model_factory_that_cannot_be_imported(tmp_path: Path, name: str) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": name}},
        f"model.name = '{name}' cannot be imported",
        "or put it into",
    )


def test_a_model_factory_that_is_no_factory(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": "math:pi"}},
        "is not callable; name a function or class that makes the module",
    )


def test_a_model_factory_that_makes_something_else(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": "builtins:dict"}},
        "model() returned dict; it must return a torch.nn.Module",
    )


def test_a_model_factory_that_wants_arguments(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": "torch.nn:Linear"}},
        "model() fails (TypeError: Linear.__init__() missing",
        "or a function without arguments that makes one",
    )


def test_a_model_that_does_not_fit_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide_models.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(999,"
        " 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    write_job(tmp_path / "job.toml", model={"name": "wide_models:net"})
    _assert_refused(
        tmp_path,
        CONFIG,
        "the model fails on inputs of shape",
        "use a model and a loss that fit the data",
    )


def test_a_hidden_layer_of_no_width(tmp_path: Path) -> None:
    _refuse(
        tmp_path,
        CONFIG,
        {"model": {"name": "mlp", "hidden": [8, 0]}},
        "model.hidden = [8, 0] must be widths of 1 or more",
    )


# ------------------------------------------------------------------------------------------------
# where it is put
@pytest.mark.parametrize(
    "runs", [[{"title": "one"}], [{"title": "one"}, {"title": "two"}]], ids=["one", "several"]
)
@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, out: str, runs: list[Any]) -> None:
    (tmp_path / "file").write_text("mine")
    write_job(tmp_path / "job.toml", runs=runs)
    _assert_refused(
        tmp_path,
        RECORD,
        f"cannot write to {tmp_path / out}",
        "choose another folder (--out",
        out=out,
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml")
    (tmp_path / "locked").mkdir(mode=0o500)
    _assert_refused(
        tmp_path, RECORD, "Permission denied; choose another folder (--out", out="locked/out"
    )


@pytest.mark.parametrize("name", ["thesis.txt", "config.toml", "checkpoint.safetensors"])
@pytest.mark.parametrize(
    "runs", [[{"title": "one"}], [{"title": "one"}, {"title": "two"}]], ids=["one", "several"]
)
def test_a_folder_with_foreign_files(tmp_path: Path, name: str, runs: list[Any]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    write_job(tmp_path / "job.toml", runs=runs)
    _assert_refused(tmp_path, RECORD, f"{tmp_path / 'out'} is not empty; choose ")


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml")
    assert fedbcd("run", tmp_path / "job.toml", "--out", tmp_path / "out").code == 0
    _assert_refused(
        tmp_path,
        RECORD,
        "holds a run already (to go on with it: --resume",
        "choose another folder (--out",
    )
    write_job(tmp_path / "job.toml", **{"run.seed": 1})
    _assert_refused(tmp_path, RECORD, "holds a run already (it is another run)")
    write_job(tmp_path / "job.toml", runs=[{"title": "one"}, {"title": "two"}])
    _assert_refused(tmp_path, RECORD, "is not empty; choose ")


def test_the_folder_of_several_runs_holds_no_other(tmp_path: Path) -> None:
    write_job(tmp_path / "job.toml", runs=[{"title": "one"}, {"title": "two"}])
    assert (
        fedbcd("run", tmp_path / "job.toml", "--rounds", "1", "--out", tmp_path / "out").code == 0
    )
    _assert_refused(tmp_path, RECORD, "is not empty; choose ")
    write_job(tmp_path / "job.toml")
    _assert_refused(tmp_path, RECORD, "is not empty; choose ")
