"""Personal models kept in bfloat16: half the memory, arithmetic in float32, and every promise of a
run still holds.
"""

from pathlib import Path

import pytest
import torch

import fedbcd as fb
from fedbcd.engines.setup import make_numbers
from fedbcd.errors import ConfigError
from support.rounding import U
from support.runs import LOGISTIC, federation, train

pytestmark = pytest.mark.usefixtures("both_ways")

HALF = torch.bfloat16


@pytest.mark.parametrize("case", ["fedbcd-sync", "fedbcd-async", "fedbcd-i-sync"])
def test_the_models_are_near_those_of_float32(case: str) -> None:
    """Rounding is 2^-8 of each weight per session. It does not run away: z is a float64 mean of
    what was rounded.
    """
    whole, half = train(case, rounds=20), train(case, rounds=20, storage=HALF)
    scale = float(whole.global_VF.abs().max())
    assert 0 < float((whole.global_VF - half.global_VF).abs().max()) < 0.05 * scale
    assert half.global_VF.dtype == half.personal_NF.dtype == torch.float32
    assert torch.equal(half.personal_NF, half.personal_NF.to(HALF).float()), (
        "what a device keeps is what it has"
    )


def test_what_a_device_keeps_is_what_it_uploads() -> None:
    """With a server step of 1 and all devices active, z is the mean of the models that are kept."""
    run = fb.train(
        federation(LOGISTIC),
        fb.FedBCD(device_step=0.05, batch=8, server_step=1.0),
        rounds=5,
        active=4,
        storage=HALF,
    )
    torch.testing.assert_close(
        run.global_VF[0],
        run.personal_NF.double().mean(0).float(),
        rtol=0,
        atol=4 * U * float(run.personal_NF.abs().max()),
    )


def test_it_takes_half_the_memory() -> None:
    specs = [fb.RunSpec(fb.FedBCD(), active=2, storage=storage) for storage in (None, HALF)]
    whole, half = (make_numbers(spec, federation(), torch.device("cpu")).devices for spec in specs)
    assert [t.untyped_storage().nbytes() * 2 for t in half.tables.values()] == [
        t.untyped_storage().nbytes() for t in whole.tables.values()
    ]


def test_resume_and_replay_end_with_the_same_bits(tmp_path: Path) -> None:
    whole = train("fedbcd-async", rounds=12, storage=HALF, out=tmp_path / "whole")
    train("fedbcd-async", rounds=6, storage=HALF, out=tmp_path / "parts")
    parts = train("fedbcd-async", rounds=12, storage=HALF, out=tmp_path / "parts", resume=True)
    assert parts.digest == whole.digest
    assert fb.replay(tmp_path / "whole" / "events.jsonl", federation())["digest"] == whole.digest


def test_a_dtype_that_holds_no_fractions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage=torch\.int8 must be a floating-point dtype"):
        train("fedbcd-sync", storage=torch.int8)


def test_certificates_are_taken_in_float32() -> None:
    last = train("fedbcd-sync", rounds=4, storage=HALF, certify_every=1).history.last
    assert 0 < last.gap <= last.worst_gap
