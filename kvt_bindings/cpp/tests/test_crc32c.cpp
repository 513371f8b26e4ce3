#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kvt/crc32c.h"

// RFC 3720 appendix B.4, and the usual check value.
TEST(known_vectors) {
  for (auto* f : {&kvt::crc32c, &kvt::crc32c_portable}) {
    CHECK_EQ(f("123456789", 9, 0), 0xE3069283u);
    CHECK_EQ(f("", 0, 0), 0u);
    std::vector<std::uint8_t> b(32, 0);
    CHECK_EQ(f(b.data(), 32, 0), 0x8A9136AAu);
    b.assign(32, 0xff);
    CHECK_EQ(f(b.data(), 32, 0), 0x62A8AB43u);
    for (std::size_t i = 0; i < 32; ++i) b[i] = static_cast<std::uint8_t>(i);
    CHECK_EQ(f(b.data(), 32, 0), 0x46DD794Eu);
    for (std::size_t i = 0; i < 32; ++i) b[i] = static_cast<std::uint8_t>(31 - i);
    CHECK_EQ(f(b.data(), 32, 0), 0x113FDB5Cu);
  }
}

TEST(both_agree_at_every_length_and_alignment) {
  std::mt19937 rng(7);
  std::vector<std::uint8_t> data(20000);
  for (auto& b : data) b = static_cast<std::uint8_t>(rng());
  for (std::size_t n = 0; n < 200; ++n) {
    CHECK_EQ(kvt::crc32c(data.data() + n % 9, n), kvt::crc32c_portable(data.data() + n % 9, n));
  }
  for (std::size_t n = 3000; n < 19000; n += 517) {
    CHECK_EQ(kvt::crc32c(data.data() + n % 9, n), kvt::crc32c_portable(data.data() + n % 9, n));
  }
}

TEST(chains) {
  std::vector<std::uint8_t> data(9000, 0x5a);
  const auto whole = kvt::crc32c(data.data(), data.size());
  for (std::size_t cut : {0u, 1u, 8u, 3071u, 3072u, 8999u}) {
    const auto first = kvt::crc32c(data.data(), cut);
    CHECK_EQ(kvt::crc32c(data.data() + cut, data.size() - cut, first), whole);
  }
}
