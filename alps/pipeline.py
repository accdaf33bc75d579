"""The stages of a run, in order: base evaluation, proxy and scores, selection, training, export, evaluation."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig

from alps.checks import ConfigError, fault
from alps.config import RunConfig
from alps.data.task_data import check_fits, prepare_data
from alps.data.tokenize import pad_id
from alps.evaluate.losses import general_text
from alps.evaluate.metrics import Evaluation
from alps.evaluate.task import evaluate_task
from alps.heads import HeadSelection, Projection
from alps.localize import HeadScores, score_heads
from alps.localize.localization import LOCALIZATION_FILES, twins_layout, write_localization
from alps.models import layout_of, load_model, load_tokenizer, resolve_model
from alps.progress import quiet_libraries
from alps.recording import Recording, record_evaluations, record_training, recording
from alps.result import RunResult
from alps.select import select_heads
from alps.train.fit import FitReport, fit
from alps.tune import close_after_training, count_trained, open_for_training
from alps.tune.export import export, stored_dtype
from alps.tune.verify import moved_outside
from alps.weights import fingerprint, weight_names

log = logging.getLogger(__name__)


def run(config: RunConfig) -> RunResult:
    """The whole pipeline of one run; returns its record, also written to OUTPUT/result.json.

    A stage whose product is in the folder already, made from the same inputs, is not done again. Raises ConfigError for what this
    machine cannot do, else what went wrong, after writing a result.json with status failed (or interrupted).
    """
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError(fault("trainer.accelerator", "gpu", "cpu (trainer=cpu)", why="PyTorch finds no GPU on this machine"))
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    quiet_libraries()
    with recording(config) as record:
        pipeline = Pipeline(config, record)
        base = pipeline.evaluate("base", pipeline.base_folder)
        selection = pipeline.select(pipeline.localize())
        tuned_folder = pipeline.train(selection)
        tuned = pipeline.evaluate("tuned", tuned_folder)
        record_evaluations(record.result, base, tuned)
    return record.result


class Pipeline:
    """One run's models and data, and a method for each stage. At most one model is in memory."""

    def __init__(self, config: RunConfig, record: Recording) -> None:
        self.config, self.record, self.folder = config, record, record.folder
        self.cache = Path(config.paths.cache).expanduser()
        self.held_as = [config.model.dtype, config.model.attention]
        self.device = "cuda" if config.trainer.accelerator == "gpu" else "cpu"
        self.base_folder = resolve_model(config.model.path, self.cache, config.model.revision)
        # An unsupported family, or a task model that is not the base's twin, is refused here, before weights are read.
        self.layout = layout_of(self.base_folder)
        self.task_folder = self._given_task_model()
        self._check_selection()
        self.tokenizer = load_tokenizer(self.base_folder)
        self.data = prepare_data(config.data, self.tokenizer, self.cache)
        log.info("data\n%s", self.data.describe())
        check_fits(self.data, AutoConfig.from_pretrained(str(self.base_folder)))
        self.base_fingerprint = fingerprint(self.base_folder)
        if losing := self._losing_casts():
            log.warning("the base's weights lose digits on their way: they are cast to %s", losing)
        self._base_model: Any = None
        record.result.meta_info.base_fingerprint = self.base_fingerprint
        record.result.meta_info.data_fingerprint = self.data.fingerprint

    def _given_task_model(self) -> Path | None:
        """The folder of train.proxy.task_model, if one is given and looked at; it must have the base's layout."""
        path = self.config.train.proxy.task_model
        if not path or self.config.strategy.selector != "spad":
            return None
        folder = resolve_model(path, self.cache, key="train.proxy.task_model")
        twins_layout(self.base_folder, folder, "train.proxy.task_model")
        return folder

    def evaluate(self, name: str, model_folder: Path) -> Evaluation:
        """Measure the model of a folder; the tuned one is read back from its export, so what is measured is what was written."""
        config = self.config
        product = self.folder.path / "evaluation" / f"{name}.json"
        how = {key: value for key, value in asdict(config.eval).items() if key != "suites"}
        text = hashlib.sha256(general_text(config.eval.general_text).encode()).hexdigest()
        inputs = [fingerprint(model_folder), self.data.fingerprint, how, text, config.trainer.precision, self.held_as]
        with self.folder.stage(f"evaluate_{name}", inputs, product) as needed:
            if needed:
                model = self._take_base() if model_folder == self.base_folder else self._load(model_folder)
                evaluation = evaluate_task(
                    model,
                    self.tokenizer,
                    self.data,
                    config.eval,
                    answer=config.data.answer,
                    with_examples=name == "base",
                    precision=config.trainer.precision,
                    show=config.callbacks.progress,
                )
                evaluation.save(product)
        return Evaluation.load(product)

    def localize(self) -> HeadScores | None:
        """Scores of all heads from a given task model or a proxy's training; None where the selector looks at no scores."""
        config, strategy, proxy = self.config, self.config.strategy, self.config.train.proxy
        if strategy.selector != "spad":
            return None
        product = self.folder.path / "localize" / "scores.json"
        scoring = [strategy.representation, strategy.distance, strategy.temperature, strategy.normalization]
        given = self.task_folder
        inputs: list[Any] = [self.base_fingerprint, scoring]
        if given is not None:
            name = str(proxy.task_model)
            inputs += [fingerprint(given)]
        else:
            name = f"proxy: {proxy.tuner}, {proxy.num_steps} steps on {config.data.name}, seed {config.seed}"
            # The proxy shares the recipe, but for what its own section sets.
            recipe = {k: v for k, v in asdict(config.train).items() if k not in ("epochs", "num_steps", "learning_rate")}
            lora = asdict(strategy.lora) if proxy.tuner == "lora" else None
            inputs += [self.data.fingerprint, recipe, lora, asdict(config.trainer), self.held_as, config.seed]
        with self.folder.stage("localize", inputs, product) as needed:
            if needed:
                with self.folder.part("proxy training"):
                    task = given if given is not None else self._train_proxy()
                with self.folder.part("scoring"):
                    names = (config.model.path, name)
                    scores = score_heads(
                        self.base_folder,
                        task,
                        self.layout,
                        representation=strategy.representation,
                        distance=strategy.distance,
                        temperature=strategy.temperature,
                        normalization=strategy.normalization,
                        names=names,
                        show_progress=config.callbacks.progress,
                    )
                scores.save(product)
                self._release()
        return HeadScores.load(product)

    def _train_proxy(self) -> nn.Module:
        """A task model from a short training of the base, what was learned merged in."""
        proxy = self.config.train.proxy
        every_head = select_heads("all", self.layout, 1.0)
        model = open_for_training(
            self._take_base(),
            proxy.tuner,
            every_head,
            also_train="nothing",
            lora=self.config.strategy.lora,
            seed=self.config.seed,
        )
        log.info("proxy %s", count_trained(model, every_head).describe())
        self._fit(model, "proxy", self.folder.path / "localize", proxy.num_steps, proxy.learning_rate)
        return close_after_training(model, proxy.tuner)

    def select(self, scores: HeadScores | None) -> HeadSelection:
        """The heads to train, with tables and pictures where they were scored."""
        config, folder = self.config, self.folder.path / "localize"
        selection = self._select(scores)
        if scores is not None:
            write_localization(scores, selection, folder, f"{config.model.name} on {config.data.name}")
        else:
            for name in LOCALIZATION_FILES:  # of another strategy that ran in this folder
                (folder / name).unlink(missing_ok=True)
            selection.save(folder / "heads.json")
        self.record.result.train_info.ratio = (
            len(selection.heads) / self.layout.num_heads if selection.ratio is None else selection.ratio
        )
        return selection

    def _check_selection(self) -> None:
        """Refuse, before anything long, a heads file that does not fit, and a budget that no head fits into."""
        strategy = self.config.strategy
        # Any ranking will do to try a budget.
        selection = self._select(None, "random" if strategy.selector == "spad" else strategy.selector)
        if not selection.heads and strategy.also_train == "nothing":
            raise ValueError(f"strategy.heads_file: {strategy.heads_file} holds no heads, and strategy.also_train is nothing")

    def _select(self, scores: HeadScores | None, selector: str | None = None) -> HeadSelection:
        strategy = self.config.strategy
        return select_heads(
            selector or strategy.selector,
            self.layout,
            strategy.ratio,
            scores=scores,
            seed=self.config.seed,
            budget=strategy.budget,
            unit=strategy.unit,
            projections=cast(list[Projection], strategy.projections),
            heads_file=Path(strategy.heads_file).expanduser() if strategy.heads_file else None,
        )

    def train(self, selection: HeadSelection) -> Path:
        """Train what the strategy says; returns the folder of the merged model, checked against the base where rows trained."""
        config, strategy = self.config, self.config.strategy
        product, report = self.folder.path / "model", self.folder.path / "train" / "report.json"
        adapters = asdict(strategy.lora) if strategy.tuner == "lora" else None
        how = [strategy.tuner, strategy.also_train, strategy.projections, adapters]
        recipe = {key: value for key, value in asdict(config.train).items() if key != "proxy"}
        where = [asdict(config.trainer), self.held_as, asdict(config.export)]
        inputs = [self.base_fingerprint, self.data.fingerprint, selection.hash, how, recipe, where, config.seed]
        with self.folder.stage("train", inputs, product, report) as needed:
            if needed:
                model = open_for_training(
                    self._take_base(),
                    strategy.tuner,
                    selection,
                    also_train=strategy.also_train,
                    projections=strategy.projections,
                    lora=strategy.lora,
                    seed=config.seed,
                )
                parts = count_trained(model, selection)
                log.info("%s", parts.describe())
                fitted = self._fit(model, "training", self.folder.path / "train")
                identical = self._export(close_after_training(model, strategy.tuner), product, selection)
                frozen = {"frozen_bit_identical": identical, "frozen_compared_as": self._losing_casts()}
                saved = {"parts": asdict(parts), "fit": asdict(fitted), **frozen}
                report.write_text(json.dumps(saved) + "\n")
                self._release()
        record_training(self.record.result, selection, json.loads(report.read_text()))
        return product

    def _fit(
        self, model: nn.Module, what: str, folder: Path, num_steps: int | None = None, learning_rate: float | None = None
    ) -> FitReport:
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
            # The proxy's curve would mix with the run's own.
            loggers=() if what == "proxy" else self.record.tracker.loggers(),
        )

    def _export(self, model: nn.Module, folder: Path, selection: HeadSelection) -> bool | None:
        """Write the model; whether its frozen weights are the base's to the bit, None where nothing was frozen.

        That is after the casts that model.dtype and export.dtype ask for.
        """
        strategy = self.config.strategy
        export(model, self.tokenizer, folder, self._export_dtype())
        if strategy.tuner != "rows":
            return None
        in_memory = getattr(torch, self.config.model.dtype)
        moved = moved_outside(self.base_folder, folder, selection, strategy.projections, strategy.also_train, in_memory)
        # Weights that the architecture does not use are not part of the model, and not exported.
        unused = set(weight_names(self.base_folder)) - set(model.state_dict())
        moved = [name for name in moved if name.removesuffix(" (missing)") not in unused]
        if moved:
            raise RuntimeError(f"a fault in alps: frozen weights differ from the base: {', '.join(moved[:5])}")
        return True

    def _export_dtype(self) -> torch.dtype:
        exported = self.config.export.dtype
        return stored_dtype(self.base_folder) if exported == "base" else getattr(torch, exported)

    def _losing_casts(self) -> str:
        """The dtypes on a frozen weight's way to the export that hold fewer digits than the base is stored with."""
        stored = torch.finfo(stored_dtype(self.base_folder))
        way = [getattr(torch, self.config.model.dtype), self._export_dtype()]
        return " and ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in way if torch.finfo(d).eps > stored.eps))

    def _load(self, folder: Path) -> Any:
        self._release()
        return load_model(folder, dtype=self.config.model.dtype, attention=self.config.model.attention, device=self.device)

    def _take_base(self) -> Any:
        """The base model, fresh or as evaluation left it. Whoever trains it calls `_release` afterwards."""
        if self._base_model is None:
            self._base_model = self._load(self.base_folder)
        return self._base_model

    def _release(self) -> None:
        self._base_model = None
        gc.collect()
