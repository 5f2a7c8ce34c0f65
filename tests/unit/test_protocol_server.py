"""The server: every row of its table, every refusal, every late copy. Whole lists of commands are
compared.

Server 3 has the members 0, 1 and 2, and a phase ends with q = 2 uploads unless a test says
otherwise.
"""

import pytest

from fedbcd.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from fedbcd.protocol import Server, ServerState
from fedbcd.protocol.messages import (
    COORDINATOR,
    Absorb,
    Acknowledged,
    Activated,
    Admit,
    AdoptModel,
    Command,
    Contributed,
    CountNobody,
    DeadlinePassed,
    Declined,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Dismiss,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    OpenPhase,
    Recalled,
    Recount,
    Recovered,
    Restored,
    Resumed,
    RetryDue,
    Returned,
    Send,
    ServerReady,
    Started,
    StepLost,
    StepModel,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    device_actor,
)
from fedbcd.protocol.server import TRANSITIONS
from support.protocol import EVERY_EVENT, Nonsense, assert_ignored, assert_refused, play, snapshot

S = ServerState


# ------------------------------------------------------------------------------------------------
# short forms
def asks(device: DeviceId, activation: int = 0) -> UpdateRequested:
    return UpdateRequested(device=device, activation=activation)


def uploads(device: DeviceId, activation: int = 0) -> Uploaded:
    return Uploaded(device=device, activation=activation, model=f"x/{device}/{activation}")


def withdrawn(device: DeviceId, activation: int = 0, incarnation: int = 0) -> Withdrawn:
    return Withdrawn(device=device, activation=activation, incarnation=incarnation, reason="far")


def lost(device: DeviceId, activation: int = 0) -> DeviceLost:
    return DeviceLost(device=device, activation=activation)


def mixed(phase: int, iteration: int = 0) -> Mixed:
    return Mixed(phase=phase, iteration=iteration, model=f"w/{phase}/{iteration}")


def activate(device: DeviceId, activation: int = 0, model: str = "z/3/0") -> Send:
    return Send(to=device_actor(device), message=Activated(activation=activation, model=model))


def acknowledge(device: DeviceId, activation: int = 0) -> Send:
    return Send(to=device_actor(device), message=Acknowledged(activation=activation))


def decline(device: DeviceId, activation: int = 0) -> Send:
    return Send(to=device_actor(device), message=Declined(activation=activation, reason="far"))


def absorb(device: DeviceId, activation: int = 0) -> Absorb:
    return Absorb(device=device, activation=activation)


def report(phase: int = 0, iteration: int = 0, model: str = "z/3/0") -> Send:
    return Send(
        to=COORDINATOR, message=ServerReady(server=3, phase=phase, iteration=iteration, model=model)
    )


def step(mixed_model: str, version: int) -> StepModel:
    return StepModel(mixed=mixed_model, model=f"z/3/{version - 1}", result=f"z/3/{version}")


def restore(
    device: DeviceId,
    activation: int,
    incarnation: int,
    model: str | None = None,
    life: int | None = None,
) -> Send:
    model = model or f"x/{device}/{activation - 1}"
    session = (incarnation if life is None else life) << 32
    restored = Restored(
        incarnation=incarnation, activation=activation, session=session, model=model
    )
    return Send(to=device_actor(device), message=restored)


PHASE_0: list[Event] = [asks(0), asks(1), uploads(0), uploads(1)]


def server_after(
    events: list[Event] | None = None, active: int = 2, iterations: int = 1, sync: bool = False
) -> Server:
    """A started server after these events."""
    server = Server(3, [0, 1, 2], active, iterations, sync)
    play(server, [Started(), *(events or [])])
    return server


def server_in(state: ServerState) -> Server:
    """In NEW nothing has happened; in COLLECTING and WAITING device 2 asks and phase 0 is over, so
    that late copies exist.
    """
    if state is S.NEW:
        return Server(3, [0, 1, 2], 2)
    second_phase = [*PHASE_0, mixed(0), asks(2)]
    more = [] if state is S.COLLECTING else [asks(1, 1), uploads(2), uploads(1, 1)]
    server = server_after([*second_phase, *more])
    assert server.state is state
    assert server.phase == 1
    return server


def test_at_once_more_work_than_end_a_phase() -> None:
    """Who has begun in one phase counts in the next; a place is filled again as soon as it is
    free, and nobody counts twice in a phase.
    """
    server = Server(3, [0, 1, 2, 4], active=2, at_once=3)
    play(server, [Started(), asks(0), asks(1), asks(2), asks(4)])
    assert server.places == 0
    assert {device for device, _ in server.working} == {0, 1, 2}
    assert server.handle(uploads(0)) == [absorb(0), acknowledge(0), activate(4, 0, "z/3/0")]
    assert server.handle(asks(0, 1)) == []
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2), report(0, 0, "z/3/0")]
    assert server.handle(asks(2, 1)) == []
    assert server.handle(uploads(1)) == [acknowledge(1)]
    assert server.handle(mixed(0)) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        absorb(1),
        activate(0, 1, "z/3/1"),
        activate(2, 1, "z/3/1"),
    ]


