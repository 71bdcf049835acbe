"""Loads the bundle's files, which no package installs, under names of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BUNDLE = Path(__file__).resolve().parents[3] / "bundles" / "gridsim"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bundle() -> Path:
    return BUNDLE


@pytest.fixture(scope="session")
def battery() -> ModuleType:
    return load("battery", BUNDLE / "envs" / "gridsim" / "battery.py")


@pytest.fixture(scope="session")
def generate(battery: ModuleType) -> ModuleType:
    """The generator, on the ``battery`` of the tests: its own import of it finds that one loaded."""
    return load("gridsim_generate", BUNDLE / "generate.py")


@pytest.fixture(scope="session")
def verify(battery: ModuleType) -> ModuleType:
    return load("gridsim_verify", BUNDLE / "artifacts" / "profit" / "verify.py")


@pytest.fixture(scope="session")
def server(battery: ModuleType) -> ModuleType:
    return load("gridsim_server", BUNDLE / "envs" / "gridsim" / "server.py")
