#include "kvt/rank_cache.h"

#include <string>
#include <utility>

namespace kvt {

RankCache::RankCache(std::shared_ptr<const Layout> layout, std::uint32_t rank,
                     std::vector<LayerMemory> memory, std::optional<int> cuda_device)
    : layout_(std::move(layout)), rank_(rank), cuda_device_(cuda_device) {
  const auto bad = [](const std::string& what) {
    throw Error(Code::kBadRequest, "rank cache: " + what);
  };
  if (rank >= layout_->num_ranks()) {
    bad("rank " + std::to_string(rank) + " of " + std::to_string(layout_->num_ranks()));
  }
  std::uint32_t held = 0;
  std::uint16_t end = 0;
  first_layer_ = 0xFFFF;
  for (const LayerEntry& e : layout_->layers) {
    if (e.stage != layout_->pp_rank(rank)) continue;
    ++held;
    if (e.layer < first_layer_) first_layer_ = e.layer;
    end = e.layer;
  }
  if (held == 0) bad("rank " + std::to_string(rank) + " holds no layer");
  entries_.resize(static_cast<std::size_t>(end - first_layer_) + 1);
  for (LayerMemory& m : memory) {
    const std::string where = "layer " + std::to_string(m.layer);
    const LayerEntry* e = layout_->find(m.layer);
    if (e == nullptr || e->stage != layout_->pp_rank(rank)) {
      bad(where + " is not held by rank " + std::to_string(rank));
    }
    const Pattern& pattern = layout_->pattern_of(*e);
    if (m.tensors.size() != pattern.tensor_bytes.size()) {
      bad(where + " has " + std::to_string(m.tensors.size()) + " tensors, layout says " +
          std::to_string(pattern.tensor_bytes.size()));
    }
    for (std::size_t i = 0; i < m.tensors.size(); ++i) {
      if (m.tensors[i].bytes != pattern.tensor_bytes[i] || m.tensors[i].data == nullptr) {
        bad(where + " tensor " + std::to_string(i) + " has " + std::to_string(m.tensors[i].bytes) +
            " bytes, layout says " + std::to_string(pattern.tensor_bytes[i]));
      }
    }
    Entry& entry = entries_[static_cast<std::size_t>(m.layer - first_layer_)];
    if (!entry.tensors.empty()) bad(where + " is given twice");
    entry.tensors = std::move(m.tensors);
    entry.bytes = pattern.total_bytes();
    --held;
  }
  if (held != 0) bad(std::to_string(held) + " layers of the rank have no memory");
}

}  // namespace kvt
