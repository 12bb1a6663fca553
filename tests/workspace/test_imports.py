"""The table of docs/architecture.md, which says who may import whom, enforced on the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED = {
    "vllmx_core": {"numpy", "pluggy", "msgspec"},
    "vllmx_engine": {"vllmx_core", "numpy", "msgspec", "tokenizers", "jinja2", "markupsafe"},
    "vllmx_models": {"vllmx_core", "numpy"},
    "vllmx_cpu": {"vllmx_core", "numpy"},
    "vllmx_metal": {"vllmx_core", "numpy", "mlx"},
    "vllmx_torch": {"vllmx_core", "numpy", "torch"},
    "vllmx_cuda": {"vllmx_core", "numpy"},
    "vllmx_server": {
        "vllmx_core",
        "vllmx_engine",
        "numpy",
        "msgspec",
        "starlette",
        "hypercorn",
        "h11",
        "h2",
        "prometheus_client",
        "python_multipart",
        "opentelemetry",  # in vllmx_server.watch.spans alone, see below
    },
    "vllmx_tp": {"vllmx_core", "vllmx_engine", "numpy", "msgspec"},
    "vllmx_ray": {"vllmx_core", "vllmx_engine", "msgspec", "ray"},
    "vllmx_demo": {"vllmx_core"},
    "vllmx_testing": {"vllmx_core", "vllmx_cuda", "numpy", "pytest"},
    "vllmx": {
        "vllmx_core",
        "vllmx_engine",
        "vllmx_models",
        "vllmx_server",
        "click",
        "numpy",
        "yaml",
    },
}
IN_FUNCTIONS = {
    "vllmx_core": {"numpy"},
    "vllmx_testing": {"torch", "transformers", "safetensors", "ml_dtypes"},
    "vllmx_cuda": {"cupy"},
    "vllmx_torch": {"transformers"},
    "vllmx_engine": {"llguidance", "PIL", "av", "soundfile"},
    "vllmx_models": {"huggingface_hub", "safetensors", "gguf"},
    "vllmx_server": {"anyio", "httpx2", "mcp", "mcp_types", "pydantic"},
    "vllmx": {"msgspec", "prompt_toolkit"},
}
HEAVY = (
    "numpy", "torch", "mlx", "tokenizers", "jinja2", "starlette", "hypercorn", "yaml", "asyncio",
    "huggingface_hub", "safetensors", "transformers", "msgspec", "prometheus_client", "cupy",
    "llguidance", "PIL", "av", "soundfile", "opentelemetry", "mcp", "pydantic",
)  # fmt: skip


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    for package in sorted((root / "packages").iterdir()):
        module = package.name.replace("-", "_")
        for path in sorted((package / "src" / module).rglob("*.py")):
            yield module, path


def imports(tree: ast.AST, *, top: bool = True) -> Iterator[tuple[str, bool]]:
    """(first part of the module's name, whether it is imported with the file)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], top
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0], top
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            inside = inside or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
            yield from imports(node, top=top and not inside)


def test_imports_follow_the_table(root: Path) -> None:
    wrong = []
    for module, path in sources(root):
        for name, top in imports(ast.parse(path.read_text())):
            allowed = ALLOWED[module] | {module} | set(sys.stdlib_module_names)
            if not top:
                allowed = allowed | IN_FUNCTIONS.get(module, set())
            if name not in allowed:
                wrong.append(f"{path.relative_to(root)} imports {name}{'' if top else ' (inside)'}")
    assert not wrong, "\n".join(wrong)


