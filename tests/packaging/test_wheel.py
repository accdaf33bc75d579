"""The built wheel, installed somewhere else, runs from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as an installer would lay it out (its dependencies are this environment's)."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder / "site"),
        str(wheel),
    ]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def run_from(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "ALPS_CACHE": str(folder / "cache")}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_code_configs_and_nothing_else(site: Path) -> None:
    (wheel,) = site.parent.glob("*.whl")
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top == {"alps", "alps-0.1.0.dist-info"}
    configs = {path.relative_to(REPOSITORY / "conf") for path in (REPOSITORY / "conf").rglob("*.yaml")}
    assert configs == {path.relative_to(site / "alps" / "conf") for path in (site / "alps" / "conf").rglob("*.yaml")}


def test_the_wheel_runs_from_any_folder(site: Path, tmp_path: Path) -> None:
    where = run_from(site, tmp_path, "-c", "import alps; print(alps.__file__)")
    assert where.stdout.strip() == str(site / "alps" / "__init__.py"), where.stderr
    composed = run_from(site, tmp_path, "-m", "alps.run", "+experiment=math_8b", "--cfg", "job")
    assert "meta-llama/Llama-3.1-8B" in composed.stdout, composed.stderr

    small = ["model=tiny", "train.num_steps=2", "train.batch_size=2", "train.micro_batch_size=2", "train.proxy.num_steps=2",
             "data.num_train=8", "data.num_validation=2", "data.num_test=4", "eval.general_text_tokens=300",
             "logger.wandb=disabled"]  # fmt: skip
    ran = run_from(site, tmp_path, "-m", "alps.run", *small, "hydra.run.dir=here")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "here" / "result.json").is_file()
    assert (tmp_path / "here" / "model" / "model.safetensors").is_file()
