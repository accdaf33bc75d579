"""Scores of the layers that are done, kept on disk, so that a scoring that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from alps.files import write_whole


class PartialScores:
    """A file of finished layers: their scores and the scales of their weights, [H] each, under a key that says of what.

    With another key, or where the file cannot be read, it begins empty.
    """

    def __init__(self, path: Path | None, key: list[object]) -> None:
        self._path = path
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
        found = self._layers.get(str(layer))
        return None if found is None else (np.array(found[0]), np.array(found[1]))

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
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    return [str(folder.resolve()), *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]
