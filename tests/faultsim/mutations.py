"""Deliberate breaks of the deployment, each of which the simulator must catch. `python -m
faultsim.mutations` tries them all.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from faultsim.disk import Disk
from faultsim.run import run
from faultsim.schedule import Schedule
from fedbcd.algorithm import cloud
from fedbcd.engines.deploy.local import log_order as order
from fedbcd.engines.deploy.processes import clock, timeouts
from fedbcd.engines.deploy.roles import (
    base,
    contributions,
    coordinator,
    device,
    notes,
    server,
    snapshot,
    store,
)
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.errors import Refused
from fedbcd.protocol import (
    Device,
    Server,
    clouds,
    coordinator as coordinators,
    device as devices,
    server as servers,
)
from fedbcd.protocol.messages import Command, DeadlinePassed, Event, RetryDue, Uploaded

MOST = 2000  # seeds, for each


def no_file_sync() -> Any:
    """Tensor files are not synced before they are named."""
    return patch.object(Disk, "sync_file", lambda *_: None)


def no_folder_sync() -> Any:
    """The folder is not synced before a commit refers to its files."""
    return patch.object(Disk, "sync", lambda *_: None)


def commit_before_the_files() -> Any:
    """A commit names files that are synced and named after it."""
    whole = store.StoreOn._sync_files

    def late(self: store.StoreOn) -> None:
        self._late, self._unsynced = self._unsynced, {}  # type: ignore[attr-defined]

    def after(self: store.StoreOn) -> None:
        self._unsynced = self._late  # type: ignore[attr-defined]
        whole(self)
        let_go(self)

    let_go = store.StoreOn._remove_old
    return _both(
        patch.object(store.StoreOn, "_sync_files", late),
        patch.object(store.StoreOn, "_remove_old", after),
    )


def answer_before_commit() -> Any:
    """A server acknowledges an upload without having written it down: the commit comes with the
    next event.
    """
    whole = store.StoreOn.commit

    def lazy(self: store.StoreOn, step: Any = None, facts: Any = None) -> None:
        waiting = getattr(self, "_waiting", None)
        if waiting is not None:
            self._waiting = None  # type: ignore[attr-defined]
            whole(self, *waiting)
        if step is not None and isinstance(step.event, Uploaded):
            self._waiting = (step, dict(facts or {}))  # type: ignore[attr-defined]
        else:
            whole(self, step, facts)

    counted = store.StoreOn.length.fget  # type: ignore[attr-defined]
    length = property(lambda self: counted(self) + (getattr(self, "_waiting", None) is not None))
    return _both(
        patch.object(store.StoreOn, "commit", lazy), patch.object(store.StoreOn, "length", length)
    )


def remove_before_commit() -> Any:
    """What a commit is about to replace is removed before it."""
    whole = store.StoreOn._commit

    def eager(self: store.StoreOn, steps: Any, facts: Any) -> None:
        for name in [*self._dropped, *self._saved]:
            if name in self._files:
                self._folder.remove(self._files[name][0])
        self._folder.sync()
        whole(self, steps, facts)

    return patch.object(store.StoreOn, "_commit", eager)


def a_group_is_answered_before_its_commit() -> Any:
    """What a group of events says goes out, and the group becomes durable with the next one."""

    @contextmanager
    def lazy(self: store.StoreOn) -> Iterator[None]:
        if self._held is None:
            self._held, self._held_facts = [], {}
        elif self._held:
            steps, self._held = self._held, None
            self._make_durable(steps, self._held_facts)
            self._held, self._held_facts = [], {}
        yield

    return patch.object(store.StoreOn, "group_commit", lazy)


def only_the_last_of_a_group_is_synced() -> Any:
    """Of several files that one commit names, only the last is synced."""
    whole = store.StoreOn._sync_files

    def last(self: store.StoreOn) -> None:
        sync, others = Disk.sync_file, [*self._unsynced.values()][:-1]
        with patch.object(
            Disk, "sync_file", lambda disk, file: None if file in others else sync(disk, file)
        ):
            whole(self)

    return patch.object(store.StoreOn, "_sync_files", last)


def copies_count_twice() -> Any:
    """A repeated upload is counted again."""
    whole = Server._uploaded

    def twice(self: Server, event: Event) -> list[Command]:
        assert isinstance(event, Uploaded)
        known = self._last.get(event.device, -1)
        commands = whole(self, event)
        if event.activation <= known and self.state is servers.ServerState.COLLECTING:
            return [servers.Absorb(device=event.device, activation=event.activation), *commands]
        return commands

    return patch.dict(
        servers.TRANSITIONS,
        {
            (s, Uploaded): twice
            for s in (servers.ServerState.COLLECTING, servers.ServerState.WAITING)
        },
    )


def held_uploads_are_forgotten() -> Any:
    """What came while the server waited is acknowledged and dropped."""
    whole = Server._open

    def forget(self: Server) -> list[Command]:
        self._held = []
        return whole(self)

    return patch.object(Server, "_open", forget)


def absorbs_are_not_repeated() -> Any:
    """After a crash the uploads since the last saved sum are not counted again."""
    whole = server.ServerRole._load

    def load(self: server.ServerRole) -> None:
        self._copies.uncounted = []
        whole(self)

    return patch.object(server.ServerRole, "_load", load)


def absorb_without_before() -> Any:
    """A contribution is added to the last one of the same device instead of replacing it."""

    def absorb(total: Tensor, weight: float, after: Tensor, before: Tensor | None) -> None:
        total.add_(after.double(), alpha=weight)

    return patch.object(contributions, "absorb", absorb)


def one_server_too_few() -> Any:
    """A mix of B - 1."""
    whole = coordinators.AsyncCoordinator.__init__

    def init(self: Any, servers: Any, first: int, iterations: int = 1, alike: bool = True) -> None:
        whole(self, servers, max(first - 1, 1), iterations, alike)

    return patch.object(coordinators.AsyncCoordinator, "__init__", init)


def last_come_first_mixed() -> Any:
    """The latest B are mixed, not the first."""

    def latest(queue: Mapping[int, Any], first: int) -> Iterator[int]:
        return iter([*queue][-first:])

    return patch.object(coordinators, "islice", latest)


def mean_is_not_kept() -> Any:
    """The mean of B models is divided by B + 1."""
    return patch.object(cloud, "mean", lambda z_BF: z_BF.sum(0) / (len(z_BF) + 1))


def late_copies_are_adopted() -> Any:
    """A server takes an old answer of the coordinator for a new one."""
    return patch.object(Server, "_is_late", lambda *_: False)


def one_offline_round_more() -> Any:
    """The offline limit is off by one."""
    whole = Device._start_offline

    def more(self: Device, event: Event) -> list[Command]:
        limit, self.offline_limit = (
            self.offline_limit,
            None if self.offline_limit is None else self.offline_limit + 1,
        )
        try:
            return whole(self, event)
        finally:
            self.offline_limit = limit

    states = devices.DeviceState
    table = {(s, devices.OfflineDue): more for s in (states.IDLE, states.ASKING, states.SUSPENDED)}
    return patch.dict(devices.TRANSITIONS, table)


def uploads_are_not_repeated() -> Any:
    """A device whose acknowledgement was lost does not ask for it again."""
    return patch.dict(
        devices.TRANSITIONS, {(devices.DeviceState.UPLOADING, RetryDue): Device._ignore}
    )


def grants_are_not_repeated() -> Any:
    """A server whose answer to a request was lost does not say it again."""
    whole = Server._requested

    def once(self: Server, event: Event) -> list[Command]:
        assert isinstance(event, servers.UpdateRequested)
        return [] if event.device in self._working else whole(self, event)

    states = (servers.ServerState.COLLECTING, servers.ServerState.WAITING)
    return patch.dict(servers.TRANSITIONS, {(s, servers.UpdateRequested): once for s in states})


def work_is_not_resumed() -> Any:
    """A device that died while it trained does not begin again."""
    whole = device.DeviceRole._load

    def load(self: device.DeviceRole) -> None:
        whole(self)
        self.work = self._task = None

    return patch.object(device.DeviceRole, "_load", load)


def clock_follows_the_wall() -> Any:
    """Time is what the local clock says."""
    return patch.object(clock.HybridClock, "at", lambda _, now: now)


def clock_is_forgotten() -> Any:
    """After a crash a role's time begins anew."""
    whole = Role._recover

    def recover(self: Role) -> None:
        whole(self)
        self._clock.last = 0.0

    return patch.object(Role, "_recover", recover)


