"""An API of a third party: the one that docs/plugins.md shows."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllmx_core.errors import ConfigError, PluginError
from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ApiSpec
from vllmx_server.config import ServerConfig
from vllmx_server.generating.api import Api
from vllmx_server.host import apis
from vllmx_testing.plugins import check_plugin

from .conftest import MakeServer

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
KEY = {"authorization": "Bearer k"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin of the page is a distribution that this process finds."""
    page = PAGE.read_text()
    package = tmp_path / "site" / "my_api"
    package.mkdir(parents=True)
    for name, code in re.findall(r"```python\n# my_api/(\w+\.py)\n(.*?)```", page, re.DOTALL):
        (package / name).write_text(code)
        assert len(code.splitlines()) < 40
    about = tmp_path / "site" / "my_api-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-api\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vllmx]\nmy_api = my_api.plugin\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    apis._installed.cache_clear()
    yield
    apis._installed.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_api"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
async def test_its_route_is_one_of_the_server(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("k",)}) as served:
        body = {"text": "one two three"}
        assert (await served.client.post("/v1/words", json=body)).status_code == 401
        found = await served.client.post("/v1/words", json=body, headers=KEY)
        assert found.json() == {"count": 3}
        for wrong, param in (({"text": ""}, "text"), ({"text": "a", "more": 1}, "more")):
            refused = await served.client.post("/v1/words", json=wrong, headers=KEY)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
        document = (await served.client.get("/openapi.json", headers=KEY)).json()
        operation = document["paths"]["/v1/words"]["post"]
        assert operation["summary"] == "Counts the words of a text"
        assert operation["security"], "a key is needed"
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        name = answer.rpartition("/")[2]
        assert document["components"]["schemas"][name]["required"] == ["count"]
        counted = (await served.client.get("/metrics", headers=KEY)).text
        assert 'handler="/v1/words",method="POST",status="2xx"' in counted


@pytest.mark.usefixtures("installed")
def test_the_kit_finds_no_fault_with_it() -> None:
    assert check_plugin("my_api.plugin").provides == ("api word counts",)


def test_a_route_has_one_api() -> None:
    class Twin(Api):
        routes = (next(route for route in apis.all_routes() if route.path == "/version"),)

    with pytest.raises(PluginError, match="both answer GET /version"):
        apis.check_routes([*apis.load_apis(ServerConfig()), Twin(ServerConfig())])


def test_an_api_of_another_server_takes_routes_over() -> None:
    found = apis.load_apis(ServerConfig(apis=("llamacpp, ollama", "llamacpp")))
    apis.check_routes(found)
    owners = {route.path: type(api).__name__ for api in found for route in api.routes}
    assert owners["/tokenize"] == owners["/completion"] == "LlamaCppApi"
    assert owners["/api/chat"] == "OllamaApi"
    assert owners["/v1/completions"] == "CompletionsApi"
    plain = apis.load_apis(ServerConfig())
    paths = {route.path for api in plain for route in api.routes}
    assert "/tokenize" in paths
    assert not paths & {route.path for route in apis.all_routes(by_name=True)} - {
        "/", "/tokenize", "/detokenize", "/v2/rerank",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="names 'nothing', and the APIs to choose from are"):
        apis.load_apis(ServerConfig(apis=("nothing",)))


def test_two_apis_of_other_servers_do_not_share_a_route() -> None:
    class Twin(Api):
        routes = (next(each for each in apis.all_routes(by_name=True) if each.path == "/props"),)

    config = ServerConfig(apis=("llamacpp",))
    with pytest.raises(PluginError, match="both answer GET /props: leave one out of --apis"):
        apis.check_routes([*apis.load_apis(config), Twin(config)])


def test_only_what_is_switched_on_is_imported() -> None:
    """The import of this one would fail."""
    registry = Registry()
    spec = ApiSpec("nowhere", "nowhere.at_all:Nothing", switch="web")
    plugin = type("Plugin", (), {"vllmx_apis": staticmethod(lambda: (spec,))})
    hookimpl(plugin.vllmx_apis)
    registry.add(plugin, "test:nowhere")
    assert apis.load_apis(ServerConfig(web=False), registry) == []
    with pytest.raises(PluginError, match="cannot import"):
        apis.load_apis(ServerConfig(web=True), registry)
    named = ApiSpec("elsewhere", "nowhere.at_all:Nothing", by_name=True)
    other = type("Plugin", (), {"vllmx_apis": staticmethod(lambda: (named,))})
    hookimpl(other.vllmx_apis)
    registry.add(other, "test:elsewhere")
    assert apis.load_apis(ServerConfig(web=False), registry) == []
    with pytest.raises(PluginError, match="cannot import"):
        apis.load_apis(ServerConfig(web=False, apis=("elsewhere",)), registry)
