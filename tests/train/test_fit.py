"""Training through Lightning against a loop written out by hand, and what it promises on the way."""

from __future__ import annotations

import copy
import csv
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from alps.config import CallbacksConfig, LoraConfig, TrainConfig, TrainerConfig
from alps.data.batches import StepOrder
from alps.heads import HeadLayout, HeadSelection
from alps.select import select_heads
from alps.train.fit import FitReport, fit
from alps.train.module import FineTuning
from alps.train.optimizer import make_adamw, warmup_then_cosine
from alps.tune import SliceTrainableLinear, open_for_training, train_only

PAD, NUM_LAYERS = 1, 4


@pytest.fixture(autouse=True)
def _restored_interrupt() -> Any:
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def make_model(dtype: torch.dtype = torch.float32, **shape: Any) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(**{
        "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1, **shape,
    })  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def make_data(num_examples: int = 13) -> Dataset:
    """Ragged lengths, and ragged shares of learned tokens: a mean of micro-batch means would be another number."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(2, 60, (4 + (5 * i) % 13,), generator=generator).tolist() for i in range(num_examples)]
    learned = [[place >= len(row) - 1 - (3 * i) % (len(row) - 1) for place in range(len(row))] for i, row in enumerate(ids)]
    return Dataset.from_dict({"ids": ids, "learned": learned})


def recipe(**changes: Any) -> TrainConfig:
    return TrainConfig(**{
        "epochs": 1.0, "num_steps": 4, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 1e-2, "warmup_ratio": 0.5,
        "final_lr_ratio": 0.1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "clip_norm": 1.0, **changes,
    })  # fmt: skip


def run_fit(
    model: Any, folder: Path, train: TrainConfig, *, data: Dataset | None = None, precision: str = "32-true", **more: Any
) -> FitReport:
    return fit(
        model,
        make_data() if data is None else data,
        train=train,
        trainer=TrainerConfig("cpu", precision),
        callbacks=CallbacksConfig(progress=False, log_every_n_steps=1),
        **{"seed": 0, "pad_id": PAD, "folder": folder, **more},
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def select(model: Any, heads: list[tuple[int, int]]) -> HeadSelection:
    return HeadSelection(HeadLayout.from_model(model), tuple(heads))


# One optimizer step, however it is cut -------------------------------------------------------------------------------------


def loss_of_a_step(model: Any, data: Dataset, step: int) -> torch.Tensor:
    """The oracle: the mean over all learned tokens of a step's examples, taken one by one without any padding."""
    losses = []
    for i in StepOrder(len(data), 8, 0).examples(step):
        ids = torch.tensor(data["ids"][i])
        logits = model(input_ids=ids[None]).logits[0]
        losses += [
            functional.cross_entropy(logits[place - 1], ids[place]) for place in range(1, len(ids)) if data["learned"][i][place]
        ]
    return torch.stack(losses).mean()


def train_by_hand(model: Any, factors: list[float], clip_norm: float) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one step for each factor on the learning rate of 0.01."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
    )
    losses, norms = [], []
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        loss = loss_of_a_step(model, make_data(), step)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained))
        for parameter in trained:
            parameter.grad *= min(1.0, clip_norm / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 1])
@pytest.mark.parametrize("also_train", ["nothing", "rest"])
def test_equals_a_loop_by_hand_however_a_step_is_cut(micro_batch_size: int, also_train: str, tmp_path: Path) -> None:
    """Four steps over more than two epochs: losses, norms before clipping, learning rates and weights, in float64."""
    ours = make_model(torch.float64)
    train_only(ours, select(ours, [(0, 1), (2, 3)]), also_train=also_train)  # type: ignore[arg-type]
    by_hand = copy.deepcopy(ours)
    # Half of four steps is warm-up: 1/2, 1; then cosine to a tenth: 0.1 + 0.9 * (1 + cos(pi/2)) / 2, 0.1.
    factors = [0.5, 1.0, 0.55, 0.1]
    clip_norm = 0.05
    losses, norms = train_by_hand(by_hand, factors, clip_norm)
    assert min(norms) > clip_norm, "the clip was never in force"
    report = run_fit(ours, tmp_path, recipe(micro_batch_size=micro_batch_size, clip_norm=clip_norm))
    assert report.loss_curve == pytest.approx(losses, rel=1e-10)
    for (name, found), expected in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")

    rows = metrics(tmp_path)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    assert [row["lr"] for row in rows] == pytest.approx([1e-2 * factor for factor in factors], rel=1e-6)
    assert all(row["tokens_per_s"] > 0 for row in rows)
    data = make_data()
    real_tokens = sum(len(data["ids"][i]) for step in range(4) for i in StepOrder(len(data), 8, 0).examples(step))
    assert (report.num_steps, report.num_tokens) == (4, real_tokens)


