"""What kvt needs to know of a cache tensor, from torch, numpy or anything that speaks DLPack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvt_bindings import _kvt

_DLPACK_HOST = {1, 3}  # CPU, CUDA pinned host
_DLPACK_CUDA = {2, 13}  # CUDA, CUDA managed
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Address, shape and byte strides; `cuda_device` is None for host memory."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str
    cuda_device: int | None

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element's first byte to the last element's last one."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides_bytes, strict=True))
        return reach + self.item_bytes


def tensor_info(tensor: Any) -> TensorInfo:
    """Describe a tensor without copying it. Raises TypeError or ValueError naming what is wrong.

    Any thread. The caller keeps the tensor alive for as long as the address is used.
    """
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        info = _from_torch(tensor)
    elif hasattr(tensor, "__array_interface__"):
        info = _from_array_interface(tensor.__array_interface__)
    elif hasattr(tensor, "__dlpack__"):
        info = _from_dlpack(tensor)
    else:
        raise TypeError(f"{type(tensor).__name__} is no tensor: want torch, numpy or DLPack")
    if min(info.shape, default=1) < 1:
        raise ValueError(f"tensor of shape {info.shape} is empty")
    if any(s < 0 for s in info.strides_bytes):
        raise ValueError(f"tensor with negative strides {info.strides_bytes}")
    return info


def _from_torch(tensor: Any) -> TensorInfo:
    item = int(tensor.element_size())
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensor on device {device}: want cpu or cuda")
    return TensorInfo(
        address=int(tensor.data_ptr()),
        shape=tuple(int(n) for n in tensor.shape),
        strides_bytes=tuple(int(s) * item for s in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
        cuda_device=(device.index or 0) if device.type == "cuda" else None,
    )


def _from_array_interface(interface: dict[str, Any]) -> TensorInfo:
    shape = tuple(int(n) for n in interface["shape"])
    typestr = str(interface["typestr"])
    kinds = {"i": "int", "u": "uint", "f": "float", "V": "void", "b": "bool", "c": "complex"}
    item = int(typestr[2:])
    kind = kinds.get(typestr[1], typestr[1])
    strides = interface.get("strides")
    if strides is None:
        steps = [item]
        for n in reversed(shape[1:]):
            steps.append(steps[-1] * n)
        strides = tuple(reversed(steps)) if shape else ()
    return TensorInfo(
        address=int(interface["data"][0]),
        shape=shape,
        strides_bytes=tuple(int(s) for s in strides),
        item_bytes=item,
        dtype=f"{kind}{item * 8}",
        cuda_device=None,
    )


def _from_dlpack(tensor: Any) -> TensorInfo:
    address, shape, strides, bits, code, device_type, device_id = _kvt.dlpack_info(tensor)
    if bits % 8:
        raise ValueError(f"tensor with {bits}-bit elements")
    if device_type not in _DLPACK_HOST | _DLPACK_CUDA:
        raise ValueError(f"tensor on DLPack device type {device_type}: want host or CUDA")
    item = bits // 8
    return TensorInfo(
        address=address,
        shape=tuple(shape),
        strides_bytes=tuple(s * item for s in strides),
        item_bytes=item,
        dtype=f"{_DLPACK_KINDS.get(code, f'kind{code}')}{bits}",
        cuda_device=device_id if device_type in _DLPACK_CUDA else None,
    )
