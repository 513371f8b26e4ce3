"""Python face of ``kvt``, the native data plane."""
