"""Faults of this program, as opposed to what peers, workers or engines do wrong."""


class InvariantError(Exception):
    """The state of a core contradicts itself. Scope: the process (`on_fatal`)."""


class EngineContractError(Exception):
    """The engine called the core-thread part in a way that its contract forbids. Scope: the process
    (the message says which sentence of the contract)."""
