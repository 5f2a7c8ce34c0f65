"""What the paper leaves open, by name: what each reading changes in the recipes."""

from dataclasses import replace

import pytest

from fedbcd.errors import ConfigError
from fedbcd.experiments.job import Job
from fedbcd.experiments.paper import PANELS, Setting, panels, without_effect
from fedbcd.experiments.pool import job_key
from fedbcd.experiments.readings import READINGS, read_as

OTHERS = [name for name, reading in READINGS.items() if not reading.default]


def _jobs(*readings: str) -> dict[tuple[str, str], Job]:
    chosen = panels(["all"], Setting(readings=readings))
    return {(panel.name, job.title): job for panel in chosen for job in panel.jobs}


def _changed(*readings: str) -> set[tuple[str, str]]:
    plain, read = _jobs(), _jobs(*readings)
    return {key for key in plain if job_key(plain[key]) != job_key(read[key])}


@pytest.mark.parametrize("name", [name for name in READINGS if name not in OTHERS])
def test_the_recipes_are_one_reading(name: str) -> None:
    assert not _changed(name)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_reading_changes_a_recipe(name: str) -> None:
    assert _changed(name)


def test_every_question_has_one_answer_that_the_recipes_give() -> None:
    questions = [reading.question for reading in READINGS.values() if reading.default]
    assert sorted(questions) == sorted({reading.question for reading in READINGS.values()})


def test_a_reading_of_fedbcd_i_leaves_the_others_alone() -> None:
    for name in ("pull", "restart", "absolute"):
        assert all(
            "FedBCD-I" in title or panel in ("fig4b", "fig4d", "beta")
            for panel, title in _changed(name)
        )
    assert ("fig4d", "FedProx, Sync") not in _changed("pull")
    # in absolute form 0.5 is beyond Assumption 4(ii) wherever ten servers' devices are in one sum
    assert _changed("absolute") == {
        key for key, job in _jobs().items()
        if job.spec.algorithm.name == "fedbcd-i" and not job.spec.cloud.sync
    }  # fmt: skip


def test_readings_add_up_one_to_a_question() -> None:
    both = _jobs("dealt", "pull")
    assert both["fig3a", "FedBCD-I"].data.dealt
    assert both["fig3a", "FedBCD-I"].spec.algorithm.momentum_after_contact == "pull"
    with pytest.raises(ConfigError, match="'pull' and 'restart' both answer 'momentum after"):
        read_as(["pull", "restart"], Job())
    with pytest.raises(ConfigError, match=r"no reading 'deal' \(did you mean 'dealt'"):
        read_as(["deal"], Job())


def test_a_reading_that_changes_nothing_is_said_to() -> None:
    asked = ("fig3a", "fig4d"), ("absolute", "dealt", "drawn")
    assert without_effect(*asked) == [("fig3a", "absolute"), ("fig3a", "drawn"), ("fig4d", "drawn")]


def test_a_recipe_keeps_its_title() -> None:
    panel = PANELS["fig3a"](Setting())
    read = panels(["fig3a"], Setting(readings=("dealt",)))[0]
    assert replace(read, jobs=panel.jobs) == panel
    assert [job.title for job in read.jobs] == [job.title for job in panel.jobs]
