"""The wheel: everything in the tree that the installed package needs. Editable installs hide what is missing."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from sparsekv import __version__
from sparsekv.plans.errors import install_command

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {f"sparsekv/{name}": ROOT / name for name in ("plans", "kernels", "runtime", "planner", "bench", "cli")}
FOLDERS["sparsekv"] = ROOT / "src" / "sparsekv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTION = {"yaml": "pyyaml", "pydantic_core": "pydantic"}  # where it is not called what is imported
# Imported by what an extra installs, and nowhere else.
EXTRA = {
    "flash_attn": "flash",
    "cutlass": "flash",
    "triton": "gpu",
    "vllm": "vllm",
    "sglang": "sglang",
    "prometheus_client": "vllm",
    "openai": "vllm",  # which brings it
    "accelerate": "spread",
    "compressed_tensors": "compressed",
    "gguf": "gguf",
    "cuda": "virtual",
    "lm_eval": "lm-eval",
} | dict.fromkeys(("altair", "vl_convert", "jinja2", "markupsafe"), "report")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def files_of_tree() -> set[str]:
    """Every file of the seven folders, by the name it has when installed."""
    return {
        f"{home}/{path.relative_to(folder)}"
        for home, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that a stale build folder of the checkout can neither help nor be left behind."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS.values():
        shutil.copytree(folder, copy / folder.relative_to(ROOT), ignore=IGNORED)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([*command, "-w", "dist"], cwd=copy, check=True, timeout=120)
    (built,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file_of_the_tree_and_no_other(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert files_of_tree() - shipped == set()
    assert shipped - files_of_tree() == set()


def test_the_wheel_carries_licence_notice_and_entry_point(wheel: zipfile.ZipFile) -> None:
    info = {name.split("/", 1)[1]: name for name in wheel.namelist() if name.split("/")[0].endswith(".dist-info")}
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt", "METADATA"} <= info.keys()
    assert "sparsekv = sparsekv.__main__:main" in wheel.read(info["entry_points.txt"]).decode()


def test_the_version_stands_in_one_place(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert f"sparsekv-{__version__}-" in wheel.filename
    assert PROJECT["dynamic"] == ["version"]
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_every_folder_with_code_is_a_package() -> None:
    code = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert {folder for folder in code if not (folder / "__init__.py").exists()} == set()


def test_every_imported_package_is_a_declared_dependency() -> None:
    declared = {re.match(r"[\w-]+", text)[0].lower().replace("-", "_") for text in PROJECT["dependencies"]}
    trees = [ast.parse(path.read_text()) for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    foreign = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"sparsekv"}
    assert {EXTRA[name] for name in foreign & EXTRA.keys()} <= EXTRAS.keys()
    foreign -= EXTRA.keys()
    assert {DISTRIBUTION.get(name, name) for name in foreign} - declared == set()


def pins_of(file: str) -> dict[str, str]:
    """The version of each package."""
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {name.lower(): version for name, version in (line.split("==") for line in lines if line)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_error_names_the_packages_of_an_extra_which_no_index_has(extra: str) -> None:
    _, _, *told = shlex.split(install_command(extra))
    assert {*map(_name, told)} == {*map(_name, EXTRAS[extra])}


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def test_every_tested_dependency_is_pinned_within_its_allowed_range() -> None:
    from packaging.requirements import Requirement

    pins = pins_of("constraints.txt")
    for text in PROJECT["dependencies"] + EXTRAS["test"] + EXTRAS["report"]:
        requirement = Requirement(text)
        assert requirement.name.lower() in pins, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pins[requirement.name.lower()])


def test_the_set_for_gpus_is_allowed_and_differs_where_vllm_of_a_gpu_wants_it() -> None:
    from packaging.requirements import Requirement

    pins, of_cpu = pins_of("constraints-gpu.txt"), pins_of("constraints.txt")
    wanted = [*PROJECT["dependencies"], *(need for name in ("gpu", "vllm") for need in EXTRAS[name])]
    assert all(Requirement(text).specifier.contains(pins[Requirement(text).name.lower()]) for text in wanted)
    differing = {name for name in pins.keys() & of_cpu.keys() if pins[name] != of_cpu[name]}
    assert differing == {"torch", "transformers", "triton", "numpy"}


def test_the_two_environments_of_the_makefile_share_what_takes_longest_to_download() -> None:
    own, vllm = pins_of("constraints.txt"), pins_of("constraints-vllm.txt")
    assert {name: vllm[name] for name in ("torch", "triton")} == {name: own[name] for name in ("torch", "triton")}
