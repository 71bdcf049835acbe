"""Errors name the boundary that was crossed, in one line."""

import pytest

from agentenv_tinker import errors


def test_every_error_is_of_the_one_base_class():
    """So that one handler reads them all."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, errors.AgentEnvTinkerError) for kind in kinds)


def test_an_episode_that_is_late_is_a_timeout_and_a_failure():
    """The cookbook's strategies know the one, this package the other."""
    assert issubclass(errors.EpisodeTimeoutError, errors.EpisodeFailedError)
    assert issubclass(errors.EpisodeTimeoutError, TimeoutError)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (TimeoutError(), "TimeoutError"),
        (KeyError("name"), "'name'"),
    ],
)
def test_an_error_is_described_in_one_line(error, line):
    """By its own words, or its class where it has none."""
    assert errors.described(error) == line


def test_a_boundary_names_itself_for_the_errors_it_is_told_of():
    """And leaves every other, and its own kind, alone."""

    def reads(error):
        with errors.boundary(errors.BundleError, "reading the bundle", OSError):
            raise error

    with pytest.raises(errors.BundleError, match="reading the bundle: no such file") as crossed:
        reads(OSError("no such file"))
    assert isinstance(crossed.value.__cause__, OSError)
    with pytest.raises(ValueError, match="a bug"):
        reads(ValueError("a bug"))
