"""What a sample request can ask about its prompt: log-probabilities, top tokens, chosen tokens, alternatives."""

from dataclasses import dataclass

import numpy as np
import torch

from tinker_local.choosing import draw, empty_top, logprobs_of, top
from tinker_local.errors import InvalidRequestError
from tinker_local.model import LanguageModel
from tinker_local.operations import Floats, Ints, Sample, TopLogprobs

_POSITIONS = 256  # positions that go through the output head at once
_MOST_ALTERNATIVES = 256


@dataclass
class PromptScores:
    """The prompt's part of a SampleOutput, filled position by position."""

    logprobs: Floats | None
    top: TopLogprobs | None
    targets: Floats | None
    alternatives: tuple[Ints, Floats] | None


def wants_scores(request: Sample) -> bool:
    """Tell whether the request asks about its prompt at all."""
    return bool(
        request.prompt_logprobs or request.topk_prompt or request.target_tokens is not None or request.alternatives
    )


def check(request: Sample, model: LanguageModel) -> None:
    """Raise InvalidRequestError unless what is asked about the prompt fits it."""
    length = len(request.prompt)
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last <= length - 1):
        raise InvalidRequestError(
            f"prompt_logprobs_last_n is {last}: it needs prompt_logprobs and must be 1 to {length - 1} for this prompt"
        )
    if min(request.topk_prompt, request.topk_sample, request.alternatives) < 0:
        raise InvalidRequestError(
            "topk_prompt_logprobs, topk_sample_logprobs and prompt_alt_tokens_k must be 0 or more"
        )
    if request.alternatives > _MOST_ALTERNATIVES:
        raise InvalidRequestError(f"prompt_alt_tokens_k is {request.alternatives}: at most {_MOST_ALTERNATIVES}")
    targets = request.target_tokens
    if targets is not None:
        if targets.ndim != 2 or len(targets) != length - 1:
            raise InvalidRequestError(
                f"target_prompt_logprobs has shape {list(targets.shape)}: it must be [{length - 1}, K] for this prompt"
            )
        if targets.size and (targets.min() < -1 or targets.max() >= model.vocabulary):
            raise InvalidRequestError(f"target_prompt_logprobs holds an id outside -1 to {model.vocabulary - 1}")


def score(model: LanguageModel, request: Sample, hidden: torch.Tensor) -> PromptScores:
    """Answer what the request asks about its prompt, from the prompt's hidden states [len(prompt), H]."""
    length = len(request.prompt)
    scores = _blank(request, model.vocabulary)
    dice = np.random.default_rng(None if request.params.seed is None else abs(request.params.seed))
    asks_all = request.target_tokens is not None or request.alternatives
    first = 0 if asks_all or request.prompt_logprobs_last_n is None else length - 1 - request.prompt_logprobs_last_n
    for start in range(first, length - 1, _POSITIONS):
        stop = min(start + _POSITIONS, length - 1)
        _score_span(request, model.logits(hidden[start:stop]), slice(start, stop), scores, dice)
    return scores


def _blank(request: Sample, vocabulary: int) -> PromptScores:
    length, targets = len(request.prompt), request.target_tokens
    shape = (length - 1, request.alternatives)
    return PromptScores(
        np.full(length, np.nan, np.float32) if request.prompt_logprobs else None,
        empty_top(length, min(request.topk_prompt, vocabulary)) if request.topk_prompt else None,
        np.zeros(targets.shape, np.float32) if targets is not None else None,
        (np.zeros(shape, np.int64), np.zeros(shape, np.float32)) if request.alternatives else None,
    )


def _score_span(
    request: Sample, logits: torch.Tensor, span: slice, scores: PromptScores, dice: np.random.Generator
) -> None:
    """Fill in the positions whose tokens these logits predict: the ones behind the span."""
    predicted = slice(span.start + 1, span.stop + 1)
    last = request.prompt_logprobs_last_n
    if last is None or span.start >= len(request.prompt) - 1 - last:
        skipped = 0
    else:
        skipped = min(len(request.prompt) - 1 - last - span.start, len(logits))
    asked = slice(predicted.start + skipped, predicted.stop)
    if scores.logprobs is not None:
        tokens = torch.from_numpy(request.prompt[asked]).to(logits.device)
        scores.logprobs[asked] = logprobs_of(logits[skipped:], tokens).cpu().numpy()
    if scores.top is not None and skipped < len(logits):
        found = top(logits[skipped:], request.topk_prompt)
        scores.top.token_ids[asked], scores.top.logprobs[asked] = found.token_ids, found.logprobs
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    if scores.targets is not None and request.target_tokens is not None:
        wanted = torch.from_numpy(request.target_tokens[span]).to(logits.device)
        values = logits.gather(1, wanted.clamp(min=0)) - normalizer
        scores.targets[span] = torch.where(wanted >= 0, values, 0.0).cpu().numpy()
    if scores.alternatives is not None:
        drawn = _draws(logits, request, dice)
        scores.alternatives[0][span] = drawn.cpu().numpy()
        scores.alternatives[1][span] = (logits.gather(1, drawn) - normalizer).cpu().numpy()


def _draws(logits: torch.Tensor, request: Sample, dice: np.random.Generator) -> torch.Tensor:
    if request.params.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True).expand(-1, request.alternatives)
    scaled = logits / request.params.temperature
    points = [torch.from_numpy(dice.random(len(logits))).to(logits.device) for _ in range(request.alternatives)]
    columns = [draw(scaled, uniform) for uniform in points]
    return torch.stack(columns, dim=1)
