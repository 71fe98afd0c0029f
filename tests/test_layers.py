"""The house rules that a machine can hold: which file may import which, what a file says first, how long it may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashattn_lite"

# Modules by floor. A file imports only from lower floors.
ROOMS = [
    "errors problem options scalars watchers forks autocast batch_dims "
    "arguments arguments_decode arguments_mask arguments_varlen",
    "state scores target operators products tiles kernels kernels.tuning "
    "kernels.hopper_config kernels.tuning_hopper kernels.tuning_parts kernels.tuning_dealt "
    "kernels.tuning_softmax kernels.tuning_decode "
    "kernels.interpreter kernels.operands kernels.series kernels.start kernels.compiling kernels.descriptors "
    "kernels.gluon_names kernels.device",
    "reference tiled tiled_backward softmax_tiled kernels.softmax_shape kernels.softmax_exchange "
    "kernels.softmax_window kernels.softmax_unit kernels.softmax_tiles kernels.softmax kernels.softmax_ring "
    "kernels.softmax_launch kernels.attention_tiles kernels.attention kernels.attention_launch kernels.uncovered "
    "kernels.parts kernels.backward_rows kernels.backward kernels.backward_mask kernels.backward_launch "
    "kernels.backward_hopper kernels.backward_hopper_launch "
    "kernels.hopper_shape kernels.hopper_tasks kernels.hopper_pieces kernels.hopper_epilogue kernels.hopper_producer "
    "kernels.hopper_rows kernels.hopper_scores kernels.hopper_steps kernels.hopper_again kernels.hopper_folds "
    "kernels.attention_hopper kernels.attention_hopper_launch kernels.decode_splits kernels.decode_tiles "
    "kernels.decode kernels.decode_merge kernels.merge_launch kernels.decode_launch",
    "dispatch flops keys",
    "calls ops softmax decode_backends",
    "api merge decode sdpa_known",
    "sdpa replace integrations testing",
]
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms.split()}
FLOORS[""] = len(ROOMS)  # the public face
# Neighbours on one floor that may talk: the door says no through errors and knows numbers, scores speak in the state's
# log2 units, tiles mask their scores, tile tables are keyed by the facts of the GPU, a launcher starts the kernel it
# is named after, and what Triton can take is said by one launcher; a start knows descriptors and what compiles ahead
# of it, the interpreter what a launch is; the op runs calls, and softmax asks them who watches; what stands in for
# torch's function is sdpa's; the softmax kernels know where their tiles lie; the Hopper kernel is cut along its roles,
# decoding into its two kernels, the tiles of the first and the splits that both know.
NEIGHBOURS = {
    ("arguments", "errors"),
    ("arguments", "scalars"),
    ("arguments", "watchers"),
    *((f"arguments_{kind}", "arguments") for kind in ("decode", "mask", "varlen")),
    *((f"arguments_{kind}", "errors") for kind in ("decode", "mask", "varlen")),
    *((f"arguments_{kind}", "scalars") for kind in ("decode", "varlen")),
    ("options", "problem"),
    ("batch_dims", "problem"),
    ("batch_dims", "scalars"),
    ("scores", "state"),
    ("tiles", "scores"),
    ("kernels.tuning", "target"),
    *((f"kernels.{room}", "kernels.tuning") for room in ("hopper_config", "tuning_dealt", "tuning_parts")),
    *(("kernels.tuning_dealt", f"kernels.{room}") for room in ("hopper_config", "tuning_hopper", "tuning_parts")),
    *(("kernels.tuning_hopper", f"kernels.{room}") for room in ("hopper_config", "tuning", "tuning_parts")),
    ("kernels.tuning_parts", "kernels.hopper_config"),
    *((f"kernels.tuning_{room}", "target") for room in ("dealt", "parts")),
    ("kernels.tuning_softmax", "kernels.tuning"),
    ("kernels.tuning_softmax", "target"),
    ("kernels.tuning_decode", "kernels.tuning"),
    ("kernels.tuning_decode", "target"),
    ("kernels.attention", "kernels.attention_tiles"),
    ("kernels.attention_launch", "kernels.attention"),
    ("kernels.attention_launch", "kernels.uncovered"),
    *((f"kernels.backward{room}", "kernels.attention_tiles") for room in ("", "_mask", "_rows")),
    *((f"kernels.backward{room}", "kernels.backward_rows") for room in ("", "_mask", "_launch")),
    *((f"kernels.backward{room}", "kernels.backward") for room in ("_mask", "_launch")),
    *(("kernels.backward_launch", f"kernels.{room}") for room in ("backward_hopper_launch", "backward_mask", "parts")),
    *(("kernels.backward_hopper", f"kernels.{room}") for room in ("attention_tiles", "backward", "backward_rows")),
    *(("kernels.backward_hopper", f"kernels.hopper_{room}") for room in ("producer", "scores", "tasks")),
    *(("kernels.backward_hopper_launch", f"kernels.{room}") for room in ("attention_hopper_launch", "backward_hopper")),
    ("kernels.backward_hopper_launch", "kernels.hopper_tasks"),
    ("kernels.backward_launch", "kernels.attention_launch"),
    ("kernels.attention_hopper_launch", "kernels.uncovered"),
    ("kernels.attention_hopper_launch", "kernels.attention_hopper"),
    ("kernels.attention_hopper_launch", "kernels.hopper_shape"),
    ("kernels.attention_hopper_launch", "kernels.hopper_tasks"),
    ("kernels.attention_hopper_launch", "kernels.decode_launch"),
    ("kernels.attention_hopper_launch", "kernels.merge_launch"),
    ("kernels.hopper_tasks", "kernels.decode_splits"),
    *(("kernels.attention_hopper", f"kernels.hopper_{room}") for room in ("tasks", "producer", "rows", "pieces")),
    *(("kernels.attention_hopper", f"kernels.hopper_{room}") for room in ("scores", "again", "epilogue", "steps")),
    ("kernels.hopper_steps", "kernels.hopper_pieces"),
    ("kernels.hopper_steps", "kernels.hopper_scores"),
    ("kernels.hopper_steps", "kernels.hopper_tasks"),
    ("kernels.attention_hopper", "kernels.hopper_folds"),
    ("kernels.hopper_again", "kernels.hopper_epilogue"),
    ("kernels.hopper_again", "kernels.hopper_folds"),
    ("kernels.hopper_folds", "kernels.decode_splits"),
    ("kernels.hopper_folds", "kernels.hopper_epilogue"),
    ("kernels.hopper_folds", "kernels.hopper_pieces"),
    ("kernels.hopper_folds", "kernels.hopper_rows"),
    ("kernels.hopper_folds", "kernels.hopper_scores"),
    ("kernels.hopper_folds", "kernels.hopper_steps"),
    ("kernels.hopper_folds", "kernels.hopper_tasks"),
    ("kernels.hopper_epilogue", "kernels.hopper_tasks"),
    ("kernels.hopper_again", "kernels.hopper_pieces"),
    ("kernels.hopper_again", "kernels.hopper_rows"),
    ("kernels.hopper_again", "kernels.hopper_scores"),
    ("kernels.hopper_again", "kernels.hopper_tasks"),
    ("kernels.hopper_rows", "kernels.hopper_tasks"),
    ("kernels.hopper_scores", "kernels.hopper_tasks"),
    ("kernels.hopper_producer", "kernels.hopper_tasks"),
    ("kernels.operands", "state"),
    *(("kernels.series", f"kernels.{room}") for room in ("compiling", "descriptors", "start")),
    ("kernels.start", "kernels.compiling"),
    ("kernels.start", "kernels.descriptors"),
    ("kernels.interpreter", "kernels.start"),
    ("ops", "calls"),
    ("replace", "sdpa"),
    ("softmax", "calls"),
    ("kernels.softmax", "kernels.softmax_tiles"),
    ("kernels.softmax_window", "kernels.softmax_exchange"),
    ("kernels.softmax_window", "kernels.softmax_tiles"),
    ("kernels.softmax_unit", "kernels.softmax_exchange"),
    ("kernels.softmax_unit", "kernels.softmax_tiles"),
    ("kernels.softmax_unit", "kernels.softmax_window"),
    ("kernels.softmax_ring", "kernels.softmax"),
    ("kernels.softmax_ring", "kernels.softmax_exchange"),
    ("kernels.softmax_ring", "kernels.softmax_unit"),
    ("kernels.softmax_ring", "kernels.softmax_window"),
    ("kernels.softmax_launch", "kernels.softmax"),
    ("kernels.softmax_launch", "kernels.softmax_ring"),
    ("kernels.softmax_launch", "kernels.softmax_shape"),
    ("kernels.decode", "kernels.decode_splits"),
    ("kernels.decode_merge", "kernels.decode_splits"),
    ("kernels.decode_launch", "kernels.decode"),
    ("kernels.decode", "kernels.decode_tiles"),
    ("kernels.decode_launch", "kernels.merge_launch"),
    ("kernels.decode_launch", "kernels.uncovered"),
    ("kernels.merge_launch", "kernels.decode_merge"),
    ("kernels.merge_launch", "kernels.decode_splits"),
    ("kernels.decode_launch", "kernels.decode_splits"),
    ("kernels.decode_launch", "kernels.attention_launch"),
}
# Packages on one floor as a whole, whose files share their parts.
SHARING = ("kernels.device", "integrations", "testing")

# Lines that are neither blank nor docstring (that is there for the caller, not for the reader of the code); of a
# function its body: a kernel's signature has a line for each stride.
FILE_LIMITS = {"kernels/": 300, "": 200}
FUNCTION_LIMIT = 60
TEST_FILE_LIMIT = 250


def module_name(path: Path) -> str:
    """`kernels.softmax` for flashattn_lite/kernels/softmax.py; a package is named by its folder."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