def test_a_phase_whose_deadline_has_passed_ends_with_those_that_have_come() -> None:
    """At least `least` of them; who is still at work counts in the next phase, in which the
    deadline of this one says nothing.
    """
    server = Server(3, [0, 1, 2, 4], active=3, least=2)
    play(server, [Started(), asks(0), asks(1), asks(2), uploads(0)])
    assert server.handle(DeadlinePassed(phase=0)) == []  # one is too few
    assert server.handle(asks(4)) == []  # and two are at work already
    assert server.handle(uploads(1)) == [absorb(1), acknowledge(1), report(0, 0, "z/3/0")]
    assert server.handle(DeadlinePassed(phase=0)) == []
    assert server.handle(mixed(0)) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        activate(4, 0, "z/3/1"),
    ]
    assert server.handle(DeadlinePassed(phase=0)) == []
    assert server.handle(uploads(4)) == [absorb(4), acknowledge(4)]
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2)]
    assert server.handle(DeadlinePassed(phase=1)) == [report(1, 0, "z/3/1")]


def test_a_server_lets_in_more_than_it_needs() -> None:
    """The first of them end the phase; the others count in the next."""
    server = Server(3, [0, 1, 2, 4], active=2, spare=1)
    play(server, [Started(), asks(0), asks(1), asks(2), asks(4)])
    assert [device for device, _ in server.working] == [0, 1, 2]
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2)]
    assert server.handle(uploads(0)) == [absorb(0), acknowledge(0), report(0, 0, "z/3/0")]
    assert server.handle(uploads(1)) == [acknowledge(1)]
    assert server.handle(mixed(0)) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        absorb(1),
        activate(4, 0, "z/3/1"),
    ]
    assert server.places == 1


BUSY = (S.COLLECTING, S.WAITING)


def brings(device: int, activation: int, incarnation: int = 1) -> Contributed:
    model = f"c/{device}/{incarnation}/0"
    return Contributed(device=device, incarnation=incarnation, activation=activation, model=model)


ROWS: list[tuple[ServerState, Event, list[Command], ServerState]] = [
    (S.NEW, Started(), [OpenPhase(phase=0)], S.COLLECTING),
    # devices
    (S.COLLECTING, asks(0, 1), [activate(0, 1, "z/3/1")], S.COLLECTING),
    (S.COLLECTING, uploads(2), [absorb(2), acknowledge(2)], S.COLLECTING),
    (S.COLLECTING, withdrawn(2), [decline(2)], S.COLLECTING),
    (S.COLLECTING, lost(2), [], S.COLLECTING),
    (S.COLLECTING, DeadlinePassed(phase=0), [], S.COLLECTING),
    (S.WAITING, DeadlinePassed(phase=1), [], S.WAITING),
    (S.COLLECTING, DeviceJoined(device=9), [Admit(device=9, model="z/3/1")], S.COLLECTING),
    (S.COLLECTING, DeviceLeft(device=2), [Dismiss(device=2)], S.COLLECTING),
    (S.WAITING, asks(0, 1), [], S.WAITING),
    (S.WAITING, uploads(2), [acknowledge(2)], S.WAITING),
    (S.WAITING, withdrawn(0, 0), [acknowledge(0)], S.WAITING),
    (S.WAITING, lost(2), [], S.WAITING),
    (S.WAITING, DeviceJoined(device=9), [Admit(device=9, model="z/3/1")], S.WAITING),
    (S.WAITING, DeviceLeft(device=2), [Dismiss(device=2)], S.WAITING),
    *[
        (state, DeviceReset(device=0), [restore(0, 1, 1)], state)
        for state in (S.COLLECTING, S.WAITING)
    ],
    *[(state, Resumed(device=0, incarnation=0), [], state) for state in (S.COLLECTING, S.WAITING)],
    # it has an older store, and goes on
    (S.COLLECTING, Recovered(generation=1), [CountNobody()], S.COLLECTING),
    (S.WAITING, Recovered(generation=1), [], S.WAITING),
    *[(state, Returned(device=0, activation=1, incarnation=0), [], state) for state in BUSY],
    *[(state, brings(0, 1), [], state) for state in BUSY],
    # the coordinator
    (S.COLLECTING, mixed(0), [], S.COLLECTING),
    (S.COLLECTING, GlobalUpdated(phase=0, model="z/1"), [], S.COLLECTING),
    (S.COLLECTING, Isolated(phase=1), [], S.COLLECTING),
    (S.WAITING, mixed(1), [step("w/1/0", 2), OpenPhase(phase=2)], S.COLLECTING),
    (
        S.WAITING,
        GlobalUpdated(phase=1, model="z/2"),
        [AdoptModel(model="z/2"), OpenPhase(phase=2)],
        S.COLLECTING,
    ),
    (S.WAITING, Isolated(phase=1), [step("z/3/1", 2), OpenPhase(phase=2)], S.COLLECTING),
    # no answer came
    (S.COLLECTING, RetryDue(), [], S.COLLECTING),
    (S.WAITING, RetryDue(), [report(1, 0, "z/3/1")], S.WAITING),
]

