"""The device: every row of its table, every refusal, every late copy. Whole lists of commands are
compared.
"""

import pytest

from fedbcd.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from fedbcd.protocol import Device, DeviceState
from fedbcd.protocol.device import TRANSITIONS
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    Command,
    Contributed,
    Declined,
    Event,
    Failed,
    OfflineDue,
    OfflineTrained,
    Pull,
    Recalled,
    Restored,
    Resumed,
    RetryDue,
    Send,
    Train,
    Trained,
    TrainOffline,
    Undo,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    Woke,
)
from support.protocol import EVERY_EVENT, Nonsense, assert_ignored, assert_refused, play, snapshot

S = DeviceState
ASK = Send(to="server/3", message=UpdateRequested(device=7, activation=1))
UPLOAD = Send(to="server/3", message=Uploaded(device=7, activation=1, model="x/7/1"))
WITHDRAW = Send(
    to="server/3", message=Withdrawn(device=7, activation=1, incarnation=0, reason="finite")
)
LATE, NOW, EARLY = (Activated(activation=a, model=f"z/3/{a}") for a in (0, 1, 2))
RESTORED = Restored(incarnation=1, activation=5, session=1 << 32, model="x/7/4")
RESUMED = Send(to="server/3", message=Resumed(device=7, incarnation=1))
PULL = Pull(activation=1, session=0, model="z/3/1")

EXCHANGE_0: list[Event] = [Woke(), LATE, Trained(activation=0, steps=3), Acknowledged(activation=0)]
WAY_TO: dict[DeviceState, list[Event]] = {
    S.IDLE: [],
    S.OFFLINE: [OfflineDue()],
    S.SUSPENDED: [
        OfflineDue(),
        OfflineTrained(session=0, steps=3),
        OfflineDue(),
        OfflineTrained(session=1, steps=3),
    ],
    S.ASKING: [Woke()],
    S.ASKING_OFFLINE: [OfflineDue(), Woke()],
    S.TRAINING: [Woke(), NOW],
    S.UPLOADING: [Woke(), NOW, Trained(activation=1, steps=3)],
    S.WITHDRAWING: [Woke(), NOW, Failed(session=0)],
}


def device_in(state: DeviceState) -> Device:
    """A FedBCD-I device that has finished activation 0 and is now in `state`; it may train offline
    twice in a row.
    """
    device = Device(7, "server/3", offline_limit=2)
    play(device, [*EXCHANGE_0, *WAY_TO[state]])
    assert device.state is state
    assert device.activation == 1
    return device


def plain_device(events: list[Event] | None = None) -> Device:
    """A FedBCD device after these events."""
    device = Device(7, "server/3")
    play(device, events or [])
    return device


RECALLED = Recalled(incarnation=1, activation=1)


def brings(activation: int = 1, session: int = 0, incarnation: int = 1) -> Send:
    model = f"c/7/{incarnation}/{session}"
    event = Contributed(device=7, incarnation=incarnation, activation=activation, model=model)
    return Send(to="server/3", message=event)


