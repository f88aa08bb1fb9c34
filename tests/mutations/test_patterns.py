"""Patterns find code by its structure and change nothing else."""

import ast
from functools import cache

import pytest

from tests.mutations.faults import Fault
from tests.mutations.groups import ALL
from tests.mutations.patterns import PatternError, replaced
from tests.mutations.suite import SOURCE, mutated

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NAMES_A_LOCAL = {
    "folded one too far when all were accepted", "snapshot slot off the grid",
    "bad_words see no drafts", "convolution inputs not moved at preemption",
    "a resumed chunk convolves with the row's old inputs",
    "a first chunk begins from the slot's old state", "the state rounded to bf16 when it moves",
    "a prompt's state rounded at the end of its chunk alone",
    "a resumed prompt of Mamba-2 begins from the row's state, not the snapshot",
    "a token of a latent attention window sees the next one",
    "a draft model reads the token after each position", "a grammar's masks lie at the first row",
    "a window over latents is one grouped query",
    "attention of a kernel reads one key less in long steps",
}  # fmt: skip
"""Faults whose replacement reads a local variable that their pattern does not match."""

SOURCE_TEXT = '''\
import torch


class Rows:
    size = 4  # Rows.

    def step(self, rows, limit=2):
        """Step."""
        # Before.
        first = (
            rows  # Why.
            + 1
        )
        if first < limit:
            self.move(rows, limit, by=first, back=True)
        elif first > limit:
            self.stay(rows)
        return f"{first + 1} é", first < limit, sum(row for row in rows)

    @property
    def wide(self):
        return torch.maximum(self.size, 1)
'''
TAIL = """\
    @property
    def wide(self):
        return torch.maximum(self.size, 1)
"""


@pytest.mark.parametrize(
    ("scope", "old", "new", "was", "now"),
    [
        ("Rows.step", "if $a < $b: ...\nelse: ...", "if $a <= $b: ...\nelse: ...",
         "if first < limit", "if (first <= limit)"),
        ("Rows.step", "f'{$a + 1} é'", "f'{$a + 2} é'", 'f"{first + 1} é"', "f'{first + 2} é'"),
        ("Rows.wide", "torch.maximum($x, $y)", "$x", "torch.maximum(self.size, 1)", "self.size"),
        ("Rows.wide", "torch.maximum($x, $y)", "torch.maximum($y, $x)", "(self.size, 1)",
         "(1, self.size)"),
        ("Rows.step", "self.move(..., by=$n)", "self.move(..., by=$n + 1)", "by=first",
         "by=(first + 1)"),
        ("Rows.step", "self.stay($x)", "", "            self.stay(rows)\n", ""),
        ("Rows.step", "if $f > $n:\n    $x", "if $f > $n:\n    pass",
         "elif first > limit:\n            self.stay(rows)",
         "elif first > limit:\n            pass"),
        ("Rows", "@property\ndef wide(self):\n    return $x", "", TAIL, ""),
        ("Rows.step", "self.stay($x)", "pass", "self.stay(rows)", "pass"),
        ("Rows.step", "self.move(..., back=True)", "self.stay(..., back=True)", "self.move",
         "self.stay"),
        ("Rows.step", "$f = $r + 1", "$f = $r + 2", "+ 1\n        )", "+ 2\n        )"),
        ("Rows.step", "$f = $r + 1", "$f = $r + 1\n$f += 1", "        )\n",
         "        )\n        first += 1\n"),
        ("Rows.step", "if $f < $n:\n    ...\nelse:\n    ...",
         "rows = 3\nif $f < $n:\n    ...\nelse:\n    ...", "        if first",
         "        rows = 3\n        if first"),
        ("Rows.step", "if $f > $n:\n    self.stay($x)", "if $f:\n    $x", 
         "elif first > limit:\n            self.stay(rows)", "elif first:\n            rows"),
        ("Rows", "def $f($self, $rows, $n=2): ...", "def $f($self, $rows, $n=3): ...", "limit=2",
         "limit=3"),
        ("Rows", "$size = 4", "$size = 5", "size = 4", "size = 5"),
        ("", "import torch", "import math", "import torch", "import math"),
        ("Rows.step", "sum($x for $x in $rows)", "sum($rows)", "(row for row in rows)", "(rows)"),
    ],
)  # fmt: skip
def test_only_what_differs_is_edited(scope: str, old: str, new: str, was: str, now: str) -> None:
    assert SOURCE_TEXT.count(was) == 1
    assert replaced(SOURCE_TEXT, scope, old, new) == SOURCE_TEXT.replace(was, now)


