"""Who may import whom, and that importing does nothing."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentenv_tinker

SOURCES = Path(__file__).parent.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCES.rglob("*.py")
}
TRAINER = {name: path for name, path in MODULES.items() if name.startswith("agentenv_tinker.")}


def imported(path, *, deferred=True):
    """The modules that a file imports, as dotted names; without the `deferred` ones, those inside functions."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if deferred else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(path):
    """The top-level packages that a file imports."""
    return {name.partition(".")[0] for name in imported(path)}


def noun(name):
    """The part of the package that a module is, or belongs to: `sandboxes`, for `agentenv_tinker.sandboxes.pool`."""
    return name.split(".")[1]


def importers(package):
    """The parts of the trainer that import `package`."""
    return {noun(name) for name, path in TRAINER.items() if package in packages(path)}


@pytest.mark.parametrize("module", ["errors", "reward", "arguments", "config", "evaluation"])
def test_what_needs_no_library_imports_none(module):
    """The standard library and the errors, so that it is tested and read alone."""
    path = TRAINER[f"agentenv_tinker.{module}"]
    others = packages(path) - sys.stdlib_module_names
    assert others <= {"agentenv_tinker"}
    ours = {name for name in imported(path) if name.startswith("agentenv_tinker.")}
    assert {name.split(".")[1] for name in ours} <= ({"errors"} if module != "errors" else set())


def test_only_framework_imports_the_framework_and_the_sandbox_provider_that_it_loads():
    """Its non-public parts are touched in one place, with one test of them."""
    assert importers("agentenv_protocol") == {"framework"}
    assert {"framework"} <= importers("agent_env") <= {"framework", "sandboxes"}


def test_only_sandboxes_imports_docker():
    """The rest reaches sandboxes through the framework."""
    assert importers("docker") == {"sandboxes"}


def test_the_trainer_and_the_local_service_meet_over_http_alone():
    """Neither imports the other, the command that serves it apart."""
    assert importers("tinker_local") <= {"cli"}
    service = [path for name, path in MODULES.items() if name.startswith("tinker_local.")]
    assert [path.name for path in service if "agentenv_tinker" in packages(path)] == []


def test_modules_import_each_other_in_one_direction():
    """There is an order in which each part comes after what it imports."""
    nouns = {noun(name) for name in TRAINER}
    graph = {each: set() for each in nouns}
    for name, path in TRAINER.items():
        ours = [part.split(".") for part in imported(path, deferred=False) if part.startswith("agentenv_tinker.")]
        graph[noun(name)] |= {part for parts in ours for part in parts[1:3] if part in nouns} - {noun(name)}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    layers = ["framework", "bundle", "episode", "env", "rollout", "dataset"]
    assert sorted(layers, key=order.index) == layers


def test_the_public_list_is_what_is_exported():
    """Every name of it is there, and no other."""
    exported = {name: getattr(agentenv_tinker, name) for name in agentenv_tinker.__all__}
    assert sorted(exported) == agentenv_tinker.__all__
    assert all(
        value.__name__ == name and value.__module__.startswith("agentenv_tinker.") for name, value in exported.items()
    )
    assert set(agentenv_tinker.__all__) <= set(dir(agentenv_tinker))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        agentenv_tinker.nothing  # noqa: B018


IMPORT = """
import json, sys, sysconfig
library = sysconfig.get_paths()["stdlib"]
done = []
def ours():
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", library + "/", "<string>")):
        if "site-packages" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None and "/agentenv_tinker/" in frame.f_code.co_filename
def note(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if (writes or event in ("socket.connect", "subprocess.Popen", "os.mkdir", "os.remove", "os.putenv")) and ours():
        done.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(note)
import agentenv_tinker
heavy = sorted({"agent_env", "chz", "tinker", "tinker_cookbook", "torch", "docker"} & set(sys.modules))
import agentenv_tinker.%s
print(json.dumps([heavy, done]))
"""


@pytest.mark.parametrize("module", ["dataset", "cli"])
def test_importing_does_nothing_and_the_package_itself_is_light(module):
    """No file is written, no process started, no address reached, no environment changed, by a module of ours."""
    ran = subprocess.run([sys.executable, "-c", IMPORT % module], capture_output=True, text=True, check=True)
    heavy, done = json.loads(ran.stdout.splitlines()[-1])
    assert heavy == []
    assert done == []
