"""The three coordinators and the clouds that make them: whole lists of commands, refusals that
change nothing.
"""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from fedbcd.errors import ConfigError, LocalProtocolError, ProtocolError, RemoteProtocolError
from fedbcd.protocol import AsyncCoordinator, Coordinator, RigorousCoordinator, SyncCoordinator
from fedbcd.protocol.clouds import (
    CLOUDS,
    AsyncCloud,
    Cloud,
    DynamicGraph,
    GraphCloud,
    RigorousCloud,
    SyncCloud,
)
from fedbcd.protocol.coordinator import ACCEPTED
from fedbcd.protocol.messages import (
    AnswersLost,
    Command,
    Event,
    GlobalUpdated,
    Isolated,
    Mixed,
    MixModels,
    Send,
    ServerId,
    ServerReady,
    StepGlobal,
    server_actor,
)
from support.protocol import EVERY_EVENT, Nonsense, assert_ignored, assert_refused, play, snapshot


# ------------------------------------------------------------------------------------------------
# short forms
def ready(server: ServerId, phase: int = 0, iteration: int = 0, per_phase: int = 1) -> ServerReady:
    """A report of an Async-cloud server that takes `per_phase` steps in each phase."""
    model = f"z/{server}/{phase * per_phase + iteration}"
    return ServerReady(server=server, phase=phase, iteration=iteration, model=model)


def summed(server: ServerId, phase: int = 0) -> ServerReady:
    """A report of a Sync-cloud server."""
    return ServerReady(server=server, phase=phase, iteration=0, model=f"s/{server}/{phase}")


def mix(round_: int, reports: list[ServerReady], alike: bool = True) -> MixModels:
    """The mix of these reports, in this order."""
    iteration = reports[0].iteration
    return MixModels(
        round=round_,
        iteration=iteration,
        servers=tuple(report.server for report in reports),
        models=tuple(report.model for report in reports),
        results=tuple(
            f"w/{round_}/{iteration}" + ("" if alike else f"/{report.server}") for report in reports
        ),
    )


def mixed(server: ServerId, phase: int, model: str, iteration: int = 0) -> Send:
    return Send(
        to=server_actor(server), message=Mixed(phase=phase, iteration=iteration, model=model)
    )


def isolate(server: ServerId, phase: int) -> Send:
    return Send(to=server_actor(server), message=Isolated(phase=phase))


def updated(server: ServerId, phase: int) -> Send:
    return Send(to=server_actor(server), message=GlobalUpdated(phase=phase, model=f"z/{phase + 1}"))


def every_coordinator() -> list[Coordinator]:
    return [
        SyncCoordinator(range(3)),
        AsyncCoordinator(range(3), first=2),
        AsyncCoordinator(range(3), first=3, alike=False),
        RigorousCoordinator(range(3), first=2),
    ]


# ------------------------------------------------------------------------------------------------
# all three
@pytest.mark.parametrize("coordinator", every_coordinator(), ids=lambda c: type(c).__name__)
def test_a_coordinator_accepts_reports_of_servers_and_nothing_else(
    coordinator: Coordinator,
) -> None:
    """Paper, Remark: 'the coordinator only involves lightweight computations'."""
    for event in (*EVERY_EVENT, Nonsense()):
        if type(event) not in (*ACCEPTED, AnswersLost):  # that comes from within
            assert_refused(coordinator, event, LocalProtocolError, "the coordinator cannot handle")


def test_whose_answer_is_lost_is_heard_once_more_and_mixed_anew() -> None:
    coordinator = AsyncCoordinator(range(3), first=2)
    coordinator.handle(ready(0))
    assert len(coordinator.handle(ready(1))) == 3  # a mix, and two answers
    assert len(coordinator.handle(ready(1))) == 1  # the answer again
    assert coordinator.handle(AnswersLost(servers=(1,), models=("w/0/0",))) == []
    assert coordinator.handle(ready(0)) == []  # a late copy
    assert coordinator.handle(ready(1)) == []  # it waits for another
    again = coordinator.handle(ready(2))
    assert isinstance(again[0], MixModels)
    assert (again[0].round, again[0].servers) == (1, (1, 2))


@pytest.mark.parametrize("coordinator", every_coordinator(), ids=lambda c: type(c).__name__)
def test_an_unknown_server_is_refused(coordinator: Coordinator) -> None:
    """A peer's mistake is named and changes nothing."""
    assert_refused(
        coordinator, ready(7), RemoteProtocolError, r"unknown server 7; known: \[0, 1, 2\]"
    )