def peers_carry_the_clock() -> Any:
    """A letter from the far future takes its receiver along."""
    return patch.object(
        clock.HybridClock, "after", lambda self, sent, now: self.at(max(now, sent + clock.TICK_S))
    )


def logs_are_merged_by_time_alone() -> Any:
    """A role whose clock is wrong hears what nobody has said."""
    return patch.object(order.Order, "_cause", lambda *_: None)


def sum_is_saved_too_late() -> Any:
    """The note of which transitions the saved sum holds is one ahead."""
    whole = server.ServerRole._checkpoint

    def checkpoint(self: server.ServerRole) -> None:
        whole(self)
        self._facts["total_at"] = str(self.store.length + 1)

    return patch.object(server.ServerRole, "_checkpoint", checkpoint)


def snapshot_without_the_sum() -> Any:
    """A server takes a snapshot, but not of its sum, so that uploads before it are not counted
    again.
    """
    return patch.object(server.ServerRole, "_before_snapshot", lambda _: None)


def snapshot_skips_an_event() -> Any:
    """A snapshot says that it holds one event more than it does."""
    whole = snapshot.take
    return patch.object(
        snapshot, "take", lambda parts, number, time: whole(parts, number + 1, time)
    )


def snapshot_forgets_contributions() -> Any:
    """A server's snapshot does not say which file is whose."""

    def parts(self: server.ServerRole) -> snapshot.Parts:
        return {
            "machine": (self.machine, snapshot.names_of(self.machine)),
            "server": (self._notes, ("_granted", "_unstarted", "_reported")),
        }

    return patch.object(server.ServerRole, "_parts", parts)


