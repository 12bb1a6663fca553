"""Priorities, and who may send which."""

from __future__ import annotations

import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.limits.priorities import PriorityRange

from .conftest import MakeServer


async def test_clients_lower_themselves_and_do_not_raise_themselves(
    make_server: MakeServer,
) -> None:
    async with make_server() as served:
        for priority, status in ((0, 200), (5, 200), (-1, 400), (-(1 << 31), 400)):
            response = await served.post("/v1/completions", prompt="a", priority=priority)
            assert response.status_code == status
        assert response.json()["error"]["param"] == "priority"
        assert "between 0 and 2147483647" in response.json()["error"]["message"]
        body = {"messages": [{"role": "user", "content": "a"}], "priority": -1, "stream": True}
        assert (await served.post("/v1/chat/completions", **body)).status_code == 400


async def test_each_key_has_its_range(make_server: MakeServer) -> None:
    keys = {"api_key": ("usual", "boss=1", "batch")}
    ranges = {"priority_range": ("0:10", "boss=1=-5:0", "batch=100:")}
    allowed = {"usual": (0, 10), "boss=1": (-5, 0), "batch": (100, 1000)}
    async with make_server({**keys, **ranges}) as served:
        for key, (least, greatest) in allowed.items():
            for priority in (least - 1, least, greatest, greatest + 1):
                response = await served.client.post(
                    "/v1/completions",
                    json={"prompt": "a", "max_tokens": 1, "priority": priority},
                    headers={"authorization": f"Bearer {key}"},
                )
                inside = least <= priority <= greatest or (key == "batch" and priority >= 100)
                assert response.status_code == (200 if inside else 400), (key, priority)


async def test_who_names_no_priority_has_one_that_is_allowed(make_server: MakeServer) -> None:
    """Most clients cannot name one."""
    keys = {"api_key": ("usual", "boss", "batch")}
    ranges = {"priority_range": ("0:10", "boss=-5:-3", "batch=100:")}
    async with make_server({**keys, **ranges}) as served:
        for key in keys["api_key"]:
            for path, asked in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", CHAT),
            ):
                response = await served.client.post(
                    path,
                    json={"max_tokens": 1, **asked},
                    headers={"authorization": f"Bearer {key}"},
                )
                assert response.status_code == 200, (key, response.text)
    found = [
        PriorityRange(*ends).checked(None) for ends in ((0, 10), (-5, -3), (100, 200), (-1, 1))
    ]
    assert found == [0, -3, 100, 0]


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    "text", ["", "5", "a:b", "5:1", "0:4294967296", "unknown-key=0:1", "key=", "key=1"]
)
def test_ranges_that_cannot_be_understood(text: str) -> None:
    with pytest.raises(ConfigError, match="priority-range") as caught:
        ServerConfig(api_key=("key",), priority_range=(text,))
    assert "unknown-key" not in caught.value.message
