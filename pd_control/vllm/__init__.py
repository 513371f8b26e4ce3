"""pd-control inside vLLM, through vLLM's public connector plug-in point.

Nothing is imported here: vLLM loads :mod:`pd_control.vllm.connector` by its path, in the API server, the
engine core and the workers alike, and only the part that a process needs is imported when it is made.
"""
