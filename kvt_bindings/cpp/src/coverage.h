// Which bytes of a source's slice have arrived: exact ranges, never counts. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvt/ipc_block.h"
#include "kvt/run.h"

namespace kvt {

struct Interval {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;

  std::uint64_t end() const { return offset + length; }
  bool operator==(const Interval&) const = default;
};
using Intervals = std::vector<Interval>;  // ascending, disjoint

std::uint64_t total_bytes(const Intervals& intervals);
// Joins neighbours that touch.
void merge_adjacent(Intervals* intervals);

// Turns the descriptors of one frame into destination intervals that are proven to be disjoint and
// inside `expected`. Layers alike send the same descriptors over and over, so the last proof is
// kept and reused when the next frame is the same.
class DescriptorCheck {
 public:
  // `expected`: ascending by dst_offset, disjoint (PairPlanner::expected). Must outlive the check.
  // Returns nullptr, with the reason, for a descriptor outside or two that overlap. The result is
  // valid until the next call.
  const Intervals* check(std::span<const IpcBlock> blocks, const Runs& expected, std::string* why);

 private:
  bool same_as_last(std::span<const IpcBlock> blocks, const Runs& expected) const;

  const Runs* last_expected_ = nullptr;
  Intervals last_raw_;  // in the order of the frame
  Intervals proven_;    // sorted and merged
};

// What of one layer of one source slice was accepted.
class LayerCoverage {
 public:
  enum class Overlap { kNone, kInside, kPartly };

  // How `intervals` (merged) relate to what was accepted, counting what is pending as accepted.
  Overlap overlap(const Intervals& intervals) const;

  // Adds intervals that overlap nothing so far: they count as covered only after commit().
  void add_pending(const Intervals& intervals);
  void commit();

  std::uint64_t covered_bytes() const { return committed_bytes_; }
  std::size_t num_intervals() const { return accepted_.size(); }

 private:
  Intervals accepted_;  // merged; pending included
  std::uint64_t committed_bytes_ = 0;
  std::uint64_t pending_bytes_ = 0;
};

}  // namespace kvt
