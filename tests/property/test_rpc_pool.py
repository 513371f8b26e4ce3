"""The pools against a model that is too simple to be wrong: any sequence of calls, openings, losses,
cancellations and evictions keeps every connection in one state and nobody waiting needlessly."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simple_rpc._pool import PeerPool, Pools, Todo

MAX_PEERS = 3
MAX_CONNECTIONS = 3
KEYS = st.sampled_from("abcde")


class Model:
    """One peer, as sets."""

    def __init__(self) -> None:
        self.idle: list[int] = []
        self.busy: list[int] = []
        self.opening = 0
        self.waiting: list[int] = []

    @property
    def is_unused(self) -> bool:
        return not (self.busy or self.opening or self.waiting)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pools: Pools[str, int, int] = Pools(MAX_PEERS, MAX_CONNECTIONS)
        self.model: OrderedDict[str, Model] = OrderedDict()
        self.numbers = itertools.count()

    def pool(self, key: str) -> PeerPool[int, int]:
        pool = self.pools._pools[key]
        assert pool is not None
        return pool

    def keys(self, condition) -> list[str]:
        return [key for key, model in self.model.items() if condition(model)]

    def woken_to_open(self, model: Model, waiter: int | None) -> None:
        """A pool says that there is room for this waiter; the model says who it must be."""
        has_room = len(model.idle) + len(model.busy) + model.opening < MAX_CONNECTIONS
        assert waiter == (model.waiting.pop(0) if has_room and model.waiting else None)
        if waiter is not None:
            model.opening += 1

    @rule(key=KEYS)
    def call(self, key: str) -> None:
        pool = self.pools.find(key)
        assert (pool is not None) == (key in self.model)
        if pool is None:
            added = self.pools.add(key)
            if len(self.model) >= MAX_PEERS:
                oldest = next((k for k, model in self.model.items() if model.is_unused), None)
                if oldest is None:
                    assert added is None
                    return
                assert added is not None
                assert added[1] == self.model.pop(oldest).idle
            assert added is not None
            pool = added[0]
            self.model[key] = Model()
        self.model.move_to_end(key)
        model = self.model[key]
        connection = pool.take_idle()
        if model.idle:
            assert connection == model.idle.pop()  # the warmest
            model.busy.append(connection)
            return
        assert connection is None
        todo = pool.without_idle()
        if len(model.busy) + model.opening < MAX_CONNECTIONS:
            assert todo is Todo.OPEN
            model.opening += 1
        else:
            assert todo is Todo.WAIT
            waiter = next(self.numbers)
            pool.waiters.append(waiter)
            model.waiting.append(waiter)

    @precondition(lambda self: self.keys(lambda model: model.opening))
    @rule(data=st.data())
    def opened(self, data) -> None:
        key = data.draw(st.sampled_from(self.keys(lambda model: model.opening)))
        self.pool(key).opened()
        self.model[key].opening -= 1
        self.model[key].busy.append(next(self.numbers))

    @precondition(lambda self: self.keys(lambda model: model.opening))
    @rule(data=st.data())
    def open_failed(self, data) -> None:
        key = data.draw(st.sampled_from(self.keys(lambda model: model.opening)))
        model = self.model[key]
        waiter = self.pool(key).open_failed()
        model.opening -= 1
        self.woken_to_open(model, waiter)

    @precondition(lambda self: self.keys(lambda model: model.busy))
    @rule(data=st.data())
    def released(self, data) -> None:
        key = data.draw(st.sampled_from(self.keys(lambda model: model.busy)))
        model = self.model[key]
        connection = data.draw(st.sampled_from(model.busy))
        waiter = self.pool(key).release(connection)
        if model.waiting:
            assert waiter == model.waiting.pop(0)  # first come, first served; it stays busy
        else:
            assert waiter is None
            model.busy.remove(connection)
            model.idle.append(connection)

    @precondition(lambda self: self.keys(lambda model: model.busy or model.idle))
    @rule(data=st.data())
    def lost(self, data) -> None:
        key = data.draw(st.sampled_from(self.keys(lambda model: model.busy or model.idle)))
        model = self.model[key]
        connection = data.draw(st.sampled_from(model.busy + model.idle))
        waiter = self.pool(key).lost(connection)
        (model.busy if connection in model.busy else model.idle).remove(connection)
        self.woken_to_open(model, waiter)

    @precondition(lambda self: self.keys(lambda model: model.waiting))
    @rule(data=st.data())
    def gave_up(self, data) -> None:
        key = data.draw(st.sampled_from(self.keys(lambda model: model.waiting)))
        waiter = data.draw(st.sampled_from(self.model[key].waiting))
        self.pool(key).give_up(waiter)
        self.pool(key).give_up(waiter)  # twice does nothing
        self.model[key].waiting.remove(waiter)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert [key for key, _ in self.pools.items()] == list(self.model)
        assert len(self.pools) <= MAX_PEERS
        for key, pool in self.pools.items():
            model = self.model[key]
            assert pool.idle == model.idle
            assert pool.num_busy == len(model.busy)
            assert pool.num_opening == model.opening
            assert list(pool.waiters) == model.waiting
            assert pool.is_unused == model.is_unused
            assert pool.num_open + pool.num_opening <= MAX_CONNECTIONS
            if pool.waiters:
                assert not pool.idle
                assert pool.num_open + pool.num_opening == MAX_CONNECTIONS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPools = PoolMachine.TestCase
