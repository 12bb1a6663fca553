"""The Grafana board and the alerts ask for metrics that a server has."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from vllmx_server.watch.counters import ToolCounts

from .conftest import MakeServer, Served

DOCS = Path(__file__).resolve().parents[3] / "docs"


def lister() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "list_dashboard.py"))


def test_files_are_what_the_program_writes() -> None:
    made = lister()
    for name, text in (("grafana.json", made["board"]()), ("alerts.yaml", made["alerts"]())):
        assert (DOCS / "monitoring" / name).read_text() == text, (
            "run: python docs/list_dashboard.py"
        )


def add_tools(served: Served) -> None:
    """The counts of a server that has tools."""
    counts = served.state.metrics.tools = ToolCounts(["files"])
    counts.called("files", "read_file", "ok", 0.1)


async def test_all_that_is_asked_for_is_there(served: Served) -> None:
    add_tools(served)
    await served.complete(max_tokens=3)
    text = (await served.client.get("/metrics")).text
    there = set(re.findall(r"^(vllmx:\w+)", text, re.MULTILINE))
    made = lister()
    asked = set(re.findall(r"vllmx:\w+", made["board"]() + made["alerts"]()))
    assert len(asked) > 12
    assert asked <= there


async def test_the_table_of_metrics_has_all_of_them(make_server: MakeServer) -> None:
    """Each that a server has stands in docs/serving.md, and no other."""
    async with make_server() as served:
        add_tools(served)
        await served.complete(max_tokens=3)
        text = (await served.client.get("/metrics")).text
    there = set(re.findall(r"^# TYPE vllmx:(\w+)", text, re.MULTILINE))
    page = (DOCS / "serving.md").read_text()
    rows = page[page.index("## Metrics") : page.index("## Traces")].splitlines()
    listed = {
        name
        for row in rows
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    }
    places = "spec_decode_num_accepted_tokens_per_pos_total"
    sometimes = {"state_slot_usage_perc", "state_snapshots", places}
    sometimes |= {"kv_host_blocks", "kv_host_bytes", "kv_store_blocks", "kv_store_bytes"}
    assert listed - there == sometimes, "of recurrent layers, of drafts and of tiers"
    assert there - listed == set()
