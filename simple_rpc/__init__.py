"""A minimal RPC: a four-byte head, then a body whose shape the head decides."""
