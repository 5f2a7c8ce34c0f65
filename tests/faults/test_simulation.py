"""Hundreds of seeds of the simulated deployment, judged by the reference model; and the simulator
itself, judged by deliberate breaks.
"""

import subprocess
from dataclasses import replace

import pytest

from faultsim.mutations import MUTATIONS, caught, no_file_sync
from faultsim.run import report, run, shrink
from faultsim.schedule import Fault, Schedule
from faultsim.told import environment
from support.forked import Forked

SEEDS, PART = 800, 400  # `make torture` plays 100,000 of them
CAUGHT_BY = {
    "no_file_sync": 0,
    "no_folder_sync": 1,
    "commit_before_the_files": 14,
    "answer_before_commit": 0,
    "remove_before_commit": 1,
    "a_group_is_answered_before_its_commit": 0,
    "only_the_last_of_a_group_is_synced": 3,
    "copies_count_twice": 105,
    "held_uploads_are_forgotten": 17,
    "absorbs_are_not_repeated": 9,
    "absorb_without_before": 0,
    "one_server_too_few": 4,
    "last_come_first_mixed": 25,
    "mean_is_not_kept": 1,
    "late_copies_are_adopted": 0,
    "one_offline_round_more": 5,
    "uploads_are_not_repeated": 11,
    "grants_are_not_repeated": 4,
    "work_is_not_resumed": 18,
    "clock_follows_the_wall": 0,
    "clock_is_forgotten": 4,
    "peers_carry_the_clock": 0,
    "logs_are_merged_by_time_alone": 0,
    "sum_is_saved_too_late": 4,
    "snapshot_without_the_sum": 4,
    "snapshot_skips_an_event": 11,
    "snapshot_forgets_contributions": 4,
    "lost_memory_is_overlooked": 4,
    "models_are_not_kept_for_lost_devices": 24,
    "those_who_left_still_count": 15,
    "reports_follow_the_members": 294,
    "who_comes_back_is_not_put_in_step": 7,
    "phases_wait_for_those_who_left": 270,
    "sessions_begin_anew": 215,
    "who_is_ahead_is_let_in": 24,
    "older_models_are_taken": 24,
    "another_store_is_welcome": 34,
    "an_old_store_is_welcome": 569,
    "uploads_out_of_range_are_taken": 8,
    "what_was_refused_is_kept": 30,
    "phases_wait_for_what_was_refused": 52,
    "restored_carries_the_start": 2,
    "sessions_repeat_after_a_lost_disk": 4,
    "old_models_are_never_dropped": 0,
    "old_uploads_are_never_dropped": 0,
    "old_reports_are_never_dropped": 0,
    "old_answers_are_never_dropped": 2,
    "the_mixing_matrix_is_ignored": 4,
    "any_store_is_welcome": 34,
    "servers_that_are_ahead_are_welcome": 548,
    "last_come_first_admitted": 4,
    "members_come_and_go_with_the_gamma_of_the_first": 17,
    "damage_goes_unnoticed": 197,
    "a_failed_write_is_overlooked": 357,
    "dead_links_are_never_closed": 19,
    "patience_does_not_grow": 27,
    "anybody_speaks_for_anybody": 1,
    "requests_from_ahead_are_taken": 1,
    "twins_are_not_told_apart": 327,
    "nobody_asks_for_ever": 40,
    "a_mix_has_room_for_five": 382,
    "deadlines_of_earlier_phases_count": 26,
    "overdue_phases_end_with_nobody": 0,
    "what_was_lost_counts_on": 5,
    "who_waits_for_a_lost_answer_is_forgotten": 793,
}


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_every_seed_holds(first: int) -> None:
    words = ["faultsim", "--seeds", f"{first}:{first + PART}"]
    with Forked(
        words, strict=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert f"{PART} seeds" in out
    for fault in Fault:
        assert fault.name in out, f"no {fault.name} happened"
    assert "torn files" in out


@pytest.mark.parametrize("seed", [5008, 6837, 8771, 9331])
def test_seeds_that_have_found_something_hold(seed: int) -> None:
    assert run(Schedule.of(seed)).sentence == ""


def test_a_lost_model_is_called_by_its_name() -> None:
    """Whoever else was let in: what was acknowledged to a device and is replaced by something older
    comes first.
    """
    seed = CAUGHT_BY["older_models_are_taken"]
    assert (
        "lost its model: Restored(incarnation=1, activation=0"
        in caught("older_models_are_taken", [seed])[1]
    )


def test_a_seed_is_a_run() -> None:
    """The same seed gives the same letters, faults and rounds."""
    for seed in (3, 1004):
        assert run(Schedule.of(seed)) == run(Schedule.of(seed))


def test_a_failure_names_its_command_and_a_short_schedule() -> None:
    with no_file_sync():
        schedule = next(
            s for s in map(Schedule.of, range(100)) if len(s.faults) > 6 and run(s).sentence
        )
        short = shrink(schedule)
        text = report(short)
    assert 0 < len(short.faults) < len(schedule.faults)
    assert f"python -m faultsim --seed {schedule.seed}" in text
    assert "is damaged" in text
    assert not run(short).sentence


def test_without_faults_nothing_is_refused() -> None:
    for seed in range(14):
        outcome = run(replace(Schedule.of(seed), faults=()))
        assert (outcome.sentence, outcome.refused) == ("", 0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_break_is_caught(name: str) -> None:
    """`CAUGHT_BY` names the first seed that catches it (`python -m faultsim.mutations`)."""
    seed, sentence = caught(name, range(CAUGHT_BY[name], CAUGHT_BY[name] + 100))
    assert sentence
    assert seed == CAUGHT_BY[name], f"caught, but by seed {seed}; write that down"
