"""A CUDA driver for tests, through ctypes: the real one, or the stand-in of kvt_bindings/cpp/tests.

The stand-in is compiled from its source on first use (build/standin), as it is no part of the
installed package.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kvt_bindings" / "cpp" / "tests" / "standin"
REAL = "libcuda.so.1"


def build_standin() -> str:
    """The path of the compiled stand-in."""
    built = ROOT / "build" / "standin" / "libkvt_standin_cuda.so"
    sources = [SOURCE / "standin_cuda.cpp", SOURCE / "standin_cuda.h"]
    if built.exists() and all(built.stat().st_mtime >= s.stat().st_mtime for s in sources):
        return str(built)
    compiler = os.environ.get("CXX") or shutil.which("c++")
    assert compiler, "a C++20 compiler is needed (set CXX)"
    built.parent.mkdir(parents=True, exist_ok=True)
    fresh = built.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(sources[0]), "-o", str(fresh)], check=True)
    fresh.rename(built)
    return str(built)


def find_gpu() -> str:
    """Why there is no usable GPU here, or nothing."""
    try:
        driver = ctypes.CDLL(REAL)
    except OSError as error:
        return str(error)
    count = c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(byref(count)) != 0 or count.value == 0:
        return f"{REAL} finds no device"
    return ""


class Driver:
    """Device 0's primary context, current on this thread; memory and streams of it."""

    def __init__(self, library: str) -> None:
        self.library = library
        self._cuda = ctypes.CDLL(library)
        context = c_void_p()
        self._must("cuInit", c_uint(0))
        self._must("cuDevicePrimaryCtxRetain", byref(context), c_int(0))
        self._must("cuCtxSetCurrent", context)
        self._close: list[Callable[[], None]] = []

    def _must(self, name: str, *args: Any) -> None:
        result = getattr(self._cuda, name)(*args)
        assert result == 0, f"{name}: {result}"

    def alloc(self, num_bytes: int) -> int:
        address = c_ulonglong()
        self._must("cuMemAlloc_v2", byref(address), c_size_t(num_bytes))
        self._close.append(lambda: self._must("cuMemFree_v2", address))
        return address.value

    def upload(self, address: int, data: bytes) -> None:
        self._must("cuMemcpyHtoD_v2", c_ulonglong(address), data, c_size_t(len(data)))

    def download(self, address: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._must("cuMemcpyDtoH_v2", buffer, c_ulonglong(address), c_size_t(num_bytes))
        return buffer.raw

    def stream(self) -> int:
        handle = c_void_p()
        self._must("cuStreamCreate", byref(handle), c_uint(1))
        self._close.append(lambda: self._must("cuStreamDestroy_v2", handle))
        assert handle.value is not None
        return handle.value

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """A kernel on the stream: returns before it has run."""
        self._must(
            "cuMemsetD8Async",
            c_ulonglong(address),
            c_ubyte(value),
            c_size_t(num_bytes),
            c_void_p(stream),
        )

    def synchronize(self, stream: int) -> None:
        self._must("cuStreamSynchronize", c_void_p(stream))

    def close(self) -> None:
        while self._close:
            self._close.pop()()
        self._must("cuDevicePrimaryCtxRelease_v2", c_int(0))
