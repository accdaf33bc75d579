"""`python -m alps.localize` and `python -m alps.localize.compare`: what they write and refuse, and stopping."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from alps.checks import ConfigError
from alps.compose import check_command_line
from alps.config import BUDGETS, DISTANCES, NORMALIZATIONS, REPRESENTATIONS, UNITS, CompareConfig, LocalizeConfig
from alps.heads import HeadSelection
from alps.localize import HeadScores, scores
from alps.localize.__main__ import LOCALIZE
from alps.localize.comparison_report import compare
from alps.localize.localization import localize
from alps.models import make_random_llama

DEFAULTS: dict[str, Any] = {
    "ratio": 0.1, "budget": "heads", "unit": "head", "representation": "qkv", "distance": "w1", "temperature": 1.0,
    "normalization": "none", "top": 5, "progress": False, "cache": "cache",
}  # fmt: skip


def command(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ALPS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def moved(base: Path, folder: Path, seed: int = 1, size: float = 0.01) -> Path:
    """A copy of the base with every weight shifted."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(tiny, tmp_path_factory.mktemp("task"))


def run(base: Path, task: Path, out: Path, **options: Any) -> str:
    return localize(LocalizeConfig(**{**DEFAULTS, "base": str(base), "task": str(task), "out": str(out), **options}))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# What they write --------------------------------------------------------------------------------------------------------


def test_both_commands_as_a_person_types_them(tiny: Path, task: Path, tmp_path: Path) -> None:
    other = moved(tiny, tmp_path / "other", seed=2)
    done = command(tmp_path, "alps.localize", f"base={tiny}", f"task={task}", "out=one", "ratio=0.25", "top=3")
    assert done.returncode == 0, done.stderr
    assert "chosen: 8 of 32 heads (25 % of the heads)" in done.stdout
    assert done.stdout.count(" chosen\n") == 3
    done = command(
        tmp_path, "alps.localize", "-m", f"base={tiny}", f"task={other}", "distance=w1,relative_l2", "out=two/${distance}"
    )
    assert done.returncode == 0, done.stderr
    files = {"scores.json", "heads.json", "heads.csv", "heatmap.png", "heatmap.svg", "layers.png", "layers.svg"}
    for folder in ("one", "two/w1", "two/relative_l2"):
        assert files <= {path.name for path in (tmp_path / folder).iterdir()}
        assert not (tmp_path / folder / "partial_scores.json").exists()
    heads = "one/heads.json,two/w1/heads.json,two/relative_l2/heads.json"
    done = command(tmp_path, "alps.localize.compare", f"heads=[{heads}]", "out=compared", "directions=true")
    assert done.returncode == 0, done.stderr
    products = {f"{name}.{kind}" for name in ("pairs", "heads", "layers", "ratios") for kind in ("csv", "png", "svg")}
    assert products <= {path.name for path in (tmp_path / "compared").iterdir()}
    assert "two/w1" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "compared", "other", "multirun"}, (
        "nothing is left elsewhere"
    )


def test_the_tables_hold_what_the_json_holds(tiny: Path, task: Path, tmp_path: Path) -> None:
    run(tiny, task, tmp_path, ratio=0.2)
    found, selection = HeadScores.load(tmp_path / "scores.json"), HeadSelection.load(tmp_path / "heads.json")
    rows = rows_of(tmp_path / "heads.csv")
    values = [float(row["score"]) for row in rows]
    assert values == sorted(values, reverse=True)
    by_head = {(int(row["layer"]), int(row["query_head"])): row for row in rows}
    assert len(by_head) == found.layout.num_heads
    for (layer, head), row in by_head.items():
        assert float(row["score"]) == found.values_LH[layer, head]
        assert int(row["kv_head"]) == head // found.layout.group_size
    assert {head for head, row in by_head.items() if row["chosen"] == "1"} == set(selection.heads)
    assert {head for head, row in by_head.items() if row["moves_along"] == "1"} == set(selection.moved_with_group)
    for picture in ("heatmap.svg", "layers.svg"):
        ElementTree.parse(tmp_path / picture)


