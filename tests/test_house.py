"""The house: which room imports which, and the names that people import."""
import ast
import importlib
from functools import cache
from graphlib import TopologicalSorter

import pytest

from configs import ROOT

ROOMS = {  # from the ground up: a room -> the rooms that it imports, all of them below it
    "tokenizer_utils": set(),
    "qwen3": {"tokenizer_utils"},
    "qwen3_5": {"tokenizer_utils", "qwen3"},
    "qwen4_exp": {"tokenizer_utils", "qwen3", "qwen3_5"},
    "qwen3_vision": {"tokenizer_utils", "qwen3"},
    "qwen3_asr": {"tokenizer_utils", "qwen3"},
    "qwen3_tts": {"tokenizer_utils", "qwen3"},
    "qwen3_lib.io": {"tokenizer_utils", "qwen3", "qwen3_5", "qwen4_exp", "qwen3_vision", "qwen3_asr",
                     "qwen3_tts"},
    "qwen3_lib.kernels": {"qwen3", "qwen3_5", "qwen4_exp", "qwen3_lib.io"},
    "qwen3_lib.generation": {"tokenizer_utils", "qwen3", "qwen3_5", "qwen3_vision", "qwen3_asr", "qwen3_tts",
                             "qwen3_lib.io"},
    "qwen3_numba": {"qwen3", "qwen3_lib.io", "qwen3_lib.kernels"},
    "qwen3_lib.app": {"tokenizer_utils", "qwen3", "qwen3_vision", "qwen3_asr", "qwen3_tts", "qwen3_lib.io",
                      "qwen3_lib.generation", "qwen3_numba"},
    "qwen3_lib.page": {"tokenizer_utils", "qwen3", "qwen3_5", "qwen3_vision", "qwen3_asr", "qwen3_lib.io",
                       "qwen3_lib.generation"},
    "qwen3_batch": {"qwen3", "qwen3_tts", "qwen3_lib.generation", "qwen3_lib.app"},
    "qwen3_embed": {"qwen3", "qwen3_5", "qwen3_vision", "qwen3_lib.io", "qwen3_lib.generation", "qwen3_lib.app"},
    "qwen3_inspect": {"qwen3", "qwen3_5", "qwen3_lib.io", "qwen3_lib.app", "qwen3_lib.page", "qwen3_lib.generation"},
    "qwen3_lib.server": {"tokenizer_utils", "qwen3", "qwen3_lib.io", "qwen3_lib.generation",
                         "qwen3_lib.app", "qwen3_lib.page", "qwen3_embed", "qwen3_vision", "qwen3_asr",
                         "qwen3_tts"},
    "qwen3_server": {"qwen3", "qwen3_asr", "qwen3_tts", "qwen3_lib.io", "qwen3_lib.generation", "qwen3_lib.app",
                     "qwen3_batch", "qwen3_lib.server"},
}
DOORS = {  # the functions that import a room above them, when they are called
    # a name that is no plain folder; a Qwen3.5; pictures; the line for the log
    ("qwen3", "load_model"): {"qwen3_lib.io", "qwen3_5", "qwen3_vision", "qwen3_lib.app"},
    ("qwen3", "chat"): {"qwen3_lib.generation"},  # stop strings, logprobs, think budget, lookup
    ("qwen3", "main"): {"qwen3_lib.app"},  # the options of the app
    ("qwen3_asr", "transcribe"): {"qwen3_lib.generation"},  # files of all kinds, long sounds
    ("qwen3_asr", "main"): {"qwen3_lib.app"},
    ("qwen3_tts", "speak"): {"qwen3_lib.generation"},  # long texts, voices of sounds
    ("qwen3_tts", "main"): {"qwen3_lib.app"},
}
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
         for file in [*ROOT.glob("*.py"), *ROOT.glob("qwen3_lib/*/*.py")]}
TREES = {module: ast.parse(file.read_text("utf-8")) for module, file in FILES.items()}


def room(module: str) -> str:
    return next(name for name in ROOMS if module == name or module.startswith(f"{name}."))


@cache
def imported(module: str) -> set[str]:
    """The modules of ours that a module imports, but through its doors."""
    names: set[str] = set()

    def visit(node: ast.AST, door: set[str]) -> None:
        found: set[str] = set()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":  # never imported
            return
        if isinstance(node, ast.FunctionDef):
            door = DOORS.get((module, node.name), door)
        elif isinstance(node, ast.Import):
            found = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        names.update(name for name in found & {*FILES} if room(name) not in door)
        for child in ast.iter_child_nodes(node):
            visit(child, door)

    visit(TREES[module], set())
    return names


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_the_rooms_of_the_table(name):
    arrows = {room(other) for module in FILES if room(module) == name for other in imported(module)}
    assert arrows - {name} == {*ROOMS[name]}


def test_arrows_point_down():
    order = [*ROOMS]
    assert all(order.index(lower) < order.index(name) for name, below in ROOMS.items() for lower in below)


def test_nothing_imports_in_a_circle():
    graph = {module: imported(module) - {module} for module in FILES}
    assert {*TopologicalSorter(graph).static_order()} == {*FILES}  # CycleError names the circle


@pytest.mark.parametrize("name", ["tokenizer_utils", "qwen3", "qwen3_5", "qwen4_exp", "qwen3_vision", "qwen3_asr",
                                  "qwen3_tts", "qwen3_numba", "qwen3_embed", "qwen3_batch"])
def test_all_names_what_is_there(name):
    module = importlib.import_module(name)
    assert len({*module.__all__}) == len(module.__all__)
    for each in module.__all__:
        value = getattr(module, each)
        assert not callable(value) or value.__doc__, each


def test_the_engines_are_exchangeable_name_by_name():
    qwen3, fast = importlib.import_module("qwen3"), importlib.import_module("qwen3_numba")
    assert {*qwen3.__all__} <= {*fast.__all__}


def test_only_a_types_own_file_asks_for_its_classes():
    """Which model type it is, its row in MODEL_TYPES says: nobody else asks whether something is of a type's class."""
    classes = {node.name: module for module, tree in TREES.items() for node in ast.walk(tree)
               if isinstance(node, ast.ClassDef)
               and {*map(ast.unparse, node.bases)} & {"Config", "KVCache", "HybridCache", "Media", "HybridConfig"}}
    assert {"HybridConfig", "HybridCache", "StateCache", "Sounds", "Pictures"} <= {*classes}
    asking = [(module, ast.unparse(node)) for module, tree in TREES.items() for node in ast.walk(tree)
              if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
              for name in ast.walk(node.args[1])
              if classes.get(getattr(name, "attr", getattr(name, "id", "")), module) != module]
    assert not asking


# Functions that do the same in both engines, in a Qwen3.5, or in kernels; parts of every script; tables that grow.
NAMESAKES = {"KIND", "KVCache", "MODEL_TYPES", "__all__", "apply_rope", "attention", "chat", "decoder_layer",
             "delta_rule", "guess", "linear", "load_model", "load_weights", "main", "make_parser", "media_of", "moe",
             "ngram_layer", "read_streams", "rms_norm", "run", "run_pass", "sigmoid", "sparse_attention", "swiglu",
             "tensor_shapes", "with_heads", "write_streams"}


def test_a_name_has_one_meaning():
    """In a file, in a room, and in the single files, whose names count everywhere."""
    places: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else names:
                places.setdefault(name, []).append(module)
    rooms = {name: [module.rpartition(".")[0] for module in where] for name, where in places.items()}
    assert not {name: places[name] for name, found in rooms.items() if name not in NAMESAKES
                and (len({*found}) < len(found) or "" in found and len(found) > 1)}
