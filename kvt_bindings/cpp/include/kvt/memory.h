// The cache memory of one rank: which bytes a (layer, offset) names.
//
// A layer's address space is the concatenation of its cache tensors, each at the base that the
// layout gave it. Every translation is bounds-checked: offsets come from a peer. Registered once,
// before the first transfer; afterwards read-only and safe from any thread. The owner of the
// tensors keeps them alive until the sender and the receiver that use the registry are closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvt {

enum class MemoryKind : std::uint8_t {
  kHost = 0,    // ordinary process memory: read and written by system calls directly
  kDevice = 1,  // a CUDA device pointer: goes through staging (device_memory.h)
};

struct MemoryRegion {
  std::uint64_t layer_offset = 0;  // where this tensor begins in its layer's address space
  std::uint64_t extent_bytes = 0;
  // Host: the address. Device: the device pointer's value, never dereferenced here.
  std::uint64_t address = 0;
  MemoryKind kind = MemoryKind::kHost;
  std::int32_t device = -1;  // CUDA ordinal, for kDevice

  std::uint64_t layer_end() const { return layer_offset + extent_bytes; }
};

// A checked piece: contiguous, inside one tensor.
struct MemorySpan {
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  MemoryKind kind = MemoryKind::kHost;
  std::int32_t device = -1;

  std::byte* host() const { return reinterpret_cast<std::byte*>(address); }
};

class MemoryRegistry {
 public:
  // Adds one tensor of a layer. Throws Error(BAD_REQUEST) for an empty, wrapping or overlapping
  // region, naming the layer.
  void add(std::uint16_t layer, const MemoryRegion& region);

  // False, and `out` unchanged, unless [offset, offset + length) lies inside one tensor of the
  // layer and length > 0.
  bool translate(std::uint16_t layer, std::uint64_t offset, std::uint64_t length,
                 MemorySpan* out) const;

  // True if any tensor of the layer is device memory.
  bool has_device(std::uint16_t layer) const;
  std::span<const MemoryRegion> regions(std::uint16_t layer) const;  // by layer_offset
  std::size_t num_layers() const { return num_layers_; }             // registered ones
  std::uint64_t total_bytes() const { return total_bytes_; }

 private:
  std::vector<std::vector<MemoryRegion>> layers_;  // index: global layer number
  std::size_t num_layers_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace kvt
