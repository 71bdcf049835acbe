"""Puts a service together: the data folder, the base model, and the worker's backend on both."""

from pathlib import Path

from tinker_local import weights
from tinker_local.backend import ModelBackend
from tinker_local.checkpoints import Store
from tinker_local.errors import StartupError
from tinker_local.model import LanguageModel
from tinker_local.service import Served, Service
from tinker_local.weights import Progress


def open_service(model: str, data: Path, *, key: str | None, progress: Progress) -> Service:
    """Return a service for the model, with its runs and checkpoints under the data folder.

    Raises StartupError if the model or the folder can't be used.
    """
    base = weights.load(model, progress=progress)
    store = Store(data)  # only now: a model that can't be served leaves no folder behind
    language_model = LanguageModel(base)
    folder = _write_tokenizer(data, base.tokenizer_files)
    served = Served(
        names=base.names,
        architecture=language_model.architecture,
        context_length=language_model.context_length,
        tokenizer_files=base.tokenizer_files,
        tokenizer_folder=folder,
    )
    backend = ModelBackend(language_model, store, base.tokenizer.decode)
    return Service(served, store, backend, key=key)


def _write_tokenizer(data: Path, files: dict[str, str]) -> str:
    """Put the tokenizer's files where clients on this machine can load them from, and return that folder."""
    folder = data / "tokenizer"
    try:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise StartupError(f"data folder {str(data)!r} can't be used: {error.strerror or error}") from error
    return str(folder.resolve())
