"""The image and the manifest of docs/deploy: what they say of vllmx is so, and they fit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllmx.cli.group import cli
from vllmx.cli.serve import serve
from vllmx_server.config import ServerConfig
from vllmx_server.host.apis import all_routes

from tests.http_servers import serving
from tests.waiting import PATIENCE_S

GET = {route.path for route in all_routes() if route.method == "GET"}


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined."""
    text = (root / "docs" / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    found = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, rest.strip()) for name, _, rest in found]


@pytest.fixture(scope="module")
def manifest(root: Path) -> dict[str, list[Any]]:
    """Objects by their kind."""
    found: dict[str, list[Any]] = {}
    for each in yaml.safe_load_all((root / "docs" / "deploy" / "kubernetes.yaml").read_text()):
        found.setdefault(each["kind"], []).append(each)
    return found


def values(dockerfile: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for instruction, rest in dockerfile if instruction == name]


def environment(dockerfile: list[tuple[str, str]]) -> dict[str, str]:
    (text,) = values(dockerfile, "ENV")
    return dict(part.split("=", 1) for part in shlex.split(text))


def understood(arguments: list[str]) -> Any:
    """What `vllmx` makes of a command line; nothing is run."""
    context = cli.make_context("vllmx", [], resilient_parsing=True)
    name, command, rest = cli.resolve_command(context, arguments)  # type: ignore[attr-defined]
    assert command is not None, name
    return command.make_context("vllmx", rest).params


