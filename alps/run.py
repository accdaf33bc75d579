"""`python -m alps.run`: score heads, train only those, measure, export. The stages themselves are in alps/pipeline.py."""

from __future__ import annotations

from alps.command import run_cli
from alps.compose import RUN
from alps.config import RunConfig


def main() -> None:
    """The command: `alps-run`, or `python -m alps.run`, with Hydra's overrides."""
    run_cli(RUN, _run_and_report)


def _run_and_report(config: RunConfig) -> None:
    # Imported only now, so that a mistyped key is answered without waiting for PyTorch.
    from alps.pipeline import run
    from alps.summary import summarise

    print("\n" + summarise(run(config)))


if __name__ == "__main__":
    main()