REFUSED: list[tuple[ServerState, Event, type[ProtocolError], str]] = [
    *[
        (state, asks(0, 2), RemoteProtocolError, "asks for activation 2, .* its next is 1")
        for state in BUSY
    ],
    *[
        (
            state,
            uploads(0, 1),
            RemoteProtocolError,
            "uploads activation 1, which server 3 has not started",
        )
        for state in BUSY
    ],
    *[
        (
            state,
            uploads(2, 1),
            RemoteProtocolError,
            "uploads activation 1, which server 3 has not started",
        )
        for state in BUSY
    ],
    *[
        (
            state,
            withdrawn(0, 1),
            RemoteProtocolError,
            "uploads activation 1, which server 3 has not started",
        )
        for state in BUSY
    ],
    *[(state, withdrawn(8), RemoteProtocolError, "device 8 is not a member") for state in BUSY],
    (
        S.COLLECTING,
        withdrawn(2, 0, 1),
        RemoteProtocolError,
        "has been put in step 0 times; this is from before",
    ),
    *[
        (
            state,
            asks(8),
            RemoteProtocolError,
            r"device 8 is not a member of server 3; its members are \[0",
        )
        for state in BUSY
    ],
    *[(state, uploads(8), RemoteProtocolError, "device 8 is not a member") for state in BUSY],
    *[(state, mixed(2), RemoteProtocolError, "got the answer to phase 2.0") for state in BUSY],
    *[
        (
            state,
            GlobalUpdated(phase=2, model="z/3"),
            RemoteProtocolError,
            "got the answer to phase 2.0",
        )
        for state in BUSY
    ],
    (S.COLLECTING, mixed(1), RemoteProtocolError, "got the answer to phase 1.0"),
    (
        S.COLLECTING,
        GlobalUpdated(phase=1, model="z/2"),
        RemoteProtocolError,
        "got the answer to phase 1.0",
    ),
    (S.WAITING, mixed(1, 1), RemoteProtocolError, "got the answer to phase 1.1"),
    *[
        (state, DeviceReset(device=8), RemoteProtocolError, "device 8 is not a member")
        for state in BUSY
    ],
    *[
        (
            state,
            Resumed(device=0, incarnation=1),
            RemoteProtocolError,
            "put in step 1 times, but server 3 did so 0 times",
        )
        for state in BUSY
    ],
]

LATE: list[Event] = [
    asks(0),
    lost(0),
    lost(2, 7),
    DeviceJoined(device=0),
    DeviceLeft(device=8),
    mixed(0),
    GlobalUpdated(phase=0, model="z/1"),
]


# ------------------------------------------------------------------------------------------------
# the table
@pytest.mark.parametrize(("state", "event", "commands", "then"), ROWS)
def test_each_transition_gives_its_commands(
    state: ServerState, event: Event, commands: list[Command], then: ServerState
) -> None:
    """Each row: a state, an event, all that is to be done, the state after."""
    server = server_in(state)
    assert server.handle(event) == commands
    assert server.state is then


def test_the_rows_cover_the_whole_table() -> None:
    """Guards the test above."""
    assert {(state, type(event)) for state, event, _, _ in ROWS} == set(TRANSITIONS)


@pytest.mark.parametrize(("state", "event", "error", "match"), REFUSED)
def test_what_cannot_be_true_is_refused_and_changes_nothing(
    state: ServerState, event: Event, error: type[ProtocolError], match: str
) -> None:
    """A machine that raises has not changed."""
    assert_refused(server_in(state), event, error, match)


@pytest.mark.parametrize("state", S)
def test_events_that_are_not_in_the_table_are_refused_and_change_nothing(
    state: ServerState,
) -> None:
    """'An illegal event raises and nothing changes.'"""
    for event in (*EVERY_EVENT, Nonsense()):
        if (state, type(event)) not in TRANSITIONS:
            assert_refused(
                server_in(state),
                event,
                LocalProtocolError,
                f"server 3 cannot handle .* while {state.value}",
            )


@pytest.mark.parametrize("event", LATE, ids=repr)
@pytest.mark.parametrize("state", BUSY)
def test_late_and_repeated_messages_are_normal_and_change_nothing(
    state: ServerState, event: Event
) -> None:
    """'A late copy is normal on a network, so not an error.'"""
    assert_ignored(server_in(state), event)


@pytest.mark.parametrize("state", BUSY)
def test_a_repeated_upload_is_acknowledged_again_and_changes_nothing(state: ServerState) -> None:
    """The first acknowledgement was lost: the device hears again that its model counts, but it does
    not count twice.
    """
    server = server_in(state)
    before = snapshot(server)
    assert server.handle(uploads(0)) == [acknowledge(0)]
    assert snapshot(server) == before


