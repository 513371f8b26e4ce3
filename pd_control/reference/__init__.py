"""A small, readable serving engine: paged KV, prefix caching, continuous batching, TP by processes.

It exists to prove the cut of :mod:`pd_control.engine`: it embeds the control plane through that
interface only, as any other engine would. Reading order is the data path: ``checkpoint`` → ``model`` →
``blocks`` → ``scheduler`` → ``worker`` → ``engine``.
"""
