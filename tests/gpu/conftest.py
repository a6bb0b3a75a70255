"""What a machine with one GPU proves, and one without can't: `make test-gpu`. Without one, every test is skipped.

What was measured is printed at the end, with the names of the card and of the software. Nothing of it is asserted.
"""

import platform
from collections.abc import Callable

import pytest
import torch

FIGURES: pytest.StashKey[list[str]] = pytest.StashKey()


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Note a figure."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures."""
    if figures := config.stash.get(FIGURES, []):
        card, cuda = torch.cuda.get_device_name(), torch.version.cuda
        terminalreporter.section("measured")
        terminalreporter.write_line(
            f"{card}, torch {torch.__version__}, CUDA {cuda}, Python {platform.python_version()}"
        )
        for figure in figures:
            terminalreporter.write_line(figure)
