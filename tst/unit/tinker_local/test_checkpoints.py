"""The data folder: what comes back, what survives a kill, and what damage does."""

import os
from pathlib import Path

import pytest
import torch

from tinker_local.checkpoints import (
    Checkpoint,
    Run,
    SamplerRecord,
    SessionRecord,
    Store,
    check_name,
    expiry,
    now,
    parse_path,
)
from tinker_local.errors import ConflictError, InvalidRequestError, NotFoundError, StartupError, StorageError
from tinker_local.operations import LoraSpec

SPEC = LoraSpec(rank=2, seed=1)
ADAPTER = {"a": torch.arange(4.0)}
PATH = "tinker://run/weights/first"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with one run."""
    store = Store(tmp_path)
    store.add_run(Run("run", "session", "tiny", SPEC, now()))
    return store


def save(store: Store, name: str = "first", **options) -> Checkpoint:
    checkpoint = Checkpoint("run", "weights", name, "tiny", SPEC, now())
    return store.save(checkpoint, adapter=ADAPTER, adapter_config={"r": 2}, optimizer={"m": torch.ones(2)}, **options)


def test_what_was_saved_is_there_in_another_store(store):
    """A restart finds runs, checkpoints, samplers and sessions as they were."""
    saved = save(store)
    store.add_sampler(SamplerRecord("s", "session", "tiny", own_lora=SPEC), adapter=ADAPTER, adapter_config={})
    store.put_session(SessionRecord("session", now(), {"who": "me"}))
    again = Store(store.root)
    assert (again.run("run"), again.checkpoints()) == (store.run("run"), [saved])
    assert (again.sampler("s"), again.session("session")) == (store.sampler("s"), store.session("session"))
    assert again.adapter(PATH)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert again.sampler_adapter("s")["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert again.optimizer(PATH)["m"].tolist() == [1.0, 1.0]


def test_drafts_of_a_killed_service_are_cleared(store):
    """What was half-written is nobody's checkpoint and goes at the next start."""
    draft = store.root / "drafts" / "half"
    draft.mkdir()
    (draft / "adapter_model.safetensors").write_bytes(b"half")
    assert Store(store.root).checkpoints("run") == []
    assert not draft.exists()


def test_a_service_that_starts_leaves_the_drafts_of_one_that_runs(store):
    """Several services can share a data folder: none clears what another is writing."""
    [drafts] = (store.root / "drafts").iterdir()
    (drafts / "half").mkdir()
    Store(store.root)
    assert (drafts / "half").exists()


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"name": '], ids=["empty", "open", "list", "cut"])
def test_a_damaged_manifest_is_told_and_hides_nothing_else(store, manifest):
    """The damaged checkpoint is an error by its path; the list has the whole ones."""
    save(store)
    other = save(store, "other")
    (store.root / "runs" / "run" / "weights" / "first" / "manifest.json").write_text(manifest)
    with pytest.raises(StorageError, match=r"first/manifest\.json"):
        store.checkpoint(PATH)
    assert store.checkpoints("run") == [other]


@pytest.mark.parametrize("kept", [0, 10], ids=["empty", "cut"])
def test_damaged_weights_are_told(store, kept):
    """A weights file that lost its end is an error, never other weights."""
    save(store)
    file = store.root / "runs" / "run" / "weights" / "first" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(StorageError, match=r"first/adapter_model\.safetensors can't be read"):
        store.adapter(PATH)


def test_a_failed_save_leaves_what_was_there(store, monkeypatch):
    """When the disk takes no more, the checkpoint of before is whole and no draft is left."""
    saved = save(store)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"the data folder can't be written: .*No space left on device"):
        save(store, overwrite=True)
    assert store.checkpoints("run") == [saved]
    assert store.adapter(PATH)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [list(drafts.iterdir()) for drafts in (store.root / "drafts").iterdir()] == [[]]


def test_a_name_that_is_taken_needs_overwrite(store):
    """A second save under the name fails unless it says overwrite."""
    save(store)
    with pytest.raises(ConflictError, match=f"{PATH} exists"):
        save(store)
    assert save(store, overwrite=True).path == PATH


def test_an_expired_checkpoint_is_gone(store):
    """Once its time has come it is neither listed nor found."""
    store.update_checkpoint(Checkpoint(**{**save(store).__dict__, "expires": now()}))
    assert store.checkpoints("run") == []
    with pytest.raises(NotFoundError, match=PATH):
        store.checkpoint(PATH)


@pytest.mark.parametrize("identifier", ["..", ".", "", "a/b", "../runs/run", "/etc", "a\0b", "\n"])
def test_no_id_leads_out_of_the_folder(store, identifier):
    """An id that is no plain name names nothing."""
    for find in (store.run, store.sampler, store.session):
        with pytest.raises(NotFoundError):
            find(identifier)


@pytest.mark.parametrize(
    "path", ["", "run", "tinker://run/weights", "tinker://run/other/x", "tinker://run/weights/x/y"]
)
def test_a_path_of_another_form_is_refused(path):
    """A checkpoint's path has a run, a kind and a name."""
    with pytest.raises(InvalidRequestError, match="KIND one of weights, sampler_weights, external_weights"):
        parse_path(path)


@pytest.mark.parametrize("name", ["", ".hidden", "a b", "x" * 201, "é"])
def test_a_name_that_is_none_is_refused(name):
    """Names are what any file system takes."""
    with pytest.raises(InvalidRequestError, match="can't name a checkpoint"):
        check_name(name)


@pytest.mark.parametrize("seconds", [0, -1, 10**12])
def test_a_time_to_live_that_is_none_is_refused(seconds):
    """It must lie ahead, and not beyond ten years."""
    with pytest.raises(InvalidRequestError, match=f"ttl_seconds is {seconds}"):
        expiry(seconds)


def test_a_folder_that_is_a_file_is_told(tmp_path):
    """A store that can't be opened says which folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="file' can't be used"):
        Store(tmp_path / "file")
