// What the layers of kvt exchange: one contiguous run of bytes to move.
#pragma once

#include <cstdint>

namespace kvt {

#pragma pack(push, 1)
// Packed, 30 bytes, little-endian on the wire. Offsets are into a layer's address space: the
// concatenation of that layer's cache tensors on the rank concerned (see layout.h), so one layer
// number and one offset name a byte whether the cache is one tensor, a K/V pair or MLA + indexer.
// `transfer` is the short handle that stands for a TransferKey on one authenticated data
// connection; `layer` is the global layer number.
struct IpcBlock {
  std::uint64_t src_offset;
  std::uint64_t dst_offset;
  std::uint64_t length;
  std::uint32_t transfer;
  std::uint16_t layer;
};
#pragma pack(pop)

static_assert(sizeof(IpcBlock) == 30 && alignof(IpcBlock) == 1);

}  // namespace kvt
