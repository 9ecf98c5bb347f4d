"""The house itself: the order of the rooms, which room imports which, and the names that people import."""
import ast
import importlib
from graphlib import TopologicalSorter

import pytest

from configs import ROOT

ROOMS = ("qwen3_io", "qwen3_app", "qwen3_kernels", "qwen3_page")
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
         for file in [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).glob("*.py"))]}
BELOW = {  # room -> the rooms that it may import besides itself
    "qwen3_io": set(),
    "tokenizer_utils": {"qwen3_io"},
    "qwen3_lookup": {"qwen3_io"},
    "qwen3": {"qwen3_io", "tokenizer_utils", "qwen3_lookup"},
    "qwen3_kernels": {"qwen3_io"},
    "qwen3_app": {"qwen3_io", "tokenizer_utils", "qwen3"},
    "qwen3_numba": {"qwen3_io", "tokenizer_utils", "qwen3", "qwen3_kernels", "qwen3_app"},
    "qwen3_embed": {"qwen3_io", "qwen3", "qwen3_numba", "qwen3_app"},
    "qwen3_batch": {"qwen3_io", "tokenizer_utils", "qwen3", "qwen3_numba", "qwen3_app"},
    "qwen3_page": {"qwen3_io", "tokenizer_utils", "qwen3", "qwen3_numba"},
    "qwen3_inspect": {"qwen3_io", "tokenizer_utils", "qwen3", "qwen3_app", "qwen3_page"},
}
LAZY = {("qwen3", "qwen3_lookup"), ("qwen3_numba", "qwen3_app"), ("qwen3_embed", "qwen3_app"),
        ("qwen3_embed", "qwen3_numba"), ("qwen3_batch", "qwen3_app"), ("qwen3_batch", "qwen3_numba"),
        ("qwen3_page.contents", "qwen3_numba")}  # only within functions


def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text("utf-8"))


def is_start(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, the one place where a module may call those above it."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


COMMANDS = "qwen3_app.commands"  # the installed commands: nothing imports it, and it starts qwen3_numba


def imported(node: ast.AST) -> set[str]:
    """The modules of ours that a node imports, anywhere but in the start of a program."""
    if is_start(node):
        return set()
    names = set()
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        names = {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    for child in ast.iter_child_nodes(node):
        names |= imported(child)
    return names & {*FILES}


def imports_at_the_top(module: str) -> set[str]:
    """What is imported as soon as the module is."""
    return set().union(*(imported(node) for node in tree(module).body
                         if not isinstance(node, ast.FunctionDef | ast.ClassDef)))


def room(module: str) -> str:
    return module.split(".")[0]


def test_the_first_formula_stands_on_the_first_pages():
    lines = FILES["qwen3"].read_text("utf-8").splitlines()
    assert len(lines) <= 850
    for name in ("linear", "rms_norm"):
        assert next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {name}(")) < 120


def test_qwen3_is_read_in_the_order_of_the_house():
    names = [node.name for node in tree("qwen3").body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    order = ["Config", "linear", "rms_norm", "attention", "swiglu", "decoder_layer", "KVCache", "forward", "Sampling",
             "sample", "generate", "Completion", "chat", "score", "load_model"]
    assert sorted(order, key=names.index) == order


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    if room(module) in BELOW and module != COMMANDS:
        assert {room(name) for name in imported(tree(module))} <= BELOW[room(module)] | {room(module)}
    eager = imports_at_the_top(module)
    for lazy_in, name in LAZY:
        assert module != lazy_in or not any(other == name or other.startswith(f"{name}.") for other in eager)


def test_nothing_imports_in_a_circle():
    graph = {module: imported(tree(module)) - {module} for module in FILES}
    assert {*TopologicalSorter(graph).static_order()} == {*FILES}  # CycleError names the circle


def test_only_the_start_of_qwen3_calls_a_room_above():
    """Its last line, and, before all imports, what lets Ctrl-C end these in one line."""
    body = tree("qwen3").body
    first, last = [node for node in body if is_start(node)]
    assert (body[2], body[-1]) == (first, last)  # after the docstring and `from __future__`
    assert {name for node in first.body for name in imported(node)} == {"qwen3_app.start"}
    assert {name for node in last.body for name in imported(node)} == {"qwen3_app.cli"}
    assert "qwen3_app" not in str(imported(tree("qwen3")))


def test_a_circle_and_an_arrow_upwards_would_be_seen(tmp_path, monkeypatch):
    """By the tests above."""
    (tmp_path / "up.py").write_text("def load():\n    from qwen3_app import cli\n    import qwen3\n")
    monkeypatch.setitem(FILES, "qwen3_io.up", tmp_path / "up.py")
    assert imported(tree("qwen3_io.up")) == {"qwen3_app", "qwen3_app.cli", "qwen3"}
    with pytest.raises(AssertionError):
        test_imports_point_down("qwen3_io.up")
    (tmp_path / "up.py").write_text("import qwen3_io.down\n")
    (tmp_path / "down.py").write_text("def f():\n    from qwen3_io.up import x\n")
    monkeypatch.setitem(FILES, "qwen3_io.down", tmp_path / "down.py")
    with pytest.raises(ValueError, match="cycle"):
        test_nothing_imports_in_a_circle()


def test_every_name_is_imported_by_its_name():
    others = [file for folder in ("tests", "tools", "bench") for file in (ROOT / folder).glob("*.py")]
    for file in [*FILES.values(), *others]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            assert not isinstance(node, ast.ImportFrom) or all(alias.name != "*" for alias in node.names), file


@pytest.mark.parametrize("name", ["qwen3", "qwen3_numba", "qwen3_embed", "qwen3_batch", "tokenizer_utils"])
def test_all_names_what_is_there(name):
    module = importlib.import_module(name)
    assert len({*module.__all__}) == len(module.__all__)
    assert all(getattr(module, each, None) is not None for each in module.__all__)
    described = [each for each in module.__all__ if callable(getattr(module, each))]
    assert all(getattr(module, each).__doc__ for each in described)


def test_the_engines_are_exchangeable_name_by_name():
    qwen3, fast = importlib.import_module("qwen3"), importlib.import_module("qwen3_numba")
    assert {*qwen3.__all__} <= {*fast.__all__}
    for name in ("Config", "InputError", "Model", "Sampling", "Tokenizer", "chat", "generate", "score"):
        assert getattr(fast, name) is getattr(qwen3, name)


def test_each_test_file_is_named_after_a_room():
    rooms = {module.split(".")[-1] for module in FILES} | {module.removeprefix("qwen3_") for module in FILES}
    rooms |= {"readme", "package", "reference", "house", "suite", "demo"}
    for file in (ROOT / "tests").glob("test_*.py"):
        name = file.stem.removeprefix("test_")
        assert any(name == each or name.startswith(f"{each}_") for each in rooms), file.name
        assert len(file.read_text("utf-8").splitlines()) <= 720, file.name


@pytest.mark.parametrize("module", FILES)
def test_lines_are_at_most_120_characters(module):
    assert not [line for line in FILES[module].read_text("utf-8").splitlines() if len(line) > 120]
