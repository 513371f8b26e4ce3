"""vLLM's own connectors with what they need on a machine without an accelerator, and with neutral settings.

vLLM imports this by ``kv_connector_module_path``; each class is found under its own name, so everything else
in vLLM treats it as the connector that it is. These are changed, and nothing else:

* ``torch.accelerator.current_device_index`` answers 0 where there is no accelerator: MooncakeConnector asks
  for it before it does anything (without this it cannot be measured here at all);
* with ``PD_BENCH_NIXL_DELAY_US`` NIXL's progress thread sleeps that long between two looks. As shipped it
  spins on a core of its own, and NIXL's Python interface has no argument for it;
* with the same variable NIXL's connectors leave their worker on the CPU that it was given. As shipped they
  move its main thread to the last core of the machine, P's and D's to the same one.
"""

from __future__ import annotations

import os
from typing import Any

_MODULES = {
    "NixlConnector": "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "NixlPushConnector": "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "MooncakeConnector": "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
}


def _neutral_nixl(delay_us: int) -> None:
    """NIXL agents made from now on look ``delay_us`` apart, and connectors pin nothing."""
    import nixl._api as api
    from vllm.platforms import current_platform

    # Asked only by the code that pins.
    type(current_platform).discover_numa_topology = classmethod(lambda cls: [])
    stock = api.nixlBind.nixlAgentConfig
    if hasattr(stock, "pd_bench_delay"):
        return

    class Config(stock):  # type: ignore[misc, valid-type]
        pd_bench_delay = delay_us

        @property
        def pthrDelay(self) -> int:  # noqa: N802
            return int(stock.pthrDelay.fget(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            stock.pthrDelay.fset(self, max(value, delay_us))

    api.nixlBind.nixlAgentConfig = Config


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(name)
    import importlib

    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
    found = getattr(importlib.import_module(_MODULES[name]), name)
    delay_us = int(os.environ.get("PD_BENCH_NIXL_DELAY_US", "0"))
    if delay_us and name.startswith("Nixl"):
        _neutral_nixl(delay_us)  # after vLLM has imported NIXL, which it wants to do by itself
    return found