# --------------------------------------------------------------------------------------------
# response and update, uploads
def test_a_round_starts_by_opening_the_phase() -> None:
    """Paper, Sync-cloud (i): 'A new round t starts with the 'response and update' phase'."""
    assert Server(3, [0, 1, 2], 2).handle(Started()) == [OpenPhase(phase=0)]


def test_an_accepted_request_is_answered_with_the_servers_model() -> None:
    """Paper, Sync-cloud (i): 'accept update requests from edge devices, send the global model z to
    these activated edge devices'.
    """
    assert server_after().handle(asks(1)) == [activate(1)]
    assert server_after(sync=True).handle(asks(1)) == [activate(1, 0, "z/0")]


def test_no_more_devices_are_activated_than_the_phase_needs() -> None:
    """Paper, Sync-cloud (i): 'from a pre-determined number of edge devices'; a third device would
    work in vain.
    """
    server = server_after([asks(0), asks(1)])
    assert server.handle(asks(2)) == []
    assert [server.is_working(device) for device in server.members] == [True, True, False]


def test_a_repeated_request_in_the_queue_keeps_its_place() -> None:
    """First come, first served: a retry is not a second request."""
    server = server_after([asks(2), asks(1)], active=1)
    assert play(server, [asks(0), asks(1)]) == []
    assert play(server, [uploads(2), mixed(0)]) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        activate(1, 0, "z/3/1"),
    ]


def test_a_repeated_request_of_a_busy_device_gets_the_same_answer() -> None:
    """The activation was lost on its way: the same one is sent again, with the model of then."""
    server = server_after([asks(0)])
    assert server.handle(asks(0)) == [activate(0)]
    waiting = server_after([asks(0), asks(1), lost(0), asks(2), uploads(1), uploads(2)])
    assert waiting.handle(asks(0)) == [activate(0)]


def test_an_upload_replaces_the_copy_and_is_acknowledged() -> None:
    """Paper, Sync-cloud (i): 'this cloud server replaces its local copy of x_i(t)'s with
    x_i(t+1)'s'.
    """
    assert server_after([asks(0)]).handle(uploads(0)) == [absorb(0), acknowledge(0)]


def test_the_phase_ends_with_the_last_upload_it_needs() -> None:
    """Paper, Sync-cloud (i): 'this phase ends when it receives x_i(t+1)'s from a pre-determined
    number of edge devices'.
    """
    server = server_after([asks(0), asks(1), uploads(1)])
    assert server.handle(uploads(0)) == [absorb(0), acknowledge(0), report()]


def test_async_servers_send_their_model_to_the_coordinator() -> None:
    """Paper, Async-cloud (i): 'finished the 'response and update' phase send their model z_n(t)'s
    to the coordinator'.
    """
    assert play(server_after(), PHASE_0)[-1] == report(0, 0, "z/3/0")


def test_sync_servers_send_their_sum_to_the_coordinator() -> None:
    """Paper, Sync-cloud (i): 'sends [the sum of] x_i(t+1) to a coordinator'."""
    assert play(server_after(sync=True), PHASE_0)[-1] == report(0, 0, "s/3/0")


def test_a_device_counts_once_per_phase() -> None:
    """Paper, Sync-cloud (i): x_i(t+1)'s 'from a pre-determined number of edge devices', not as many
    uploads of a fast one.
    """
    server = server_after([asks(0), uploads(0)])
    assert server.handle(asks(0, 1)) == []
    assert server.handle(asks(2)) == [activate(2)]
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2), report()]
    assert server.handle(mixed(0)) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        activate(0, 1, "z/3/1"),
    ]


def test_a_device_that_counted_does_not_block_those_behind_it() -> None:
    """It asks again first, but its turn is the next phase."""
    server = server_after([asks(0), asks(1), uploads(0), asks(0, 1), asks(2)])
    assert server.handle(lost(1)) == [activate(2)]


def test_a_phase_needs_no_more_than_all_members() -> None:
    """A pre-determined number above |Q_n| means everybody."""
    server = server_after([asks(0), asks(1), asks(2), uploads(0), uploads(1)], active=10)
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2), report()]


def test_requests_that_come_while_waiting_are_served_first_in_the_next_phase() -> None:
    """Paper, Sync-cloud (ii): 'the cloud servers become available again for the next round of
    update'.
    """
    server = server_after([*PHASE_0, asks(2), asks(1, 1), asks(0, 1)])
    commands = [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        activate(2, 0, "z/3/1"),
        activate(1, 1, "z/3/1"),
    ]
    assert server.handle(mixed(0)) == commands


