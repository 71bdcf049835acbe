"""Samples for many requests at once: their prompts in packed rows, then one token for each of them per step.

Requests join and leave between steps. Requests on different weights take turns. A prompt is computed once for all its
samples and for all requests that wait with the same one, and starts from whatever beginning of it was computed lately.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tinker_local import scoring
from tinker_local.attention import DecodeLayout, Past, RowLayout
from tinker_local.choosing import choose, top
from tinker_local.errors import InvalidRequestError, ServiceError
from tinker_local.model import LanguageModel
from tinker_local.operations import Finished, Ints, Sample, SampleOutput, Sequence, TopLogprobs
from tinker_local.packing import Row, pack, side_by_side
from tinker_local.slots import PrefixCache, Slots

_PREFILL_TOKENS = 1024  # prompt tokens computed in one step before the running sequences go on
_SLOT_BYTES = 768 << 20  # keys and values of running sequences, above which requests wait: 36 of 450 tokens
_CACHE_BYTES = 256 << 20  # keys and values kept of sequences seen lately: 5,800 tokens of the default model
_STOP_WINDOW = 16  # tokens beyond a stop string's own length that are searched for it

Detokenize = Callable[[list[int]], str]


@dataclass
class _Job:
    """A request on its way; `unstarted` of its samples have no slot yet."""

    ticket: str
    request: Sample
    unstarted: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    scores: scoring.PromptScores | None = None
    cached_tokens: int = 0
    failed: bool = False


@dataclass
class _Running:
    """A sample in the making; it has the slot of the same index as itself in its lane."""

    job: _Job
    index: int
    dice: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


@dataclass
class _Lane:
    """The requests on one set of weights."""

    weights: str | None
    waiting: deque[_Job] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    slots: Slots = field(default_factory=Slots)


class Sampler:
    """Runs sample requests step by step. Not thread-safe: the thread that owns the model owns it."""

    def __init__(self, model: LanguageModel, detokenize: Detokenize) -> None:
        self._model = model
        self._detokenize = detokenize
        self._lanes: OrderedDict[str | None, _Lane] = OrderedDict()
        self._cache = PrefixCache(max_bytes=_CACHE_BYTES)
        self._finished: list[Finished] = []

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._lanes)

    def submit(self, ticket: str, request: Sample, weights: str | None) -> None:
        """Take in a request, to be sampled with the adapter `weights` (None: the base model).

        Raises InvalidRequestError if the request doesn't fit the model.
        """
        check(request, self._model)
        lane = self._lanes.setdefault(weights, _Lane(weights))
        lane.waiting.append(_Job(ticket, request, unstarted=request.num_samples))

    def cancel(self, ticket: str) -> None:
        """Drop a request and everything that was made for it."""
        for lane in list(self._lanes.values()):
            lane.waiting = deque(job for job in lane.waiting if job.ticket != ticket)
            for index in reversed(range(len(lane.running))):
                if lane.running[index].job.ticket == ticket:
                    self._leave(lane, index)
            self._close_if_idle(lane)

    def forget(self, weights: str | None) -> None:
        """Drop what is remembered of the weights' computations, because they changed or went."""
        self._cache.forget(str(weights))

    def uses(self, weights: str | None) -> bool:
        """Tell whether a request on these weights is waiting or running."""
        return weights in self._lanes

    def step(self) -> list[Finished]:
        """Start waiting requests of the next lane, give each of its sequences a token and return what got finished."""
        weights, lane = next(iter(self._lanes.items()))
        self._lanes.move_to_end(weights)
        try:
            with torch.inference_mode():
                self._model.activate(weights)
                self._start_waiting(lane)
                if lane.running:
                    self._decode(lane)
        except (RuntimeError, MemoryError) as error:
            self._fail_lane(lane, error)
        self._close_if_idle(lane)
        finished, self._finished = self._finished, []
        return finished

    def _close_if_idle(self, lane: _Lane) -> None:
        if not lane.waiting and not lane.running:
            self._lanes.pop(lane.weights, None)

    def _fail_lane(self, lane: _Lane, error: Exception) -> None:
        jobs = {job.ticket for job in lane.waiting} | {running.job.ticket for running in lane.running}
        message = f"sampling failed: {type(error).__name__}: {error}"
        self._finished += [Finished(ticket, ServiceError(message)) for ticket in sorted(jobs)]
        lane.waiting.clear()
        lane.running.clear()

    def _fail(self, job: _Job, message: str) -> None:
        if not job.failed:
            self._finished.append(Finished(job.ticket, InvalidRequestError(message)))
        job.failed = True

    def _start_waiting(self, lane: _Lane) -> None:
        """Compute the prompts of waiting requests, as far as this step's budget and the slots go."""
        batch: dict[bytes, list[tuple[_Job, int]]] = {}
        pasts: dict[bytes, Past] = {}
        budget, sequences = _PREFILL_TOKENS, len(lane.running)
        while lane.waiting:
            job = lane.waiting[0]
            if job.failed:
                lane.waiting.popleft()
                continue
            key = job.request.prompt.tobytes()
            room = self._room(lane, sequences, len(job.request.prompt))
            if not room or (batch and budget <= 0 and key not in batch):
                break
            if key not in batch or scoring.wants_scores(job.request):
                pasts[key] = () if scoring.wants_scores(job.request) else self._find(lane, job.request.prompt)
                budget -= len(job.request.prompt) - _length(pasts[key])
            count = min(room, job.unstarted)
            batch.setdefault(key, []).append((job, count))
            sequences += count
            if count < job.unstarted:
                break
            lane.waiting.popleft()
        self._prefill(lane, batch, pasts)

    def _find(self, lane: _Lane, prompt: Ints) -> Past:
        return self._cache.find(str(lane.weights), prompt)

    def _room(self, lane: _Lane, sequences: int, length: int) -> int:
        """Return how many sequences of this length can start now; always one where none is running."""
        token_bytes = self._model.token_bytes
        others = [other.slots for other in self._lanes.values() if other is not lane]
        used = sum(slots.store.numel() * 4 for slots in others)
        longest = max([length + 64, *lane.slots.lengths])
        return max((_SLOT_BYTES - used) // (longest * token_bytes) - sequences, 0 if sequences else 1)

    def _prefill(self, lane: _Lane, batch: dict[bytes, list[tuple[_Job, int]]], pasts: dict[bytes, Past]) -> None:
        fresh = [key for key in batch if not pasts[key]]
        for row in pack([_prompt(batch[key]) for key in fresh], budget=_PREFILL_TOKENS):
            starts = [batch[fresh[member]] for member in row.members]
            self._prefill_row(lane, row, [()] * len(row.segments), starts)
        known = [key for key in batch if pasts[key]]
        if known:
            lengths = [_length(pasts[key]) for key in known]
            rests = [_prompt(batch[key])[length:] for key, length in zip(known, lengths, strict=True)]
            row = side_by_side(rests, lengths)
            self._prefill_row(lane, row, [pasts[key] for key in known], [batch[key] for key in known])

    def _prefill_row(self, lane: _Lane, row: Row, pasts: list[Past], starts: list[list[tuple[_Job, int]]]) -> None:
        """Compute a row of prompts, after the past of each segment, and start the samples of each."""
        layout = RowLayout(row, self._model.device, pasts=pasts, capture=True)
        hidden = self._model.hidden(row.tokens, row.positions, layout)
        captured = torch.stack(layout.captured, dim=1)
        logits = self._model.logits(hidden[self._model.on_device(np.array([path[-1] for path in row.paths]))])
        for place, (path, jobs) in enumerate(zip(row.paths, starts, strict=True)):
            past = pasts[place] if any(pasts) else ()
            keys_values = torch.cat([*past, captured[:, :, :, self._model.on_device(path)]], dim=3)
            self._cache.add(str(lane.weights), _prompt(jobs), keys_values)
            for job, count in jobs:
                job.cached_tokens = _length(past)
                if scoring.wants_scores(job.request) and job.scores is None:
                    job.scores = scoring.score(self._model, job.request, hidden[self._model.on_device(path)])
                self._start(lane, job, count, logits[place], keys_values)

    def _start(self, lane: _Lane, job: _Job, count: int, logits: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Give `count` samples of the job their first token, and a slot to those that go on."""
        first = job.request.num_samples - job.unstarted
        job.unstarted -= count
        started = [_Running(job, index, _dice(job.request.params.seed, index)) for index in range(first, first + count)]
        self._extend(started, logits.expand(count, -1).clone())
        for running in started:
            if not self._settle(running):
                lane.running.append(running)
                lane.slots.add(keys_values)

    def _decode(self, lane: _Lane) -> None:
        """Give every running sequence its next token and let go of those that end with it."""
        lane.slots.grow()
        lengths = np.array(lane.slots.lengths, dtype=np.int64)
        tokens = np.array([running.tokens[-1] for running in lane.running], dtype=np.int64)
        layout = DecodeLayout(lane.slots.store, self._model.on_device(lengths))
        hidden = self._model.hidden(tokens, lengths, layout)
        lane.slots.lengths = [length + 1 for length in lane.slots.lengths]
        self._extend(lane.running, self._model.logits(hidden))
        for index in reversed(range(len(lane.running))):
            if self._settle(lane.running[index]):
                self._remember(lane, index)
                self._leave(lane, index)

    def _extend(self, sequences: list[_Running], logits: torch.Tensor) -> None:
        chosen = choose(
            logits, [running.job.request.params for running in sequences], [running.dice for running in sequences]
        )
        for place, running in enumerate(sequences):
            running.tokens.append(int(chosen.tokens[place]))
            running.logprobs.append(float(chosen.logprobs[place]))
            if running.job.request.topk_sample:
                running.top.append(top(logits[place : place + 1], running.job.request.topk_sample))

    def _settle(self, running: _Running) -> bool:
        """Hand the sequence to its job and return True if its last token ended it."""
        request, job = running.job.request, running.job
        if not np.isfinite(running.logprobs[-1]):
            self._fail(job, "the sampler's weights give log-probabilities that are not finite")
        if job.failed:
            return True
        stopped = self._stopped(running)
        limit = self._model.context_length - len(request.prompt)
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens)
        if not stopped and len(running.tokens) < limit:
            return False
        job.sequences[running.index] = _sequence(running, stopped=stopped)
        if len(job.sequences) == request.num_samples:
            self._finished.append(Finished(job.ticket, _output(job)))
        return True

    def _stopped(self, running: _Running) -> bool:
        params = running.job.request.params
        stops = self._model.stop_ids if params.stop_tokens is None else params.stop_tokens
        if running.tokens[-1] in stops:
            return True
        if not params.stop_strings:
            return False
        window = max(len(text.encode()) for text in params.stop_strings) + _STOP_WINDOW
        text = self._detokenize(running.tokens[-window:])
        return any(stop in text for stop in params.stop_strings)

    def _remember(self, lane: _Lane, index: int) -> None:
        running = lane.running[index]
        known = np.concatenate([running.job.request.prompt, np.array(running.tokens[:-1], dtype=np.int64)])
        self._cache.add(str(lane.weights), known, lane.slots.read(index))

    def _leave(self, lane: _Lane, index: int) -> None:
        lane.slots.remove(index)
        last = lane.running.pop()
        if index < len(lane.running):
            lane.running[index] = last


def check(request: Sample, model: LanguageModel) -> None:
    """Raise InvalidRequestError unless the request fits the model."""
    params, length = request.params, len(request.prompt)
    if length == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token")
    if request.prompt.min() < 0 or request.prompt.max() >= model.vocabulary:
        raise InvalidRequestError(f"the prompt holds an id outside 0 to {model.vocabulary - 1} of {model.name!r}")
    wanted = length + (params.max_tokens if params.max_tokens is not None else 1)
    if wanted > model.context_length:
        raise InvalidRequestError(
            f"Prompt length plus max_tokens exceeds the model's context window: {length} + {wanted - length} "
            f"> {model.context_length}"
        )
    if request.num_samples < 1:
        raise InvalidRequestError(f"num_samples is {request.num_samples}: it must be 1 or more")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {params.max_tokens}: it must be 1 or more")
    if not params.temperature >= 0:
        raise InvalidRequestError(f"temperature is {params.temperature}: it must be 0 or more")
    if not 0 < params.top_p <= 1:
        raise InvalidRequestError(f"top_p is {params.top_p}: it must be above 0 and at most 1")
    scoring.check(request, model)


def _prompt(starts: list[tuple[_Job, int]]) -> Ints:
    return starts[0][0].request.prompt


def _length(past: Past) -> int:
    return sum(part.shape[3] for part in past)


def _dice(seed: int | None, index: int) -> np.random.Generator:
    return np.random.default_rng(None if seed is None else [seed % (1 << 63), index])


def _sequence(running: _Running, *, stopped: bool) -> Sequence:
    tops = running.top
    return Sequence(
        np.array(running.tokens, dtype=np.int64),
        np.array(running.logprobs, dtype=np.float32),
        stopped,
        TopLogprobs(np.concatenate([t.token_ids for t in tops]), np.concatenate([t.logprobs for t in tops]))
        if tops
        else None,
    )


def _output(job: _Job) -> SampleOutput:
    sequences = tuple(job.sequences[index] for index in range(job.request.num_samples))
    scores = job.scores or scoring.PromptScores(None, None, None, None)
    return SampleOutput(
        sequences,
        job.cached_tokens,
        scores.logprobs,
        scores.top,
        scores.targets,
        job.request.target_layout,
        scores.alternatives,
    )
