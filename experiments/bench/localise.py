"""How fast and in how little memory heads are scored, beside the paper's released formula and beside mere reading.

    python experiments/bench/localise.py            # minutes on two cores; writes localise.json beside itself

It writes two checkpoints with Llama-3.1-8B's attention (32 query heads, 8 key/value heads, width 128, bfloat16) and a few of its
32 layers into a temporary folder, then times, in one process and with the same threads, round after round:

- reading a layer's q, k and v of both checkpoints into memory: by the library that the scorer reads with; by bare file reads;
  and by bare reads into one buffer that is used for every tensor, so that nothing is kept (the least that reading can cost).
  The files are in the page cache.
- scoring: `score_heads` as people call it, qkv and w1; and, on one layer, w1_value and qkv_product.
- the released formula on a few heads: float32 softmax of the concatenated blocks, scipy's wasserstein_distance on a linspace.

Medians over the rounds. Memory is the peak resident size of a fresh process that scores, over its size before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.stats import wasserstein_distance

from alps import HeadLayout, score_heads
from alps.weights import SINGLE_FILE, WeightSource

HEADS, KV_HEADS, WIDTH, MODEL_WIDTH = 32, 8, 128, 4096
MEGABYTE = 1e6


def layout_of_llama(num_layers: int) -> HeadLayout:
    names = tuple((p, f"model.layers.{{layer}}.self_attn.{p}_proj") for p in "qkvo")
    return HeadLayout("llama", num_layers, HEADS, KV_HEADS, WIDTH, MODEL_WIDTH, names, (), "separate", False)


def write_checkpoints(folder: Path, layout: HeadLayout) -> None:
    """A base with weights of 0.02, and a task model a two-hundredth of that away, both rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    base, task = {}, {}
    for layer in range(layout.num_layers):
        for projection in ("q", "k", "v", "o"):
            name = f"{layout.module_name(layer, projection)}.weight"
            weight = 0.02 * torch.randn(layout.shape(projection), generator=generator)
            base[name] = weight.bfloat16()
            task[name] = (weight + 1e-4 * torch.randn(weight.shape, generator=generator)).bfloat16()
    for name, weights in (("base", base), ("task", task)):
        (folder / name).mkdir(parents=True)
        save_file(weights, folder / name / SINGLE_FILE)


def copy_tensors(folder: Path, layout: HeadLayout) -> None:
    with WeightSource(folder / "base") as base, WeightSource(folder / "task") as task:
        for layer in range(layout.num_layers):
            names = [f"{layout.module_name(layer, projection)}.weight" for projection in ("q", "k", "v")]
            layer_pair = [source.read(name).clone() for source in (base, task) for name in names]
            del layer_pair
            base.close_files()
            task.close_files()


def read_bytes(folder: Path, layout: HeadLayout, buffer: memoryview | None = None) -> None:
    """Into fresh memory for each layer, or all into one buffer."""
    for layer in range(layout.num_layers):
        layer_pair = []
        for name in ("base", "task"):
            with (folder / name / SINGLE_FILE).open("rb", buffering=0) as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                for projection in ("q", "k", "v"):
                    start, end = header[f"{layout.module_name(layer, projection)}.weight"]["data_offsets"]
                    file.seek(8 + length + start)
                    if buffer is None:
                        layer_pair.append(file.read(end - start))
                    else:
                        file.readinto(buffer[: end - start])


def released(folder: Path, layout: HeadLayout, heads: list[int]) -> None:
    """The authors' way, but for their mistake with grouped key/value heads."""
    with WeightSource(folder / "base") as base, WeightSource(folder / "task") as task:
        weights = [{p: source.read(f"{layout.module_name(0, p)}.weight") for p in ("q", "k", "v")} for source in (base, task)]
        for head in heads:
            probabilities = []
            for blocks in weights:
                flat = torch.cat([layout.block(blocks[p], p, head).float().flatten() for p in ("q", "k", "v")])
                probabilities.append(torch.softmax(flat, 0).numpy())
            support = np.linspace(0, 1, len(probabilities[0]))
            wasserstein_distance(support, support, *probabilities)


