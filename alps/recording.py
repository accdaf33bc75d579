"""Keep the record of a run: result.json, provenance.json, config.yaml, W&B; whether it ends well or not."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from alps import provenance
from alps.config import RunConfig
from alps.evaluate.metrics import Evaluation, Metric, paired_change
from alps.heads import HeadSelection
from alps.result import EvalInfo, MetaInfo, RunInfo, RunResult, TrainInfo
from alps.stages import RunFolder
from alps.tracking import Tracker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What the stages write to."""

    folder: RunFolder
    result: RunResult
    tracker: Tracker


@contextmanager
def recording(config: RunConfig) -> Iterator[Recording]:
    """Open the run's folder and records; on leaving, however that comes about, write result.json and close W&B."""
    folder = RunFolder(Path(config.paths.output).expanduser().resolve())
    strategy = config.strategy
    result = RunResult(
        RunInfo(config.name, command=provenance.command()),
        TrainInfo(strategy.name, strategy.selector, strategy.tuner, strategy.also_train, _ratio_in_force(config)),
        EvalInfo(suites_not_run=list(config.eval.suites)),
        MetaInfo(
            config.seed,
            config.data.seed,
            config.model.path,
            git_sha=provenance.git_sha(),
            versions=provenance.package_versions(),
            device=provenance.device_name(config.trainer.accelerator),
            precision=config.trainer.precision,
        ),
    )
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.yaml")
    (folder.path / "provenance.json").write_text(json.dumps(asdict(result.meta_info), indent=1) + "\n")
    result.save(folder.path / "result.json")
    tracker = Tracker(config.logger, config.name, folder.path, asdict(config))
    started = time.perf_counter()
    try:
        yield Recording(folder, result, tracker)
        result.run_info.status = "completed"
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        result.run_info.status = "interrupted" if stopped else "failed"
        result.run_info.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        result.run_info.wall_seconds = time.perf_counter() - started
        for name, record in folder.records.items():
            # What another config left in the same folder is not this run's.
            if name not in folder.visited:
                continue
            result.run_info.stage_seconds[name] = record.seconds
            result.run_info.stage_parts[name] = record.parts
            result.run_info.stage_peak_memory_bytes[name] = record.peak_memory_bytes
        result.save(folder.path / "result.json")
        images = {"heads": folder.path / "localize" / "heatmap.png"}
        tracker.finish(_summary(result), images, failed=result.run_info.status != "completed")
        folder.close()


def _ratio_in_force(config: RunConfig) -> float:
    """all and none have no budget; say so where one was asked for."""
    fixed = {"all": 1.0, "none": 0.0}.get(config.strategy.selector)
    if fixed is not None and config.strategy.ratio != fixed:
        log.warning("strategy=%s has no budget: strategy.ratio=%g is not used", config.strategy.name, config.strategy.ratio)
    return config.strategy.ratio if fixed is None else fixed


def _summary(result: RunResult) -> dict[str, float]:
    evaluation, train = result.eval_info, result.train_info
    parts = {"base": evaluation.base, "tuned": evaluation.tuned, "change": evaluation.change}
    summary = {f"{part}/{name}": metric["value"] for part, metrics in parts.items() for name, metric in metrics.items()}
    summary |= {"qkv_share": train.qkv_share, "trained_parameters": float(train.trained_parameters)}
    return summary | {"wall_seconds": result.run_info.wall_seconds}


def record_training(result: RunResult, selection: HeadSelection, saved: dict[str, Any]) -> None:
    """What trained and how it went: the training stage's report, into the record."""
    train, parts, fitted = result.train_info, saved["parts"], saved["fit"]
    train.selection_hash = selection.hash
    train.chosen_heads, train.total_heads = parts["chosen_heads"], parts["total_heads"]
    train.moved_with_group = parts["moved_with_group"]
    train.trained_parameters, train.total_parameters = parts["trained"], parts["total"]
    train.qkv_share = parts["qkv_trained"] / parts["qkv_total"]
    train.num_steps, train.tokens = fitted["num_steps"], fitted["num_tokens"]
    train.tokens_per_s, train.loss_curve = fitted["tokens_per_s"], fitted["loss_curve"]
    train.frozen_bit_identical, train.frozen_compared_as = saved["frozen_bit_identical"], saved["frozen_compared_as"]


def record_evaluations(result: RunResult, base: Evaluation, tuned: Evaluation) -> None:
    """Both models' metrics and their paired changes, into the record."""

    def short(metric: Metric) -> dict[str, float]:
        return {"value": metric.value, "stderr": metric.stderr, "n": metric.n}

    info = result.eval_info
    info.base = {name: short(metric) for name, metric in base.metrics.items()}
    info.tuned = {name: short(metric) for name, metric in tuned.metrics.items()}
    info.skipped = {**base.skipped, **tuned.skipped}
    shared = [name for name in base.metrics if name in tuned.metrics]
    info.change = {name: short(paired_change(base.metrics[name], tuned.metrics[name])) for name in shared}
