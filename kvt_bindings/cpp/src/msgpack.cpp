#include "kvt/msgpack.h"

#include "kvt/bytes.h"

namespace kvt::msgpack {

void Reader::fail(const char* field, const std::string& expected) {
  throw Error(Code::kBadRequest, std::string(field) + ": expected " + expected);
}

std::uint64_t Reader::take_be(const char* field, std::size_t at, std::size_t bytes) const {
  if (rest_.size() < at + bytes) fail(field, "more bytes");
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | rest_[at + i];
  return value;
}

// The `size` bytes after a header of `header` bytes, and moves past them.
std::span<const std::uint8_t> Reader::payload(const char* field, std::size_t header,
                                              std::size_t size) {
  if (rest_.size() < header || rest_.size() - header < size) fail(field, "more bytes");
  const auto out = rest_.subspan(header, size);
  rest_ = rest_.subspan(header + size);
  return out;
}

std::size_t Reader::array(const char* field, std::size_t max) {
  const std::uint64_t lead = take_be(field, 0, 1);
  std::uint64_t n = 0;
  std::size_t header = 1;
  if (lead >= 0x90 && lead <= 0x9F) {
    n = lead & 15;
  } else if (lead == 0xDC) {
    n = take_be(field, 1, 2), header = 3;
  } else if (lead == 0xDD) {
    n = take_be(field, 1, 4), header = 5;
  } else {
    fail(field, "an array");
  }
  if (n > max) fail(field, "at most " + std::to_string(max) + " elements");
  if (n > rest_.size() - header) fail(field, "more bytes");  // each element has one at least
  rest_ = rest_.subspan(header);
  return n;
}

std::size_t Reader::map(const char* field, std::size_t max) {
  const std::uint64_t lead = take_be(field, 0, 1);
  std::uint64_t n = 0;
  std::size_t header = 1;
  if (lead >= 0x80 && lead <= 0x8F) {
    n = lead & 15;
  } else if (lead == 0xDE) {
    n = take_be(field, 1, 2), header = 3;
  } else if (lead == 0xDF) {
    n = take_be(field, 1, 4), header = 5;
  } else {
    fail(field, "a map");
  }
  if (n > max) fail(field, "at most " + std::to_string(max) + " pairs");
  if (2 * n > rest_.size() - header) fail(field, "more bytes");
  rest_ = rest_.subspan(header);
  return n;
}

std::uint64_t Reader::uint(const char* field, std::uint64_t max) {
  const std::uint64_t lead = take_be(field, 0, 1);
  std::uint64_t value = lead;
  std::size_t bytes = 0;
  if (lead >= 0xCC && lead <= 0xCF) {
    bytes = std::size_t{1} << (lead - 0xCC);
    value = take_be(field, 1, bytes);
  } else if (lead >= 0xD0 && lead <= 0xD3) {  // a signed form of a number that is not negative
    bytes = std::size_t{1} << (lead - 0xD0);
    value = take_be(field, 1, bytes);
    if ((value >> (8 * bytes - 1) & 1) != 0) fail(field, "a number that is not negative");
  } else if (lead > 0x7F) {
    fail(field, "a number that is not negative");
  }
  if (value > max) fail(field, "a number up to " + std::to_string(max));
  rest_ = rest_.subspan(1 + bytes);
  return value;
}

std::int64_t Reader::integer(const char* field) {
  const std::uint64_t lead = take_be(field, 0, 1);
  if (lead >= 0xE0) {
    rest_ = rest_.subspan(1);
    return static_cast<std::int8_t>(lead);
  }
  if (lead >= 0xD0 && lead <= 0xD3) {
    const std::size_t bytes = std::size_t{1} << (lead - 0xD0);
    const std::uint64_t value = take_be(field, 1, bytes);
    rest_ = rest_.subspan(1 + bytes);
    const unsigned up = 64 - 8 * static_cast<unsigned>(bytes);
    return static_cast<std::int64_t>(value << up) >> up;
  }
  return static_cast<std::int64_t>(uint(field, INT64_MAX));
}

bool Reader::boolean(const char* field) {
  const std::uint64_t lead = take_be(field, 0, 1);
  if (lead != 0xC2 && lead != 0xC3) fail(field, "true or false");
  rest_ = rest_.subspan(1);
  return lead == 0xC3;
}

std::string_view Reader::str(const char* field, std::size_t max_bytes) {
  const std::uint64_t lead = take_be(field, 0, 1);
  std::uint64_t size = lead & 31;
  std::size_t header = 1;
  if (lead >= 0xD9 && lead <= 0xDB) {
    const std::size_t bytes = std::size_t{1} << (lead - 0xD9);
    size = take_be(field, 1, bytes);
    header += bytes;
  } else if (lead < 0xA0 || lead > 0xBF) {
    fail(field, "text");
  }
  if (size > max_bytes) fail(field, "at most " + std::to_string(max_bytes) + " bytes of text");
  const auto data = payload(field, header, size);
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

std::span<const std::uint8_t> Reader::bin(const char* field, std::size_t max_bytes) {
  const std::uint64_t lead = take_be(field, 0, 1);
  if (lead < 0xC4 || lead > 0xC6) fail(field, "bytes");
  const std::size_t bytes = std::size_t{1} << (lead - 0xC4);
  const std::uint64_t size = take_be(field, 1, bytes);
  if (size > max_bytes) fail(field, "at most " + std::to_string(max_bytes) + " bytes");
  return payload(field, 1 + bytes, size);
}

std::vector<std::uint32_t> Reader::uint32s(const char* field, std::size_t max) {
  const Reader before = *this;
  try {
    std::vector<std::uint32_t> out(array(field, max));
    for (std::uint32_t& value : out) value = static_cast<std::uint32_t>(uint(field, UINT32_MAX));
    return out;
  } catch (...) {
    *this = before;
    throw;
  }
}

std::span<const std::uint8_t> Reader::skip(const char* field) {
  const auto start = rest_;
  // Iterative, so that nesting cannot exhaust the stack; every pending value needs a byte.
  std::uint64_t pending = 1;
  std::size_t at = 0;
  while (pending > 0) {
    --pending;
    const std::uint64_t lead = take_be(field, at, 1);
    std::uint64_t header = 1;
    std::uint64_t size = 0;
    std::uint64_t children = 0;
    const auto sized = [&](std::size_t bytes) {
      header += bytes;
      return take_be(field, at + 1, bytes);
    };
    if (lead <= 0x7F || lead >= 0xE0 || lead == 0xC0 || lead == 0xC2 || lead == 0xC3) {
    } else if (lead <= 0x8F) {
      children = 2 * (lead & 15);
    } else if (lead <= 0x9F) {
      children = lead & 15;
    } else if (lead <= 0xBF) {
      size = lead & 31;
    } else if (lead >= 0xC4 && lead <= 0xC6) {
      size = sized(std::size_t{1} << (lead - 0xC4));
    } else if (lead >= 0xC7 && lead <= 0xC9) {
      size = sized(std::size_t{1} << (lead - 0xC7)) + 1;
    } else if (lead == 0xCA) {
      size = 4;
    } else if (lead == 0xCB) {
      size = 8;
    } else if (lead >= 0xCC && lead <= 0xD3) {
      size = std::uint64_t{1} << (lead & 3);
    } else if (lead >= 0xD4 && lead <= 0xD8) {
      size = (std::uint64_t{1} << (lead - 0xD4)) + 1;
    } else if (lead >= 0xD9 && lead <= 0xDB) {
      size = sized(std::size_t{1} << (lead - 0xD9));
    } else if (lead == 0xDC || lead == 0xDD) {
      children = sized(lead == 0xDC ? 2 : 4);
    } else if (lead == 0xDE || lead == 0xDF) {
      children = 2 * sized(lead == 0xDE ? 2 : 4);
    } else {
      fail(field, "a msgpack value");
    }
    const std::uint64_t left = rest_.size() - at;
    if (header + size > left || children + pending > left - header - size) {
      fail(field, "more bytes");
    }
    at += header + size;
    pending += children;
  }
  rest_ = rest_.subspan(at);
  return start.first(at);
}

void Writer::header(std::size_t n, std::uint8_t fix, std::size_t fix_max, std::uint8_t wide16) {
  if (n <= fix_max) {
    bytes_.push_back(static_cast<std::uint8_t>(fix | n));
  } else if (n <= 0xFFFF) {
    bytes_.push_back(wide16);
    append_be(bytes_, static_cast<std::uint16_t>(n));
  } else {
    bytes_.push_back(static_cast<std::uint8_t>(wide16 + 1));
    append_be(bytes_, static_cast<std::uint32_t>(n));
  }
}

void Writer::uint(std::uint64_t value) {
  if (value <= 0x7F) {
    bytes_.push_back(static_cast<std::uint8_t>(value));
  } else if (value <= 0xFF) {
    bytes_.push_back(0xCC);
    bytes_.push_back(static_cast<std::uint8_t>(value));
  } else if (value <= 0xFFFF) {
    bytes_.push_back(0xCD);
    append_be(bytes_, static_cast<std::uint16_t>(value));
  } else if (value <= 0xFFFFFFFF) {
    bytes_.push_back(0xCE);
    append_be(bytes_, static_cast<std::uint32_t>(value));
  } else {
    bytes_.push_back(0xCF);
    append_be(bytes_, value);
  }
}

void Writer::str(std::string_view text) {
  if (text.size() <= 31) {
    bytes_.push_back(static_cast<std::uint8_t>(0xA0 | text.size()));
  } else if (text.size() <= 0xFF) {
    bytes_.push_back(0xD9);
    bytes_.push_back(static_cast<std::uint8_t>(text.size()));
  } else if (text.size() <= 0xFFFF) {
    bytes_.push_back(0xDA);
    append_be(bytes_, static_cast<std::uint16_t>(text.size()));
  } else {
    bytes_.push_back(0xDB);
    append_be(bytes_, static_cast<std::uint32_t>(text.size()));
  }
  bytes_.insert(bytes_.end(), text.begin(), text.end());
}

void Writer::bin(std::span<const std::uint8_t> data) {
  if (data.size() <= 0xFF) {
    bytes_.push_back(0xC4);
    bytes_.push_back(static_cast<std::uint8_t>(data.size()));
  } else if (data.size() <= 0xFFFF) {
    bytes_.push_back(0xC5);
    append_be(bytes_, static_cast<std::uint16_t>(data.size()));
  } else {
    bytes_.push_back(0xC6);
    append_be(bytes_, static_cast<std::uint32_t>(data.size()));
  }
  raw(data);
}

}  // namespace kvt::msgpack
