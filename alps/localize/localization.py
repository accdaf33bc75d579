"""Score two checkpoints, choose the top heads, and write down what came out: numbers, tables and pictures."""

from __future__ import annotations

import csv
import io
import logging
from pathlib import Path

import numpy as np
import torch

from alps.changes import is_change
from alps.config import LocalizeConfig
from alps.files import write_whole
from alps.heads import Head, HeadLayout, HeadSelection
from alps.localize.figures import plot_layers
from alps.localize.heatmap import plot_head_scores
from alps.localize.scores import HeadScores, group_means, ranked, score_heads
from alps.models import layout_of, resolve_model
from alps.progress import quiet_libraries
from alps.select import select_heads

log = logging.getLogger(__name__)
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
    if is_change(base):
        raise ValueError(f"base: {config.base} is a change to a model (LoRA or trained rows); give the model that it changes")
    layout = twins_layout(base, task, "task")
    # A budget that no head fits into is refused before the scoring, not after it.
    select_heads("random", layout, config.ratio, budget=config.budget, unit=config.unit)
    # A local folder by its full path, so that the record can be used from anywhere.
    chosen = ((config.base, config.base_revision), (config.task, config.task_revision))
    names = [str(Path(name).resolve()) if Path(name).is_dir() else name_at(name, revision) for name, revision in chosen]
    _say_what_is_replaced(Path(config.out) / "scores.json", names)
    partial = Path(config.out) / "partial_scores.json"
    scores = score_heads(
        base,
        task,
        layout,
        representation=config.representation,
        distance=config.distance,
        temperature=config.temperature,
        normalization=config.normalization,
        names=names,
        partial=partial,
        show_progress=config.progress,
    )
    folder = Path(config.out)
    scores.save(folder / "scores.json")
    partial.unlink(missing_ok=True)
    selection = select_heads("spad", layout, config.ratio, scores=scores, budget=config.budget, unit=config.unit)
    write_localization(scores, selection, folder, config.title or f"{_short(config.task)} against {_short(config.base)}")
    products = "scores.json, heads.json, heads.csv; heatmap and layers as png and svg"
    return f"{describe(scores, selection, config.top)}\nwritten to {folder}: {products}"


def name_at(name: str, revision: str | None) -> str:
    """A hub id with its revision, as scores.json records it."""
    return f"{name}@{revision}" if revision else name


def _say_what_is_replaced(path: Path, names: list[str]) -> None:
    if path.is_file():
        try:
            before = HeadScores.load(path)
        except ValueError:
            return
        if [before.base, before.task] != names:
            log.warning("%s held scores of %s against %s; they are replaced", path, before.task, before.base)


def twins_layout(base: Path, task: Path, key: str) -> HeadLayout:
    """The layout that both folders' models share; a LoRA folder or saved rows have the base's. Raises ValueError for others."""
    layout = layout_of(base, key="base")
    if is_change(task):
        return layout
    other = layout_of(task, key=key)
    if other != layout:
        raise ValueError(f"{key}: {task} is a {other}; the base is a {layout}: only models of one architecture can be compared")
    return layout


def write_localization(scores: HeadScores, selection: HeadSelection, folder: Path, title: str) -> None:
    """Write heads.json, heads.csv, and the pictures heatmap and layers as PNG and SVG into `folder`, beside the scores."""
    selection.save(folder / "heads.json")
    write_whole(folder / "heads.csv", _heads_csv(scores, selection))
    score_name = f"shift of the head's weights ({scores.how})"
    title = f"{title}\n{describe_budget(selection)}"
    plot_head_scores(
        scores.values_LH,
        selection.heads,
        title=title,
        score_name=score_name,
        path=folder / "heatmap.png",
        moved=selection.moved_with_group,
    )
    plot_layers(
        # Divided by their layer's mean, every layer has the mean 1.
        [None if scores.normalization == "layer" else scores.values_LH],
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
    layout, by_group = selection.layout, selection.unit == "group"
    typical = float(np.median(scores.values_LH))
    header = "  rank  layer  head  kv head      score   / median" + ("  group mean" if by_group else "")
    lines = [f"{layout}: {scores.how}", "", header]
    means_LH = group_means(scores.values_LH, layout)
    for rank, (layer, head) in enumerate(_in_order(scores, selection)[:top], 1):
        score = float(scores.values_LH[layer, head])
        over_median = f"{score / typical:.3g}" if typical else "-"
        row = f"{rank:6}  {layer:5}  {head:4}  {layout.group(head):7}  {score:9.4g}  {over_median:>9}"
        row += f"  {means_LH[layer, head]:10.4g}" if by_group else ""
        lines.append(f"{row}  {_state(selection, (layer, head))}".rstrip())
    lines += ["", f"chosen: {describe_selection(selection)}"]
    return "\n".join(lines)


def describe_selection(selection: HeadSelection) -> str:
    """One line: how many heads, how they were budgeted, and what that is of Q/K/V."""
    return (
        f"{describe_budget(selection)}; {len(selection.moved_with_group)} more move along with their key/value head; "
        f"{selection.qkv_share:.2%} of the Q/K/V parameters"
    )


def describe_budget(selection: HeadSelection) -> str:
    """How many heads were chosen, and how they were counted."""
    counted = "Q/K/V parameters" if selection.budget == "parameters" else "heads"
    of = f"{100 * selection.ratio:g} % of the {counted}" if selection.ratio is not None else "given"
    unit = ", in whole key/value groups" if selection.unit == "group" else ""
    return f"{len(selection.heads)} of {selection.layout.num_heads} heads ({of}{unit})"


def _in_order(scores: HeadScores, selection: HeadSelection) -> list[Head]:
    """All heads as they were ranked: by their own score, or by their group's mean."""
    by_group = selection.unit == "group"
    return ranked(group_means(scores.values_LH, selection.layout) if by_group else scores.values_LH)


def _state(selection: HeadSelection, head: Head) -> str:
    if head in selection.heads:
        return "chosen"
    return "moves along" if (head[0], selection.layout.group(head[1])) in selection.groups else ""


def _heads_csv(scores: HeadScores, selection: HeadSelection) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rank", "layer", "query_head", "kv_head", "score", "group_mean_score", "chosen", "moves_along"])
    means_LH = group_means(scores.values_LH, selection.layout)
    states = {head: _state(selection, head) for head in selection.layout.heads()}
    for rank, (layer, head) in enumerate(_in_order(scores, selection), 1):
        state = [int(states[layer, head] == word) for word in ("chosen", "moves along")]
        # repr of a float keeps every digit
        values = [repr(float(array[layer, head])) for array in (scores.values_LH, means_LH)]
        table.writerow([rank, layer, head, selection.layout.group(head), *values, *state])
    return text.getvalue()


def _short(name: str) -> str:
    """The last two parts of a path or hub id: enough to tell models apart in a picture."""
    return "/".join(Path(name).parts[-2:])
