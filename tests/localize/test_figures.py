"""The pictures of several tasks show the numbers they were given, on scales that can be compared."""

import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from alps.localize import drawing, figures
from alps.localize.figures import plot_layers, plot_overlap, plot_overlap_by_ratio, plot_tasks

_AWKWARD = "_a$b$ & <c>"
_LONG = "owner/model-of-many-billions-of-weights-instruct-finetuned-on-grade-school-mathematics-and-on-a-lot-of-other-things"


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were drawn, instead of their files."""
    made: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        figure.canvas.draw()
        made.append(figure)
        return path

    monkeypatch.setattr(figures, "save_figure", keep)
    return made


def _scores(n_layers: int, n_heads: int, seed: int = 0, spread: float = 0.5) -> np.ndarray:
    return 1e-7 * np.exp(np.random.default_rng(seed).normal(0, spread, (n_layers, n_heads)))


def _tasks(scores, chosen, names=None, path: Path = Path("a"), **options) -> Path:
    names = [f"task {n}" for n in range(len(scores))] if names is None else names
    return plot_tasks(scores, chosen, names, **({"title": "title", "score_name": "score", "path": path} | options))


def _layers(scores, counts, names=None, path: Path = Path("a"), **options) -> Path:
    names = [f"task {n}" for n in range(len(scores))] if names is None else names
    return plot_layers(scores, counts, names, **({"title": "title", "score_name": "score", "path": path} | options))


def _ratios(ratios, pairs, chance=None, path: Path = Path("a"), title: str = "title") -> Path:
    chance = np.zeros(len(ratios)) if chance is None else chance
    return plot_overlap_by_ratio(ratios, pairs, title=title, path=path, chance=chance)


def _panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_xlabel() == "query head"]


def _mesh(axes: Axes) -> QuadMesh:
    [mesh] = [c for c in axes.collections if isinstance(c, QuadMesh)]
    return mesh


def _outlined(axes: Axes) -> dict[tuple[int, int], str]:
    """Every outlined head with the colour of its outline."""
    heads = {}
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        x, y = patch.get_center()
        assert (x, y) == pytest.approx((round(x), round(y)))
        assert (round(y), round(x)) not in heads
        heads[round(y), round(x)] = to_hex(patch.get_edgecolor())
    return heads


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def _letters(path: Path) -> str:
    """All text of a picture's SVG."""
    return " ".join(text.strip() for text in ElementTree.parse(path.with_suffix(".svg")).getroot().itertext() if text.strip())


def _assert_all_inside(figure: Figure) -> None:
    box = figure.get_tightbbox()  # inches
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= figure.get_figwidth()
    assert box.y1 <= figure.get_figheight()


# Several heatmaps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "n_tasks"), [((30, 9), 3), ((1, 2), 1), ((4, 4), 8), ((2, 12), 5), ((80, 64), 2)])
def test_tasks_show_their_scores_on_one_scale_and_outline_exactly_their_heads(
    shape: tuple[int, int], n_tasks: int, drawn: list[Figure]
) -> None:
    scores = [10.0**n * _scores(*shape, seed=n) for n in range(n_tasks)]
    heads = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
    chosen = [{heads[0], heads[-1 - n % len(heads)]} for n in range(n_tasks)]
    _tasks(scores, [sorted(c) for c in chosen])
    panels = _panels(drawn[0])
    assert len(panels) == n_tasks
    meshes = [_mesh(axes) for axes in panels]
    assert {(mesh.norm.vmin, mesh.norm.vmax, type(mesh.norm)) for mesh in meshes} == {
        (meshes[0].norm.vmin, meshes[0].norm.vmax, type(meshes[0].norm))
    }
    shades = [float(mesh.norm(np.median(s))) for mesh, s in zip(meshes, scores, strict=True)]
    assert shades == sorted(shades)  # ten times the scores is a brighter panel
    in_all = set.intersection(*chosen) if n_tasks > 1 else set()
    for axes, mesh, scores_LH, expected in zip(panels, meshes, scores, chosen, strict=True):
        np.testing.assert_array_equal(mesh.get_array(), scores_LH)
        outlined = _outlined(axes)
        assert set(outlined) == expected
        assert {head for head, colour in outlined.items() if colour != "#ffffff"} == in_all
        assert axes.get_ylim() == (shape[0] - 0.5, -0.5)
        box = axes.get_window_extent()
        assert box.width / shape[1] == pytest.approx(box.height / shape[0])  # square cells
    legend = ["chosen here"] + ([f"chosen in every one ({len(in_all)})"] if n_tasks > 1 else [])
    assert _legend(drawn[0]) == legend
    assert len(drawn[0].axes) == n_tasks + 1  # one colour bar
    _assert_all_inside(drawn[0])


