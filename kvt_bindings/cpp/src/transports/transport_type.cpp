#include "transports/transport_type.h"

#include <algorithm>

#include "kvt/crc32c.h"

namespace kvt {

std::span<const TransportType* const> all_transports() {
  static const TransportType* const kAll[] = {&tcp_transport(), &cma_transport()};
  return kAll;
}

const TransportType& transport_type(wire::TransportKind kind) {
  for (const TransportType* type : all_transports()) {
    if (type->kind() == kind) return *type;
  }
  throw Error(Code::kInternal, "no transport of this kind");
}

void IoCursor::clear() {
  all_.clear();
  at_ = 0;
  inside_ = 0;
  left_ = 0;
}

void IoCursor::add(std::byte* data, std::uint64_t size) {
  left_ += size;
  if (!all_.empty() &&
      static_cast<std::byte*>(all_.back().iov_base) + all_.back().iov_len == data) {
    all_.back().iov_len += size;
  } else {
    all_.push_back({data, size});
  }
}

std::span<iovec> IoCursor::next(std::size_t max_iovecs, std::uint64_t max_bytes) {
  const std::size_t count = std::min(max_iovecs, all_.size() - at_);
  window_.assign(all_.begin() + static_cast<std::ptrdiff_t>(at_),
                 all_.begin() + static_cast<std::ptrdiff_t>(at_ + count));
  if (window_.empty()) return window_;
  window_[0].iov_base = static_cast<std::byte*>(window_[0].iov_base) + inside_;
  window_[0].iov_len -= inside_;
  if (max_bytes > 0) {
    for (std::size_t i = 0; i < window_.size(); ++i) {
      if (window_[i].iov_len < max_bytes) {
        max_bytes -= window_[i].iov_len;
        continue;
      }
      window_[i].iov_len = max_bytes;
      window_.resize(i + 1);
      break;
    }
  }
  return window_;
}

void IoCursor::advance(std::uint64_t bytes) {
  left_ -= bytes;
  bytes += inside_;
  while (at_ < all_.size() && bytes >= all_[at_].iov_len) bytes -= all_[at_++].iov_len;
  inside_ = bytes;
}

std::uint32_t IoCursor::checksum(std::uint32_t crc) const {
  for (const iovec& piece : all_) crc = crc32c(piece.iov_base, piece.iov_len, crc);
  return crc;
}

std::uint32_t IoCursor::checksum_window(std::uint64_t bytes, std::uint32_t crc) const {
  for (const iovec& piece : window_) {
    if (bytes == 0) break;
    const std::uint64_t n = std::min<std::uint64_t>(bytes, piece.iov_len);
    crc = crc32c(piece.iov_base, n, crc);
    bytes -= n;
  }
  return crc;
}

}  // namespace kvt
