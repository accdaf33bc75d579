"""Supervised fine-tuning of whatever trains in a model, as a LightningModule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch

from alps.config import TrainConfig
from alps.data.batches import Batch
from alps.train.loss import to_device, token_losses
from alps.train.optimizer import make_adamw, warmup_then_cosine


class FineTuning(lightning.LightningModule):
    """Trains the parameters of `model` that require a gradient, on response tokens.

    The loss of an optimizer step is the mean over the response tokens of the *whole* step, however it is cut into micro-batches:
    each micro-batch's summed loss is multiplied by accumulation / (response tokens of the step), and Lightning divides by the
    accumulation count. Logs, once a step: loss, lr, grad_norm (before clipping), tokens_per_s (real tokens, no padding).
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        learning_rate: float,
        num_steps: int,
        on_step: Callable[[float, float], None] = lambda loss, tokens_per_s: None,
    ) -> None:
        """`on_step` is told each finished step's loss and tokens a second."""
        super().__init__()
        self.model = model
        self.config = config
        self.learning_rate = learning_rate
        self.num_steps = num_steps
        self.on_step = on_step
        self.loss_curve: list[float] = []
        self.tokens_seen = 0
        self._step_loss = 0.0
        self._step_tokens = 0
        self._step_started = 0.0

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = make_adamw(
            self.model.parameters(), self.learning_rate, self.config.weight_decay, (self.config.beta1, self.config.beta2)
        )
        factor = warmup_then_cosine(self.num_steps, self.config.warmup_ratio, self.config.final_lr_ratio)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        # Lightning switches to training mode; dropout is off in all supported decoders' configs unless LoRA asks for it.
        self._step_started = time.perf_counter()

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return to_device(batch, device)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = token_losses(self.model, batch).sum() * batch["loss_scale"]
        value = loss.item() / self.trainer.accumulate_grad_batches
        self._check_finite("loss", value)
        self._step_loss += value
        self._step_tokens += int(batch["attention_mask_BT"].sum())
        return loss

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        limit = self.config.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(trained, limit)
        # A finite loss can have a gradient that is not; after the last step nothing else would notice.
        self._check_finite("gradient's norm", norm.item())
        self.log("grad_norm", norm)
        # Here and not after the step, when the schedule has gone on to the next one.
        self.log("lr", optimizer.param_groups[0]["lr"])

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {what} became {value} at step {self.global_step}: lower train.learning_rate, "
                "or use trainer.precision=32-true"
            )

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if not batch["last_of_step"]:
            return
        now = time.perf_counter()
        self.loss_curve.append(self._step_loss)
        self.tokens_seen += self._step_tokens
        self.log("loss", self._step_loss)
        tokens_per_s = self._step_tokens / (now - self._step_started)
        self.log("tokens_per_s", tokens_per_s)
        self.on_step(self._step_loss, tokens_per_s)
        self._step_loss, self._step_tokens, self._step_started = 0.0, 0, now
