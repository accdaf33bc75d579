"""Scores against scipy and against a plain extended-precision loop; planted changes; every way to read; every refusal."""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import wasserstein_distance
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from alps.heads import HeadLayout, HeadSelection, Projection
from alps.localize import HeadScores, score_heads
from alps.localize.distance import w1
from alps.tune import merge, train_only
from alps.weights import INDEX_FILE, SINGLE_FILE

# The oracle -------------------------------------------------------------------------------------------------------------


def _slow_w1(base_n: np.ndarray, task_n: np.ndarray, temperature: float = 1.0) -> np.longdouble:
    """W1 of the two softmaxes on 0, 1/(n-1), .., 1, entry by entry: mass that has to cross each gap, times its width."""
    probabilities = []
    for weights_n in (base_n, task_n):
        exponentials_n = np.exp(weights_n.astype(np.longdouble) / np.longdouble(temperature))
        probabilities.append(exponentials_n / exponentials_n.sum())
    carried = total = np.longdouble(0)
    for p, q in zip(probabilities[0][:-1], probabilities[1][:-1], strict=True):
        carried += p - q
        total += abs(carried)
    return total / (len(base_n) - 1)


def _slow_scores(base: Any, task: Any, temperature: float = 1.0) -> np.ndarray:
    """All scores by the definition, from the config and the modules, without the layout."""
    config = base.config
    num_heads, num_kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    scores_LH = np.zeros((config.num_hidden_layers, num_heads), dtype=np.longdouble)
    for layer in range(config.num_hidden_layers):
        for head in range(num_heads):
            group = math.floor(head / (num_heads / num_kv_heads))
            flat = []
            for model in (base, task):
                attention = model.model.layers[layer].self_attn
                numbers: list[float] = []
                for module, index in ((attention.q_proj, head), (attention.k_proj, group), (attention.v_proj, group)):
                    for row in range(index * width, index * width + width):
                        numbers += module.weight[row].tolist()
                flat.append(np.array(numbers))
            scores_LH[layer, head] = _slow_w1(*flat, temperature)
    return scores_LH


def _shifted(n: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    base_n = generator.normal(0, 0.02, n)
    return base_n, base_n + generator.normal(0, 0.02 * shift, n)


def _w1(base_n: np.ndarray, task_n: np.ndarray, temperature: float = 1.0) -> float:
    return w1(torch.from_numpy(base_n), torch.from_numpy(task_n), temperature)


# The distance -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 1000, 20_000])
@pytest.mark.parametrize("shift", [1e-3, 1.0, 100.0])
def test_w1_is_what_scipy_says(n: int, shift: float) -> None:
    base_n, task_n = _shifted(n, shift)
    p_n, q_n = (np.exp(w_n) / np.exp(w_n).sum() for w_n in (base_n, task_n))
    x_n = np.linspace(0, 1, n)
    assert _w1(base_n, task_n) == pytest.approx(wasserstein_distance(x_n, x_n, p_n, q_n), rel=1e-7, abs=0)


@pytest.mark.parametrize("n", [10, 5000, 100_000])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_w1_keeps_seven_digits_of_a_shift_of_a_hundred_thousandth(n: int, temperature: float) -> None:
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("numpy has no extended precision on this machine, so there is no oracle")
    base_n, task_n = _shifted(n, 1e-5)
    expected = _slow_w1(base_n, task_n, temperature)
    assert abs(_w1(base_n, task_n, temperature) / expected - 1) < 1e-7


def test_w1_by_hand() -> None:
    """All mass at the left end against all at the right: it travels the whole way, whatever the number of entries."""
    for n in (2, 7, 50):
        left_n, right_n = np.full(n, -1e3), np.full(n, -1e3)
        left_n[0], right_n[-1] = 0, 0
        assert _w1(left_n, right_n) == pytest.approx(1, abs=1e-12)
    # Half the mass moves from the first to the second of three entries: 1/2 over a distance of 1/2.
    assert _w1(np.log([0.5, 1e-300, 0.5]), np.log([1e-300, 0.5, 0.5])) == pytest.approx(0.25)


# The scores -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "multi-head": ("llama", 4, 4),
    "grouped": ("llama", 6, 2),
    "multi-query": ("llama", 4, 1),
    "biased": ("qwen2", 6, 3),
}


