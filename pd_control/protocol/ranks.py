"""Which ranks of P exchange bytes with which ranks of D.

Both sides compute this from the two topologies and must agree, as must the native planner that cuts
the bytes: SEND_DONE and LOAD_DONE are expected for exactly these pairs.
"""

from __future__ import annotations

from pd_control.messages import Topology

Pairs = tuple[tuple[int, int], ...]
"""(source rank, target rank), sorted."""


def rank_pairs(source: Topology, target: Topology) -> Pairs:
    """All (source rank, target rank) between which bytes move for any non-empty token range.

    Pipeline ranks exchange the layers that both hold. Within a layer, a target rank gets each KV
    head it holds from one source rank that holds it; where several do (heads replicated over TP
    ranks, or MLA), targets are spread over them.
    """
    pairs = set()
    for s_pp, t_pp in _overlapping_stages(source, target):
        for t_tp in range(target.tp_size):
            for s_tp in _tp_sources(source, target, t_tp):
                pairs.add((s_pp * source.tp_size + s_tp, t_pp * target.tp_size + t_tp))
    return tuple(sorted(pairs))


def _overlapping_stages(source: Topology, target: Topology) -> list[tuple[int, int]]:
    if source.pp_size == 1 or target.pp_size == 1:
        return [(s, t) for s in range(source.pp_size) for t in range(target.pp_size)]
    found = []
    for s, (s_from, s_to) in enumerate(_layer_ranges(source)):
        for t, (t_from, t_to) in enumerate(_layer_ranges(target)):
            if max(s_from, t_from) < min(s_to, t_to):
                found.append((s, t))
    return found


def _layer_ranges(topology: Topology) -> list[tuple[int, int]]:
    ranges = []
    first = 0
    for layers in topology.pp_layers:
        ranges.append((first, first + layers))
        first += layers
    return ranges


def _tp_sources(source: Topology, target: Topology, t_tp: int) -> set[int]:
    """Of the n source ranks that hold a head and the m target ranks that want it, target j is fed by
    source j * n / m (the rule of kvt's planner)."""
    heads = source.num_kv_heads
    if heads == 0:
        return {t_tp * source.tp_size // target.tp_size}
    found = set()
    for head in _heads_of(t_tp, target.tp_size, heads):
        holders = _ranks_with(head, source.tp_size, heads)
        wanters = _ranks_with(head, target.tp_size, heads)
        found.add(holders[wanters.index(t_tp) * len(holders) // len(wanters)])
    return found


def _ranks_with(head: int, tp_size: int, heads: int) -> list[int]:
    return [rank for rank in range(tp_size) if head in _heads_of(rank, tp_size, heads)]


def _heads_of(tp_rank: int, tp_size: int, heads: int) -> range:
    if tp_size >= heads:  # replicated: one head each, tp_size / heads copies
        head = tp_rank * heads // tp_size
        return range(head, head + 1)
    each = heads // tp_size
    return range(tp_rank * each, (tp_rank + 1) * each)


def topology_problem(topology: Topology) -> str | None:
    """Why these numbers describe no instance (named, with expected and got), or None."""
    if topology.tp_size < 1 or topology.pp_size < 1:
        return f"expected tp_size and pp_size of at least 1, got {topology.tp_size} and {topology.pp_size}"
    if topology.pp_size > 1 and len(topology.pp_layers) != topology.pp_size:
        return f"expected {topology.pp_size} entries in pp_layers, got {len(topology.pp_layers)}"
    heads, tp = topology.num_kv_heads, topology.tp_size
    if heads < 0 or (heads and heads % tp and tp % heads):
        return f"expected num_kv_heads and tp_size to divide one another, got {heads} and {tp}"
    return None
