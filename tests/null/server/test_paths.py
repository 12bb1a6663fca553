"""Paths of routes: a slash at their end, and what they may be asked with."""

from __future__ import annotations

import pytest
from vllmx_server.host.apis import all_routes
from vllmx_server.http.route import Right

from .conftest import MakeServer, Served

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
RIGHTS = {(route.method, route.path): route.right for route in all_routes()}
PLAIN = [(method, path) for method, path in RIGHTS if "{" not in path and path != "/"]


async def test_a_slash_at_the_end_changes_nothing(make_server: MakeServer) -> None:
    async with make_server() as served:
        for method, path in PLAIN:
            if RIGHTS[method, path] is Right.OPERATORS:
                continue
            for slashes in ("/", "//"):
                body = BODIES.get(path, {})
                found = [
                    await served.client.request(method, url, json=body)
                    for url in (path, path + slashes)
                ]
                assert found[0].status_code == found[1].status_code, path
                assert found[0].status_code == 200 or path not in BODIES, found[0].text
                assert found[0].headers["content-type"] == found[1].headers["content-type"]
        assert (await served.client.get("/v1/models/fake/")).json()["id"] == "fake"
        assert (await served.client.get("/nowhere/")).status_code == 404
        assert (await served.client.get("/")).status_code == (
            await served.client.get("//")
        ).status_code
        counted = (await served.client.get("/metrics/")).text
        assert 'handler="/v1/completions",method="POST",status="2xx"' in counted
        assert 'handler="/v1/completions/"' not in counted


async def test_a_slash_opens_nothing_and_closes_nothing(make_server: MakeServer) -> None:
    async with make_server({"api_key": ("k",), "admin_key": ("a",)}) as served:
        for method, path in PLAIN:
            right = RIGHTS[method, path]
            for headers in ({}, {"authorization": "Bearer k"}):
                found = [
                    (await served.client.request(method, url, json={}, headers=headers)).status_code
                    for url in (path, path + "/")
                ]
                assert found[0] == found[1], path
                if right is not Right.EVERYBODY and not headers:
                    assert found == [401, 401], path
                if right is Right.OPERATORS and headers:
                    assert found == [403, 403], path


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("PATCH", "/v1/files/", "GET, HEAD, POST"),
        ("POST", "/v1/files/x", "DELETE, GET, HEAD"),
        ("POST", "/v1/responses/x", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models/load", "GET, HEAD, POST"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/v1/batches", "GET, HEAD, POST"),
    ],
)
async def test_what_a_path_may_be_asked_with(
    served: Served, method: str, path: str, allowed: str
) -> None:
    response = await served.client.request(method, path)
    assert response.status_code == 405, response.text
    assert response.headers["allow"] == allowed
    assert response.json()["error"]["code"] == "method_not_allowed"
