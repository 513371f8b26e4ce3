// As much of msgpack as news needs: bounded reading without allocation, and appending.
//
// Reading is a cursor over bytes that somebody else owns. Every read checks the type, the bound
// that the caller gives and the bytes that are left, and throws Error(BAD_REQUEST) naming the
// field; the cursor then stays where it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvt/code.h"
#include "kvt/ids.h"

namespace kvt::msgpack {

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : rest_(bytes) {}

  bool at_end() const { return rest_.empty(); }
  std::size_t remaining() const { return rest_.size(); }

  // Number of elements, which follow; at most `max`.
  std::size_t array(const char* field, std::size_t max);
  std::size_t map(const char* field, std::size_t max);  // pairs
  std::uint64_t uint(const char* field, std::uint64_t max = UINT64_MAX);
  std::int64_t integer(const char* field);
  bool boolean(const char* field);
  // Valid as long as the bytes under the reader.
  std::string_view str(const char* field, std::size_t max_bytes);
  std::span<const std::uint8_t> bin(const char* field, std::size_t max_bytes);
  bool is_nil() const { return !rest_.empty() && rest_[0] == 0xC0; }

  template <class Id>
  Id id16(const char* field) {
    const Reader before = *this;
    const auto bytes = bin(field, 16);
    if (bytes.size() != 16) {
      *this = before;
      fail(field, "16 bytes");
    }
    return Id::from(bytes.data());
  }
  // An array of unsigned numbers, as block lists and ranks are.
  std::vector<std::uint32_t> uint32s(const char* field, std::size_t max);

  // One value of any type, however nested; returns its bytes.
  std::span<const std::uint8_t> skip(const char* field);

  // Throws BAD_REQUEST "FIELD: expected WHAT".
  [[noreturn]] static void fail(const char* field, const std::string& expected);

 private:
  std::uint64_t take_be(const char* field, std::size_t at, std::size_t bytes) const;
  std::span<const std::uint8_t> payload(const char* field, std::size_t header, std::size_t size);

  std::span<const std::uint8_t> rest_;
};

class Writer {
 public:
  void array(std::size_t n) { header(n, 0x90, 15, 0xDC); }
  void map(std::size_t n) { header(n, 0x80, 15, 0xDE); }
  void uint(std::uint64_t value);
  void boolean(bool value) { bytes_.push_back(value ? 0xC3 : 0xC2); }
  void nil() { bytes_.push_back(0xC0); }
  void str(std::string_view text);
  void bin(std::span<const std::uint8_t> data);
  template <class Tag>
  void id16(const Id16<Tag>& id) {
    bin(id.bytes);
  }
  // Bytes that are packed already.
  void raw(std::span<const std::uint8_t> packed) {
    bytes_.insert(bytes_.end(), packed.begin(), packed.end());
  }

  const std::vector<std::uint8_t>& bytes() const { return bytes_; }
  std::vector<std::uint8_t> take() { return std::move(bytes_); }

 private:
  void header(std::size_t n, std::uint8_t fix, std::size_t fix_max, std::uint8_t wide16);

  std::vector<std::uint8_t> bytes_;
};

}  // namespace kvt::msgpack
