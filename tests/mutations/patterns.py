"""Patterns over Python's syntax tree: they find the code that a fault changes, and change it.

A pattern is Python code, an expression or statements, with two additions:

- `$name` matches any expression or identifier. The same `$name` matches the same code everywhere
  in a pattern. The replacement repeats what `$name` matched.
- `...` as a statement matches any number of statements, and as an argument of a call any number of
  arguments. The replacement repeats it where it was, and changes nothing in it.

Comments, line breaks, quotes and parentheses do not matter. The change is the difference of the two
trees, pattern and replacement: only the source text of what differs is edited.
"""

import ast
import builtins
import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

PREFIX = "placeholder_"
"""Prefix of the identifier as which `$name` is parsed."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ATOMS = (
    ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict, ast.Slice,
    ast.JoinedStr,
)  # fmt: skip
"""Expressions that need no parentheses wherever they are put."""
MAX_CANDIDATES = 3
"""Maximum number of similar nodes that an error lists."""


class PatternError(ValueError):
    """Pattern that does not match exactly once, or change that cannot be made."""


@dataclass(frozen=True)
class Match:
    """Code of a file that a pattern matches.

    nodes: one expression, or consecutive statements.
    bindings: the code that each placeholder matched.
    pairs: the node of the file for each node of the pattern, by the latter's id.
    """

    nodes: tuple[ast.AST, ...] = ()
    bindings: dict[str, ast.expr] = field(default_factory=dict)
    pairs: dict[int, ast.AST] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """Replacement of the bytes start to stop of a file."""

    start: int
    stop: int
    text: str


def replaced(source: str, scope: str, old: str, new: str) -> str:
    """Return the source with the one match of `old` changed into `new`.

    scope: qualified name of the function or class to search; "": the module.

    Raises PatternError where the scope does not exist, where the pattern matches no place or
    several, and where the replacement reads a name that is not defined there.
    """
    tree = _tree(source)
    pattern, replacement = parsed(old), parsed(new)
    is_expression = all(len(p) == 1 and isinstance(p[0], ast.Expr) for p in (pattern, replacement))
    roots = scopes(tree, scope)
    matches = [m for root in roots for m in _matches(pattern, root, is_expression)]
    if len(matches) != 1:
        raise PatternError(_report(source, roots, scope, old, pattern, matches))
    match = matches[0]
    _require_names(tree, scope, replacement)
    edits = _Editor(source, match).edits(pattern, replacement)
    data = source.encode()
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.stop :]
    return data.decode()


@cache
def _tree(source: str) -> ast.Module:
    """Return the tree of a file, which several faults change."""
    return ast.parse(source)


def parsed(text: str) -> list[ast.stmt]:
    """Return the statements of a pattern. Raises PatternError where it is not Python."""
    try:
        return ast.parse(re.sub(r"\$(\w+)", rf"{PREFIX}\1", text)).body
    except SyntaxError as error:
        raise PatternError(f"the pattern {text!r} is not Python: {error}") from None


def scopes(tree: ast.Module, qualified_name: str) -> list[ast.AST]:
    """Return the definitions of that name, several where a name is defined again.

    Raises PatternError where there is none.
    """
    if not qualified_name:
        return [tree]
    named = dict[str, list[ast.AST]]()

    def collect(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                name = f"{outer}{child.name}"
                named.setdefault(name, []).append(child)
                collect(child, f"{name}.")
            else:
                collect(child, outer)

    collect(tree, "")
    if qualified_name not in named:
        # The last part alone is compared too: functions move between classes.
        last = qualified_name.rpartition(".")[2]
        moved = [name for name in named if name.rpartition(".")[2] == last]
        near = moved or difflib.get_close_matches(qualified_name, named, MAX_CANDIDATES, 0.5)
        hint = f"Similar names: {', '.join(near)}" if near else "No name is similar"
        raise PatternError(f"there is no function or class {qualified_name!r}. {hint}.")
    return named[qualified_name]


def _matches(pattern: Sequence[ast.stmt], root: ast.AST, is_expression: bool) -> Iterator[Match]:
    """Yield the places under a node that match, at most one for each first node."""
    if is_expression:
        wanted = pattern[0].value  # type: ignore[attr-defined]
        for node in _expressions(root):
            for match in _match(wanted, node, Match()):
                yield Match((node,), match.bindings, match.pairs)
                break
        return
    for body in _bodies(root):
        for start in range(len(body)):
            for stop, match in _match_prefix(pattern, body[start:], Match()):
                yield Match(tuple(body[start : start + stop]), match.bindings, match.pairs)
                break


def _expressions(root: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions under a node, without the parts of f-strings: Python 3.11 does not
    know their positions."""
    if isinstance(root, ast.expr):
        yield root
    if not isinstance(root, ast.JoinedStr):
        for child in ast.iter_child_nodes(root):
            yield from _expressions(child)


