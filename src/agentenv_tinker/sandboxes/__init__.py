"""The Docker side: whether a sandbox host is there (check), and a warm pool of env containers on it (pool)."""

from agentenv_tinker.sandboxes.check import check_docker

__all__ = ["check_docker"]
