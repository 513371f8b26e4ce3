"""Outcome codes. One enumeration for the whole system; the numbers are wire format."""

from simple_rpc._errors import Code

__all__ = ["Code"]
