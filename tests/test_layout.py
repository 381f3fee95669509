"""The layout holds: who imports whom, which packages are listed, and what a wheel installs."""

from __future__ import annotations

import ast
import configparser
import itertools
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

PACKAGE_OF_FOLDER = {
    "selective_compile": "selective_compile",
    "passes": "selective_compile.passes",
    "runtime": "selective_compile.runtime",
}

# Lowest first: a module imports from its own layer and from those below it. `selective_compile/__init__.py`,
# the face, stands above them all. A new module or subpackage of selective_compile/ takes its place here.
LAYERS = (
    (
        "choices",
        "version",
        "options",
        "huge_pages",
        "rounding",
        "unheard",
        "forks",
        "int8_rows",
        "fp8_rows",
        "reference",
        "state_reference",
        "implementations",
        "attention_checks",
        "ops",
        "isolated_op",
        "state_fakes",
        "state_ops",
        "selection_ops",
        "rotary_ops",
        "int8_ops",
        "grouped_ops",
        "latent_ops",
        "function_op",
        "flex_blocks",
        "part_ops",
        "kernels",
        "step",
        "module_state",
        "kept_buffers",
        "kept_weights",
        "tensor_memory",
        "state_copies",
        "proved_tensors",
        "tensor_state",
        "optimizer_steps",
        "whole_device",
        "joined_weights",
        "entries",
        "shared_cores",
        "cores",
        "progress",
        "interrupts",
        "garbage",
    ),
    ("passes",),
    ("autocast",),
    ("whole_functions", "live_settings"),
    (
        "backend",
        "cache_reach",
        "report",
        "capture",
        "captured",
        "model_call",
        "model_facts",
        "tensor_branches",
        "length_tables",
        "joined_graphs",
        "graph_writes",
        "call_values",
        "native_calls",
        "call_sequence",
        "compiled_step",
        "first_call",
        "long_tables",
        "remade_tables",
        "unread_stores",
        "settling",
        "first_steps",
        "fp8_scales",
        "compiling",
        "dropped_cache",
        "beforehand",
        "layered",
        "isolated_cache",
        "isolated_program",
        "isolation",
        "kept_files",
        "kept_captures",
        "kept_trials",
        "told_models",
        "kept_traces",
        "current_device",
        "named_tensors",
        "environment_read",
        "told_objects",
        "trace_conditions",
        "live_conditions",
        "live_weights",
        "rewriting",
        "block_loops",
        "model_recurrences",
        "same_logits",
        "training_mode",
        "packed_graph",
        "given_rows",
        "handed_inputs",
        "counted_calls",
        "isolation_trial",
        "module_program",
        "one_token",
        "own_generation",
        "prefix_trial",
        "hole_trial",
        "padding_reads",
        "padded_program",
        "programs",
        "sequential_program",
        "watched_buffers",
        "skeleton",
        "step_program",
        "int8_weights",
        "cast_weights",
        "isolated_paths",
        "token_types",
        "own_stores",
        "buffer_questions",
        "unused_cache",
        "known_conditions",
        "where_refused",
        "whole_modules",
    ),
    ("runtime",),
    (
        "generate_fields",
        "generate_prompts",
        "batch_criteria",
        "generate_arguments",
        "generate_beams",
        "generate_objects",
        "generate_requests",
        "generate_states",
        "generate_results",
        "kept_engines",
        "kept_refusals",
        "self_served",
        "generate_call",
        "generate_by_requests",
        "huggingface",
    ),
    ("generation_ledger",),
    (
        "checkpoints",
        "tables",
        "terminal",
        "schedule_picture",
        "generating",
        "demo",
        "bench",
        "cli",
        "measuring",
        "replaying",
        "coverage",
        "tiny_model",
    ),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FACE = "the face"
HEIGHT[FACE] = len(LAYERS)

TENSOR_FREE = (
    "request",
    "request_state",
    "scheduler",
    "plan",
    "queues",
    "waiting",
    "step_times",
    "block_pool",
    "block_names",
    "host_tier",
    "block_group",
    "found_blocks",
    "pace",
    "prefill_pace",
    "request_blocks",
)


def source_files() -> list[Path]:
    """Every file below the three source folders, relative to ROOT; links not followed, caches left out."""
    return [
        Path(folder, name).relative_to(ROOT)
        for top in PACKAGE_OF_FOLDER
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if "__pycache__" not in folder
    ]


def installed_path(source: Path) -> PurePosixPath:
    """Where a file of the checkout lies in an environment: passes/x.py at selective_compile/passes/x.py."""
    package = PACKAGE_OF_FOLDER[source.parts[0]]
    return PurePosixPath(*package.split("."), *source.parts[1:])


def module_names() -> dict[str, Path]:
    """The dotted name of every Python file of the three source folders."""
    names = {}
    for source in source_files():
        if source.suffix == ".py":
            parts = installed_path(source).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ROOT / source
    return names


MODULES = module_names()


def part_of(dotted: str) -> str:
    """The name in LAYERS that a module, or a name inside one, belongs to."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else FACE


def imported_names(source: str) -> set[str]:
    """Every dotted name that the code imports, wherever the statement stands; `a.b` for `from a import b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports must be absolute, got {ast.unparse(node)!r}"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imports_from_above(module: str, source: str) -> list[str]:
    """The imports of `source` that lead to a higher layer than that of `module`."""
    height = HEIGHT[part_of(module)]
    ours = (name for name in imported_names(source) if name.split(".")[0] == "selective_compile")
    return sorted(name for name in ours if HEIGHT[part_of(name)] > height)


def names_torch_part(source: str, part: str) -> bool:
    """Whether the code imports `part` (torch, torch.fx), or something in it, or spells it as an attribute."""
    attributes = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return any(f"{name}.".startswith(f"{part}.") for name in imported_names(source) | attributes)


def test_every_module_has_its_layer() -> None:
    parts = {name.split(".")[1] for name in MODULES if name != "selective_compile"}
    assert parts == {name for names in LAYERS for name in names}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    assert imports_from_above(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("selective_compile.ops", "import selective_compile.passes.flatten"),
        ("selective_compile.kernels.ragged_attention_cpu", "from selective_compile import backend"),
        ("selective_compile.passes.flatten", "def f():\n    import selective_compile.runtime.engine"),
        ("selective_compile.passes", "if TYPE_CHECKING:\n    from selective_compile.report import Report"),
        ("selective_compile.backend", "from selective_compile.runtime import batch"),
        ("selective_compile.runtime.engine", "from selective_compile import Engine"),
        ("selective_compile.runtime.engine", "import selective_compile"),
    ],
)
def test_a_planted_import_from_above_is_found(module: str, source: str) -> None:
    assert len(imports_from_above(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("selective_compile.ops", "from selective_compile.kernels.ragged_attention_cpu import launch"),
        ("selective_compile.runtime.engine", "from selective_compile import backend, options"),
        ("selective_compile", "from selective_compile.cli import main"),
        ("selective_compile.options", "import torch"),
    ],
)
def test_an_import_from_below_is_let_through(module: str, source: str) -> None:
    assert imports_from_above(module, source) == []


@pytest.mark.parametrize("module", sorted(name for name in MODULES if part_of(name) == "runtime"))
def test_the_runtime_does_not_know_fx(module: str) -> None:
    assert not names_torch_part(MODULES[module].read_text(), "torch.fx")


@pytest.mark.parametrize("name", TENSOR_FREE)
def test_scheduling_does_not_know_tensors(name: str) -> None:
    assert not names_torch_part((ROOT / "runtime" / f"{name}.py").read_text(), "torch")


@pytest.mark.parametrize(
    "source",
    ["import torch.fx", "from torch import fx", "from torch.fx.graph import Graph", "g = torch.fx.Graph()"],
)
def test_a_planted_use_of_fx_is_found(source: str) -> None:
    assert names_torch_part(source, "torch.fx")
    assert not names_torch_part("import torch.fxx\nfrom torch import nn", "torch.fx")


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_links_resolve_an_uninstalled_checkout(name: str) -> None:
    assert os.readlink(ROOT / "selective_compile" / name) == f"../{name}"


def test_every_package_is_listed() -> None:
    folders = {installed_path(file).parent for file in source_files() if file.suffix == ".py"}
    assert {".".join(folder.parts) for folder in folders} == set(PYPROJECT["tool"]["setuptools"]["packages"])
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        assert package in MODULES, f"{package} must have an __init__.py"


def test_constraints_pin_every_direct_dependency_within_its_floor() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    lists = [PYPROJECT["build-system"]["requires"], project["dependencies"], *extras]
    wanted = [Requirement(line) for line in itertools.chain(*lists)]
    wanted = [each for each in wanted if each.name != project["name"]]  # an extra that has another in it
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in constraints if line and not line.startswith("#")]
    assert sorted(pin.name for pin in pins) == sorted({requirement.name for requirement in wanted})
    tested = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    assert [str(item) for item in wanted if not item.specifier.contains(tested[item.name])] == []


def test_every_package_that_is_imported_is_a_dependency() -> None:
    imported = {name.split(".")[0] for path in MODULES.values() for name in imported_names(path.read_text())}
    declared = {Requirement(line).name.replace("-", "_") for line in PYPROJECT["project"]["dependencies"]}
    assert imported - sys.stdlib_module_names - {"selective_compile"} - declared == set()


def entry_points() -> dict[str, dict[str, str]]:
    project = PYPROJECT["project"]
    return {"console_scripts": project["scripts"], **project["entry-points"]}


@pytest.mark.parametrize("group", ["console_scripts", "torch_dynamo_backends"])
def test_entry_points_lead_to_something_to_call(group: str) -> None:
    for name, value in entry_points()[group].items():
        assert callable(EntryPoint(name, value, group).load())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy: setuptools leaves build/ and an egg-info folder where it builds."""
    copy = tmp_path_factory.mktemp("checkout")
    for top in PACKAGE_OF_FOLDER:
        shutil.copytree(ROOT / top, copy / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    build = subprocess.run([*pip, "--wheel-dir", str(out), str(copy)], capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_takes_one_global_name(wheel: zipfile.ZipFile) -> None:
    info = f"selective_compile-{PYPROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"selective_compile", info}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(wheel.namelist())


def test_wheel_holds_every_source_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("selective_compile/")}
    assert packed == {str(installed_path(file)) for file in source_files()}


def test_wheel_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    """Of the package and all below it: without the marker type checkers take everything of it for Any."""
    assert "selective_compile/py.typed" in wheel.namelist()


def test_wheel_declares_the_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read(name).decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == entry_points()
