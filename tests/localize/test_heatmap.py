"""The picture of the head scores shows exactly the scores and heads it was given."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from alps.localize.heatmap import _head_scores_figure, plot_head_scores


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _scores(n_layers: int, n_heads: int, spread: float = 0.5) -> np.ndarray:
    return 1e-7 * np.exp(np.random.default_rng(0).normal(0, spread, (n_layers, n_heads)))


def _figure(scores_LH: np.ndarray, chosen=(), moved=(), title: str = "title") -> Figure:
    figure = _head_scores_figure(scores_LH, chosen, title=title, score_name="score", moved=moved)
    figure.canvas.draw()
    return figure


def _mesh(figure: Figure) -> QuadMesh:
    [mesh] = [c for c in figure.axes[0].collections if isinstance(c, QuadMesh)]
    return mesh


def _outlined(figure: Figure) -> list[tuple[int, int]]:
    heads = []
    for patch in figure.axes[0].patches:
        assert isinstance(patch, Rectangle)
        x, y = patch.get_center()
        assert (x, y) == pytest.approx((round(x), round(y)))
        assert 0.5 < patch.get_width() < 1
        assert patch.get_width() == patch.get_height()
        heads.append((round(y), round(x)))
    return heads


def _bar_ticks(figure: Figure) -> dict[str, float]:
    axes = figure.axes[2]
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    return {label.get_text(): float(tick) for tick, label in ticks if low <= tick <= high}


def _cell_inches(axes: Axes) -> tuple[float, float]:
    box = axes.get_window_extent()
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    return box.width / abs(x1 - x0), box.height / abs(y1 - y0)


@pytest.mark.parametrize("shape", [(4, 4), (30, 9), (32, 32), (48, 40), (1, 12), (12, 1), (1, 1)])
def test_scores_outlines_dots_and_counts_are_those_given(shape: tuple[int, int]) -> None:
    n_layers, n_heads = shape
    scores_LH = _scores(*shape)
    order = [(int(i) // n_heads, int(i) % n_heads) for i in np.argsort(-scores_LH, axis=None)]
    chosen, moved = order[: len(order) // 10 + 1], order[-2:-1]
    figure = _figure(scores_LH, chosen, moved)
    grid, counts, _ = figure.axes

    np.testing.assert_array_equal(_mesh(figure).get_array(), scores_LH)
    corners = _mesh(figure).get_coordinates()  # row i of the array is drawn at y = i, and y grows downwards
    assert corners[0, 0].tolist() == [-0.5, -0.5]
    assert corners[-1, -1].tolist() == [n_heads - 0.5, n_layers - 0.5]
    assert grid.get_ylim() == (n_layers - 0.5, -0.5)
    assert grid.get_xlim() == (-0.5, n_heads - 0.5)
    assert counts.get_ylim() == grid.get_ylim()
    width, height = _cell_inches(grid)
    assert width == pytest.approx(height)

    assert sorted(_outlined(figure)) == sorted(chosen)
    dots = [(int(y), int(x)) for line in grid.lines for x, y in line.get_xydata()]
    assert dots == moved
    expected = [sum(layer == row for layer, _ in chosen) for row in range(n_layers)]
    assert [bar.get_width() for bar in counts.patches] == expected
    assert [text.get_text() for text in counts.texts] == [str(n) if n else "" for n in expected]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == f"chosen: {len(chosen)} of {scores_LH.size}"
    assert len(legend) == (2 if moved else 1)
    assert (grid.get_xlabel(), grid.get_ylabel()) == ("query head", "layer")


@pytest.mark.parametrize("shape", [(4, 4), (30, 9), (48, 40)])
def test_every_text_lies_inside_the_picture_and_tick_labels_do_not_overlap(shape: tuple[int, int]) -> None:
    figure = _figure(_scores(*shape, spread=2.0), [(0, 0)], [(1, 1)], title="a title of many words " * 8)
    inside = figure.get_tightbbox()  # inches
    assert inside.x0 >= 0
    assert inside.y0 >= 0
    assert inside.x1 <= figure.get_figwidth()
    assert inside.y1 <= figure.get_figheight()
    for labels, low, high in (
        (figure.axes[0].get_xticklabels(), "x0", "x1"),
        (figure.axes[0].get_yticklabels()[::-1], "y0", "y1"),
    ):
        boxes = [label.get_window_extent() for label in labels]
        assert all(getattr(a, high) + 10 < getattr(b, low) for a, b in itertools.pairwise(boxes))


def test_repeated_numpy_and_overlapping_heads_are_drawn_once() -> None:
    figure = _figure(_scores(3, 3), [(np.int64(1), np.int64(2)), (1, 2)], moved=[(1, 2), (0, 0), (0, 0)])
    assert _outlined(figure) == [(1, 2)]
    assert [line.get_xydata().tolist() for line in figure.axes[0].lines] == [[[0, 0]]]
    assert [bar.get_width() for bar in figure.axes[1].patches] == [0, 1, 0]


def test_small_scores_get_a_common_power_of_ten_in_the_label() -> None:
    figure = _figure(np.linspace(1e-8, 9e-8, 16).reshape(4, 4))
    assert figure.axes[2].get_ylabel() == "score (×10⁻⁸)"
    assert _bar_ticks(figure) == pytest.approx({"2": 2e-8, "4": 4e-8, "6": 6e-8, "8": 8e-8})


def test_outliers_switch_to_a_log_scale_that_keeps_the_other_heads_apart() -> None:
    scores_LH = _scores(32, 32)
    scores_LH[7, 3] = 1.0  # seven powers of ten above the rest
    scores_LH[0, :2] = 0.0, 1e-30
    figure = _figure(scores_LH)
    mesh = _mesh(figure)
    assert isinstance(mesh.norm, LogNorm)
    assert "log scale, grey: 0" in figure.axes[2].get_ylabel().replace("\n", " ")
    np.testing.assert_array_equal(np.ma.getdata(mesh.get_array()), scores_LH)
    assert np.argwhere(np.ma.getmaskarray(mesh.get_array())).tolist() == [[0, 0]]
    shades = np.clip(np.ma.getdata(mesh.norm(scores_LH[1:])), 0, 1)
    assert np.percentile(shades, 95) - np.percentile(shades, 5) > 0.3
    ticks = _bar_ticks(figure)
    assert {"5×10⁻⁸", "10⁻⁷", "2×10⁻⁷"} <= set(ticks)
    assert [ticks["10⁻⁷"], ticks["2×10⁻⁷"]] == pytest.approx([1e-7, 2e-7])


def test_signed_outliers_keep_the_sign_apart() -> None:
    scores_LH = _scores(6, 6) * np.where(np.arange(36).reshape(6, 6) % 2, 1, -1)
    scores_LH[2, 2], scores_LH[3, 3] = -1e-4, 1e-4
    figure = _figure(scores_LH)
    norm = _mesh(figure).norm
    assert isinstance(norm, SymLogNorm)
    assert norm(-1e-7) < norm(0.0) < norm(1e-7)
    ticks = _bar_ticks(figure)
    assert [ticks["−10⁻⁶"], ticks["0"], ticks["10⁻⁶"]] == pytest.approx([-1e-6, 0, 1e-6])


@pytest.mark.parametrize(("value", "shape"), [(0.0, (6, 4)), (3e-7, (6, 4)), (-2.5, (3, 2)), (1e6, (1, 1))])
def test_equal_scores_draw_without_warnings(value: float, shape: tuple[int, int], tmp_path: Path) -> None:
    scores_LH = np.full(shape, value)
    assert list(_bar_ticks(_figure(scores_LH)).values()) == [value]
    assert plot_head_scores(scores_LH, [], title="", score_name="score", path=tmp_path / "a.png").is_file()


def test_one_nonzero_score_and_nearly_equal_scores_draw_without_warnings() -> None:
    one_LH = np.zeros((4, 4))
    one_LH[1, 2] = 1e-8
    assert len(_bar_ticks(_figure(one_LH))) > 2
    assert list(_bar_ticks(_figure(1 + 1e-16 * np.arange(16).reshape(4, 4)))) == ["1.00"]  # rounding only
    assert len(_bar_ticks(_figure(1 + 1e-7 * np.arange(16).reshape(4, 4)))) > 2


def test_dollars_in_the_title_are_money_not_mathematics() -> None:
    [title] = _figure(_scores(4, 4), title="costs $5 and $6").texts
    assert (title.get_text(), title.get_parse_math()) == ("costs $5 and $6", False)


def test_writes_png_and_svg_replaces_them_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "heads.png"
    for title in ("first", "second"):
        before = path.read_bytes() if path.exists() else b""
        assert plot_head_scores(_scores(30, 9), [(3, 4)], title=title, score_name="a $", path=path) == path
        after = path.read_bytes()
        assert after.startswith(b"\x89PNG")
        assert len(after) > 20_000
        assert after != before
        assert title in "".join(ElementTree.parse(path.with_suffix(".svg")).getroot().itertext())
    assert sorted(path.parent.iterdir()) == [path, path.with_suffix(".svg")]


def test_failed_write_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.png"
    path.write_bytes(b"old")

    def fails_midway(_figure: Figure, target: Path, **_: object) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails_midway)
    with pytest.raises(OSError, match="disk full"):
        plot_head_scores(_scores(2, 2), [], title="t", score_name="s", path=path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 4), (4, 0), ()])
def test_refuses_scores_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allowed: \(layers, query heads\)") as caught:
        plot_head_scores(np.ones(shape), [], title="t", score_name="s", path=tmp_path / "a.png")
    assert str(shape) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_refuses_scores_that_are_not_finite_and_names_the_head(value: float) -> None:
    scores_LH = _scores(4, 5)
    scores_LH[2, 3] = value
    with pytest.raises(ValueError, match=f"layer 2, query head 3 is {value}; allowed: finite"):
        _figure(scores_LH)


@pytest.mark.parametrize("head", [(4, 0), (0, 5), (-1, 0), (0, -1)])
@pytest.mark.parametrize("name", ["chosen", "moved"])
def test_refuses_heads_outside_the_grid(head: tuple[int, int], name: str) -> None:
    message = rf"{name} head \(layer {head[0]}, query head {head[1]}\).*layers 0\.\.3, query heads 0\.\.4"
    with pytest.raises(ValueError, match=message):
        _figure(_scores(4, 5), **{name: [(0, 0), head]})
