#include "kvt/planner.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>

#include "strip.h"

namespace kvt {
namespace {

using strips::bad;
using strips::PairAxis;
using strips::Segments;
using strips::Side;
using strips::Strip;

const std::vector<std::uint32_t>& list_of(const BlockLists& lists, std::uint16_t group,
                                          const char* side) {
  if (group >= lists.size()) {
    bad(std::string(side) + " gives " + std::to_string(lists.size()) +
        " block lists, layer needs group " + std::to_string(group));
  }
  return lists[group];
}

// Which of the model-wide heads of `v` a TP rank holds, and how many ranks hold the same.
struct Heads {
  std::uint64_t begin, end;
  std::uint32_t replicas, replica;
};

Heads heads_of(const Layout& layout, const View& v, std::uint32_t tp) {
  Heads h{};
  h.begin = layout.head_begin(v, tp);
  h.end = h.begin + v.head.size;
  h.replicas = v.heads_total >= layout.tp_size ? 1 : layout.tp_size / v.heads_total;
  h.replica = tp % h.replicas;
  return h;
}

Side side_of(const Layout& layout, const LayerEntry& entry, const View& v, std::uint64_t kv,
             std::uint64_t head) {
  Side s;
  s.base = layout.pattern_of(entry).tensor_start(v.tensor) + v.offset +
           (kv - v.kv_begin) * (v.kv.size == 1 ? 0 : v.kv.stride_bytes) +
           head * (v.head.size == 1 ? 0 : v.head.stride_bytes);
  s.block_stride = v.block.size == 1 ? 0 : v.block.stride_bytes;
  s.num_blocks = v.block.size;
  s.token_stride = v.token.size == 1 ? 0 : v.token.stride_bytes;
  s.block_tokens = layout.groups[entry.group].block_tokens;
  s.group = entry.group;
  return s;
}

}  // namespace

struct PairPlanner::Compiled {
  struct Part {
    std::vector<std::uint16_t> layers;
    std::vector<Strip> strips;
  };
  std::vector<Part> parts;

  Compiled(const Layout& source, std::uint32_t source_rank, const Layout& target,
           std::uint32_t target_rank);