class Gradients(FineTuning):
    """Keeps the accumulated gradients of the last step, before they are clipped."""

    seen: ClassVar[dict[str, torch.Tensor]] = {}

    def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
        Gradients.seen = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        super().configure_gradient_clipping(*arguments, **named)


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 1])
def test_accumulated_gradients_are_those_of_one_big_batch(
    micro_batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alps.train.fit.FineTuning", Gradients)
    model = make_model(torch.float64)
    train_only(model, select(model, [(1, 0), (3, 3)]))
    big = copy.deepcopy(model)
    loss_of_a_step(big, make_data(), 0).backward()
    run_fit(model, tmp_path, recipe(num_steps=1, micro_batch_size=micro_batch_size))
    expected = {name: p.grad for name, p in big.named_parameters() if p.requires_grad}
    # Only trained parameters have a gradient at all.
    assert set(Gradients.seen) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(Gradients.seen[name], gradient, rtol=0, atol=1e-10)


def test_no_clipping_where_the_limit_is_zero(tmp_path: Path) -> None:
    ours = make_model(torch.float64)
    train_only(ours, select(ours, [(0, 1)]))
    by_hand = copy.deepcopy(ours)
    train_by_hand(by_hand, [0.5, 1.0, 0.55, 0.1], clip_norm=math.inf)
    run_fit(ours, tmp_path, recipe(clip_norm=0.0))
    for found, expected in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# Schedule and optimizer ------------------------------------------------------------------------------------------------------


def test_schedule_against_values_by_hand() -> None:
    factor = warmup_then_cosine(num_steps=10, warmup_ratio=0.4, final_ratio=0.2)
    found = [factor(step) for step in range(10)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    # From 1 to 0.2 in six steps; halfway there, a cosine is at the middle; a third of the way, at three quarters.
    assert found[5] == pytest.approx(0.2 + 0.8 * 0.75)
    assert found[6] == pytest.approx(0.6)
    assert found[7] == pytest.approx(0.2 + 0.8 * 0.25)
    assert found[9] == pytest.approx(0.2)
    assert factor(10) == factor(99) == pytest.approx(0.2)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 60, 300])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("final_ratio", [0.0, 0.1, 1.0])
def test_schedule_rises_to_the_peak_then_falls_to_the_end(num_steps: int, warmup_ratio: float, final_ratio: float) -> None:
    factor = warmup_then_cosine(num_steps, warmup_ratio, final_ratio)
    found = [factor(step) for step in range(num_steps)]
    num_warmup = math.ceil(warmup_ratio * num_steps)
    rising, falling = found[:num_warmup], found[num_warmup:]
    assert all(0 <= value <= 1 for value in found)
    assert found[0] > 0 or (num_steps == 1 and final_ratio == 0)
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if rising:
        assert rising[-1] == 1.0
    if falling:
        assert falling[-1] == pytest.approx(final_ratio, abs=1e-12)


def test_warm_up_is_counted_in_decimals() -> None:
    """0.07 of 100 is 7, and a little more in binary floats."""
    factor = warmup_then_cosine(100, 0.07, 0.1)
    assert [factor(step) for step in (5, 6)] == pytest.approx([6 / 7, 1.0])
    assert factor(7) < 1


def test_weight_decay_is_on_trained_matrices_only() -> None:
    model = make_model(attention_bias=True)
    train_only(model, select(model, [(0, 0), (2, 1)]), also_train="rest")
    optimizer = make_adamw(model.parameters(), 0.5, 0.25, (0.8, 0.95))
    decayed, plain = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
    in_decayed = {names[id(p)] for p in decayed["params"]}
    in_plain = {names[id(p)] for p in plain["params"]}
    assert {"model.layers.0.self_attn.q_proj.trained", "model.embed_tokens.weight"} <= in_decayed
    assert "model.layers.0.mlp.up_proj.weight" in in_decayed
    assert {"model.layers.0.self_attn.q_proj.trained_bias", "model.norm.weight"} <= in_plain
    assert "model.layers.1.self_attn.o_proj.bias" in in_plain
    assert in_decayed | in_plain == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not in_decayed & in_plain


