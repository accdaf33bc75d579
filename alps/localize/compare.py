"""`python -m alps.localize.compare heads=[a/heads.json,b/heads.json] out=DIR`: several selections of heads side by side."""

from __future__ import annotations

from alps.checks import check_compare
from alps.command import run_cli
from alps.compose import Verb
from alps.config import CompareConfig

COMPARE = Verb("compare", CompareConfig, check_compare)


def main() -> None:
    """The command: `alps-compare`, or `python -m alps.localize.compare`, with Hydra's overrides."""
    run_cli(COMPARE, _compare)


def _compare(config: CompareConfig) -> None:
    # Imported only now, so that a mistyped key is answered without waiting for PyTorch.
    from alps.localize.comparison_report import compare

    print("\n" + compare(config))


if __name__ == "__main__":
    main()