# ------------------------------------------------------------------------------------------------
# Sync-cloud
def test_sync_coordinator_waits_for_all_servers() -> None:
    """Paper, Sync-cloud (ii): 'Once hearing from all cloud servers, this coordinator enters the
    'aggregation' phase'.
    """
    coordinator = SyncCoordinator(range(3))
    assert coordinator.handle(summed(2)) == []
    assert coordinator.handle(summed(0)) == []
    assert coordinator.round == 0
    step = StepGlobal(round=0, iterations=1, model="z/0", result="z/1")
    assert coordinator.handle(summed(1)) == [step, updated(0, 0), updated(1, 0), updated(2, 0)]
    assert coordinator.round == 1


def test_sync_coordinator_keeps_the_latest_global_model() -> None:
    """Paper, Sync-cloud (i): 'a coordinator that keeps the latest global model z(t)'."""
    coordinator = SyncCoordinator(range(2), iterations=3)
    play(coordinator, [summed(0), summed(1), summed(1, 1)])
    step = StepGlobal(round=1, iterations=3, model="z/1", result="z/2")
    assert coordinator.handle(summed(0, 1)) == [step, updated(0, 1), updated(1, 1)]


def test_sync_coordinator_counts_a_repeated_report_once() -> None:
    """'From all cloud servers' means from different ones."""
    coordinator = SyncCoordinator(range(2))
    assert coordinator.handle(summed(0)) == []
    assert_ignored(coordinator, summed(0))


def test_sync_coordinator_repeats_the_broadcast_to_a_server_that_missed_it() -> None:
    """Paper, Sync-cloud (ii): 'broadcasts it back'; only the one that asks again gets it again."""
    coordinator = SyncCoordinator(range(2))
    play(coordinator, [summed(0), summed(1), summed(0, 1)])
    before = snapshot(coordinator)
    assert coordinator.handle(summed(1)) == [updated(1, 0)]
    assert snapshot(coordinator) == before


def test_sync_coordinator_answers_a_very_late_copy_with_the_latest_model() -> None:
    """The server knows it already and lets it go."""
    coordinator = SyncCoordinator(range(1))
    play(coordinator, [summed(0, phase) for phase in range(3)])
    assert coordinator.handle(summed(0, 0)) == [updated(0, 2)]


def test_sync_coordinator_refuses_a_report_from_the_future() -> None:
    """No server can be in round t+1 before round t is over."""
    assert_refused(
        SyncCoordinator(range(2)),
        summed(0, 1),
        RemoteProtocolError,
        "reports round 1, but round 0 is not over",
    )


# ------------------------------------------------------------------------------------------------
# Async-cloud
def test_async_coordinator_releases_exactly_the_first_b() -> None:
    """Paper, Async-cloud (ii): 'waits until it hears from the first B cloud servers'."""
    coordinator = AsyncCoordinator(range(4), first=2)
    assert coordinator.handle(ready(3)) == []
    assert coordinator.round == 0
    assert coordinator.handle(ready(1)) == [
        mix(0, [ready(3), ready(1)]),
        mixed(3, 0, "w/0/0"),
        mixed(1, 0, "w/0/0"),
    ]
    assert coordinator.round == 1


def test_async_coordinator_does_not_disturb_the_others() -> None:
    """Paper, Async-cloud (iii): 'the other cloud servers simply have z_n(t+1) = z_n(t)'; they get
    no message.
    """
    coordinator = AsyncCoordinator(range(3), first=1)
    assert coordinator.handle(ready(2)) == [mix(0, [ready(2)]), mixed(2, 0, "w/0/0")]


def test_async_coordinator_serves_in_order_of_arrival() -> None:
    """Paper: 'the model aggregation is carried out in a 'first come first serve' manner'."""
    coordinator = AsyncCoordinator(range(4), first=2)
    play(coordinator, [ready(2), ready(0), ready(3)])
    group = [ready(3), ready(2, 1)]
    assert coordinator.handle(ready(2, 1)) == [
        mix(1, group),
        mixed(3, 0, "w/1/0"),
        mixed(2, 1, "w/1/0"),
    ]


