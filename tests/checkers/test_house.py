"""Checks of the repository itself; each check is shown something that it must reject."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import networkx
import pytest

from narrowcast.core.policy import Policy, installed_torch

ROOT = Path(__file__).parents[2]


def run(*arguments, **options):
    return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT, **options)


def test_the_op_pages_are_what_the_policy_data_says():
    """Drift of docs/reference/ops is an error; `make docs` writes them."""
    done = run(sys.executable, "tools/generate_op_pages.py", "--check")
    assert done.returncode == 0, done.stdout


def test_the_command_line_s_page_is_what_its_help_says():
    """Drift of docs/reference/cli.md is an error; `make docs` writes it."""
    done = run(sys.executable, "tools/generate_cli_page.py", "--check")
    assert done.returncode == 0, done.stdout


def test_the_picture_of_an_explanation_is_what_is_drawn():
    """Drift of docs/pictures/explanation.svg, the README's, is an error; `make docs` draws it."""
    done = run(sys.executable, "tools/draw_explanation.py", "--check")
    if done.returncode and not installed_torch().startswith("2.13."):
        pytest.xfail("drawn with torch 2.13: others make a linear of other calls, which move other bytes")
    assert done.returncode == 0, done.stdout


def test_a_changed_page_of_the_command_line_is_caught(tmp_path, monkeypatch):
    """The check above rejects a page with one option missing."""
    spec = importlib.util.spec_from_file_location("generate_cli_page", ROOT / "tools/generate_cli_page.py")
    cli_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli_page)
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    changed = tmp_path / "cli.md"
    changed.write_text(cli_page.PAGE.read_text(encoding="utf-8").replace("`--real`", "`--unreal`"), encoding="utf-8")
    monkeypatch.setattr(cli_page, "PAGE", changed)
    assert cli_page.main() == 1


def test_a_changed_op_page_is_caught(tmp_path, monkeypatch):
    """The check above rejects a page with one op missing."""
    spec = importlib.util.spec_from_file_location("generate_op_pages", ROOT / "tools/generate_op_pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    for page in pages.FOLDER.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text())
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "--check"])
    assert pages.main() == 0
    page = tmp_path / "cpu.md"
    page.write_text(page.read_text().replace("- `aten.linear.default`\n", ""))
    assert pages.main() == 1


def test_the_pure_half_passes_its_tests_with_torch_blocked():
    """Nothing in it may import torch, directly or not. They run here alone: `testpaths` leaves them out."""
    code = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    done = run(sys.executable, "-c", code, *options, "tests/pure", "tests/laws")
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 200
    blocked = run(
        sys.executable, "-c", "import sys; sys.modules['torch'] = None; import narrowcast; narrowcast.autocast"
    )
    assert blocked.returncode != 0 and "torch" in blocked.stderr


def test_public_names_are_there():
    """All of __all__ can be had, and nothing else is promised."""
    import narrowcast as nc

    for name in nc.__all__:
        assert getattr(nc, name) is not None
    with pytest.raises(AttributeError):
        nc.nothing


def readme_python():
    """The Python blocks of the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_the_readme_s_example_runs():
    """As it stands, in a process of its own."""
    blocks = readme_python()
    assert blocks
    for block in blocks:
        done = run(sys.executable, "-c", block, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
        assert "fp32 -> bf16" in done.stdout


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CASES = [e for e in EXAMPLES if "def case(" in e.read_text(encoding="utf-8")]


@pytest.mark.slow  # the demo explains the first
@pytest.mark.parametrize("example", CASES, ids=lambda example: example.name)
def test_each_case_of_the_examples_can_be_explained(example, tmp_path):
    """With the command line, and as a page of less than a megabyte."""
    page = tmp_path / "page.html"
    asked = ("--under", "safe", "--html", str(page))
    done = run(sys.executable, "-m", "narrowcast", "explain", f"examples/{example.name}", *asked)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Loaded pretrained")]  # a package's own
    assert "VERDICT:" in done.stdout and len(lines) <= 25
    assert "narrowcast.page/1" in page.read_text(encoding="utf-8") and page.stat().st_size < 1_000_000


def test_each_example_is_part_of_the_demo():
    """Which runs it, once; `.ci/run` runs the demo."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = makefile[makefile.index("demo:") : makefile.index("test:")]
    assert [e.name for e in EXAMPLES if f"examples/{e.name}" not in demo] == []


def waits_without_limit(text):
    """Lines on which a test could wait for ever: a thread that is no daemon, a wait or join without a limit."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.endswith("Thread") and not any(k.arg == "daemon" for k in node.keywords):
            yield node.lineno
        elif name.endswith((".join", ".wait")) and not node.args and not node.keywords:
            yield node.lineno


def test_no_test_waits_for_ever():
    """A suite ends, whatever fails."""
    found = []
    for file in (ROOT / "tests").rglob("*.py"):
        found += [f"{file.name}:{line}" for line in waits_without_limit(file.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("text", ["threading.Thread(target=f)", "thread.join()", "event.wait()"])
def test_each_way_to_wait_for_ever_is_seen(text):
    """The check above rejects these."""
    assert list(waits_without_limit(text))


def asserts(text):
    """Lines with an assertion: one says nothing to a user, and `python -O` leaves it out."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]


