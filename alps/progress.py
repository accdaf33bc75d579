"""One look for every progress line: what runs, how far it is, and the time left."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], what: str, unit: str, *, total: int | None = None, show: bool = True) -> tqdm[T]:
    """Iterate `items` behind a progress line on standard error.

    On a terminal it redraws; in a log file it prints a line at most every ten seconds.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=what,
        unit=f" {unit}",
        total=total,
        disable=not show,
        mininterval=0.2 if terminal else 10.0,
        dynamic_ncols=terminal,
        ncols=None if terminal else 110,
        bar_format="{desc:<22} {n_fmt:>5}/{total_fmt} {bar:20} {elapsed} gone, {remaining} left{postfix}",
    )


def quiet_libraries() -> None:
    """Turn off the libraries' own progress bars and start-up notices: ours say what a person needs, once."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
