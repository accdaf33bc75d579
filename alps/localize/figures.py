"""Draw several tasks' heads next to each other: scores and choices, overlaps, profiles over the layers.

Array names end in their axes: L layers, H query heads, N tasks, R ratios. Every function writes a PNG and an SVG and returns
the PNG's path; names and titles are drawn letter by letter, a "$" in them too. Tasks are counted from 1 in errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.cm import ScalarMappable
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from alps.localize.drawing import (
    DPI,
    INK,
    MARKERS,
    PALE,
    QUIET,
    SERIES,
    fit,
    page,
    place,
    plain,
    save_figure,
    text_width,
    write_above,
)
from alps.localize.heatmap import _checked_heads, _checked_scores, _colour_scale, _draw_colour_bar, _outline, _with_colour

MOST_CURVES = len(MARKERS)
_MAX_TASKS, _MAX_MATRIX = len(SERIES), 12
_LEFT = 0.65  # the y axis' numbers and name
_SHARED = (SERIES[1], "white")  # an outline dark in light, where others are light in dark: colour is not all that differs
_BAND = "#f1f2f4"
_WIDE_SPREAD = 10.0  # largest over smallest above which a linear axis would flatten the small ones


def plot_tasks(
    scores: Sequence[np.ndarray | None],
    chosen: Sequence[Collection[tuple[int, int]]],
    names: Sequence[str],
    *,
    title: str,
    score_name: str,
    path: Path,
    shape: tuple[int, int] | None = None,
) -> Path:
    """Draw the heads of 1 to 8 tasks side by side on one colour scale, chosen heads outlined. Returns the PNG's path.

    Args:
        scores: for each task finite scores, (layers, query heads), all in one unit; None draws its cells grey.
        chosen: for each task (layer, query head) pairs from 0; those that every task chose get an outline of their own.
        names: what to call the tasks; long names are shortened in the middle.
        title: text above the picture; long titles are wrapped.
        score_name: what the scores are, with their unit if any; labels the colour bar.
        path: the PNG to write (".png" may be left out), with an SVG beside it.
        shape: (layers, query heads), needed where no task has scores.

    Raises ValueError for lengths or shapes that differ, scores that are not finite, a head outside the grid, too many tasks.
    """
    _check_tasks(names, scores=scores, chosen=chosen)
    grids, (n_layers, n_heads) = _checked_grids(scores, names, shape)
    sets = []
    for n, (name, heads) in enumerate(zip(names, chosen, strict=True), 1):
        with _naming(n, name):
            sets.append(_checked_heads(heads, "chosen", n_layers, n_heads))
    in_all = set.intersection(*sets) if len(sets) > 1 else set()

    columns = min(len(names), 4)
    # Whole pixels per cell keep all cells the same size after rasterising.
    cell = round(min(max(min(13 / (columns * n_heads), 5 / n_layers), 0.08), 0.4) * DPI) / DPI
    grid_w, grid_h = n_heads * cell, n_layers * cell
    slot_w = max(grid_w, 1.5)
    titles = [fit(name, slot_w, 9, lines=2, bold=True) for name in names]
    head_h = 0.25 + 0.16 * (1 + max(text.count("\n") for text in titles))
    bar_h = max(grid_h, 1.2)  # a model of one or two layers still needs a readable colour bar
    row_h = head_h + grid_h + 0.5
    bar_left = _LEFT + columns * (slot_w + 0.35) - 0.1
    known = [grid for grid in grids if grid is not None]
    rows = -(-len(names) // columns)
    below = max(rows * row_h, head_h + bar_h + 0.15 if known else 0)
    signs: list[tuple[Artist, str]] = [(_outline(0, 0, 0.2), "chosen here")]
    if len(names) > 1:
        signs.append((_outline(0, 0, 0.2, *_SHARED), f"chosen in every one ({len(in_all)})"))
    for sign, _ in signs:
        sign.set(facecolor="#35b779")  # a cell's: half of each outline would not show on white
    known_LH = np.concatenate(known or [np.zeros((1, n_heads))])
    norm, ticks, scale = _colour_scale(known_LH)
    bar_label = fit(f"{score_name} ({scale})" if scale else score_name, bar_h, 9)
    bar_w = 0.9 + 0.16 * bar_label.count("\n") if known else 0.0
    figure, top = page(max(bar_left + bar_w, 4.2), below, title, signs, sign_width=1.1)

    step = _tick_step(cell)
    for n, (grid_LH, heads_chosen) in enumerate(zip(grids, sets, strict=True)):
        row, column = divmod(n, columns)
        x, y = _LEFT + column * (slot_w + 0.35), top + row * row_h + head_h
        axes = place(figure, x, y, grid_w, grid_h)
        axes.set_facecolor(PALE)  # shows through where there is no score, or no colour for zero
        shown_LH = np.ma.masked_all((n_layers, n_heads)) if grid_LH is None else _with_colour(grid_LH, norm)
        axes.pcolormesh(
            np.arange(n_heads + 1) - 0.5,
            np.arange(n_layers + 1) - 0.5,
            shown_LH,
            norm=norm,
            cmap="viridis",
            edgecolors="white",
            linewidth=min(1.5 * cell, 0.5) if cell > 0.1 else 0,  # on smaller cells lines would outshine the colours
            rasterized=len(names) * shown_LH.size > 4000,  # an SVG of as many cells takes seconds to open
        )
        axes.set(ylim=(n_layers - 0.5, -0.5), xticks=range(0, n_heads, step), yticks=range(0, n_layers, step))
        axes.set_xlabel("query head", fontsize=9, color=INK)
        if column == 0:
            axes.set_ylabel("layer", fontsize=9, color=INK)
        for layer, head in sorted(heads_chosen):
            axes.add_patch(_outline(head, layer, cell, *(_SHARED if (layer, head) in in_all else ())))
        state = f"{len(heads_chosen)} of {shown_LH.size} chosen" + (", no scores" if grid_LH is None else "")
        write_above(axes, state, 4, 8)
        write_above(axes, titles[n], 16, 9, bold=True)
    if known:
        colours = place(figure, bar_left, top + head_h, 0.15, bar_h)
        _draw_colour_bar(colours, ScalarMappable(norm, "viridis"), _with_colour(known_LH, norm), ticks, bar_label)
    return save_figure(figure, path)


def plot_overlap(
    jaccard_NN: np.ndarray, names: Sequence[str], *, title: str, path: Path, rank_correlation_NN: np.ndarray | None = None
) -> Path:
    """Draw how far 2 to 12 selections agree: a matrix with the number in every cell. Returns the PNG's path.

    Args:
        jaccard_NN: size of the intersection over size of the union of each two, 0 to 1; NaN shows as a dash.
        names: what to call the selections; long names are shortened in the middle.
        title: text above the picture; long titles are wrapped.
        path: the PNG to write (".png" may be left out), with an SVG beside it.
        rank_correlation_NN: Spearman's correlation of each two's scores, -1 to 1, as a second matrix; NaN shows as a dash.

    Raises ValueError for another number of names, a matrix that is not (names, names), or values out of range.
    """
    size = len(names)
    if not 2 <= size <= _MAX_MATRIX:
        raise ValueError(f"{size} names; allowed: 2 to {_MAX_MATRIX}")
    matrices = [(_checked_range(jaccard_NN, "jaccard_NN", (size, size), 0), "Jaccard overlap of the chosen heads", "viridis")]
    if rank_correlation_NN is not None:
        correlation_NN = _checked_range(rank_correlation_NN, "rank_correlation_NN", (size, size), -1)
        matrices.append((correlation_NN, "Spearman correlation of the scores", "PuOr"))

    cell = max(0.5, 2.2 / size)
    side = size * cell
    across = [fit(name, 1.8, 9, lines=2) for name in names]
    left = 0.3 + max(text_width(line, 9) for name in across for line in name.split("\n"))
    flat = all(text_width(plain(name), 9) < cell - 0.06 for name in names)
    foot = 0.3 if flat else left - 0.1
    headings = [fit(heading, side, 9, lines=2, bold=True) for _, heading, _ in matrices]
    head_h = 0.16 * max(heading.count("\n") + 1 for heading in headings) + 0.12
    figure, top = page(max(left + len(matrices) * (side + 0.3), 4.2), head_h + side + foot, title)
    for n, (values_NN, _, colours) in enumerate(matrices):
        axes = place(figure, left + n * (side + 0.3), top + head_h, side, side)
        low, shades = (0, -1)[n], colormaps[colours].with_extremes(bad=PALE)
        edges = np.arange(size + 1) - 0.5
        shown_NN = np.ma.masked_invalid(values_NN)
        axes.pcolormesh(edges, edges, shown_NN, vmin=low, vmax=1, cmap=shades, edgecolors="white", linewidth=0.8)
        for (i, j), value in np.ndenumerate(values_NN):
            text = "–" if np.isnan(value) else f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
            bright = np.dot(np.array(shades((value - low) / (1 - low))[:3]), [0.299, 0.587, 0.114]) > 0.5
            axes.text(j, i, text, ha="center", va="center", fontsize=9, color="black" if bright else "white")
        axes.set(ylim=(size - 0.5, -0.5), xticks=range(size), yticks=range(size))
        axes.set_xticklabels(across, rotation=0 if flat else 90, fontsize=9, color=INK, parse_math=False)
        axes.set_yticklabels(across if n == 0 else [], fontsize=9, color=INK, parse_math=False)
        write_above(axes, headings[n], 5, 9, bold=True)
    return save_figure(figure, path)


def plot_layers(
    scores: Sequence[np.ndarray | None],
    counts: Sequence[np.ndarray],
    names: Sequence[str],
    *,
    title: str,
    score_name: str,
    path: Path,
) -> Path:
    """Draw 1 to 8 tasks over the layers: mean score of a layer over the model's, and heads chosen. Returns the PNG's path.

    Args:
        scores: for each task finite scores, (layers, query heads), or None; only tasks whose mean is above 0 get a line.
        counts: for each task the number of chosen heads of every layer, (layers,).
        names: what to call the tasks; long names are shortened in the middle.
        title: text above the picture; long titles are wrapped.
        score_name: what the scores are; their unit falls out.
        path: the PNG to write (".png" may be left out), with an SVG beside it.

    Raises ValueError for lengths or shapes that differ, scores that are not finite, counts below 0, too many tasks.
    """
    _check_tasks(names, scores=scores, counts=counts)
    n_layers = np.size(counts[0])
    for n, (name, count_L) in enumerate(zip(names, counts, strict=True), 1):
        if not n_layers or np.shape(count_L) != (n_layers,) or np.min(count_L) < 0:
            found = f"counts of task {n} ({plain(name)}) are {np.asarray(count_L).tolist()}"
            raise ValueError(f"{found}; allowed: one of 0 or more for each layer, as many layers for every task")
    grids, shape = _checked_grids(scores, names, (n_layers, 1))
    if shape[0] != n_layers:
        raise ValueError(f"scores have {shape[0]} layers and counts {n_layers}; allowed: as many")
    profiles = {n: grid.mean(1) / grid.mean() for n, grid in enumerate(grids) if grid is not None and grid.mean() > 0}
    notes = [" (no scores)" if grid is None else f" (mean {grid.mean():.2g}: no line)" for grid in grids]
    signs = [(_line(n, has_line=n in profiles), name + ("" if n in profiles else notes[n])) for n, name in enumerate(names)]

    width = min(max(n_layers * (len(names) + 1) * 0.05, 6.0), 13.0)
    left = _LEFT + 0.15  # a label of two lines
    inner = width - left - 0.2
    upper_h, gap = (2.2, 0.35) if profiles else (0.0, 0.1)
    figure, top = page(width, upper_h + gap + 2.1, title, signs)
    lower = place(figure, left, top + upper_h + gap, inner, 1.5)
    thickness = min(0.84 / len(names), 0.3 * n_layers / inner)  # of a layer's place; few layers need no broad bars
    for n, count_L in enumerate(counts):
        where_L = np.arange(n_layers) + (n - (len(names) - 1) / 2) * thickness
        lower.bar(where_L, count_L, width=0.9 * thickness, color=SERIES[n])
    lower.set(ylim=(0, max(1.05 * np.max(counts), 1)))
    lower.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    drawn = [(lower, "chosen heads")]
    if profiles:
        upper = place(figure, left, top + 0.2, inner, upper_h - 0.2)
        drawn.append((upper, "mean score of the layer\n/ of the model"))
        for n, profile_L in profiles.items():
            upper.plot(profile_L, **_style(n))
        values = np.concatenate(list(profiles.values()))
        if values.min() > 0 and values.max() > _WIDE_SPREAD * values.min():
            upper.set_yscale("log")
            upper.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            upper.minorticks_off()
        upper.axhline(1, color=QUIET, linewidth=0.8, zorder=1.5)
        upper.tick_params(labelbottom=False)
        write_above(upper, fit(score_name, inner, 8, lines=1), 4, 8)
    for axes, label in drawn:
        for layer in range(1, n_layers, 2):  # bands keep the bars of a layer together
            axes.axvspan(layer - 0.5, layer + 0.5, color=_BAND, zorder=0)
        axes.set(xlim=(-0.5, n_layers - 0.5), xticks=range(0, n_layers, _tick_step(inner / n_layers)))
        axes.set_ylabel(label, fontsize=9, color=INK)
    lower.axhline(0, color=QUIET, linewidth=0.8)
    lower.set_xlabel("layer", fontsize=9, color=INK)
    figure.align_ylabels()
    return save_figure(figure, path)


def plot_overlap_by_ratio(
    ratios: Sequence[float], jaccard_by_pair: Mapping[str, np.ndarray], *, title: str, path: Path, chance: np.ndarray
) -> Path:
    """Draw how much the top heads of up to 12 pairs of tasks overlap, against how many are taken. Returns the PNG's path.

    Args:
        ratios: shares of all heads that are taken, ascending, above 0 and up to 1; drawn in percent.
        jaccard_by_pair: for each pair's name its overlap at every ratio, (ratios,), 0 to 1; NaN leaves a gap.
        title: text above the picture; long titles are wrapped.
        path: the PNG to write (".png" may be left out), with an SVG beside it.
        chance: the overlap to expect of two random choices, (ratios,), 0 to 1.

    Raises ValueError for no or more than 12 pairs, ratios out of order or range, other lengths, overlaps out of range.
    """
    ratios_R = np.asarray(ratios, dtype=np.float64)
    if not 1 <= len(jaccard_by_pair) <= MOST_CURVES:
        raise ValueError(f"{len(jaccard_by_pair)} pairs; allowed: 1 to {MOST_CURVES}")
    if ratios_R.ndim != 1 or not ratios_R.size or not (np.diff(ratios_R, prepend=0) > 0).all() or ratios_R[-1] > 1:
        raise ValueError(f"ratios are {ratios_R.tolist()}; allowed: ascending, above 0 and up to 1")
    lines = {name: _checked_range(line_R, plain(name), ratios_R.shape, 0) for name, line_R in jaccard_by_pair.items()}
    chance_R = _checked_range(chance, "chance", ratios_R.shape, 0)

    by_chance = Line2D([], [], color=QUIET, linestyle="--", linewidth=1.3)
    signs = [(_line(n), name) for n, name in enumerate(lines)] + [(by_chance, "two random choices")]
    figure, top = page(6.4, 3.9, title, signs)
    axes = place(figure, _LEFT, top + 0.15, 6.4 - _LEFT - 0.3, 3.2)
    axes.plot(100 * ratios_R, chance_R, color=QUIET, linestyle="--", linewidth=1.3, marker="." if ratios_R.size == 1 else "")
    for n, line_R in enumerate(lines.values()):
        axes.plot(100 * ratios_R, line_R, clip_on=False, **_style(n))
    if ratios_R[-1] >= _WIDE_SPREAD * ratios_R[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
    axes.grid(color=PALE, linewidth=0.6)
    axes.set(ylim=(0, 1), yticks=np.arange(6) / 5)
    axes.tick_params(pad=7)  # markers at the ends stand out of the axes
    axes.set_xlabel("heads taken (% of all)", fontsize=9, color=INK)
    axes.set_ylabel("Jaccard overlap", fontsize=9, color=INK)
    return save_figure(figure, path)


def _check_tasks(names: Sequence[str], **given: Sequence[object]) -> None:
    if not 1 <= len(names) <= _MAX_TASKS:
        raise ValueError(f"{len(names)} tasks; allowed: 1 to {_MAX_TASKS}")
    for what, values in given.items():
        if len(values) != len(names):
            raise ValueError(f"{len(values)} {what} for {len(names)} names; allowed: one for each name")


def _checked_grids(
    scores: Sequence[np.ndarray | None], names: Sequence[str], shape: tuple[int, int] | None
) -> tuple[list[np.ndarray | None], tuple[int, int]]:
    """The scores as `_checked_scores` gives them and the shape they share, which is `shape` where there are none."""
    grids: list[np.ndarray | None] = []
    common: tuple[int, int] | None = None
    for n, (name, scores_LH) in enumerate(zip(names, scores, strict=True), 1):
        with _naming(n, name):
            grid = None if scores_LH is None else _checked_scores(scores_LH)
            if grid is not None and grid.shape != (common or grid.shape):
                raise ValueError(f"scores have shape {grid.shape}; allowed: {common}, as the tasks before")
        common = common if grid is None else (grid.shape[0], grid.shape[1])
        grids.append(grid)
    if common is None and (shape is None or min(shape) < 1):
        raise ValueError(f"no task has scores and shape is {shape}; allowed: (layers, query heads), none 0")
    return grids, common or shape or (0, 0)


def _checked_range(values: np.ndarray, name: str, shape: tuple[int, ...], low: float) -> np.ndarray:
    """The values as float64, from `low` to 1 or NaN, or a ValueError that says what is wrong with them."""
    values = np.asarray(values, dtype=np.float64)
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}; allowed: {shape}")
    for wrong in values[(values < low - 1e-9) | (values > 1 + 1e-9)]:  # rounding may pass the ends by a little
        raise ValueError(f"{name} holds {wrong}; allowed: {low} to 1, or NaN")
    return values


@contextmanager
def _naming(n: int, name: str) -> Iterator[None]:
    """Say of which task an error is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"task {n} ({plain(name)}): {error}") from error


def _tick_step(cell: float) -> int:
    """Every how many cells of so many inches there is room for a number."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if step * cell >= 0.2 or step == 1000)


def _style(n: int) -> dict[str, Any]:
    """The n-th line's look: no two share a marker; a colour returns with a hollow marker and another dash."""
    again, colour = n >= len(SERIES), SERIES[n % len(SERIES)]
    edge = colour if again else INK if colour == SERIES[-1] else "white"  # the last colour is too pale for a white edge
    marker = {"marker": MARKERS[n], "ms": 7 if MARKERS[n] in "PX*" else 5, "mfc": "white" if again else colour, "mec": edge}
    return {"color": colour, "linewidth": 1.4, "linestyle": ":" if again else "-", "mew": 1 if again else 0.4, **marker}


def _line(n: int, has_line: bool = True) -> Artist:
    """The n-th line's sign in a legend; a bar's where it is not drawn."""
    return Line2D([], [], **_style(n)) if has_line else Rectangle((0, 0), 1, 1, color=SERIES[n])
