"""What peers cost: latency, connect time and memory with 1, 10, 100 and 1,000 of them.

    python -m benchmarks.rpc_scale [--json] [--runs 3] [--quick]

The peers are servers with an address and an identity of their own, in one other process (a thousand
processes would measure the machine's scheduler). One client in this process talks to all of them:

  latency_p50_us       calls to one peer after the other, round robin: every call another pool
  hot_latency_p50_us   calls to one peer, while the others' pools sit idle
  connect_us           a connection, handshake included; one after the other
  bytes_per_idle_connection   growth of resident memory over at least 1,000 idle connections spread over
                       the peers, in the client's and in the server's process

Cost should not grow with the number of peers: ``growth`` is each figure over that for one peer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import uvloop

from benchmarks.rpc import latency_slice, machine, summarize
from benchmarks.rpc_contenders import (
    BLOCK_IDS,
    NUM_BLOCKS,
    PREFILL,
    REQUEST_ID,
    Accepted,
    PrefillRequest,
)
from simple_rpc import Address, Client, Deadline, Identity, Limits, Server

NUM_PEERS = (1, 10, 100, 1000)
MIN_IDLE_CONNECTIONS = 1000
MIN_CALLS = 3000
LIMITS = Limits(max_peers=2000, max_connections=4096, max_handshaking=2048)
FLATNESS = 1.5  # growth that still counts as flat: runs differ by some tens of percent


def raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))


def rss_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def serve(num_peers: int) -> None:
    def prefill(request: PrefillRequest, context: Any) -> Accepted:
        return Accepted(1)

    servers = [
        Server(Identity("scheduler", f"p{number}"), limits=LIMITS) for number in range(num_peers)
    ]
    addresses = []
    for server in servers:
        server.register(PREFILL, prefill)
        addresses.append(str(await server.listen("tcp://127.0.0.1:0")))
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


class RoundRobin:
    """A caller in the sense of ``benchmarks.rpc``: the next call goes to the next peer."""

    def __init__(self, client: Client, addresses: list[Address]) -> None:
        self.client = client
        self.addresses = addresses
        self.next = 0

    async def call(self) -> None:
        address = self.addresses[self.next]
        self.next = (self.next + 1) % len(self.addresses)
        request = PrefillRequest(REQUEST_ID, BLOCK_IDS, NUM_BLOCKS * 16)
        await self.client.call(address, PREFILL, request, deadline=Deadline.after(30.0))

    async def close(self) -> None:
        await self.client.close()


async def measure(addresses: list[Address], server_pid: int, num_calls: int) -> dict[str, float]:
    client = Client(Identity("scheduler", "bench"), limits=LIMITS)
    caller = RoundRobin(client, addresses)
    await latency_slice(caller, 3 * len(addresses) + 200)
    latency = await latency_slice(caller, max(num_calls, 3 * len(addresses)))
    hot = RoundRobin(client, addresses[:1])
    await latency_slice(hot, 200)
    hot_latency = await latency_slice(hot, num_calls)

    per_peer = -(-MIN_IDLE_CONNECTIONS // len(addresses))
    gc.collect()
    ours, theirs = rss_bytes(), rss_bytes(server_pid)
    idle, connect = [], []
    for address in addresses:
        for _ in range(per_peer):
            start_s = time.perf_counter()
            idle.append(await client.connect(address, Deadline.after(30.0)))
            connect.append(time.perf_counter() - start_s)
    gc.collect()
    found = {
        "latency_p50_us": statistics.median(latency) * 1e6,
        "hot_latency_p50_us": statistics.median(hot_latency) * 1e6,
        "connect_us": statistics.median(connect) * 1e6,
        "client_bytes_per_idle_connection": (rss_bytes() - ours) / len(idle),
        "server_bytes_per_idle_connection": (rss_bytes(server_pid) - theirs) / len(idle),
    }
    await client.close()
    return found


def client_process(num_peers: int, num_calls: int, addresses: list[str], server_pid: int) -> None:
    parsed = [Address.parse(address) for address in addresses]
    assert len(parsed) == num_peers
    print(json.dumps(uvloop.run(measure(parsed, server_pid, num_calls))))


def one(num_peers: int, num_calls: int) -> dict[str, float]:
    """Fresh processes on both sides, so that no run's memory hides in another's."""
    me = [sys.executable, "-m", "benchmarks.rpc_scale"]
    server = subprocess.Popen([*me, "--serve", str(num_peers)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        addresses = server.stdout.readline().decode()
        client = subprocess.run(
            [*me, "--client", str(num_peers), str(num_calls), str(server.pid)],
            input=addresses,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if client.returncode:
            raise RuntimeError(client.stderr)
        found: dict[str, float] = json.loads(client.stdout)
        return found
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the results as JSON only")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="few peers, few calls: shows that it works"
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_descriptor_limit()
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    if options.client:
        num_peers, num_calls, server_pid = options.client
        client_process(num_peers, num_calls, json.loads(sys.stdin.readline()), server_pid)
        return
    sizes, num_calls, num_runs = (
        ((1, 10), 300, 1) if options.quick else (NUM_PEERS, MIN_CALLS, options.runs)
    )
    runs: list[dict[str, Any]] = []
    for number in range(num_runs):
        run: dict[str, Any] = {}
        for num_peers in sizes:
            run[str(num_peers)] = one(num_peers, num_calls)
            if not options.json:
                shown = "  ".join(
                    f"{name} {value:,.0f}" for name, value in run[str(num_peers)].items()
                )
                print(f"run {number + 1}  {num_peers:>5} peers  {shown}", flush=True)
        runs.append({"peers": run})
    results = summarize(runs)
    peers = results["peers"]
    smallest, largest = str(sizes[0]), str(sizes[-1])
    results["growth"] = {
        name: {size: peers[size][name] / peers[smallest][name] for size in peers}
        for name in peers[smallest]
    }
    results["goals"] = {
        name: {
            "value": results["growth"][name][largest],
            "goal": f"<= {FLATNESS:g} times that of {smallest} peer",
            "reached": results["growth"][name][largest] <= FLATNESS,
        }
        for name in peers[smallest]
    }
    results["machine"] = machine()
    results["method"] = {
        "command": "python -m benchmarks.rpc_scale " + " ".join(sys.argv[1:]),
        "runs": num_runs,
        "spread": "smallest and largest run",
    }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, check in results["goals"].items():
        mark = "reached" if check["reached"] else "MISSED"
        print(f"  {name:36} x {check['value']:.2f} from {smallest} to {largest} peers   {mark}")
    print(f"\n{results['machine']}")


if __name__ == "__main__":
    main()