def test_more_than_four_panels_wrap_to_rows_that_do_not_overlap(drawn: list[Figure]) -> None:
    _tasks([_scores(6, 3, n) for n in range(7)], [[]] * 7, [_LONG + str(n) for n in range(7)])
    boxes = [axes.get_tightbbox() for axes in _panels(drawn[0])]
    assert len({round(axes.get_position().y0, 6) for axes in _panels(drawn[0])}) == 2
    for i, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_a_task_without_scores_is_grey_and_leaves_the_scale_alone(drawn: list[Figure]) -> None:
    scores_LH = _scores(3, 4)
    _tasks([None, scores_LH], [[(1, 2)], []])
    without, with_scores = _panels(drawn[0])
    assert np.ma.getmaskarray(_mesh(without).get_array()).all()
    assert to_rgb(without.get_facecolor()) == to_rgb(drawing.PALE)
    assert set(_outlined(without)) == {(1, 2)}
    assert (_mesh(with_scores).norm.vmin, _mesh(with_scores).norm.vmax) == (scores_LH.min(), scores_LH.max())
    assert [text.get_text() for text in without.texts] == ["1 of 12 chosen, no scores", "task 0"]


def test_no_scores_at_all_need_a_shape_and_no_colour_bar(drawn: list[Figure]) -> None:
    _tasks([None, None], [[(1, 2)], [(1, 2)]], shape=(3, 4))
    assert len(drawn[0].axes) == 2
    assert _panels(drawn[0])[0].get_xlim() == (-0.5, 3.5)
    with pytest.raises(ValueError, match=r"no task has scores and shape is None; allowed: \(layers, query heads\)"):
        _tasks([None], [[]])


def test_an_outlier_in_one_task_switches_all_to_a_log_scale_with_grey_zeros(drawn: list[Figure]) -> None:
    scores = [_scores(8, 8, n) for n in range(3)]
    scores[1][2, 3], scores[2][0, 0] = 1.0, 0.0
    _tasks(scores, [[]] * 3)
    meshes = [_mesh(axes) for axes in _panels(drawn[0])]
    assert all(isinstance(mesh.norm, LogNorm) for mesh in meshes)
    assert np.argwhere(np.ma.getmaskarray(meshes[2].get_array())).tolist() == [[0, 0]]
    assert "log scale, grey: 0" in drawn[0].axes[-1].get_ylabel().replace("\n", " ")


# Overlaps -----------------------------------------------------------------------------------------------------------------


def test_every_cell_holds_its_number_readable_on_its_colour_and_nan_is_a_dash(drawn: list[Figure]) -> None:
    jaccard_NN = np.array([[1.0, 0.123], [np.nan, 0.0]])
    correlation_NN = np.array([[1.0, -0.456], [-0.001, np.nan]])
    plot_overlap(jaccard_NN, ["a", "b"], title="t", path=Path("a"), rank_correlation_NN=correlation_NN)
    cells = [{text.get_position(): text for text in axes.texts if text.get_ha() == "center"} for axes in drawn[0].axes]
    texts = [[[cells[n][j, i].get_text() for j in range(2)] for i in range(2)] for n in range(2)]
    assert texts == [[["1.00", "0.12"], ["–", "0.00"]], [["1.00", "−0.46"], ["0.00", "–"]]]
    assert [(_mesh(axes).norm.vmin, _mesh(axes).norm.vmax) for axes in drawn[0].axes] == [(0, 1), (-1, 1)]
    for axes, in_axes in zip(drawn[0].axes, cells, strict=True):
        colours = _mesh(axes).get_facecolors().reshape(2, 2, 4)
        for (j, i), text in in_axes.items():
            contrast = abs(np.dot(colours[i, j, :3], [0.299, 0.587, 0.114]) - to_rgb(text.get_color())[0])
            assert contrast >= 0.45


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("name", ["a", _AWKWARD, _LONG, "W" * 60])
def test_names_of_any_length_fit_beside_and_below_a_matrix(size: int, name: str, drawn: list[Figure]) -> None:
    plot_overlap(np.eye(size), [f"{name}{n}" for n in range(size)], title=_LONG, path=Path("a"), rank_correlation_NN=np.eye(size))
    _assert_all_inside(drawn[0])
    for axes in drawn[0].axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[i + 1 :])
    assert not drawn[0].axes[0].get_tightbbox().overlaps(drawn[0].axes[1].get_tightbbox())


