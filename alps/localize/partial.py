"""Scores of the layers that are done, kept on disk, so that a scoring that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from alps.files import write_whole


class PartialScores:
    """A file of finished layers: their scores and the scales of their weights, [H] each, under a key that says of what.

    With another key it begins empty; a layer that is damaged is not there.
    """

    def __init__(self, path: Path | None, key: list[object], num_heads: int) -> None:
        self._path, self._num_heads = path, num_heads
        self._key = json.loads(json.dumps(key))
        self._layers: dict[str, list[list[float]]] = {}
        if path is not None and path.is_file():
            try:
                data = json.loads(path.read_text())
                if data["key"] == self._key:
                    self._layers = dict(data["layers"])
            except (KeyError, TypeError, ValueError):
                pass  # cut short: the layers are scored again

    def get(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Scores and scales of a layer, if it is done."""
        try:
            values_H, scale_H = (np.asarray(part, dtype=np.float64) for part in self._layers[str(layer)])
        except (KeyError, TypeError, ValueError):
            return None
        whole = all(part.shape == (self._num_heads,) and np.isfinite(part).all() for part in (values_H, scale_H))
        return (values_H, scale_H) if whole else None

    def put(self, layer: int, values_H: np.ndarray, scale_H: np.ndarray) -> None:
        """Keep a finished layer."""
        if self._path is not None:
            self._layers[str(layer)] = [values_H.tolist(), scale_H.tolist()]
            write_whole(self._path, json.dumps({"key": self._key, "layers": self._layers}))

    def remove(self) -> None:
        """Delete the file: the scores are whole now."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def state_of(folder: Path | None) -> list[object]:
    """What tells whether a folder's files changed, without reading them: names, sizes and dates."""
    if folder is None:
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name.endswith("config.json"))
    return [str(folder.resolve()), *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]
