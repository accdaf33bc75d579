"""Make the proxy pairs of the study: SmolLM2-135M trained briefly on two tasks, for each seed and number of steps.

A proxy is what `python -m alps.run` trains before it scores heads: all Q/K/V rows and nothing else. Here each one is a run of its
own, so that its model is kept. Started again, it goes on with the proxies that are not there yet.
"""

from __future__ import annotations

from pathlib import Path

from alps.compose import compose_run
from alps.config import RunConfig
from alps.pipeline import run

SEEDS = (1, 2)
STEPS = (10, 30, 100)
TASKS = ("word_problems", "codealpaca")


def config_of(task: str, steps: int, seed: int, data: Path, folder: Path, threads: int) -> RunConfig:
    """The run that makes one proxy; its evaluation is as small as can be, since only its weights are looked at."""
    file = data / "codealpaca" / "code_alpaca_2k.json"
    rows = [f"data.path='{file}'", "data.empty_response=drop"] if task == "codealpaca" else []
    return compose_run(
        [
            f"name=proxy_{task}_{steps}_{seed}", "model=smollm2_135m", f"data={task}", *rows,
            "data.max_length=128", "data.num_validation=2", "data.num_test=2",
            "train=quick", f"train.num_steps={steps}", "train.learning_rate=3e-4",
            "train.batch_size=4", "train.micro_batch_size=4",
            "strategy=alps", "strategy.selector=all", "strategy.ratio=1", f"trainer.threads={threads}", f"seed={seed}",
            "eval=quick", "eval.general_text_tokens=256", "eval.num_shots=0", "logger.wandb=disabled",
        ],
        folder,
    )  # fmt: skip


def make_proxies(data: Path, folder: Path, threads: int) -> dict[tuple[str, int, int], Path]:
    """Train every proxy that is not in `folder` yet; returns the model folder of each (task, steps, seed)."""
    models = {}
    for seed in SEEDS:
        for steps in STEPS:
            for task in TASKS:
                out = folder / f"{task}_{steps}_{seed}"
                run(config_of(task, steps, seed, data, out, threads))
                models[task, steps, seed] = out / "model"
    return models
