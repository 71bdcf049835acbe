"""The bounds of env containers, as the environment gives them."""

import pytest

from agentenv_tinker.errors import ConfigError
from agentenv_tinker.sandboxes.limits import Limits, given_limits


def test_each_bound_has_a_default_and_is_set_by_its_variable() -> None:
    """An empty variable is as none, which is how Compose passes on one that isn't set."""
    assert given_limits({}) == given_limits({"SANDBOX_PIDS": ""}) == Limits()
    assert given_limits({"SANDBOX_MEMORY": "512m", "SANDBOX_CPUS": "0.5", "SANDBOX_PIDS": "64"}) == Limits(
        memory="512m", cpus=0.5, pids=64
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("SANDBOX_MEMORY", "lots"), ("SANDBOX_MEMORY", "0g"), ("SANDBOX_CPUS", "0"), ("SANDBOX_PIDS", "-1")],
    ids=["no size", "no memory", "no CPU", "fewer than none"],
)
def test_a_bound_that_cant_be_is_refused_by_name(name: str, value: str) -> None:
    """0 would mean no bound to Docker."""
    with pytest.raises(ConfigError, match=rf"{name} must be a .* such as .*, not '{value}'"):
        given_limits({name: value})
