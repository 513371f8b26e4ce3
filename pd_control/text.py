"""Text from clients and peers, on its way to a log."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with everything escaped that a log or a terminal would act on: line ends, control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