# Layers -------------------------------------------------------------------------------------------------------------------


def test_layers_show_means_over_the_models_mean_and_the_counts(drawn: list[Figure]) -> None:
    scores = [_scores(5, 4), None, 3 * _scores(5, 4, 1)]
    counts = [np.array([0, 1, 2, 0, 4]), np.array([1, 1, 1, 1, 1]), np.zeros(5, dtype=int)]
    _layers(scores, counts)
    lower, upper = drawn[0].axes
    lines = [line for line in upper.lines if len(line.get_xdata()) == 5]
    for line, scores_LH in zip(lines, [scores[0], scores[2]], strict=True):
        assert list(line.get_xdata()) == list(range(5))
        np.testing.assert_allclose(line.get_ydata(), scores_LH.mean(1) / scores_LH.mean())
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 2
    bars = [[bar.get_height() for bar in container] for container in lower.containers]
    assert bars == [list(count_L) for count_L in counts]
    centres = [[bar.get_x() + bar.get_width() / 2 for bar in container] for container in lower.containers]
    assert [[round(x) for x in xs] for xs in centres] == [[0, 1, 2, 3, 4]] * 3
    assert [to_hex(c.patches[0].get_facecolor()) for c in lower.containers][::2] == [to_hex(line.get_color()) for line in lines]
    assert _legend(drawn[0]) == ["task 0", "task 1 (no scores)", "task 2"]
    assert (lower.get_xlabel(), upper.get_xlim()) == ("layer", lower.get_xlim())
    assert upper.get_yscale() == "linear"
    _assert_all_inside(drawn[0])


@pytest.mark.parametrize(("largest", "scale"), [(9.0, "linear"), (11.0, "log")])
def test_a_spread_above_ten_gives_a_log_axis(largest: float, scale: str, drawn: list[Figure]) -> None:
    _layers([np.array([[1.0], [largest]])], [[0, 1]])
    assert drawn[0].axes[1].get_yscale() == scale


def test_scores_whose_mean_is_zero_get_no_line_but_a_note(drawn: list[Figure]) -> None:
    _layers([np.zeros((3, 2)), _scores(3, 2)], [[0, 0, 0], [1, 0, 1]])
    assert _legend(drawn[0]) == ["task 0 (mean 0: no line)", "task 1"]
    _layers([None], [[0, 0, 0]])
    assert len(drawn[1].axes) == 1  # counts only


