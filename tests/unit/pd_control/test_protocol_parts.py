"""The small parts of the pure core, each against its contract."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pd_control.protocol
from pd_control.codes import Code
from pd_control.ids import Content, TransferId, identity_digest
from pd_control.messages import Topology
from pd_control.protocol.completion import FINAL_MEMBER, Completion, Verdict, members
from pd_control.protocol.d_request import D_REQUEST
from pd_control.protocol.errors import InvariantError
from pd_control.protocol.leases import LeaseKind, LeaseTable
from pd_control.protocol.p_request import P_REQUEST
from pd_control.protocol.p_transfer import P_TRANSFER
from pd_control.protocol.ranks import rank_pairs, topology_problem
from pd_control.protocol.timers import Timers
from pd_control.protocol.tombstones import TimedTable
from pd_control.testing.pair import CountingRefs

# --- timers ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 50))), max_size=200)
)
def test_timers_behave_like_a_dict_of_deadlines(ops: list[tuple[int, int | None]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for key, at in ops:
        if at is None:
            timers.cancel(key)
            model.pop(key, None)
        else:
            timers.set(key, at)
            model[key] = at
        assert timers.next() == min(model.values(), default=None)
        assert len(timers) == len(model)
    due = list(timers.due(25))
    assert sorted(due) == sorted(key for key, at in model.items() if at <= 25)
    assert [model[key] for key in due] == sorted(model[key] for key in due)
    assert timers.next() == min((at for at in model.values() if at > 25), default=None)


def test_timers_set_again_for_ever_do_not_grow() -> None:
    timers: Timers[int] = Timers()
    for n in range(10_000):
        timers.set(n % 10, n)
    assert len(timers._heap) <= 2 * 10 + 64 + 1


def test_a_timer_set_while_iterating_over_due_ones_is_seen() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1)
    seen = []
    for key in timers.due(5):
        seen.append(key)
        if key == "a":
            timers.set("b", 2)
    assert seen == ["a", "b"]


# --- tombstones ----------------------------------------------------------------------------------


def test_tombstones_are_timed_and_bounded() -> None:
    table: TimedTable[str, int] = TimedTable(ttl_s=10, max_entries=3)
    for n, key in enumerate("abcd"):
        table.put(key, n, now_s=n)
    assert table.get("a", 3) is None, "the oldest made room"
    assert table.evicted == 1
    assert table.get("b", 10.9) == 1
    assert table.get("b", 11) is None, "its time is over"
    table.expire(12.5)
    assert len(table) == 1
    assert table.pop("d", 12.5) == 3
    assert len(table) == 0


# --- completion ----------------------------------------------------------------------------------

PAIRS = members([(r, s) for r in range(2) for s in range(3)])


def test_whole_only_when_all_are_in_and_tokens_are_the_minimum() -> None:
    completion = Completion(PAIRS)
    verdicts = [completion.report(m, 100 - i, Code.OK) for i, m in enumerate(sorted(PAIRS))]
    assert verdicts == [Verdict.PENDING] * 5 + [Verdict.WHOLE]
    assert completion.tokens == 95
    assert completion.whole


@given(st.permutations(sorted(PAIRS)), st.integers(0, 5), st.sampled_from(list(Code)))
def test_any_error_wins_in_any_order(order: list[tuple[int, int]], bad: int, code: Code) -> None:
    completion = Completion(PAIRS)
    for i, member in enumerate(order):
        completion.report(member, 9, code if i == bad else Code.OK, "why")
    assert completion.whole == (code is Code.OK)
    assert completion.code is code
    if code is not Code.OK:
        assert completion.failed_by == order[bad]


def test_the_first_error_is_kept_and_later_ones_are_late() -> None:
    completion = Completion(PAIRS)
    assert completion.report((0, 0), 0, Code.TIMEOUT) is Verdict.FAILED
    assert completion.report((0, 1), 0, Code.CORRUPT) is Verdict.LATE
    assert completion.report((0, 2), 9, Code.OK) is Verdict.LATE
    assert (completion.code, completion.failed_by) == (Code.TIMEOUT, (0, 0))


def test_duplicates_and_unknowns_are_ignored_and_counted() -> None:
    completion = Completion(PAIRS)
    completion.report((0, 0), 9, Code.OK)
    assert completion.report((0, 0), 1, Code.CORRUPT) is Verdict.DUPLICATE
    assert completion.report((7, 7), 1, Code.CORRUPT) is Verdict.UNKNOWN
    assert (completion.duplicates, completion.unknown) == (1, 1)
    assert (completion.tokens, completion.code) == (9, Code.OK)


def test_it_names_who_is_missing() -> None:
    completion = Completion(PAIRS | {FINAL_MEMBER})
    for member in PAIRS - {(1, 2)}:
        completion.report(member, 9, Code.OK)
    assert completion.missing() == [(1, 2), FINAL_MEMBER]
    assert completion.rank_missing(1)
    assert not completion.rank_missing(0)


def test_nobody_expected_is_whole_at_once() -> None:
    assert Completion(frozenset()).whole


# --- ranks ---------------------------------------------------------------------------------------


def all_topologies() -> list[Topology]:
    return [
        Topology(tp, pp, heads, pp_layers=layers)
        for tp in (1, 2, 4, 8)
        for pp, layers in ((1, ()), (2, (3, 5)), (4, (2, 2, 2, 2)))
        for heads in (0, 2, 8)
    ]


@pytest.mark.parametrize("heads", [0, 2, 8])
def test_every_target_gets_every_byte_it_holds_from_exactly_one_source(heads: int) -> None:
    for source in all_topologies():
        for target in all_topologies():
            if source.num_kv_heads != heads or target.num_kv_heads != heads:
                continue
            pairs = rank_pairs(source, target)
            assert len(set(pairs)) == len(pairs)
            got: dict[tuple[int, int, int], int] = {}
            for s, t in pairs:
                for layer in layers_of(source, s) & layers_of(target, t):
                    for head in heads_of(source, s, heads) & heads_of(target, t, heads):
                        got[t, layer, head] = got.get((t, layer, head), 0) + 1
            for t in range(target.num_ranks):
                for layer in layers_of(target, t):
                    for head in heads_of(target, t, heads):
                        assert got.get((t, layer, head), 0) >= 1, (source, target, t, layer, head)
            if heads == 0 or source.tp_size <= heads:
                assert all(n == 1 for n in got.values()) or heads == 0


def layers_of(topology: Topology, rank: int) -> set[int]:
    counts = topology.pp_layers or (8,)
    stage = rank // topology.tp_size
    first = sum(counts[:stage])
    return set(range(first, first + counts[stage]))


def heads_of(topology: Topology, rank: int, heads: int) -> set[int]:
    if heads == 0:
        return {0}
    tp, r = topology.tp_size, rank % topology.tp_size
    if tp >= heads:
        return {r * heads // tp}
    each = heads // tp
    return set(range(r * each, (r + 1) * each))


def test_replicas_are_spread_over_their_targets() -> None:
    """kvt's rule: of n holders and m wanters, target j is fed by source j * n / m."""
    assert rank_pairs(Topology(4), Topology(2)) == ((0, 0), (2, 1))
    assert rank_pairs(Topology(2), Topology(4)) == ((0, 0), (0, 1), (1, 2), (1, 3))
    assert rank_pairs(Topology(4, num_kv_heads=2), Topology(2, num_kv_heads=2)) == ((0, 0), (2, 1))


