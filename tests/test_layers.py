"""The layer rule: which package may import which, and where the outside world may be looked at."""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parent.parent

# The one table of allowed arrows. `sparsekv` itself (version, facade) may be read by the command line only.
MAY_IMPORT = {
    "plans": set(),
    "kernels": {"plans"},
    "runtime": {"plans", "kernels"},
    "planner": {"plans", "kernels", "runtime"},
    "bench": {"plans", "kernels", "runtime", "planner"},
    "cli": {"plans", "kernels", "runtime", "planner", "bench"},
}
# The only files that import bench/, when their command runs.
MEASURE = {
    "cli/bench.py",
    "cli/bench_model.py",
    "cli/bench_own.py",
    "cli/compare.py",
    "cli/doctor.py",
    "cli/eval.py",
    "cli/plan_commands.py",
}
# plans/ starts in a fraction of a second because of what is not here.
HEAVY = {"torch", "transformers", "triton", "numpy", "scipy", "safetensors", "tokenizers"}
HOSTS = {"transformers", "vllm", "sglang"}
# What names no host in its code, and inside runtime/ imports none.
NAMELESS = ("kernels", "runtime/core", "runtime/stores", "runtime/paged")
HOSTLESS = {"runtime/core": {"runtime/core", "runtime/stores"}, "runtime/stores": {"runtime/stores"}}
# What engines share; it measures, by the device's name, into the folder of caches.
HOSTLESS["runtime/paged"] = {f"runtime/{name}" for name in ("paged", "core", "stores", "model_config", "settings")}
# One name in two folders: a backend with two phases, a phase and its bench, a pattern with two builders, a command over
# its module, settings of a host and those of the environment.
SHARED_NAMES = {"__init__", "cpu", "triton", "prefill", "decode", "settings"}
SHARED_NAMES |= {path.stem for path in (ROOT / "kernels" / "index" / "triton").glob("*.py")}
COMMANDS = {"bench", "compare", "doctor", "eval", "main", "plan", "run", "serve", "verify"}

SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    return tuple(imported(tree_of(path)))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module a file imports anywhere in it, inside functions and TYPE_CHECKING blocks as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level + (node.module or ""), node.lineno)
            if not node.level and node.module == "sparsekv":
                yield from ((f"sparsekv.{alias.name}", node.lineno) for alias in node.names)


def breaches(package: str, imports: Iterable[tuple[str, int]]) -> list[str]:
    """What in a file of `package` breaks the rule."""
    found = []
    for module, line in imports:
        parts = module.split(".")
        if module.startswith("."):
            found.append(f"line {line}: relative import; write `from sparsekv.{package}...`")
        elif parts[0] in MAY_IMPORT:
            found.append(f"line {line}: imports the folder {parts[0]}; write `from sparsekv.{parts[0]}...`")
        elif parts[0] == "sparsekv" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            if parts[1] != package and parts[1] not in MAY_IMPORT[package]:
                found.append(f"line {line}: {package} may not import {parts[1]}")
        elif package == "plans" and parts[0] in HEAVY:
            found.append(f"line {line}: plans may not import {parts[0]}")
    return found


def environment_reads(path: Path) -> list[int]:
    """Lines that look at environment variables."""
    return [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    ]


MAKERS = {function.__name__ for function in _device_constructors()}


