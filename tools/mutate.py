"""Change one thing of the pure half at a time, and see whether tests/pure and tests/laws notice: mutmut does it.

python tools/mutate.py [PART ...] [--sample N --seed S] [--again] [--quick]

PART is a room or a file (`programs/placement`, `core/decide.py`); all of PARTS without one. --sample draws this many
mutants. --again keeps the last run and tries only what was not killed in it, and what has changed.
--quick stops after the first round, in which each mutant meets the quickest of the tests that reach it; the survivors
of that one meet all the others. Afterwards the survivors are compared with tests/mutants.toml, where those are listed
that no test can kill, each with the reason. The exit status is 1 if more than 5 % survive besides these, or if one of
these is gone or killed.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src/narrowcast")
FOLDER = ROOT / "build" / "mutation"
EXPLAINED = ROOT / "tests" / "mutants.toml"
PARTS = (
    "core/decide.py", "core/module_calls.py", "core/refusals.py", "core/ledger", "core/ops", "core/policy",
    "formats.py", "output/words.py", "programs", "reports/results/ledger.py", "reports/results/codec.py",
    "reports/documents/rules.py", "reports/documents/tables.py", "reports/documents/words.py",
    "analysis/diff/alignment.py", "analysis/diff/outcomes.py", "analysis/diff/gradients.py",
)  # fmt: skip
ALLOWED = 0.05
QUICK = 2.5
"""How many seconds of tests a mutant meets in the first round."""
BODY = "_undecorated"
_SKIPPED = 34  # mutmut's code of a mutant that is not to run

_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
pytest_add_cli_args_test_selection = ["tests/pure", "tests/laws"]
pytest_add_cli_args = [
    "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "--hypothesis-profile=mutation",
    # It counts function calls, and mutmut's are among them.
    "--deselect=tests/pure/test_decide.py::test_a_decision_is_a_few_function_calls",
    # They read web/, which is not copied.
    "--deselect=tests/pure/test_page.py::test_the_built_files_are_what_the_sources_give",
    "--deselect=tests/pure/test_page.py::test_a_changed_source_is_noticed",
    "--deselect=tests/pure/test_page.py::test_the_bundle_brings_the_licences_of_what_is_in_it",
    # What it holds beyond the others is a time.
    "--deselect=tests/pure/test_place.py::test_twenty_thousand_calls_are_placed_with_a_certificate",
]
process_isolation = "forkserver"
forkserver_warmup = "collect"
on_dependency_change = "ignore"
timeout_multiplier = 3.0
timeout_constant = 20.0

[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
"""

# A cache hides a function from the tests after the first. So none is kept: neither between the tests when it is found
# which of them call what, nor from before the mutant was there.
_CONFTEST = """
import functools
import gc
import os
import resource

import pytest
from hypothesis import Phase, settings

resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)  # a mutant may fill a list without end

settings.register_profile(
    "mutation", parent=settings.get_profile("narrowcast"), derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate],
)


_mutants = set()


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    mutant = os.environ.get("MUTANT_UNDER_TEST")
    if mutant == "stats" or mutant not in _mutants:
        _mutants.add(mutant)
        for each in gc.get_objects():
            if isinstance(each, functools._lru_cache_wrapper):
                if str(each.__module__).startswith("narrowcast"):
                    each.cache_clear()
            elif str(type(each).__module__).startswith("narrowcast") and hasattr(each, "__dict__"):
                for name, kind in vars(type(each)).items():
                    if isinstance(kind, functools.cached_property):
                        each.__dict__.pop(name, None)
    yield
"""


@dataclass(frozen=True, order=True)
class Mutant:
    """One change, named by what it changes rather than by a line's number."""

    file: str
    function: str
    was: str
    now: str


@dataclass(frozen=True)
class Outcome:
    """A mutant, and whether a test noticed it."""

    mutant: Mutant
    killed: bool


# -- the comparison


def read_explained(text: str) -> dict[Mutant, str]:
    """The reasons why mutants survive, from the text of tests/mutants.toml."""
    rows = tomllib.loads(text).get("equivalent", [])
    return {Mutant(row["file"], row["function"], row["was"], row["now"]): row["reason"] for row in rows}


