"""`python -m alps.run`: score heads, train only those, measure, export."""

from __future__ import annotations

import gc
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alps.checks import ConfigError, fault, fixed_also_train
from alps.compose import run_cli
from alps.config import RunConfig

log = logging.getLogger("alps")


def main() -> None:
    """The command."""
    run_cli(lambda config: print(_report(run(config))), "config")


def run(config: RunConfig) -> Any:
    """The whole pipeline of one run; returns its RunResult, also written to OUTPUT/result.json.

    A stage whose product is in the folder already, made from the same inputs, is not done again. Raises what went wrong, after
    writing a result.json with status failed (or interrupted).
    """
    from alps import provenance
    from alps.result import EvalInfo, MetaInfo, RunInfo, RunResult, TrainInfo
    from alps.stages import RunFolder
    from alps.tracking import Tracker
    from alps.train.fit import quiet_lightning, set_threads

    _check_machine(config)
    quiet_lightning()
    set_threads(config.trainer)
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
    (folder.path / "provenance.json").write_text(json.dumps(asdict(result.meta_info), indent=1) + "\n")
    _save_config(config, folder.path / "config.yaml")
    tracker = Tracker(config.logger, config.name, folder.path, asdict(config))
    started = time.perf_counter()
    try:
        _Pipeline(config, folder, result, tracker).run()
        result.run_info.status = "completed"
    except BaseException as error:
        result.run_info.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        result.run_info.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        result.run_info.wall_seconds = time.perf_counter() - started
        for name, record in folder.records.items():
            result.run_info.stage_seconds[name] = record.seconds
            result.run_info.stage_parts[name] = record.parts
            result.run_info.stage_peak_memory_bytes[name] = record.peak_memory_bytes
        result.save(folder.path / "result.json")
        summary = {f"{part}/{k}": v["value"] for part in ("base", "tuned", "change") for k, v in getattr(result.eval_info, part).items()}
        tracker.finish(summary, {"heads": folder.path / "localize/heatmap.png"}, failed=result.run_info.status != "completed")
    return result


