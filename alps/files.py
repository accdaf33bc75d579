"""Files and folders that are there whole or not at all, however the writing ends and whoever else writes the same."""

from __future__ import annotations

import functools
import hashlib
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
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill, which then becomes `folder`; on an error it is removed.

    If `folder` is there by then, it gives way (`replace`), or stays: another process has made the same and may be reading it.
    """
    partial = _partial(folder)
    _sweep_up(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if replace:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sweep_up(folder: Path) -> None:
    """Remove what killed processes left half-done: it can be as large as a model."""
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        try:
            os.kill(int(partial.name.rpartition("-")[2]), 0)
        except (ValueError, ProcessLookupError):
            shutil.rmtree(partial, ignore_errors=True)
        except PermissionError:
            continue  # somebody else's, and alive


def _partial(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's content, hexadecimal. A large file is read once a process, while its size and date stay the same."""
    status = file.stat()
    if status.st_size < _LARGE:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return _sha256_of_state(file, status.st_size, status.st_mtime_ns)


# Weights are above it. Smaller files can change twice within a tick of the file system's clock.
_LARGE = 64 * 2**20


@functools.cache
def _sha256_of_state(file: Path, size: int, changed_ns: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