def test_an_optimizer_of_rows_has_one_group() -> None:
    model = make_model()
    train_only(model, select(model, [(0, 0)]))
    (group,) = make_adamw(model.parameters(), 1.0, 0.1, (0.9, 0.99)).param_groups
    assert [tuple(parameter.shape) for parameter in group["params"]] == [(6, 24)] * 3


# What a training does ----------------------------------------------------------------------------------------------------------


def toy_data() -> Dataset:
    """After a letter comes the next one: learnable in a few steps."""
    ids = [[5 + (start + place) % 20 for place in range(8)] for start in range(20)]
    return Dataset.from_dict({"ids": ids, "learned": [[False] * 2 + [True] * 6] * 20})


@pytest.mark.parametrize("tuner", ["rows", "lora", "full"])
def test_the_loss_goes_down(tuner: str, tmp_path: Path) -> None:
    model = make_model(initializer_range=0.3)
    every_head = select_heads("all", HeadLayout.from_model(model), 1.0)
    model = open_for_training(model, tuner, every_head, lora=LoraConfig(rank=8, alpha=8))
    curve = run_fit(model, tmp_path, recipe(learning_rate=3e-2), data=toy_data(), num_steps=40).loss_curve
    assert len(curve) == 40
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5])
    assert not model.training


def test_steps_and_learning_rate_by_argument_by_recipe_and_by_epochs(tmp_path: Path) -> None:
    def trained(name: str, train: TrainConfig, **arguments: Any) -> list[dict[str, float]]:
        model = make_model(num_hidden_layers=1)
        train_only(model, select(model, [(0, 0)]))
        run_fit(model, tmp_path / name, train, **arguments)
        return metrics(tmp_path / name)

    assert len(trained("recipe", recipe(num_steps=3))) == 3
    # 13 examples twice, eight at a time.
    assert len(trained("epochs", recipe(num_steps=None, epochs=2.0))) == 4
    rows = trained("arguments", recipe(num_steps=3, warmup_ratio=0.0, final_lr_ratio=1.0), num_steps=2, learning_rate=0.5)
    assert [row["lr"] for row in rows] == [0.5, 0.5]


@pytest.mark.parametrize("tuner", ["rows", "lora"])
def test_the_same_seed_gives_the_same_curve_to_the_bit(tuner: str, tmp_path: Path) -> None:
    def curve(name: str, seed: int, other_draws: int) -> list[float]:
        model = make_model()
        torch.manual_seed(other_draws)
        every_head = select_heads("all", HeadLayout.from_model(model), 1.0)
        model = open_for_training(model, tuner, every_head, lora=LoraConfig(rank=4, alpha=4, dropout=0.2), seed=seed)
        return run_fit(model, tmp_path / name, recipe(), seed=seed).loss_curve

    first = curve("first", 7, 1)
    assert curve("again", 7, 2) == first
    assert curve("other", 8, 1) != first