def test_async_coordinator_keeps_those_that_stayed_queued_ahead_of_later_ones() -> None:
    """SPEC, Async-cloud: 'stays in the queue, ahead of later ones'; here two wait for a mix that
    iterates.
    """
    coordinator = AsyncCoordinator(range(5), first=2, iterations=2)
    first = mix(0, [ready(0), ready(1)])
    assert play(coordinator, [ready(0), ready(1)]) == [
        first,
        mixed(0, 0, "w/0/0"),
        mixed(1, 0, "w/0/0"),
    ]
    assert play(coordinator, [ready(4), ready(3), ready(2)]) == []
    again = [ready(0, 0, 1, 2), ready(1, 0, 1, 2)]
    assert coordinator.handle(again[1]) == []
    assert coordinator.handle(again[0]) == [
        mix(0, again),
        mixed(0, 0, "w/0/1", 1),
        mixed(1, 0, "w/0/1", 1),
        mix(1, [ready(4), ready(3)]),
        mixed(4, 0, "w/1/0"),
        mixed(3, 0, "w/1/0"),
    ]
    assert coordinator.round == 1


def test_async_coordinator_with_several_iterations_mixes_the_same_b_each_time() -> None:
    """Paper, Algorithm 1, lines 17-20: mixing and step, K_z times, before the round is over."""
    coordinator = AsyncCoordinator(range(3), first=2, iterations=2)
    play(coordinator, [ready(2), ready(0), ready(1)])
    assert coordinator.round == 0
    group = [ready(2, 0, 1, 2), ready(0, 0, 1, 2)]
    commands = [mix(0, group), mixed(2, 0, "w/0/1", 1), mixed(0, 0, "w/0/1", 1)]
    assert play(coordinator, [group[1], group[0]]) == commands
    assert coordinator.round == 1


def test_async_coordinator_with_a_matrix_gives_each_server_its_own_mix() -> None:
    """Paper, eq. (6a): w_n is a sum over m of a_nm z_m, another one for each n."""
    coordinator = AsyncCoordinator(range(2), first=2, alike=False)
    group = [ready(1), ready(0)]
    commands = [mix(0, group, alike=False), mixed(1, 0, "w/0/0/1"), mixed(0, 0, "w/0/0/0")]
    assert play(coordinator, group) == commands


def test_async_coordinator_counts_a_repeated_report_once() -> None:
    """'The first B cloud servers' are B different ones."""
    coordinator = AsyncCoordinator(range(3), first=2)
    play(coordinator, [ready(0)])
    assert_ignored(coordinator, ready(0))


def test_async_coordinator_repeats_its_last_answer() -> None:
    """The answer was lost: the server gets the same w, and nothing is mixed again."""
    coordinator = AsyncCoordinator(range(3), first=2)
    play(coordinator, [ready(0), ready(1)])
    before = snapshot(coordinator)
    assert coordinator.handle(ready(0)) == [mixed(0, 0, "w/0/0")]
    assert snapshot(coordinator) == before


def test_async_coordinator_repeats_the_answer_of_the_iteration_that_is_asked_for() -> None:
    """The same with K_z = 2, after either iteration."""
    coordinator = AsyncCoordinator(range(2), first=2, iterations=2)
    play(coordinator, [ready(0), ready(1)])
    assert coordinator.handle(ready(1)) == [mixed(1, 0, "w/0/0")]
    play(coordinator, [ready(0, 0, 1, 2), ready(1, 0, 1, 2)])
    assert coordinator.handle(ready(1, 0, 1, 2)) == [mixed(1, 0, "w/0/1", 1)]
    assert_ignored(coordinator, ready(1))


def test_async_coordinator_ignores_late_copies_of_older_phases() -> None:
    """Whoever sent them has been answered since."""
    coordinator = AsyncCoordinator(range(2), first=1)
    play(coordinator, [ready(0), ready(0, 1)])
    assert_ignored(coordinator, ready(0))


ASYNC_REFUSALS: list[tuple[list[Event], ServerReady]] = [
    ([], ready(0, 0, 1)),  # an iteration of no mix
    (
        [ready(0)],
        ready(0, 1),
    ),  # a new phase while the last one is queued: it would be mixed with itself
    ([ready(0)], ready(0, 0, 1)),  # an iteration while it is queued
    ([ready(0), ready(1)], ready(0, 1)),  # a new phase in the middle of a mix
    ([ready(0), ready(1)], ready(0, 0, 2)),  # an iteration left out
    ([ready(0), ready(1)], ready(0, 1, 1)),  # an iteration of another phase
    ([ready(0), ready(1), ready(0, 0, 1)], ready(0, 0, 2)),  # an iteration before its turn
    ([ready(0), ready(1)], ready(2, 0, 1)),  # an iteration of a mix it is not in
]