@lru_cache
def _stored(shape: str) -> Any:
    family, num_heads, num_kv_heads = SHAPES[shape]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family,
            vocab_size=32,
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=6,
        )
    ).requires_grad_(False)


def _make(shape: str) -> Any:
    """A fresh copy of the base of a shape."""
    model = type(_stored(shape))(_stored(shape).config)
    model.load_state_dict(_stored(shape).state_dict())
    return model.requires_grad_(False)


def _moved(shape: str, seed: int = 1, size: float = 0.1) -> Any:
    """The base with all weights and biases shifted."""
    model, generator = _make(shape), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += size * parameter.abs().mean().clamp(1e-3) * torch.randn(parameter.shape, generator=generator)
    return model


def _score(base: Any, task: Any, **options: Any) -> HeadScores:
    model = next((model for model in (base, task) if isinstance(model, nn.Module)), None)
    layout = options.pop("layout", None) or HeadLayout.from_model(model or _stored("grouped"))
    return score_heads(base, task, layout, show_progress=False, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-4, 0.5])
def test_scores_are_those_of_the_definition(shape: str, size: float) -> None:
    base, task = _make(shape), _moved(shape, size=size)
    scores = _score(base, task)
    expected_LH = _slow_scores(base, task)
    assert (expected_LH > 0).all()
    np.testing.assert_allclose(scores.values_LH, expected_LH.astype(float), rtol=1e-8)
    assert scores.values_LH.dtype == np.float64
    np.testing.assert_allclose(_score(task, base).values_LH, scores.values_LH, rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_the_temperature_divides_the_weights(temperature: float) -> None:
    base, task = _make("grouped"), _moved("grouped")
    values_LH = _score(base, task, temperature=temperature).values_LH
    np.testing.assert_allclose(values_LH, _slow_scores(base, task, temperature).astype(float), rtol=1e-8)
    assert (np.abs(values_LH / _score(base, task).values_LH - 1) > 0.1).all()
    for model in (base, task):
        for parameter in model.parameters():
            parameter /= temperature  # by a power of two: exact
    np.testing.assert_allclose(_score(base, task).values_LH, values_LH, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projection", ["k", "v"])
def test_a_change_in_one_key_value_head_scores_its_query_heads_only(shape: str, projection: Projection) -> None:
    """The released code cuts K and V by the query head's number: heads from K on then score 0 here, others wrongly."""
    base = _make(shape)
    num_heads, num_kv_heads, width = SHAPES[shape][1], SHAPES[shape][2], 6
    for group in range(num_kv_heads):
        task = _make(shape)
        module = getattr(task.model.layers[1].self_attn, f"{projection}_proj")
        module.weight[group * width : (group + 1) * width] += 0.01 * torch.randn(width, 12)
        size = num_heads // num_kv_heads
        expected = {(1, head) for head in range(group * size, (group + 1) * size)}
        assert {tuple(head) for head in np.argwhere(_score(base, task).values_LH != 0).tolist()} == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_in_one_query_head_scores_that_head_only(shape: str) -> None:
    base = _make(shape)
    for head in range(SHAPES[shape][1]):
        task = _make(shape)
        task.model.layers[0].self_attn.q_proj.weight[head * 6 + 5, 11] += 0.01  # its last entry
        assert np.argwhere(_score(base, task).values_LH > 0).tolist() == [[0, head]]


def test_biases_are_no_part_of_the_score() -> None:
    base, task, other = _make("biased"), _make("biased"), _make("biased")
    for model in (task, other):
        model.model.layers[0].self_attn.q_proj.weight[0, 0] += 0.1
    other.model.layers[0].self_attn.q_proj.bias += 1
    assert np.array_equal(_score(base, task).values_LH, _score(base, other).values_LH)


def test_scoring_leaves_the_models_alone() -> None:
    base, task = _make("grouped"), _moved("grouped")
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    _score(base, task)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
    task.model.layers[0].self_attn.q_proj.weight += 1  # a tensor of inference mode would refuse


# Ways to read -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The base and the moved model of the grouped shape, in one file each and in shards."""
    for name, model in (("base", _make("grouped")), ("task", _moved("grouped"))):
        model.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / f"{name}-shards", max_shard_size="2KB")
    return {path.name: path for path in tmp_path.iterdir()}


def test_models_files_and_shards_give_identical_scores(folders: dict[str, Path]) -> None:
    index = json.loads((folders["task-shards"] / INDEX_FILE).read_text())["weight_map"]
    first_layer = {index[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"}
    assert len(first_layer) > 1, "one head's weights must lie in several shards for this to be a test"
    expected_LH = _score(_make("grouped"), _moved("grouped")).values_LH
    for base in (_make("grouped"), folders["base"], str(folders["base-shards"])):
        for task in (_moved("grouped"), str(folders["task"]), folders["task-shards"]):
            assert np.array_equal(_score(base, task).values_LH, expected_LH)


def test_a_folder_with_both_is_read_as_transformers_reads_it(folders: dict[str, Path]) -> None:
    """Exported over an older sharded export: one of the two is stale."""
    for file in folders["base-shards"].iterdir():
        shutil.copy(file, folders["task"])
    loaded = AutoModelForCausalLM.from_pretrained(folders["task"])
    expected_LH = _score(_make("grouped"), loaded).values_LH
    assert np.array_equal(_score(folders["base"], folders["task"]).values_LH, expected_LH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_may_differ(dtype: torch.dtype, tmp_path: Path) -> None:
    base, task = _make("grouped").to(dtype), _moved("grouped")
    scores = _score(base, task)
    np.testing.assert_allclose(scores.values_LH, _slow_scores(base, task).astype(float), rtol=1e-8)
    base.save_pretrained(tmp_path)
    assert np.array_equal(_score(tmp_path, task).values_LH, scores.values_LH)


def test_rounding_alone_is_a_change_and_an_exact_cast_is_none() -> None:
    base = _make("grouped")
    rounded = _make("grouped").to(torch.bfloat16)
    assert (_score(base, rounded).values_LH > 0).all()
    with pytest.raises(ValueError, match="nothing differs"):
        _score(rounded, _make("grouped").to(torch.bfloat16).to(torch.float32))


def test_names_and_choices_are_kept(folders: dict[str, Path]) -> None:
    scores = _score(folders["base"], _moved("grouped"), temperature=2.0)
    assert (scores.base, scores.task) == (str(folders["base"]), "LlamaForCausalLM")
    assert (scores.representation, scores.distance, scores.temperature) == ("qkv", "w1", 2.0)
    named = _score(folders["base"], folders["task"], names=("this", "that"))
    assert (named.base, named.task) == ("this", "that")


# Refusals ---------------------------------------------------------------------------------------------------------------


def test_identical_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^here and there have the same Q, K, V weights: nothing differs"):
        _score(_make("grouped"), _make("grouped"), names=("here", "there"))


def test_models_that_differ_elsewhere_only_are_refused() -> None:
    task = _moved("biased")
    for layer, of_base in zip(task.model.layers, _make("biased").model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight.copy_(getattr(of_base.self_attn, name).weight)
    with pytest.raises(ValueError, match="nothing differs"):
        _score(_make("biased"), task)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("projection", ["q", "k", "v"])
def test_a_weight_that_is_no_number_is_named(value: float, projection: str) -> None:
    task = _moved("grouped")
    getattr(task.model.layers[1].self_attn, f"{projection}_proj").weight[-1, -1] = value
    for pair in ((_make("grouped"), task), (task, _make("grouped"))):
        with pytest.raises(ValueError, match=rf"model\.layers\.1\.self_attn\.{projection}_proj\.weight holds NaN or Inf"):
            _score(*pair)


def test_weights_that_are_not_read_may_be_anything() -> None:
    task = _moved("grouped")
    task.model.layers[1].self_attn.o_proj.weight[0, 0] = math.nan
    assert (_score(_make("grouped"), task).values_LH > 0).all()


def test_another_shape_is_refused_with_both_shapes() -> None:
    layout = HeadLayout.from_model(_make("multi-head"))  # 4 heads and 4 key/value heads
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight has the shape \(6, 12\); expected \(24, 12\)"):
        _score(_make("multi-head"), _make("multi-query"), layout=layout)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(folders: dict[str, Path], dtype: torch.dtype) -> None:
    weights = load_file(folders["task"] / SINGLE_FILE)
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folders["task"] / SINGLE_FILE)
    with pytest.raises(ValueError, match=rf"q_proj\.weight is stored as {dtype}; only unquantised"):
        _score(folders["base"], folders["task"])


@pytest.mark.parametrize(("folder", "pattern"), [("task", SINGLE_FILE), ("task-shards", "model-00002-of-*.safetensors")])
@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_file_cut_short_is_named(folders: dict[str, Path], folder: str, pattern: str, length: int) -> None:
    [path] = folders[folder].glob(pattern)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged or cut short"):
        _score(folders["base"], folders[folder])


def test_a_shard_that_is_missing_is_named(folders: dict[str, Path]) -> None:
    [path] = folders["task-shards"].glob("model-00002-of-*.safetensors")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{INDEX_FILE} names {path.name}, which is not in the folder"):
        _score(folders["base"], folders["task-shards"])


def test_a_shard_without_its_weight_is_named(folders: dict[str, Path]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    index = json.loads((folders["task-shards"] / INDEX_FILE).read_text())
    path = folders["task-shards"] / index["weight_map"][name]
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path)
    with pytest.raises(ValueError, match=rf"{path.name} lacks {name}, which {INDEX_FILE} says it holds"):
        _score(folders["base"], folders["task-shards"])


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(folders: dict[str, Path], content: str) -> None:
    (folders["task-shards"] / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match=rf"task-shards/{INDEX_FILE} is damaged"):
        _score(folders["base"], folders["task-shards"])


def test_a_missing_weight_is_named_with_the_nearest(folders: dict[str, Path]) -> None:
    path = folders["task"] / SINGLE_FILE
    save_file({name.replace("layers.1.", "layers.1.x."): tensor for name, tensor in load_file(path).items()}, path)
    message = (
        r"task has no weight 'model\.layers\.1\.self_attn\.q_proj\.weight'; "
        r"the nearest is 'model\.layers\.1\.x\.self_attn\.q_proj\.weight'"
    )
    with pytest.raises(ValueError, match=message):
        _score(folders["base"], folders["task"])
    wrapped = nn.ModuleDict({"inner": _moved("grouped")})
    message = r"ModuleDict has no weight 'model\..*'; the nearest is 'inner\.model\.layers\.0\.self_attn\.q_proj\.weight'"
    with pytest.raises(ValueError, match=message):
        _score(folders["base"], wrapped, layout=HeadLayout.from_model(_make("grouped")))


class _RunsWhenLoaded:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


def test_a_folder_of_pickles_is_refused_and_not_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "pickled", tmp_path / "it ran"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_RunsWhenLoaded(trace)))
    with pytest.raises(ValueError, match=rf"pickled holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors"):
        _score(_make("grouped"), folder)
    assert not trace.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert trace.exists(), "the trap would not have shown a load"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", "meta-llama/Llama-3.2-1B"):
        with pytest.raises(ValueError, match=rf"{source} is no folder"):
            _score(_make("grouped"), source)


def test_a_model_with_opened_rows_must_be_merged_first() -> None:
    """Its q, k and v weights are still the base's; the trained rows lie beside them."""
    base, task = _make("grouped"), _make("grouped")
    train_only(task, HeadSelection(HeadLayout.from_model(task), ((1, 4),)))
    task.model.layers[1].self_attn.q_proj.trained.data += 0.1 * torch.randn(6, 12)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj is trained through trained, .* merge the model first"):
        _score(base, task)
    assert np.argwhere(_score(base, merge(task)).values_LH > 0).tolist() == [[1, 4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"representation": "kqv"}, "unknown representation 'kqv'; allowed: .*qkv.*; nearest: qkv"),
        ({"distance": "w_1"}, "unknown distance 'w_1'; allowed: .*w1.*; nearest: w1"),
        ({"distance": "zzz"}, "unknown distance 'zzz'; allowed: [^;]*$"),
        ({"temperature": 0.0}, r"temperature must be above 0; found 0\.0"),
        ({"temperature": -1.0}, r"temperature must be above 0; found -1\.0"),
        ({"temperature": math.nan}, "temperature must be above 0; found nan"),
        ({"temperature": "1"}, "temperature must be above 0; found '1'"),
        ({"temperature": math.inf}, "temperature must be above 0; found inf"),
        ({"temperature": 1e-320}, "the score of layer 0, head 0 is nan: the weights overflow softmax"),
    ],
)
def test_choices_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _score(_make("grouped"), _moved("grouped"), **options)