def made_anywhere(tree: ast.AST) -> list[int]:
    """Lines that make a tensor without saying where."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and not any(
            keyword.arg is None or (keyword.arg == "device" and ast.unparse(keyword.value) != "None")
            for keyword in node.keywords
        )
    ]


def broken(rule: Callable[[Path], Sequence[object]], files: Iterable[Path]) -> dict[str, Sequence[object]]:
    """The files that break a rule, and where."""
    found = {str(path.relative_to(ROOT)): rule(path) for path in files}
    assert found, "a rule of no file"
    return {name: places for name, places in found.items() if places}


def inside(*folders: str) -> list[Path]:
    return [path for path in SOURCES if any((ROOT / folder) in path.parents for folder in folders)]


def test_no_tensor_lies_on_whatever_device_the_program_has_made_its_default() -> None:
    assert broken(lambda path: made_anywhere(tree_of(path)), inside("kernels", "runtime", "planner")) == {}


def test_no_file_imports_a_layer_above_its_own() -> None:
    assert broken(lambda path: breaches(path.relative_to(ROOT).parts[0], imports_of(path)), SOURCES) == {}


def of_bench(imports: Iterable[tuple[str, int]]) -> list[str]:
    return [module for module, _ in imports if f"{module}.".startswith("sparsekv.bench.")]


def test_only_the_commands_that_measure_import_bench_and_only_when_they_run() -> None:
    users = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "bench" and of_bench(imports_of(path))]
    assert {str(path.relative_to(ROOT)) for path in users} <= MEASURE
    nodes = (node for name in MEASURE for node in tree_of(ROOT / name).body)
    at_import = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [module for node in at_import for module in of_bench(imported(node))] == []


def test_the_environment_is_read_in_one_settings_module() -> None:
    readers = {str(path.relative_to(ROOT)) for path in SOURCES if environment_reads(path)}
    assert readers <= {"runtime/settings.py"}


def hostless_breaches(path: Path) -> list[str]:
    """What ties a file of the core, of a store or of what engines share to a host."""
    home = path.relative_to(ROOT).parent.as_posix()
    allowed = {f"sparsekv.{folder.replace('/', '.')}" for folder in HOSTLESS[home]}
    found = []
    for module, line in imports_of(path):
        inside = module.startswith("sparsekv.runtime") and not any(module.startswith(name) for name in allowed)
        if inside or module.split(".")[0] in HOSTS:
            found.append(f"line {line}: {module}")
    return found


def test_the_core_the_stores_and_what_engines_share_know_no_host() -> None:
    assert broken(hostless_breaches, inside(*HOSTLESS)) == {}


def names_and_strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every identifier, module and string of a file's code, docstrings left out."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module", "asname", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str) and id(node) not in documents:
                yield text, getattr(node, "lineno", 0)


def hosts_named(tree: ast.AST) -> list[str]:
    """Where the code of a file names a host."""
    return [
        f"line {line}: {text}" for text, line in names_and_strings(tree) if any(host in text.lower() for host in HOSTS)
    ]


def test_no_host_is_named_where_hosts_are_not_known() -> None:
    assert broken(lambda path: hosts_named(tree_of(path)), inside(*NAMELESS)) == {}


def silent_handlers(tree: ast.AST) -> list[int]:
    """Handlers of any exception that neither always raise nor name what they caught."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_wide(node.type):
            inside = [inner for statement in node.body for inner in ast.walk(statement)]
            is_named = any(isinstance(inner, ast.Name) and inner.id == node.name for inner in inside)
            if not is_named and not any(isinstance(statement, ast.Raise) for statement in node.body):
                found.append(node.lineno)
    return found


def _is_wide(caught: ast.expr | None) -> bool:
    return caught is None or (isinstance(caught, ast.Name) and caught.id in {"Exception", "BaseException"})


def test_no_failure_turns_into_another_computation_without_being_named() -> None:
    attending = inside(*NAMELESS, "runtime/hf", "runtime/vllm")
    assert broken(lambda path: silent_handlers(tree_of(path)), attending) == {}


ROLES = {node.name for node in tree_of(ROOT / "runtime/core/roles.py").body if isinstance(node, ast.ClassDef)} - {
    "Step"
}


def role_questions(tree: ast.AST) -> list[int]:
    """Lines that ask for the class of a role, by isinstance or a pattern of match."""
    lines = []
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called == "isinstance":
            asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
        else:
            asked = {ast.unparse(node.cls)} if isinstance(node, ast.MatchClass) else set()
        lines += [node.lineno] if ROLES & asked else []
    return lines


def test_a_role_answers_for_itself_and_nobody_asks_for_its_class() -> None:
    others = [path for path in SOURCES if path.name != "roles.py"]
    assert broken(lambda path: role_questions(tree_of(path)), others) == {}