@pytest.mark.parametrize(
    ("scope", "old", "new", "message"),
    [
        ("Rows.steps", "$x < $y", "$x", "'Rows.steps'. Similar names: Rows.step"),
        ("Table.wide", "$x < $y", "$x", "'Table.wide'. Similar names: Rows.wide."),
        ("xyz", "$x < $y", "$x", "there is no function or class 'xyz'. No name is similar."),
        ("Rows.step", "$x < $y", "$x <= $y",
         "'$x < $y' matches 2 places of Rows.step, not one:\n"
         "  line 14: first < limit\n  line 18: first < limit"),
        ("Rows.wide", "torch.minimum($x, 1)", "$x",
         "'torch.minimum($x, 1)' matches nothing in Rows.wide. The most similar code there:\n"
         "  line 22: torch.maximum(self.size, 1)"),
        ("Rows.step", "import $x", "", "'import $x' matches nothing in Rows.step."),
        ("Rows.wide", "torch.maximum($x, 1)", "limit", "limit, which Rows.wide does not define"),
        ("Rows.wide", "torch.maximum($x, 1)", "$y", "has $y, which the pattern does not match"),
        ("Rows.wide", "torch.maximum($x, 1", "$x", "'torch.maximum($x, 1' is not Python"),
        ("Rows.step", "self.move(..., back=True)", "[self.move(..., back=True)]",
         "the change takes in a `...`"),
    ],
)  # fmt: skip
def test_an_error_shows_the_similar_code(scope: str, old: str, new: str, message: str) -> None:
    with pytest.raises(PatternError) as error:
        replaced(SOURCE_TEXT, scope, old, new)
    assert message in str(error.value)


def test_the_same_placeholder_matches_the_same_code() -> None:
    text = "def f(a, b):\n    return a * b + a * a\n"
    assert replaced(text, "f", "$x * $x", "$x") == "def f(a, b):\n    return a * b + a\n"


def test_parentheses_are_put_around_what_needs_them() -> None:
    text = "def f(a, b):\n    return (a - b) * g(a)\n"
    changed = replaced(text, "f", "$x * g($y)", "$y ** $x")
    assert changed == "def f(a, b):\n    return (a ** (a - b))\n"


class Renamed(ast.NodeTransformer):
    """Function whose local variables and parameters have other names."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._other(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._other(node.arg)
        return self.generic_visit(node)

    def _other(self, name: str) -> str:
        return f"other_{name}" if name in self.names else name


def local_names(function: ast.AST) -> set[str]:
    """Return the names of a function's variables and parameters."""
    nodes = list(ast.walk(function))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    parameters = {n.arg for n in nodes if isinstance(n, ast.arg)}
    outer = {n for m in nodes if isinstance(m, ast.Global | ast.Nonlocal) for n in m.names}
    return (stored | parameters) - outer - {"self", "cls"}


def functions(tree: ast.Module) -> list[ast.AST]:
    """Return the outermost functions of a file, in order."""
    pending: list[ast.AST] = [tree]
    outermost = []
    while pending:
        node = pending.pop()
        if isinstance(node, FUNCTIONS):
            outermost.append(node)
        else:
            pending += list(ast.iter_child_nodes(node))[::-1]
    return outermost


def renamed(text: str, sound: str) -> str:
    """Return a file in another format, with other names for the locals of the sound file."""
    tree = ast.parse(text)
    for function, original in zip(functions(tree), functions(ast.parse(sound)), strict=True):
        Renamed(local_names(original)).visit(function)
    return ast.unparse(tree)


@cache
def sound_and_renamed(file: str) -> tuple[str, str]:
    text = (SOURCE / file).read_text(encoding="utf-8")
    return text, renamed(text, text)


FIRST_OF_AREA = {fault.area: fault for fault in reversed(ALL)}
RENAMED = [
    pytest.param(f, id=f.name, marks=() if f is FIRST_OF_AREA[f.area] else pytest.mark.slow)
    for f in ALL
]


@pytest.mark.parametrize("fault", RENAMED)
def test_a_fault_outlives_other_names_and_another_format(fault: Fault) -> None:
    """Comments are gone and every local has another name: the same fault is put in, or, where it
    needs a local that it names, an error says so."""
    sound, other = sound_and_renamed(fault.file)
    if fault.name in NAMES_A_LOCAL:
        with pytest.raises(PatternError, match="the replacement reads"):
            mutated(other, fault)
        return
    expected = renamed(mutated(sound, fault), sound)
    assert ast.unparse(ast.parse(mutated(other, fault))) == expected