def test_a_model_with_more_layers_than_the_layout_is_refused() -> None:
    layout = replace(HeadLayout.from_model(_make("grouped")), num_layers=1)
    with pytest.raises(ValueError, match="has more layers than the 1 of the layout"):
        _score(_make("grouped"), _moved("grouped"), layout=layout)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(_make("grouped").config)
    with pytest.raises(ValueError, match="on the meta device"):
        _score(empty, _moved("grouped"), layout=HeadLayout.from_model(_make("grouped")))


def test_names_are_checked_before_the_scoring() -> None:
    with pytest.raises(ValueError, match="names are two"):
        _score(_make("grouped"), _moved("grouped"), names=("one",))


# scores.json ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scores_json(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "head-scores.json"
    _score(_make("grouped"), _moved("grouped")).save(path)
    return path


def test_a_file_gives_back_every_digit(tmp_path: Path) -> None:
    layout = HeadLayout.from_model(_make("grouped"))
    values_LH = np.random.default_rng(0).random((2, 6)) * 10.0 ** np.arange(-12, 0).reshape(2, 6)
    values_LH[0, :3] = 0, 5e-324, 0.1 + 0.2
    scores = HeadScores(layout, values_LH, "qkv", "w1", 0.1, "none", "base", "täsk")
    scores.save(tmp_path / "scores.json")
    again = HeadScores.load(tmp_path / "scores.json")
    assert again.values_LH.tobytes() == values_LH.tobytes()
    assert again.to_json() == scores.to_json()
    assert again.layout == layout


