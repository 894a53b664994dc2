"""Each command that a document, a message or a page prints is one that `narrowcast` has, with options that it takes."""

import re
from pathlib import Path

import pytest
import typer

from narrowcast.cli.app import app

ROOT = Path(__file__).parents[2]
SAYS = re.compile(r"(?<![\w./-])narrowcast ([a-z]+(?: (?:show|check|compare|path)\b)?)((?: [^`\n\"',;|)}\\]*)?)")
# what stands where a command is expected, and is prose
PROSE = {
    "command",
    "and",
    "is",
    "in",
    "import",
    "on",
    "as",
    "of",
    "for",
    "from",
    "to",
    "with",
    "without",
    "at",
    "the",
    "stand",
    "verb",
}


def commands():
    """The options of each command, by its words; those of `narrowcast` itself with each."""
    root = typer.main.get_command(app)
    below = dict(root.commands)
    for name, group in root.commands.items():
        below |= {f"{name} {inner}": command for inner, command in getattr(group, "commands", {}).items()}
    return {
        name: {o for p in [*command.params, *root.params] for o in p.opts} | {"--help", "-h"}
        for name, command in below.items()
    }


COMMANDS = commands()


def wrong(text):
    """What it prints that is no command, or no option of it."""
    for said in SAYS.finditer(text):
        words, rest = said[1], said[2]
        name = words if words in COMMANDS else words.split()[0]
        if name in PROSE:
            continue
        if name not in COMMANDS:
            yield f"narrowcast {name}"
            continue
        if name != "watch":  # what follows its script is the script's
            options = re.findall(r"(?<= )--?[a-z][\w-]*", rest.split(" -- ")[0])
            yield from (f"narrowcast {name} {option}" for option in options if option not in COMMANDS[name])


FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *(p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "decisions"} & set(p.parts)),
    *(p for folder in ("src", "examples") for p in (ROOT / folder).rglob("*.py")),
    *(ROOT / "web/src").rglob("*.ts*"),
]


def test_printed_commands_exist():
    """Of documents, of source (messages and docstrings), and of the page."""
    found = [f"{file.relative_to(ROOT)}: {said}" for file in sorted(FILES) for said in wrong(file.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["`narrowcast fit TARGET`", "narrowcast explain x.py --dtype bf16", "narrowcast report"]
)
def test_wrong_ones_are_found(text):
    """Else the test above cannot fail."""
    assert list(wrong(text))
