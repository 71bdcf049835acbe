"""Runs the service's tests with the newest release of every minor version of the SDK since 0.34.

    python tst/service/every_sdk.py [pytest's arguments]

Each release is installed without its dependencies into a folder of its own, which comes before the environment's.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (0, 34)


def main(arguments: list[str]) -> int:
    """Return 0 if the tests pass with every release."""
    outcomes = {}
    for release in releases():
        with tempfile.TemporaryDirectory() as folder:
            pip("install", "--quiet", "--no-deps", "--target", folder, f"tinker=={release}")
            print(f"== tinker {release}", flush=True)
            environment = {**os.environ, "PYTHONPATH": folder, "PYTEST_ADDOPTS": ""}
            command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), *arguments]
            outcomes[release] = subprocess.run(command, env=environment).returncode
    for release, code in outcomes.items():
        print(f"tinker {release}: {'passed' if code == 0 else f'failed ({code})'}")
    return int(any(outcomes.values()))


def releases() -> list[str]:
    """Return the newest release of each minor version, the oldest minor first."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for text in re.findall(r"\b\d+\.\d+\.\d+\b", pip("index", "versions", "tinker")):
        release = tuple(int(part) for part in text.split("."))
        if release[:2] >= OLDEST:
            found[release[:2]] = max(release, found.get(release[:2], release))
    return [".".join(map(str, found[minor])) for minor in sorted(found)]


def pip(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