def lost_memory_is_overlooked() -> Any:
    """A device with an empty or an old disk is taken for what it was."""
    return patch.object(server._DeviceProgress, "is_in_step_with", lambda *_, **__: True)


def models_are_not_kept_for_lost_devices() -> Any:
    """A model is dropped as soon as there is a newer one, whoever may still ask for it."""

    def release(self: notes.Notes, handle: str) -> None:
        if handle != self.current:
            self._drop(handle)

    return patch.object(notes.Notes, "release", release)


def those_who_left_still_count() -> Any:
    """The sum keeps what a member contributed that has left."""
    whole = server.ServerRole._change

    def change(self: server.ServerRole, command: Any) -> None:
        if isinstance(command, servers.Admit):
            whole(self, command)

    return patch.object(server.ServerRole, "_change", change)


def reports_follow_the_members() -> Any:
    """A sum that was reported and is sent again is that of the members of now."""
    return patch.object(
        notes.Notes, "_reported", property(lambda _: False, lambda *_: None), create=True
    )


def who_comes_back_is_not_put_in_step() -> Any:
    """A device that left and came back goes on with the personal model that it left with."""

    def tell(self: server.ServerRole, event: Event, now: float, facts: Any = None) -> Any:
        self._facts = dict(facts or {})
        letters = Role.tell(self, event, now)
        self._facts = {}
        self._notes._unstarted.clear()
        return letters

    return patch.object(server.ServerRole, "tell", tell)


def phases_wait_for_those_who_left() -> Any:
    """A phase still needs as many uploads as before members left."""
    whole = Server._device_left

    def left(self: Server, event: Event) -> list[Command]:
        with patch.object(Server, "_end_if_complete", lambda _: []):
            return whole(self, event)

    states = (servers.ServerState.COLLECTING, servers.ServerState.WAITING)
    return patch.dict(servers.TRANSITIONS, {(s, servers.DeviceLeft): left for s in states})


