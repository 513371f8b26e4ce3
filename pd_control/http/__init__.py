"""A small OpenAI-compatible face for the reference engine, and a proxy over P and D servers.

Built on aiohttp. Only ``/v1/completions`` with its streaming form, ``/v1/models``, ``/health`` and
``/metrics``: enough for curl and the openai client to talk to it.
"""
