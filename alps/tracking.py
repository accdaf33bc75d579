"""Weights & Biases: one run for each of ours; it never asks and never stops a training."""

from __future__ import annotations

import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from alps.config import LoggerConfig

log = logging.getLogger(__name__)
# W&B's own address has two names; `wandb login` may have written either, by its version.
_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def wandb_mode(wanted: str) -> str:
    """online, offline or disabled. `auto` is what WANDB_MODE says, else online where a key is configured, else offline."""
    if wanted != "auto":
        return wanted
    named = os.environ.get("WANDB_MODE", "")
    if named in ("online", "offline", "disabled"):
        return named
    return "online" if _key_is_configured() else "offline"


def _key_is_configured() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("WANDB_BASE_URL")
    hosts = (urlparse(named).netloc,) if named else _HOSTS
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
        return any(logins.authenticators(host) is not None for host in hosts)
    except (OSError, netrc.NetrcParseError):
        return False


class Tracker:
    """A W&B run, or nothing at all where it is disabled or could not be started."""

    def __init__(self, config: LoggerConfig, name: str, folder: Path, values: dict[str, Any]) -> None:
        self.run: Any = None
        self.mode = wandb_mode(config.wandb)
        if self.mode == "online" and not _key_is_configured():
            # On a terminal wandb.init would ask for one, and wait.
            log.warning("W&B has no API key here (`wandb login` stores one): this run is kept offline")
            self.mode = "offline"
        for mode in dict.fromkeys([self.mode, "offline"]) if self.mode != "disabled" else ():
            try:
                self.run = _start(config, name, folder, values, mode)
                self.mode = mode
                return
            except Exception as error:  # whatever goes wrong there must not cost a training
                log.warning("W&B could not be started %s (%s: %s)", mode, type(error).__name__, error)
        self.mode = "disabled"

    def loggers(self) -> list[Any]:
        """For Lightning's Trainer."""
        if self.run is None:
            return []
        from lightning.pytorch.loggers import WandbLogger

        return [WandbLogger(experiment=self.run)]

    def finish(self, summary: dict[str, Any], images: dict[str, Path], failed: bool) -> None:
        """Write the summary and pictures and close the run, as failed where it did."""
        if self.run is None:
            return
        try:
            import wandb

            self.run.summary.update(summary)
            self.run.log({name: wandb.Image(str(path)) for name, path in images.items() if path.is_file()})
            offline_folder = Path(self.run.dir).parent
            self.run.finish(exit_code=1 if failed else 0)
            if self.mode == "offline":
                log.info("W&B kept this run offline; to upload it: wandb sync %s", offline_folder)
        except Exception as error:
            log.warning("W&B could not be finished (%s: %s)", type(error).__name__, error)


def _start(config: LoggerConfig, name: str, folder: Path, values: dict[str, Any], mode: Any) -> Any:
    import wandb

    return wandb.init(
        project=config.project,
        entity=config.entity,
        group=config.group,
        tags=config.tags or None,
        name=name,
        dir=str(folder),
        config=values,
        mode=mode,
        reinit="finish_previous",
        settings=wandb.Settings(init_timeout=60, console="off", silent=True),
    )