def _bodies(root: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements under a node, and the node itself if it is a statement."""
    if isinstance(root, ast.stmt):
        yield [root]
    for node in ast.walk(root):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _match(wanted: object, node: object, match: Match) -> Iterator[Match]:
    """Yield the ways in which a value of the pattern's tree matches one of the file's tree."""
    if (name := _placeholder(wanted)) is not None:
        if isinstance(node, ast.AST):
            match = Match((), match.bindings, {**match.pairs, id(wanted): node})
        yield from _bind(name, node, match)
    elif isinstance(wanted, ast.AST):
        if type(wanted) is not type(node):
            return
        paired = Match((), match.bindings, {**match.pairs, id(wanted): node})
        yield from _match_fields(wanted, node, list(wanted._fields), paired)
    elif isinstance(wanted, list):
        if isinstance(node, list):
            for length, inner_match in _match_prefix(wanted, node, match):
                if length == len(node):
                    yield inner_match
    elif type(wanted) is type(node) and wanted == node:
        yield match


def _match_fields(
    wanted: ast.AST, node: ast.AST, names: list[str], match: Match
) -> Iterator[Match]:
    """Yield the ways in which all of these fields of two nodes of one type match."""
    if not names:
        yield match
        return
    name, rest = names[0], names[1:]
    # A name that is written to equals the same name where it is read; "kind" is the u of u"".
    if name in ("ctx", "kind", "type_comment"):
        yield from _match_fields(wanted, node, rest, match)
        return
    ours, theirs = getattr(wanted, name), getattr(node, name)
    if name == "keywords" and isinstance(wanted, ast.Call) and any(map(_is_dots, wanted.args)):
        # The dots among a call's arguments match keywords too.
        names_wanted = {keyword.arg for keyword in ours}
        theirs = [keyword for keyword in theirs if keyword.arg in names_wanted]
    for field_match in _match(ours, theirs, match):
        yield from _match_fields(wanted, node, rest, field_match)


def _match_prefix(
    wanted: Sequence[object], nodes: Sequence[object], match: Match
) -> Iterator[tuple[int, Match]]:
    """Yield (length, match) for each way in which a list begins with what the pattern lists."""
    if not wanted:
        yield 0, match
        return
    if _is_dots(wanted[0]):
        for skipped in range(len(nodes), -1, -1):
            for length, rest_match in _match_prefix(wanted[1:], nodes[skipped:], match):
                yield skipped + length, rest_match
    elif nodes:
        for first in _match(wanted[0], nodes[0], match):
            for length, rest_match in _match_prefix(wanted[1:], nodes[1:], first):
                yield length + 1, rest_match


def _bind(name: str, node: object, match: Match) -> Iterator[Match]:
    """Bind a placeholder, or compare with what it is bound to already."""
    code = ast.Name(node, ast.Load()) if isinstance(node, str) else node
    if not isinstance(code, ast.expr):
        return
    bound = match.bindings.get(name)
    if bound is None:
        yield Match((), {**match.bindings, name: code}, match.pairs)
    elif same(bound, code):
        yield match


def _placeholder(value: object) -> str | None:
    """Return the name of a placeholder, None for any other value of a pattern's tree."""
    text = value.id if isinstance(value, ast.Name) else value
    if isinstance(text, str) and text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    return None


def _is_dots(value: object) -> bool:
    """Return whether a statement or an argument is `...`. In a subscript it is Python's own."""
    value = value.value if isinstance(value, ast.Expr) else value
    return isinstance(value, ast.Constant) and value.value is Ellipsis


def same(one: ast.AST, other: ast.AST) -> bool:
    """Return whether two trees are the same code, regardless of load and store contexts."""
    return _code(one) == _code(other)


def _code(node: ast.AST) -> str:
    """Return the dump of a tree without its contexts."""
    return re.sub(r"ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


class _Editor:
    """Edits of the source text that turn what a pattern matched into its replacement."""

    def __init__(self, source: str, match: Match) -> None:
        self.match = match
        self.data = source.encode()
        lines = self.data.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))

    def edits(self, old: list[ast.stmt], new: list[ast.stmt]) -> list[Edit]:
        """Return the edits of a whole pattern."""
        if len(old) == len(new) == 1 and not isinstance(self.match.nodes[0], ast.stmt):
            return self._of_nodes(old[0].value, new[0].value)  # type: ignore[attr-defined]
        return self._of_statements(old, new)

    def _of_statements(self, old: list[ast.stmt], new: list[ast.stmt]) -> list[Edit]:
        """Return the edits of a list of statements, without those that both begin or end with."""
        head = 0
        while head < min(len(old), len(new)) and same(old[head], new[head]):
            head += 1
        tail = 0
        while tail < min(len(old), len(new)) - head and same(old[-1 - tail], new[-1 - tail]):
            tail += 1
        was, now = old[head : len(old) - tail], new[head : len(new) - tail]
        if len(was) == len(now):
            return [e for a, b in zip(was, now, strict=True) for e in self._of_nodes(a, b)]
        text = [self._written(statement) for statement in now]
        if not was:
            return [self._inserted(old, head, text)]
        start, stop = self._span(was[0])[0], self._span(was[-1])[1]
        if text:
            return [Edit(start, stop, self._indented(text, start))]
        return [Edit(self._line_start(start), self.data.find(b"\n", stop) + 1, "")]

    def _inserted(self, old: list[ast.stmt], index: int, text: list[str]) -> Edit:
        """Return the edit that puts statements before that index of the pattern's statements."""
        if index and not _is_dots(old[index - 1]):
            start, stop = self._span(old[index - 1])
            return Edit(stop, stop, self._indented(["", *text], start))
        if index < len(old) and not _is_dots(old[index]):
            start, _ = self._span(old[index])
            return Edit(start, start, self._indented([*text, ""], start))
        raise PatternError("a statement is put in between two `...`: name a statement next to it")

    def _of_nodes(self, old: ast.AST, new: ast.AST) -> list[Edit]:
        """Return the edits of one statement or expression, as deep in it as they can be made."""
        if same(old, new):
            return []
        inner = self._inside(old, new)
        if inner is not None:
            return inner
        start, stop = self._span(old)
        if isinstance(new, ast.stmt):
            text = self._indented([self._written(new)], start)
            # An `elif` is a nested if-statement that begins in the middle of that word.
            return [Edit(start, stop, "el" * self.data.startswith(b"elif", start) + text)]
        text = self._written(new)
        # The parentheses of a call whose only argument is a generator belong to the generator.
        bare = isinstance(new, ATOMS) and not isinstance(old, ast.GeneratorExp)
        return [Edit(start, stop, text if bare else f"({text})")]

    def _inside(self, old: ast.AST, new: ast.AST) -> list[Edit] | None:
        """Return the edits of the parts of a node; None where the node has to be written whole."""
        # The parts of an f-string have no text that can be replaced alone.
        if type(old) is not type(new) or isinstance(old, ast.JoinedStr) or _placeholder(old):
            return None
        edits: list[Edit] = []
        for name, was in ast.iter_fields(old):
            now = getattr(new, name, None)
            if name == "ctx":
                continue
            if isinstance(was, list) and isinstance(now, list) and _are_statements(was, now):
                edits += self._of_statements(was, now)
                continue
            pairs = _paired(was, now)
            if pairs is None:
                return None
            for a, b in pairs:
                part = self._of_part(a, b)
                if part is None:
                    return None
                edits += part
        return edits

    def _of_part(self, old: object, new: object) -> list[Edit] | None:
        """Return the edits of one field's value; None where its node has to be written whole."""
        if not isinstance(old, ast.AST) or not isinstance(new, ast.AST):
            return [] if type(old) is type(new) and old == new else None
        if same(old, new):
            return []
        can_be_replaced = isinstance(old, ast.expr | ast.stmt) and not isinstance(
            old, ast.Starred | ast.Slice
        )
        if not can_be_replaced or isinstance(new, ast.Starred | ast.Slice):
            return self._inside(old, new)
        if isinstance(new, ast.Tuple) and any(isinstance(e, ast.Slice) for e in new.elts):
            return self._inside(old, new)
        return self._of_nodes(old, new)

    def _span(self, wanted: ast.AST) -> tuple[int, int]:
        """Return the first byte and the end of what a node of the pattern matched."""
        node = self.match.pairs.get(id(wanted))
        if node is None:
            raise PatternError("the change takes in a `...`, whose code is not known")
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
        start = self.starts[first.lineno - 1] + first.col_offset
        start -= first is not node  # The @ of a decorator.
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _line_start(self, at: int) -> int:
        """Return the first byte of the line of a byte."""
        return self.data.rfind(b"\n", 0, at) + 1

    def _indented(self, text: list[str], at: int) -> str:
        """Return statements as text that may follow the indentation of this byte's line."""
        indent = " " * (at - self._line_start(at))
        lines = [line for statement in text for line in (statement.splitlines() or [""])]
        return f"\n{indent}".join(lines)

    def _written(self, new: ast.AST) -> str:
        """Return the source text of a part of the replacement."""
        return ast.unparse(_Filler(self.match.bindings).visit(copy.deepcopy(new)))