def test_small_scores_are_printed_with_their_digits(tiny: Path, tmp_path: Path) -> None:
    text = run(tiny, moved(tiny, tmp_path / "near", size=1e-6), tmp_path / "out")
    best = text.splitlines()[3].split()
    assert float(best[4]) == pytest.approx(HeadScores.load(tmp_path / "out" / "scores.json").values_LH.max(), rel=1e-3)
    assert 0 < float(best[4]) < 1e-7


def test_all_choices_reach_the_files(tiny: Path, task: Path, tmp_path: Path) -> None:
    how = {"representation": "qkv_product", "distance": "js", "temperature": 0.5, "normalization": "layer"}
    run(tiny, task, tmp_path, **how, unit="group", budget="parameters", ratio=0.3)
    for file in ("scores.json", "heads.json"):
        data = json.loads((tmp_path / file).read_text())
        assert {key: data[key] for key in how} == how
    assert (data["unit"], data["budget"], data["ratio"], data["method"]) == ("group", "parameters", 0.3, "spad")
    assert HeadSelection.load(tmp_path / "heads.json").moved_with_group == ()
    np.testing.assert_allclose(HeadScores.load(tmp_path / "scores.json").values_LH.mean(1), 1, rtol=1e-12)


def test_a_comparison_without_scores_shows_the_selections_alone(tiny: Path, task: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        run(tiny, moved(tiny, tmp_path / f"task{seed}", seed), tmp_path / name)
        (tmp_path / name / "scores.json").unlink()
    heads = [str(tmp_path / name / "heads.json") for name in ("a", "b")]
    text = compare(CompareConfig(heads=heads, cache="cache", progress=False, out=str(tmp_path / "out")))
    assert " - " in text
    assert not (tmp_path / "out" / "ratios.csv").exists()
    assert (tmp_path / "out" / "heads.png").is_file()
    (pair,) = rows_of(tmp_path / "out" / "pairs.csv")
    one, other = (set(HeadSelection.load(Path(path)).heads) for path in heads)
    assert float(pair["jaccard"]) == len(one & other) / len(one | other)
    assert pair["rank_correlation"] == ""


def test_the_same_files_again_give_the_same_bytes(tiny: Path, task: Path, tmp_path: Path) -> None:
    for name in ("once", "twice"):
        run(tiny, task, tmp_path / name)
    for file in ("scores.json", "heads.json", "heads.csv", "heatmap.svg", "heatmap.png", "layers.svg", "layers.png"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes(), file


# Stopping ---------------------------------------------------------------------------------------------------------------


def _stop_at(monkeypatch: pytest.MonkeyPatch, layer: int) -> list[int]:
    """Scoring is interrupted when it gets to `layer`; returns the layers that were read."""
    read: list[int] = []
    real = scores.read_layer

    def interrupted(source: Any, layout: Any, index: int, projections: Any) -> Any:
        if index == layer:
            raise KeyboardInterrupt
        read.append(index)
        return real(source, layout, index, projections)

    monkeypatch.setattr(scores, "read_layer", interrupted)
    return read


def test_what_was_stopped_goes_on_to_the_same_scores(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny, task, tmp_path / "whole", normalization="weight_scale")
    with monkeypatch.context() as stopped:
        _stop_at(stopped, 2)
        with pytest.raises(KeyboardInterrupt):
            run(tiny, task, tmp_path / "out", normalization="weight_scale")
    assert (tmp_path / "out" / "partial_scores.json").is_file()
    assert not (tmp_path / "out" / "scores.json").exists()
    with monkeypatch.context() as going_on:
        read = _stop_at(going_on, 99)
        run(tiny, task, tmp_path / "out", normalization="weight_scale")
    assert sorted(set(read)) == [2, 3], "finished layers are not read again"
    assert (tmp_path / "out" / "scores.json").read_bytes() == (tmp_path / "whole" / "scores.json").read_bytes()


@pytest.mark.parametrize("change", ["distance", "weights", "damage"])
def test_layers_of_something_else_are_not_taken(change: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, options = moved(tiny, tmp_path / "task"), {}
    with monkeypatch.context() as stopped:
        _stop_at(stopped, 2)
        with pytest.raises(KeyboardInterrupt):
            run(tiny, task, tmp_path / "out")
    if change == "distance":
        options = {"distance": "kl"}
    elif change == "weights":
        moved(tiny, task, seed=5)
    else:
        partial = tmp_path / "out" / "partial_scores.json"
        partial.write_text(partial.read_text()[:-20])
    run(tiny, task, tmp_path / "out", **options)
    run(tiny, task, tmp_path / "anew", **options)
    assert (tmp_path / "out" / "scores.json").read_bytes() == (tmp_path / "anew" / "scores.json").read_bytes()


@pytest.mark.parametrize("layer", ["5", [[1.0], [1.0]], [["a"] * 8, [1.0] * 8], [[None] * 8, [1.0] * 8], {}])
def test_a_layer_that_was_damaged_is_scored_again(layer: Any, tiny: Path, task: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as stopped:
        _stop_at(stopped, 2)
        with pytest.raises(KeyboardInterrupt):
            run(tiny, task, tmp_path / "out")
    partial = tmp_path / "out" / "partial_scores.json"
    data = json.loads(partial.read_text())
    data["layers"]["0"] = layer
    partial.write_text(json.dumps(data))
    run(tiny, task, tmp_path / "out")
    run(tiny, task, tmp_path / "anew")
    assert (tmp_path / "out" / "scores.json").read_bytes() == (tmp_path / "anew" / "scores.json").read_bytes()
    assert not partial.exists()


def test_with_groups_heads_rank_as_they_were_chosen(tiny: Path, task: Path, tmp_path: Path) -> None:
    text = run(tiny, task, tmp_path, unit="group", ratio=0.25, top=32)
    states = [line.split()[-1] == "chosen" for line in text.splitlines()[3:35]]
    assert states == sorted(states, reverse=True)
    rows = rows_of(tmp_path / "heads.csv")
    assert [row["chosen"] for row in rows] == ["1"] * 8 + ["0"] * 24
    for row in rows:
        group = [float(r["score"]) for r in rows if (r["layer"], r["kv_head"]) == (row["layer"], row["kv_head"])]
        assert float(row["group_mean_score"]) == pytest.approx(np.mean(group))


def test_the_record_names_folders_so_that_they_are_found_again(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        moved(tiny, tmp_path / "models" / name, seed)
    monkeypatch.chdir(tmp_path / "models")
    for name in ("one", "two"):
        run(tiny, Path(name), tmp_path / "out" / name)
    monkeypatch.chdir(tmp_path)
    heads = [f"out/{name}/heads.json" for name in ("one", "two")]
    text = compare(CompareConfig(heads=heads, directions=True, cache="cache", progress=False, out="compared"))
    assert "mean cosine" in text
    (pair,) = rows_of(tmp_path / "compared" / "pairs.csv")
    assert pair["opposed"] == "0"


def test_other_scores_that_are_replaced_are_named(tiny: Path, task: Path, tmp_path: Path, caplog: Any) -> None:
    run(tiny, task, tmp_path / "out")
    run(tiny, task, tmp_path / "out", distance="kl")
    assert "replaced" not in caplog.text
    run(tiny, moved(tiny, tmp_path / "other", seed=3), tmp_path / "out")
    assert f"held scores of {task.resolve()}" in caplog.text


def test_scores_are_kept_where_what_comes_after_fails(
    tiny: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"less than a single head"):
        run(tiny, task, tmp_path / "out", budget="parameters", ratio=1e-9)
    assert not (tmp_path / "out").exists(), "a budget that nothing fits into is refused before the scoring"
    monkeypatch.setattr("alps.localize.localization.write_localization", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny, task, tmp_path / "out")
    assert HeadScores.load(tmp_path / "out" / "scores.json").values_LH.any()


# What they refuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base=A", "task=B"], "out = '???'"),
        (["base=A", "task=A", "out=o"], "another model than base"),
        (["base=./A", "task=./B", "out=o"], "task = './B'"),
        (["base=A", "task=B", "out=o", "distance=w2"], "nearest: w1"),
        (["base=A", "task=B", "out=o", "ratio=1.5"], "ratio = 1.5"),
        (["base=A", "task=B", "out=o", "temperature=0"], "more than 0"),
        (["base=A", "task=B", "out="], "a folder's path"),
        (["base=A", "task=B", "out=o", "distence=kl"], "nearest: distance"),
        (["base=A", "task=B", "out=o", "model=tiny"], "model = 'tiny': no such key"),
        (["base=random:tny", "task=B", "out=o"], "random:tiny"),
        (["base=A", "task=B,C", "out=o"], "add -m to sweep"),
        (["-m", "base=A", "task=B,C", "out=o"], "a folder for each job"),
        (["-m", "base=A", "task=B", "out=o/s,./o/s"], "a folder for each job"),
        (["base=A", "task=B", "out=o", "ratio=0"], "more than 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_command_line(arguments, LOCALIZE)
    assert said in str(caught.value)


def test_what_is_wrong_in_a_model_is_one_sentence_and_exit_code_two(tiny: Path, tmp_path: Path) -> None:
    make_random_llama(tmp_path / "other", seed=1, num_hidden_layers=3)
    done = command(tmp_path, "alps.localize", f"base={tiny}", "task=other", "out=o")
    assert done.returncode == 2
    assert "task: other is a llama (L3 " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("run", "task: .*run is the folder of a run; its model is .*run/model"),
        ("gptj", "task: .*gptj: model family 'gptj' is not supported"),
        ("nothing", "task: .*nothing has no usable config.json"),
    ],
)
def test_what_a_folder_is_instead_of_a_model(model: str, said: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    make_random_llama(tmp_path / "run" / "model", seed=1)
    (tmp_path / "gptj").mkdir()
    (tmp_path / "gptj" / "config.json").write_text(json.dumps({"model_type": "gptj", "n_layer": 1, "n_head": 2, "n_embd": 16}))
    with pytest.raises(ValueError, match=said):
        run(tiny, tmp_path / model, tmp_path / "out")


def test_a_change_is_no_base(tiny: Path, task: Path, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"base: .*lora is a change to a model"):
        run(tmp_path / "lora", task, tmp_path / "out")


def test_results_do_not_go_into_a_model(tiny: Path, task: Path) -> None:
    with pytest.raises(ConfigError, match="it is the model task"):
        check_command_line([f"base={tiny}", f"task={task}", f"out={task}"], LOCALIZE)


def test_help_names_every_choice(tmp_path: Path) -> None:
    done = command(tmp_path, "alps.localize", "--help")
    for words in (REPRESENTATIONS, DISTANCES, NORMALIZATIONS, BUDGETS, UNITS):
        assert f": {' | '.join(words)}\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_two_folders_for_one_job_are_refused(tiny: Path, task: Path, tmp_path: Path) -> None:
    done = command(tmp_path, "alps.localize", f"base={tiny}", f"task={task}", "out=o", "hydra.run.dir=elsewhere")
    assert done.returncode == 2
    assert "out=DIR alone" in done.stderr


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (["a/heads.json"], "2 to 8 heads.json files"),
        (["a/heads.json", "b/heads.jsn"], "nearest: "),
        (["a", "b/heads.json"], "a folder"),
        (["a/heads.json", "./a/heads.json"], "each file once"),
    ],
)
def test_heads_files_that_are_not_there(heads: list[str], said: str, tiny: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "heads.json").write_text("{}")
    done = command(tmp_path, "alps.localize.compare", f"heads=[{','.join(heads)}]", "out=o")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
