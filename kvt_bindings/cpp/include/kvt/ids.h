// Identities: 16 opaque bytes each, compared whole, printed in hex.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace kvt {

template <class Tag>
struct Id16 {
  std::array<std::uint8_t, 16> bytes{};

  auto operator<=>(const Id16&) const = default;

  // `data` holds at least 16 bytes.
  static Id16 from(const void* data) {
    Id16 id;
    std::memcpy(id.bytes.data(), data, 16);
    return id;
  }

  bool is_zero() const { return *this == Id16{}; }

  std::string hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(32);
    for (const std::uint8_t b : bytes) {
      text.push_back(kDigits[b >> 4]);
      text.push_back(kDigits[b & 15]);
    }
    return text;
  }
};

// blake2b-128 of (receiver instance, receiver incarnation, request id, attempt): unique per try.
using TransferKey = Id16<struct TransferKeyTag>;
// Random at every process start.
using Incarnation = Id16<struct IncarnationTag>;
// Random per opener or acceptor of a news channel.
using StreamId = Id16<struct StreamIdTag>;

}  // namespace kvt

template <class Tag>
struct std::hash<kvt::Id16<Tag>> {
  // FNV over both halves: keys come from a socket, so the table's own limits, not the hash, bound
  // it.
  std::size_t operator()(const kvt::Id16<Tag>& id) const noexcept {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    std::memcpy(&a, id.bytes.data(), 8);
    std::memcpy(&b, id.bytes.data() + 8, 8);
    return static_cast<std::size_t>((a ^ (b * 0x9E3779B97F4A7C15ull)) * 0x100000001B3ull);
  }
};