@pytest.mark.parametrize("content", ["", "[]", "3", "null", "{}", "\x00\x01", '{"scores": [[1]]}', '{"layout": 1}'])
def test_a_file_of_something_else_is_refused_by_name(scores_json: Path, content: str) -> None:
    scores_json.write_text(content)
    with pytest.raises(ValueError, match=r"head-scores\.json is not a scores\.json"):
        HeadScores.load(scores_json)


def test_a_file_cut_short_or_without_a_field_is_refused_by_name(scores_json: Path) -> None:
    whole = scores_json.read_text()
    data = json.loads(whole)
    damaged = [whole[:length] for length in range(0, len(whole) - 2, 17)]
    damaged += [json.dumps({key: value for key, value in data.items() if key != field}) for field in data]
    damaged.append(json.dumps(data | {"more": 1}))
    for content in damaged:
        scores_json.write_text(content)
        with pytest.raises(ValueError, match=r"head-scores\.json is not a scores\.json"):
            HeadScores.load(scores_json)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0] * 6], r"shape \(1, 6\)"),
        ([[1.0] * 2] * 6, r"shape \(6, 2\)"),
        ([[1.0] * 6, [1.0] * 5], "inhomogeneous"),
        ([[1.0] * 6, [1.0] * 5 + [math.nan]], "score of layer 1, head 5 is nan"),
        ([[1.0] * 6, [math.inf] + [1.0] * 5], "score of layer 1, head 0 is inf"),
        ([["high"] * 6] * 2, "high"),
    ],
)
def test_a_file_whose_scores_cannot_be_is_refused_by_name(scores_json: Path, values: Any, message: str) -> None:
    scores_json.write_text(json.dumps(json.loads(scores_json.read_text()) | {"scores": values}))
    with pytest.raises(ValueError, match=rf"head-scores\.json is not a scores\.json.*{message}"):
        HeadScores.load(scores_json)
