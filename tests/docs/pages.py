"""Runs the code blocks of a page, in order, in one namespace and one folder.

What a block is for is said by its language:

    python    runs. A first line `# NAME.py` also saves it under that name.
    text      is what the block before it printed; `...` represents anything. After the comment
              `<!-- figures of one machine -->` each number, and each digest, represents any other.
    toml      is a policy that loads, or a part of one. A first line `# NAME.toml` saves it under that name.
    json      is JSON.
    console   is `$ narrowcast ...` with what it prints; `...` represents anything.
    bash      is commands: those of `narrowcast` and `pytest` run, those of `make` must have a target.
    markdown  is text to copy, shown as it is.
    (none)    is a drawing.

`<!-- invisible-code-block: python ... -->` is run and not shown: what the reader has already, a model for example.
`<!-- skip: next "the reason" -->` leaves the next block out.
"""

import contextlib
import io
import json
import re
import shlex
import sys
import types
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
from sybil import Document
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer
from sybil.parsers.myst import CodeBlockParser, SkipParser

from narrowcast.core.policy import Policy

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "text", "toml", "json", "console", "bash")
SHOWN = ("markdown",)
# What is run by other parts of `.ci/run` (the wheel, the README's commands) and changes the machine.
NUMBER, DIGEST = r"\d+(?:\.\d+)*(?:e[+-]\d+)?", r"[0-9a-f]{8,}"
OF_ONE_MACHINE = "<!-- figures of one machine -->"
NOT_HERE = ("make", "pip", "cd", "git")


def languages(path):
    """The language of each fenced block with one."""
    found = FencedCodeBlockLexer(r"[^\n]+")(Document(path.read_text(encoding="utf-8"), str(path)))
    return [region.lexemes["language"] for region in found]


class Page:
    """One page while it runs."""

    def __init__(self, path, folder):
        self.folder = folder
        self.printed = ""
        parsers = [CodeBlockParser(language, getattr(self, language)) for language in LANGUAGES]
        self.document = Document.parse(str(path), SkipParser(), *parsers)
        # TorchScript and inspect read the source of what is defined: a module whose lines are those of the page.
        self.module = types.ModuleType(f"page_{path.stem}")
        self.module.__file__ = str(folder / f"{path.stem}.py")
        self.document.namespace = self.module.__dict__
        self.lines = [""] * (path.read_text(encoding="utf-8").count("\n") + 1)
        self.skipped = []

    def run(self):
        """All blocks; the reasons of those that are left out. Stops at the first that fails."""
        sys.modules[self.module.__name__] = self.module
        try:
            for example in self.document.examples():
                try:
                    example.evaluate()
                except SkipTest as reason:
                    self.skipped.append(str(reason))
        finally:
            del sys.modules[self.module.__name__]
        return self.skipped

    def saved(self, example):
        """The block, under the name in its first line, if there is one."""
        named = re.match(r"# ([\w-]+\.\w+)\n", example.parsed)
        if named:
            (self.folder / named[1]).write_text(example.parsed, encoding="utf-8")

    def python(self, example):
        self.saved(example)
        start = example.line + example.parsed.line_offset
        block = example.parsed.splitlines()
        self.lines[start : start + len(block)] = block
        file = Path(self.module.__file__)
        file.write_text("\n".join(self.lines), encoding="utf-8")
        code = compile("\n" * start + example.parsed, str(file), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.module.__dict__)
        self.printed = printed.getvalue()

    def text(self, example):
        before = self.document.text[: example.start].rstrip().rpartition("\n")[2]
        return difference(example.parsed, self.printed, is_of_one_machine=before == OF_ONE_MACHINE)

    def toml(self, example):
        self.saved(example)
        Policy.parse(example.parsed, "page.toml")

    def json(self, example):
        json.loads(example.parsed)

    def console(self, example):
        found = []
        for part in re.split(r"^\$ ", example.parsed, flags=re.M)[1:]:
            command, _, wanted = part.partition("\n")
            printed = narrowcast(command)
            if wanted.strip():
                found.append(difference(wanted, printed))
        return "".join(filter(None, found))

    def bash(self, example):
        for line in example.parsed.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "narrowcast":
                narrowcast(line)
            elif words and words[0] == "pytest":
                users_pytest(words[1:], self.folder)
            elif words and words[0] == "make":
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                assert re.search(rf"^{words[1]}:", makefile, re.M), f"no target of the Makefile: {line}"
            elif words and words[0] not in NOT_HERE:
                raise AssertionError(f"nobody tries this command: {line}")


def narrowcast(command):
    """What the command line prints; in this process, as importing torch takes seconds."""
    from narrowcast.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(said):
        try:
            main(shlex.split(command, comments=True)[1:])
        except SystemExit as stop:
            differs = command.startswith("narrowcast diff ") and stop.code == 1  # it is asked for what differs
            assert stop.code in (0, None) or differs, (
                f"{command}: exit code {stop.code}\n{printed.getvalue()}{said.getvalue()}"
            )
    return printed.getvalue()


def users_pytest(arguments, folder):
    """pytest on the tests that the page saved in its folder, with the plugin of Narrowcast; they must pass."""
    options = ["-p", "narrowcast.testing.plugin", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those that the page's own test runs with
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        settings = folder / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        options += ["-c", str(settings), "--capture=no", "--import-mode=importlib", str(folder)]
        code = pytest.main([*options, *arguments])
    assert code == 0, printed.getvalue()


def difference(wanted, printed, is_of_one_machine=False):
    """What a reader would say of it; nothing, if what is shown is what was printed. Spaces do not count; figures of one
    machine stand for others.
    """
    of_torch = re.search(r"torch (\d\S*)", wanted)
    if of_torch and not torch.__version__.startswith(of_torch[1]):  # the lists of another have another digest
        wanted, printed = (re.sub(rf"(?<=digest ){DIGEST}|torch \d\S*", "-", text) for text in (wanted, printed))
    shown, found = (re.sub("─+", "─", " ".join(text.split())) for text in (wanted, printed))
    parts = re.split(f"({DIGEST}|{NUMBER})", shown) if is_of_one_machine else [shown]
    others = (DIGEST if re.fullmatch(DIGEST, part) else NUMBER for part in parts[1::2])
    pattern = "".join(next(others) if n % 2 else re.escape(part) for n, part in enumerate(parts))
    pattern = pattern.replace(r"\.\.\.\ ", "(?:.* )?").replace(r"\ \.\.\.", "(?: .*)?")
    if re.fullmatch(pattern.replace(r"\.\.\.", ".*"), found):
        return None
    return f"shown:\n{wanted}\nprinted:\n{printed}"
