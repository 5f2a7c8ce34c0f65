"""An activation that comes to nothing: what the server says, whom it lets in instead, and that no
phase waits for it.

Server 3 has the members 0, 1 and 2.
"""

import pytest

from fedbcd.errors import RemoteProtocolError
from fedbcd.protocol import Device, DeviceState, Server, ServerState
from fedbcd.protocol.messages import (
    Acknowledged,
    Activated,
    Command,
    Declined,
    DeviceJoined,
    DeviceLeft,
    DeviceLost,
    DeviceReset,
    Dismiss,
    Event,
    Failed,
    Mixed,
    OfflineDue,
    OpenPhase,
    Restored,
    Resumed,
    RetryDue,
    Send,
    ServerReady,
    Started,
    Train,
    Trained,
    TrainOffline,
    Undo,
    UpdateRequested,
    Uploaded,
    Withdrawn,
    Woke,
)
from fedbcd.record.eventlog import decode, encode
from support.protocol import assert_refused, play, snapshot


def asks(device: int, activation: int = 0) -> Event:
    return UpdateRequested(device=device, activation=activation)


def uploads(device: int, activation: int = 0) -> Event:
    return Uploaded(device=device, activation=activation, model=f"x/{device}/{activation}")


def withdrawn(device: int, activation: int = 0) -> Event:
    return Withdrawn(device=device, activation=activation, incarnation=0, reason="far")


def declined(device: int, activation: int = 0) -> Send:
    return Send(to=f"device/{device}", message=Declined(activation=activation, reason="far"))


def activated(device: int, activation: int = 0, model: str = "z/3/0") -> Send:
    return Send(to=f"device/{device}", message=Activated(activation=activation, model=model))


def reports(commands: list[Command]) -> bool:
    return any(isinstance(c, Send) and isinstance(c.message, ServerReady) for c in commands)


def server_after(*events: Event, active: int = 2) -> Server:
    server = Server(3, [0, 1, 2], active)
    play(server, [Started(), *events])
    return server


NEXT = Mixed(phase=0, iteration=0, model="w/0/0")


# ------------------------------------------------------------------------------------------------
# the server
def test_the_place_of_an_activation_that_came_to_nothing_is_free_for_another() -> None:
    server = server_after(asks(0), asks(1), asks(2))
    assert server.handle(withdrawn(0)) == [declined(0), activated(2)]
    assert server.received == 0
    assert server.places == 0


def test_with_all_members_active_the_phase_ends_without_the_one_that_came_to_nothing() -> None:
    server = server_after(asks(0), asks(1), asks(2), uploads(0), uploads(1), active=3)
    commands = server.handle(withdrawn(2))
    assert commands[0] == declined(2)
    assert reports(commands)
    assert server.state is ServerState.WAITING


def test_it_asks_again_and_waits_for_the_next_phase() -> None:
    """So a device whose uploads are refused every time takes one place in each phase, and does not
    go round and round.
    """
    server = server_after(asks(0), asks(1), withdrawn(0), active=3)
    assert server.handle(asks(0, 1)) == []
    assert play(server, [uploads(1), asks(2)]) == [activated(2)]
    assert reports(server.handle(uploads(2)))
    assert activated(0, 1, "z/3/1") in server.handle(NEXT)


def test_a_phase_in_which_everything_comes_to_nothing_ends_all_the_same() -> None:
    server = server_after(asks(0), asks(1), asks(2), withdrawn(0), withdrawn(1), active=3)
    assert reports(server.handle(withdrawn(2)))
    assert OpenPhase(phase=1) in server.handle(NEXT)


def test_members_that_join_are_let_in_as_ever() -> None:
    server = server_after(asks(0), asks(1), withdrawn(0), asks(2), active=3)
    play(server, [DeviceJoined(device=9), asks(9)])
    assert not reports(play(server, [uploads(1), uploads(2)]))
    assert reports(server.handle(uploads(9)))


def test_what_a_device_that_was_given_up_withdraws_is_over_as_well() -> None:
    server = server_after(asks(0), asks(1), DeviceLost(device=0, activation=0), asks(2))
    assert server.handle(withdrawn(0)) == [declined(0)]
    while_waiting = server_after(
        asks(0), DeviceLost(device=0, activation=0), asks(1), asks(2), uploads(1), uploads(2)
    )
    assert while_waiting.state is ServerState.WAITING
    assert while_waiting.handle(withdrawn(0)) == [declined(0)]
    assert play(while_waiting, [NEXT, asks(0, 1)]) == [activated(0, 1, "z/3/1")]


@pytest.mark.parametrize("copy", [withdrawn(0), uploads(0)], ids=["withdrawn", "uploaded"])
def test_a_copy_is_answered_in_the_same_words_and_changes_nothing(copy: Event) -> None:
    """Also an upload that would be taken by now: the activation is over."""
    server = server_after(asks(0), withdrawn(0))
    before = snapshot(server)
    assert server.handle(copy) == [declined(0)]
    assert snapshot(server) == before