def test_an_upload_that_comes_while_waiting_counts_in_the_next_phase() -> None:
    """It is acknowledged now and absorbed once, when the next phase opens; what was reported stays
    what it was.
    """
    server = server_after([asks(0), asks(1), lost(0), asks(2), uploads(1), uploads(2)])
    assert server.handle(uploads(0)) == [acknowledge(0)]
    assert server.handle(uploads(0)) == [acknowledge(0)]
    assert server.handle(mixed(0)) == [step("w/0/0", 1), OpenPhase(phase=1), absorb(0)]
    assert play(server, [asks(1, 1)]) == [activate(1, 1, "z/3/1")]
    assert server.handle(uploads(1, 1)) == [absorb(1, 1), acknowledge(1, 1), report(1, 0, "z/3/1")]


def test_uploads_that_came_while_waiting_can_complete_the_next_phase_at_once() -> None:
    """Nobody is activated for a phase that is already over."""
    server = server_after([asks(0), lost(0), asks(1), uploads(1), asks(2)], active=1)
    assert server.state is S.WAITING
    play(server, [uploads(0)])
    assert server.handle(mixed(0)) == [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        absorb(0),
        report(1, 0, "z/3/1"),
    ]


# ------------------------------------------------------------------------------------------------
# the cloud's answers
def test_a_server_of_the_mix_steps_from_what_it_received_and_opens_its_next_phase() -> None:
    """Paper, Async-cloud (iii): 'they use received w(t) as w_n(t) and update z_n(t+1) by (6)'."""
    assert server_after(PHASE_0).handle(mixed(0)) == [step("w/0/0", 1), OpenPhase(phase=1)]


def test_a_sync_server_adopts_the_broadcast_model() -> None:
    """Paper, Sync-cloud (ii): 'After receiving z(t+1), the cloud servers become available
    again'.
    """
    server = server_after(PHASE_0, sync=True)
    assert server.handle(GlobalUpdated(phase=0, model="z/1")) == [
        AdoptModel(model="z/1"),
        OpenPhase(phase=1),
    ]
    assert server.handle(asks(2)) == [activate(2, 0, "z/1")]


def test_with_several_cloud_iterations_the_server_reports_after_each_step() -> None:
    """Paper, Algorithm 1: 'allowing the cloud servers to run multiple epochs of DGD updates'."""
    server = server_after(PHASE_0, iterations=2)
    assert server.handle(mixed(0, 0)) == [step("w/0/0", 1), report(0, 1, "z/3/1")]
    assert_ignored(server, mixed(0, 0))
    assert server.handle(RetryDue()) == [report(0, 1, "z/3/1")]
    assert server.handle(mixed(0, 1)) == [step("w/0/1", 2), OpenPhase(phase=1)]


def test_an_isolated_server_waits_until_its_phase_ends() -> None:
    """Paper, Appendix A (iv): 'the isolated cloud servers will wait until their 'edge-device
    update' phase ends'.
    """
    server = server_after([asks(0), asks(1), uploads(0)])
    assert server.handle(Isolated(phase=0)) == []
    assert server.handle(uploads(1)) == [
        absorb(1),
        acknowledge(1),
        step("z/3/0", 1),
        OpenPhase(phase=1),
    ]


def test_an_isolated_server_that_waits_steps_alone_at_once() -> None:
    """Paper, Appendix A (iv): 'and then use w_n(t) = z_n(t) in update (6) to obtain z_n(t+1)'."""
    assert server_after(PHASE_0).handle(Isolated(phase=0)) == [step("z/3/0", 1), OpenPhase(phase=1)]


def test_an_isolated_server_takes_all_cloud_iterations_alone() -> None:
    """Paper, Appendix A: 'the same eta_z is used on all cloud servers', so each takes K_z steps."""
    server = server_after(PHASE_0, iterations=2)
    assert server.handle(Isolated(phase=0)) == [
        step("z/3/0", 1),
        step("z/3/1", 2),
        OpenPhase(phase=1),
    ]


def test_a_server_isolated_from_several_rounds_steps_alone_in_each() -> None:
    """Paper, Appendix A (i): 'only cloud-server models at round t will be accepted'; a straggler is
    late for all of them.
    """
    server = server_after([Isolated(phase=1)], active=1)
    alone = [absorb(0), acknowledge(0), step("z/3/0", 1), OpenPhase(phase=1)]
    assert play(server, [asks(0), uploads(0)]) == alone
    again = [absorb(1), acknowledge(1), step("z/3/1", 2), OpenPhase(phase=2)]
    assert play(server, [asks(1), uploads(1)]) == again
    assert play(server, [asks(2), uploads(2)]) == [absorb(2), acknowledge(2), report(2, 0, "z/3/2")]


def test_the_isolation_of_a_later_round_does_not_overtake_the_mix_it_waits_for() -> None:
    """Paper, Appendix A (iv): 'cloud servers in V(t) use received w(t) as w_n(t)', however slow
    that message is.
    """
    server = server_after(PHASE_0, active=2)
    assert server.handle(Isolated(phase=1)) == []
    assert server.handle(mixed(0)) == [step("w/0/0", 1), OpenPhase(phase=1)]
    commands = play(server, [asks(0, 1), asks(1, 1), uploads(0, 1), uploads(1, 1)])
    assert commands == [absorb(1, 1), acknowledge(1, 1), step("z/3/1", 2), OpenPhase(phase=2)]


