// One planner for any pair of layouts: which ranks exchange bytes, and exactly which.
//
// For every byte of the target's cache exactly one source rank is chosen, by a rule that both sides
// compute alone: among the n source ranks that hold a head, and the m target ranks that want it,
// target j is fed by source j * n / m. So replicated KV (MLA, or fewer heads than ranks) goes to
// each target once.
//
// Example, sender:    PairPlanner p(my_layout, their_layout);
//                     Plan plan = p.plan(my_rank, r, src_blocks, dst_blocks, {0, 1024}, true);
//                     for (auto& part : plan.parts) for (layer : part.layers) send(layer,
//                     part.runs);
//          receiver:  Plan want = p.expected(their_rank, my_rank, dst_blocks, {0, 1024});
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "kvt/layout.h"

namespace kvt {

// A block-list entry that stands for no block: on the target, tokens that are not wanted (outside a
// sliding window); on the source, tokens that it does not have, which is an error if wanted.
inline constexpr std::uint32_t kNoBlock = 0xFFFFFFFFu;

// Block ids from token 0 of the request, one list per group of the layout concerned. For a group
// whose layers hold per-request state the slot is the list's last entry.
using BlockLists = std::vector<std::vector<std::uint32_t>>;

struct TokenRange {
  std::uint64_t first = 0;
  std::uint64_t end = 0;  // exclusive

  bool operator==(const TokenRange&) const = default;
};

// One contiguous piece; offsets in the layer's address space on each side.
struct Run {
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t length = 0;

  bool operator==(const Run&) const = default;
};

// The same runs hold for each of `layers`. Runs are as long as possible (no two of them could be
// joined) and ascend by src_offset (by dst_offset in an `expected` plan).
struct PlanPart {
  std::vector<std::uint16_t> layers;  // ascending
  std::vector<Run> runs;
  std::uint64_t bytes = 0;  // of one layer
};

struct Plan {
  std::vector<PlanPart> parts;  // every layer is in at most one; layers without bytes in none

  std::uint64_t total_bytes() const;
  // nullptr: no byte of this layer goes between these two ranks for this range.
  const PlanPart* find(std::uint16_t layer) const;
};

// Thread-safe; what does not depend on blocks and ranges is computed once per pair of ranks.
class PairPlanner {
 public:
  // Throws Error(INCOMPATIBLE), see check_compatible. Both layouts have been validated.
  PairPlanner(std::shared_ptr<const Layout> source, std::shared_ptr<const Layout> target);
  ~PairPlanner();

  const Layout& source() const { return *source_; }
  const Layout& target() const { return *target_; }

  // Ranks that exchange bytes with this one, ascending. Throws BAD_REQUEST for an unknown rank.
  std::vector<std::uint32_t> sources_of(std::uint32_t target_rank) const;
  std::vector<std::uint32_t> targets_of(std::uint32_t source_rank) const;

  // What moves from one rank to another for tokens [first, end). `last` adds what goes with the
  // request's last token: per-request state, and a cell block that is only partly filled. The
  // ranges of a transfer's sends follow one another without gap, and only the final one is `last`
  // (it may be empty); then their plans together cover each byte of expected() once.
  // Throws BAD_REQUEST: unknown rank, a list too short or an id out of range, a wanted source
  // block that is kNoBlock, first > end.
  Plan plan(std::uint32_t source_rank, std::uint32_t target_rank, const BlockLists& source_blocks,
            const BlockLists& target_blocks, TokenRange tokens, bool last) const;

  // Where the bytes of a whole transfer (its sends up to and with the last) land on the target
  // rank, from one source rank; src_offset is 0. No range overlaps another. Throws BAD_REQUEST as
  // plan(), and where a whole transfer cannot be: two ranges overlap (a block listed twice), or it
  // begins inside a cell block. An empty token range expects nothing.
  Plan expected(std::uint32_t source_rank, std::uint32_t target_rank,
                const BlockLists& target_blocks, TokenRange tokens) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled(std::uint32_t source_rank,
                                           std::uint32_t target_rank) const;

  std::shared_ptr<const Layout> source_;
  std::shared_ptr<const Layout> target_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::uint64_t, std::shared_ptr<const Compiled>> cache_;
};

// Shared planners by pair of fingerprints, so that connections between the same two instances, and
// reconnections, compute once. Bounded: the least recently used goes. Thread-safe.
class PlannerCache {
 public:
  explicit PlannerCache(std::size_t max_pairs = 64) : max_pairs_(max_pairs) {}

  // Throws as PairPlanner's constructor.
  std::shared_ptr<const PairPlanner> get(const std::shared_ptr<const Layout>& source,
                                         const std::shared_ptr<const Layout>& target);

 private:
  struct Entry {
    std::uint64_t source_fingerprint;
    std::uint64_t target_fingerprint;
    std::shared_ptr<const PairPlanner> planner;
  };
  const std::size_t max_pairs_;
  std::mutex mutex_;
  std::vector<Entry> entries_;  // most recently used last
};

}  // namespace kvt