def sessions_begin_anew() -> Any:
    """One that trained offline before it joined draws the same mini-batches again."""
    whole = Device._restored

    def restored(self: Device, event: Event) -> list[Command]:
        commands = whole(self, event)
        self.session = event.session  # type: ignore[attr-defined]
        return commands

    return patch.dict(
        devices.TRANSITIONS, {(s, devices.Restored): restored for s in devices.DeviceState}
    )


def _without(role: Any, *reasons: str) -> Any:
    """A role that refuses nobody for these reasons."""
    whole = role.check_guest

    def check_guest(self: Any, guest: str, hello: Any) -> None:
        try:
            whole(self, guest, hello)
        except Refused as refused:
            if refused.reason not in reasons:
                raise

    return patch.object(role, "check_guest", check_guest)


def who_is_ahead_is_let_in() -> Any:
    """A server puts a device in step that knows of more than itself."""
    return _without(server.ServerRole, "ahead")


def older_models_are_taken() -> Any:
    """The same, and the device does not notice."""
    return _both(who_is_ahead_is_let_in(), patch.object(device.DeviceRole, "_check", Role._check))


def another_store_is_welcome() -> Any:
    """A server that has lost its store is taken for what it was."""
    return _without(coordinator.CoordinatorRole, "lost")


def an_old_store_is_welcome() -> Any:
    """A server from an older backup is taken for what it was."""
    return _without(coordinator.CoordinatorRole, "behind")


def uploads_out_of_range_are_taken() -> Any:
    """A server looks at the shape of an upload, and whether it is finite, but not at where it
    is.
    """
    return patch.object(server.ServerRole, "_check", Role._check)


def what_was_refused_is_kept() -> Any:
    """A device whose upload was declined goes on with the model that it had uploaded."""
    return patch.object(device.DeviceRole, "_put_back", lambda _: None)


def phases_wait_for_what_was_refused() -> Any:
    """A phase needs as many uploads as if none had come to nothing."""
    return patch.object(Server, "_needed", lambda self: min(self.active, len(self._last)))


def restored_carries_the_start() -> Any:
    """A device that is put in step is sent x(0) instead of what it contributed last."""
    return patch.object(
        contributions.Copies,
        "accepted",
        lambda self, device: self._start,
    )


def sessions_repeat_after_a_lost_disk() -> Any:
    """A device that has lost its memory draws the same mini-batches once more."""
    return patch.object(servers, "first_session", lambda life: 0)


def old_models_are_never_dropped() -> Any:
    """A server keeps every z_n that it ever had."""
    return patch.object(notes.Notes, "release", lambda *_: None)


def old_uploads_are_never_dropped() -> Any:
    """A server keeps every upload that it ever took."""
    return patch.object(contributions.Copies, "drop_obsolete", lambda _: None)


def _keeps_all(kind: str) -> Any:
    whole = Role._drop

    def drop(self: Any, name: str) -> None:
        if not name.startswith(kind):
            whole(self, name)

    return patch.object(coordinator.CoordinatorRole, "_drop", drop)


def old_reports_are_never_dropped() -> Any:
    """The coordinator keeps everything that servers have ever reported."""
    return _keeps_all("report/")


def old_answers_are_never_dropped() -> Any:
    """The coordinator keeps everything that it has ever answered."""
    return _keeps_all("w/")


def the_mixing_matrix_is_ignored() -> Any:
    """Servers of a graph mix with all alike."""

    def alike(_: Any, round_: int, servers: Sequence[int]) -> Any:
        return ((1 / len(servers),) * len(servers),) * len(servers)

    return patch.object(clouds.GraphCloud, "weights", alike)


def any_store_is_welcome() -> Any:
    """A coordinator looks at no server's store."""
    return _without(coordinator.CoordinatorRole, "lost", "behind", "ahead")


def servers_that_are_ahead_are_welcome() -> Any:
    """A coordinator that is behind a server goes on with it."""
    return _without(coordinator.CoordinatorRole, "ahead")