def test_the_isolation_of_a_later_round_does_not_stand_for_a_lost_one() -> None:
    """It waits for a word on its own round, and asks for it."""
    server = server_after(PHASE_0)
    play(server, [Isolated(phase=1)])
    assert server.handle(RetryDue()) == [report()]
    assert server.handle(Isolated(phase=0)) == [step("z/3/0", 1), OpenPhase(phase=1)]


def test_a_late_copy_of_an_isolation_is_ignored() -> None:
    """The server has stepped alone and is in the next round."""
    assert_ignored(server_after([*PHASE_0, Isolated(phase=0)]), Isolated(phase=0))
    assert_ignored(server_after([*PHASE_0, Isolated(phase=0), asks(0, 1)]), Isolated(phase=0))


def test_a_server_that_iterates_with_the_mix_is_not_isolated_from_it() -> None:
    """It has stepped with w already; half a round alone would be neither."""
    server = server_after([*PHASE_0, mixed(0, 0)], iterations=2)
    assert server.handle(Isolated(phase=0)) == []
    assert server.handle(mixed(0, 1)) == [step("w/0/1", 2), OpenPhase(phase=1)]


def test_a_retry_repeats_the_report_word_for_word() -> None:
    """Devices that ask or join meanwhile do not change what was reported."""
    server = server_after([*PHASE_0, asks(2), DeviceJoined(device=9)])
    assert server.handle(RetryDue()) == [report()]
    assert server.handle(RetryDue()) == [report()]


# ------------------------------------------------------------------------------------------------
# devices that are lost
def test_the_place_of_a_lost_device_goes_to_the_next_in_the_queue() -> None:
    """A device that vanished must not hold up its server."""
    server = server_after([asks(0), asks(1), asks(2)])
    assert server.handle(lost(0)) == [activate(2)]
    assert not server.is_working(0)


def test_a_lost_device_that_uploads_after_all_is_counted() -> None:
    """Given up, but welcome: its model is as good as any."""
    server = server_after([asks(0), asks(1), lost(0), asks(2), uploads(1)])
    assert server.handle(uploads(0)) == [absorb(0), acknowledge(0), report()]


def test_the_device_that_took_the_place_counts_in_the_next_phase() -> None:
    """Nothing that was asked for is thrown away; it also keeps its place among the q of that
    phase.
    """
    server = server_after([asks(0), asks(1), lost(0), asks(2), uploads(1), uploads(0), mixed(0)])
    assert server.handle(asks(0, 1)) == [activate(0, 1, "z/3/1")]
    assert server.handle(asks(1, 1)) == []
    assert server.handle(uploads(2)) == [absorb(2), acknowledge(2)]
    assert server.handle(uploads(0, 1)) == [absorb(0, 1), acknowledge(0, 1), report(1, 0, "z/3/1")]


def test_a_device_lost_while_the_server_waits_frees_a_place_in_the_next_phase() -> None:
    """Nobody is activated between two phases."""
    server = server_after(
        [asks(0), asks(1), lost(0), asks(2), uploads(1), uploads(0), asks(0, 1), asks(1, 1)]
    )
    assert server.handle(lost(2)) == []
    opened = [
        step("w/0/0", 1),
        OpenPhase(phase=1),
        activate(0, 1, "z/3/1"),
        activate(1, 1, "z/3/1"),
    ]
    assert server.handle(mixed(0)) == opened


def test_a_device_that_has_uploaded_is_not_lost() -> None:
    """The timer went off a moment too late."""
    assert_ignored(server_after([asks(0), uploads(0)]), lost(0))
    assert_ignored(server_after([asks(0), lost(0)]), lost(0))


# ------------------------------------------------------------------------------------------------
# devices come and go
def test_a_new_member_starts_from_the_servers_model() -> None:
    """Paper, Algorithm 1, line 1: x_i and z_n start alike."""
    server = server_after()
    assert server.handle(DeviceJoined(device=9)) == [Admit(device=9, model="z/3/0")]
    assert server.members == (0, 1, 2, 9)
    assert_ignored(server, DeviceJoined(device=9))
    assert server.handle(asks(9)) == [activate(9)]


def test_a_new_member_can_open_a_place_for_one_that_waits() -> None:
    """With more members the phase needs more devices, and the next in the queue is one."""
    server = server_after([asks(0), uploads(0), DeviceLeft(device=0), asks(1)], active=3)
    assert server.handle(asks(2)) == []
    assert server.handle(DeviceJoined(device=9)) == [Admit(device=9, model="z/3/0"), activate(2)]


