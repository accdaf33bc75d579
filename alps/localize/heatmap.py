"""Draw the score of every attention head of a model as one picture, with the chosen heads outlined.

Layer 0 is the top row: rows then read in the order the model computes them, and the picture matches the
array as numpy prints it. Array names end in their axes: L layers, H query heads.
"""

import math
import textwrap
from collections.abc import Collection
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from alps.localize.drawing import DPI, INK, PALE, QUIET, save_figure

_Heads = Collection[tuple[int, int]]  # (layer, query head) pairs
_WIDE_SPREAD = 10.0  # largest over typical score above which a linear scale would show a few heads only
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plot_head_scores(
    scores_LH: np.ndarray,
    chosen: Collection[tuple[int, int]],
    *,
    title: str,
    score_name: str,
    path: Path,
    moved: Collection[tuple[int, int]] = (),
) -> Path:
    """Draw the score of every attention head: layers down (0 at the top), query heads across. Returns the PNG's path.

    Args:
        scores_LH: finite scores, (layers, query heads), in any unit; the colour bar says which scale it uses.
        chosen: (layer, query head) pairs counted from 0; each gets an outline, each layer a count.
        title: text above the picture; long titles are wrapped.
        score_name: what the scores are, with their unit if any; labels the colour bar.
        path: the PNG to write, with an SVG beside it. Missing parent folders are made; existing files are replaced.
        moved: heads whose key/value rows train along with a chosen head; a dot if not chosen itself.

    Raises ValueError where the scores are not 2-D, empty or not finite, or a head is outside the grid.
    """
    figure = _head_scores_figure(scores_LH, chosen, title=title, score_name=score_name, moved=moved)
    return save_figure(figure, path)