def test_the_image_starts_what_is_there(dockerfile: list[tuple[str, str]]) -> None:
    entry, command = (json.loads(values(dockerfile, name)[-1]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["vllmx"]
    understood(command)
    fields = {parameter.name for parameter in serve.params}
    variables = environment(dockerfile)
    ours = [name for name in variables if name.startswith("VLLMX_")]
    assert len(ours) > 3
    for name in ours:
        assert name.removeprefix("VLLMX_").lower() in fields, name
    assert values(dockerfile, "EXPOSE") == [variables["VLLMX_PORT"]]
    (user,) = values(dockerfile, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


def test_the_image_is_built_of_what_is_there(root: Path, dockerfile: list[tuple[str, str]]) -> None:
    """Copied folders, packages, extras; its shell commands are ones of a shell."""
    sources = [rest.split()[-2] for rest in values(dockerfile, "COPY")]
    assert [(root / each).is_dir() for each in sources if not each.startswith("/")] == [True]
    text = (root / "packages" / "vllmx" / "pyproject.toml").read_text()
    for extra in ("cpu", "cuda", "cuda13", "torch"):
        assert re.search(rf"^{extra} = ", text, re.MULTILINE)
        assert (root / "packages" / f"vllmx-{extra.removesuffix('13')}").is_dir()
    runs = values(dockerfile, "RUN")
    names = re.findall(r"for name in ([a-z ]+)", " ".join(runs))[0].split()
    assert all((root / "packages" / f"vllmx-{name}").is_dir() for name in names)
    shell = shutil.which("sh")
    assert shell is not None
    for run in runs:
        subprocess.run([shell, "-n", "-c", run], check=True, timeout=PATIENCE_S)


@contextmanager
def answering(paths: list[str]) -> Iterator[int]:
    """The port of a server that answers, and notes what it is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing is written."""

    with serving(Handler) as port:
        yield port


def test_the_health_check_asks_a_route(dockerfile: list[tuple[str, str]]) -> None:
    """At the port that the server has, which a variable may say."""
    (check,) = values(dockerfile, "HEALTHCHECK")
    python, *arguments = json.loads(check[check.index("[") :])
    assert python == "python"
    asked: list[str] = []
    with answering(asked) as port:
        variables = {**os.environ, **environment(dockerfile), "VLLMX_PORT": str(port)}
        command = [sys.executable, *arguments]
        subprocess.run(command, env=variables, check=True, timeout=PATIENCE_S)
    (path,) = asked
    assert path in GET


def test_the_manifest_runs_the_image(
    dockerfile: list[tuple[str, str]], manifest: dict[str, list[Any]]
) -> None:
    (deployment,), (service,) = manifest["Deployment"], manifest["Service"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (container,) = pod["spec"]["containers"]
    given = understood(container["args"])
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert given["api_keys_file"].rpartition("/")[0] == mounts["keys"]
    assert set(json.loads(values(dockerfile, "VOLUME")[0])) <= set(mounts.values())
    assert {each["name"] for each in pod["spec"]["volumes"]} == set(mounts)
    claims = {each["metadata"]["name"] for each in manifest["PersistentVolumeClaim"]}
    used = [
        each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if "persi" in str(each)
    ]
    assert {each["claimName"] for each in used} == claims
    (port,) = container["ports"]
    assert str(port["containerPort"]) == environment(dockerfile)["VLLMX_PORT"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    user, _, group = values(dockerfile, "USER")[0].partition(":")
    context = pod["spec"]["securityContext"]
    assert (context["runAsUser"], context["fsGroup"]) == (int(user), int(group))
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_probes_and_the_grace_period_fit_the_server(manifest: dict[str, list[Any]]) -> None:
    pod = manifest["Deployment"][0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        assert asked["path"] in GET
        assert asked["port"] == container["ports"][0]["name"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain_s = float(understood(container["args"])["drain_timeout_s"])
    assert drain_s == ServerConfig().drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] >= before + drain_s + 10


def test_the_ray_cluster_runs_the_image(root: Path, dockerfile: list[tuple[str, str]]) -> None:
    text = (root / "docs" / "deploy" / "kuberay.yaml").read_text()
    cluster, service = yaml.safe_load_all(text)
    head = cluster["spec"]["headGroupSpec"]["template"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    (server,) = head["spec"]["containers"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert server["image"] == worker["image"]
    script, program, *arguments = server["args"]
    assert program == json.loads(values(dockerfile, "ENTRYPOINT")[-1])[0]
    given = understood(arguments)
    assert given["ray_address"] in script
    assert int(given["replicas"]) == workers["replicas"]
    assert int(given["num_threads"]) == int(worker["resources"]["requests"]["cpu"])
    assert "--build-arg RAY=ray" in text
    assert (root / "packages" / "vllmx-ray").is_dir()
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=PATIENCE_S)
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert str(ports["http"]) == environment(dockerfile)["VLLMX_PORT"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"]["path"] in GET
    for spec in (head["spec"], workers["template"]["spec"]):
        volumes = {each["name"] for each in spec["volumes"]}
        assert volumes == {each["name"] for each in spec["containers"][0]["volumeMounts"]}


def test_the_gateway_finds_the_manifests_pods(root: Path, manifest: dict[str, list[Any]]) -> None:
    text = (root / "docs" / "deploy" / "gateway.yaml").read_text()
    pool, route = yaml.safe_load_all(text)
    pod = manifest["Deployment"][0]["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    (target,) = route["spec"]["rules"][0]["backendRefs"]
    assert (target["kind"], target["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(target["group"])
    source = (root / "packages/vllmx-server/src/vllmx_server/watch/metrics.py").read_text()
    for name in re.findall(r"-metric=vllmx:(\S+)", text):
        assert f'"{name}"' in source, name


def test_compose_runs_the_image(root: Path, dockerfile: list[tuple[str, str]]) -> None:
    path = root / "docs" / "deploy" / "compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    for service in services.values():
        build, (port,) = service["build"], service["ports"]
        context = (path.parent / build["context"]).resolve()
        assert (context / build["dockerfile"]) == root / "docs" / "deploy" / "Dockerfile"
        assert port.rpartition(":")[2] == environment(dockerfile)["VLLMX_PORT"]
        kept = [volume.partition(":")[2] for volume in service["volumes"]]
        assert kept == json.loads(values(dockerfile, "VOLUME")[0])[::-1]
        assert understood([service["command"][0], "demo"])
        drain_s = ServerConfig().drain_timeout_s
        assert float(service["stop_grace_period"].removesuffix("s")) >= drain_s + 10
    assert services["vllmx-cuda"]["build"]["args"] == {"EXTRA": "cuda"}