def loaded_after(code: str) -> set[str]:
    """Heavy modules in sys.modules after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys; print('\\nLOADED', *(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import vllmx",
        "import vllmx_core.plugins.registry as r; r.load_registry()",
        "import vllmx_cpu.plugin, vllmx_models.plugin, vllmx_demo.plugin",
        "import vllmx_torch.plugin as p; p.vllmx_backends(); p.probe()",
        "import vllmx_cuda.plugin as p; p.vllmx_backends(); p.probe()",
        "import vllmx_metal.plugin as p; p.vllmx_backends(); p.probe()",
        "import vllmx_core.config, vllmx_core.errors",
        "import sys; sys.argv = ['vllmx', '--help']\n"
        "import vllmx.cli\n"
        "try: vllmx.cli.main()\n"
        "except SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported_early(code: str) -> None:
    assert loaded_after(code) == set()


def test_opentelemetry_is_imported_where_it_is_asked_for(root: Path) -> None:
    importing = re.compile(r"^\s*(import|from) opentelemetry", re.MULTILINE)
    found = {path.name for _, path in sources(root) if importing.search(path.read_text())}
    assert found == {"spans.py"}
    assert "opentelemetry" not in loaded_after("import vllmx_server.host.process")


def test_tools_of_mcp_servers_are_imported_where_there_are_any() -> None:
    modules = "vllmx_server.host.process, vllmx_server.host.worker, vllmx_server.apis.responses.api"
    script = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = done.stdout.decode().split()
    assert "vllmx_server.apis.responses.routes" in loaded
    assert not [name for name in loaded if name.startswith(("vllmx_server.mcp", "mcp"))]


AFTER_THE_CORE_BEGAN = (
    "vllmx_server.host.app", "vllmx_server.apis", "vllmx_server.generating", "vllmx_server.schema",
    "vllmx_server.store",
    "vllmx_server.host.process", "vllmx_engine.async_llm", "vllmx_engine.client",
    "vllmx_engine.formats", "vllmx_engine.text", "vllmx_core.ops", "vllmx_models.trunks.decoder",
    "starlette", "hypercorn", "h2", "prometheus_client", "sqlite3", "jinja2", "tokenizers",
    "mcp", "pydantic",
)  # fmt: skip
SPAWNING = """
import os, sys
import vllmx_engine.link.supervisor as supervisor

def spawn(path):
    print("AT SPAWN", *sys.modules, flush=True)
    os._exit(0)

supervisor.spawn = spawn
sys.argv = ["vllmx", "serve", "--port", "0", "--backend", "numpy"]
import vllmx.cli
vllmx.cli.main()
"""


def test_a_server_imports_what_answers_requests_while_the_core_loads() -> None:
    """What stands here is imported beside the core's process, not before it: start-up is shorter by
    all of it."""
    done = subprocess.run(
        [sys.executable, "-c", SPAWNING], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.rsplit("AT SPAWN", 1)[1].split())
    assert "vllmx_server.host.run" in imported
    assert not imported & set(AFTER_THE_CORE_BEGAN)


STREETS = {
    "vllmx_engine": (
        {"wire", "text"},
        {"grammar", "images"},
        {"core", "formats", "audio"},
        {"link", "client"},
        {"replicas", "speech"},
        {
            "async_core",
            "async_llm",
            "core_start",
            "beam_stream",
            "llm",
            "llm_arguments",
            "engine",
            "grammars",
            "streams",
            "checked_flags",
        },
    ),
    "vllmx_cuda": (
        {"compiler", "kernel_specs"},
        {"device"},
        {"matrices"},
        {"loading"},
        {"program"},
        {"backend", "loaded", "environment", "plugin"},
    ),
    "vllmx_server": (
        {"schema"},
        {"errors"},
        {"store"},
        {"limits"},
        {"watch"},
        {"config"},
        {"http"},
        {"generating"},
        {"mcp"},
        {"apis"},
        {"host"},
        {"offline", "plugin"},
    ),
}
"""Folders of a package from the ground up: whoever stands higher may import from below, nobody from
above, and neighbours on one floor not from each other."""


@pytest.mark.parametrize("package", STREETS)
def test_folders_import_downwards(root: Path, package: str) -> None:
    source = root / "packages" / package.replace("_", "-") / "src" / package
    floor = {name: number for number, names in enumerate(STREETS[package]) for name in names}
    wrong = []
    for path in sorted(source.rglob("*.py")):
        mine = path.relative_to(source).parts[0].removesuffix(".py")
        if mine == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):  # in functions and for types, too
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            parts = module.split(".")
            if parts[0] != package or len(parts) < 2 or parts[1] == mine:
                continue
            alone = floor[mine] == len(STREETS[package]) - 1  # modules at the root see each other
            if floor[parts[1]] > floor[mine] or (floor[parts[1]] == floor[mine] and not alone):
                wrong.append(f"{path.relative_to(source)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_apis_do_not_import_each_other(root: Path) -> None:
    apis = root / "packages" / "vllmx-server" / "src" / "vllmx_server" / "apis"
    wrong = []
    for path in sorted(apis.rglob("*.py")):
        own = path.relative_to(apis).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("vllmx_server.apis") and module.split(".")[2:3] != [own]:
                wrong.append(f"{path.relative_to(apis)} imports {module}")
    assert not wrong, "\n".join(wrong)
