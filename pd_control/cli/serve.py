"""``pdctl serve`` and ``pdctl proxy``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_control.cli.endpoints import default_state_dir
from pd_control.cli.options import INTERRUPTED, NO, OK, USAGE, StateDirOption, fail
from pd_control.config import Config, ConfigError, load

ROLES = ("prefill", "decode", "both", "undivided")


def control_config(
    role: str, instance: str, file: Path | None, state_dir: Path, **sections: Any
) -> Config | None:
    """The control plane's configuration; None for an undivided engine.

    Raises:
        ConfigError: from file, environment or options.
    """
    if role == "undivided":
        return None
    return load(
        file,
        instance=instance,
        role=role,
        discovery={"directory": str(state_dir)},
        **{k: v for k, v in sections.items() if v},
    )


class Signals:
    """SIGINT and SIGTERM, caught from now on. Make it on the loop that waits for them."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._tell)

    def _tell(self) -> None:
        self._told.set()

    async def until(self, other: asyncio.Future[Any]) -> bool:
        """Wait for a signal or for ``other``, which is not cancelled; True for a signal."""
        told = asyncio.ensure_future(self._told.wait())
        await asyncio.wait({told, other}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        return self._told.is_set()


def ready_line(**fields: Any) -> None:
    """One line of JSON on stdout that a supervisor can wait for."""
    print(json.dumps({"ready": True, "pid": os.getpid()} | fields), flush=True)


def serve(
    role: Annotated[str, typer.Option(help=f"One of {', '.join(ROLES)}.")] = "both",
    model: Annotated[
        str, typer.Option(help="tiny, smollm2, a .gguf file or a safetensors folder.")
    ] = "tiny",
    instance: Annotated[str, typer.Option(help="Unique name; default: ROLE-PID.")] = "",
    host: Annotated[str, typer.Option(help="HTTP address to bind.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="HTTP port; 0 picks one and reports it.", min=0, max=65535)
    ] = 0,
    tp: Annotated[int, typer.Option(help="Tensor-parallel worker processes.", min=1)] = 1,
    blocks: Annotated[int, typer.Option(help="KV blocks.", min=1)] = 512,
    block_tokens: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = 16,
    step_tokens: Annotated[
        int, typer.Option(help="Tokens a step computes at most; longer prompts are chunked.", min=1)
    ] = 2048,
    threads: Annotated[int, typer.Option(help="Compute threads a worker.", min=1)] = 1,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse KV of equal prefixes.")] = True,
    split_last_token: Annotated[
        bool, typer.Option(help="Compute the last prompt token apart, as a D does.")
    ] = False,
    transports: Annotated[str, typer.Option(help="Data transports, best first.")] = "",
    generation: Annotated[str, typer.Option(help="step, bypass or substep.")] = "",
    on_failure: Annotated[str, typer.Option(help="fail, recompute or retry.")] = "",
    config: Annotated[Path | None, typer.Option(help="TOML file of the control plane.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Run one engine of the reference kind behind an OpenAI-compatible HTTP face."""
    import logging

    from pd_control.reference.checkpoint import CheckpointError
    from pd_control.reference.engine import EngineConfig
    from pd_control.reference.serve import ServeConfig, Serving
    from pd_control.reference.worker_group import WorkerDiedError

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    if role not in ROLES:
        fail(f"--role: expected one of {', '.join(ROLES)}, got {role!r}", USAGE)
    instance = instance or f"{role}-{os.getpid()}"
    policy = {"generation": generation, "on_load_failure": on_failure}
    try:
        control = control_config(
            role,
            instance,
            config,
            state_dir or default_state_dir(),
            policy={k: v for k, v in policy.items() if v},
            transfer={"transports": transports.split(",")} if transports else {},
        )
    except ConfigError as error:
        fail(str(error), USAGE)
    whole = ServeConfig(
        EngineConfig(
            source=model,
            tp_size=tp,
            num_blocks=blocks,
            block_tokens=block_tokens,
            max_step_tokens=step_tokens,
            prefix_caching=prefix_caching,
            split_last_token=split_last_token,
            num_threads=threads,
        ),
        control,
        host,
        port,
    )

    async def main() -> int:
        signals = Signals()
        opening = asyncio.ensure_future(Serving.open(whole))
        if await signals.until(opening):
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            return INTERRUPTED
        try:
            serving = await opening
        except (CheckpointError, WorkerDiedError, TimeoutError, OSError, ValueError) as error:
            fail(f"cannot serve: {error}")
        died = asyncio.ensure_future(serving.stopped.wait())
        try:
            address = serving.runtime.advertised_address() if serving.runtime else ""
            assert serving.engine is not None
            ready_line(
                url=serving.url,
                role=role,
                instance=instance,
                control=address,
                workers=serving.engine.worker_pids,
            )
            if await signals.until(died):
                return OK
            print(f"pdctl: the engine has died: {serving.reason}", file=sys.stderr)
            return NO
        finally:
            died.cancel()
            await serving.close()

    raise typer.Exit(_run(main))


def proxy(
    decode: Annotated[
        list[str], typer.Option("--decode", "-d", metavar="URL", help="D server; repeatable.")
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill", "-p", metavar="URL[@HOST:PORT]", help="P server and its control address."
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="dual, sequential or single.")] = "dual",
    retries: Annotated[int, typer.Option(help="Attempts after the first.", min=0, max=10)] = 1,
    on_failure: Annotated[
        str,
        typer.Option(
            help="Told to D: fail, recompute or retry; with recompute, D alone serves while no P can."
        ),
    ] = "",
    silence: Annotated[
        float, typer.Option(help="Seconds without a byte after which an attempt fails.", min=0.1)
    ] = 300.0,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 picks one and reports it.", min=0, max=65535)
    ] = 0,
) -> None:
    """One address in front of P and D servers; a client that leaves aborts both halves."""
    from pd_control.http.completions import serve_app
    from pd_control.http.proxy import Proxy, Upstream

    async def main() -> int:
        try:
            app = Proxy(
                [Upstream.parse(p) for p in prefill or []],
                [Upstream.parse(d) for d in decode],
                mode=mode,
                retries=retries,
                on_failure=on_failure,
                silence_s=silence,
            ).app
        except ValueError as error:
            fail(str(error), USAGE)
        try:
            runner, real_port = await serve_app(app, host, port)
        except OSError as error:
            fail(str(error.strerror))
        ready_line(url=f"http://{host}:{real_port}", role="proxy", mode=mode)
        await Signals().until(asyncio.get_running_loop().create_future())
        await runner.cleanup()
        return OK

    raise typer.Exit(_run(main))


def _run(main: Callable[[], Awaitable[int]]) -> int:
    """On uvloop, as the engines' own loops."""
    import uvloop

    async def start() -> int:
        return await main()

    status: int = uvloop.run(start())
    return status