ROWS: list[tuple[DeviceState, Event, list[Command], DeviceState]] = [
    # a device can take part
    (S.IDLE, Woke(), [ASK], S.ASKING),
    (S.SUSPENDED, Woke(), [ASK], S.ASKING),
    (S.OFFLINE, Woke(), [ASK], S.ASKING_OFFLINE),
    (S.ASKING, Woke(), [], S.ASKING),
    (S.ASKING_OFFLINE, Woke(), [], S.ASKING_OFFLINE),
    (S.TRAINING, Woke(), [], S.TRAINING),
    (S.UPLOADING, Woke(), [], S.UPLOADING),
    (S.WITHDRAWING, Woke(), [], S.WITHDRAWING),
    # it can train offline
    (S.IDLE, OfflineDue(), [TrainOffline(session=0)], S.OFFLINE),
    (S.ASKING, OfflineDue(), [TrainOffline(session=0)], S.ASKING_OFFLINE),
    (S.SUSPENDED, OfflineDue(), [], S.SUSPENDED),
    (S.OFFLINE, OfflineDue(), [], S.OFFLINE),
    (S.ASKING_OFFLINE, OfflineDue(), [], S.ASKING_OFFLINE),
    (S.TRAINING, OfflineDue(), [], S.TRAINING),
    (S.UPLOADING, OfflineDue(), [], S.UPLOADING),
    (S.WITHDRAWING, OfflineDue(), [], S.WITHDRAWING),
    (S.OFFLINE, OfflineTrained(session=0, steps=3), [], S.IDLE),
    (S.ASKING_OFFLINE, OfflineTrained(session=0, steps=3), [], S.ASKING),
    (S.OFFLINE, Failed(session=0), [], S.IDLE),
    (S.ASKING_OFFLINE, Failed(session=0), [], S.ASKING),
    # it is activated
    (S.IDLE, NOW, [PULL], S.TRAINING),
    (S.SUSPENDED, NOW, [Pull(activation=1, session=1, model="z/3/1")], S.TRAINING),
    (S.ASKING, NOW, [PULL], S.TRAINING),
    (S.OFFLINE, NOW, [], S.ASKING_OFFLINE),
    (S.ASKING_OFFLINE, NOW, [], S.ASKING_OFFLINE),
    (S.TRAINING, NOW, [], S.TRAINING),
    (S.UPLOADING, NOW, [], S.UPLOADING),
    (S.WITHDRAWING, NOW, [], S.WITHDRAWING),
    # it uploads
    (S.TRAINING, Trained(activation=1, steps=3), [UPLOAD], S.UPLOADING),
    (S.UPLOADING, Acknowledged(activation=1), [], S.IDLE),
    # what it uploaded is refused, or it has nothing to upload
    (S.UPLOADING, Declined(activation=1, reason="far"), [Undo(activation=1)], S.IDLE),
    (S.TRAINING, Failed(session=0), [WITHDRAW], S.WITHDRAWING),
    (S.WITHDRAWING, Declined(activation=1, reason="finite"), [], S.IDLE),
    # no answer came
    (S.ASKING, RetryDue(), [ASK], S.ASKING),
    (S.ASKING_OFFLINE, RetryDue(), [ASK], S.ASKING_OFFLINE),
    (S.UPLOADING, RetryDue(), [UPLOAD], S.UPLOADING),
    (S.WITHDRAWING, RetryDue(), [WITHDRAW], S.WITHDRAWING),
    *[(state, RetryDue(), [], state) for state in (S.IDLE, S.OFFLINE, S.SUSPENDED, S.TRAINING)],
    # late copies of activation 0 are normal in every state
    *[(state, LATE, [], state) for state in S],
    *[(state, Acknowledged(activation=0), [], state) for state in S],
    *[(state, Declined(activation=0, reason="far"), [], state) for state in S],
    # the server puts it in step, whatever it was doing
    *[(state, RESTORED, [RESUMED], S.IDLE) for state in S],
    # its server has lost what it knew: work ends, and what was contributed comes again
    (S.IDLE, RECALLED, [brings()], S.IDLE),
    (S.SUSPENDED, RECALLED, [brings(session=2)], S.IDLE),
    (S.OFFLINE, RECALLED, [brings(session=1)], S.IDLE),
    (S.ASKING, RECALLED, [brings()], S.IDLE),
    (S.ASKING_OFFLINE, RECALLED, [brings(session=1)], S.IDLE),
    (S.TRAINING, RECALLED, [brings()], S.IDLE),
    (S.UPLOADING, RECALLED, [Undo(activation=1), brings(2)], S.IDLE),
    (S.WITHDRAWING, RECALLED, [brings(2)], S.IDLE),
]

