"""The words of messages and documents: those of PyTorch's documents and of numerical analysis."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# a word that was written here -> what it is called in the field
WORDS = {
    r"put back": "restored",
    r"mend(s|ed|ing)?": "fix, repair",
    r"anew": "again",
    r"so many": "N",
    r"whoever": "a caller",
    r"stands? for": "represents",
    r"(is|are|was|were) meant": "is intended; intentional",
    r"gave": "returned; output",
    r"came (in|with|of)": "input",
    r"looked at": "inspected",
    r"least headroom": "minimum headroom",
    r"(fp16|bf16|format|\}) ends at": "the maximum of fp16 is",
    r"leave (\S+ ){1,3}away": "use no ..., remove",
    r"most worth doing": "recommendations",
    r"as good as zero": "zero up to round-off",
    r"worse than not worse": "at most ... worse",
}
REFUSED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def messages(file):
    """The strings of a file that are no docstrings, each with its line; of an f-string, its texts joined by `}`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "}".join(v.value for v in node.values if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | docstrings:
            yield node.lineno, node.value


def test_messages_are_in_the_field_s_words():
    """Whatever a user may read: errors, advice, titles, headers."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {REFUSED.search(text)[0]!r} in {text[:90]!r}"
        for file in sorted((ROOT / "src").rglob("*.py"))
        for line, text in messages(file)
        if REFUSED.search(text)
    ]
    assert not found, "\n".join(found)


GUIDES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "decisions"} & set(p.parts)),
]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_guides_are_in_the_field_s_words(page):
    """README, guides and reference; decisions are kept as they were taken."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = [
        f"{page}:{n}: {REFUSED.search(line)[0]!r}: {line[:100]}"
        for n, line in enumerate(lines, 1)
        if REFUSED.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["it was meant so", "fp16 ends at 65504", "leave the scaler away", "what it gave"])
def test_the_list_finds_them(text):
    """Else the tests above cannot fail."""
    assert REFUSED.search(text)
