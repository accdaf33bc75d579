"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from alps.compose import _check_command_line

REPOSITORY = Path(__file__).parent.parent.parent
README = (REPOSITORY / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    return [shlex.join(shlex.split(line, comments=True)) for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_has_commands() -> None:
    assert len(commands()) > 5
    assert "make demo" in commands()


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if "alps.run" in c])
def test_alps_run_commands_are_accepted(command: str, tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").touch()
    words = shlex.split(command.replace("FOLDER", str(tmp_path)).replace("FILE", str(tmp_path / "file.jsonl")))
    assert words[:3] == ["python", "-m", "alps.run"]
    _check_command_line(words[3:], "config")


def test_every_other_command_is_known() -> None:
    assert [c for c in commands() if not c.startswith(("make ", "python -m alps.run"))] == []


def test_the_library_example_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    import torch
    from transformers import AutoModelForCausalLM

    task = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    task.save_pretrained(tmp_path / "TASK")
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"BASE"', repr(str(tiny))), {})
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "TUNED")
    assert tuned.config.model_type == "llama"


def test_files_that_the_documents_name_exist() -> None:
    for document in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_architecture_document_names_every_module_folder() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    for path in (REPOSITORY / "alps").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"`alps/{path.name}/`" in text, path.name
        elif path.suffix == ".py" and path.name != "__init__.py":
            assert path.name in text, path.name
