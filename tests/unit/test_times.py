"""Who is slow, and why: classes, speeds, day and night, links, traces; and what cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbcd as fb
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import parse
from fedbcd.schedule.arrays import why_not_ahead
from fedbcd.schedule.delays import Where
from fedbcd.schedule.events import Schedule
from fedbcd.schedule.times import NONE, Times
from fedbcd.spec import RunSpec
from support.methods import method_of
from support.runs import federation, job_table

SERVERS = [[*range(10)], [*range(10, 20)]]
EVERYBODY = np.arange(20)


def took(clock: fb.Clock, now: float = 0.0, sent: tuple[float, float] = (0.0, 0.0)) -> Any:
    """Arrivals, and the work of three steps, of everybody."""
    times = Times(clock, 5, SERVERS, sent)
    arrivals = times.arrivals(EVERYBODY, np.array([2]), now)
    return arrivals, times.work(EVERYBODY, np.array([4]), np.array([3]), now)


PLAIN = took(fb.Clock())


def test_a_share_is_exact_and_those_who_are_named_are_not_in_it() -> None:
    clock = fb.Clock(
        classes=(
            fb.DeviceClass(share=0.25, step=5.0),
            fb.DeviceClass(devices=(3, 4), arrival=2.0),
            fb.DeviceClass(servers=(0,), step=3.0),
            fb.DeviceClass(share=0.5, step=0.5),
        )
    )
    times = Times(clock, 5, SERVERS)
    kind = times.kind
    assert kind[[3, 4]].tolist() == [1, 1]  # in the first class that names them
    assert [int((kind[:10] == k).sum()) for k in (1, 2)] == [2, 8]
    assert [int((kind[10:] == k).sum()) for k in (0, 3, NONE)] == [2, 6, 2]  # 2.5 and 7.5, rounded
    arrivals, work = took(clock)
    np.testing.assert_array_equal(arrivals, PLAIN[0] * np.where(kind == 1, 2.0, 1.0))
    factors = np.array([5.0, 1.0, 3.0, 0.5, 1.0])
    np.testing.assert_array_equal(work, PLAIN[1] * factors[kind])
    assert times.work_one(12, 4, 3, 0.0) == work[12]
    assert times.why_slow(3) == "its class (arrival x 2)"


def test_speeds_stay_and_nights_are_slow() -> None:
    speeds = fb.Clock(speeds=fb.LogNormal(median=1.0, sigma=0.5))
    first, second = (Times(speeds, 5, SERVERS).speed for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(took(speeds)[0], PLAIN[0])
    np.testing.assert_allclose(took(speeds)[1], PLAIN[1] * first, rtol=1e-15)
    day = fb.Clock(day=fb.Day(period=24.0, night=3.0))
    for now, factor in ((0.0, 1.0), (6.0, 2.0), (12.0, 3.0), (24.0, 1.0)):
        for slow, plain in zip(took(day, now), PLAIN, strict=True):
            np.testing.assert_allclose(slow, plain * factor, rtol=1e-12)


def test_models_take_their_bytes_over_the_rate_of_each_device() -> None:
    rates = tuple(float(1 + i) for i in range(20))
    clock = fb.Clock(
        bandwidth=fb.Bandwidth(down=50.0, up=rates),
        classes=(fb.DeviceClass(devices=(0,), transfer=2.0),),
    )
    arrivals, work = took(clock, sent=(100.0, 30.0))
    extra = 2.0 + 30.0 / np.array(rates)
    extra[0] *= 2
    np.testing.assert_array_equal(arrivals, PLAIN[0])
    np.testing.assert_allclose(work, PLAIN[1] + extra, rtol=1e-15)


def test_the_bytes_are_those_of_the_model() -> None:
    """A logistic regression of 650 parameters, in float32."""
    clock = fb.Clock(bandwidth=fb.Bandwidth(up=1.0))
    spec = RunSpec(fb.FedBCD(), clock=clock)
    size = sum(p.numel() for p in federation().make_model(0).parameters())
    assert spec.sent(federation()) == (4 * size, 4 * size)
    assert RunSpec(fb.FedBCD()).sent(federation()) == (0.0, 0.0)


def test_traces_are_of_each_device_or_server(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("device,server,seconds\n3,0,7\n3,0,9\n12,1,5\n")
    table = job_table(clock={"step": {"name": "traces", "file": str(tmp_path / "t.csv")}})
    law = parse(table)[0].spec.clock.step
    assert law == fb.Traces(((3, 7.0), (3, 9.0), (12, 5.0)))
    work = took(fb.Clock(step=law))[1] / 3
    assert set(work[[3, 12]]) <= {5.0, 7.0, 9.0}
    assert work[12] == 5.0
    assert work[3] in (7.0, 9.0)
    servers = took(fb.Clock(step=fb.Traces(((0, 2.0), (1, 4.0)), by="server")))[1] / 3
    assert servers.tolist() == [2.0] * 10 + [4.0] * 10


def test_a_table_of_other_columns_says_which_it_has(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("phone,seconds\n3,7\n")
    with pytest.raises(ConfigError, match="device or server, and seconds: it names phone, seconds"):
        parse(job_table(clock={"step": {"name": "traces", "file": str(tmp_path / "t.csv")}}))


def test_traces_of_a_hundred_thousand_times_are_drawn_from_at_once() -> None:
    """What belongs to whom is found when they are read, not in every draw (then a minute)."""
    values = [(k % 100, float(k)) for k in range(100_000)]
    law = fb.Traces(tuple(reversed(values)))
    device, u = np.arange(100), np.full(100, 0.25)
    for _ in range(300):
        found = law.at(u, Where(device, device, 0.0, (0.0, 0.0)))
    assert found.tolist() == [25_000.0 + k for k in range(100)]


class Growing:
    """A law of one's own that looks at who it is about, and when."""

    name = "growing"

    def at(self, u: np.ndarray, where: Where) -> np.ndarray:
        return u * 0 + where.device + 100 * where.server + 1000 * where.time


