"""`python -m alps.localize base=A task=B out=DIR`: score every head of two checkpoints and choose the top ones."""

from __future__ import annotations

from alps.checks import check_localize
from alps.command import run_cli
from alps.compose import Verb
from alps.config import LocalizeConfig

LOCALIZE = Verb(
    "localize", LocalizeConfig, check_localize, when_stopped="the same command goes on after the last layer that was scored"
)


def main() -> None:
    """The command: `alps-localize`, or `python -m alps.localize`, with Hydra's overrides."""
    run_cli(LOCALIZE, _localize)


def _localize(config: LocalizeConfig) -> None:
    # Imported only now, so that a mistyped key is answered without waiting for PyTorch.
    from alps.localize.localization import localize

    print("\n" + localize(config))


if __name__ == "__main__":
    main()