  Plan make(const BlockLists& src, const BlockLists& dst, TokenRange range, bool last,
            bool target_only) const;
};

PairPlanner::Compiled::Compiled(const Layout& source, std::uint32_t source_rank,
                                const Layout& target, std::uint32_t target_rank) {
  const std::uint32_t stp = source.tp_rank(source_rank);
  const std::uint32_t dtp = target.tp_rank(target_rank);
  using Key = std::tuple<std::uint16_t, std::uint16_t, std::uint16_t, std::uint16_t>;
  std::map<Key, std::size_t> known;
  for (const LayerEntry& d : target.layers) {
    const LayerEntry* s = source.find(d.layer);
    if (s == nullptr || d.stage != target.pp_rank(target_rank) ||
        s->stage != source.pp_rank(source_rank)) {
      continue;
    }
    const auto [it, is_new] =
        known.try_emplace({s->pattern, s->group, d.pattern, d.group}, parts.size());
    if (!is_new) {
      parts[it->second].layers.push_back(d.layer);
      continue;
    }
    Part part;
    part.layers.push_back(d.layer);
    for (const View& sv : source.pattern_of(*s).views) {
      for (const View& dv : target.pattern_of(d).views) {
        if (sv.name != dv.name) continue;
        const std::uint64_t kv0 = std::max(sv.kv_begin, dv.kv_begin);
        const std::uint64_t kv1 = std::min(sv.kv_begin + sv.kv.size, dv.kv_begin + dv.kv.size);
        const Heads sh = heads_of(source, sv, stp);
        const Heads dh = heads_of(target, dv, dtp);
        const std::uint64_t h0 = std::max(sh.begin, dh.begin);
        const std::uint64_t h1 = std::min(sh.end, dh.end);
        if (kv0 >= kv1 || h0 >= h1) continue;
        // Of the replicas that could feed this target, exactly one does.
        if (std::uint64_t{dh.replica} * sh.replicas / dh.replicas != sh.replica) continue;
        Strip strip;
        strip.granularity = dv.granularity;
        strip.item_bytes = dv.item_bytes;
        strip.src = side_of(source, *s, sv, kv0, h0 - sh.begin);
        strip.dst = side_of(target, d, dv, kv0, h0 - dh.begin);
        strip.axes = {PairAxis{kv1 - kv0, sv.kv.stride_bytes, dv.kv.stride_bytes},
                      PairAxis{h1 - h0, sv.head.stride_bytes, dv.head.stride_bytes},
                      PairAxis{dv.dim.size, sv.dim.stride_bytes, dv.dim.stride_bytes}};
        part.strips.push_back(strip);
      }
    }
    parts.push_back(std::move(part));
  }
  std::erase_if(parts, [](const Part& part) { return part.strips.empty(); });
}

Plan PairPlanner::Compiled::make(const BlockLists& src, const BlockLists& dst, TokenRange range,
                                 bool last, bool target_only) const {
  if (range.first > range.end || range.end > UINT32_MAX) {
    bad("token range " + std::to_string(range.first) + " to " + std::to_string(range.end));
  }
  Plan plan;
  using Key = std::tuple<std::uint16_t, std::uint16_t, Granularity>;
  std::map<Key, Segments> segments;  // the same for all layers and views of the groups
  for (const Part& part : parts) {
    PlanPart out;
    for (Strip strip : part.strips) {
      if (target_only) {
        strip.src = strip.dst;
        for (PairAxis& a : strip.axes) a.src_stride = a.dst_stride;
      }
      const auto [it, is_new] =
          segments.try_emplace({strip.src.group, strip.dst.group, strip.granularity});
      if (is_new) {
        const auto& d = list_of(dst, strip.dst.group, "target");
        const auto& s = target_only ? d : list_of(src, strip.src.group, "source");
        switch (strip.granularity) {
          case Granularity::kTokens:
            it->second = strips::token_segments(strip, s, d, range);
            break;
          case Granularity::kCell:
            if (target_only && range.first % strip.dst.block_tokens != 0) {
              bad("a transfer of whole blocks of " + std::to_string(strip.dst.block_tokens) +
                  " tokens cannot begin at token " + std::to_string(range.first));
            }
            it->second = strips::cell_segments(strip, s, d, range, last);
            break;
          case Granularity::kState:
            it->second = strips::state_segments(s, d, last);
            break;
        }
        it->second.sort();
      }
      strips::emit_strip(strip, it->second, out.runs);
    }
    if (out.runs.empty()) continue;
    strips::finish(out.runs);
    for (const Run& r : out.runs) out.bytes += r.length;
    out.layers = part.layers;
    plan.parts.push_back(std::move(out));
  }
  return plan;
}

std::uint64_t Plan::total_bytes() const {
  std::uint64_t total = 0;
  for (const PlanPart& p : parts) total += p.bytes * p.layers.size();
  return total;
}

const PlanPart* Plan::find(std::uint16_t layer) const {
  for (const PlanPart& p : parts) {
    if (std::binary_search(p.layers.begin(), p.layers.end(), layer)) return &p;
  }
  return nullptr;
}

PairPlanner::PairPlanner(std::shared_ptr<const Layout> source, std::shared_ptr<const Layout> target)
    : source_(std::move(source)), target_(std::move(target)) {
  check_compatible(*source_, *target_);
}

PairPlanner::~PairPlanner() = default;

std::shared_ptr<const PairPlanner::Compiled> PairPlanner::compiled(
    std::uint32_t source_rank, std::uint32_t target_rank) const {
  if (source_rank >= source_->num_ranks()) {
    bad("source rank " + std::to_string(source_rank) + " of " +
        std::to_string(source_->num_ranks()));
  }
  if (target_rank >= target_->num_ranks()) {
    bad("target rank " + std::to_string(target_rank) + " of " +
        std::to_string(target_->num_ranks()));
  }
  const std::uint64_t key = std::uint64_t{source_rank} << 32 | target_rank;
  const std::lock_guard lock(mutex_);
  auto& slot = cache_[key];
  if (!slot) slot = std::make_shared<const Compiled>(*source_, source_rank, *target_, target_rank);
  return slot;
}

std::vector<std::uint32_t> PairPlanner::sources_of(std::uint32_t target_rank) const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t r = 0; r < source_->num_ranks(); ++r) {
    if (!compiled(r, target_rank)->parts.empty()) ranks.push_back(r);
  }
  return ranks;
}

std::vector<std::uint32_t> PairPlanner::targets_of(std::uint32_t source_rank) const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t r = 0; r < target_->num_ranks(); ++r) {
    if (!compiled(source_rank, r)->parts.empty()) ranks.push_back(r);
  }
  return ranks;
}

Plan PairPlanner::plan(std::uint32_t source_rank, std::uint32_t target_rank,
                       const BlockLists& source_blocks, const BlockLists& target_blocks,
                       TokenRange tokens, bool last) const {
  return compiled(source_rank, target_rank)
      ->make(source_blocks, target_blocks, tokens, last, false);
}

Plan PairPlanner::expected(std::uint32_t source_rank, std::uint32_t target_rank,
                           const BlockLists& target_blocks, TokenRange tokens) const {
  if (tokens.first == tokens.end) return {};
  Plan plan =
      compiled(source_rank, target_rank)->make(target_blocks, target_blocks, tokens, true, true);
  for (PlanPart& part : plan.parts) {
    std::uint64_t end = 0;
    for (Run& r : part.runs) {
      if (r.dst_offset < end) bad("a target block is listed twice");
      end = r.dst_offset + r.length;
      r.src_offset = 0;
    }
  }
  return plan;
}

std::shared_ptr<const PairPlanner> PlannerCache::get(const std::shared_ptr<const Layout>& source,
                                                     const std::shared_ptr<const Layout>& target) {
  const std::uint64_t s = source->fingerprint();
  const std::uint64_t t = target->fingerprint();
  const std::lock_guard lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    // Equality, not the hash, decides: a peer chooses its bytes.
    if (it->source_fingerprint != s || it->target_fingerprint != t ||
        it->planner->source() != *source || it->planner->target() != *target) {
      continue;
    }
    std::rotate(it, it + 1, entries_.end());
    return entries_.back().planner;
  }
  auto planner = std::make_shared<const PairPlanner>(source, target);
  if (entries_.size() >= max_pairs_) entries_.erase(entries_.begin());
  entries_.push_back({s, t, planner});
  return planner;
}

}  // namespace kvt
