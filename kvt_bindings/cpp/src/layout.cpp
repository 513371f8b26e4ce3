#include "kvt/layout.h"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

namespace kvt {
namespace {

[[noreturn]] void bad(const std::string& what) {
  throw Error(Code::kBadRequest, "layout: " + what);
}

void check_count(const char* field, std::uint64_t value, std::uint64_t min, std::uint64_t max) {
  if (value < min || value > max) {
    bad(std::string(field) + " is " + std::to_string(value) + ", want " + std::to_string(min) +
        " to " + std::to_string(max));
  }
}

void check_text(const char* field, const std::string& text, bool required) {
  if (text.size() > kMaxNameBytes) bad(std::string(field) + " is longer than 256 bytes");
  if (required && text.empty()) bad(std::string(field) + " is empty");
}

// `count * stride`, refused when it leaves any address space.
std::uint64_t extent_of(const std::string& where, std::uint64_t count, std::uint64_t stride) {
  if (count != 0 && stride > kMaxExtent / count) bad(where + ": stride reaches too far");
  return count * stride;
}

void check_view(const View& v, const Pattern& pattern, std::uint32_t tp_size) {
  check_text("view name", v.name, true);
  check_text("view dtype", v.dtype, true);
  check_text("view cell", v.cell, false);
  const std::string where = "view " + v.name;
  if (static_cast<std::uint8_t>(v.granularity) > 2) bad(where + ": unknown granularity");
  if ((v.granularity == Granularity::kCell) == v.cell.empty()) {
    bad(where + ": a cell name is wanted for cell granularity, and only for it");
  }
  if (v.granularity != Granularity::kTokens && v.token.size != 1) {
    bad(where + ": a TOKEN dimension without token granularity");
  }
  check_count("item_bytes", v.item_bytes, 1, kMaxItemBytes);
  check_count("tensor index", v.tensor, 0, pattern.tensor_bytes.size() - 1);
  check_count("kv size", v.kv.size, 1, kMaxKv);
  check_count("kv_begin", v.kv_begin, 0, kMaxKv - v.kv.size);
  check_count("block count", v.block.size, 1, 0xFFFFFFFEu);
  check_count("token count", v.token.size, 1, 1u << 24);
  check_count("dim size", v.dim.size, 1, kMaxExtent);
  check_count("heads_total", v.heads_total, 1, kMaxHeads);
  const std::uint64_t local = std::max<std::uint64_t>(1, v.heads_total / tp_size);
  if (v.heads_total >= tp_size ? v.heads_total % tp_size != 0 : tp_size % v.heads_total != 0) {
    bad(where + ": " + std::to_string(v.heads_total) + " heads do not divide over " +
        std::to_string(tp_size) + " ranks");
  }
  if (v.head.size != local) {
    bad(where + ": " + std::to_string(v.head.size) + " heads on a rank, want " +
        std::to_string(local) + " of " + std::to_string(v.heads_total));
  }
  // Inner to outer, each stride must step over all that lies inside: then no two elements share a
  // byte, and the last element's end is the extent.
  std::array<Axis, 5> axes = {v.kv, v.block, v.token, v.head, v.dim};
  std::sort(axes.begin(), axes.end(),
            [](const Axis& a, const Axis& b) { return a.stride_bytes < b.stride_bytes; });
  std::uint64_t span = v.item_bytes;
  for (const Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (axis.stride_bytes < span) {
      bad(where + ": stride " + std::to_string(axis.stride_bytes) + " overlaps " +
          std::to_string(span) + " bytes inside");
    }
    span += extent_of(where, axis.size - 1, axis.stride_bytes);
    if (span > kMaxExtent) bad(where + ": too large");
  }
  const std::uint64_t room = pattern.tensor_bytes[v.tensor];
  if (v.offset > room || span > room - v.offset) {
    bad(where + ": bytes " + std::to_string(v.offset) + " to " + std::to_string(v.offset + span) +
        " are not within its tensor of " + std::to_string(room));
  }
}

void check_pattern(const Pattern& pattern, std::uint32_t tp_size) {
  check_count("tensors of a layer", pattern.tensor_bytes.size(), 1, kMaxTensors);
  check_count("views of a layer", pattern.views.size(), 1, kMaxViews);
  std::uint64_t total = 0;
  for (const std::uint64_t bytes : pattern.tensor_bytes) {
    check_count("tensor bytes", bytes, 1, kMaxExtent);
    total += bytes;
    check_count("layer bytes", total, 1, kMaxExtent);
  }
  for (std::size_t i = 0; i < pattern.views.size(); ++i) {
    const View& v = pattern.views[i];
    check_view(v, pattern, tp_size);
    for (std::size_t j = 0; j < i; ++j) {
      const View& w = pattern.views[j];
      if (v.name != w.name) continue;
      if (v.kv_begin < w.kv_begin + w.kv.size && w.kv_begin < v.kv_begin + v.kv.size) {
        bad("view " + v.name + ": two views hold the same KV index");
      }
    }
  }
}

}  // namespace

std::uint64_t Pattern::total_bytes() const {
  return tensor_start(static_cast<std::uint32_t>(tensor_bytes.size()));
}

std::uint64_t Pattern::tensor_start(std::uint32_t i) const {
  std::uint64_t start = 0;
  for (std::uint32_t k = 0; k < i; ++k) start += tensor_bytes[k];
  return start;
}

std::uint32_t Layout::head_begin(const View& view, std::uint32_t tp) const {
  if (view.heads_total >= tp_size) return tp * (view.heads_total / tp_size);
  return tp / (tp_size / view.heads_total);
}

const LayerEntry* Layout::find(std::uint16_t layer) const {
  const auto it =
      std::lower_bound(layers.begin(), layers.end(), layer,
                       [](const LayerEntry& e, std::uint16_t n) { return e.layer < n; });
  return it != layers.end() && it->layer == layer ? &*it : nullptr;
}

void Layout::validate() const {
  check_text("model", model, true);
  check_text("scales", scales, false);
  check_count("tp_size", tp_size, 1, kMaxRanks);
  check_count("pp_size", pp_size, 1, kMaxRanks);
  check_count("number of ranks", std::uint64_t{tp_size} * pp_size, 1, kMaxRanks);
  check_count("number of groups", groups.size(), 1, kMaxGroups);
  check_count("number of patterns", patterns.size(), 1, kMaxPatterns);
  check_count("number of layers", layers.size(), 1, kMaxLayers);
  for (const Group& g : groups) check_count("block_tokens", g.block_tokens, 1, 1u << 24);
  for (const Pattern& p : patterns) check_pattern(p, tp_size);
  std::set<std::pair<std::uint16_t, std::uint16_t>> seen;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerEntry& e = layers[i];
    if (i > 0 && layers[i - 1].layer >= e.layer) bad("layers are not in ascending order");
    check_count("layer's group", e.group, 0, groups.size() - 1);
    check_count("layer's pattern", e.pattern, 0, patterns.size() - 1);
    check_count("layer's stage", e.stage, 0, pp_size - 1);
    if (!seen.emplace(e.pattern, e.group).second) continue;
    const std::uint32_t block_tokens = groups[e.group].block_tokens;
    for (const View& v : patterns[e.pattern].views) {
      if (v.granularity == Granularity::kTokens && v.token.size != block_tokens) {
        bad("view " + v.name + ": " + std::to_string(v.token.size) +
            " tokens in a block, but its group has " + std::to_string(block_tokens));
      }
    }
  }
}