class _Pipeline:
    """The stages in order. One model is in memory at a time; the base's weights are never changed under it."""

    def __init__(self, config: RunConfig, folder: Any, result: Any, tracker: Any) -> None:
        from alps.models import fingerprint, load_tokenizer, resolve_model

        self.config, self.folder, self.result, self.tracker = config, folder, result, tracker
        self.cache = Path(config.paths.cache).expanduser()
        self.base_folder = resolve_model(config.model.path, self.cache, config.model.revision)
        self.tokenizer = load_tokenizer(self.base_folder)
        self.base_fingerprint = result.meta_info.base_fingerprint = fingerprint(self.base_folder)
        self._model: Any = None

    def run(self) -> None:
        from alps.data.task_data import prepare_data
        from alps.models import fingerprint

        # Before the first model is loaded: an unsupported family is refused here.
        self.layout = _layout_of(self.base_folder)
        self.data = prepare_data(self.config.data, self.tokenizer, self.cache)
        self.result.meta_info.data_fingerprint = self.data.fingerprint
        log.info("data\n%s", self.data.describe())
        base = self._evaluate("base", self.base_folder, self.base_fingerprint)
        selection = self._select(self._localize())
        tuned_folder = self._train(selection)
        tuned = self._evaluate("tuned", tuned_folder, fingerprint(tuned_folder))
        self._record(base, tuned)

    def _base_model(self) -> Any:
        from alps.models import load_model

        if self._model is None:
            device = "cuda" if self.config.trainer.accelerator == "gpu" else "cpu"
            self._model = load_model(
                self.base_folder, dtype=self.config.model.dtype, attention=self.config.model.attention, device=device
            )
        return self._model

    def _release(self) -> None:
        self._model = None
        gc.collect()

    def _evaluate(self, name: str, model_folder: Path, model_fingerprint: str) -> Any:
        from alps.evaluate.metrics import Evaluation
        from alps.evaluate.task import evaluate_task
        from alps.models import load_model

        config = self.config
        product = self.folder.path / "evaluation" / f"{name}.json"
        measured = {k: v for k, v in asdict(config.eval).items() if k not in ("suites",)}
        inputs = [model_fingerprint, self.data.fingerprint, measured, config.trainer.precision, asdict(config.model)]
        with self.folder.stage(f"evaluate_{name}", product, inputs) as needed:
            if needed:
                if name == "base":
                    model = self._base_model()
                else:  # from the exported folder: what is measured is what was written
                    self._release()
                    model = load_model(model_folder, dtype=config.model.dtype, attention=config.model.attention, device=self._device())
                evaluate_task(
                    model,
                    self.tokenizer,
                    self.data,
                    config.eval,
                    answer=config.data.answer,
                    with_examples=name == "base",
                    precision=config.trainer.precision,
                    show=config.callbacks.progress,
                ).save(product)
        return Evaluation.load(product)

    def _device(self) -> str:
        return "cuda" if self.config.trainer.accelerator == "gpu" else "cpu"

    def _localize(self) -> Any:
        """Scores of all heads, or None where the selector does not look at them."""
        from alps.localize import HeadScores, score_heads
        from alps.models import fingerprint, resolve_model

        config, strategy, proxy = self.config, self.config.strategy, self.config.train.proxy
        if strategy.selector != "spad":
            return None
        product = self.folder.path / "localize" / "scores.json"
        scoring = [strategy.representation, strategy.distance, strategy.temperature]
        task_folder = resolve_model(proxy.task_model, self.cache) if proxy.task_model else None
        if task_folder is not None:
            inputs: list[Any] = [self.base_fingerprint, scoring, fingerprint(task_folder)]
        else:
            training = {k: v for k, v in asdict(config.train).items() if k not in ("epochs", "num_steps", "learning_rate")}
            inputs = [self.base_fingerprint, scoring, self.data.fingerprint, training, asdict(config.trainer), config.model.dtype, config.seed]
        with self.folder.stage("localize", product, inputs) as needed:
            if needed:
                if task_folder is None:
                    with self.folder.part("proxy training"):
                        task: Any = self._train_proxy()
                    names = (config.model.path, f"proxy ({proxy.tuner}, {proxy.num_steps} steps on {config.data.name}, seed {config.seed})")
                else:
                    task, names = task_folder, (config.model.path, str(proxy.task_model))
                with self.folder.part("scoring"):
                    score_heads(
                        self.base_folder,
                        task,
                        self.layout,
                        representation=strategy.representation,
                        distance=strategy.distance,
                        temperature=strategy.temperature,
                        names=names,
                        show_progress=config.callbacks.progress,
                    ).save(product)
                self._release()
        return HeadScores.load(product)

    def _train_proxy(self) -> Any:
        """A task model from a short training of the base, its weights merged."""
        from alps.select import select_heads
        from alps.tune import close_after_training, open_for_training

        proxy = self.config.train.proxy
        every_head = select_heads("all", self.layout, 1.0)
        model = open_for_training(self._base_model(), proxy.tuner, every_head, lora=self.config.strategy.lora)
        self._fit(model, "proxy", self.folder.path / "localize", proxy.num_steps, proxy.learning_rate)
        return close_after_training(model, proxy.tuner)

    def _fit(self, model: Any, what: str, folder: Path, num_steps: int | None = None, learning_rate: float | None = None) -> Any:
        from alps.data.tokenize import pad_id
        from alps.train.fit import fit

        config = self.config
        return fit(
            model,
            self.data.train,
            train=config.train,
            trainer=config.trainer,
            callbacks=config.callbacks,
            seed=config.seed,
            pad_id=pad_id(self.tokenizer),
            folder=folder,
            what=what,
            num_steps=num_steps,
            learning_rate=learning_rate,
            loggers=self.tracker.loggers() if num_steps is None else (),
        )

    def _select(self, scores: Any) -> Any:
        from alps.localize.heatmap import plot_head_scores
        from alps.select import select_heads

        config = self.config
        selection = select_heads(
            config.strategy.selector, self.layout, config.strategy.ratio, scores=scores, seed=config.seed
        )
        selection.save(self.folder.path / "localize" / "heads.json")
        if scores is not None:
            plot_head_scores(
                scores.values_LH,
                selection.heads,
                title=f"{config.model.name} on {config.data.name}",
                score_name=f"shift of the head's weights ({scores.representation}, {scores.distance})",
                path=self.folder.path / "localize" / "heatmap.png",
                moved=selection.moved_with_group,
            )
        return selection

    def _train(self, selection: Any) -> Path:
        """Train what the strategy says; returns the folder of the merged model."""
        import torch

        from alps.tune import close_after_training, count_trained, open_for_training
        from alps.tune.export import export, stored_dtype
        from alps.tune.verify import moved_outside

        config, strategy, train_info = self.config, self.config.strategy, self.result.train_info
        product, report = self.folder.path / "model", self.folder.path / "train" / "report.json"
        how = [strategy.tuner, strategy.also_train, strategy.projections, asdict(strategy.lora) if strategy.tuner == "lora" else None]
        recipe = {k: v for k, v in asdict(config.train).items() if k != "proxy"}
        where = [asdict(config.trainer), config.model.dtype, config.export.dtype]
        inputs = [self.base_fingerprint, self.data.fingerprint, selection.hash, how, recipe, where, config.seed]
        with self.folder.stage("train", product, inputs) as needed:
            if needed:
                model = open_for_training(
                    self._base_model(),
                    strategy.tuner,
                    selection,
                    also_train=strategy.also_train,
                    projections=list(strategy.projections),
                    lora=strategy.lora,
                )
                parts = count_trained(model, selection)
                log.info("%s", parts.describe())
                fitted = self._fit(model, "training", self.folder.path / "train")
                model = close_after_training(model, strategy.tuner)
                base_dtype = stored_dtype(self.base_folder)
                dtype = base_dtype if config.export.dtype == "base" else getattr(torch, config.export.dtype)
                export(model, self.tokenizer, product, dtype)
                self._release()
                identical: bool | None = None
                if strategy.tuner == "rows" and dtype == base_dtype:
                    moved = moved_outside(self.base_folder, product, selection, strategy.projections, strategy.also_train)
                    if moved:
                        raise AssertionError(f"frozen weights differ from the base: {', '.join(moved[:5])}")
                    identical = True
                report.write_text(json.dumps({"parts": asdict(parts), "fit": asdict(fitted), "frozen_bit_identical": identical}))
        saved = json.loads(report.read_text())
        parts_saved, fit_saved = saved["parts"], saved["fit"]
        train_info.chosen_heads, train_info.total_heads = parts_saved["chosen_heads"], parts_saved["total_heads"]
        train_info.moved_with_group = parts_saved["moved_with_group"]
        train_info.selection_hash = selection.hash
        train_info.trained_parameters, train_info.total_parameters = parts_saved["trained"], parts_saved["total"]
        train_info.qkv_share = parts_saved["qkv_trained"] / parts_saved["qkv_total"]
        train_info.num_steps, train_info.tokens = fit_saved["num_steps"], fit_saved["num_tokens"]
        train_info.tokens_per_s, train_info.loss_curve = fit_saved["tokens_per_s"], fit_saved["loss_curve"]
        train_info.frozen_bit_identical = saved["frozen_bit_identical"]
        return product

    def _record(self, base: Any, tuned: Any) -> None:
        from alps.evaluate.metrics import paired_change

        info = self.result.eval_info
        for part, evaluation in (("base", base), ("tuned", tuned)):
            setattr(info, part, {k: _short(m) for k, m in evaluation.metrics.items()})
            info.skipped.update(evaluation.skipped)
        shared = [name for name in base.metrics if name in tuned.metrics]
        info.change = {name: _short(paired_change(base.metrics[name], tuned.metrics[name])) for name in shared}