@pytest.mark.parametrize(("events", "event"), ASYNC_REFUSALS)
def test_async_coordinator_refuses_reports_that_do_not_follow(
    events: list[Event], event: ServerReady
) -> None:
    """A server waits for its answer before it goes on; anything else cannot be true."""
    coordinator = AsyncCoordinator(range(3), first=2, iterations=3)
    play(coordinator, events)
    assert_refused(coordinator, event, RemoteProtocolError, "does not fit")


# ------------------------------------------------------------------------------------------------
# rigorous Async-cloud
def test_rigorous_coordinator_isolates_those_that_are_not_among_the_first_b() -> None:
    """Paper, Appendix A (iii): 'It will also send an 'isolation' signal to cloud servers not in
    V(t)'.
    """
    coordinator = RigorousCoordinator(range(4), first=2)
    assert coordinator.handle(ready(3)) == []
    assert coordinator.handle(ready(1)) == [
        mix(0, [ready(3), ready(1)]),
        mixed(3, 0, "w/0/0"),
        mixed(1, 0, "w/0/0"),
        isolate(0, 0),
        isolate(2, 0),
    ]
    assert coordinator.round == 1


def test_rigorous_coordinator_accepts_models_of_its_round_only() -> None:
    """Paper, Appendix A (i): 'only cloud-server models at round t will be accepted'."""
    coordinator = RigorousCoordinator(range(3), first=2)
    play(coordinator, [ready(0), ready(1)])
    before = snapshot(coordinator)
    assert coordinator.handle(ready(2)) == [isolate(2, 0)]
    assert snapshot(coordinator) == before
    assert_refused(
        coordinator, ready(0, 2), RemoteProtocolError, "reports round 2, but round 1 is not over"
    )


def test_rigorous_coordinator_starts_each_round_with_nobody() -> None:
    """Paper, Appendix A (ii): 'hears from the first B cloud servers', anew in each round."""
    coordinator = RigorousCoordinator(range(2), first=1)
    assert coordinator.handle(ready(1)) == [mix(0, [ready(1)]), mixed(1, 0, "w/0/0"), isolate(0, 0)]
    assert coordinator.handle(ready(0, 1)) == [
        mix(1, [ready(0, 1)]),
        mixed(0, 1, "w/1/0"),
        isolate(1, 1),
    ]


def test_rigorous_coordinator_counts_a_repeated_report_once() -> None:
    """'The first B cloud servers' are B different ones."""
    coordinator = RigorousCoordinator(range(3), first=2)
    play(coordinator, [ready(0)])
    assert_ignored(coordinator, ready(0))


def test_rigorous_coordinator_repeats_its_last_answer() -> None:
    """The answer was lost."""
    coordinator = RigorousCoordinator(range(3), first=2)
    play(coordinator, [ready(0), ready(1)])
    before = snapshot(coordinator)
    assert coordinator.handle(ready(0)) == [mixed(0, 0, "w/0/0")]
    assert coordinator.handle(ready(2)) == [isolate(2, 0)]
    assert coordinator.handle(ready(2)) == [isolate(2, 0)]
    assert snapshot(coordinator) == before


def test_rigorous_coordinator_ignores_late_copies_from_before_its_last_answer() -> None:
    """Server 2 was isolated in round 0 and mixed in round 1; a copy of its report of round 0 needs
    no answer.
    """
    coordinator = RigorousCoordinator(range(3), first=2)
    play(coordinator, [ready(0), ready(1), ready(2, 1), ready(0, 1)])
    assert_ignored(coordinator, ready(2))


def test_rigorous_coordinator_tells_a_straggler_about_the_round_it_asks_for() -> None:
    """A server that was mixed in round 0 and is late for rounds 1 and 2 hears of round 1 first."""
    coordinator = RigorousCoordinator(range(2), first=1)
    play(coordinator, [ready(0), ready(1, 1), ready(1, 2)])
    assert coordinator.handle(ready(0, 1)) == [isolate(0, 1)]