Layout merge_stages(std::span<const std::shared_ptr<const Layout>> stages) {
  if (stages.empty()) throw Error(Code::kBadRequest, "layout: no stages to merge");
  Layout merged = *stages[0];
  const auto differ = [](const std::string& what, const std::string& a, const std::string& b) {
    throw Error(Code::kIncompatible, "layout: stages differ: " + what + " " + a + " and " + b);
  };
  for (const auto& stage : stages.subspan(1)) {
    if (stage->model != merged.model) differ("model", merged.model, stage->model);
    if (stage->scales != merged.scales) differ("scales", merged.scales, stage->scales);
    if (stage->tp_size != merged.tp_size) {
      differ("tp_size", std::to_string(merged.tp_size), std::to_string(stage->tp_size));
    }
    if (stage->pp_size != merged.pp_size) {
      differ("pp_size", std::to_string(merged.pp_size), std::to_string(stage->pp_size));
    }
    if (stage->groups != merged.groups) {
      differ("groups", std::to_string(merged.groups.size()) + " groups",
             std::to_string(stage->groups.size()) + " groups of other block sizes");
    }
    for (LayerEntry e : stage->layers) {
      const Pattern& pattern = stage->pattern_of(e);
      if (const LayerEntry* held = merged.find(e.layer)) {
        if (held->stage == e.stage && held->group == e.group &&
            merged.pattern_of(*held) == pattern) {
          continue;  // another rank of the same stage
        }
        differ("layer " + std::to_string(e.layer), "in stage " + std::to_string(held->stage),
               "in stage " + std::to_string(e.stage) + " (or of another shape)");
      }
      const auto it = std::find(merged.patterns.begin(), merged.patterns.end(), pattern);
      e.pattern = static_cast<std::uint16_t>(it - merged.patterns.begin());
      if (it == merged.patterns.end()) merged.patterns.push_back(pattern);
      merged.layers.insert(
          std::upper_bound(merged.layers.begin(), merged.layers.end(), e,
                           [](const auto& a, const auto& b) { return a.layer < b.layer; }),
          e);
    }
  }
  merged.validate();
  return merged;
}