def _are_statements(was: list, now: list) -> bool:
    """Return whether either list contains statements."""
    return any(isinstance(item, ast.stmt) for item in [*was, *now])


def _paired(was: object, now: object) -> list[tuple[object, object]] | None:
    """Return the values of a field of two nodes pair by pair; None if their numbers differ."""
    if isinstance(was, list) and isinstance(now, list):
        return list(zip(was, now, strict=True)) if len(was) == len(now) else None
    return [(was, now)]


class _Filler(ast.NodeTransformer):
    """Replacement with the code that its placeholders matched."""

    def __init__(self, bindings: dict[str, ast.expr]) -> None:
        self.bindings = bindings

    def visit(self, node: ast.AST) -> ast.AST:
        if (name := _placeholder(node)) is not None:
            return self._bound(name)
        is_call = isinstance(node, ast.Call) and any(map(_is_dots, node.args))
        if is_call or (isinstance(node, ast.Expr) and _is_dots(node)):
            raise PatternError("the change takes in a `...`, whose code is not known")
        for field_name, value in ast.iter_fields(node):
            if isinstance(value, str) and (name := _placeholder(value)) is not None:
                setattr(node, field_name, ast.unparse(self._bound(name)))
        return self.generic_visit(node)

    def _bound(self, name: str) -> ast.expr:
        if name not in self.bindings:
            raise PatternError(f"the replacement has ${name}, which the pattern does not match")
        return copy.deepcopy(self.bindings[name])


