"""Every error this package raises on purpose: one subclass per boundary that was crossed when it went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager


class AgentEnvTinkerError(Exception):
    """Something a person can act on: the message says what is wrong, where, and what to do."""


class ConfigError(AgentEnvTinkerError):
    """A setting of the run that can't be used."""


class BundleError(AgentEnvTinkerError):
    """A bundle that can't be trained on. One problem a line, each naming its file or task."""


class SandboxError(AgentEnvTinkerError):
    """A sandbox host that can't be used."""


class ServiceError(AgentEnvTinkerError):
    """A Tinker service that can't be used."""


class TrainingError(AgentEnvTinkerError):
    """A run that had started and could not go on."""


class EpisodeFailedError(AgentEnvTinkerError):
    """An episode that earned no reward: its run failed, was cut short by an error, or recorded no usable score."""


class EpisodeTimeoutError(EpisodeFailedError, TimeoutError):
    """An episode that took longer than one of its deadlines."""


@contextmanager
def boundary(kind: type[AgentEnvTinkerError], doing: str, *foreign: type[Exception]) -> Iterator[None]:
    """Raise any of the `foreign` errors of the block as `kind`, saying what was being done."""
    try:
        yield
    except foreign as error:
        raise kind(f"{doing}: {described(error)}") from error


def described(error: BaseException) -> str:
    """An error as one line: its own words, or its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