REFUSED: list[tuple[DeviceState, Event, type[ProtocolError], str]] = [
    *[(state, EARLY, RemoteProtocolError, "its state is older than the server's") for state in S],
    *[(state, Acknowledged(activation=2), RemoteProtocolError, "has not uploaded") for state in S],
    *[
        (s, Acknowledged(activation=1), RemoteProtocolError, "has not uploaded")
        for s in S
        if s is not S.UPLOADING
    ],
    *[
        (state, Declined(activation=2, reason="far"), RemoteProtocolError, "has not uploaded")
        for state in S
    ],
    *[
        (state, Declined(activation=1, reason="far"), RemoteProtocolError, "has not uploaded")
        for state in S
        if state not in (S.UPLOADING, S.WITHDRAWING)
    ],
    (S.OFFLINE, OfflineTrained(session=1, steps=3), LocalProtocolError, "trains session 0, not 1"),
    (S.OFFLINE, Failed(session=1), LocalProtocolError, "trains session 0, not 1"),
    (S.TRAINING, Failed(session=1), LocalProtocolError, "works on session 0, not 1"),
    (
        S.ASKING_OFFLINE,
        OfflineTrained(session=1, steps=3),
        LocalProtocolError,
        "trains session 0, not 1",
    ),
    (
        S.TRAINING,
        Trained(activation=0, steps=3),
        LocalProtocolError,
        "works for activation 1, not 0",
    ),
]


# ------------------------------------------------------------------------------------------------
# the table
@pytest.mark.parametrize(("state", "event", "commands", "then"), ROWS)
def test_each_transition_gives_its_commands(
    state: DeviceState, event: Event, commands: list[Command], then: DeviceState
) -> None:
    """Each row: a state, an event, all that is to be done, the state after."""
    device = device_in(state)
    assert device.handle(event) == commands
    assert device.state is then


def test_the_rows_cover_the_whole_table() -> None:
    """Guards the test above."""
    assert {(state, type(event)) for state, event, _, _ in ROWS} == set(TRANSITIONS)


@pytest.mark.parametrize(("state", "event", "error", "match"), REFUSED)
def test_what_cannot_be_true_is_refused_and_changes_nothing(
    state: DeviceState, event: Event, error: type[ProtocolError], match: str
) -> None:
    """A machine that raises has not changed."""
    assert_refused(device_in(state), event, error, match)


@pytest.mark.parametrize("state", S)
def test_events_that_are_not_in_the_table_are_refused_and_change_nothing(
    state: DeviceState,
) -> None:
    """'An illegal event raises and nothing changes.'"""
    for event in (*EVERY_EVENT, Nonsense()):
        if (state, type(event)) not in TRANSITIONS:
            assert_refused(
                device_in(state),
                event,
                LocalProtocolError,
                f"device 7 cannot handle .* while {state.value}",
            )


@pytest.mark.parametrize("state", S)
def test_a_transition_to_the_same_state_without_commands_changes_nothing(
    state: DeviceState,
) -> None:
    """Late and repeated messages leave no trace."""
    late = [LATE, Acknowledged(activation=0), Declined(activation=0, reason="far")]
    for event in late + ([NOW] if state in (S.TRAINING, S.UPLOADING, S.WITHDRAWING) else []):
        assert_ignored(device_in(state), event)


# ------------------------------------------------------------------------------------------------
# FedBCD, sentence by sentence
def test_a_new_device_is_silent_until_it_can_take_part() -> None:
    """Paper, FedBCD: activated are 'edge devices that are available to do local training and are in
    stable communication'.
    """
    assert_ignored(plain_device(), RetryDue())


def test_one_exchange_from_the_request_to_the_acknowledgement() -> None:
    """Paper, Sync-cloud (i): 'accept update requests from edge devices, send the global model z to
    these activated edge devices'.
    """
    device = plain_device()
    request = UpdateRequested(device=7, activation=0)
    upload = Uploaded(device=7, activation=0, model="x/7/0")
    assert device.handle(Woke()) == [Send(to="server/3", message=request)]
    assert device.handle(Activated(activation=0, model="z/3/5")) == [
        Train(activation=0, session=0, model="z/3/5")
    ]
    assert device.handle(Trained(activation=0, steps=4)) == [Send(to="server/3", message=upload)]
    assert device.handle(Acknowledged(activation=0)) == []
    assert device.handle(Woke()) == [
        Send(to="server/3", message=UpdateRequested(device=7, activation=1))
    ]


def test_every_activation_of_fedbcd_is_a_new_session_of_mini_batch_steps() -> None:
    """Paper, Algorithm 1, line 7: 'randomly draw R samples'; a new session draws new ones."""
    device = plain_device(EXCHANGE_0)
    assert play(device, [Woke(), NOW]) == [Train(activation=1, session=1, model="z/3/1")]