def score(folder: Path, layout: HeadLayout, representation: str = "qkv", distance: str = "w1") -> None:
    score_heads(folder / "base", folder / "task", layout, representation=representation, distance=distance, show_progress=False)


def peak_memory(folder: Path, num_layers: int, representation: str, distance: str) -> float:
    """Bytes that scoring adds to the resident size of a fresh process, at its peak."""
    command = [sys.executable, __file__, "--memory-of", str(folder), str(num_layers), representation, distance]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _print_peak_memory(folder: str, num_layers: str, representation: str, distance: str) -> None:
    layout = layout_of_llama(int(num_layers))
    torch.softmax(torch.ones(1000), 0)  # starts the thread pool
    before = _status_bytes("VmRSS")
    score(Path(folder), layout, representation, distance)
    # Not getrusage: its peak is inherited from the process that started this one.
    print(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--released-heads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        _print_peak_memory(*options.memory_of)
        return
    layout, one_layer = layout_of_llama(options.layers), layout_of_llama(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder, single = Path(temporary) / "all", Path(temporary) / "one"
        write_checkpoints(folder, layout)
        write_checkpoints(single, one_layer)
        buffer = memoryview(bytearray(2 * MODEL_WIDTH * MODEL_WIDTH))
        # name: (what is done, heads that it does)
        work: dict[str, tuple[Callable[[], None], int]] = {
            "copy the tensors": (lambda: copy_tensors(folder, layout), layout.num_heads),
            "read the bytes": (lambda: read_bytes(folder, layout), layout.num_heads),
            "read the bytes into one buffer": (lambda: read_bytes(folder, layout, buffer), layout.num_heads),
            "qkv, w1": (lambda: score(folder, layout), layout.num_heads),
            "qkv, w1_value": (lambda: score(single, one_layer, "qkv", "w1_value"), HEADS),
            "qkv_product, w1": (lambda: score(single, one_layer, "qkv_product", "w1"), HEADS),
            "released formula": (
                lambda: released(folder, layout, list(range(options.released_heads))),
                options.released_heads,
            ),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for name, (do, _) in work.items():  # files into the page cache, libraries warmed up
            print(f"warming up: {name}", file=sys.stderr)
            do()
        for turn in range(options.rounds):
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
            for name, (do, _) in work.items():
                started = time.perf_counter()
                do()
                seconds[name].append(time.perf_counter() - started)
        memory = {
            name: peak_memory(place, num_layers, *name.split(", "))
            for name, place, num_layers in (
                ("qkv, w1", folder, options.layers),
                ("qkv, w1_value", single, 1),
                ("qkv_product, w1", single, 1),
            )
        }
    per_head = {name: statistics.median(times) / work[name][1] for name, times in seconds.items()}
    attention_bytes = 2 * sum(rows * columns for rows, columns in map(layout.shape, ("q", "k", "v", "o")))
    result = {
        "layers": options.layers,
        "rounds": options.rounds,
        "threads": options.threads,
        "ms_per_head": {name: round(1e3 * value, 4) for name, value in per_head.items()},
        "times_faster_than_released": round(per_head["released formula"] / per_head["qkv, w1"], 1),
        "times_copying_the_tensors": round(per_head["qkv, w1"] / per_head["copy the tensors"], 2),
        "times_reading_the_bytes": round(per_head["qkv, w1"] / per_head["read the bytes"], 2),
        "times_reading_the_bytes_into_one_buffer": round(per_head["qkv, w1"] / per_head["read the bytes into one buffer"], 2),
        "peak_extra_memory_mb": {name: round(value / MEGABYTE) for name, value in memory.items()},
        "two_layers_of_attention_mb": round(2 * attention_bytes / MEGABYTE),
        "seconds": {name: [round(value, 4) for value in times] for name, times in seconds.items()},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))


if __name__ == "__main__":
    main()
