// Fixed-width integers to and from bytes. kvt's own wire is little-endian, msgpack is big-endian.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvt {

template <std::unsigned_integral T>
constexpr T byte_swap(T value) {
  T out = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out = static_cast<T>((out << 4 << 4) | (value & 0xff));
    value = static_cast<T>(value >> 4 >> 4);
  }
  return out;
}

template <std::unsigned_integral T>
T load_le(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return std::endian::native == std::endian::little ? value : byte_swap(value);
}

template <std::unsigned_integral T>
void store_le(void* to, T value) {
  if (std::endian::native != std::endian::little) value = byte_swap(value);
  std::memcpy(to, &value, sizeof value);
}

template <std::unsigned_integral T>
T load_be(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return std::endian::native == std::endian::big ? value : byte_swap(value);
}

template <std::unsigned_integral T>
void store_be(void* to, T value) {
  if (std::endian::native != std::endian::big) value = byte_swap(value);
  std::memcpy(to, &value, sizeof value);
}

template <std::unsigned_integral T>
void append_le(std::vector<std::uint8_t>& to, T value) {
  const std::size_t at = to.size();
  to.resize(at + sizeof value);
  store_le(to.data() + at, value);
}

template <std::unsigned_integral T>
void append_be(std::vector<std::uint8_t>& to, T value) {
  const std::size_t at = to.size();
  to.resize(at + sizeof value);
  store_be(to.data() + at, value);
}

// Four ASCII letters as the u32 whose little-endian bytes spell them on the wire.
constexpr std::uint32_t head(const char (&letters)[5]) {
  return static_cast<std::uint32_t>(static_cast<unsigned char>(letters[0])) |
         static_cast<std::uint32_t>(static_cast<unsigned char>(letters[1])) << 8 |
         static_cast<std::uint32_t>(static_cast<unsigned char>(letters[2])) << 16 |
         static_cast<std::uint32_t>(static_cast<unsigned char>(letters[3])) << 24;
}

}  // namespace kvt