def _head_scores_figure(scores_LH: np.ndarray, chosen: _Heads, *, title: str, score_name: str, moved: _Heads = ()) -> Figure:
    """Lay the picture out in inches (see `plot_head_scores`), so that cells are square for every shape."""
    scores_LH = _checked_scores(scores_LH)
    n_layers, n_heads = scores_LH.shape
    chosen_heads = _checked_heads(chosen, "chosen", n_layers, n_heads)
    moved_heads = sorted(_checked_heads(moved, "moved", n_layers, n_heads) - chosen_heads)
    norm, ticks, scale = _colour_scale(scores_LH)

    # Whole pixels per cell keep all cells the same size after rasterising.
    cell = round(min(max(6.4 / max(n_layers, n_heads), 0.15), 0.6) * DPI) / DPI
    grid_w, grid_h = n_heads * cell, n_layers * cell
    bar_h = max(grid_h, 1.2)  # a model of one or two layers still needs a readable colour bar
    bar_label = textwrap.wrap(f"{score_name} ({scale})" if scale else score_name, int(bar_h * 14) + 1)
    left, counts_left, counts_w = 0.65, 0.65 + grid_w + 0.15, 0.7
    bar_left = counts_left + counts_w + 0.2
    width = max(bar_left + 0.8 + 0.16 * len(bar_label), 4.2)
    per_line = int((width - left) * 9)  # characters of the title's bold 12 points
    title_lines = [line for part in title.splitlines() for line in textwrap.wrap(part, per_line)]
    legend_columns = 2 if width > 6.5 else 1
    legend_h = 0.44 if moved_heads and legend_columns == 1 else 0.22
    above = 0.32 + 0.21 * len(title_lines) + legend_h  # the grid: title, legend and margins
    height = above + bar_h + 0.6
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)

    def axes(x: float, w: float, h: float, share_layers_with: Axes | None = None) -> Axes:
        """Bare axes, `w` by `h` inches, hung from the top of the grid at `x` inches."""
        box = (x / width, (height - above - h) / height, w / width, h / height)
        made = figure.add_axes(box, sharey=share_layers_with)
        made.spines[:].set_visible(False)
        made.tick_params(length=0, pad=3, labelsize=8, labelcolor=QUIET)
        return made

    grid = axes(left, grid_w, grid_h)
    grid.set_facecolor(PALE)  # shows through where a logarithmic scale has no colour for zero
    shown_LH = _with_colour(scores_LH, norm)
    # viridis: evenly spaced to the eye, safe for colour-blind readers, and without the grey of the zeros.
    mesh = grid.pcolormesh(
        np.arange(n_heads + 1) - 0.5,
        np.arange(n_layers + 1) - 0.5,
        shown_LH,
        norm=norm,
        cmap="viridis",
        edgecolors="white",
        linewidth=min(1.5 * cell, 0.5),
    )
    step = 1 if cell >= 0.2 else 2  # smaller cells have no room for a number each
    grid.set(ylim=(n_layers - 0.5, -0.5), xticks=range(0, n_heads, step), yticks=range(0, n_layers, step))
    grid.set_xlabel("query head", fontsize=9, color=INK)
    grid.set_ylabel("layer", fontsize=9, color=INK)
    for layer, head in sorted(chosen_heads):
        grid.add_patch(_outline(head, layer, cell))
    marks: list[Rectangle | Line2D] = [_outline(0, 0, 0.2)]
    marks[0].set(label=f"chosen: {len(chosen_heads)} of {scores_LH.size}", facecolor="#35b779")
    if moved_heads:
        layers, heads = zip(*moved_heads, strict=True)
        marks += grid.plot(
            heads,
            layers,
            "o",
            ms=min(max(cell * 15, 2.4), 5.0),
            color="white",
            mec="black",
            mew=0.5,
            label=f"moves along (shared key/value head): {len(moved_heads)}",
        )
    figure.text(
        left / width,
        1 - 0.16 / height,
        "\n".join(title_lines),
        fontsize=12,
        fontweight="bold",
        color=INK,
        va="top",
        linespacing=1.2,
        parse_math=False,
    )
    figure.legend(
        handles=marks,
        loc="upper left",
        ncols=legend_columns,
        frameon=False,
        fontsize=9,
        bbox_to_anchor=((left + 0.02) / width, 1 - (above - legend_h - 0.1) / height),
        borderpad=0,
        borderaxespad=0,
        handlelength=1.1,
        handleheight=1.1,
        handletextpad=0.6,
        labelspacing=0.4,
    )

    counts_L = np.bincount([layer for layer, _ in chosen_heads], minlength=n_layers)
    counts = axes(counts_left, counts_w, grid_h, share_layers_with=grid)
    counts.tick_params(labelleft=False, labelbottom=False)
    counts.set_xlim(0, max(1, counts_L.max()) * counts_w / (counts_w - 0.2))  # room for numbers
    counts.axvline(0, color=PALE, linewidth=1)
    bars = counts.barh(np.arange(n_layers), counts_L, height=min(0.62, 0.18 / cell), color="#8a93a3")
    counts.bar_label(bars, [str(n) if n else "" for n in counts_L], padding=2, fontsize=7, color=INK)
    counts.set_xlabel("chosen\nper layer", fontsize=8, color=QUIET, loc="left")

    _draw_colour_bar(axes(bar_left, 0.15, bar_h), mesh, shown_LH, ticks, "\n".join(bar_label))
    return figure


def _checked_scores(scores_LH: np.ndarray) -> np.ndarray:
    """The scores as float64, (layers, query heads), or a ValueError that says what is wrong with them."""
    scores_LH = np.asarray(scores_LH, dtype=np.float64)
    if scores_LH.ndim != 2 or scores_LH.size == 0:
        raise ValueError(f"scores have shape {scores_LH.shape}; allowed: (layers, query heads), none 0")
    for layer, head in np.argwhere(~np.isfinite(scores_LH)):
        value = scores_LH[layer, head]
        raise ValueError(f"score of layer {layer}, query head {head} is {value}; allowed: finite numbers")
    return scores_LH


def _checked_heads(heads: _Heads, name: str, n_layers: int, n_heads: int) -> set[tuple[int, int]]:
    """The heads without repeats, or a ValueError that names the first one outside the grid."""
    for layer, head in heads:
        if layer not in range(n_layers) or head not in range(n_heads):
            raise ValueError(
                f"{name} head (layer {layer}, query head {head}) is outside the grid; "
                f"allowed: layers 0..{n_layers - 1}, query heads 0..{n_heads - 1}"
            )
    return {(int(layer), int(head)) for layer, head in heads}