def test_a_law_of_ones_own_may_ask_whose_delay_it_is() -> None:
    arrivals, _ = took(fb.Clock(arrival=Growing()), now=2.0)  # type: ignore[arg-type]
    assert arrivals.tolist() == [2000 + i + 100 * (i >= 10) for i in range(20)]


def test_what_is_no_law_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no quantile\(u\) or at\(u, where\)"):
        fb.Clock(step=object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clock", "why"),
    [
        (fb.Clock(day=fb.Day(24.0, 2.0)), "delays depend on the time"),
        (fb.Clock(dropout=0.1), "devices are lost during activations"),
        (fb.Clock(step=fb.Traces(((0, 1.0),))), "delays that repeat make events fall together"),
        (fb.Clock(arrival=Growing()), "delays depend on the time"),  # type: ignore[arg-type]
        (fb.Clock(classes=(fb.DeviceClass(share=0.1, step=3.0),)), None),
    ],
)
def test_what_only_events_can_tell_is_not_drawn_ahead(clock: fb.Clock, why: str | None) -> None:
    schedule = Schedule(method_of(fb.FedBCD()), clock, 0, 2)
    assert why_not_ahead(SERVERS, schedule, fb.SyncCloud()) == why


@pytest.mark.parametrize(
    ("clock", "says"),
    [
        (
            {"classes": [{"share": 0.7}, {"share": 0.5}]},
            "the shares sum to 1.2; make them 1",
        ),
        ({"classes": [{"share": 1.5}]}, "share=1.5 must be between 0 and 1"),
        (
            {"classes": [{"step": 5}]},
            "a class is a share above 0, devices, or servers",
        ),
        ({"classes": [{"step": 0, "share": 0.1}]}, "step=0.0 must be a finite number above 0"),
        ({"classes": [{"devices": [16], "step": 2}]}, "names device 16; there are devices 0 to 15"),
        ({"classes": [{"servers": [-1], "step": 2}]}, "names server -1; there are servers 0 to 3"),
        ({"classes": [{"shares": 0.1}]}, "unknown key 'shares' (did you mean 'share'?)"),
        ({"bandwidth": {"up": -1}}, "clock.bandwidth up=-1.0 must be a finite number above 0"),
        ({"bandwidth": {"up": [1, 2]}}, "clock.bandwidth.up has 2 rates for 16 devices"),
        (
            {"day": {"period": 0, "night": 2}},
            "clock.day period=0.0 must be a finite",
        ),
        ({"day": {"period": 5}}, "[clock.day] needs night"),
        ({"day": 24}, "clock.day = 24 must be a Day; e.g. { period = 24, night = 3 }"),
        ({"bandwidth": 1e5}, "must be a Bandwidth; e.g. { down = 1e6, up = 2e5 }"),
        ({"classes": {"share": 0.2}}, "must be a list; e.g. [{ share = 0.2, step = 5 }]"),
        (
            {"classes": [{"devices": [3], "step": 2}, {"share": 0.02, "step": 5}]},
            "share=0.02 of the 15 devices that no class names is nobody; use a larger share",
        ),
        (
            {"classes": [{"devices": [3], "transfer": 10}]},
            "transfer=10 is a factor of clock.bandwidth, and there is none; add bandwidth",
        ),
        ({"step": {"name": "trace"}}, "[clock.step] needs values, e.g. values = [1.5, 2.0]"),
        ({"dropout": 1.0}, "clock.dropout=1.0 must be 0 or more and below 1"),
        ({"speeds": {"name": "constant", "value": 0}}, "clock.speeds gives a factor of 0"),
        (
            {"step": {"name": "traces", "values": [[99, 1.0]]}},
            "traces by device name none of",
        ),
        (
            {"step": {"name": "traces", "file": "nowhere.csv"}},
            "is not a table (CSV) whose",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(clock: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(job_table(clock=clock))[0].spec.check(federation())
    assert says in str(error.value)


def test_a_job_says_it_in_one_line_each_and_records_are_as_they_were() -> None:
    clock = {
        "classes": [{"share": 0.2, "step": 5}, {"servers": [1], "step": 2, "arrival": 3}],
        "speeds": {"name": "lognormal", "median": 1, "sigma": 0.5},
        "day": {"period": 24, "night": 3},
        "bandwidth": {"up": 1e4, "down": 1e5},
        "dropout": 0.05,
    }
    spec = parse(job_table(clock=clock))[0].spec
    assert spec.clock.classes[1] == fb.DeviceClass(step=2.0, arrival=3.0, servers=(1,))
    assert RunSpec.from_identity(spec.identity(federation())).clock == spec.clock
    assert [*RunSpec(fb.FedBCD()).identity(federation())["clock"]] == ["arrival", "step"]
