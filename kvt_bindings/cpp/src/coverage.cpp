#include "coverage.h"

#include <algorithm>
#include <iterator>

namespace kvt {
namespace {

bool before(const Interval& a, const Interval& b) {
  return a.offset < b.offset;
}

std::string show(const Interval& i) {
  return "[" + std::to_string(i.offset) + ", " + std::to_string(i.end()) + ")";
}

}  // namespace

std::uint64_t total_bytes(const Intervals& intervals) {
  std::uint64_t sum = 0;
  for (const Interval& i : intervals) sum += i.length;
  return sum;
}

void merge_adjacent(Intervals* intervals) {
  std::size_t out = 0;
  for (std::size_t i = 0; i < intervals->size(); ++i) {
    const Interval next = (*intervals)[i];
    if (out > 0 && (*intervals)[out - 1].end() == next.offset) {
      (*intervals)[out - 1].length += next.length;
    } else {
      (*intervals)[out++] = next;
    }
  }
  intervals->resize(out);
}

bool DescriptorCheck::same_as_last(std::span<const IpcBlock> blocks, const Runs& expected) const {
  if (&expected != last_expected_ || blocks.size() != last_raw_.size()) return false;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].dst_offset != last_raw_[i].offset || blocks[i].length != last_raw_[i].length) {
      return false;
    }
  }
  return true;
}

const Intervals* DescriptorCheck::check(std::span<const IpcBlock> blocks, const Runs& expected,
                                        std::string* why) {
  if (same_as_last(blocks, expected)) return &proven_;
  last_expected_ = nullptr;  // holds only after the proof
  last_raw_.clear();
  last_raw_.reserve(blocks.size());
  for (const IpcBlock& b : blocks) last_raw_.push_back({b.dst_offset, b.length});
  proven_ = last_raw_;
  if (!std::is_sorted(proven_.begin(), proven_.end(), before)) {
    std::sort(proven_.begin(), proven_.end(), before);
  }
  std::size_t at = 0;
  std::uint64_t last_end = 0;
  for (const Interval& i : proven_) {
    if (i.length > UINT64_MAX - i.offset) {
      *why = "descriptor wraps around";
      return nullptr;
    }
    if (i.offset < last_end) {
      *why = "descriptors overlap at " + show(i);
      return nullptr;
    }
    last_end = i.end();
    while (at < expected.size() && expected[at].dst_offset + expected[at].length <= i.offset) ++at;
    // Touching runs of the plan may be crossed: a descriptor can join what the plan lists apart.
    std::uint64_t covered = i.offset;
    for (std::size_t k = at; covered < i.end(); ++k) {
      if (k >= expected.size() || expected[k].dst_offset > covered) {
        *why = "descriptor " + show(i) + " lies outside the granted ranges";
        return nullptr;
      }
      covered = expected[k].dst_offset + expected[k].length;
    }
  }
  merge_adjacent(&proven_);
  last_expected_ = &expected;
  return &proven_;
}

LayerCoverage::Overlap LayerCoverage::overlap(const Intervals& intervals) const {
  if (accepted_.empty()) return Overlap::kNone;
  bool any_inside = false;
  bool any_outside = false;
  auto at = accepted_.begin();
  for (const Interval& i : intervals) {
    while (at != accepted_.end() && at->end() <= i.offset) ++at;
    if (at == accepted_.end() || at->offset >= i.end()) {
      any_outside = true;
    } else if (at->offset <= i.offset && at->end() >= i.end()) {
      any_inside = true;
    } else {
      return Overlap::kPartly;
    }
  }
  if (any_inside && any_outside) return Overlap::kPartly;
  return any_inside ? Overlap::kInside : Overlap::kNone;
}

void LayerCoverage::add_pending(const Intervals& intervals) {
  pending_bytes_ += total_bytes(intervals);
  if (accepted_.empty()) {
    accepted_ = intervals;
    return;
  }
  Intervals merged;
  merged.reserve(accepted_.size() + intervals.size());
  std::merge(accepted_.begin(), accepted_.end(), intervals.begin(), intervals.end(),
             std::back_inserter(merged), before);
  merge_adjacent(&merged);
  accepted_ = std::move(merged);
}

void LayerCoverage::commit() {
  committed_bytes_ += pending_bytes_;
  pending_bytes_ = 0;
}

}  // namespace kvt
