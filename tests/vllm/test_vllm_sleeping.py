"""When the sleeping scheduler sleeps, and what it does before: vLLM's classes, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from pd_control.vllm.connector import PDControlConnector, StepMetadata
from pd_control.vllm.sleeping import _sleeping

pytestmark = pytest.mark.vllm


class Connector:
    """Says what it is told to say; every step's metadata is `metadata`."""

    def __init__(self) -> None:
        self.has_news = False
        self.waits: set[str] = set()
        self.metadata = StepMetadata(1, None, [])

    def will_wait(self, ids: Any) -> bool:
        return set(ids) <= self.waits

    needs_no_worker = staticmethod(PDControlConnector.needs_no_worker)


class Stock:
    """As much of vLLM's scheduler as the subclass looks at: new requests get blocks while there are any;
    those whose KV comes from elsewhere wait for it, others run."""

    def __init__(self) -> None:
        self.connector = Connector()
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.kv_holding_waiting: list[Any] = []
        self.finished_req_ids: set[str] = set()
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.num_free = 10
        self.num_scheduled = 0

    def has_requests(self) -> bool:
        return bool(
            self.running or self.waiting or self.kv_holding_waiting or self.finished_req_ids
        )

    def schedule(self, *_: Any) -> SchedulerOutput:
        self.num_scheduled += 1
        step = SchedulerOutput.make_empty()
        for request in self.waiting[: self.num_free]:
            self.waiting.remove(request)
            if request.is_remote:
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                self.kv_holding_waiting.append(request)
            else:
                self.running.append(request)
                step.num_scheduled_tokens[request.request_id] = 1
                step.total_num_scheduled_tokens += 1
        step.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        step.kv_connector_metadata = self.connector.metadata
        return step

    def _update_from_kv_xfer_finished(self, _: Any) -> None:
        self.running += self.kv_holding_waiting
        self.kv_holding_waiting = []


def new(*requests: str) -> Any:
    """A scheduler with new requests; those called "remote…" come with the promise to wait."""
    scheduler = _sleeping(Stock)()
    scheduler.pd_can_sleep = True
    for request_id in requests:
        is_remote = request_id.startswith("remote")
        scheduler.waiting.append(
            SimpleNamespace(
                request_id=request_id, is_remote=is_remote, status=RequestStatus.WAITING
            )
        )
        if is_remote:
            scheduler.connector.waits.add(request_id)
    return scheduler


def test_what_only_waits_is_placed_without_a_step() -> None:
    scheduler = new("remote-1", "remote-2")
    assert not scheduler.has_requests()
    assert [r.request_id for r in scheduler.kv_holding_waiting] == ["remote-1", "remote-2"]
    assert not scheduler.has_requests()
    assert scheduler.num_scheduled == 1
    scheduler.connector.has_news = True
    assert scheduler.has_requests()
    scheduler.schedule()
    assert len(scheduler.running) == 2


def test_a_step_that_was_scheduled_early_comes_next_and_once() -> None:
    """The connector promised that it waits, and it turned out to have nothing to load."""
    scheduler = new("remote-1")
    scheduler.waiting[0].is_remote = False
    assert scheduler.has_requests()
    assert scheduler.has_requests()
    assert scheduler.num_scheduled == 1
    assert scheduler.schedule(True).num_scheduled_tokens == {"remote-1": 1}
    assert scheduler.num_scheduled == 1
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.num_scheduled == 2


@pytest.mark.parametrize("metadata", [StepMetadata(1, b"plan", []), StepMetadata(1, None, ["x"])])
def test_what_workers_must_hear_is_a_step(metadata: StepMetadata) -> None:
    scheduler = new("remote-1")
    scheduler.connector.metadata = metadata
    assert scheduler.has_requests()
    assert scheduler.schedule().kv_connector_metadata is metadata


def test_nothing_is_scheduled_early_that_may_compute() -> None:
    for scheduler in (new("local"), new("remote", "local")):
        assert scheduler.has_requests()
        assert scheduler.num_scheduled == 0
    finished = new("remote")
    finished.finished_req_ids = {"gone"}
    assert finished.has_requests()
    assert finished.num_scheduled == 0
    stock = new("remote")
    stock.pd_can_sleep = False
    assert stock.has_requests()
    assert stock.num_scheduled == 0


def test_what_has_no_blocks_keeps_the_core_awake() -> None:
    scheduler = new("remote-1", "remote-2")
    scheduler.num_free = 1
    assert scheduler.has_requests()
    assert len(scheduler.waiting) == 1