def last_come_first_admitted() -> Any:
    """A server lets in who asked last."""
    whole = Server._activate_next

    def latest(self: Server) -> list[Command]:
        self._asking = dict(reversed(self._asking.items()))
        return whole(self)

    return patch.object(Server, "_activate_next", latest)


def members_come_and_go_with_the_gamma_of_the_first() -> Any:
    """A member is added to the sum, and taken out of it, with the gamma_i of another one."""
    whole = server.ServerRole._change

    def change(self: server.ServerRole, command: Any) -> None:
        right, first = self._weights, self._weights[self.machine.members[0]]
        self._weights = [first] * len(right)
        try:
            whole(self, command)
        finally:
            self._weights = right

    return patch.object(server.ServerRole, "_change", change)


def damage_goes_unnoticed() -> Any:
    """A store hands out what its file holds, whatever was written."""
    return patch.object(store, "_check_digest", lambda *_: None)


def a_failed_write_is_overlooked() -> Any:
    """A role that could not write goes on with what it has in memory."""
    never = property(lambda _: False, lambda *_: None)
    return patch.object(Role, "_broken", never, create=True)


def dead_links_are_never_closed() -> Any:
    """Nobody is called gone, however long it is silent."""
    return patch.object(timeouts.AdaptiveTimeout, "seconds", lambda *_: math.inf)


def patience_does_not_grow() -> Any:
    """What is unanswered is said again after the same short time, however long answers take."""
    return patch.object(timeouts.AdaptiveTimeout, "seconds", lambda self, _=0: self.least)


def anybody_speaks_for_anybody() -> Any:
    """A role does not look at who says something."""
    return patch.object(base, "check_sender", lambda *_: None)


def requests_from_ahead_are_taken() -> Any:
    """A server lets in who asks for an activation that is not its next."""
    whole = Server._requested

    def requested(self: Server, event: Event) -> list[Command]:
        assert isinstance(event, servers.UpdateRequested)
        last = self._last.get(event.device)
        if last is not None and event.activation > last + 1:
            event = servers.UpdateRequested(device=event.device, activation=last + 1)
        return whole(self, event)

    states = (servers.ServerState.COLLECTING, servers.ServerState.WAITING)
    return patch.dict(
        servers.TRANSITIONS, {(s, servers.UpdateRequested): requested for s in states}
    )


def twins_are_not_told_apart() -> Any:
    """A device is in step if it is as far as its server thinks, however often it was put there."""

    def is_in_step(self: Any, here: Any, new: bool) -> bool:
        return self.store == here.store and (self.activation == here.activation or new)

    return patch.object(server._DeviceProgress, "is_in_step_with", is_in_step)


def nobody_asks_for_ever() -> Any:
    """A server whose report is unanswered says it again twelve times, and then waits."""
    said: dict[int, tuple[tuple[int, int], int]] = {}

    def retry(self: Server, _: Event) -> list[Command]:
        phase, (known, times) = (self.phase, self.iteration), said.get(id(self), ((-1, -1), 0))
        said[id(self)] = phase, (times + 1 if known == phase else 1)
        return [self._report()] if said[id(self)][1] <= 12 else []

    return patch.dict(servers.TRANSITIONS, {(servers.ServerState.WAITING, RetryDue): retry})


def a_mix_has_room_for_five() -> Any:
    """A coordinator has no place for more servers that wait than five."""
    whole = coordinators.AsyncCoordinator._fits

    def fits(self: Any, ready: Any, heard: Any) -> bool:
        return whole(self, ready, heard) and (ready.iteration > 0 or len(self._queue) < 5)

    return patch.object(coordinators.AsyncCoordinator, "_fits", fits)


def deadlines_of_earlier_phases_count() -> Any:
    """A timer that was set for a phase ends the next one, if that one has ended by then."""
    whole = Server._deadline_passed

    def passed(self: Server, _: Event) -> list[Command]:
        return whole(self, DeadlinePassed(phase=self.phase))

    return patch.dict(
        servers.TRANSITIONS, {(servers.ServerState.COLLECTING, DeadlinePassed): passed}
    )