def test_rigorous_coordinator_with_several_iterations_isolates_when_the_round_is_over() -> None:
    """Paper, Appendix A (i): nobody may be in round t+1 while round t is still being mixed."""
    coordinator = RigorousCoordinator(range(3), first=2, iterations=2)
    first = [mix(0, [ready(2), ready(0)]), mixed(2, 0, "w/0/0"), mixed(0, 0, "w/0/0")]
    assert play(coordinator, [ready(2), ready(0)]) == first
    assert_ignored(coordinator, ready(1))
    assert coordinator.round == 0
    group = [ready(0, 0, 1, 2), ready(2, 0, 1, 2)]
    last = [mix(0, group), mixed(0, 0, "w/0/1", 1), mixed(2, 0, "w/0/1", 1), isolate(1, 0)]
    assert play(coordinator, group) == last
    assert coordinator.round == 1
    assert coordinator.handle(ready(1)) == [isolate(1, 0)]


def test_rigorous_coordinator_repeats_the_answer_of_the_iteration_that_is_asked_for() -> None:
    """With K_z = 2 the first w may be lost as well as the second."""
    coordinator = RigorousCoordinator(range(2), first=2, iterations=2)
    play(coordinator, [ready(0), ready(1)])
    assert coordinator.handle(ready(1)) == [mixed(1, 0, "w/0/0")]
    play(coordinator, [ready(0, 0, 1, 2), ready(1, 0, 1, 2)])
    assert coordinator.handle(ready(1, 0, 1, 2)) == [mixed(1, 0, "w/0/1", 1)]
    assert_ignored(coordinator, ready(1))


RIGOROUS_REFUSALS: list[tuple[list[Event], ServerReady, str]] = [
    ([], ready(0, 1), "reports round 1, but round 0 is not over"),
    ([], ready(0, 0, 1), "reports round 0, but round 0 is not over"),
    (
        [ready(0), ready(1)],
        ready(2, 0, 1),
        r"is not of the mix under way, which has servers \[0, 1\]",
    ),
    ([ready(0), ready(1)], ready(2, 1), "reports round 1, but round 0 is not over"),
]


@pytest.mark.parametrize(("events", "event", "match"), RIGOROUS_REFUSALS)
def test_rigorous_coordinator_refuses_what_cannot_be_true(
    events: list[Event], event: ServerReady, match: str
) -> None:
    """A machine that raises has not changed."""
    coordinator = RigorousCoordinator(range(3), first=2, iterations=2)
    play(coordinator, events)
    assert_refused(coordinator, event, RemoteProtocolError, match)