namespace {

std::string quoted(const std::string& text) {
  return "\"" + text + "\"";
}

std::string describe(const View& v) {
  static constexpr const char* kKinds[] = {"tokens", "cell", "state"};
  std::string text = kKinds[static_cast<int>(v.granularity)];
  if (v.granularity == Granularity::kCell) text += " " + quoted(v.cell);
  return text + ", " + v.dtype + ", " + std::to_string(v.dim.size) + " x " +
         std::to_string(v.item_bytes) + " bytes, " + std::to_string(v.heads_total) + " heads";
}

bool same_meaning(const View& a, const View& b) {
  return a.granularity == b.granularity && a.cell == b.cell && a.dtype == b.dtype &&
         a.dim.size == b.dim.size && a.item_bytes == b.item_bytes && a.heads_total == b.heads_total;
}

const View* find_view(const Pattern& p, const std::string& name, std::uint32_t kv) {
  for (const View& v : p.views) {
    if (v.name == name && kv >= v.kv_begin && kv < v.kv_begin + v.kv.size) return &v;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> incompatibilities(const Layout& source, const Layout& target) {
  std::vector<std::string> reasons;
  const auto differ = [&](const std::string& what, const std::string& a, const std::string& b) {
    reasons.push_back(what + ": source has " + a + ", target has " + b);
  };
  if (source.model != target.model) differ("model", quoted(source.model), quoted(target.model));
  if (source.scales != target.scales) {
    differ("KV scales", quoted(source.scales), quoted(target.scales));
  }
  std::string only_source;
  std::string only_target;
  const auto add = [](std::string& list, std::uint16_t layer) {
    if (list.size() < 40) list += (list.empty() ? "" : ",") + std::to_string(layer);
  };
  using Key = std::tuple<std::uint16_t, std::uint16_t, std::uint16_t, std::uint16_t>;
  std::set<Key> seen;
  for (const LayerEntry& s : source.layers) {
    const LayerEntry* t = target.find(s.layer);
    if (t == nullptr) {
      add(only_source, s.layer);
      continue;
    }
    if (!seen.emplace(s.pattern, s.group, t->pattern, t->group).second) continue;
    const Pattern& sp = source.pattern_of(s);
    const Pattern& tp = target.pattern_of(*t);
    const std::string where = "layer " + std::to_string(s.layer) + " ";
    const auto one_way = [&](const Pattern& from, const Pattern& to, bool forward) {
      for (const View& v : from.views) {
        for (std::uint32_t kv = v.kv_begin; kv < v.kv_begin + v.kv.size; ++kv) {
          const View* w = find_view(to, v.name, kv);
          const std::string what = where + v.name + "[" + std::to_string(kv) + "]";
          if (w == nullptr) {
            if (forward) differ(what, describe(v), "none");
            if (!forward) differ(what, "none", describe(v));
            break;
          }
          if (!forward) continue;
          if (!same_meaning(v, *w)) {
            differ(what, describe(v), describe(*w));
            break;
          }
          if (v.granularity == Granularity::kCell &&
              source.groups[s.group].block_tokens != target.groups[t->group].block_tokens) {
            differ(what + " block size", std::to_string(source.groups[s.group].block_tokens),
                   std::to_string(target.groups[t->group].block_tokens));
            break;
          }
        }
      }
    };
    one_way(sp, tp, true);
    one_way(tp, sp, false);
  }
  for (const LayerEntry& t : target.layers) {
    if (source.find(t.layer) == nullptr) add(only_target, t.layer);
  }
  if (!only_source.empty() || !only_target.empty()) {
    differ("layers held by one side only", "{" + only_source + "}", "{" + only_target + "}");
  }
  return reasons;
}

void check_compatible(const Layout& source, const Layout& target) {
  const auto reasons = incompatibilities(source, target);
  if (reasons.empty()) return;
  std::string text = "KV layouts do not fit: ";
  for (std::size_t i = 0; i < reasons.size() && text.size() < 800; ++i) {
    text += (i == 0 ? "" : "; ") + reasons[i];
  }
  throw Error(Code::kIncompatible, text);
}

}  // namespace kvt