def problems(outcomes: Sequence[Outcome], explained: Iterable[Mutant], is_whole: bool = True) -> list[str]:
    """What is wrong with a run. Where it was not whole, an explained mutant may be missing in it."""
    explained = set(explained)
    survived = {o.mutant for o in outcomes if not o.killed}
    tried = {o.mutant for o in outcomes}
    left = [o for o in outcomes if not o.killed and o.mutant not in explained]
    found = []
    if len(left) > ALLOWED * len(outcomes):
        found.append(f"{len(left)} of {len(outcomes)} survive unexplained: more than {ALLOWED:.0%}")
    for each in sorted(explained - survived):
        if each in tried or is_whole:
            what = "is killed" if each in tried else "is gone"
            found.append(f"explained, but {what}: {each.file} {each.function}: {each.was} => {each.now}")
    return found


def table(outcomes: Sequence[Outcome], explained: Iterable[Mutant]) -> str:
    """Per file: mutants, killed, survived, and how many of these are explained."""
    explained = set(explained)
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for name in (outcome.mutant.file, "all"):
            row = counts.setdefault(name, Counter())
            row["mutants"] += 1
            row["killed"] += outcome.killed
            row["survived"] += not outcome.killed
            row["explained"] += not outcome.killed and outcome.mutant in explained
    columns = ("mutants", "killed", "survived", "explained")
    lines = [f"{'':28}" + "".join(f"{column:>10}" for column in columns)]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        lines.append(f"{name:28}" + "".join(f"{counts[name][column]:>10}" for column in columns))
    return "\n".join(lines)


# -- the copy that is mutated


