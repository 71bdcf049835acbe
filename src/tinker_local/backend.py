"""Carries out operations on the model: which adapter belongs to which run or sampler, and what goes to disk."""

from collections import OrderedDict
from collections.abc import Generator

from tinker_local import memory, training
from tinker_local.checkpoints import Checkpoint, Kind, Run, SamplerRecord, Store, expiry, now, parse_path
from tinker_local.errors import GoneError, InvalidRequestError, NotFoundError
from tinker_local.model import LanguageModel, State
from tinker_local.operations import (
    CreateModel,
    Finished,
    ForwardBackward,
    Loaded,
    LoadState,
    LoraSpec,
    ModelCreated,
    ModelUnloaded,
    OptimStep,
    Result,
    Sample,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveState,
    Training,
    UnloadModel,
)
from tinker_local.sampling import Detokenize, Sampler
from tinker_local.training import TrainingModel

_SAMPLERS_IN_MEMORY = 4
_OWN_WEIGHTS_KEPT = 16  # snapshots of one session that were saved for a sampler alone; older ones go


class ModelBackend:
    """The model, its runs and its samplers. Not thread-safe: the worker's thread owns it."""

    def __init__(self, model: LanguageModel, store: Store, detokenize: Detokenize) -> None:
        self._model = model
        self._store = store
        self._runs: dict[str, TrainingModel] = {}
        self._sampler = Sampler(model, detokenize)
        self._loaded: OrderedDict[str, None] = OrderedDict()  # sampler adapters in memory, the latest used last

    @property
    def sampling(self) -> bool:
        """Whether a sampling step has anything to do."""
        return self._sampler.busy

    def run(self, operation: Training) -> Generator[None, None, Result]:
        """Carry out one operation, pausing where others may have the model for a while.

        Raises ServiceError, with a message for the client, if it can't be done.
        """
        if isinstance(operation, ForwardBackward):
            try:
                return (yield from training.forward_backward(self._model, self._run(operation.model_id), operation))
            finally:
                memory.trim()
        return self._run_at_once(operation)

    def _run_at_once(
        self, operation: CreateModel | UnloadModel | OptimStep | SaveState | LoadState | SaveForSampler | SaveExternal
    ) -> Result:
        match operation:
            case CreateModel():
                return self._create(operation)
            case UnloadModel():
                return self._unload(operation)
            case OptimStep():
                return training.optim_step(self._model, self._run(operation.model_id), operation)
            case SaveState():
                return self._save_state(operation)
            case LoadState():
                return self._load_state(operation)
            case SaveForSampler():
                return self._save_for_sampler(operation)
            case SaveExternal():
                return self._save_external(operation)

    def sample(self, ticket: str, request: Sample) -> None:
        """Take in a sample request.

        Raises ServiceError if its sampler is not there or it doesn't fit the model.
        """
        self._sampler.submit(ticket, request, self._weights_of(request.sampler_id))

    def cancel(self, ticket: str) -> None:
        """Drop a sample request."""
        self._sampler.cancel(ticket)

    def step(self) -> list[Finished]:
        """Give every sample in the making its next token and return what got finished."""
        return self._sampler.step()

    def _run(self, model_id: str) -> TrainingModel:
        if model_id in self._runs:
            return self._runs[model_id]
        self._store.run(model_id)
        states = [entry.path for entry in self._store.checkpoints(model_id) if entry.kind == "weights"]
        hint = f"; go on from its last checkpoint {states[-1]}" if states else " and it has no checkpoint"
        raise GoneError(f"training run {model_id!r} is not in memory: the service was restarted or unloaded it{hint}")

    def _create(self, operation: CreateModel) -> ModelCreated:
        if operation.model_id not in self._runs:
            self._runs[operation.model_id] = training.start(self._model, operation.model_id, operation.lora)
            self._store.add_run(
                Run(
                    operation.model_id,
                    operation.session_id,
                    operation.base_model,
                    operation.lora,
                    now(),
                    operation.user_metadata,
                )
            )
        return ModelCreated(operation.model_id)

    def _unload(self, operation: UnloadModel) -> ModelUnloaded:
        if self._runs.pop(operation.model_id, None) is not None:
            self._model.remove_adapter(operation.model_id)
        return ModelUnloaded(operation.model_id)

    def _save_state(self, operation: SaveState) -> Saved:
        run = self._run(operation.model_id)
        saved = self._store.save(
            self._new_checkpoint(run, "weights", operation.name, operation),
            adapter=self._model.state(run.model_id),
            adapter_config=self._model.adapter_config(run.spec),
            optimizer=training.optimizer_state(self._model, run),
            overwrite=operation.overwrite,
        )
        return Saved("save_weights", path=saved.path)

    def _new_checkpoint(
        self, run: TrainingModel, kind: Kind, name: str, operation: SaveState | SaveForSampler | SaveExternal
    ) -> Checkpoint:
        return Checkpoint(
            model_id=run.model_id,
            kind=kind,
            name=name,
            base_model=self._model.name,
            lora=run.spec,
            created=now(),
            expires=expiry(operation.ttl_seconds),
            user_metadata=None if isinstance(operation, SaveExternal) else operation.user_metadata,
        )

    def _save_external(self, operation: SaveExternal) -> Saved:
        run = self._run(operation.model_id)
        saved = self._store.save(
            self._new_checkpoint(run, "external_weights", operation.name, operation),
            adapter=self._model.state(run.model_id),
            adapter_config=self._model.adapter_config(run.spec),
            recipients=operation.recipients,
        )
        return Saved("save_weights_external", path=saved.path)

    def _load_state(self, operation: LoadState) -> Loaded:
        _, kind, _ = parse_path(operation.path)
        if kind != "weights":
            raise InvalidRequestError(
                f"{operation.path} holds no training state: load a training checkpoint (tinker://RUN/weights/NAME)"
            )
        adapter = self._store.adapter(operation.path)
        optimizer = self._store.optimizer(operation.path) if operation.with_optimizer else {}
        if operation.create is not None:
            self._create(operation.create)
        run = self._run(operation.model_id)
        self._model.load_state(run.model_id, adapter)
        training.load_optimizer_state(self._model, run, optimizer)
        return Loaded(run.model_id, operation.path)

    def _save_for_sampler(self, operation: SaveForSampler) -> Saved:
        run = self._run(operation.model_id)
        adapter, config = self._model.state(run.model_id), self._model.adapter_config(run.spec)
        if operation.name is not None:
            checkpoint = self._new_checkpoint(run, "sampler_weights", operation.name, operation)
            saved = self._store.save(checkpoint, adapter=adapter, adapter_config=config, overwrite=True)
            return Saved("save_weights_for_sampler", path=saved.path)
        if operation.sampler_id is None:
            raise InvalidRequestError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        session = self._store.run(run.model_id).session_id
        record = SamplerRecord(operation.sampler_id, session, self._model.name, None, run.spec, now())
        self._store.add_sampler(record, adapter=adapter, adapter_config=config)
        self._drop_old_weights(session)
        return Saved("save_weights_for_sampler", sampler_id=operation.sampler_id)

    def _drop_old_weights(self, session_id: str) -> None:
        own = [entry for entry in self._store.samplers() if entry.session_id == session_id and entry.own_lora]
        for sampler in own[:-_OWN_WEIGHTS_KEPT]:
            self._store.drop_sampler_adapter(sampler.sampler_id)

    def _weights_of(self, sampler_id: str) -> str | None:
        """Return the name of the sampler's adapter, after making sure that it is in memory.

        Raises ServiceError if it can't be had: the base model never stands in for it.
        """
        sampler = self._store.sampler(sampler_id)
        if sampler.model_path is None and sampler.own_lora is None:
            return None
        # A checkpoint saved again under its name is other weights, while requests on the old ones may still run.
        path = sampler.model_path
        name = sampler.sampler_id if path is None else f"{path} of {self._store.checkpoint(path).created}"
        if name not in self._loaded:
            state, spec = self._read_weights(sampler)
            self._make_room()
            self._model.add_adapter(name, spec, trainable=False)
            self._model.load_state(name, state)
        self._loaded[name] = None
        self._loaded.move_to_end(name)
        return name

    def _read_weights(self, sampler: SamplerRecord) -> tuple[State, LoraSpec]:
        if sampler.model_path is not None:
            return self._store.adapter(sampler.model_path), self._store.checkpoint(sampler.model_path).lora
        if sampler.own_lora is None:
            raise NotFoundError(f"sampler {sampler.sampler_id!r} has no weights")
        try:
            return self._store.sampler_adapter(sampler.sampler_id), sampler.own_lora
        except NotFoundError as error:
            raise GoneError(
                f"the weights of sampler {sampler.sampler_id!r} are gone: only the last {_OWN_WEIGHTS_KEPT} of a "
                "session are kept; save weights under a name to keep them"
            ) from error

    def _make_room(self) -> None:
        idle = [name for name in self._loaded if not self._sampler.uses(name)]
        for name in idle[: max(0, len(self._loaded) - _SAMPLERS_IN_MEMORY + 1)]:
            del self._loaded[name]
            self._sampler.forget(name)
            self._model.remove_adapter(name)
