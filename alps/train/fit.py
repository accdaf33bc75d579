"""Run a training: Lightning's Trainer with our batches, progress and logs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from datasets import Dataset
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.utils.data import DataLoader

from alps.config import CallbacksConfig, TrainConfig, TrainerConfig
from alps.data.batches import MicroBatches, StepOrder
from alps.progress import progress
from alps.train.module import FineTuning


@dataclass(frozen=True)
class FitReport:
    """What a training did. `tokens_per_s` is over the whole fit, padding not counted; `loss_curve` has one value a step."""

    num_steps: int
    num_tokens: int
    tokens_per_s: float
    loss_curve: list[float]


def fit(
    model: Any,
    data: Dataset,
    *,
    train: TrainConfig,
    trainer: TrainerConfig,
    callbacks: CallbacksConfig,
    seed: int,
    pad_id: int,
    folder: Path,
    what: str = "training",
    num_steps: int | None = None,
    learning_rate: float | None = None,
    loggers: Sequence[Logger] = (),
) -> FitReport:
    """Train the parameters of `model` that require a gradient, in place; `model` comes back in evaluation mode.

    `folder` receives metrics.csv. `num_steps` and `learning_rate` override the config's (the proxy's training uses its own).
    Raises FloatingPointError where the loss or its gradient becomes NaN or infinite.
    """
    order = StepOrder(len(data), train.batch_size, seed)
    num_steps = num_steps or train.num_steps or order.num_steps(train.epochs)
    batches = MicroBatches(data, order, train.micro_batch_size, num_steps, pad_id)
    bar = progress([], what, "step", total=num_steps, show=callbacks.progress)

    def on_step(loss: float, tokens_per_s: float) -> None:
        bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        bar.update()

    module = FineTuning(model, train, learning_rate or train.learning_rate, num_steps, on_step)
    model.train()
    lightning.seed_everything(seed, verbose=False)
    with warnings.catch_warnings():
        # Batches are made from lists in memory: worker processes would only cost.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*modules in eval mode.*")
        # A stage that is done again replaces its own metrics.
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        runner = lightning.Trainer(
            accelerator=trainer.accelerator,
            devices=1,
            precision=trainer.precision,  # type: ignore[arg-type]
            max_steps=num_steps,
            accumulate_grad_batches=batches.accumulation,
            logger=[CSVLogger(folder, name="", version=""), *loggers],
            log_every_n_steps=callbacks.log_every_n_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        started = time.perf_counter()
        try:
            with bar:
                runner.fit(module, DataLoader(batches, batch_size=None, shuffle=False))
        except SystemExit as stopped:
            # Lightning makes an exit of Ctrl-C.
            if not isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            raise KeyboardInterrupt from None
    seconds = time.perf_counter() - started
    model.eval()
    return FitReport(num_steps, module.tokens_seen, module.tokens_seen / seconds, module.loss_curve)