def undecorated(source: str) -> str:
    """The source with `@property def f` written as `def f_undecorated` and `f = property(f_undecorated)`.

    mutmut leaves decorated functions alone. `strict=True`, an assertion, is written so that it stays.
    """
    lines = source.replace("strict=True", "strict=...").splitlines()
    inserted: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list:
            continue
        made = node.name + BODY
        for decorator in reversed(node.decorator_list):
            made = f"{ast.unparse(decorator)}({made})"
            lines[decorator.lineno - 1] = ""
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {node.name}(", f"def {node.name}{BODY}(", 1)
        inserted.append((node.end_lineno or node.lineno, f"{' ' * node.col_offset}{node.name} = {made}"))
    for after, line in sorted(inserted, reverse=True):
        lines.insert(after, line)
    return "\n".join(lines) + "\n"


def prepare(parts: Sequence[str]) -> None:
    """The copy of the sources and tests that mutmut works in."""
    for path in sorted((ROOT / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            here = path.relative_to(ROOT)
            is_mutated = path.suffix == ".py" and any(
                here.is_relative_to(PACKAGE / part) and here.name != "__init__.py" for part in PARTS
            )
            text = path.read_text(encoding="utf-8")
            _write(FOLDER / here, undecorated(text) if is_mutated else text)
    shutil.rmtree(FOLDER / "mutants" / "tests", ignore_errors=True)
    for folder in ("pure", "laws"):
        shutil.copytree(ROOT / "tests" / folder, FOLDER / "tests" / folder, dirs_exist_ok=True)
    _write(FOLDER / "tests" / "conftest.py", (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8") + _CONFTEST)
    patterns = [f"{PACKAGE}/{part}" if part.endswith(".py") else f"{PACKAGE}/{part}/*" for part in parts]
    _write(FOLDER / "pyproject.toml", _SETTINGS.format(files=patterns))


def _write(path: Path, text: str) -> None:
    """Where it is another text: mutmut sees by the time of a file whether it has changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# -- the library


def set_operators() -> None:
    """What is changed: all of mutmut's but texts, and what mypy would not let pass; and two of our own."""
    import libcst as cst
    from mutmut.mutation import mutators

    left_out = {
        mutators.operator_string, mutators.operator_arg_removal, mutators.operator_assignment,
        mutators.operator_dict_arguments, mutators.operator_lambda,
    }  # fmt: skip
    turned = {
        cst.LessThan: cst.GreaterThan, cst.GreaterThan: cst.LessThan,
        cst.LessThanEqual: cst.GreaterThanEqual, cst.GreaterThanEqual: cst.LessThanEqual,
    }  # fmt: skip

    def turn(node: cst.ComparisonTarget) -> Iterator[cst.ComparisonTarget]:
        if type(node.operator) in turned:
            yield node.with_changes(operator=turned[type(node.operator)]())

    def give_nothing(node: cst.Return) -> Iterator[cst.Return]:
        if node.value is not None and not (isinstance(node.value, cst.Name) and node.value.value in _CONSTANTS):
            yield node.with_changes(value=cst.Name("None"))

    kept = [row for row in mutators.mutation_operators if row[1] not in left_out]
    mutators.mutation_operators[:] = [*kept, (cst.ComparisonTarget, turn), (cst.Return, give_nothing)]  # type: ignore[index]


_CONSTANTS = ("None", "True", "False")  # the latter are exchanged anyway


def run(again: bool, quick: bool, sample: int | None, seed: int) -> list[Outcome]:
    """What became of each mutant."""
    import mutmut.__main__ as mutmut
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.runners.harness import PytestRunner
    from mutmut.state import state
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files

    seconds = QUICK

    def quick_first(self: PytestRunner, tests: Iterable[str]) -> list[str]:
        """With the quick tests first, most mutants are killed in a moment."""
        durations = state().duration_by_test
        ordered = sorted(tests, key=lambda test: (durations.get(test, 0.0), test))
        together = accumulate(durations.get(test, 0.0) for test in ordered)
        chosen = [
            test for test, so_far in zip(ordered, together, strict=True) if so_far < seconds or test == ordered[0]
        ]
        return ["-x", "-q", *(chosen or self._pytest_add_cli_args_test_selection)]

    PytestRunner._pytest_args_regular_run = quick_first  # type: ignore[method-assign]
    set_operators()
    Path("mutants").mkdir(exist_ok=True)
    mutmut.copy_src_dir()
    mutmut.create_mutants(1)
    files = []
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        files.append(data)
    names = sorted(name for data in files for name in data.exit_code_by_key)
    drawn = set(names if sample is None else random.Random(seed).sample(names, min(sample, len(names))))
    for data in files:
        for name, code in data.exit_code_by_key.items():
            if name not in drawn:
                data.exit_code_by_key[name] = _SKIPPED
            elif code == _SKIPPED or (again and status_by_exit_code[code] != "killed"):
                data.exit_code_by_key[name] = None
        data.save()
    Path("mutants/mutmut-stats.json").unlink(missing_ok=True)
    mutmut._run((), 1)
    if not quick:
        for data in files:
            data.load()
            again_ = {name for name, code in data.exit_code_by_key.items() if status_by_exit_code[code] == "survived"}
            data.exit_code_by_key.update(dict.fromkeys(again_))
            data.save()
        seconds = math.inf
        mutmut._run((), 1)
    outcomes = []
    for data in files:
        data.load()
        for name, code in data.exit_code_by_key.items():
            if name in drawn:
                status = status_by_exit_code[code]
                mutant = _mutant(str(data.path), name, get_diff_for_mutant(name, path=data.path))
                outcomes.append(Outcome(mutant, status not in ("survived", "no tests")))
    return outcomes


def _mutant(path: str, name: str, diff: str) -> Mutant:
    """The mutant of that name, as the list has it."""
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    function, of_class = orig_function_and_class_names_from_key(name)
    lines = diff.splitlines()[2:]
    was, now = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    where = f"{of_class}." if of_class else ""
    return Mutant(
        Path(path).relative_to(PACKAGE).as_posix(), where + function.rpartition(".")[2].removesuffix(BODY),
        was.replace("strict=...", "strict=True").replace(BODY, ""),
        now.replace("strict=...", "strict=True").replace(BODY, ""),
    )  # fmt: skip


def main() -> int:
    """0 if few enough survive, and the list of the explained ones is true."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.again:
        shutil.rmtree(FOLDER, ignore_errors=True)
    prepare(given.parts or PARTS)
    os.chdir(FOLDER)
    outcomes = run(given.again, given.quick, given.sample, given.seed)
    explained = read_explained(EXPLAINED.read_text(encoding="utf-8"))
    for outcome in sorted(outcomes, key=lambda o: o.mutant):
        if not outcome.killed and outcome.mutant not in explained:
            m = outcome.mutant
            print(f"survived: {m.file} {m.function}\n    - {m.was}\n    + {m.now}")
    print(table(outcomes, explained))
    found = problems(outcomes, explained, is_whole=not given.parts and given.sample is None)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
