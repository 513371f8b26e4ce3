#include "news_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvt/bytes.h"

namespace kvt::news {
namespace {

constexpr std::size_t kMaxBodyBytes = 4 * 1024 * 1024;  // of a frame from the scheduler
constexpr std::size_t kHeaderBytes = 8;                 // head and length
constexpr std::size_t kReadBytes = 64 * 1024;

}  // namespace

void Connection::read(const OnFrame& on_frame) {
  while (true) {
    const std::size_t at = in_.size();
    in_.resize(at + kReadBytes);
    const ssize_t n = ::recv(fd_.get(), in_.data() + at, kReadBytes, MSG_DONTWAIT);
    const int error = errno;
    in_.resize(at + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    if (n < 0 && error == EINTR) continue;
    if (n < 0 && error != EAGAIN) throw Lost{Code::kPeerLost, std::strerror(error)};
    if (n == 0) is_over_ = true;
    if (n > 0) received_ = Clock::now();
    take_frames(on_frame);
    if (n < static_cast<ssize_t>(kReadBytes)) return;
  }
}

void Connection::take_frames(const OnFrame& on_frame) {
  std::size_t at = 0;
  while (in_.size() - at >= kHeaderBytes) {
    const auto head = load_le<std::uint32_t>(in_.data() + at);
    const std::size_t size = load_le<std::uint32_t>(in_.data() + at + 4);
    if (size > kMaxBodyBytes) {
      throw Error(Code::kBadRequest, "frame of " + std::to_string(size) + " bytes");
    }
    if (in_.size() - at - kHeaderBytes < size) break;
    on_frame(head, std::span(in_).subspan(at + kHeaderBytes, size));
    at += kHeaderBytes + size;
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(at));
}

void Connection::queue(std::uint32_t head, std::span<const std::uint8_t> body) {
  append_le(out_, head);
  append_le(out_, static_cast<std::uint32_t>(body.size()));
  out_.insert(out_.end(), body.begin(), body.end());
  sent_ = Clock::now();
}

void Connection::write() {
  while (written_ < out_.size()) {
    const ssize_t n = ::send(fd_.get(), out_.data() + written_, out_.size() - written_,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) throw Lost{Code::kPeerLost, std::strerror(errno)};
    written_ += static_cast<std::size_t>(n);
  }
  out_.clear();
  written_ = 0;
}

}  // namespace kvt::news
