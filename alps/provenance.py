"""Where a result came from: code, packages, machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("alps", "torch", "lightning", "transformers", "datasets", "peft", "hydra-core", "numpy", "safetensors")


def git_sha() -> str | None:
    """Commit of the checkout that the package runs from, with `-dirty` where files differ; None for an installed wheel."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        sha = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return sha.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a number."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def command() -> str:
    """The command line as typed."""
    return " ".join(sys.argv)


def device_name(accelerator: str) -> str:
    """The GPU's name, or the processor and its threads."""
    import torch

    if accelerator == "gpu":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