# ------------------------------------------------------------------------------------------------
# the clouds
IDENTITY = [[1.0, 0.0], [0.0, 1.0]]
SWAP = [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("cloud", "commands"),
    [
        (
            SyncCloud(),
            [
                StepGlobal(round=0, iterations=1, model="z/0", result="z/1"),
                updated(0, 0),
                updated(1, 0),
            ],
        ),
        (
            AsyncCloud(first=2),
            [mix(0, [ready(0), ready(1)]), mixed(0, 0, "w/0/0"), mixed(1, 0, "w/0/0")],
        ),
        (
            RigorousCloud(first=2),
            [mix(0, [ready(0), ready(1)]), mixed(0, 0, "w/0/0"), mixed(1, 0, "w/0/0")],
        ),
        (
            GraphCloud(SWAP),
            [mix(0, [ready(0), ready(1)], False), mixed(0, 0, "w/0/0/0"), mixed(1, 0, "w/0/0/1")],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_cloud_makes_its_coordinator(cloud: Cloud, commands: list[Command]) -> None:
    """A cloud is a plain value; the machine that it makes is new each time."""
    for _ in range(2):
        assert play(cloud.coordinator(2, 1), [ready(0), ready(1)]) == commands


def test_clouds_are_known_by_their_names() -> None:
    """The names are what a configuration says."""
    kinds = [
        ("sync", SyncCloud),
        ("async", AsyncCloud),
        ("rigorous", RigorousCloud),
        ("graph", GraphCloud),
        ("dynamic-graph", DynamicGraph),
    ]
    assert list(CLOUDS.items()) == kinds
    assert [kind.sync for kind in CLOUDS.values()] == [True, False, False, False, False]


@pytest.mark.parametrize("kind", [AsyncCloud, RigorousCloud])
@pytest.mark.parametrize("first", [0, 3, -1])
def test_first_must_be_between_one_and_the_number_of_servers(
    kind: type[AsyncCloud | RigorousCloud], first: int
) -> None:
    """Paper, Async-cloud (ii): the first B of N servers."""
    with pytest.raises(ConfigError, match=f"first={first} must be between 1 and the 2 servers"):
        kind(first).coordinator(2, 1)


def test_a_graph_is_one_matrix_or_several_used_in_turn() -> None:
    """Paper, Assumption 3: a_nm may vary with the round."""
    assert GraphCloud(SWAP).mixing == (((0.0, 1.0), (1.0, 0.0)),)
    assert GraphCloud([IDENTITY, SWAP]).mixing == (
        ((1.0, 0.0), (0.0, 1.0)),
        ((0.0, 1.0), (1.0, 0.0)),
    )


def test_a_graph_of_the_wrong_size_is_refused() -> None:
    """The message names what was given and what is needed."""
    with pytest.raises(ConfigError, match="3 servers"):
        GraphCloud(SWAP).coordinator(3, 1)


STAR = [(0, 1), (2, 0), (3, 0)]


def test_servers_mix_along_the_links_between_those_who_are_there() -> None:
    """Paper: "the cloud servers are connected by a (possibly) dynamic multi-agent graph".
    Metropolis: 1 / (1 + the larger degree).
    """
    star = DynamicGraph([STAR, [(1, 2)]], first=3)
    third = 1 / 3
    assert star.weights(0, (2, 0, 1)) == (
        (1 - third, third, 0.0),
        (third, 1 - 2 * third, third),
        (0.0, third, 1 - third),
    )
    assert star.weights(0, (3, 1, 2)) == ((1, 0, 0), (0, 1, 0), (0, 0, 1))  # none is linked
    assert star.weights(1, (1, 2, 0)) == ((0.5, 0.5, 0), (0.5, 0.5, 0), (0, 0, 1))


def test_links_fail_by_draws_of_their_own_and_the_matrix_stays_doubly_stochastic() -> None:
    """Assumption 3(ii), whoever is there and whatever fails."""
    graph, seen = DynamicGraph(STAR, first=4, link_failure=0.25, seed=1), 0
    for t in range(400):
        rows = graph.weights(t, (3, 0, 2, 1))
        assert all(sum(row) == pytest.approx(1) for row in [*rows, *zip(*rows, strict=True)])
        assert all(rows[k][k] > 0 for k in range(4))
        assert rows == graph.weights(t, (3, 0, 2, 1))
        seen += sum(a > 0 for a in rows[1]) - 1
    assert seen / 1200 == pytest.approx(0.75, abs=0.05)  # four standard deviations


@pytest.mark.parametrize(
    ("edges", "more", "why"),
    [
        ([(0, 0)], {}, r"edges has \[0, 0\]; a link is two servers"),
        ([(0, 1, 2)], {}, r"edges has \[0, 1, 2\]; a link is two servers"),
        ([(0, 5)], {}, "edges names server 5; there are servers 0 to 2"),
        ([(0, 1), (1, 2)], {"first": 4}, "first=4 must be between 1 and the 3 servers"),
        ([(0, 1)], {"link_failure": 1.0}, "link_failure=1.0 must be 0 or more and below 1"),
    ],
)
def test_links_that_cannot_be_are_refused(edges: Any, more: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DynamicGraph(**{"edges": edges, "first": 2} | more).coordinator(3, 1)


MACHINES: list[Callable[[], Coordinator]] = [
    lambda: SyncCoordinator(range(3)),
    lambda: AsyncCoordinator(range(4), first=2),
    lambda: AsyncCoordinator(range(4), first=3, iterations=2),
    lambda: RigorousCoordinator(range(4), first=2),
    lambda: RigorousCoordinator(range(4), first=3, iterations=2),
]


@pytest.mark.parametrize("make", MACHINES)
def test_a_coordinator_knows_which_report_ends_a_round_without_taking_it(
    make: Callable[[], Coordinator],
) -> None:
    """As taking it in a copy says; reports of any server, phase and iteration, in any order."""
    chance, ended = random.Random(1), 0
    for _ in range(30):
        machine = make()
        for _ in range(60):
            phase = max(machine.round - chance.randrange(3) + 1, 0)
            event = ServerReady(
                server=chance.randrange(5), phase=phase, iteration=chance.randrange(3), model="z/0"
            )
            trial = copy.deepcopy(machine)
            with suppress(ProtocolError):
                trial.handle(event)
            before = copy.deepcopy(vars(machine))
            assert machine.ends_round(event) == (trial.round > machine.round), event
            assert vars(machine) == before
            ended += trial.round > machine.round
            with suppress(ProtocolError):
                machine.handle(event)
    assert ended > 10
