"""Compare selections of heads and write down what came out: tables, pictures, a summary."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from alps.config import CompareConfig
from alps.files import write_whole
from alps.localize.comparison import RATIOS, Named, Pair, counts_at_ratios, load, overlap_by_ratio, overlap_of_chance
from alps.localize.directions import shift_cosines
from alps.localize.figures import MOST_CURVES, plot_layers, plot_overlap, plot_overlap_by_ratio, plot_tasks
from alps.localize.localization import chosen_per_layer, describe_selection
from alps.models import resolve_model
from alps.progress import quiet_libraries


def compare(config: CompareConfig) -> str:
    """All of `python -m alps.localize.compare`; returns the summary that it prints.

    Raises ValueError, in words for people, for files that cannot be read or compared.
    """
    quiet_libraries()
    paths = [Path(path).expanduser() for path in config.heads]
    entries = load(paths, config.names or _telling_apart(paths))
    pairs = [Pair(one, other) for one, other in itertools.combinations(entries, 2)]
    if config.directions:
        pairs = _with_directions(pairs, Path(config.cache).expanduser(), config.progress)
    write_comparison(entries, pairs, Path(config.out), config.title or f"{len(entries)} selections of heads")
    products = "pairs, heads, layers and ratios, each as csv, png and svg"
    return f"{_describe(entries, pairs)}\nwritten to {config.out}: {products}"


def write_comparison(entries: Sequence[Named], pairs: Sequence[Pair], folder: Path, title: str) -> None:
    """Write the tables pairs.csv, heads.csv, layers.csv and ratios.csv, and a picture of each as PNG and SVG, into `folder`."""
    names = [entry.name for entry in entries]
    scores = [entry.scores.values_LH if entry.scores else None for entry in entries]
    counts = [chosen_per_layer(entry.selection) for entry in entries]
    how = {entry.scores.how for entry in entries if entry.scores}
    score_name = (
        f"shift of the head's weights ({how.pop()})" if len(how) == 1 else "rank of the head (1: the largest score of all)"
    )
    jaccard_NN, correlation_NN = np.eye(len(entries)), np.eye(len(entries))
    for pair in pairs:
        place = names.index(pair.one.name), names.index(pair.other.name)
        jaccard_NN[place] = jaccard_NN[place[::-1]] = pair.jaccard
        correlation_NN[place] = correlation_NN[place[::-1]] = pair.rank_correlation
    write_whole(folder / "pairs.csv", _pairs_csv(pairs))
    write_whole(folder / "heads.csv", _heads_csv(entries, pairs))
    write_whole(folder / "layers.csv", _layers_csv(entries))
    # Scores of different kinds have no common scale, but ranks have.
    shown = scores if len({entry.scores.how for entry in entries if entry.scores}) <= 1 else [_relative_rank(s) for s in scores]
    layout = entries[0].selection.layout
    plot_tasks(
        shown,
        [entry.selection.heads for entry in entries],
        names,
        title=title,
        score_name=score_name,
        path=folder / "heads.png",
        shape=(layout.num_layers, layout.num_query_heads),
    )
    known = any(entry.scores for entry in entries)
    plot_overlap(jaccard_NN, names, title=title, path=folder / "pairs.png", rank_correlation_NN=correlation_NN if known else None)
    plot_layers(scores, counts, names, title=title, score_name=score_name, path=folder / "layers.png")
    scored = [pair for pair in pairs if pair.one.scores and pair.other.scores]
    if scored:
        curves = {pair.name: overlap_by_ratio(pair) for pair in scored}
        chance = np.array([overlap_of_chance(count, count, layout.num_heads) for count in counts_at_ratios(layout.num_heads)])
        write_whole(folder / "ratios.csv", _ratios_csv(curves, chance))
        if len(curves) > MOST_CURVES:  # the table has them all
            first = scored[0].one.name
            curves = {pair.name: curves[pair.name] for pair in scored if pair.one.name == first}
            title = f"{title}: pairs with {first}"
        title = f"{title}: each one's top heads by score, whatever was chosen"
        plot_overlap_by_ratio(RATIOS, curves, title=title, path=folder / "ratios.png", chance=chance)


def _describe(entries: Sequence[Named], pairs: Sequence[Pair]) -> str:
    width = max(len(entry.name) for entry in entries)
    lines = [f"{entries[0].selection.layout}", ""]
    lines += [f"  {entry.name:<{width}}  {describe_selection(entry.selection)}" for entry in entries]
    pair_width = max(len(pair.name) for pair in pairs)
    lines += ["", f"  {'pair':<{pair_width}}  shared  Jaccard  (by chance)  group conflicts  Spearman  mean cosine  opposed"]
    for pair in pairs:
        opposed = "-" if pair.in_direction_conflict is None else str(len(pair.in_direction_conflict))
        correlation, cosine = ("-" if np.isnan(x) else f"{x:.3f}" for x in (pair.rank_correlation, pair.shared_cosine))
        lines.append(
            f"  {pair.name:<{pair_width}}  {len(pair.shared):6}  {pair.jaccard:7.3f}  {pair.chance:11.3f}  "
            f"{len(pair.in_group_conflict):15}  {correlation:>8}  {cosine:>11}  {opposed:>7}"
        )
    lines += ["", "  group conflicts: heads that one chose and the other did not, though it trains their key/value head"]
    if any(pair.cosines_LH is not None for pair in pairs):
        lines.append("  mean cosine: of the two changes of a shared head; opposed: shared heads clearly below 0")
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV text; floats with every digit, None and NaN empty."""

    def cell(value: object) -> object:
        if value is None or value != value:
            return ""
        return repr(float(value)) if isinstance(value, (float, np.floating)) else value

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def _pairs_csv(pairs: Sequence[Pair]) -> str:
    header = [
        *("one", "other", "chosen_by_one", "chosen_by_other", "shared", "jaccard", "jaccard_by_chance", "group_conflicts"),
        *("rank_correlation", "mean_cosine_of_shared", "opposed"),
    ]
    rows = [
        [
            *(pair.one.name, pair.other.name, len(pair.one.selection.heads), len(pair.other.selection.heads), len(pair.shared)),
            *(pair.jaccard, pair.chance, len(pair.in_group_conflict)),
            *(pair.rank_correlation, pair.shared_cosine),
            None if pair.in_direction_conflict is None else len(pair.in_direction_conflict),
        ]
        for pair in pairs
    ]
    return _table(header, rows)


