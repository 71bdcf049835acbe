"""What the Docker tests share: one place for the framework's state, whose stores stay open as long as the process."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The framework's state of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
