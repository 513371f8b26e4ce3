#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "kvt/layout.h"
#include "kvt/planner.h"
#include "kvt/rank_cache.h"

using namespace kvt;

namespace {

constexpr std::uint64_t kItem = 2;
constexpr std::uint64_t kDim = 4;

// (BLOCK, KV, TOKEN, HEAD, DIM) if `tokens_first`, else (BLOCK, KV, HEAD, TOKEN, DIM).
View kv_view(std::uint64_t blocks, std::uint64_t tokens, std::uint64_t heads,
             std::uint32_t heads_total, bool tokens_first) {
  View v;
  v.name = "kv";
  v.dtype = "bfloat16";
  v.item_bytes = kItem;
  v.heads_total = heads_total;
  const std::uint64_t cell = kDim * kItem;
  v.dim = {kDim, kItem};
  v.head = {heads, tokens_first ? cell : tokens * cell};
  v.token = {tokens, tokens_first ? heads * cell : cell};
  v.kv = {2, tokens * heads * cell};
  v.block = {blocks, 2 * tokens * heads * cell};
  return v;
}

Layout layout(std::uint32_t tp, std::uint32_t heads_total, std::uint32_t block_tokens,
              bool tokens_first, std::uint64_t blocks = 64, std::uint16_t layers = 4) {
  Layout l;
  l.model = "m";
  l.tp_size = tp;
  l.groups = {{block_tokens}};
  const std::uint64_t local = heads_total >= tp ? heads_total / tp : 1;
  const View v = kv_view(blocks, block_tokens, local, heads_total, tokens_first);
  l.patterns = {{{blocks * v.block.stride_bytes}, {v}}};
  for (std::uint16_t i = 0; i < layers; ++i) l.layers.push_back({i, 0, 0, 0});
  l.validate();
  return l;
}

std::shared_ptr<const Layout> shared(Layout l) {
  return std::make_shared<const Layout>(std::move(l));
}

std::string refusal(const Layout& l) {
  try {
    l.validate();
  } catch (const Error& e) {
    CHECK(e.code() == Code::kBadRequest);
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(consecutive_blocks_become_one_run) {
  const PairPlanner p(shared(layout(1, 2, 4, true)), shared(layout(1, 2, 4, true)));
  const Plan plan = p.plan(0, 0, {{5, 6, 7}}, {{10, 11, 12}}, {0, 12}, true);
  REQUIRE(plan.parts.size() == 1);
  CHECK_EQ(plan.parts[0].layers.size(), 4u);
  const std::uint64_t block = 2 * 4 * 2 * kDim * kItem;
  REQUIRE(plan.parts[0].runs.size() == 1);
  CHECK(plan.parts[0].runs[0] == (Run{5 * block, 10 * block, 3 * block}));
  CHECK_EQ(plan.total_bytes(), 4 * 3 * block);
}

TEST(blocks_listed_backwards_join_too) {
  const PairPlanner p(shared(layout(1, 2, 4, true)), shared(layout(1, 2, 4, true)));
  const Plan plan = p.plan(0, 0, {{7, 6, 5}}, {{12, 11, 10}}, {0, 12}, true);
  CHECK_EQ(plan.parts[0].runs.size(), 1u);
}

TEST(heads_split_over_ranks) {
  // Two source ranks with two heads each to one target rank with four, and back.
  const auto two = shared(layout(2, 4, 4, false));
  const auto one = shared(layout(1, 4, 4, false));
  const PairPlanner down(two, one);
  CHECK(down.sources_of(0) == (std::vector<std::uint32_t>{0, 1}));
  CHECK(down.targets_of(1) == (std::vector<std::uint32_t>{0}));
  const Plan plan = down.plan(1, 0, {{3}}, {{8}}, {0, 4}, true);
  const std::uint64_t head = 4 * kDim * kItem;
  REQUIRE(plan.parts[0].runs.size() == 2);  // K and V: heads are contiguous on both sides
  CHECK(plan.parts[0].runs[0] == (Run{3 * 4 * head, 8 * 8 * head + 2 * head, 2 * head}));
  const PairPlanner up(one, two);
  CHECK(up.targets_of(0) == (std::vector<std::uint32_t>{0, 1}));
}

TEST(replicas_send_once) {
  // One KV head on four source ranks.
  const auto four = shared(layout(4, 1, 4, true));
  const auto one = shared(layout(1, 1, 4, true));
  const auto two = shared(layout(2, 1, 4, true));
  const auto eight = shared(layout(8, 1, 4, true));
  CHECK(PairPlanner(four, one).sources_of(0) == (std::vector<std::uint32_t>{0}));
  CHECK(PairPlanner(four, two).sources_of(1) == (std::vector<std::uint32_t>{2}));
  CHECK(PairPlanner(four, four).sources_of(3) == (std::vector<std::uint32_t>{3}));
  CHECK(PairPlanner(four, eight).sources_of(7) == (std::vector<std::uint32_t>{3}));
  CHECK(PairPlanner(one, four).targets_of(0) == (std::vector<std::uint32_t>{0, 1, 2, 3}));
}

TEST(no_block_on_the_target_is_not_wanted) {
  const PairPlanner p(shared(layout(1, 2, 4, true)), shared(layout(1, 2, 4, true)));
  const Plan plan = p.plan(0, 0, {{kNoBlock, 6}}, {{kNoBlock, 9}}, {0, 8}, true);
  CHECK_EQ(plan.parts[0].bytes, 128u);
  CHECK_THROWS(Error, p.plan(0, 0, {{kNoBlock, 6}}, {{8, 9}}, {0, 8}, true));
}

TEST(bad_requests_are_named) {
  const PairPlanner p(shared(layout(1, 2, 4, true)), shared(layout(1, 2, 4, true)));
  const auto why = [&](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      CHECK(e.code() == Code::kBadRequest);
      return e.what();
    }
    return "";
  };
  CHECK(has(why([&] { (void)p.plan(0, 0, {{1}}, {{1, 2}}, {0, 8}, true); }), "source block list"));
  CHECK(
      has(why([&] { (void)p.plan(0, 0, {{1, 64}}, {{1, 2}}, {0, 8}, true); }), "source block 64"));
  CHECK(
      has(why([&] { (void)p.plan(0, 0, {{1, 2}}, {{1, 64}}, {0, 8}, true); }), "target block 64"));
  CHECK(has(why([&] { (void)p.plan(1, 0, {{1}}, {{1}}, {0, 4}, true); }), "source rank 1"));
  CHECK(has(why([&] { (void)p.plan(0, 0, {}, {{1}}, {0, 4}, true); }), "0 block lists"));
  CHECK(has(why([&] { (void)p.plan(0, 0, {{1}}, {{1}}, {4, 0}, true); }), "token range"));
  CHECK(has(why([&] { (void)p.expected(0, 0, {{3, 3}}, {0, 8}); }), "listed twice"));
  CHECK(p.expected(0, 0, {{3}}, {2, 2}).parts.empty());
}

TEST(impossible_pairs_name_both_values) {
  const Layout a = layout(1, 4, 4, true);
  Layout b = a;
  b.model = "n";
  b.scales = "s1";
  b.patterns[0].views[0].dtype = "float8_e4m3fn";
  b.layers.pop_back();
  const auto reasons = incompatibilities(a, b);
  REQUIRE(reasons.size() == 4);
  CHECK_EQ(reasons[0], "model: source has \"m\", target has \"n\"");
  CHECK_EQ(reasons[1], "KV scales: source has \"\", target has \"s1\"");
  CHECK(has(reasons[2], "bfloat16") && has(reasons[2], "float8_e4m3fn"));
  CHECK(has(reasons[3], "{3}"));
  CHECK_THROWS(Error, PairPlanner(shared(a), shared(b)));
  CHECK(incompatibilities(a, layout(2, 4, 8, false)).empty());
}

TEST(cells_need_the_same_kernel_and_block_size) {
  const auto cell = [](std::uint32_t block_tokens, const char* kernel) {
    Layout l = layout(1, 2, block_tokens, true);
    View& v = l.patterns[0].views[0];
    v.granularity = Granularity::kCell;
    v.cell = kernel;
    v.token = {1, 0};
    v.dim = {64, kItem};
    v.head = {2, 128};
    v.kv = {1, 0};
    v.block = {64, 256};
    l.patterns[0].tensor_bytes = {64 * 256};
    l.validate();
    return l;
  };
  CHECK(incompatibilities(cell(4, "amx"), cell(4, "amx")).empty());
  CHECK(has(incompatibilities(cell(4, "amx"), cell(4, "avx2")).at(0), "\"avx2\""));
  CHECK(has(incompatibilities(cell(4, "amx"), cell(8, "amx")).at(0), "block size"));
  const PairPlanner p(shared(cell(4, "amx")), shared(cell(4, "amx")));
  CHECK_THROWS(Error, p.expected(0, 0, {{1, 2}}, {2, 8}));  // cannot begin inside a cell
}

TEST(layouts_are_validated) {
  Layout l = layout(2, 4, 4, true);
  l.patterns[0].views[0].head.size = 3;
  CHECK(has(refusal(l), "3 heads on a rank, want 2 of 4"));
  l = layout(2, 4, 4, true);
  l.patterns[0].tensor_bytes[0] -= 1;
  CHECK(has(refusal(l), "not within its tensor"));
  l = layout(2, 4, 4, true);
  l.patterns[0].views[0].token.stride_bytes -= 1;
  CHECK(has(refusal(l), "overlaps"));
  l = layout(2, 4, 4, true);
  l.patterns[0].views[0].heads_total = 3;
  CHECK(has(refusal(l), "do not divide"));
  l = layout(2, 4, 4, true);
  l.groups[0].block_tokens = 8;
  CHECK(has(refusal(l), "its group has 8"));
  l = layout(2, 4, 4, true);
  l.layers[2].layer = 1;
  CHECK(has(refusal(l), "ascending"));
  l = layout(2, 4, 4, true);
  l.patterns[0].views[0].block.stride_bytes = ~0ull;
  CHECK(has(refusal(l), "too far"));
}

TEST(bytes_there_and_back) {
  Layout l = layout(2, 4, 4, true, 64, 70);
  l.layers[7].group = 1;
  l.groups.push_back({4});
  const auto bytes = l.serialize();
  CHECK(bytes.size() < 200);  // layers are runs
  CHECK(*Layout::parse(bytes) == l);
  CHECK_EQ(Layout::parse(bytes)->fingerprint(), l.fingerprint());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    CHECK_THROWS(Error, Layout::parse(std::span(bytes).first(n)));
  }
}

TEST(stages_merge_or_say_why_not) {
  Layout a = layout(1, 2, 4, true);
  a.pp_size = 2;
  Layout b = a;
  for (LayerEntry& e : b.layers) e.layer = static_cast<std::uint16_t>(e.layer + 4), e.stage = 1;
  const std::vector<std::shared_ptr<const Layout>> both = {shared(a), shared(b)};
  const Layout merged = merge_stages(both);
  CHECK_EQ(merged.layers.size(), 8u);
  CHECK_EQ(merged.patterns.size(), 1u);
  b.layers[0].layer = 3;
  const std::vector<std::shared_ptr<const Layout>> clash = {shared(a), shared(b)};
  CHECK_THROWS(Error, merge_stages(clash));
  // A pair with other pipeline ranks: only those that share layers exchange bytes.
  const PairPlanner p(shared(merged), shared([] {
                        Layout whole = layout(1, 2, 4, true, 64, 8);
                        return whole;
                      }()));
  CHECK(p.sources_of(0) == (std::vector<std::uint32_t>{0, 1}));
  CHECK_EQ(p.plan(1, 0, {{1}}, {{2}}, {0, 4}, true).parts[0].layers.front(), 4u);
}

TEST(rank_memory_resolves_across_tensors) {
  std::vector<std::uint8_t> k(64);
  std::vector<std::uint8_t> v(32);
  Layout l;
  l.model = "m";
  l.groups = {{1}};
  View a;
  a.name = "latent";
  a.dtype = "uint8";
  a.dim = {4, 1};
  a.block = {16, 4};
  View b = a;
  b.name = "indexer";
  b.tensor = 1;
  b.dim = {2, 1};
  b.block = {16, 2};
  l.patterns = {{{64, 32}, {a, b}}};
  l.layers = {{5, 0, 0, 0}};
  l.validate();
  const RankCache cache(shared(l), 0, {{5, {{k.data(), 64}, {v.data(), 32}}}});
  std::vector<std::pair<std::uint8_t*, std::uint64_t>> got;
  const auto visit = [&](std::uint8_t* p, std::uint64_t n) { got.emplace_back(p, n); };
  CHECK(cache.resolve(5, 60, 8, visit));
  REQUIRE(got.size() == 2);
  CHECK(got[0].first == k.data() + 60 && got[0].second == 4);
  CHECK(got[1].first == v.data() && got[1].second == 4);
  got.clear();
  CHECK(!cache.resolve(5, 90, 7, visit));
  CHECK(!cache.resolve(5, ~0ull, 2, visit));
  CHECK(!cache.resolve(4, 0, 1, visit));
  CHECK(got.empty());
  CHECK_THROWS(Error, RankCache(shared(l), 0, {{5, {{k.data(), 64}}}}));
  CHECK_THROWS(Error, RankCache(shared(l), 0, {}));
  CHECK_THROWS(Error, RankCache(shared(l), 1, {}));
}

TEST(planners_are_shared_and_bounded) {
  PlannerCache cache(2);
  const auto a = shared(layout(1, 4, 4, true));
  const auto b = shared(layout(2, 4, 4, true));
  const auto first = cache.get(a, b);
  CHECK(cache.get(shared(layout(1, 4, 4, true)), b) == first);
  (void)cache.get(b, a);
  (void)cache.get(a, a);
  CHECK(cache.get(a, b) != first);  // it was the least recently used
}