def test_a_member_that_leaves_no_longer_counts() -> None:
    """Its copy leaves the sum."""
    server = server_after()
    assert server.handle(DeviceLeft(device=1)) == [Dismiss(device=1)]
    assert server.members == (0, 2)
    assert_ignored(server, DeviceLeft(device=1))


def test_a_busy_member_that_leaves_gives_its_place_to_the_next() -> None:
    """As with a lost device."""
    server = server_after([asks(0), asks(1), asks(2)])
    assert server.handle(DeviceLeft(device=0)) == [Dismiss(device=0), activate(2)]


def test_the_phase_ends_when_the_last_device_it_waits_for_leaves() -> None:
    """Those that remain have all uploaded."""
    server = server_after([asks(0), asks(1), asks(2), uploads(0), uploads(1)], active=3)
    assert server.handle(DeviceLeft(device=2)) == [Dismiss(device=2), report()]


def test_an_isolated_server_steps_alone_when_the_device_it_waits_for_leaves() -> None:
    """Paper, Appendix A (iv), by another way to the end of the phase."""
    server = server_after(
        [asks(0), asks(1), asks(2), uploads(0), uploads(1), Isolated(phase=0)], active=3
    )
    assert server.handle(DeviceLeft(device=2)) == [
        Dismiss(device=2),
        step("z/3/0", 1),
        OpenPhase(phase=1),
    ]


def test_a_held_upload_leaves_with_its_device() -> None:
    """Nothing of a device that is gone is absorbed."""
    server = server_after([asks(0), asks(1), lost(0), asks(2), uploads(1), uploads(2), uploads(0)])
    assert server.handle(DeviceLeft(device=0)) == [Dismiss(device=0)]
    assert server.handle(mixed(0)) == [step("w/0/0", 1), OpenPhase(phase=1)]


def test_a_waiting_request_leaves_with_its_device() -> None:
    """Nobody is activated who is gone."""
    server = server_after([*PHASE_0, asks(2)])
    assert server.handle(DeviceLeft(device=2)) == [Dismiss(device=2)]
    assert server.handle(mixed(0)) == [step("w/0/0", 1), OpenPhase(phase=1)]


@pytest.mark.parametrize(
    "event", [asks(0, 1), uploads(0), uploads(0, 1), lost(0), DeviceLeft(device=0)], ids=repr
)
def test_late_messages_of_a_device_that_has_left_are_normal(event: Event) -> None:
    """They may have been under way when it left."""
    assert_ignored(server_after([asks(0), uploads(0), asks(1), DeviceLeft(device=0)]), event)


def test_the_last_member_cannot_leave() -> None:
    """The mean over no members does not exist."""
    server = server_after([DeviceLeft(device=0), DeviceLeft(device=1)])
    assert_refused(
        server, DeviceLeft(device=2), LocalProtocolError, "is the last of server 3 and cannot leave"
    )


def test_a_member_that_comes_back_goes_on_with_its_own_counter() -> None:
    """An activation that has been counted is not counted again."""
    server = server_after([asks(0), uploads(0), DeviceLeft(device=0)])
    assert server.handle(DeviceJoined(device=0)) == [Admit(device=0, model="z/3/0")]
    assert_ignored(server, asks(0, 0))
    assert server.handle(uploads(0, 0)) == [acknowledge(0, 0)]
    assert_refused(server, asks(0, 2), RemoteProtocolError, "its next is 1")


def test_a_member_that_left_at_work_and_comes_back_may_finish() -> None:
    """It has trained and can only repeat its upload; refusing that for ever would shut it out."""
    server = server_after([asks(0), DeviceLeft(device=0)])
    assert_ignored(server, uploads(0))
    assert server.handle(DeviceJoined(device=0)) == [Admit(device=0, model="z/3/0")]
    assert server.handle(uploads(0)) == [absorb(0), acknowledge(0)]


def test_a_member_that_comes_back_before_it_was_activated_gets_the_activation_of_then() -> None:
    """Whether the first one reached it nobody knows; two different ones for one activation would be
    worse.
    """
    server = server_after(
        [asks(0), DeviceLeft(device=0), asks(1), asks(2), uploads(1), uploads(2), mixed(0)]
    )
    assert play(server, [DeviceJoined(device=0), asks(0)]) == [activate(0, 0, "z/3/0")]


# ------------------------------------------------------------------------------------------------
# devices that lost their memory
def test_until_a_device_confirms_it_is_told_again_and_nothing_of_it_counts() -> None:
    server = server_after([*PHASE_0, mixed(0), asks(0, 1), DeviceReset(device=0)])
    again = restore(0, 1, 1)
    assert server.handle(asks(0, 0)) == [again]
    assert server.handle(uploads(0, 1)) == [again]
    assert server.handle(DeviceReset(device=0)) == [again]
    assert server.handle(Resumed(device=0, incarnation=1)) == []
    assert server.handle(asks(0, 1)) == [activate(0, 1, "z/3/1")]  # its place was kept


