#include "strip.h"

namespace kvt::strips {
namespace {

// Bound on one part's runs (24 bytes each) so that a peer's odd layout cannot exhaust memory;
// 128k tokens x 16 heads x K and V, all of them apart, still fit.
constexpr std::uint64_t kMaxRuns = 1ull << 23;

// The first `tokens` tokens need this many entries.
void check_length(const std::vector<std::uint32_t>& list, std::uint64_t tokens,
                  std::uint32_t block_tokens, const char* side) {
  const std::uint64_t blocks = tokens / block_tokens + (tokens % block_tokens != 0 ? 1 : 0);
  if (list.size() < blocks) {
    bad(std::string(side) + " block list has " + std::to_string(list.size()) + " blocks of " +
        std::to_string(block_tokens) + " tokens, token " + std::to_string(tokens) + " needs " +
        std::to_string(blocks));
  }
}

[[noreturn]] void missing(std::uint64_t token) {
  bad("the target wants token " + std::to_string(token) + ", whose source block is gone");
}

// Appends runs, joining each to the one before it where both sides continue.
class Emitter {
 public:
  explicit Emitter(std::vector<Run>& runs) : runs_(runs) {}

  void emit(std::uint64_t src, std::uint64_t dst, std::uint64_t length) {
    if (!runs_.empty()) {
      Run& last = runs_.back();
      if (last.src_offset + last.length == src && last.dst_offset + last.length == dst) {
        last.length += length;
        return;
      }
    }
    runs_.push_back({src, dst, length});
  }