def test_fedbcd_does_not_train_offline() -> None:
    """Paper, FedBCD: 'If edge device i is not activated [...] we have x_i(t+1) = x_i(t)'."""
    assert_refused(plain_device(), OfflineDue(), LocalProtocolError, "does not train offline")
    assert_refused(
        plain_device([Woke()]), OfflineDue(), LocalProtocolError, "does not train offline"
    )


def test_a_repeated_activation_does_not_train_twice() -> None:
    """A copy of Activated is normal on a network; x_i(t+1) is computed once."""
    device = plain_device([Woke()])
    assert device.handle(LATE) == [Train(activation=0, session=0, model="z/3/0")]
    assert_ignored(device, LATE)
    play(device, [Trained(activation=0, steps=3)])
    assert_ignored(device, LATE)


def test_a_retry_repeats_the_upload_word_for_word() -> None:
    """The acknowledgement was lost: the same activation, the same model, so that it can be counted
    once.
    """
    device = plain_device([Woke(), LATE])
    upload = device.handle(Trained(activation=0, steps=3))
    assert device.handle(RetryDue()) == upload
    assert device.handle(RetryDue()) == upload


def test_a_server_may_activate_a_device_that_has_not_asked() -> None:
    """A device that restarts has forgotten that it asked; the answer is still good."""
    assert plain_device().handle(LATE) == [Train(activation=0, session=0, model="z/3/0")]


# ------------------------------------------------------------------------------------------------
# FedBCD-I, sentence by sentence
def test_an_available_device_trains_offline_without_asking_anyone() -> None:
    """Paper, FedBCD-I (i): 'edge devices that are available run local training (for a round)
    offline'.
    """
    device = Device(7, "server/3", offline_limit=4)
    assert device.handle(OfflineDue()) == [TrainOffline(session=0)]
    assert device.handle(OfflineTrained(session=0, steps=2)) == []
    assert device.handle(OfflineDue()) == [TrainOffline(session=1)]


def test_an_activated_device_is_pulled_with_the_steps_of_its_latest_session() -> None:
    """Paper, FedBCD-I (iii): 'wait for them to adjust their local models based on lines 13-19 in
    Algorithm 2'.
    """
    device = Device(7, "server/3", offline_limit=4)
    for session in range(3):
        play(device, [OfflineDue(), OfflineTrained(session=session, steps=2)])
    assert play(device, [Woke(), Activated(activation=0, model="z/3/0")]) == [
        Pull(activation=0, session=2, model="z/3/0")
    ]


def test_a_device_that_never_trained_offline_is_pulled_with_session_0() -> None:
    """docs/determinism.md: 'of session 0 if it has had none'."""
    device = Device(7, "server/3", offline_limit=4)
    assert play(device, [Woke(), LATE]) == [Pull(activation=0, session=0, model="z/3/0")]


def test_the_penalty_steps_are_not_a_session_of_their_own() -> None:
    """Paper, Algorithm 2, lines 14-18: the penalty loop draws no samples."""
    device = device_in(S.UPLOADING)
    assert play(device, [Acknowledged(activation=1), OfflineDue()]) == [TrainOffline(session=0)]


def test_a_device_that_misses_the_phase_trains_another_round_while_it_waits() -> None:
    """Paper, FedBCD-I (ii): 'Edge devices that miss this phase will start the next round of local
    training'.
    """
    device = device_in(S.ASKING)
    assert device.handle(OfflineDue()) == [TrainOffline(session=0)]
    assert device.handle(OfflineTrained(session=0, steps=3)) == []
    assert device.handle(OfflineDue()) == [TrainOffline(session=1)]
    assert device.state is S.ASKING_OFFLINE


def test_a_device_suspends_itself_after_its_limit_of_offline_rounds() -> None:
    """Paper, FedBCD-I (ii): 'a fixed rounds of updates without communication [...] it will stop
    training'.
    """
    device = device_in(S.SUSPENDED)
    assert device.offline == 2
    assert_ignored(device, OfflineDue())


def test_a_suspended_device_trains_again_only_once_activated() -> None:
    """Paper, FedBCD-I (ii): 'it will stop training until it successfully gets activated'."""
    device = device_in(S.SUSPENDED)
    assert device.handle(Woke()) == [ASK]
    assert_ignored(device, OfflineDue())
    play(device, [NOW, Trained(activation=1, steps=3), Acknowledged(activation=1)])
    assert device.handle(OfflineDue()) == [TrainOffline(session=2)]