def test_nan_says_the_step_and_what_to_change(tmp_path: Path) -> None:
    model = make_model()
    train_only(model, select(model, [(0, 0)]))
    calls = []

    def spoil(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        # Two micro-batches a step: this is in the third step, counted from 0 as step 2.
        return output * float("nan") if len(calls) == 6 else output

    model.get_output_embeddings().register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match=r"the loss became nan at step 2: lower train\.learning_rate"):
        run_fit(model, tmp_path, recipe(micro_batch_size=4))
    assert len(metrics(tmp_path)) == 2, "the curve up to there is what one wants to see"


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    """The loss of the last step is fine, its gradient is not: without a check the weights would be NaN and nobody told."""
    model = make_model()
    train_only(model, select(model, [(0, 0)]))
    slices = model.model.layers[0].self_attn.q_proj
    calls = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("inf") if len(calls) == 4 else gradient

    slices.trained.register_hook(spoil)
    with pytest.raises(FloatingPointError, match=r"gradient's norm became (nan|inf) at step 3: lower train\.learning_rate"):
        run_fit(model, tmp_path, recipe(num_steps=4))
    assert slices.trained.isfinite().all()


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """A shell starts what it runs in the background deaf to Ctrl-C, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_comes_through_as_ctrl_c(tmp_path: Path) -> None:
    """Lightning would exit instead. And the process must hear the next one."""
    model = make_model()
    train_only(model, select(model, [(0, 0)]))
    handler = signal.getsignal(signal.SIGINT)
    calls = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    model.get_output_embeddings().register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_fit(model, tmp_path, recipe())
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(metrics(tmp_path)) == 2


def test_an_exit_that_is_no_ctrl_c_stays_one(tmp_path: Path) -> None:
    model = make_model()
    train_only(model, select(model, [(0, 0)]))

    def leave(*_: Any) -> None:
        raise SystemExit(3)

    model.get_output_embeddings().register_forward_hook(leave)
    with pytest.raises(SystemExit) as stopped:
        run_fit(model, tmp_path, recipe())
    assert stopped.value.code == 3


# Precision, and what is not computed -----------------------------------------------------------------------------------------


def watch(model: Any, what: Callable[[Any, Any], Any]) -> list[Any]:
    """What `what(module, output)` says at each call of a trained linear."""
    seen: list[Any] = []
    for module in model.modules():
        if isinstance(module, SliceTrainableLinear):
            module.register_forward_hook(lambda module, _, output: seen.append(what(module, output)))
    return seen


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("also_train", ["nothing", "rest"])
def test_bf16_mixed(base: torch.dtype, also_train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bf16; trained weights and gradients float32; what is frozen stays what it was, to the bit."""
    monkeypatch.setattr("alps.train.fit.FineTuning", Gradients)
    model = make_model(base)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_only(model, select(model, [(1, 0), (3, 3)]), also_train=also_train)  # type: ignore[arg-type]
    in_force = watch(model, lambda _, y: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), y.dtype))
    curve = run_fit(model, tmp_path, recipe(num_steps=6), precision="bf16-mixed").loss_curve
    assert set(in_force) == {(True, torch.bfloat16, torch.bfloat16)}
    seen = Gradients.seen
    for name, parameter in model.named_parameters():
        assert (name in seen) == parameter.requires_grad
        if parameter.requires_grad:
            assert parameter.dtype == seen[name].dtype == torch.float32, name
        else:
            assert parameter.dtype == base
            assert torch.equal(parameter, start[name]), name
    assert not torch.is_autocast_enabled("cpu")

    exact = make_model(base).float()
    train_only(exact, select(exact, [(1, 0), (3, 3)]), also_train=also_train)  # type: ignore[arg-type]
    assert curve == pytest.approx(run_fit(exact, tmp_path / "exact", recipe(num_steps=6)).loss_curve, rel=0.02)


def test_full_precision_is_full(tmp_path: Path) -> None:
    model = make_model()
    train_only(model, select(model, [(1, 0)]))
    in_force = watch(model, lambda _, y: (torch.is_autocast_enabled("cpu"), y.dtype))
    run_fit(model, tmp_path, recipe(num_steps=1))
    assert set(in_force) == {(False, torch.float32)}


@pytest.mark.parametrize(("also_train", "lowest"), [("nothing", 2), ("rest", 0)])
def test_nothing_goes_backward_below_the_lowest_trained_layer(also_train: str, lowest: int, tmp_path: Path) -> None:
    model = make_model()
    train_only(model, select(model, [(2, 0), (3, 1)]), also_train=also_train)  # type: ignore[arg-type]
    has_history: dict[int, set[bool]] = {layer: set() for layer in range(NUM_LAYERS)}
    went_backward: set[int] = set()
    for number, layer in enumerate(model.model.layers):

        def note(module: Any, arguments: Any, output: Any, number: int = number) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            has_history[number].add(hidden.grad_fn is not None)
            if hidden.requires_grad:
                hidden.register_hook(lambda _: went_backward.add(number))

        layer.register_forward_hook(note)
    run_fit(model, tmp_path, recipe(num_steps=2, micro_batch_size=4))
    assert has_history == {layer: {layer >= lowest} for layer in range(NUM_LAYERS)}
    assert went_backward == set(range(lowest, NUM_LAYERS))