def test_an_upload_from_before_a_device_was_put_in_step_is_refused() -> None:
    """Otherwise the server would count a model that the device no longer has."""
    server = server_after(
        [asks(0), DeviceReset(device=0), Resumed(device=0, incarnation=1), asks(0)]
    )
    assert_refused(
        server,
        uploads(0),
        RemoteProtocolError,
        "it has been put in step 1 times; this is from before",
    )
    uploaded = Uploaded(device=0, activation=0, model="x/0/0/1")
    assert server.handle(uploaded) == [absorb(0), acknowledge(0)]


def test_a_device_that_never_uploaded_is_put_in_step_with_what_it_began_with() -> None:
    server = server_after([*PHASE_0, mixed(0), DeviceJoined(device=9)])
    assert server.handle(DeviceReset(device=2)) == [restore(2, 0, 1, "z/3/0")]
    assert server.handle(DeviceReset(device=9)) == [restore(9, 0, 1, "z/3/1", life=0)]


def test_a_device_that_lost_its_memory_twice_is_put_in_step_twice() -> None:
    server = server_after([DeviceReset(device=0), Resumed(device=0, incarnation=1)])
    assert server.handle(DeviceReset(device=0)) == [restore(0, 0, 2, "z/3/0")]
    assert server.handle(Resumed(device=0, incarnation=1)) == []  # a late copy confirms nothing
    assert server.is_restoring(0)


def test_a_late_copy_of_a_device_that_left_does_not_put_it_in_step() -> None:
    server = server_after([DeviceReset(device=0), DeviceLeft(device=0)])
    assert_ignored(server, DeviceReset(device=0))
    assert_ignored(server, Resumed(device=0, incarnation=1))


def test_one_that_left_before_it_confirmed_is_put_in_step_again_when_it_comes_back() -> None:
    server = server_in(S.COLLECTING)
    assert server.handle(DeviceReset(device=0)) == [restore(0, 1, 1)]
    assert server.handle(DeviceLeft(device=0)) == [Dismiss(device=0)]
    assert (
        server.handle(Resumed(device=0, incarnation=1)) == []
    )  # whatever it says now, it is no member
    again = restore(0, 1, 2, model="z/3/1")
    assert server.handle(DeviceJoined(device=0)) == [Admit(device=0, model="z/3/1"), again]
    assert server.handle(asks(0)) == [again]  # it has heard nothing, and asks as before
    assert server.handle(Resumed(device=0, incarnation=2)) == []
    assert server.handle(asks(0, 1)) == [activate(0, 1, "z/3/1")]


# ------------------------------------------------------------------------------------------------
# a new generation
def recalled(device: int, activation: int, incarnation: int = 1) -> Send:
    message = Recalled(incarnation=incarnation, activation=activation)
    return Send(to=f"device/{device}", message=message)


def test_nobody_counts_before_having_contributed_again() -> None:
    """And nobody is served before: a device that is ahead is believed, whatever it says is answered
    with the same.
    """
    server = play_server([Recovered(generation=1)])
    assert server.contributors == []
    assert_ignored(server, asks(0, 5))
    assert server.handle(Returned(device=0, activation=5, incarnation=2)) == [recalled(0, 1, 3)]
    for event in (asks(0, 5), uploads(0, 5), DeviceReset(device=0)):
        assert server.handle(event) == [recalled(0, 1, 3)]
    assert_refused(server, brings(0, 5, 2), RemoteProtocolError, "this is from before")
    assert server.handle(brings(0, 5, 3)) == [Recount(device=0)]
    assert_ignored(server, brings(0, 5, 3))
    assert server.contributors == [0]
    assert server.last_of(0) == 4
    assert server.handle(asks(0, 5)) == [activate(0, 5, "z/3/1")]


def test_one_that_has_lost_its_memory_too_begins_at_the_model_of_its_server() -> None:
    server = play_server([Recovered(generation=1)])
    admit, restored = server.handle(Returned(device=0, activation=0, incarnation=0))
    assert admit == Admit(device=0, model="z/3/1")
    assert isinstance(restored, Send)
    assert isinstance(restored.message, Restored)
    assert server.contributors == [0]


def test_the_step_that_the_generation_before_took_comes_first() -> None:
    """Devices may have trained with its outcome; the new one has another name, and counts nobody.
    Until then nobody is taken back.
    """
    server = server_in(S.WAITING)
    server.handle(Recovered(generation=1))
    assert not server.takes_back
    assert_ignored(server, Returned(device=0, activation=1, incarnation=0))
    lost = StepLost(mixed="w/1/0", model="z/3/1", result="z/3/2")
    new = StepModel(mixed="w/1/0", model="z/3/1", result="z/3/3")
    assert server.handle(mixed(1)) == [lost, CountNobody(), new, OpenPhase(phase=2)]
    assert server.takes_back


def play_server(events: list[Event]) -> Server:
    server = server_in(S.COLLECTING)
    play(server, events)
    return server