def test_a_copy_of_one_before_another_was_declined_is_not_answered() -> None:
    """It was not acknowledged, and the device knows: it has asked again since."""
    server = server_after(
        asks(0),
        withdrawn(0),
        asks(1),
        uploads(1),
        asks(2),
        uploads(2),
        NEXT,
        asks(0, 1),
        withdrawn(0, 1),
    )
    assert server.handle(uploads(0)) == []
    assert server.handle(uploads(0, 1)) == [declined(0, 1)]


def test_a_device_that_lost_its_memory_is_sent_its_last_contribution_not_what_was_refused() -> None:
    server = server_after(
        asks(0), uploads(0), asks(1), uploads(1), NEXT, asks(0, 1), withdrawn(0, 1)
    )
    restored = Restored(incarnation=1, activation=2, session=1 << 32, model="x/0/0")
    assert server.handle(DeviceReset(device=0)) == [Send(to="device/0", message=restored)]
    assert server.handle(withdrawn(0, 1)) == [Send(to="device/0", message=restored)]
    never = server_after(asks(0), withdrawn(0))
    assert play(never, [DeviceReset(device=0)])[0].message.model == "z/3/0"  # type: ignore[attr-defined]


def test_one_from_before_the_device_was_put_in_step_is_refused() -> None:
    server = server_after(DeviceReset(device=0), Resumed(device=0, incarnation=1), asks(0))
    assert_refused(
        server, withdrawn(0), RemoteProtocolError, "put in step 1 times; this is from before"
    )


# ------------------------------------------------------------------------------------------------
# the device
def test_after_a_refusal_the_next_mini_batches_are_others_and_the_counters_agree() -> None:
    """FedBCD: session 0 was drawn for what was refused; activation 0 is over for both."""
    device, server = Device(0, "server/3"), server_after()
    server.handle(asks(0))
    upload = play(
        device, [Woke(), Activated(activation=0, model="z/3/0"), Trained(activation=0, steps=3)]
    )
    assert upload == [Send(to="server/3", message=uploads(0))]
    answer = server.handle(withdrawn(0))[0]
    assert isinstance(answer, Send)
    assert device.handle(answer.message) == [Undo(activation=0)]
    assert device.handle(Woke()) == [Send(to="server/3", message=asks(0, 1))]
    play(server, [asks(0, 1), asks(1), uploads(1), asks(2), uploads(2)])
    assert activated(0, 1, "z/3/1") in server.handle(NEXT)
    assert device.handle(Activated(activation=1, model="z/3/1")) == [
        Train(activation=1, session=1, model="z/3/1")
    ]


def test_after_a_failure_the_next_mini_batches_are_others() -> None:
    device = Device(0, "server/3")
    play(device, [Woke(), Activated(activation=0, model="z/3/0"), Failed(session=0)])
    assert device.state is DeviceState.WITHDRAWING
    play(device, [Declined(activation=0, reason="finite"), Woke()])
    assert device.handle(Activated(activation=1, model="z/3/1")) == [
        Train(activation=1, session=1, model="z/3/1")
    ]


def test_an_offline_round_that_failed_counts_against_the_limit() -> None:
    """It is not tried again and again, and its mini-batches are not drawn again."""
    device = Device(0, "server/3", offline_limit=2)
    assert play(device, [OfflineDue(), Failed(session=0), OfflineDue()]) == [
        TrainOffline(session=1)
    ]
    play(device, [Failed(session=1)])
    assert device.state is DeviceState.SUSPENDED


def test_an_activation_that_came_in_an_offline_round_that_failed_begins_after_it() -> None:
    device = Device(0, "server/3", offline_limit=2)
    commands = play(
        device, [Woke(), OfflineDue(), Activated(activation=0, model="z/3/0"), Failed(session=0)]
    )
    assert [type(command).__name__ for command in commands] == ["Pull"]


def test_a_retry_repeats_what_was_said_last() -> None:
    device = Device(0, "server/3")
    said = play(device, [Woke(), Activated(activation=0, model="z/3/0"), Failed(session=0)])
    assert device.handle(RetryDue()) == said
    assert (
        play(
            device,
            [Declined(activation=0, reason="finite"), Declined(activation=0, reason="finite")],
        )
        == []
    )


def test_an_acknowledgement_of_what_was_withdrawn_cannot_be() -> None:
    device = Device(0, "server/3")
    play(device, [Woke(), Activated(activation=0, model="z/3/0"), Failed(session=0)])
    assert_refused(device, Acknowledged(activation=0), RemoteProtocolError, "has not uploaded")


# ------------------------------------------------------------------------------------------------
# dismissals
def test_who_leaves_has_the_sum_formed_anew_except_in_logs_of_before() -> None:
    """0.1.0 wrote neither field; what it wrote is played as it was."""
    server = server_after()
    assert server.handle(DeviceLeft(device=0)) == [Dismiss(device=0, anew=True)]
    old = decode({"DeviceLeft": {"device": 1}})
    assert isinstance(old, Event)
    assert (
        server.handle(old)
        == [decode({"Dismiss": {"device": 1}})]
        == [Dismiss(device=1, anew=False)]
    )
    assert decode(encode(DeviceLeft(device=1))) == DeviceLeft(device=1, anew=True)
