// CRC32C (Castagnoli), by the processor's instruction where it has one, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {

// The checksum of `seed`'s data followed by `size` bytes at `data`; start with seed 0. Any thread.
// Chaining holds: crc32c(b, n, crc32c(a, m)) is the checksum of a then b.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t seed = 0);

// The table-driven version that crc32c falls back to; public so that tests compare the two.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t seed = 0);

// Whether crc32c uses the processor's instruction here.
bool crc32c_is_hardware();

}  // namespace kvt