@pytest.mark.parametrize(
    ("topology", "word"),
    [
        (Topology(0), "tp_size"),
        (Topology(1, 2), "pp_layers"),
        (Topology(3, num_kv_heads=8), "divide"),
        (Topology(1, num_kv_heads=-1), "divide"),
    ],
)
def test_a_topology_that_cannot_be_is_named(topology: Topology, word: str) -> None:
    assert word in (topology_problem(topology) or "")


# --- leases --------------------------------------------------------------------------------------


def test_leases_add_up_by_kind_and_release_exactly_once() -> None:
    refs = CountingRefs()
    table = LeaseTable(refs)
    hold = table.acquire(LeaseKind.HOLD, "a", ((1, 2), (3,)))
    load = table.acquire(LeaseKind.LOAD, "b", ((2,), ()))
    table.extend(hold, ((4,), ()))
    assert refs.counts == {(0, 1): 1, (0, 2): 2, (1, 3): 1, (0, 4): 1}
    assert table.blocks == {LeaseKind.HOLD: 4, LeaseKind.LOAD: 1, LeaseKind.SAVE: 0}
    table.release(hold)
    with pytest.raises(InvariantError, match="already released"):
        table.release(hold)
    with pytest.raises(InvariantError, match="never issued"):
        table.release(99)
    with pytest.raises(InvariantError, match="already released"):
        table.extend(hold, ((9,), ()))
    assert refs.counts == {(0, 2): 1}, "a refused release takes nobody's reference"
    table.release(load)
    assert not refs.counts
    assert sum(table.acquired.values()) == sum(table.released.values()) == 2