def _require_names(tree: ast.Module, scope: str, replacement: list[ast.stmt]) -> None:
    """Raise PatternError where the replacement reads a name that is not defined.

    A NameError would be found by any test: the fault would seem to be found.
    """
    known = set(dir(builtins)).union(*map(_defined_outside, tree.body))
    known = known.union(*map(_defined, replacement))
    names = scope.split(".")
    for depth in range(1, len(names) + 1):
        for root in scopes(tree, ".".join(names[:depth])):
            # Methods do not see the names of their class.
            if depth == len(names) or not isinstance(root, ast.ClassDef):
                known |= _defined(root)
    read = {
        node.id
        for statement in replacement
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and _placeholder(node) is None
    }
    if missing := sorted(read - known):
        raise PatternError(
            f"the replacement reads {', '.join(missing)}, which {scope or 'the module'} does not "
            "define. State the fault with names that are there."
        )


def _defined(root: ast.AST) -> set[str]:
    """Return all names that are bound anywhere under a node."""
    names = set[str]()
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (*DEFINITIONS, ast.ExceptHandler)) and node.name:
            names.add(node.name)
    return names


def _defined_outside(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds for the whole module."""
    is_definition = isinstance(statement, DEFINITIONS)
    return {statement.name} if is_definition else _defined(statement)


def _report(
    source: str,
    roots: list[ast.AST],
    scope: str,
    old: str,
    pattern: list[ast.stmt],
    matches: list[Match],
) -> str:
    """Return the error for a pattern that matches no place, or several."""
    where = scope or "the module"
    if matches:
        matched_nodes = [match.nodes[0] for match in matches]
        listed = "\n".join(_first_line(node) for node in matched_nodes)
        return f"{old!r} matches {len(matches)} places of {where}, not one:\n{listed}"
    kind = type(_wanted(pattern[0])) if pattern else ast.stmt
    code = ast.unparse(pattern[0]).replace(PREFIX, "$") if pattern else ""
    nodes_by_line = {_first_line(n): n for root in roots for n in ast.walk(root) if type(n) is kind}
    texts = {line: ast.unparse(node) for line, node in nodes_by_line.items()}
    ratio = {p: difflib.SequenceMatcher(None, code, t).ratio() for p, t in texts.items()}
    near = "\n".join(sorted(ratio, key=lambda p: -ratio[p])[:MAX_CANDIDATES])
    listed = f" The most similar code there:\n{near}" if near else ""
    return f"{old!r} matches nothing in {where}.{listed}"


def _wanted(statement: ast.stmt) -> ast.AST:
    """Return the expression of an expression statement, else the statement."""
    return statement.value if isinstance(statement, ast.Expr) else statement


def _first_line(node: ast.AST) -> str:
    """Return a node's line number and the first line of its code."""
    return f"  line {node.lineno}: {ast.unparse(node).splitlines()[0]}"  # type: ignore[attr-defined]
