"""Runs the command line under `python -m agentenv_tinker`."""

from agentenv_tinker.cli import main

if __name__ == "__main__":
    main()