@pytest.mark.parametrize(("n_layers", "n_tasks"), [(1, 1), (1, 8), (80, 8)])
def test_few_and_many_layers_fit(n_layers: int, n_tasks: int, drawn: list[Figure]) -> None:
    scores = [_scores(n_layers, 64, n, spread=2.0) for n in range(n_tasks)]
    _layers(scores, [np.full(n_layers, 64)] * n_tasks, [f"{_LONG}{n}" for n in range(n_tasks)], score_name=_LONG * 2)
    _assert_all_inside(drawn[0])
    boxes = [label.get_window_extent() for label in drawn[0].axes[0].get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


# Overlap by ratio ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_pairs", [1, 12])
def test_lines_are_the_pairs_overlaps_in_percent_and_look_different(n_pairs: int, drawn: list[Figure]) -> None:
    ratios = (0.01, 0.1, 0.5, 1.0)
    pairs = {f"{_AWKWARD}{n}": np.array([0.0, n / 20, np.nan, 1.0]) for n in range(n_pairs)}
    _ratios(ratios, pairs, chance=np.array([0.01, 0.05, 0.33, 1.0]))
    [axes] = drawn[0].axes
    chance, *lines = axes.lines
    np.testing.assert_allclose(chance.get_xydata(), np.transpose([[1, 10, 50, 100], [0.01, 0.05, 0.33, 1.0]]))
    assert chance.get_linestyle() == "--"
    for line, expected_R in zip(lines, pairs.values(), strict=True):
        np.testing.assert_allclose(line.get_xdata(), [1, 10, 50, 100])
        np.testing.assert_array_equal(line.get_ydata(), expected_R)
    assert len({line.get_marker() for line in lines}) == n_pairs
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == n_pairs
    assert axes.get_ylim() == (0, 1)
    assert "%" in axes.get_xlabel()
    assert _legend(drawn[0]) == [*pairs, "two random choices"]
    _assert_all_inside(drawn[0])


# Files --------------------------------------------------------------------------------------------------------------------

_DRAWINGS = {
    "tasks": lambda path, title: _tasks([_scores(3, 4)] * 2, [[(0, 1)], []], [_AWKWARD, "b\nc"], path, title=title),
    "many": lambda path, title: _tasks([_scores(70, 60)], [[(0, 1)]], [_AWKWARD], path, title=title),
    "layers": lambda path, title: _layers([_scores(3, 4)] * 2, [[0, 1, 2]] * 2, [_AWKWARD, "b\nc"], path, title=title),
    "overlap": lambda path, title: plot_overlap(np.eye(2), [_AWKWARD, "b\nc"], title=title, path=path),
    "ratios": lambda path, title: _ratios((0.1, 1.0), {_AWKWARD: np.ones(2), "b\nc": np.ones(2)}, path=path, title=title),
}


@pytest.mark.parametrize("draw", _DRAWINGS.values(), ids=_DRAWINGS)
def test_writes_png_and_a_repeatable_svg_with_letters_as_they_are(draw, tmp_path: Path) -> None:
    title = "costs $5 and $6 " + "and a lot of words " * 12 + "& <more>"
    first, second = draw(tmp_path / "new" / "a.b", title), draw(tmp_path / "again.png", title)
    assert (first, second) == (tmp_path / "new" / "a.b.png", tmp_path / "again.png")
    assert first.read_bytes().startswith(b"\x89PNG")
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".svg").read_bytes() == second.with_suffix(".svg").read_bytes()
    assert sorted(file.name for file in first.parent.iterdir()) == ["a.b.png", "a.b.svg"]
    letters = _letters(first)
    assert " ".join(title.split()) in letters
    assert _AWKWARD in letters
    assert draw is _DRAWINGS["many"] or "b c" in letters


def test_a_failed_write_leaves_the_old_files_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Figure.savefig
    old = {tmp_path / "a.png": b"old", tmp_path / "a.svg": b"old too"}
    for file, content in old.items():
        file.write_bytes(content)

    def fails_at_the_png(figure: Figure, target: Path, **options: object) -> None:
        whole(figure, target, **options)
        if options["format"] == "png":
            raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails_at_the_png)
    with pytest.raises(OSError, match="disk full"):
        _layers([None], [[1, 2]], path=tmp_path / "a")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == old


@pytest.mark.parametrize("text", ["", " ", "a", "WWW WWW", _LONG, "x" * 5000, "tab\tand\x00bell\x07", "i" * 300])
@pytest.mark.parametrize("lines", [1, 2])
def test_fitted_text_keeps_its_ends_and_its_width(text: str, lines: int) -> None:
    fitted = drawing.fit(text, 1.2, 9, lines=lines).split("\n")
    assert len(fitted) <= lines
    assert all(drawing.text_width(line, 9) <= 1.2 for line in fitted)
    shown, plain = "".join(fitted).replace(" ", ""), drawing.plain(text).replace(" ", "")
    start, ellipsis, end = shown.partition("…")
    assert plain.startswith(start)
    assert plain.endswith(end)
    assert ellipsis or start == plain
    assert abs(len(start) - len(end)) <= 2 or not ellipsis
    assert drawing.plain(text).isprintable()


# Mistakes -----------------------------------------------------------------------------------------------------------------


def _with(value: float) -> np.ndarray:
    scores_LH = _scores(3, 4)
    scores_LH[1, 2] = value
    return scores_LH