def _heads_csv(entries: Sequence[Named], pairs: Sequence[Pair]) -> str:
    layout = entries[0].selection.layout
    chosen = [set(entry.selection.heads) for entry in entries]
    conflicts = [set(pair.in_group_conflict) for pair in pairs]
    read = [pair for pair in pairs if pair.cosines_LH is not None]
    header = ["layer", "query_head", "kv_head", "num_choosing", "num_group_conflicts"]
    header += [f"chosen: {entry.name}" for entry in entries] + [f"score: {entry.name}" for entry in entries]
    header += [f"cosine: {pair.name}" for pair in read]
    rows = [
        [
            *(head[0], head[1], layout.group(head[1]), sum(head in heads for heads in chosen)),
            sum(head in heads for heads in conflicts),
            *(int(head in heads) for heads in chosen),
            *(None if entry.scores is None else float(entry.scores.values_LH[head]) for entry in entries),
            *(float(pair.cosines_LH[head]) for pair in read if pair.cosines_LH is not None),
        ]
        for head in layout.heads()
    ]
    return _table(header, rows)


def _layers_csv(entries: Sequence[Named]) -> str:
    counts = [chosen_per_layer(entry.selection) for entry in entries]
    header = ["layer"] + [f"chosen: {entry.name}" for entry in entries] + [f"mean score: {entry.name}" for entry in entries]
    means = [None if entry.scores is None else entry.scores.values_LH.mean(1) for entry in entries]
    rows = [
        [layer, *(int(count[layer]) for count in counts), *(None if mean is None else float(mean[layer]) for mean in means)]
        for layer in range(entries[0].selection.layout.num_layers)
    ]
    return _table(header, rows)


def _ratios_csv(curves: Mapping[str, np.ndarray], chance: np.ndarray) -> str:
    rows = [[ratio, *(float(curve[i]) for curve in curves.values()), float(chance[i])] for i, ratio in enumerate(RATIOS)]
    return _table(["ratio", *(f"jaccard: {name}" for name in curves), "jaccard_by_chance"], rows)


def _relative_rank(scores_LH: np.ndarray | None) -> np.ndarray | None:
    """Share of the heads that a head's score is not below, [L, H] up to 1."""
    from scipy.stats import rankdata

    return None if scores_LH is None else rankdata(scores_LH, method="max").reshape(scores_LH.shape) / scores_LH.size


def _with_directions(pairs: Sequence[Pair], cache: Path, show_progress: bool) -> list[Pair]:
    """The pairs with the cosines of their changes, from the models that their scores name."""
    compared = []
    for pair in pairs:
        for named in (pair.one, pair.other):
            if named.scores is None:
                raise ValueError(f"directions: {named.name} has no scores.json beside it that says which models it is of")
        assert pair.one.scores is not None
        assert pair.other.scores is not None
        if pair.one.scores.base != pair.other.scores.base:
            raise ValueError(f"directions: {pair.name} have two bases, {pair.one.scores.base} and {pair.other.scores.base}")
        names = (pair.one.scores.base, pair.one.scores.task, pair.other.scores.task)
        base, one, other = (_folder_of(name, cache) for name in names)
        cosines_LH = shift_cosines(base, one, other, pair.one.selection.layout, show_progress=show_progress)
        compared.append(replace(pair, cosines_LH=cosines_LH))
    return compared


def _folder_of(name: str, cache: Path) -> Path:
    try:
        path, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
        return resolve_model(path, cache, revision or None)
    except ValueError as error:
        raise ValueError(f"directions: the model {name}, which the scores name, is not to be had: {error}") from error


def _telling_apart(paths: Sequence[Path]) -> list[str]:
    """For each path the parts of its folder that not all share, or the file's name where the folders are one."""
    folders = [path.resolve().parent.parts for path in paths]
    if len(set(folders)) < len(folders):
        names = [path.stem for path in paths]
        return names if len(set(names)) == len(names) else [f"{name} {i}" for i, name in enumerate(names, 1)]
    start = 0
    while all(len(parts) > start + 1 for parts in folders) and len({parts[start] for parts in folders}) == 1:
        start += 1
    end = 0
    while all(len(parts) > start + end + 1 for parts in folders) and len({parts[-1 - end] for parts in folders}) == 1:
        end += 1
    return ["/".join(parts[start : len(parts) - end]) for parts in folders]
