"""The words that a config allows are those that the code knows; they are written twice because configs must not load PyTorch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from alps import config
from alps.config import DataConfig, LocalizeConfig, ProxyConfig, StrategyConfig
from alps.data.answers import ANSWERS
from alps.data.templates import TEMPLATES
from alps.heads import PROJECTIONS
from alps.localize.distance import DISTANCES
from alps.localize.normalization import NORMALIZATIONS
from alps.localize.representation import REPRESENTATIONS
from alps.select import SELECTORS
from alps.select.rank import BUDGETS, UNITS
from alps.tune import TUNERS


def allowed(schema: type, key: str) -> set[str]:
    (metadata,) = (item.metadata for item in fields(schema) if item.name == key)
    return set(metadata.get("allowed") or metadata["each"])


@pytest.mark.parametrize(
    ("schema", "key", "known"),
    [
        (StrategyConfig, "selector", SELECTORS),
        (StrategyConfig, "tuner", TUNERS),
        (ProxyConfig, "tuner", TUNERS),
        (StrategyConfig, "representation", REPRESENTATIONS),
        (StrategyConfig, "distance", DISTANCES),
        (StrategyConfig, "projections", PROJECTIONS),
        (DataConfig, "template", TEMPLATES),
        (DataConfig, "answer", {"none", *ANSWERS}),
    ],
)
def test_a_config_allows_what_the_code_knows(schema: type, key: str, known: Any) -> None:
    assert allowed(schema, key) == set(known)


SCORING = {"representation": REPRESENTATIONS, "distance": DISTANCES, "normalization": NORMALIZATIONS}
CHOOSING = {"budget": BUDGETS, "unit": UNITS}


@pytest.mark.parametrize("schema", [StrategyConfig, LocalizeConfig])
@pytest.mark.parametrize(("key", "known"), [*SCORING.items(), *CHOOSING.items()])
def test_scoring_and_choosing_are_the_same_everywhere(schema: type, key: str, known: Any) -> None:
    """In the code's own order, which is the one that people are shown."""
    (metadata,) = (item.metadata for item in fields(schema) if item.name == key)
    assert metadata["allowed"] == tuple(known) == getattr(config, f"{key.upper()}S")


def test_checking_a_config_loads_no_pytorch() -> None:
    code = "import sys; from alps.compose import compose_run; compose_run(['+experiment=math_8b']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