def imported_at_once(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """What a module imports as it is imported itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.unparse(node).split(":")[0]:
            yield from imported_at_once(node.body)


def test_modules_that_a_cpu_runs_are_imported_without_triton() -> None:
    uses = {module_of(path): {*imported_at_once(tree_of(path).body)} for path in SOURCES}
    needs = {"triton"}
    while more := {name for name, used in uses.items() if used & needs} - needs:
        needs |= more
    assert len(needs) > 10
    assert {name for name in needs if not name.startswith(("triton", "sparsekv.kernels."))} == set()


def test_the_hosts_do_not_know_each_other() -> None:
    other = {"hf": "sparsekv.runtime.vllm", "vllm": "sparsekv.runtime.hf"}
    files = [(path, name) for host, name in other.items() for path in (ROOT / "runtime" / host).glob("*.py")]
    assert len(files) > 2
    breaches = [path for path, name in files for module, _ in imports_of(path) if name in module]
    assert breaches == []


def test_five_files_and_the_laboratory_alone_import_vllm_which_promises_nothing_of_its_inside() -> None:
    users = [path for path in SOURCES if any(m.split(".")[0] == "vllm" for m, _ in imports_of(path))]
    users.remove(ROOT / "bench/vllm_engines.py")
    names = ("cache_internals", "devices", "draft_scheduler", "internals", "self_speculator")
    own = [f"runtime/vllm/{name}.py" for name in names]
    assert [str(path.relative_to(ROOT)) for path in users] == own


def module_of(path: Path) -> str:
    return ".".join(("sparsekv", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle_in_functions_or_for_types_neither() -> None:
    modules = {module_of(path): path for path in SOURCES}
    arrows = {
        name: {module for module, _ in imports_of(path) if module in modules and module != name}
        for name, path in modules.items()
    }
    while ends := {name for name, targets in arrows.items() if not targets}:
        arrows = {name: targets - ends for name, targets in arrows.items() if name not in ends}
    assert arrows == {}, "these import each other, or something that does"


def test_a_file_name_says_what_it_holds_without_its_folder() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        if path.stem not in SHARED_NAMES and not (path.parent.name == "cli" and path.stem in COMMANDS):
            homes.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


# What each rule finds in code of which the marked lines break it: else a rule could pass for finding nothing.
FINDS = {
    made_anywhere: (
        "torch.zeros(3)  #!",
        "torch.ones(2, device=here)",
        "torch.full((2,), 1.0, **like)",
        "torch.tensor([1]).to(here)  #!",
        "torch.empty(2, device=None)  #!",
    ),
    hosts_named: (
        '"vllm" in sys.modules  #!',
        'f"the copy in vLLM {release}"  #!',
        "import_module('transformers.cache_utils')  #!",
        "IN_VLLM = False  #!",
        "def of_vllm(): ...  #!",
        "from vllm import LLM as engine  #!",
        'def f():\n    """Unlike vLLM."""',
    ),
    silent_handlers: (
        "try:\n    sparse()\nexcept Exception:  #!\n    dense()",
        "try:\n    sparse()\nexcept Exception as error:  #!\n    dense()",
        "try:\n    sparse()\nexcept Exception as error:\n    log(error)",
        "try:\n    sparse()\nexcept Exception:\n    raise",
        "try:\n    sparse()\nexcept Exception:  #!\n    if odd():\n        raise",
    ),
    role_questions: (
        "isinstance(x, Follower)  #!",
        "isinstance(x, Filter | int)  #!",
        "isinstance(x, int)",
        "match x:\n    case Evicting(rule):  #!\n        pass",
    ),
    lambda tree: breaches("plans", imported(tree)): (
        "from sparsekv.kernels.tiles import Chunk  #!",
        "import torch.nn  #!",
        "def f():\n    import numpy as np  #!",
        "from ..plans import budget  #!",
        "from plans.patterns import tokens  #!",
    ),
    lambda tree: breaches("planner", imported(tree)): (
        "from sparsekv.cli.main import main  #!",
        "import sparsekv.bench.harness  #!",
        "from sparsekv import cli  #!",
        "from sparsekv.runtime.hf.apply import apply",
        "import torch",
    ),
    lambda tree: breaches("cli", imported(tree)): ("from sparsekv import __version__",),
}


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, table in FINDS.items() for code in table])
def test_each_rule_finds_what_breaks_it(rule: Callable[[ast.AST], list[int] | list[str]], code: str) -> None:
    found = [line if isinstance(line, int) else int(line.split()[1].rstrip(":")) for line in rule(ast.parse(code))]
    assert found == [number for number, line in enumerate(code.splitlines(), start=1) if line.endswith("#!")]
