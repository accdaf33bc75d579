"""A run's folder: stages that are skipped when their product is there, with the time and memory each took."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from alps.files import sha256_of, write_whole

log = logging.getLogger(__name__)


@dataclass
class StageRecord:
    """One stage: seconds, the highest memory while it ran (bytes: the process's, or the GPU's allocations), and its inputs."""

    seconds: float = 0.0
    peak_memory_bytes: int = 0
    inputs: str = ""
    products: str = ""
    parts: dict[str, float] = field(default_factory=dict)


class RunFolder:
    """The folder of one run; stages.json in it says which stages are finished, and from which inputs."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError where another run has the folder: two would mix their products. The lock goes with its process."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"hydra.run.dir: {path} is in use by another run; wait for it or choose another folder") from None
        self.visited: list[str] = []
        self._file = path / "stages.json"
        self.records: dict[str, StageRecord] = {}
        self._current: StageRecord | None = None
        if self._file.is_file():
            try:
                saved = json.loads(self._file.read_text())
                records = {name: StageRecord(**record) for name, record in saved.items()}
                if not all(isinstance(record.seconds, (int, float)) for record in records.values()):
                    raise TypeError("seconds are no number")
                self.records = records
            except (ValueError, TypeError, AttributeError) as error:
                log.warning("%s is damaged (%s): every stage is done anew", self._file, error)

    @contextmanager
    def stage(self, name: str, inputs: Any, *products: Path) -> Iterator[bool]:
        """Yields whether the work has to be done: not if the `products` are there, unchanged, made from equal `inputs` (data).

        Products are files or folders. The stage counts as finished only if its body ends without an error.
        """
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:24]
        record = self.records.get(name)
        self.visited.append(name)
        if record is not None and record.inputs == key:
            if record.products == _checksum(products):
                log.info("%s: done before from the same inputs", name)
                yield False
                return
            log.warning("%s: done before, but its products were changed or removed since; it is done anew", name)
        # From here on whatever is there is not a product of these inputs.
        self.records.pop(name, None)
        self._save()
        log.info("%s: started", name)
        record = self._current = StageRecord(inputs=key)
        _reset_peak_memory()
        started = time.perf_counter()
        yield True
        record.seconds = time.perf_counter() - started
        record.peak_memory_bytes = peak_memory_bytes()
        missing = [str(product) for product in products if not product.exists()]
        assert not missing, f"stage {name} ended without making {missing}"
        record.products = _checksum(products)
        self.records[name] = record
        self._current = None
        self._save()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the current stage."""
        started = time.perf_counter()
        yield
        if self._current is not None:
            self._current.parts[name] = time.perf_counter() - started

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()

    def _save(self) -> None:
        write_whole(self._file, json.dumps({name: asdict(record) for name, record in self.records.items()}, indent=1))


def _checksum(products: Sequence[Path]) -> str:
    """Hash of the content of files and of all files in folders; of their absence too."""
    digest = hashlib.sha256()
    for product in products:
        for file in sorted(product.rglob("*")) if product.is_dir() else [product]:
            if file.is_file():
                digest.update(f"{file.relative_to(product.parent)}:{sha256_of(file)};".encode())
    return digest.hexdigest()[:24]


def peak_memory_bytes() -> int:
    """Highest memory since the last reset: of GPU allocations where there is a GPU, else of this process (resident)."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak_memory() -> None:
    """Where the system cannot do it, a stage's peak is that of the process so far."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        log.debug("the system cannot reset the peak memory: stages report the highest so far")
