"""An optional scheduler class: an engine that only waits for KV sleeps, and is woken by the push.

``--scheduler-cls pd_control.vllm.sleeping.make_scheduler``. vLLM's stock loop runs an empty step a
thousand times a second while any request waits. This subclass says "nothing to do" then, so the core
blocks in its own input queue, and news from the loop thread wakes it by the message that vLLM's own
shutdown uses.

It reaches past the public interface in one place: the factory looks up the engine core, and its input
queue, in the frame that called it. Where that is not the core of an engine process (an in-process
engine would spin), the stock scheduler is used.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What vLLM calls in place of a scheduler class; returns a scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequestType

    vllm_config = kwargs.get("vllm_config") or args[0]
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    core = sys._getframe(1).f_locals.get("self")
    queue = getattr(core, "input_queue", None)
    if queue is None:
        return base(*args, **kwargs)
    scheduler = _sleeping(base)(*args, **kwargs)
    connector = scheduler.connector
    if connector is not None and hasattr(connector, "set_wake"):
        connector.set_wake(lambda: queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        scheduler.pd_can_sleep = True
    return scheduler


def _is_empty(step: Any) -> bool:
    """Whether a step has nothing for any worker, but for what the connector says (which is not looked at)."""
    ignored = {"kv_connector_metadata", "scheduled_cached_reqs", "num_spec_tokens_to_schedule"}
    rest = (getattr(step, f.name) for f in fields(step) if f.name not in ignored)
    return not step.scheduled_cached_reqs.req_ids and not any(rest)


def _sleeping(base: type[Any]) -> type[Any]:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    class SleepingScheduler(base):  # type: ignore[misc]
        """The stock scheduler that knows when only waiting requests are left."""

        pd_can_sleep = False
        #: A step that was scheduled early, to see whether there is one.
        pd_next: Any = None

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            """A request whose KV has landed is in this step. The stock loop hears of it from the answer to an
            empty step, which costs a round through every worker and a millisecond's sleep."""
            if self.pd_next is not None:
                step, self.pd_next = self.pd_next, None
                return step
            if self.pd_can_sleep and self.connector.has_news:
                self._update_from_kv_xfer_finished(KVConnectorOutput())
            return super().schedule(*args, **kwargs)

        def has_requests(self) -> bool:
            if self.pd_next is not None:
                return True
            if not super().has_requests():
                return False
            if not self.pd_can_sleep:
                return True
            if self._pd_is_busy():
                return True
            if self.waiting:
                if self.connector.will_wait(r.request_id for r in self.waiting):
                    self._pd_place()
                if self.waiting or self.pd_next is not None:
                    return True
            held = getattr(self, "kv_holding_waiting", None)
            if held is None:
                held = self.skipped_waiting
            if any(r.status != RequestStatus.WAITING_FOR_REMOTE_KVS for r in held):
                return True
            return bool(self.connector.has_news)

        def _pd_is_busy(self) -> bool:
            """Whether there is anything to do but for requests that are waiting."""
            return bool(
                self.running
                or self.finished_req_ids
                or self.finished_recving_kv_req_ids
                or self.failed_recving_kv_req_ids
                or getattr(self, "_pause_state", PauseState.UNPAUSED) != PauseState.UNPAUSED
            )

        def _pd_place(self) -> None:
            """Give new requests their blocks, so that their KV can come. The stock loop does this in a step
            that is empty, and after it every worker spins for a second, waiting for the next one."""
            step = self.schedule()
            if not (_is_empty(step) and self.connector.needs_no_worker(step.kv_connector_metadata)):
                self.pd_next = step

    return SleepingScheduler
