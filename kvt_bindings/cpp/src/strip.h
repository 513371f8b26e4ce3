// Inside the planner: from block lists to segments, from segments to runs. See planner.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvt/planner.h"

namespace kvt::strips {

[[noreturn]] void bad(const std::string& what);  // throws Error(BAD_REQUEST)

// A dimension that both sides share, walked in step.
struct PairAxis {
  std::uint64_t count = 1;
  std::uint64_t src_stride = 0;
  std::uint64_t dst_stride = 0;
};

// One side's way from a block id and a token in it to an offset.
struct Side {
  std::uint64_t base = 0;  // of what this strip moves, in the layer's address space
  std::uint64_t block_stride = 0;
  std::uint64_t num_blocks = 0;
  std::uint64_t token_stride = 0;
  std::uint32_t block_tokens = 1;
  std::uint16_t group = 0;
};

// What moves between one source view and one target view for one pair of ranks.
struct Strip {
  Granularity granularity = Granularity::kTokens;
  std::uint32_t item_bytes = 1;
  Side src, dst;
  std::array<PairAxis, 3> axes;  // KV, HEAD, DIM
};

// A stretch of tokens within one block on both sides (for cells and state: the block itself).
struct Segment {
  std::uint32_t src_block, src_token, dst_block, dst_token, tokens;

  std::uint64_t src_key() const { return std::uint64_t{src_block} << 32 | src_token; }
};

struct Segments {
  std::vector<Segment> list;  // ascending by source
  std::uint32_t max_src_block = 0;
  std::uint32_t max_dst_block = 0;

  void add(const Segment& s) {
    max_src_block = std::max(max_src_block, s.src_block);
    max_dst_block = std::max(max_dst_block, s.dst_block);
    list.push_back(s);
  }
  void sort() {
    const auto by_source = [](const Segment& a, const Segment& b) {
      return a.src_key() < b.src_key();
    };
    if (!std::is_sorted(list.begin(), list.end(), by_source)) {
      std::sort(list.begin(), list.end(), by_source);
    }
  }
};

// Each throws BAD_REQUEST for a list that is too short or a wanted source block that is gone.
Segments token_segments(const Strip& strip, const std::vector<std::uint32_t>& src,
                        const std::vector<std::uint32_t>& dst, TokenRange range);
Segments cell_segments(const Strip& strip, const std::vector<std::uint32_t>& src,
                       const std::vector<std::uint32_t>& dst, TokenRange range, bool last);
Segments state_segments(const std::vector<std::uint32_t>& src,
                        const std::vector<std::uint32_t>& dst, bool last);

// Appends the strip's runs. Throws BAD_REQUEST for a block id out of range, and for layouts so
// far apart that the number of runs passes all bounds.
void emit_strip(const Strip& strip, const Segments& segments, std::vector<Run>& runs);

// Ascending by source and joined where possible, whatever order the strips came in.
void finish(std::vector<Run>& runs);

}  // namespace kvt::strips
