"""The command that serves: options in, one running service, exit code out."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tinker_local import memory
from tinker_local.errors import StartupError

DEFAULT_PORT = 8077
KEY_VARIABLE = "TINKER_LOCAL_API_KEY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal, or the end of standard input where that was asked for; return the exit code.

    0 after a clean stop; 2, with one line on standard error, where the service can't start as asked.
    """
    options = _parser().parse_args(argv)
    try:
        _serve(options)
    except StartupError as error:
        print(f"tinker_local: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinker_local",
        description="Serve the Tinker API on this machine: training and sampling of a small model, with no account.",
    )
    parser.add_argument(
        "--model",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="a model's name or folder, or 'tiny' (%(default)s)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"address to listen on; beyond loopback needs {KEY_VARIABLE}"
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="folder of runs and checkpoints (default: in the user's data folder)")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input is closed")
    return parser


def _serve(options: argparse.Namespace) -> None:
    key = os.environ.get(KEY_VARIABLE) or None
    if options.host not in _LOOPBACK and key is None:
        raise StartupError(
            f"listening on {options.host} lets other machines in: set {KEY_VARIABLE} to the key they must give"
        )
    if key is not None and not key.startswith("tml-"):
        raise StartupError(f"the key in {KEY_VARIABLE} must start with 'tml-': clients refuse to send any other")
    # Torch takes seconds to import; the faults above are told at once.
    from tinker_local import server

    bound = server.bind(options.host, options.port)
    with bound:
        from tinker_local.start import open_service

        memory.return_freed()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        service = open_service(options.model, options.data or default_data_folder(), key=key, progress=_progress)

        def announce() -> None:
            print(f"tinker_local: serving {service.served.names[0]} at {server.url_of(bound)}", flush=True)

        def arm(stop: Callable[[], object]) -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
            if options.until_eof:
                threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()

        if not asyncio.run(server.serve(service, bound, started=announce, stop=arm)):
            # The worker is deep in a piece of work; what it has written is whole, and nobody waits for the rest.
            sys.stdout.flush()
            os._exit(0)


def _progress(line: str) -> None:
    print(f"tinker_local: {line}", file=sys.stderr, flush=True)


def _stop_at_end_of_input(stop: Callable[[], object]) -> None:
    while os.read(0, 4096):
        pass
    stop()


def default_data_folder() -> Path:
    """Return the folder that runs and checkpoints are kept in unless another is given."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tinker-local"


if __name__ == "__main__":
    sys.exit(main())