def _short(metric: Any) -> dict[str, float]:
    return {"value": metric.value, "stderr": metric.stderr, "n": metric.n}


def _layout_of(folder: Path) -> Any:
    from transformers import AutoConfig

    from alps.heads import HeadLayout

    return HeadLayout.from_config(AutoConfig.from_pretrained(str(folder), trust_remote_code=False))


def _ratio_in_force(config: RunConfig) -> float:
    """all and none have no budget; say so where one was asked for."""
    fixed = {"all": 1.0, "none": 0.0}.get(config.strategy.selector)
    if fixed is not None and config.strategy.ratio != fixed:
        log.warning("strategy=%s has no budget: strategy.ratio=%g is not used", config.strategy.name, config.strategy.ratio)
    return config.strategy.ratio if fixed is None else fixed


def _check_machine(config: RunConfig) -> None:
    """Raise ConfigError where this machine cannot do what the config asks."""
    import torch

    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError(fault("trainer.accelerator", "gpu", "cpu (trainer=cpu)", why="PyTorch finds no GPU on this machine"))
    assert fixed_also_train(config.strategy.selector, config.strategy.tuner) in (None, config.strategy.also_train)


def _save_config(config: RunConfig, path: Path) -> None:
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.structured(config), path)


def _report(result: Any) -> str:
    from alps.summary import summarise

    return "\n" + summarise(result)


if __name__ == "__main__":
    main()
