// The memory behind one rank's layout: where each layer's tensors lie in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvt/layout.h"

namespace kvt {

struct TensorMemory {
  std::uint8_t* data = nullptr;  // a host address, or a device address if the cache is on CUDA
  std::uint64_t bytes = 0;
};

// One layer's tensors in the order of its address space. The embedder keeps the memory alive.
struct LayerMemory {
  std::uint16_t layer = 0;
  std::vector<TensorMemory> tensors;
};

// Immutable; any thread.
class RankCache {
 public:
  // Throws BAD_REQUEST unless `memory` holds exactly the layers of this rank's stage, with tensors
  // of the sizes that the layout says.
  RankCache(std::shared_ptr<const Layout> layout, std::uint32_t rank,
            std::vector<LayerMemory> memory, std::optional<int> cuda_device = std::nullopt);

  const Layout& layout() const { return *layout_; }
  const std::shared_ptr<const Layout>& shared_layout() const { return layout_; }
  std::uint32_t rank() const { return rank_; }
  std::optional<int> cuda_device() const { return cuda_device_; }  // none: host memory
  bool has_layer(std::uint16_t layer) const { return find(layer) != nullptr; }

  // Calls visit(std::uint8_t* address, std::uint64_t bytes) for each piece of [offset, offset +
  // length) of the layer's address space, in order: one piece unless it crosses from one tensor to
  // the next. False, and nothing visited, if any of it is outside.
  template <class Visit>
  bool resolve(std::uint16_t layer, std::uint64_t offset, std::uint64_t length,
               Visit&& visit) const {
    const Entry* entry = find(layer);
    if (entry == nullptr || offset > entry->bytes || length > entry->bytes - offset) return false;
    for (const TensorMemory& tensor : entry->tensors) {
      if (length == 0) break;
      if (offset >= tensor.bytes) {
        offset -= tensor.bytes;
        continue;
      }
      const std::uint64_t n = length < tensor.bytes - offset ? length : tensor.bytes - offset;
      visit(tensor.data + offset, n);
      length -= n;
      offset = 0;
    }
    return true;
  }

 private:
  struct Entry {
    std::vector<TensorMemory> tensors;
    std::uint64_t bytes = 0;
  };
  const Entry* find(std::uint16_t layer) const {
    if (layer < first_layer_) return nullptr;
    const std::size_t i = static_cast<std::size_t>(layer - first_layer_);
    if (i >= entries_.size()) return nullptr;
    const Entry& entry = entries_[i];
    return entry.tensors.empty() ? nullptr : &entry;
  }

  std::shared_ptr<const Layout> layout_;
  std::uint32_t rank_;
  std::optional<int> cuda_device_;
  std::uint16_t first_layer_ = 0;
  std::vector<Entry> entries_;  // by layer - first_layer_; no tensors: not held
};

}  // namespace kvt