 private:
  std::vector<Run>& runs_;
};

// Within a segment of n tokens: a contiguous run, repeated along what could not be folded into it.
struct Inner {
  std::uint64_t tokens = 0;
  std::uint64_t run = 0;
  std::uint64_t repeats = 1;
  std::vector<PairAxis> axes;  // outermost first
};

void outermost_first(std::vector<PairAxis>& axes) {
  std::stable_sort(axes.begin(), axes.end(), [](const PairAxis& a, const PairAxis& b) {
    return a.src_stride > b.src_stride;
  });
}

Inner fold(const Strip& strip, std::vector<PairAxis> axes, std::uint64_t tokens) {
  Inner inner;
  inner.tokens = tokens;
  inner.run = strip.item_bytes;
  if (tokens > 1) axes.push_back({tokens, strip.src.token_stride, strip.dst.token_stride});
  for (bool folded = true; folded;) {
    folded = false;
    for (auto it = axes.begin(); it != axes.end(); ++it) {
      if (it->src_stride != inner.run || it->dst_stride != inner.run) continue;
      inner.run *= it->count;
      axes.erase(it);
      folded = true;
      break;
    }
  }
  outermost_first(axes);
  for (const PairAxis& a : axes) inner.repeats *= a.count;
  inner.axes = std::move(axes);
  return inner;
}

// Calls f(src_add, dst_add) for every index of `axes`, the last axis fastest.
template <class F>
void each_index(const std::vector<PairAxis>& axes, std::size_t from, std::uint64_t src,
                std::uint64_t dst, F&& f) {
  if (from == axes.size()) {
    f(src, dst);
    return;
  }
  const PairAxis& a = axes[from];
  for (std::uint64_t i = 0; i < a.count; ++i) {
    each_index(axes, from + 1, src + i * a.src_stride, dst + i * a.dst_stride, f);
  }
}

}  // namespace

void bad(const std::string& what) {
  throw Error(Code::kBadRequest, "plan: " + what);
}

Segments token_segments(const Strip& s, const std::vector<std::uint32_t>& src,
                        const std::vector<std::uint32_t>& dst, TokenRange range) {
  const std::uint32_t src_size = s.src.block_tokens;
  const std::uint32_t dst_size = s.dst.block_tokens;
  check_length(src, range.end, src_size, "source");
  check_length(dst, range.end, dst_size, "target");
  Segments out;
  out.list.reserve((range.end - range.first) / std::min(src_size, dst_size) + 2);
  std::uint64_t si = range.first / src_size;
  std::uint64_t di = range.first / dst_size;
  auto st = static_cast<std::uint32_t>(range.first % src_size);
  auto dt = static_cast<std::uint32_t>(range.first % dst_size);
  for (std::uint64_t token = range.first; token < range.end;) {
    const auto n = static_cast<std::uint32_t>(
        std::min<std::uint64_t>({src_size - st, dst_size - dt, range.end - token}));
    if (dst[di] != kNoBlock) {
      if (src[si] == kNoBlock) missing(token);
      out.add({src[si], st, dst[di], dt, n});
    }
    token += n;
    if ((st += n) == src_size) st = 0, ++si;
    if ((dt += n) == dst_size) dt = 0, ++di;
  }
  return out;
}

Segments cell_segments(const Strip& s, const std::vector<std::uint32_t>& src,
                       const std::vector<std::uint32_t>& dst, TokenRange range, bool last) {
  const std::uint32_t size = s.src.block_tokens;  // the same on both sides
  const std::uint64_t end = range.end / size + (last && range.end % size != 0 ? 1 : 0);
  check_length(src, end * size, size, "source");
  check_length(dst, end * size, size, "target");
  Segments out;
  for (std::uint64_t i = range.first / size; i < end; ++i) {
    if (dst[i] == kNoBlock) continue;
    if (src[i] == kNoBlock) missing(i * size);
    out.add({src[i], 0, dst[i], 0, 1});
  }
  return out;
}

Segments state_segments(const std::vector<std::uint32_t>& src,
                        const std::vector<std::uint32_t>& dst, bool last) {
  Segments out;
  if (!last) return out;
  if (src.empty() || dst.empty()) bad("no slot for the request's state");
  if (dst.back() == kNoBlock) return out;
  if (src.back() == kNoBlock) bad("the source's state slot is gone");
  out.add({src.back(), 0, dst.back(), 0, 1});
  return out;
}

void emit_strip(const Strip& strip, const Segments& segments, std::vector<Run>& runs) {
  if (segments.list.empty()) return;
  if (segments.max_src_block >= strip.src.num_blocks) {
    bad("source block " + std::to_string(segments.max_src_block) + " of " +
        std::to_string(strip.src.num_blocks));
  }
  if (segments.max_dst_block >= strip.dst.num_blocks) {
    bad("target block " + std::to_string(segments.max_dst_block) + " of " +
        std::to_string(strip.dst.num_blocks));
  }
  // Dimensions outside the block dimension are walked outside the blocks, so that runs come in
  // the order of the source's addresses and neighbouring blocks join.
  std::vector<PairAxis> outer;
  std::vector<PairAxis> rest;
  for (const PairAxis& a : strip.axes) {
    if (a.count == 1) continue;
    const bool outside = strip.src.num_blocks > 1 && a.src_stride > strip.src.block_stride;
    (outside ? outer : rest).push_back(a);
  }
  outermost_first(outer);
  std::uint64_t outer_repeats = 1;
  for (const PairAxis& a : outer) outer_repeats *= a.count;

  std::vector<Inner> inners;  // by segment length: few differ
  const auto inner_of = [&](std::uint64_t tokens) -> const Inner& {
    for (const Inner& i : inners) {
      if (i.tokens == tokens) return i;
    }
    return inners.emplace_back(fold(strip, rest, tokens));
  };
  std::uint64_t wanted = 0;
  for (const Segment& s : segments.list) wanted += inner_of(s.tokens).repeats;
  if (wanted > kMaxRuns || outer_repeats > kMaxRuns / std::max<std::uint64_t>(wanted, 1) ||
      runs.size() + wanted * outer_repeats > kMaxRuns) {
    bad("the layouts share no runs worth sending: more than " + std::to_string(kMaxRuns) +
        " pieces");
  }
  runs.reserve(runs.size() + wanted * outer_repeats);

  Emitter out(runs);
  const std::uint64_t sbs = strip.src.block_stride;
  const std::uint64_t dbs = strip.dst.block_stride;
  const std::uint64_t sts = strip.src.token_stride;
  const std::uint64_t dts = strip.dst.token_stride;
  each_index(outer, 0, strip.src.base, strip.dst.base, [&](std::uint64_t sb, std::uint64_t db) {
    const Inner* inner = nullptr;
    for (const Segment& s : segments.list) {
      if (inner == nullptr || inner->tokens != s.tokens) inner = &inner_of(s.tokens);
      const std::uint64_t src = sb + s.src_block * sbs + s.src_token * sts;
      const std::uint64_t dst = db + s.dst_block * dbs + s.dst_token * dts;
      if (inner->axes.empty()) {
        out.emit(src, dst, inner->run);
      } else {
        each_index(inner->axes, 0, src, dst,
                   [&](std::uint64_t a, std::uint64_t b) { out.emit(a, b, inner->run); });
      }
    }
  });
}

void finish(std::vector<Run>& runs) {
  const auto by_source = [](const Run& a, const Run& b) {
    return std::tie(a.src_offset, a.dst_offset) < std::tie(b.src_offset, b.dst_offset);
  };
  if (std::is_sorted(runs.begin(), runs.end(), by_source)) return;
  std::sort(runs.begin(), runs.end(), by_source);
  std::vector<Run> joined;
  joined.reserve(runs.size());
  Emitter out(joined);
  for (const Run& r : runs) out.emit(r.src_offset, r.dst_offset, r.length);
  runs = std::move(joined);
}

}  // namespace kvt::strips
