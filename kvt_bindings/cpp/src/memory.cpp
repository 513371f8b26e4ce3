#include "kvt/memory.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kvt/code.h"
#include "kvt/rank_cache.h"

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
  const bool is_device = region.kind == MemoryKind::kDevice;
  if (num_layers_ > 0 &&
      (is_device != device_.has_value() || (is_device && *device_ != region.device))) {
    refuse("not in the same memory as the layers before");
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
  if (is_device) device_ = region.device;
  regions.insert(after, region);
}

std::span<const MemoryRegion> MemoryRegistry::regions(std::uint16_t layer) const {
  if (layer >= layers_.size()) return {};
  return layers_[layer];
}

MemoryRegistry registry_of(const RankCache& cache) {
  MemoryRegistry registry;
  const Layout& layout = cache.layout();
  for (const LayerEntry& entry : layout.layers) {
    if (!cache.has_layer(entry.layer)) continue;
    std::uint64_t offset = 0;
    cache.resolve(entry.layer, 0, layout.pattern_of(entry).total_bytes(),
                  [&](std::uint8_t* data, std::uint64_t bytes) {
                    MemoryRegion region;
                    region.layer_offset = offset;
                    region.extent_bytes = bytes;
                    region.address = reinterpret_cast<std::uint64_t>(data);
                    if (cache.cuda_device()) {
                      region.kind = MemoryKind::kDevice;
                      region.device = *cache.cuda_device();
                    }
                    registry.add(entry.layer, region);
                    offset += bytes;
                  });
  }
  return registry;
}

}  // namespace kvt
