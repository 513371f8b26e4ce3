// The cache memory of one rank: which bytes a (layer, offset) names.
//
// A layer's address space is the concatenation of its cache tensors, each at the base that the
// layout gave it. Every translation is bounds-checked: offsets come from a peer. Registered once,
// before the first transfer; afterwards read-only and safe from any thread. The owner of the
// tensors keeps them alive until the sender and the receiver that use the registry are closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
  // region, or one in other memory than those before, naming the layer.
  void add(std::uint16_t layer, const MemoryRegion& region);

  // Calls visit(const MemorySpan&) for each piece of [offset, offset + length), in order: a run may
  // cross from one tensor into the next. False if any of it is outside or length is 0; what was
  // visited before that is then not to be used.
  template <class Visit>
  bool visit(std::uint16_t layer, std::uint64_t offset, std::uint64_t length, Visit&& visit) const;

  // The device that all of it is on; none: host memory. Mixed memory is refused by add().
  std::optional<int> device() const { return device_; }
  std::span<const MemoryRegion> regions(std::uint16_t layer) const;  // by layer_offset
  std::size_t num_layers() const { return num_layers_; }             // registered ones
  std::size_t layer_limit() const { return layers_.size(); }         // above the highest number
  std::uint64_t total_bytes() const { return total_bytes_; }

 private:
  std::vector<std::vector<MemoryRegion>> layers_;  // index: global layer number
  std::size_t num_layers_ = 0;
  std::uint64_t total_bytes_ = 0;
  std::optional<int> device_;
};

template <class Visit>
bool MemoryRegistry::visit(std::uint16_t layer, std::uint64_t offset, std::uint64_t length,
                           Visit&& visit) const {
  if (layer >= layers_.size() || length == 0) return false;
  for (const MemoryRegion& r : layers_[layer]) {  // one to three tensors: a scan beats a search
    if (offset < r.layer_offset) return false;    // a hole before this tensor
    const std::uint64_t inside = offset - r.layer_offset;
    if (inside >= r.extent_bytes) continue;
    const std::uint64_t n = length < r.extent_bytes - inside ? length : r.extent_bytes - inside;
    visit(MemorySpan{r.address + inside, n, r.kind, r.device});
    offset += n;
    length -= n;
    if (length == 0) return true;
  }
  return false;
}

class RankCache;

// The memory of a rank's cache, layer by layer as its layout lists the tensors.
MemoryRegistry registry_of(const RankCache& cache);

}  // namespace kvt
