#include "kvt/crc32c.h"

#include <array>

#include "kvt/bytes.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvt {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // Castagnoli, bit-reflected

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_tables() {
  Table t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    t[0][i] = crc;
  }
  for (std::uint32_t i = 0; i < 256; ++i) {
    for (std::size_t s = 1; s < 8; ++s) t[s][i] = (t[s - 1][i] >> 8) ^ t[0][t[s - 1][i] & 0xff];
  }
  return t;
}

constexpr Table kTables = make_tables();

// Appending zero bytes to a message is a linear map of its checksum; this one appends kStride
// of them, by byte of the checksum. It joins the three streams below.
constexpr std::size_t kStride = 1024;

constexpr std::array<std::array<std::uint32_t, 256>, 4> make_shift() {
  // Images of the 32 unit vectors under "append kStride zero bytes".
  std::array<std::uint32_t, 32> unit{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = 1u << bit;
    for (std::size_t i = 0; i < kStride; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xff];
    unit[bit] = crc;
  }
  std::array<std::array<std::uint32_t, 256>, 4> t{};
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t v = 0; v < 256; ++v) {
      std::uint32_t crc = 0;
      for (std::size_t bit = 0; bit < 8; ++bit) {
        if ((v >> bit & 1) != 0) crc ^= unit[byte * 8 + bit];
      }
      t[byte][v] = crc;
    }
  }
  return t;
}

constexpr auto kShift = make_shift();

[[maybe_unused]] std::uint32_t shift(std::uint32_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][crc >> 8 & 0xff] ^ kShift[2][crc >> 16 & 0xff] ^
         kShift[3][crc >> 24];
}

#if defined(__x86_64__)
#define KVT_CRC_TARGET __attribute__((target("sse4.2")))
KVT_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, const std::uint8_t* p) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, load_le<std::uint64_t>(p)));
}
KVT_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, std::uint8_t b) {
  return _mm_crc32_u8(crc, b);
}
bool detect() {
  return __builtin_cpu_supports("sse4.2") != 0;
}
#elif defined(__aarch64__) && defined(__linux__)
#define KVT_CRC_TARGET __attribute__((target("+crc")))
KVT_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, const std::uint8_t* p) {
  return __builtin_aarch64_crc32cx(crc, load_le<std::uint64_t>(p));
}
KVT_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, std::uint8_t b) {
  return __builtin_aarch64_crc32cb(crc, b);
}
bool detect() {
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#endif

#if defined(KVT_CRC_TARGET)
// Three independent streams hide the instruction's latency (3 cycles, one a cycle).
KVT_CRC_TARGET std::uint32_t crc32c_hardware(const void* data, std::size_t size,
                                             std::uint32_t seed) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  std::uint32_t crc = ~seed;
  while (size >= 3 * kStride) {
    std::uint32_t b = 0;
    std::uint32_t c = 0;
    for (std::size_t i = 0; i < kStride; i += 8) {
      crc = step8(crc, p + i);
      b = step8(b, p + kStride + i);
      c = step8(c, p + 2 * kStride + i);
    }
    crc = shift(shift(crc) ^ b) ^ c;
    p += 3 * kStride;
    size -= 3 * kStride;
  }
  for (; size >= 8; p += 8, size -= 8) crc = step8(crc, p);
  for (; size > 0; ++p, --size) crc = step1(crc, *p);
  return ~crc;
}
#else
bool detect() {
  return false;
}
std::uint32_t crc32c_hardware(const void* data, std::size_t size, std::uint32_t seed) {
  return crc32c_portable(data, size, seed);
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t seed) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  std::uint32_t crc = ~seed;
  for (; size >= 8; p += 8, size -= 8) {
    const std::uint64_t v = load_le<std::uint64_t>(p) ^ crc;
    crc = kTables[7][v & 0xff] ^ kTables[6][v >> 8 & 0xff] ^ kTables[5][v >> 16 & 0xff] ^
          kTables[4][v >> 24 & 0xff] ^ kTables[3][v >> 32 & 0xff] ^ kTables[2][v >> 40 & 0xff] ^
          kTables[1][v >> 48 & 0xff] ^ kTables[0][v >> 56];
  }
  for (; size > 0; ++p, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xff];
  return ~crc;
}

bool crc32c_is_hardware() {
  static const bool hardware = detect();
  return hardware;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t seed) {
  return crc32c_is_hardware() ? crc32c_hardware(data, size, seed)
                              : crc32c_portable(data, size, seed);
}

}  // namespace kvt
