"""The words of messages, documents and docstrings: those of PyTorch's documents and of numerical analysis."""

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
    r"what came|came (in|of)": "input",
    r"looked at": "inspected",
    r"least headroom": "minimum headroom",
    r"(fp16|bf16|format|\}) ends at": "the maximum of fp16 is",
    r"leave (\S+ ){1,3}away": "use no ..., remove",
    r"most worth doing": "recommendations",
    r"as good as zero": "zero up to round-off",
    r"worse than not worse": "at most ... worse",
}
REFUSED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
# of texts that are no Python: there a word of a program's own may be one of these
ON_PAGES = {
    r"weights at rest": "cached low-precision weights",
    r"nothing stands out": "no recommendations",
    r"would it fit": "format range check",
    r"unlisted": "no rule",
    r"gemms?(?! \|)": "matrix multiplication",
    r"`?came`? ?(->|/) ?`?computes`?": "input dtypes -> compute dtypes",
    r"\w+ products, one row": "matrix-vector product",
}
REFUSED_ON_PAGES = re.compile(rf"\b(?:{'|'.join((*WORDS, *ON_PAGES))})\b", re.IGNORECASE)


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


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/tour.ipynb")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "decisions"} & set(p.parts)),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "web" / "src").glob("*.ts")),
    *sorted((ROOT / "docs" / "pictures").glob("*.svg")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_in_the_field_s_words(page):
    """README, guides, reference, tour, examples, pictures and the page's own code; decisions are kept as they were
    taken. A phrase may go over the end of a line.
    """
    text = " ".join(re.sub(r"^\s*(?://|#) ", "", line) for line in page.read_text(encoding="utf-8").splitlines())
    text = " ".join(text.split())
    found = [f"{m[0]!r}: {text[max(0, m.start() - 40) : m.end() + 40]}" for m in REFUSED_ON_PAGES.finditer(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["it was meant so", "fp16 ends at 65504", "leave the scaler away", "what it gave"])
def test_the_list_finds_them(text):
    """Else the tests above cannot fail."""
    assert REFUSED.search(text)


# besides those above: of docstrings alone, where no message needs them
IN_DOCSTRINGS = {
    r"told": "notified, reported",
    r"tells? of": "reports",
    r"(is|are) at rest|weights at rest": "cached low-precision weights",
    r"own errors?": "local error",
    r"inherited errors?": "propagated error",
    r"gemms?": "matrix multiplication",
}
REFUSED_IN_DOCSTRINGS = re.compile(rf"\b(?:{'|'.join((*WORDS, *IN_DOCSTRINGS))})\b", re.IGNORECASE)
# what a sentence that names a thing begins with, where one that says what a function does has a verb
NO_VERB = """
    A An The This That These Those It Its Our Their What Whatever Whether Which Who Whoever Whose Why Where When While
    How All Any Both Each Every Half More None No Nothing One Something Two Another Others Same After Around As At
    Before Behind Beside Between By For From In Inside Of On Out Over Through To Under Until With Within Without
    Autocast Decided Gamma Mixed Native New Numbers Odd Plain Positional Random Recurrent Shared Signal
"""
ENDS_AS_VERBS_DO = ("ss", "Focus")  # Pass, Compress, Dismiss


def docstrings(file):
    """The docstrings of a file, those of attributes included, each with its line and the function that it is of."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for n, inner in enumerate(node.body if is_function or isinstance(node, ast.ClassDef | ast.Module) else ()):
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                if isinstance(inner.value.value, str):
                    yield inner.lineno, inner.value.value, node if is_function and n == 0 else None


def is_noun(function):
    """Whether a docstring may be a noun phrase: of properties, fixtures, special methods, the command's own help."""
    kinds = "property", "fixture", "overload", "setter", "app.callback"
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return function.name.startswith("__") or any(kind in text for text in decorators for kind in kinds)


def begins_with_verb(text):
    """Whether a sentence begins as one in the imperative does: with a word that is no article, question or noun."""
    first = text.split()[0].rstrip(",")
    is_plural = first.endswith("s") and not first.endswith(ENDS_AS_VERBS_DO)
    return re.fullmatch("[A-Z][a-z-]+", first) is not None and first not in NO_VERB.split() and not is_plural


FILES = sorted((ROOT / "src" / "narrowcast").rglob("*.py"))


def test_docstrings_are_in_the_field_s_words():
    """Those of modules, classes, functions and attributes."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {match[0]!r} in {text[:90]!r}"
        for file in FILES
        for line, text, _ in docstrings(file)
        if (match := REFUSED_IN_DOCSTRINGS.search(" ".join(text.split())))
    ]
    assert not found, "\n".join(found)


def test_docstrings_of_functions_begin_with_what_they_do():
    """`Return the ...`, not `The ...`."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {function.name}: {text[:90]!r}"
        for file in FILES
        for line, text, function in docstrings(file)
        if function is not None and not is_noun(function) and not begins_with_verb(text)
    ]
    assert not found, "\n".join(found)


def test_files_are_found():
    """Else the tests above cannot fail."""
    assert len(FILES) > 250


@pytest.mark.parametrize("text", ["The plan.", "Whether it is on.", "`a`, in short.", "Bytes of it.", "PolicyError if"])
def test_sentences_without_a_verb_are_seen(text):
    """Else the test above cannot fail."""
    assert not begins_with_verb(text) and begins_with_verb("Return it.") and begins_with_verb("Pass, or raise.")


@pytest.mark.parametrize("text", ["It is told of calls.", "what came in", "its own error", "the weights at rest"])
def test_the_list_for_docstrings_finds_them(text):
    """Else the test of docstrings cannot fail."""
    assert REFUSED_IN_DOCSTRINGS.search(text)
