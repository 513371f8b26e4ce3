"""Python face of ``kvt``, the native data plane."""

from kvt_bindings._kvt import (
    IPC_BLOCK_BYTES,
    NO_BLOCK,
    CompletionQueue,
    CompletionSink,
    KvtError,
    Layout,
    NewsChannel,
    NewsInbox,
    PairPlanner,
    PlanPart,
    RankCache,
    View,
    check_compatible,
    code_name,
    crc32c,
    incompatibilities,
)
from kvt_bindings._tensors import TensorInfo, tensor_info
from kvt_bindings.layouts import ROWS, KvCache, LayoutBuilder, Row, TensorRow, blocks_for

__all__ = [
    "IPC_BLOCK_BYTES",
    "NO_BLOCK",
    "ROWS",
    "CompletionQueue",
    "CompletionSink",
    "KvCache",
    "KvtError",
    "Layout",
    "LayoutBuilder",
    "NewsChannel",
    "NewsInbox",
    "PairPlanner",
    "PlanPart",
    "RankCache",
    "Row",
    "TensorInfo",
    "TensorRow",
    "View",
    "blocks_for",
    "check_compatible",
    "code_name",
    "crc32c",
    "incompatibilities",
    "tensor_info",
]
