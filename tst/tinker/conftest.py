"""The training layer on the real cookbook and the real Episode API: no model, no service, no Docker, no key."""

import functools
import os
import ssl
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `stand_in`, here and, by PYTHONPATH, in the processes that a test starts


@pytest.fixture(scope="session", autouse=True)
def framework_state(tmp_path_factory):
    """Point the framework, once a worker, at state of this session and at the stand-in sandboxes."""
    state = tmp_path_factory.mktemp("state")
    config = state / "config.toml"
    config.write_text('[sandbox.providers.in_process]\nimpl = "stand_in.sandbox:InProcessProvider"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_ENV_CONFIG", str(config))
        patch.setenv("XDG_STATE_HOME", str(state / "xdg"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        from stand_in.model import register

        register()
        yield state


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Read the machine's certificates once: each HTTP client does, an episode has a dozen, and none here uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_hosted_service():
    """Ask nobody elsewhere whether the service that a test stands in for still answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv_tinker.service.resolve_base_url", lambda url: url or "http://127.0.0.1:9")
        yield


@pytest.fixture(autouse=True)
def sandboxes():
    """The sandboxes that are up, by id: none before a test, and none may be after it."""
    from stand_in.sandbox import LIVE

    LIVE.clear()
    yield LIVE
    assert LIVE == {}, "a test left sandboxes up"