def test_an_extension_must_name_the_same_groups() -> None:
    refs = CountingRefs()
    table = LeaseTable(refs)
    lease = table.acquire(LeaseKind.HOLD, "a", ((1,),))
    with pytest.raises(InvariantError, match="expected 1 cache groups, got 2"):
        table.extend(lease, ((2,), (3,)))
    assert refs.counts == {(0, 1): 1}


# --- ids -----------------------------------------------------------------------------------------


def test_transfer_keys_differ_by_every_field() -> None:
    ids = [
        TransferId("d", b"1" * 16, "r", 0),
        TransferId("e", b"1" * 16, "r", 0),
        TransferId("d", b"2" * 16, "r", 0),
        TransferId("d", b"1" * 16, "s", 0),
        TransferId("d", b"1" * 16, "r", 1),
    ]
    assert len({one.key() for one in ids}) == len(ids)
    assert all(len(one.key()) == 16 for one in ids)


def test_the_digest_sees_tokens_count_and_identity() -> None:
    base = Content([1, 2, 3], identity_digest("m"))
    others = [
        Content([1, 2, 4], identity_digest("m")),
        Content([1, 2, 3], identity_digest("n")),
        Content([1, 2, 3], identity_digest("m", adapter="a")),
        Content([1, 2, 3], identity_digest("m", cache_salt="s")),
        Content([1, 2, 3], identity_digest("m", multimodal_hashes=["h"])),
    ]
    assert all(base.digest(3) != other.digest(3) for other in others)
    assert base.digest(2) != base.digest(3)
    assert base.digest(2) == Content((1, 2, 9), identity_digest("m")).digest(2)
    with pytest.raises(ValueError, match=r"expected 0\.\.3 tokens, got 4"):
        base.digest(4)


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [P_REQUEST, P_TRANSFER, D_REQUEST], ids=lambda t: t.name)
def test_tables_are_whole(table: object) -> None:
    """Every state is reachable; every living one can end; every input is used; no final one moves."""
    assert isinstance(table, type(D_REQUEST))
    reach = set(table.initial)
    for _ in table.states:
        reach |= {row.to for row in table.rows if reach & set(row.states)}
    assert reach == set(table.states)
    assert {row.input for row in table.rows} == set(table.inputs)
    for state in set(table.states) - set(table.final):
        found = {state}
        for _ in table.states:
            found |= {row.to for row in table.rows if found & set(row.states)}
        assert found & set(table.final), f"{state} never ends"
    for state in table.states:
        for given_input in table.inputs:
            after = table.after(state, given_input)
            assert after is None or state not in table.final


# --- purity --------------------------------------------------------------------------------------

FORBIDDEN = {
    "asyncio",
    "socket",
    "time",
    "random",
    "threading",
    "select",
    "os",
    "uvloop",
    "logging",
}


def test_the_core_imports_no_io_and_no_clock() -> None:
    for path in Path(pd_control.protocol.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & FORBIDDEN, path.name


def test_random_orders_of_reports_agree() -> None:
    rng = random.Random(4)
    for _ in range(50):
        order = [(m, rng.randrange(5, 9)) for m in sorted(PAIRS)]
        rng.shuffle(order)
        completion = Completion(PAIRS)
        for member, tokens in order:
            completion.report(member, tokens, Code.OK)
        assert completion.tokens == min(tokens for _, tokens in order)
