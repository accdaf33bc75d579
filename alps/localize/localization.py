"""Score two checkpoints, choose the top heads, and write down what came out: numbers, tables and pictures."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import torch

from alps.changes import is_change
from alps.config import LocalizeConfig
from alps.files import write_whole
from alps.heads import HeadLayout, HeadSelection
from alps.localize.figures import plot_layers
from alps.localize.heatmap import plot_head_scores
from alps.localize.scores import HeadScores, ranked, score_heads
from alps.models import layout_of, resolve_model
from alps.progress import quiet_libraries
from alps.select import select_heads

# What write_localization makes, besides scores.json.
LOCALIZATION_FILES = ("heads.json", "heads.csv", "heatmap.png", "heatmap.svg", "layers.png", "layers.svg")


def localize(config: LocalizeConfig) -> str:
    """All of `python -m alps.localize`; returns the table that it prints.

    Raises ValueError, in words for people, for models that cannot be found, read or compared.
    """
    quiet_libraries()
    if config.threads:
        torch.set_num_threads(config.threads)
    cache = Path(config.cache).expanduser()
    base = resolve_model(config.base, cache, config.base_revision, key="base")
    task = resolve_model(config.task, cache, config.task_revision, key="task")
    layout = twins_layout(base, task, "task")
    scores = score_heads(
        base,
        task,
        layout,
        representation=config.representation,
        distance=config.distance,
        temperature=config.temperature,
        normalization=config.normalization,
        names=(config.base, config.task),
        partial=Path(config.out) / "partial_scores.json",
        show_progress=config.progress,
    )
    selection = select_heads("spad", layout, config.ratio, scores=scores, budget=config.budget, unit=config.unit)
    folder = Path(config.out)
    write_localization(scores, selection, folder, config.title or f"{_short(config.task)} against {_short(config.base)}")
    products = "scores.json, heads.json, heads.csv; heatmap and layers as png and svg"
    return f"{describe(scores, selection, config.top)}\nwritten to {folder}: {products}"


def twins_layout(base: Path, task: Path, key: str) -> HeadLayout:
    """The layout that both folders' models share; a LoRA folder or saved rows have the base's. Raises ValueError for others."""
    layout = layout_of(base)
    if is_change(task):
        return layout
    other = layout_of(task)
    if other != layout:
        raise ValueError(f"{key}: {task} is a {other}; the base is a {layout}: only models of one architecture can be compared")
    return layout


def write_localization(scores: HeadScores, selection: HeadSelection, folder: Path, title: str) -> None:
    """Write scores.json, heads.json, heads.csv, and the pictures heatmap and layers as PNG and SVG into `folder`."""
    scores.save(folder / "scores.json")
    selection.save(folder / "heads.json")
    write_whole(folder / "heads.csv", _heads_csv(scores, selection))
    score_name = f"shift of the head's weights ({scores.how})"
    plot_head_scores(
        scores.values_LH,
        selection.heads,
        title=title,
        score_name=score_name,
        path=folder / "heatmap.png",
        moved=selection.moved_with_group,
    )
    plot_layers(
        [scores.values_LH],
        [chosen_per_layer(selection)],
        [_short(scores.task)],
        title=title,
        score_name=score_name,
        path=folder / "layers.png",
    )


def chosen_per_layer(selection: HeadSelection) -> np.ndarray:
    """Number of chosen heads in each layer, [L]."""
    return np.bincount([layer for layer, _ in selection.heads], minlength=selection.layout.num_layers)


def describe(scores: HeadScores, selection: HeadSelection, top: int) -> str:
    """The best heads as a table, with significant digits, and what the selection comes to."""
    values_LH, layout = scores.values_LH, selection.layout
    chosen, moved = set(selection.heads), set(selection.moved_with_group)
    typical = float(np.median(values_LH))
    lines = [f"{layout}: {scores.how}", "", "  rank  layer  head  kv head      score  of median"]
    for rank, (layer, head) in enumerate(ranked(values_LH)[:top], 1):
        score = float(values_LH[layer, head])
        of_median = f"{score / typical:.3g}x" if typical else "-"
        state = "chosen" if (layer, head) in chosen else "moves along" if (layer, head) in moved else ""
        row = f"{rank:6}  {layer:5}  {head:4}  {layout.group(head):7}  {score:9.4g}  {of_median:>9}  {state}"
        lines.append(row.rstrip())
    lines += ["", f"chosen: {describe_selection(selection)}"]
    return "\n".join(lines)


def describe_selection(selection: HeadSelection) -> str:
    """One line: how many heads, how they were budgeted, and what that is of Q/K/V."""
    layout = selection.layout
    of = f"{selection.ratio:g} of all {selection.budget}" if selection.ratio is not None else "given"
    unit = ", whole key/value groups" if selection.unit == "group" else ""
    return (
        f"{len(selection.heads)} of {layout.num_heads} heads ({of}{unit}); {len(selection.moved_with_group)} more move with "
        f"their key/value head; {selection.qkv_share:.2%} of the Q/K/V parameters"
    )


def _heads_csv(scores: HeadScores, selection: HeadSelection) -> str:
    chosen, moved = set(selection.heads), set(selection.moved_with_group)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rank", "layer", "query_head", "kv_head", "score", "chosen", "moves_along"])
    for rank, (layer, head) in enumerate(ranked(scores.values_LH), 1):
        state = [int((layer, head) in heads) for heads in (chosen, moved)]
        # repr of a float keeps every digit
        table.writerow([rank, layer, head, selection.layout.group(head), repr(float(scores.values_LH[layer, head])), *state])
    return text.getvalue()


def _short(name: str) -> str:
    """The last two parts of a path or hub id: enough to tell models apart in a picture."""
    return "/".join(Path(name).parts[-2:])