HOST_AND_KERNELS = pytest.mark.parametrize("name", FILES, ids=lambda name: name or "__init__")


def room(name: str) -> str:
    """The entry of FLOORS that a module belongs to: itself, else the sharing package around it."""
    if name in FLOORS:
        return name
    package = next((package for package in SHARING if name.startswith(package + ".")), None)
    assert package is not None, f"{name} has no floor: give it one in FLOORS and in the design"
    return package


def imports(tree: ast.AST, name: str, is_package: bool) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in the file, lazily or for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE.name:
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                here = name.split(".") if is_package else name.split(".")[:-1]
                base = here[: len(here) - node.level + 1] + base
            elif base[0] != PACKAGE.name:
                continue
            else:
                base = base[1:]
            for alias in node.names:  # `from package import module` imports the module
                inner = ".".join([*base, alias.name])
                yield inner if inner in FILES or inner in FLOORS else ".".join(base)


def may_import(importer: str, imported: str) -> bool:
    above, below = room(importer), room(imported)
    if FLOORS[below] < FLOORS[above] or (importer, imported) in NEIGHBOURS:
        return True
    return above == below and above in SHARING


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def code_lines(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef | None = None) -> int:
    """Lines of a file, or of one function's body in it, without blank lines and docstrings."""
    tree = parse(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    first, last = (1, len(lines)) if node is None else (node.body[0].lineno, node.end_lineno)
    docs = set()
    for inner in ast.walk(tree):
        holds_docs = isinstance(inner, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if holds_docs and ast.get_docstring(inner) is not None:
            docs |= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    return sum(1 for number in range(first, last + 1) if lines[number - 1].strip() and number not in docs)


def test_the_package_is_found() -> None:
    assert {"errors", "problem", "state", "kernels.device.state"} <= set(FILES)


@HOST_AND_KERNELS
def test_imports_only_from_lower_floors(name: str) -> None:
    found = imports(parse(FILES[name]), name, FILES[name].name == "__init__.py")
    wrong = sorted({imported or PACKAGE.name for imported in found if not may_import(name, imported)})
    assert not wrong, f"{name or PACKAGE.name} (floor {FLOORS[room(name)]}) imports {wrong}: not from a lower floor"


def test_every_neighbour_is_one() -> None:
    pairs = ((room(name), imported) for name, path in FILES.items()
             for imported in imports(parse(path), name, path.name == "__init__.py"))  # fmt: skip
    assert not NEIGHBOURS - {(name, room(imported)) for name, imported in pairs}


def test_the_law_has_teeth() -> None:
    """The same reading, on files that break the law in each way."""
    lines = {
        "from flashattn_lite.api import attention": "api",
        "from flashattn_lite import dispatch": "dispatch",
        "from .kernels import softmax": "kernels.softmax",
        "def lazy():\n    import flashattn_lite.ops": "ops",
    }
    for line, imported in lines.items():
        assert list(imports(ast.parse(line), "tiled", is_package=False)) == [imported]
        assert not may_import("tiled", imported)
    assert not may_import("kernels.softmax", "kernels.attention")
    assert not may_import("problem", "errors")
    assert may_import("kernels.softmax", "kernels.device.state")


@HOST_AND_KERNELS
def test_a_file_says_first_what_lives_there(name: str) -> None:
    tree = parse(FILES[name])
    if not tree.body:
        return  # an empty __init__.py has nothing to say
    opening = (ast.get_docstring(tree) or "").split("\n")[0]
    assert opening.endswith("."), f"{FILES[name]} opens with {opening!r}, not with a sentence on one line"


@pytest.mark.parametrize("folder", ["flashattn_lite", "tests", "benchmarks", "demo"])
def test_no_file_is_a_drawer(folder: str) -> None:
    words = {part for path in (ROOT / folder).rglob("*.py") for part in path.stem.lower().split("_")}
    assert words.isdisjoint({"util", "utils", "helper", "helpers", "common", "misc"})


@HOST_AND_KERNELS
def test_files_and_functions_stay_short(name: str) -> None:
    path = FILES[name]
    relative = path.relative_to(PACKAGE).as_posix()
    limit = next(lines for start, lines in FILE_LIMITS.items() if relative.startswith(start))
    assert code_lines(path) <= limit, f"{relative}: look for the second room"
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = code_lines(path, node)
            assert lines <= FUNCTION_LIMIT, f"{relative}: {node.name} has {lines} lines of code"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_test_files_stay_short(path: Path) -> None:
    assert code_lines(path) <= TEST_FILE_LIMIT


def test_what_nobody_wrote_is_nan() -> None:
    """The net that conftest spreads under every other test."""
    made = [
        torch.empty(3),
        torch.empty_like(torch.ones(3)),
        torch.ones(1).new_empty(3),
        torch.empty_strided((3,), (2,)),
    ]
    assert all(x.isnan().all() for x in made)
    assert torch.empty(2, dtype=torch.int32).eq(2**31 - 1).all()
