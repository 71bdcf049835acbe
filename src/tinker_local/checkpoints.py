"""What runs, checkpoints, samplers and sessions look like on disk.

Everything is written beside its place and renamed into it, so a reader finds a whole checkpoint or none. The disk is
the only record: what is listed is what is there, also after a restart.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinker_local import exports
from tinker_local.errors import ConflictError, InvalidRequestError, NotFoundError, StartupError, StorageError
from tinker_local.operations import LoraSpec

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_MANIFEST_FILE = "manifest.json"
_SCHEME = "tinker://"
_MOST_TTL_SECONDS = 10 * 365 * 24 * 3600
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """A training run."""

    model_id: str
    session_id: str
    base_model: str
    lora: LoraSpec
    created: str
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A saved adapter of a run, with its optimizer's state if it is a training checkpoint (kind `weights`)."""

    model_id: str
    kind: Kind
    name: str
    base_model: str
    lora: LoraSpec
    created: str
    size_bytes: int = 0
    expires: str | None = None
    user_metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        """The checkpoint's tinker:// path."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session: of a checkpoint, of weights saved for it alone, or of the base model."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None = None
    own_lora: LoraSpec | None = None
    created: str = ""


@dataclass(frozen=True)
class SessionRecord:
    """A client's session."""

    session_id: str
    created: str
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    finished: str | None = None


def now() -> str:
    """Return the time as it is written to disk."""
    return datetime.now(UTC).isoformat()


def parse_path(path: str) -> tuple[str, Kind, str]:
    """Split a tinker:// path into the run's id, the kind and the name.

    Raises InvalidRequestError if it is not of that form.
    """
    parts = path.removeprefix(_SCHEME).split("/")
    kinds = [kind for kind in KINDS if path.startswith(_SCHEME) and len(parts) == 3 and parts[1] == kind]
    if not kinds:
        raise InvalidRequestError(
            f"{path!r} is no checkpoint path: it must read tinker://RUN/KIND/NAME, KIND one of {', '.join(KINDS)}"
        )
    return parts[0], kinds[0], parts[2]


