#include "kvt/memory.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kvt/code.h"

namespace kvt {

void MemoryRegistry::add(std::uint16_t layer, const MemoryRegion& region) {
  const auto refuse = [layer](const std::string& why) {
    throw Error(Code::kBadRequest, "memory of layer " + std::to_string(layer) + ": " + why);
  };
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  if (region.extent_bytes == 0) refuse("empty region");
  if (region.address == 0) refuse("null address");
  if (region.layer_offset > kMax - region.extent_bytes ||
      region.address > kMax - region.extent_bytes) {
    refuse("region wraps around");
  }
  if (layers_.size() <= layer) layers_.resize(layer + 1u);
  std::vector<MemoryRegion>& regions = layers_[layer];
  const auto after = std::upper_bound(
      regions.begin(), regions.end(), region.layer_offset,
      [](std::uint64_t offset, const MemoryRegion& r) { return offset < r.layer_offset; });
  if ((after != regions.end() && after->layer_offset < region.layer_end()) ||
      (after != regions.begin() && std::prev(after)->layer_end() > region.layer_offset)) {
    refuse("region at offset " + std::to_string(region.layer_offset) + " overlaps another");
  }
  num_layers_ += regions.empty() ? 1 : 0;
  total_bytes_ += region.extent_bytes;
  regions.insert(after, region);
}

bool MemoryRegistry::translate(std::uint16_t layer, std::uint64_t offset, std::uint64_t length,
                               MemorySpan* out) const {
  if (layer >= layers_.size() || length == 0) return false;
  for (const MemoryRegion& r : layers_[layer]) {  // one to three tensors: a scan beats a search
    if (offset < r.layer_offset || offset - r.layer_offset >= r.extent_bytes) continue;
    const std::uint64_t inside = offset - r.layer_offset;
    if (length > r.extent_bytes - inside) return false;
    *out = MemorySpan{r.address + inside, length, r.kind, r.device};
    return true;
  }
  return false;
}

bool MemoryRegistry::has_device(std::uint16_t layer) const {
  const auto all = regions(layer);
  return std::any_of(all.begin(), all.end(),
                     [](const MemoryRegion& r) { return r.kind == MemoryKind::kDevice; });
}

std::span<const MemoryRegion> MemoryRegistry::regions(std::uint16_t layer) const {
  if (layer >= layers_.size()) return {};
  return layers_[layer];
}

}  // namespace kvt
