"""Chooses next tokens from logits, and reads log-probabilities off them."""

from dataclasses import dataclass

import numpy as np
import torch

from tinker_local.operations import Floats, Ints, SamplingParams, TopLogprobs

_EMPTY_LOGPROB = -99999.0  # what the wire format has for a position without top tokens
_BLOCK = 256


@dataclass(frozen=True)
class Chosen:
    """The tokens [B] chosen and the model's log-probabilities of them, at temperature 1 and without top-k or top-p."""

    tokens: Ints
    logprobs: Floats


def choose(logits: torch.Tensor, params: list[SamplingParams], dice: list[np.random.Generator]) -> Chosen:
    """Choose a token for each row of logits [B, V], each row by its own parameters and its own random numbers."""
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    greedy = torch.tensor([param.temperature == 0 for param in params], device=logits.device)
    if greedy.any():
        tokens[greedy] = logits[greedy].argmax(dim=-1)
    drawn = [index for index, param in enumerate(params) if param.temperature != 0]
    if drawn:
        temperatures = torch.tensor([[params[index].temperature] for index in drawn], device=logits.device)
        scaled = (logits[drawn] if len(drawn) < len(params) else logits) / temperatures
        for place, index in enumerate(drawn):
            _restrict(scaled[place], params[index])
        points = torch.tensor([dice[index].random() for index in drawn], device=logits.device)
        tokens[torch.tensor(drawn, device=logits.device)] = draw(scaled, points)
    return Chosen(tokens.cpu().numpy(), logprobs_of(logits, tokens).cpu().numpy())


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the token at the point `uniform` [B] of each row's cumulative distribution, logits [B, V].

    The sum runs over blocks first and then inside one block, in float64, so the point is found exactly and cheaply.
    """
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    blocks = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    point = uniform.double()[:, None] * blocks[:, -1:]
    block = torch.searchsorted(blocks, point, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = padded[torch.arange(len(padded), device=padded.device), block[:, 0]].double().cumsum(dim=-1)
    offset = torch.searchsorted(inside, point - before, right=True).clamp_(max=_BLOCK - 1)
    token = (block * _BLOCK + offset)[:, 0]
    # Rounding can leave the point on a token of weight zero behind the last real one: take the likeliest instead.
    valid = (token < weights.shape[1]) & (weights.gather(1, token.clamp(max=weights.shape[1] - 1)[:, None])[:, 0] > 0)
    return torch.where(valid, token, logits.argmax(dim=-1))


def _restrict(logits: torch.Tensor, params: SamplingParams) -> None:
    """Rule out, in place, what top_k and top_p of this row exclude."""
    if 0 < params.top_k < len(logits):
        logits[logits < torch.topk(logits, params.top_k).values[-1]] = float("-inf")
    if params.top_p < 1:
        ordered, order = torch.sort(logits, descending=True)
        mass = torch.softmax(ordered, dim=-1)
        outside = mass.cumsum(dim=-1) - mass >= params.top_p  # the token that crosses top_p still counts
        outside[0] = False
        logits[order[outside]] = float("-inf")


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return log p(token) for each row of logits [N, V] and its token [N]."""
    return logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)


def top(logits: torch.Tensor, count: int) -> TopLogprobs:
    """Return the `count` likeliest tokens of each row of logits [N, V]."""
    values, tokens = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
    found = values - torch.logsumexp(logits, dim=-1, keepdim=True)
    return TopLogprobs(tokens.cpu().numpy().astype(np.int32), found.cpu().numpy())


def empty_top(length: int, count: int) -> TopLogprobs:
    """Return `length` positions that hold no top tokens."""
    return TopLogprobs(np.zeros((length, count), np.int32), np.full((length, count), _EMPTY_LOGPROB, dtype=np.float32))