def test_the_library_asserts_nothing():
    """What cannot be is a type, and what may be is an error in four parts."""
    files = (ROOT / "src").rglob("*.py")
    assert not [f"{f.name}:{line}" for f in files for line in asserts(f.read_text(encoding="utf-8"))]


def test_an_assertion_is_seen():
    """The check above rejects this."""
    assert asserts("def f(x):\n    assert x is not None") == [2]


def test_each_policy_file_of_the_examples_loads_without_findings():
    """Lint included."""
    files = list((ROOT / "examples/policies").glob("*.toml"))
    assert files and [finding for file in files for finding in Policy.load(file).lint()] == []


def test_links_inside_the_documents_lead_somewhere():
    """Relative links of all Markdown files."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_lines_of_the_documents_are_short():
    """At most 120 columns, as in the code; rows of tables cannot be broken."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    lines = [(file.name, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert not [(name, line) for name, line in lines if len(line) > 120 and not line.startswith("|")]


def _circles(imports):
    graph = networkx.DiGraph(imports)
    return [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def test_no_files_import_one_another_in_a_circle():
    """Imports inside functions and for types counted; one that is made is caught."""
    found = grimp.build_graph("narrowcast", cache_dir=None)
    imports = [(a, b) for a in found.modules for b in found.find_modules_directly_imported_by(a)]
    assert len(imports) > 1000 and _circles(imports) == []
    assert _circles([*imports, ("narrowcast.errors", "narrowcast.core.decide")]) != []


def test_the_layout_in_contributing_is_the_one_that_is_enforced():
    """Wing by wing and room by room, from top to bottom: what import-linter enforces is what the picture shows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = [c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    assert all(contract["exhaustive"] for contract in contracts)
    rooms = {c["containers"][0]: [name for layer in c["layers"] for name in layer.split(" | ")] for c in contracts}
    enforced = []
    for wing in rooms["narrowcast"]:
        enforced += [wing, *(f"  {room}" for room in rooms.get(f"narrowcast.{wing}", ()))]
    picture = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("```\ncli")[2].partition("```")[0]
    lines = [line for line in f"cli{picture}".splitlines() if not line.startswith("-")]
    assert [line[: len(line) - len(line.lstrip())] + line.split()[0] for line in lines] == enforced


def test_the_doors_in_contributing_are_there():
    """Each file and room that the table of symptoms names."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| told | open first |")[2]
    doors = re.findall(r"\| `([\w/.]+)`[^|`]*\|$", table.partition("\n\n")[0], re.M)
    assert len(doors) == 9 and all((ROOT / "src/narrowcast" / door).exists() for door in doors)


def test_the_top_of_the_package_can_be_overlooked():
    """Seventeen entries: sixteen, and `results`, which lists the classes of what is found."""
    assert len([e for e in (ROOT / "src/narrowcast").iterdir() if e.name not in ("__pycache__", "py.typed")]) == 17


def _untold_versions(page):
    """Pins of frameworks that the page does not name."""
    names = "lightning", "pytorch-lightning", "lightning-fabric", "transformers", "accelerate", "pytorch-ignite"
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    pins = [file.read_text(encoding="utf-8").splitlines() for file in sorted(ROOT.glob("constraints-frameworks*.txt"))]
    asked = [line.split("==") for lines in pins for line in lines if line.split("==")[0] in names]
    assert len(asked) == 2 * len(names)
    return [name for name, version in asked if not any(name in row and version in row for row in rows)]


def test_the_page_on_frameworks_names_the_versions_that_are_pinned():
    """Newest and oldest of each; a page with one of them missing is caught."""
    page = (ROOT / "docs/frameworks/index.md").read_text(encoding="utf-8")
    assert not _untold_versions(page)
    assert _untold_versions(page.replace("pytorch-ignite 0.5.1", "pytorch-ignite")) == ["pytorch-ignite"]


def _missing_names(text):
    """The names that a page gives beside a file, and that the file does not define."""
    missing = []
    for file, name in re.findall(r"`([\w/]+\.py)`(?: \|)?\s`([\w.]+)`", text):
        body = ast.parse((ROOT / "src/narrowcast" / file).read_text(encoding="utf-8")).body
        defined = {n.name: {m.name for m in n.body if hasattr(m, "name")} for n in body if hasattr(n, "name")}
        outer, _, inner = name.partition(".")
        if outer not in defined or (inner and inner not in defined[outer]):
            missing.append((file, name))
    return missing


def test_the_ways_through_the_house_are_those_of_the_code():
    """Each step, and each place that a GPU may contradict, names a file and what it defines; others are caught."""
    page = (ROOT / "docs/internals/ways.md").read_text(encoding="utf-8")
    limits = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    assert page.count("| `") > 50 and limits.count(".py`") > 4 and not _missing_names(page + limits)
    assert _missing_names("`core/decide.py` | `decline`") == [("core/decide.py", "decline")]