def test_the_limit_also_holds_for_rounds_trained_while_asking() -> None:
    """Paper, FedBCD-I (ii): the rounds count 'without communication with the cloud', asked or
    not.
    """
    device = device_in(S.ASKING)
    for session in range(2):
        play(device, [OfflineDue(), OfflineTrained(session=session, steps=3)])
    assert device.state is S.ASKING
    assert_ignored(device, OfflineDue())


def test_a_limit_of_zero_never_trains_offline() -> None:
    """The smallest limit."""
    assert_ignored(Device(7, "server/3", offline_limit=0), OfflineDue())


def test_an_activation_that_comes_in_the_middle_of_an_offline_round_waits_for_its_end() -> None:
    """Paper, Algorithm 2: lines 13-19 follow lines 4-12; the offline round is not cut short."""
    device = device_in(S.ASKING_OFFLINE)
    assert device.handle(NOW) == []
    assert_ignored(device, NOW)
    assert device.handle(OfflineTrained(session=0, steps=3)) == [PULL]
    assert device.offline == 0


def test_a_retry_in_the_middle_of_an_offline_round_keeps_the_activation_that_came() -> None:
    """Asking again is harmless: the server answers with the same activation."""
    device = device_in(S.ASKING_OFFLINE)
    assert play(device, [NOW, RetryDue()]) == [ASK]
    assert device.handle(OfflineTrained(session=0, steps=3)) == [PULL]


def test_two_devices_do_not_share_anything() -> None:
    """Each machine has its own counters."""
    one, other = plain_device(), plain_device()
    before = snapshot(other)
    play(one, EXCHANGE_0)
    assert snapshot(other) == before


# ------------------------------------------------------------------------------------------------
# lost its memory
def test_a_device_that_is_put_in_step_goes_on_with_the_servers_counters() -> None:
    """Its sessions are its own: no mini-batch is drawn again."""
    device = plain_device()
    device.handle(RESTORED)
    assert device.handle(Woke()) == [
        Send(to="server/3", message=UpdateRequested(device=7, activation=5))
    ]
    assert device.handle(Activated(activation=5, model="z/3/8")) == [
        Train(activation=5, session=1 << 32, model="z/3/8")
    ]
    upload = Uploaded(device=7, activation=5, model="x/7/5/1")
    assert device.handle(Trained(activation=5, steps=2)) == [Send(to="server/3", message=upload)]


def test_a_copy_of_restored_is_answered_and_changes_nothing() -> None:
    device = plain_device([RESTORED, Woke(), Activated(activation=5, model="z/3/8")])
    before = snapshot(device)
    assert device.handle(RESTORED) == [RESUMED]
    assert snapshot(device) == before


def test_a_device_that_is_put_in_step_may_train_offline_again() -> None:
    """FedBCD-I: the server has heard from it."""
    device = device_in(S.SUSPENDED)
    device.handle(RESTORED)
    assert device.handle(OfflineDue()) == [TrainOffline(session=1 << 32)]


# ------------------------------------------------------------------------------------------------
# a server of a new generation
def test_an_upload_that_the_server_knows_of_is_no_longer_undone() -> None:
    """Its acknowledgement was lost with the disk."""
    device = device_in(S.UPLOADING)
    assert device.handle(Recalled(incarnation=1, activation=2)) == [brings(2)]


def test_a_copy_is_answered_until_the_device_has_gone_on() -> None:
    device = plain_device([Woke(), Activated(activation=0, model="z/3/0")])
    (brought,) = device.handle(RECALLED)
    assert brought == brings(0, session=1)  # no mini-batch of session 0 is drawn again
    assert device.handle(RECALLED) == [brought]
    play(device, [Woke(), Activated(activation=0, model="z/3/9")])
    assert_ignored(device, RECALLED)
    device.handle(Trained(activation=0, steps=3))
    assert_ignored(device, RECALLED)
    device.handle(Acknowledged(activation=0))
    assert_ignored(device, RECALLED)