_GOOD = _scores(3, 4)
_MISTAKES = {
    "no tasks": (lambda: _tasks([], []), r"0 tasks; allowed: 1 to 8"),
    "nine tasks": (lambda: _tasks([_GOOD] * 9, [[]] * 9), r"9 tasks; allowed: 1 to 8"),
    "nine tasks' layers": (lambda: _layers([None] * 9, [[1]] * 9), r"9 tasks; allowed: 1 to 8"),
    "a name too few": (lambda: _tasks([_GOOD] * 2, [[]] * 2, ["a"]), r"2 scores for 1 names; allowed: one for each name"),
    "a choice too few": (lambda: _tasks([_GOOD] * 2, [[]]), r"1 chosen for 2 names"),
    "a count too few": (lambda: _layers([_GOOD] * 2, [[1, 1, 1]]), r"1 counts for 2 names"),
    "two shapes": (
        lambda: _tasks([_GOOD, _GOOD.T], [[]] * 2),
        r"task 2 \(task 1\): scores have shape \(4, 3\); allowed: \(3, 4\)",
    ),
    "a vector": (lambda: _tasks([_GOOD[0]], [[]]), r"task 1 \(task 0\): scores have shape \(4,\)"),
    "NaN": (lambda: _tasks([_GOOD, _with(np.nan)], [[]] * 2), r"task 2 \(task 1\): score of layer 1, query head 2 is nan"),
    "infinite": (lambda: _layers([_with(np.inf)], [[1, 1, 1]]), r"task 1 \(task 0\): score of layer 1, query head 2 is inf"),
    "outside": (
        lambda: _tasks([_GOOD] * 2, [[], [(0, 4)]]),
        r"task 2 \(task 1\): chosen head \(layer 0, query head 4\) is outside",
    ),
    "outside a shape": (lambda: _tasks([None], [[(3, 0)]], shape=(3, 4)), r"task 1 \(task 0\): chosen head \(layer 3"),
    "too few counts": (lambda: _layers([_GOOD], [[1, 1]]), r"scores have 3 layers and counts 2"),
    "counts differ": (lambda: _layers([None] * 2, [[1, 1], [1]]), r"counts of task 2 \(task 1\) are \[1\]"),
    "a count below 0": (lambda: _layers([None], [[1, -1]]), r"counts of task 1 \(task 0\) are \[1, -1\]"),
    "no counts": (lambda: _layers([None], [[]]), r"counts of task 1 \(task 0\) are \[\]"),
    "one name": (lambda: plot_overlap(np.eye(1), ["a"], title="", path=Path("a")), r"1 names; allowed: 2 to 12"),
    "13 names": (lambda: plot_overlap(np.eye(13), ["a"] * 13, title="", path=Path("a")), r"13 names; allowed: 2 to 12"),
    "3 x 3": (
        lambda: plot_overlap(np.eye(3), ["a", "b"], title="", path=Path("a")),
        r"jaccard_NN has shape \(3, 3\); allowed: \(2, 2\)",
    ),
    "below 0": (
        lambda: plot_overlap(-np.eye(2), ["a", "b"], title="", path=Path("a")),
        r"jaccard_NN holds -1\.0; allowed: 0 to 1",
    ),
    "above 1": (
        lambda: plot_overlap(np.eye(2), ["a", "b"], title="", path=Path("a"), rank_correlation_NN=2 * np.eye(2)),
        r"rank_correlation_NN holds 2\.0; allowed: -1 to 1",
    ),
    "no pairs": (lambda: _ratios([0.1], {}), r"0 pairs; allowed: 1 to 12"),
    "13 pairs": (lambda: _ratios([0.1], {str(n): np.ones(1) for n in range(13)}), r"13 pairs; allowed: 1 to 12"),
    "percent": (
        lambda: _ratios([1, 10], {"a": np.ones(2)}),
        r"ratios are \[1\.0, 10\.0\]; allowed: ascending, above 0 and up to 1",
    ),
    "descending": (lambda: _ratios([0.2, 0.1], {"a": np.ones(2)}), r"ratios are \[0\.2, 0\.1\]"),
    "ratio 0": (lambda: _ratios([0, 0.1], {"a": np.ones(2)}), r"ratios are \[0\.0, 0\.1\]"),
    "ratio NaN": (lambda: _ratios([0.1, math.nan], {"a": np.ones(2)}), r"ratios are \[0\.1, nan\]"),
    "a ratio too many": (lambda: _ratios([0.1, 0.2], {"a / b": np.ones(1)}), r"a / b has shape \(1,\); allowed: \(2,\)"),
    "chance": (lambda: _ratios([0.1], {"a": np.ones(1)}, chance=np.ones(2)), r"chance has shape \(2,\); allowed: \(1,\)"),
}


@pytest.mark.parametrize(("draw", "message"), _MISTAKES.values(), ids=_MISTAKES)
def test_mistakes_are_named_and_draw_nothing(draw, message: str, drawn: list[Figure]) -> None:
    with pytest.raises(ValueError, match=message):
        draw()
    assert not drawn