def overdue_phases_end_with_nobody() -> Any:
    """A phase whose deadline has passed ends with one upload too few."""
    whole = Server._needed
    return patch.object(Server, "_needed", lambda self: whole(self) - self._is_overdue)


def what_was_lost_counts_on() -> Any:
    """A server that was recovered keeps what its sum was, and adds what devices bring again."""
    return patch.object(contributions.Sum, "nobody", lambda _: None)


def who_waits_for_a_lost_answer_is_forgotten() -> Any:
    """A rebuilt coordinator does not hear them once more."""
    return patch.object(coordinators.AsyncCoordinator, "_forget_answers", lambda *_: [])


MUTATIONS: dict[str, Callable[[], Any]] = {
    mutation.__name__: mutation
    for mutation in (
        no_file_sync,
        no_folder_sync,
        commit_before_the_files,
        answer_before_commit,
        remove_before_commit,
        a_group_is_answered_before_its_commit,
        only_the_last_of_a_group_is_synced,
        copies_count_twice,
        held_uploads_are_forgotten,
        absorbs_are_not_repeated,
        absorb_without_before,
        one_server_too_few,
        last_come_first_mixed,
        mean_is_not_kept,
        late_copies_are_adopted,
        one_offline_round_more,
        uploads_are_not_repeated,
        grants_are_not_repeated,
        work_is_not_resumed,
        clock_follows_the_wall,
        clock_is_forgotten,
        peers_carry_the_clock,
        logs_are_merged_by_time_alone,
        sum_is_saved_too_late,
        snapshot_without_the_sum,
        snapshot_skips_an_event,
        snapshot_forgets_contributions,
        lost_memory_is_overlooked,
        models_are_not_kept_for_lost_devices,
        those_who_left_still_count,
        reports_follow_the_members,
        who_comes_back_is_not_put_in_step,
        phases_wait_for_those_who_left,
        sessions_begin_anew,
        who_is_ahead_is_let_in,
        older_models_are_taken,
        another_store_is_welcome,
        an_old_store_is_welcome,
        uploads_out_of_range_are_taken,
        what_was_refused_is_kept,
        phases_wait_for_what_was_refused,
        restored_carries_the_start,
        sessions_repeat_after_a_lost_disk,
        old_models_are_never_dropped,
        old_uploads_are_never_dropped,
        old_reports_are_never_dropped,
        old_answers_are_never_dropped,
        the_mixing_matrix_is_ignored,
        any_store_is_welcome,
        servers_that_are_ahead_are_welcome,
        last_come_first_admitted,
        members_come_and_go_with_the_gamma_of_the_first,
        damage_goes_unnoticed,
        a_failed_write_is_overlooked,
        dead_links_are_never_closed,
        patience_does_not_grow,
        anybody_speaks_for_anybody,
        requests_from_ahead_are_taken,
        twins_are_not_told_apart,
        nobody_asks_for_ever,
        a_mix_has_room_for_five,
        deadlines_of_earlier_phases_count,
        overdue_phases_end_with_nobody,
        what_was_lost_counts_on,
        who_waits_for_a_lost_answer_is_forgotten,
    )
}


@contextmanager
def _both(one: Any, two: Any) -> Iterator[None]:
    with one, two:
        yield


def caught(name: str, seeds: Sequence[int] = range(MOST)) -> tuple[int, str]:
    """The first seed that catches a break, and what it says; -1 if none does."""
    with MUTATIONS[name]():
        for seed in seeds:
            outcome = run(Schedule.of(seed))
            if outcome.sentence:
                return seed, outcome.sentence
    return -1, ""


def main() -> int:
    """All of them; 0 if each was caught."""
    torch.set_num_threads(1)
    missed = 0
    for name, mutation in MUTATIONS.items():
        seed, sentence = caught(name)
        missed += seed < 0
        print(
            f"{name}: {(mutation.__doc__ or '').strip()} caught by seed {seed}:"
            f" {sentence.strip().splitlines()[-1][:150] if sentence else 'NOT CAUGHT'}",
            flush=True,
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
