"""What the pictures share: colours, text that fits its place, pages laid out in inches, files that are there whole.

Lengths are in inches, sizes of letters and widths of lines in points.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

DPI = 200
INK, QUIET, PALE = "#1f2430", "#5b6270", "#d9dbe0"
# Okabe and Ito's colours, told apart by colour-blind readers too; the one that is weakest on white comes last.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d")
_MARGIN = 0.2
_HANDLE = 0.55  # width of a legend's sign with the space around it


def save_figure(figure: Figure, path: Path) -> Path:
    """Write `figure` as PNG and SVG next to each other, whole or not at all. Returns the path of the PNG.

    `path` has no suffix, or .png, which is dropped. Missing parent folders are made; existing files are replaced. Equal figures
    give equal bytes. Letters stay letters in the SVG, so that it can be searched and edited.
    """
    stem = path.with_suffix("") if path.suffix == ".png" else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, png = (stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png"))
    # A reader (or a killed run) must never meet half a picture, so only finished files get the names.
    unfinished = {file: file.with_name(f".{file.name}.partial-{os.getpid()}") for file in (svg, png)}
    try:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "alps"}):
            figure.savefig(unfinished[svg], format="svg", dpi=DPI, facecolor="white", metadata={"Date": None})
        figure.savefig(unfinished[png], format="png", dpi=DPI, facecolor="white")
        for file, partial in unfinished.items():
            partial.replace(file)
    finally:
        for partial in unfinished.values():
            partial.unlink(missing_ok=True)
    return png


def page(
    width: float, below: float, title: str, entries: Sequence[tuple[Artist, str]] = (), *, sign_width: float = 1.8
) -> tuple[Figure, float]:
    """A page with a title and a legend (sign, text) at its top, and `below` of space under them; and where that space begins.

    `sign_width` is in letters of the legend.
    """
    room = width - 2 * _MARGIN
    heading = [line for part in title.splitlines() for line in fit(part, room, 12, bold=True).split("\n")]
    widest = min(max((text_width(plain(text), 9) for _, text in entries), default=0.0), 2.6) + _HANDLE
    columns = max(1, min(len(entries), int(room / widest)))
    rows = -(-len(entries) // columns)
    top = _MARGIN + 0.21 * len(heading) + 0.1 + (0.19 * rows + 0.06 if entries else 0)
    height = top + below
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.text(
        _MARGIN / width,
        1 - 0.16 / height,
        "\n".join(heading),
        fontsize=12,
        fontweight="bold",
        color=INK,
        va="top",
        linespacing=1.2,
        parse_math=False,
    )
    if entries:
        legend = figure.legend(
            handles=[sign for sign, _ in entries],
            labels=["text"] * len(entries),  # matplotlib would leave out one that begins with "_"
            loc="upper left",
            ncols=columns,
            frameon=False,
            fontsize=9,
            bbox_to_anchor=(_MARGIN / width, 1 - (_MARGIN + 0.21 * len(heading) + 0.08) / height),
            borderpad=0,
            borderaxespad=0,
            handlelength=sign_width,
            handleheight=1.1,
            handletextpad=0.6,
            labelspacing=0.4,
            columnspacing=1.2,
        )
        for drawn, (_, text) in zip(legend.get_texts(), entries, strict=True):
            drawn.set(text=fit(text, room / columns - _HANDLE, 9, lines=1), color=INK, parse_math=False)
    return figure, top


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Bare axes of a size in inches, hung at a place counted from the page's upper left corner."""
    page_w, page_h = figure.get_size_inches()
    axes = figure.add_axes((left / page_w, (page_h - top - height) / page_h, width / page_w, height / page_h))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=3, labelsize=8, labelcolor=QUIET)
    return axes


def write_above(axes: Axes, text: str, points: float, size: float, *, bold: bool = False) -> None:
    """Text that starts at the axes' left edge, some points above them."""
    axes.annotate(
        text,
        (0, 1),
        (0, points),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=size,
        fontweight="bold" if bold else "normal",
        color=INK if bold else QUIET,
        va="bottom",
        parse_math=False,
    )


def plain(text: str) -> str:
    """The text on one line, without characters that cannot be drawn (or stand in XML)."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def fit(text: str, width: float, size: float, *, lines: int | None = None, bold: bool = False) -> str:
    """The text on lines no longer than `width`; if these were more than `lines`, its middle gives way to an ellipsis."""
    text = plain(text)
    wrapped = _wrap(text, width, size, bold)
    # No letter is narrower than a fifth of its height: this many is more than fit.
    keep = min(len(text), int((lines or 0) * width * 72 / (0.2 * size)) + 1)
    while lines and len(wrapped) > lines and keep > 1:
        keep -= 1
        wrapped = _wrap(f"{text[: (keep + 1) // 2]}…{text[len(text) - keep // 2 :]}", width, size, bold)
    return "\n".join(wrapped)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of one line of text."""
    return sum(_advance(char, bold) for char in text) * size / 72


def _wrap(text: str, width: float, size: float, bold: bool) -> list[str]:
    lines = [""]
    for piece in re.findall(r"[^ /_-]*[ /_-]|[^ /_-]+", text):  # names of models have more of these than spaces
        for part in [piece] if text_width(piece.rstrip(), size, bold) <= width else piece:
            if lines[-1] and text_width((lines[-1] + part).rstrip(), size, bold) > width:
                lines.append("")
            lines[-1] += part
    return [line.rstrip() for line in lines]


@functools.cache
def _advance(char: str, bold: bool) -> float:
    """Width of a letter with the space up to the next, at size 1."""
    font = FontProperties(weight="bold" if bold else "normal", size=100)
    with_it, without = (text_to_path.get_text_width_height_descent(f"H{s}H", font, False)[0] for s in (char * 8, ""))
    return float(with_it - without) / 800
