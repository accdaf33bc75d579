"""Files and folders that are there whole or not at all, however the writing ends and whoever else writes the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name and rename it; parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to fill, which then takes the place of `folder`; on an error it is removed and `folder` stays."""
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            # Another process put the same thing there in between; one of two equal folders is enough.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")
