#include <random>
#include <vector>

#include "check.h"
#include "kvt/msgpack.h"

using namespace kvt;
using msgpack::Reader;
using msgpack::Writer;

TEST(there_and_back) {
  Writer w;
  const std::uint64_t values[] = {0,     127,   128,        255,        256,
                                  65535, 65536, 0xFFFFFFFF, 1ull << 32, ~0ull};
  w.array(std::size(values));
  for (const auto v : values) w.uint(v);
  const std::string long_text(300, 'x');
  w.str("");
  w.str(long_text);
  w.boolean(true);
  w.nil();
  w.map(20);
  const auto bytes = w.take();
  Reader r(bytes);
  CHECK_EQ(r.array("a", 100), std::size(values));
  for (const auto v : values) CHECK_EQ(r.uint("v"), v);
  CHECK_EQ(r.str("s", 0), "");
  CHECK_EQ(r.str("s", 300), long_text);
  CHECK(r.boolean("b"));
  CHECK(r.is_nil());
  (void)r.skip("nil");
  CHECK_THROWS(Error, r.map("m", 100));  // 20 pairs cannot follow: nothing is left
}

TEST(bounds_are_kept_and_the_cursor_stays) {
  Writer w;
  w.uint(1000);
  const auto bytes = w.take();
  Reader r(bytes);
  CHECK_THROWS(Error, r.uint("n", 999));
  CHECK_THROWS(Error, r.str("n", 9));
  CHECK_THROWS(Error, r.bin("n", 9));
  CHECK_THROWS(Error, r.array("n", 9));
  CHECK_THROWS(Error, r.boolean("n"));
  CHECK_EQ(r.uint("n", 1000), 1000u);
  CHECK(r.at_end());
  CHECK_THROWS(Error, r.uint("n"));
  CHECK_THROWS(Error, r.skip("n"));
}

TEST(signed_forms) {
  const std::vector<std::uint8_t> bytes = {0xFF, 0xD0, 0x80, 0xD1, 0x01, 0x00, 0xD3,
                                           0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF,
                                           0xFE, 0xD2, 0,    0,    0,    5,    0xE0};
  Reader r(bytes);
  CHECK_EQ(r.integer("i"), -1);
  CHECK_EQ(r.integer("i"), -128);
  CHECK_EQ(r.integer("i"), 256);
  CHECK_EQ(r.integer("i"), -2);
  CHECK_EQ(r.uint("i"), 5u);
  CHECK_THROWS(Error, r.uint("i"));
  CHECK_EQ(r.integer("i"), -32);
}

TEST(announced_sizes_beyond_the_bytes_are_refused) {
  const std::vector<std::vector<std::uint8_t>> liars = {{0xDD, 0xFF, 0xFF, 0xFF, 0xFF},
                                                        {0xDF, 0xFF, 0xFF, 0xFF, 0xFF, 0},
                                                        {0xC6, 0xFF, 0xFF, 0xFF, 0xFF},
                                                        {0xDB, 0xFF, 0xFF, 0xFF, 0xFF},
                                                        {0x92, 0x01},
                                                        {0xC1},
                                                        {0xC9, 0xFF, 0xFF, 0xFF, 0xFF},
                                                        {0xCF, 0x00},
                                                        {0xD8, 0x00}};
  for (const auto& bytes : liars) {
    Reader r(bytes);
    CHECK_THROWS(Error, r.skip("x"));
    CHECK_EQ(r.remaining(), bytes.size());
    CHECK_THROWS(Error, r.uint32s("x", 1u << 30));
    CHECK_EQ(r.remaining(), bytes.size());
  }
}

TEST(deep_nesting_does_not_recurse) {
  std::vector<std::uint8_t> bytes(1'000'000, 0x91);
  bytes.push_back(0x01);
  Reader r(bytes);
  CHECK_EQ(r.skip("deep").size(), bytes.size());
}

TEST(noise_never_crashes) {
  std::mt19937 rng(11);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::uint8_t> bytes(rng() % 24);
    for (auto& b : bytes) b = static_cast<std::uint8_t>(rng());
    Reader r(bytes);
    try {
      while (!r.at_end()) (void)r.skip("noise");
    } catch (const Error&) {
    }
    Reader q(bytes);
    try {
      (void)q.uint32s("noise", 1000);
    } catch (const Error&) {
    }
  }
}
