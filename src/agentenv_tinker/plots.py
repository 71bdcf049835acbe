"""Draws the plots of a training run's report, as SVG for a page."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agentenv_tinker.evaluation import clustered_error
from agentenv_tinker.history import History, Step
from agentenv_tinker.phases import PHASES

_STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.axisbelow": True,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "text.color": "#1f2937",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
}
_WIDE, _NARROW = (9.6, 3.6), (4.8, 2.9)  # inches
_BLUE, _ORANGE, _GREEN, _RED, _VIOLET, _GREY = "#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#9ca3af"
_COLORS = (_BLUE, _ORANGE, _GREEN, _RED, _VIOLET, "#0891b2", "#be185d", "#4d7c0f")
_PHASE_COLORS = dict(zip(PHASES, (_BLUE, _VIOLET, _GREEN, _ORANGE, _GREY), strict=True))


@dataclass(frozen=True)
class Plot:
    """A plot of the page."""

    title: str
    caption: str
    """What is drawn, in a sentence."""
    svg: str
    wide: bool = False


def plots(history: History) -> Iterator[Plot]:
    """Every plot that `history` has anything for. Blocks."""
    if history.evaluations or history.steps:
        yield _plot(
            "Reward",
            "The mean reward of a step's rollouts, in a band of one standard error with the group as the unit; and of "
            "each held-out evaluation, with its standard error. The two are sampled at their own temperatures.",
            lambda axes: _reward(axes, history),
            wide=True,
        )
    if history.warm_start:
        yield _plot(
            "Warm start",
            "The loss of the supervised steps, per token that was trained on.",
            lambda axes: _line(axes, [each["train_mean_nll"] for each in history.warm_start], "loss", _BLUE),
        )
    if history.steps:
        yield from _step_plots(history.steps)


def _step_plots(steps: Sequence[Step]) -> Iterator[Plot]:
    scores = _series(steps, "env/all/score/")
    if len(scores) > 1:
        yield _plot("Score steps", "The mean score of each scoring step.", lambda axes: _lines(axes, scores))
    yield _plot(
        "Rates",
        "The share of rollouts that were cut, that hold a call which can't be parsed, and that hold an error of a tool;"
        " and of those that were to be played, the share that failed and was not trained on.",
        lambda axes: _lines(axes, _rates(steps), share=True),
    )
    yield _plot(
        "KL of sampler and trainer",
        "Between the policy that sampled and the one that trains, on the sampled tokens (the cookbook's second "
        "estimate). On-policy it is numerical noise.",
        lambda axes: _line(axes, _values(steps, "optim/kl_sample_train_v2"), "KL", _RED),
    )
    yield _plot(
        "Entropy",
        "Of the sampled tokens: how undecided the policy still is.",
        lambda axes: _line(axes, _values(steps, "optim/entropy"), "nats per token", _VIOLET),
    )
    yield _plot(
        "Gradient",
        "The norm of the gradient, before any clipping.",
        lambda axes: _line(axes, _values(steps, "unclipped_grad_l2:mean"), "L2 norm", _GREEN),
    )
    yield _plot(
        "Tokens",
        "The tokens that a rollout sampled, and the calls and messages it made.",
        lambda axes: _tokens(axes, steps),
    )
    if any(step.phases for step in steps):
        yield _plot(
            "Time",
            "Where each step's wall time went. A moment in which anything trains is training; else, in which anything "
            "is sampled, sampling; else, in which an environment works, env: what waits for an environment alone.",
            lambda axes: _time(axes, steps),
        )


def _plot(title: str, caption: str, draw: Callable[[Axes], None], *, wide: bool = False) -> Plot:
    with matplotlib.rc_context(dict(_STYLE)):
        figure = Figure(figsize=_WIDE if wide else _NARROW, layout="constrained")
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        draw(axes)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    svg = drawn.getvalue()
    return Plot(title, caption, svg[svg.index("<svg") :], wide)  # without the head of a file of its own


def _reward(axes: Axes, history: History) -> None:
    axes.set_xlabel("training steps made")
    trained = [step for step in history.steps if step.rollouts]
    if trained:
        at = [step.number for step in trained]
        means = [math.fsum(map(math.fsum, step.groups)) / len(step.rollouts) for step in trained]
        errors = [clustered_error(step.groups) or 0.0 for step in trained]
        axes.plot(at, means, color=_BLUE, label="training rollouts")
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=_BLUE, alpha=0.15, linewidth=0)
    base = next((each for each in history.evaluations if each.label == "base"), None)
    if base is not None:
        axes.axhline(base.mean, color=_GREY, linestyle="--", label=f"held out, the base model: {base.mean:.3f}")
    held = [each for each in history.evaluations if each.label != "base" and each.step is not None]
    if held:
        steps, means = [each.step or 0 for each in held], [each.mean for each in held]
        errors = [each.standard_error or 0.0 for each in held]
        axes.errorbar(steps, means, yerr=errors, color=_ORANGE, fmt="o-", capsize=4, label="held out")
        for step, mean in zip(steps, means, strict=True):
            axes.annotate(f"{mean:.3f}", (step, mean), textcoords="offset points", xytext=(0, 10), ha="center")
    axes.margins(y=0.18)
    axes.legend(loc="best")


def _line(axes: Axes, values: Sequence[float], label: str, color: str) -> None:
    axes.plot(_numbers(values), values, color=color, marker="." if len(values) < 3 else "")
    axes.set_ylabel(label)


def _lines(axes: Axes, series: Mapping[str, Sequence[float]], *, share: bool = False) -> None:
    for (name, values), color in zip(series.items(), _COLORS * (1 + len(series) // len(_COLORS)), strict=False):
        axes.plot(_numbers(values), values, label=name, color=color, marker="." if len(values) < 3 else "")
    if share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(loc="best", fontsize=8)


def _tokens(axes: Axes, steps: Sequence[Step]) -> None:
    sampled = [_mean([each.amounts["sampled_tokens"] for each in step.rollouts]) for step in steps]
    axes.plot(_numbers(steps), sampled, color=_BLUE, label="tokens")
    axes.set_ylabel("tokens")
    counts = axes.twinx()
    counts.grid(visible=False)
    for name, color in (("messages", _ORANGE), ("tool_calls", _GREEN)):
        means = [_mean([each.amounts[name] for each in step.rollouts]) for step in steps]
        counts.plot(_numbers(steps), means, color=color, label=name.replace("_", " "))
    counts.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)
    handles = [*axes.get_lines(), *counts.get_lines()]
    axes.legend(handles, [str(each.get_label()) for each in handles], loc="lower left", fontsize=8)


def _time(axes: Axes, steps: Sequence[Step]) -> None:
    bottom = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [step.phases.get(phase, 0.0) for step in steps]
        if any(seconds):
            axes.bar(_numbers(steps), seconds, bottom=bottom, width=0.9, label=phase, color=_PHASE_COLORS[phase])
            bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    axes.set_ylabel("seconds")
    axes.legend(loc="best", fontsize=8)


def _rates(steps: Sequence[Step]) -> dict[str, list[float]]:
    rates = {
        name.replace("_", " "): [_mean([float(each.flags[name]) for each in step.rollouts]) for step in steps]
        for name in ("cut", "parse_error", "tool_error")
    }
    return {**rates, "failed": [step.failed_share for step in steps]}


def _series(steps: Sequence[Step], prefix: str) -> dict[str, list[float]]:
    """The values of each metric that begins with `prefix`, by the rest of its name."""
    names = sorted({name for step in steps for name in step.metrics if name.startswith(prefix)})
    return {name.removeprefix(prefix): _values(steps, name) for name in names}


def _values(steps: Sequence[Step], name: str) -> list[float]:
    """The values of a metric, a gap where a step has none."""
    return [step.metrics.get(name, math.nan) for step in steps]


def _numbers(steps: Sequence[Any]) -> range:
    """The steps' numbers as people count them."""
    return range(1, len(steps) + 1)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
