"""What the documents show is run: every code block of every page, in order, in one namespace per page."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx
from torch._dynamo.backends.debugging import aot_eager

_spec = importlib.util.spec_from_file_location("pages", Path(__file__).parent / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)

ROOT = pages.ROOT
# Pages that need a framework, which `make frameworks` installs and runs them with.
NEEDS = {f"docs/frameworks/{page}.md": name for page, name in (
    ("lightning", "lightning"), ("transformers", "accelerate"), ("accelerate", "accelerate"), ("ignite", "ignite"),
)}  # fmt: skip
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [
    page
    for page in PAGES
    if set(pages.languages(page)) & set(pages.LANGUAGES)
    and importlib.util.find_spec(NEEDS.get(str(page.relative_to(ROOT)), "torch"))
]
# Blocks that no test runs, page by page; each says why where it stands.
SKIPPED = {"docs/internals/costs.md": 1}


def run(path, folder):
    return pages.Page(path, folder).run()


def op_by_op(graph, inputs, *args, **kwargs):
    return aot_eager(graph, inputs)


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_block_of_a_page_does_what_the_page_says(path, tmp_path, monkeypatch):
    """Graphs that Inductor is given run op by op here: it would take most of the time, and has tests of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", op_by_op)
    torch.manual_seed(0)
    skipped = run(path, tmp_path)
    assert len(skipped) == SKIPPED.get(str(path.relative_to(ROOT)), 0), skipped


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_block_is_in_a_language_that_is_checked(path):
    """So that none is passed over because of a misspelt language; those in braces are Sphinx's."""
    known = {*pages.LANGUAGES, *pages.SHOWN}
    assert [name for name in pages.languages(path) if name not in known and not name.startswith("{")] == []


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("```python\nnc.autocats\n```", "not defined"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", "shown"),
        ('```toml\nname = "a"\n[[rule]]\nop = "aten.mm"\naction = "lowr"\n```', "did you mean"),
        ("```console\n$ narrowcast diff native native\nother -> native\n```", "shown"),
        ("```bash\nnarrowcast policy check nowhere.toml\n```", "exit code 2"),
        ("```python\n# test_a.py\ndef test_a():\n    assert False\n```\n\n```bash\npytest\n```", "1 failed"),
        ("```bash\nmake nothing\n```", "no target"),
        ("```bash\nsomething --else\n```", "nobody tries"),
        ("```json\n{\n```", "Expecting"),
    ],
)
def test_a_page_that_is_wrong_is_caught(block, says, tmp_path):
    """One of each kind."""
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{block}\n")
    with pytest.raises(Exception, match=says):
        run(page, tmp_path)


@pytest.mark.parametrize(
    ("printed", "is_alike"),
    [("took 3.1 ms, of bd2b2b94", True), ("took 3.1 us, of bd2b2b94", False), ("took some ms, of bd2b2b94", False)],
)
def test_figures_of_one_machine_stand_for_others(printed, is_alike, tmp_path):
    """Numbers and digests may differ, units and words may not; without the comment numbers may not, either."""
    page = tmp_path / "page.md"
    for mark, passes in (("<!-- figures of one machine -->\n", is_alike), ("", False)):
        page.write_text(
            f"# A page\n\n```python\nprint({printed!r})\n```\n\n{mark}```text\ntook 12 ms, of 41d0c3aa\n```\n"
        )
        with contextlib.nullcontext() if passes else pytest.raises(Exception, match="shown"):
            run(page, tmp_path)


def test_blocks_share_a_namespace_and_a_folder_and_skips_say_why(tmp_path, monkeypatch):
    """What one defines or saves, the next one uses; a class's source can be read."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# mine.py\nclass A:\n    pass\n```\n\n"
        "```python\nimport inspect, pathlib\nprint(inspect.getsource(A), pathlib.Path('mine.py').exists())\n```\n\n"
        "```text\nclass A:\n    pass\n ...True\n```\n\n"
        '<!-- skip: next "needs a GPU" -->\n\n```python\nraise SystemExit\n```\n'
    )
    assert run(page, tmp_path) == ["needs a GPU"]
