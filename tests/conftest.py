"""Options of the test suite."""

import pytest
import torch

torch.set_num_threads(1)  # the tensors of the tests are small: more threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record` rewrites recorded texts instead of comparing with them; look at the difference before you keep it."""
    parser.addoption("--record", action="store_true", help="rewrite the transcripts in tests/scenarios/transcripts")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> bool:
    """Whether recorded texts are to be rewritten."""
    return bool(request.config.getoption("--record"))
