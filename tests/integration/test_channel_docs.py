"""The Python of docs/news.md and docs/threads.md, executed."""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from pathlib import Path

import simple_rpc
from simple_rpc import Client, Identity, LoopThread, Mailbox, Server

DOCS = Path(__file__).parents[2] / "docs"


def snippet(page: str) -> str:
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert len(found) == 1
    return found[0]


async def test_the_news_page():
    server, client = Server(Identity("scheduler", "d0")), Client(Identity("worker", "d0/r0"))
    loads: list[object] = []
    links: list[object] = []
    names = {
        **{name: getattr(simple_rpc, name) for name in simple_rpc.__all__},
        "server": server,
        "client": client,
        "address": await server.listen("tcp://127.0.0.1:0"),
        "loads": loads,
        "link_came": lambda peer, channel: links.append(channel),
        "give_up": lambda error: None,
        "final": lambda items: None,
        "peer_lost": lambda error: None,
        "key": bytes(16),
    }
    code = compile(snippet("news.md"), "news.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    arrived = asyncio.Event()
    names["news"].channel.when_flushed(arrived.set)
    await asyncio.wait_for(arrived.wait(), 30)
    assert loads == [
        [0, bytes(16), 1, 0, 0, "registration"],
        [0, bytes(16), 2, 4096, 0, ""],
    ]
    assert len(links) == 1
    await client.close()
    await server.close()


def test_the_threads_page():
    published: list[object] = []
    woken = threading.Event()

    async def call_peer(request: str) -> str:
        return request + "!"

    names = {
        "LoopThread": LoopThread,
        "Mailbox": Mailbox,
        "engine_is_unhealthy": lambda fatal: None,
        "log_it": lambda report: None,
        "publish": lambda head, item: published.append((head, item)),
        "item": 7,
        "call_peer": call_peer,
        "request": "hello",
        "engine_wake": woken.set,
        "engine_sleeps": lambda: woken.wait(30),
    }
    exec(compile(snippet("threads.md"), "threads.md", "exec"), names)
    assert names["answer"] == "hello!"
    assert published == [("SDON", 7)]


async def test_the_testing_page(capsys):
    names: dict[str, object] = {}
    code = compile(snippet("testing.md"), "testing.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    assert capsys.readouterr().out == "UNREACHABLE\nTIMEOUT hello\n"
    for owner in ("client", "patient", "server"):
        await names[owner].close()


def test_the_metrics_page_names_every_counter():
    page = (DOCS / "metrics.md").read_text()
    source = "".join(path.read_text() for path in Path(simple_rpc.__file__).parent.glob("*.py"))
    used = set(re.findall(r'(?:count|observe)\(\s*f?"([a-z_.]+)', source))
    used |= set(re.findall(r'f?"((?:news|channel|loop|server|client)\.[a-z_]+[a-z_.]*)', source))
    assert len(used) > 15
    assert not [name for name in used if f"`{name}" not in page]