class Store:
    """The data folder. Its methods block; they can be called from any thread."""

    def __init__(self, root: Path) -> None:
        """Open the folder, making it if needed, and clear what killed services left half-written.

        Several services can share it. Raises StartupError if it can't be written to.
        """
        self.root = root
        self._drafts = root / "drafts" / uuid.uuid4().hex
        try:
            for name in ("runs", "samplers", "sessions", "drafts"):
                (root / name).mkdir(parents=True, exist_ok=True)
            for drafts in (root / "drafts").iterdir():
                _clear_unless_locked(drafts)
            self._drafts.mkdir()
            self._lock = os.open(self._drafts, os.O_RDONLY)  # held as long as this process lives
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StartupError(f"data folder {str(root)!r} can't be used: {error.strerror or error}") from error

    def add_run(self, run: Run) -> None:
        """Record a new run."""
        with self._draft() as draft:
            (draft / "run.json").write_text(json.dumps(asdict(run)))
            _publish(draft, self._run_folder(run.model_id))

    def run(self, model_id: str) -> Run:
        """Return a run; raises NotFoundError if there is none of that id."""
        record = _read_json(self._run_folder(model_id) / "run.json")
        if record is None:
            raise NotFoundError(f"there is no training run {model_id!r} here")
        return Run(**{**record, "lora": LoraSpec(**record["lora"])})

    def runs(self) -> list[Run]:
        """Return all runs, the newest first."""
        found = [self.run(folder.name) for folder in (self.root / "runs").iterdir() if (folder / "run.json").is_file()]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        adapter: State,
        adapter_config: Mapping[str, Any],
        optimizer: State | None = None,
        overwrite: bool = False,
        recipients: Sequence[str] = (),
    ) -> Checkpoint:
        """Write a checkpoint, its files encrypted to the age recipients if there are any.

        Raises ConflictError if it exists and is not to be overwritten, StorageError if the disk won't take it.
        """
        check_name(checkpoint.name)
        place = self._checkpoint_folder(checkpoint.model_id, checkpoint.kind, checkpoint.name)
        if place.exists() and not overwrite:
            raise ConflictError(f"{checkpoint.path} exists: save under another name, or a state with overwrite=True")
        with self._draft() as draft:
            _write_adapter(draft, adapter, adapter_config)
            if optimizer is not None:
                save_file(dict(optimizer), draft / _OPTIMIZER_FILE)
            if recipients:
                exports.encrypt_files(draft, recipients)
            size = sum(file.stat().st_size for file in draft.iterdir())
            written = Checkpoint(**{**checkpoint.__dict__, "size_bytes": size})
            (draft / _MANIFEST_FILE).write_text(json.dumps(asdict(written)))
            _publish(draft, place)
        return written

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint at a tinker:// path.

        Raises InvalidRequestError if it is no such path, NotFoundError if there is nothing there or it has expired,
        StorageError if what is there is damaged.
        """
        model_id, kind, name = parse_path(path)
        found = self._read_checkpoint(self._checkpoint_folder(model_id, kind, name))
        if found is None:
            raise NotFoundError(f"there is no checkpoint {path} here")
        return found

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """Return all checkpoints of a run, or of all runs, the oldest first; damaged ones are left out."""
        if model_id is not None:
            self.run(model_id)
        runs = [model_id] if model_id is not None else [folder.name for folder in (self.root / "runs").iterdir()]
        found = []
        for run in runs:
            for kind in KINDS:
                folder = self._run_folder(run) / kind
                if folder.is_dir():
                    found += [self._whole_checkpoint(entry) for entry in folder.iterdir()]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.created)

    def update_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace a checkpoint's manifest."""
        place = self._checkpoint_folder(checkpoint.model_id, checkpoint.kind, checkpoint.name) / _MANIFEST_FILE
        _write_json(place, asdict(checkpoint))

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint; raises as `checkpoint` does."""
        found = self.checkpoint(path)
        self._discard(self._checkpoint_folder(found.model_id, found.kind, found.name))

    def adapter(self, path: str) -> dict[str, torch.Tensor]:
        """Return a checkpoint's adapter; raises as `checkpoint` does, and StorageError if its file is damaged."""
        found = self.checkpoint(path)
        return _read_tensors(self._checkpoint_folder(found.model_id, found.kind, found.name) / ADAPTER_FILE)

    def optimizer(self, path: str) -> dict[str, torch.Tensor]:
        """Return a training checkpoint's optimizer state; raises as `adapter` does."""
        found = self.checkpoint(path)
        return _read_tensors(self._checkpoint_folder(found.model_id, found.kind, found.name) / _OPTIMIZER_FILE)

    def adapter_files(self, path: str) -> list[Path]:
        """Return the files that hold a checkpoint's adapter as PEFT reads it; raises as `checkpoint` does."""
        found = self.checkpoint(path)
        folder = self._checkpoint_folder(found.model_id, found.kind, found.name)
        return sorted(file for file in folder.iterdir() if file.name.startswith((ADAPTER_FILE, ADAPTER_CONFIG_FILE)))

    def add_sampler(
        self, sampler: SamplerRecord, *, adapter: State | None = None, adapter_config: Mapping[str, Any] | None = None
    ) -> None:
        """Record a sampler, with the weights it has for itself if there are any."""
        with self._draft() as draft:
            if adapter is not None and adapter_config is not None:
                _write_adapter(draft, adapter, adapter_config)
            (draft / "sampler.json").write_text(json.dumps(asdict(sampler)))
            _publish(draft, self.root / "samplers" / _folder_name(sampler.sampler_id))

    def sampler(self, sampler_id: str) -> SamplerRecord:
        """Return a sampler; raises NotFoundError if there is none of that id."""
        record = _read_json(self.root / "samplers" / _folder_name(sampler_id) / "sampler.json")
        if record is None:
            raise NotFoundError(f"there is no sampler {sampler_id!r} here")
        lora = LoraSpec(**record["own_lora"]) if record["own_lora"] else None
        return SamplerRecord(**{**record, "own_lora": lora})

    def samplers(self) -> list[SamplerRecord]:
        """Return all samplers, the oldest first."""
        folders = [folder for folder in (self.root / "samplers").iterdir() if (folder / "sampler.json").is_file()]
        return sorted((self.sampler(folder.name) for folder in folders), key=lambda sampler: sampler.created)

    def sampler_adapter(self, sampler_id: str) -> dict[str, torch.Tensor]:
        """Return the weights a sampler has for itself; raises NotFoundError if they are gone."""
        return _read_tensors(self.root / "samplers" / _folder_name(sampler_id) / ADAPTER_FILE)

    def drop_sampler_adapter(self, sampler_id: str) -> None:
        """Delete the weights a sampler has for itself; its record stays, so that later requests can be told."""
        (self.root / "samplers" / _folder_name(sampler_id) / ADAPTER_FILE).unlink(missing_ok=True)

    def put_session(self, session: SessionRecord) -> None:
        """Record a session or what became of it."""
        _write_json(self.root / "sessions" / f"{_folder_name(session.session_id)}.json", asdict(session))

    def session(self, session_id: str) -> SessionRecord:
        """Return a session; raises NotFoundError if there is none of that id."""
        record = _read_json(self.root / "sessions" / f"{_folder_name(session_id)}.json")
        if record is None:
            raise NotFoundError(f"there is no session {session_id!r} here")
        return SessionRecord(**record)

    def sessions(self) -> list[SessionRecord]:
        """Return all sessions, the newest first."""
        found = [self.session(path.stem) for path in (self.root / "sessions").glob("*.json")]
        return sorted(found, key=lambda session: session.created, reverse=True)

    def _run_folder(self, model_id: str) -> Path:
        return self.root / "runs" / _folder_name(model_id)

    def _checkpoint_folder(self, model_id: str, kind: Kind, name: str) -> Path:
        return self._run_folder(model_id) / kind / _folder_name(name)

    def _whole_checkpoint(self, folder: Path) -> Checkpoint | None:
        try:
            return self._read_checkpoint(folder)
        except StorageError:
            return None

    def _read_checkpoint(self, folder: Path) -> Checkpoint | None:
        record = _read_json(folder / _MANIFEST_FILE)
        if record is None:
            return None
        found = Checkpoint(**{**record, "lora": LoraSpec(**record["lora"])})
        if found.expires is not None and found.expires <= now():
            self._discard(folder)
            return None
        return found

    def _discard(self, folder: Path) -> None:
        with self._draft() as draft:
            folder.rename(draft / "old")

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """Give a folder to write in; what is not renamed away by the end is removed."""
        draft = self._drafts / uuid.uuid4().hex
        try:
            draft.mkdir(parents=True)
            yield draft
        except (OSError, SafetensorError) as error:
            raise StorageError(f"the data folder can't be written: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _clear_unless_locked(drafts: Path) -> None:
    """Remove the drafts of a service, unless it lives: then it has them locked."""
    opened = os.open(drafts, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(drafts, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(opened)


def check_name(name: str) -> None:
    """Raise InvalidRequestError unless the name can be a checkpoint's."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} can't name a checkpoint: use letters, digits and . _ : - (200 at most, a letter or digit first)"
        )


def expiry(ttl_seconds: int | None) -> str | None:
    """Return the time that many seconds from now, as it is written to disk.

    Raises InvalidRequestError if that is not in the future, or more than ten years ahead.
    """
    if ttl_seconds is not None and not 0 < ttl_seconds <= _MOST_TTL_SECONDS:
        raise InvalidRequestError(f"ttl_seconds is {ttl_seconds}: it must be 1 to {_MOST_TTL_SECONDS} (ten years)")
    return None if ttl_seconds is None else (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


def _folder_name(identifier: str) -> str:
    """Return the id as a folder name; one that could lead elsewhere names nothing."""
    if not _NAME.fullmatch(identifier):
        raise NotFoundError(f"there is nothing called {identifier!r} here")
    return identifier


def _write_adapter(folder: Path, adapter: State, config: Mapping[str, Any]) -> None:
    save_file(dict(adapter), folder / ADAPTER_FILE, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))


def _write_json(place: Path, record: Mapping[str, Any]) -> None:
    draft = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(json.dumps(record))
        draft.replace(place)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StorageError(f"the data folder can't be written: {error}") from error


def _read_json(place: Path) -> dict[str, Any] | None:
    """Return a record; None if there is none. Raises StorageError if it can't be read."""
    try:
        record = json.loads(place.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{place.parent.name}/{place.name} can't be read: {error}") from error
    if not isinstance(record, dict):
        raise StorageError(f"{place.parent.name}/{place.name} holds no record")
    return record


def _publish(draft: Path, place: Path) -> None:
    """Rename a finished draft into its place, putting aside what is there; the files reach the disk first."""
    for file in draft.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        draft.rename(place)
        return
    if (place / "run.json").exists():
        raise ConflictError(f"{place.name!r} exists already")
    old = draft.with_name(f"{draft.name}-old")
    place.rename(old)
    draft.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"the weights of {file.parent.name!r} are not kept any more") from error
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file.parent.name}/{file.name} can't be read: {error}") from error
