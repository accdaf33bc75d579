"""The pictures of the study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from alps import HeadLayout, HeadScores, select_heads
from alps.localize.drawing import INK, MARKERS, QUIET, SERIES, page, place, save_figure
from alps.localize.figures import plot_overlap, plot_tasks

SEEDS_COLOUR, TASKS_COLOUR = SERIES[0], SERIES[1]
Rows = list[list[object]]


def draw_all(
    scores: dict[tuple[str, str, int, int], np.ndarray],
    stable: Rows,
    share: Rows,
    between: tuple[np.ndarray, np.ndarray],
    metrics: list[str],
    layout: HeadLayout,
    out: Path,
) -> None:
    longest = max(steps for _, _, steps, _ in scores)
    _stability(stable, metrics, longest, layout, out / "stability")
    _steps(stable, metrics, out / "steps")
    _shares(share, metrics, out / "shares")
    overlap_NN, correlation_NN = between
    title = f"Eleven ways to score the same proxies ({longest} steps; mean of two tasks and two seeds)"
    plot_overlap(overlap_NN, metrics, title=title, path=out / "metrics", rank_correlation_NN=correlation_NN)
    shown = [key for key in scores if key[0] in ("w1", "w1 / layer", "relative_l2") and key[2] == longest and key[3] == 1]
    shown.sort(key=lambda key: metrics.index(key[0]))
    grids = [scores[key] / scores[key].mean() for key in shown]
    chosen = []
    for key in shown:
        found = HeadScores(layout, scores[key], "", "", 1.0, "none", "", "")
        chosen.append(select_heads("spad", layout, 0.1, scores=found).heads)
    plot_tasks(
        grids,
        chosen,
        [f"{metric}, {task}" for metric, task, _, _ in shown],
        title=f"Top 27 of SmolLM2's 270 heads, {longest}-step proxies, seed 1",
        score_name="score over the mean of all heads",
        path=out / "heads",
    )


def chance_range(layout: HeadLayout, count: int = 27) -> tuple[float, float, float]:
    """Jaccard overlap of two random choices: mean, and the range of 95 % of 20,000 draws."""
    generator = np.random.default_rng(0)
    shared = generator.hypergeometric(count, layout.num_heads - count, count, 20_000)
    overlaps = shared / (2 * count - shared)
    low, high = np.percentile(overlaps, [2.5, 97.5])
    return float(overlaps.mean()), float(low), float(high)


def _row_axes(figure_top: tuple, height: float, metrics: list[str]) -> Axes:  # type: ignore[type-arg]
    figure, top = figure_top
    axes = place(figure, 1.5, top + 0.1, 4.4, height)
    axes.set(yticks=range(len(metrics)), ylim=(len(metrics) - 0.5, -0.5))
    axes.set_yticklabels(metrics, parse_math=False)
    axes.grid(axis="both", color="#e6e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def _dot(colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=6, markeredgecolor="white")


def _stability(stable: Rows, metrics: list[str], longest: int, layout: HeadLayout, path: Path) -> None:
    height = 0.3 * len(metrics)
    entries = [
        (_dot(SEEDS_COLOUR, "o"), "same task, two seeds (a dot a task)"),
        (_dot(TASKS_COLOUR, "s"), "same seed, two tasks (a dot a seed)"),
    ]
    figure = page(6.2, height + 0.9, f"How much of the top 10 % stays ({longest}-step proxies of SmolLM2)", entries)
    axes = _row_axes(figure, height, metrics)
    _, low, high = chance_range(layout)
    axes.axvspan(low, high, color="#d9dbe0", linewidth=0)
    axes.text(high + 0.01, -0.38, "two random choices (95 %)", fontsize=7, color=QUIET, va="center")
    for metric, steps, compared, _, overlap, _ in stable:
        if steps == longest and compared in ("two seeds", "two tasks"):
            seeds = compared == "two seeds"
            colour, marker, shift = (SEEDS_COLOUR, "o", -0.13) if seeds else (TASKS_COLOUR, "s", 0.13)
            axes.plot(float(overlap), metrics.index(str(metric)) + shift, marker, color=colour, ms=6, mec="white")  # type: ignore[arg-type]
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("Jaccard overlap of the two sets of 27 heads", fontsize=9, color=INK)
    save_figure(figure[0], path)


def _steps(stable: Rows, metrics: list[str], path: Path) -> None:
    chosen = [metric for metric in ("w1", "w1 / layer", "w1 / scale", "kl", "relative_l2") if metric in metrics]
    entries = [
        (Line2D([], [], color=SERIES[i], marker=MARKERS[i], markersize=6, markeredgecolor="white"), metric)
        for i, metric in enumerate(chosen)
    ]
    figure, top = page(5.2, 3.4, "Top 10 % by a short proxy, beside the 100-step proxy's", entries)
    axes = place(figure, 0.7, top + 0.1, 4.2, 2.5)
    axes.grid(axis="y", color="#e6e8ec", linewidth=0.8)
    lengths = sorted({int(row[1]) for row in stable if str(row[2]).startswith("with ")})  # type: ignore[call-overload]
    for i, metric in enumerate(chosen):
        values = [
            [float(row[4]) for row in stable if row[0] == metric and row[1] == steps and str(row[2]).startswith("with ")]  # type: ignore[arg-type]
            for steps in lengths
        ]
        x = np.arange(len(lengths)) + (i - (len(chosen) - 1) / 2) * 0.1
        axes.plot(x, [np.mean(found) for found in values], color=SERIES[i], marker=MARKERS[i], ms=6, mec="white")
        for place_x, found in zip(x, values, strict=True):
            axes.plot([place_x] * len(found), found, ".", color=SERIES[i], ms=3, alpha=0.7)
    axes.set(xticks=range(len(lengths)), ylim=(0, 1))
    axes.set_xticklabels([f"{steps} steps" for steps in lengths])
    axes.set_xlabel("length of the proxy (marks: means of two tasks and two seeds; points: each)", fontsize=8, color=INK)
    axes.set_ylabel("Jaccard overlap", fontsize=9, color=INK)
    save_figure(figure, path)


def _shares(share: Rows, metrics: list[str], path: Path) -> None:
    names = [*metrics, "random"]
    height = 0.3 * len(names)
    ways = {"heads": ("o", SERIES[0]), "groups": ("s", SERIES[1]), "parameters": ("^", SERIES[2])}
    words = {"heads": "10 % of heads", "groups": "10 % of key/value groups", "parameters": "10 % of Q/K/V parameters"}
    entries = [(_dot(colour, marker), words[way]) for way, (marker, colour) in ways.items()]
    figure = page(6.2, height + 0.9, "What ten percent is of the Q/K/V parameters (SmolLM2: 3 query heads a group)", entries)
    axes = _row_axes(figure, height, names)
    for index, way in enumerate(ways):
        marker, colour = ways[way]
        for row, name in enumerate(names):
            found = [100 * float(line[6]) for line in share if line[0] == way and line[1] == name]  # type: ignore[arg-type]
            low, high = (min(found), max(found)) if name != "random" else np.percentile(found, [2.5, 97.5])
            y = row + (index - 1) * 0.22
            axes.plot([low, high], [y, y], color=colour, linewidth=2, alpha=0.5)
            axes.plot(np.mean(found), y, marker, color=colour, ms=5, mec="white")
    axes.set_xlim(9, None)
    axes.set_xlabel("true share of the Q/K/V parameters (%); lines: all four, or 95 % of 200 draws", fontsize=8, color=INK)
    save_figure(figure[0], path)
