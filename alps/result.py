"""result.json: one flat, versioned record of a run, written whether it ended well or not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alps.files import write_whole

SCHEMA_VERSION = 1


@dataclass
class RunInfo:
    """status is running, completed, failed or interrupted; seconds and peak_memory_bytes are by stage, in the order they ran."""

    name: str
    status: str = "running"
    error: str | None = None
    command: str = ""
    wall_seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    stage_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    stage_peak_memory_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class TrainInfo:
    """What trained.

    `qkv_share` is the true share of the model's own Q/K/V parameters, larger than the share of heads under grouped-query
    attention; 0 for LoRA, whose adapters stand beside them and are `trained_parameters`. `frozen_bit_identical` (None where
    nothing was held frozen by rows) is after the casts that model.dtype and export.dtype ask for; `frozen_compared_as` names them
    where they lose digits.
    """

    strategy: str
    selector: str
    tuner: str
    also_train: str
    ratio: float
    chosen_heads: int = 0
    total_heads: int = 0
    moved_with_group: int = 0
    selection_hash: str = ""
    trained_parameters: int = 0
    total_parameters: int = 0
    qkv_share: float = 0.0
    num_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss_curve: list[float] = field(default_factory=list)
    frozen_bit_identical: bool | None = None
    frozen_compared_as: str = ""


@dataclass
class EvalInfo:
    """base, tuned: metric -> {value, stderr, n}. change: tuned - base, paired by item. suites_not_run: benchmarks only named."""

    base: dict[str, dict[str, float]] = field(default_factory=dict)
    tuned: dict[str, dict[str, float]] = field(default_factory=dict)
    change: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    suites_not_run: list[str] = field(default_factory=list)


@dataclass
class MetaInfo:
    """Everything needed to tell whether two results can be compared."""

    seed: int
    data_seed: int
    base_model_path: str
    base_fingerprint: str = ""
    data_fingerprint: str = ""
    git_sha: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    precision: str = ""


@dataclass
class RunResult:
    run_info: RunInfo
    train_info: TrainInfo
    eval_info: EvalInfo
    meta_info: MetaInfo
    schema_version: int = SCHEMA_VERSION

    def save(self, path: Path) -> None:
        """Write result.json, whole or not at all."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read result.json. Raises ValueError for another schema version or a damaged file, naming it."""
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if data.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"schema version {data.get('schema_version')!r}; this code reads {SCHEMA_VERSION}")
            return cls(
                RunInfo(**data["run_info"]),
                TrainInfo(**data["train_info"]),
                EvalInfo(**data["eval_info"]),
                MetaInfo(**data["meta_info"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a result.json: {error}") from error
