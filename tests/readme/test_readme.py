"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from alps.compose import RUN, check_command_line
from alps.localize.__main__ import LOCALIZE
from alps.localize.compare import COMPARE

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


VERBS = {"alps.run": RUN, "alps.localize": LOCALIZE, "alps.localize.compare": COMPARE}


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python -m")])
def test_commands_are_accepted(command: str, tmp_path: Path) -> None:
    for name in ("file.jsonl", "A/heads.json", "B/heads.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    places = {"FOLDER": ".", "FILE": "file.jsonl", "A/heads.json": "A/heads.json", "B/heads.json": "B/heads.json"}
    for word, place in places.items():
        command = command.replace(word, str(tmp_path / place))
    words = shlex.split(command)
    assert words[:2] == ["python", "-m"]
    check_command_line(words[3:], VERBS[words[2]])


def test_every_other_command_is_known() -> None:
    assert [c for c in commands() if not c.startswith(("make ", "python -m "))] == []


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