def _colour_scale(scores_LH: np.ndarray) -> tuple[Normalize, dict[float, str], str]:
    """Norm, colour bar ticks with texts, note for its label: logarithmic if few heads would hide the rest."""
    low, high = float(scores_LH.min()), float(scores_LH.max())
    sizes = np.abs(scores_LH[scores_LH != 0])
    typical, largest = (float(np.median(sizes)), float(sizes.max())) if sizes.size else (0.0, 0.0)
    if largest > _WIDE_SPREAD * typical and low < 0:
        ends = _log_ticks(typical, largest)
        ticks = {-size: f"−{text}" for size, text in ends.items()} | {0.0: "0"} | ends
        ticks = {value: text for value, text in ticks.items() if low <= value <= high}
        return SymLogNorm(typical, vmin=low, vmax=high, base=10), ticks, "log scale, linear near 0"
    if largest > _WIDE_SPREAD * typical:
        # The far ends must not take most of the colours: from the lowest 2 % to ten times the highest 2 %.
        first = max(float(np.percentile(sizes, 2)), typical / 1e3)
        last = min(high, 10 * float(np.percentile(sizes, 98, method="lower")))
        return LogNorm(first, last), _log_ticks(first, last), "log scale" + ("" if low else ", grey: 0")

    exponent = math.floor(math.log10(largest)) if largest else 0
    exponent = 0 if -2 <= exponent <= 3 else exponent
    if high - low > 1e-9 * largest:
        norm = Normalize(low, high)
        values = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
        decimals = max(0, exponent - math.floor(math.log10(values[1] - values[0]) + 1e-6))
    else:  # one value: give the scale some width around it and mark the value alone
        values, decimals = [low], 2 if largest else 0
        norm = Normalize(low - (largest or 1), low + (largest or 1))
    ticks = {float(v): f"{v / 10.0**exponent:.{decimals}f}".replace("-", "−") for v in values if low <= v <= high}
    return norm, ticks, f"×10{str(exponent).translate(_SUPERSCRIPT)}" if exponent else ""


def _log_ticks(first: float, last: float) -> dict[float, str]:
    """Powers of ten from `first` to `last`, with 2 and 5 times those where only few powers are in view."""
    digits = (1, 2, 5) if last < 1e3 * first else (1,)
    powers = range(math.floor(math.log10(first)), math.floor(math.log10(last)) + 1)
    return {
        d * 10.0**p: (f"{d}×" if d > 1 else "") + f"10{str(p).translate(_SUPERSCRIPT)}"
        for p in powers
        for d in digits
        if first <= d * 10.0**p <= last
    }


def _with_colour(scores_LH: np.ndarray, norm: Normalize) -> np.ndarray:
    """The scores, without those that have no colour: zeros on a logarithmic scale."""
    return np.ma.masked_equal(scores_LH, 0.0) if isinstance(norm, LogNorm) else scores_LH


def _draw_colour_bar(axes: Axes, shades: ScalarMappable, shown_LH: np.ndarray, ticks: dict[float, str], label: str) -> None:
    """Fill `axes` with a colour bar, with tips where scores lie beyond its ends."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar_h = axes.get_position().height * figure.get_figheight()
    beyond = int((shown_LH < shades.norm.vmin).any()) + 2 * int((shown_LH > shades.norm.vmax).any())
    bar = figure.colorbar(shades, cax=axes, extend=("neither", "min", "max", "both")[beyond], extendfrac=0.12 / bar_h)
    axes.minorticks_off()
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(length=2, color=QUIET)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=9, color=INK, parse_math=False)


def _outline(x: float, y: float, cell: float, line: str = "white", around: str = "black") -> Rectangle:
    """Outline at column `x`, row `y` of cells `cell` inches wide: by default white in black, to show on every colour."""
    white, rim = min(max(cell * 6, 0.9), 2.2), min(max(cell * 2.4, 0.6), 0.9)  # points
    side = 1 - (white + 2 * rim) / (cell * 72)  # the rim ends at the cell's edge, beside its neighbour's
    return Rectangle(
        (x - side / 2, y - side / 2),
        side,
        side,
        fc="none",
        ec=line,
        lw=white,
        joinstyle="miter",
        path_effects=[withStroke(linewidth=white + 2 * rim, foreground=around)],
    )
