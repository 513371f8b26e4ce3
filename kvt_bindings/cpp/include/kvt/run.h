// One contiguous piece of a plan, without the transfer and layer that an IpcBlock adds.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace kvt {

// Offsets are into the layer address spaces of the sending and the receiving rank (see layout.h).
struct Run {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t length = 0;

  bool operator==(const Run&) const = default;
};

// Computed once and shared, unchanged, by all layers of the same layout.
using Runs = std::vector<Run>;
using SharedRuns = std::shared_ptr<const Runs>;

}  // namespace kvt
