#include <algorithm>
#include <random>
#include <set>

#include "check.h"
#include "coverage.h"

using namespace kvt;

namespace {

IpcBlock block(std::uint64_t offset, std::uint64_t length) {
  return {0, offset, length, 1, 0};
}

Runs expected(std::initializer_list<Interval> list) {
  Runs runs;
  for (const Interval& i : list) runs.push_back({0, i.offset, i.length});
  return runs;
}

}  // namespace

TEST(check_accepts_what_tiles_the_expected_ranges) {
  const Runs want = expected({{0, 10}, {10, 10}, {40, 20}});
  DescriptorCheck check;
  std::string why;
  // Any order, split or joined over touching ranges.
  const std::vector<IpcBlock> blocks = {block(50, 10), block(5, 10), block(40, 10)};
  const Intervals* got = check.check(blocks, want, &why);
  REQUIRE(got != nullptr);
  CHECK((*got == Intervals{{5, 10}, {40, 20}}));
  CHECK(check.check(blocks, want, &why) == got);  // the kept proof
}

TEST(check_refuses) {
  const Runs want = expected({{10, 10}, {40, 20}});
  const auto refused = [&](std::vector<IpcBlock> blocks) {
    DescriptorCheck check;
    std::string why;
    return check.check(blocks, want, &why) == nullptr && !why.empty();
  };
  CHECK(refused({block(9, 2)}));
  CHECK(refused({block(19, 2)}));
  CHECK(refused({block(15, 30)}));  // over the hole
  CHECK(refused({block(20, 5)}));   // in the hole
  CHECK(refused({block(60, 1)}));   // behind
  CHECK(refused({block(0, 5)}));    // before
  CHECK(refused({block(40, 10), block(49, 5)}));
  CHECK(refused({block(40, 10), block(40, 10)}));
  CHECK(refused({block(~0ull - 3, 10)}));  // wraps
  CHECK(refused({block(10, ~0ull)}));
}

TEST(a_kept_proof_is_only_for_the_same_descriptors) {
  const Runs want = expected({{0, 100}});
  const Runs other = expected({{0, 50}});
  DescriptorCheck check;
  std::string why;
  CHECK(check.check(std::vector{block(0, 60)}, want, &why) != nullptr);
  CHECK(check.check(std::vector{block(0, 60)}, other, &why) == nullptr);
  CHECK(check.check(std::vector{block(60, 60)}, want, &why) == nullptr);
  CHECK(check.check(std::vector{block(60, 60)}, want, &why) == nullptr);
}

TEST(coverage_counts_after_commit_and_once) {
  LayerCoverage layer;
  using Overlap = LayerCoverage::Overlap;
  CHECK(layer.overlap({{0, 10}}) == Overlap::kNone);
  layer.add_pending({{0, 10}, {20, 10}});
  CHECK_EQ(layer.covered_bytes(), 0u);
  CHECK(layer.overlap({{0, 10}}) == Overlap::kInside);  // pending counts against repeats
  layer.commit();
  CHECK_EQ(layer.covered_bytes(), 20u);
  CHECK(layer.overlap({{10, 10}}) == Overlap::kNone);
  CHECK(layer.overlap({{9, 2}}) == Overlap::kPartly);
  CHECK(layer.overlap({{2, 3}, {25, 5}}) == Overlap::kInside);
  CHECK(layer.overlap({{2, 3}, {12, 3}}) == Overlap::kPartly);
  CHECK(layer.overlap({{5, 20}}) == Overlap::kPartly);
  layer.add_pending({{10, 10}});
  layer.commit();
  CHECK_EQ(layer.covered_bytes(), 30u);
  CHECK(layer.overlap({{0, 30}}) == Overlap::kInside);
}

TEST(coverage_against_a_set_of_bytes) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    LayerCoverage layer;
    std::set<std::uint64_t> have;
    for (int step = 0; step < 20; ++step) {
      Intervals chunk;
      std::uint64_t at = 0;
      while (at < 60) {
        at += random() % 12 + 1;
        const std::uint64_t length = random() % 5 + 1;
        chunk.push_back({at, length});
        at += length;
      }
      merge_adjacent(&chunk);
      std::size_t inside = 0;
      for (const Interval& i : chunk) {
        for (std::uint64_t b = i.offset; b < i.end(); ++b) inside += have.count(b);
      }
      const auto overlap = layer.overlap(chunk);
      if (inside == 0) {
        CHECK(overlap == LayerCoverage::Overlap::kNone);
        layer.add_pending(chunk);
        layer.commit();
        for (const Interval& i : chunk) {
          for (std::uint64_t b = i.offset; b < i.end(); ++b) have.insert(b);
        }
      } else if (inside == total_bytes(chunk)) {
        CHECK(overlap == LayerCoverage::Overlap::kInside);
      } else {
        CHECK(overlap == LayerCoverage::Overlap::kPartly);
      }
      CHECK_EQ(layer.covered_bytes(), have.size());
    }
  }
}
