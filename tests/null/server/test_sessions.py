"""DELETE /v1/sessions/{id}."""

from __future__ import annotations

from .conftest import Served

BODY = {"prompt": "abc" * 40, "max_tokens": 4, "session_id": "s1"}


async def test_a_session_ends(served: Served) -> None:
    assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200
    await served.becomes_idle()
    metrics = (await served.client.get("/metrics")).text
    assert 'vllmx:sessions{model_name="' in metrics
    ended = await served.client.delete("/v1/sessions/s1")
    assert ended.json() == {"id": "s1", "object": "session", "deleted": True}
    again = await served.client.delete("/v1/sessions/s1")
    assert again.status_code == 404
    assert again.json()["error"]["code"] == "session_not_found"


async def test_cache_prompt_changes_nothing(served: Served) -> None:
    for value in (True, False):
        body = {**BODY, "cache_prompt": value}
        assert (await served.client.post("/v1/completions", json=body)).status_code == 200
    refused = await served.client.post("/v1/completions", json={**BODY, "cache_prompt": 3})
    assert refused.json()["error"]["param"] == "cache_prompt"
