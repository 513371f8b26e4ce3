// One connection of a news channel: frames in and out of a socket, without waiting. The channel's
// thread only.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fd.h"
#include "kvt/code.h"

namespace kvt::news {

using Clock = std::chrono::steady_clock;

// What ends a connection: code and reason go to Python, and to the peer if `tell`.
struct Lost {
  Code code;
  std::string detail;
  bool tell = false;
};

class Connection {
 public:
  using OnFrame = std::function<void(std::uint32_t head, std::span<const std::uint8_t> body)>;

  explicit Connection(Fd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  bool wants_to_write() const { return written_ < out_.size(); }
  Clock::time_point last_sent() const { return sent_; }
  Clock::time_point last_received() const { return received_; }

  // Takes what has arrived and calls `on_frame` for each whole frame. Throws Lost if the socket
  // broke, Error(BAD_REQUEST) for a frame that is too long, and what on_frame throws. An orderly
  // end is reported by is_over() instead, after the frames before it.
  void read(const OnFrame& on_frame);
  bool is_over() const { return is_over_; }

  // Queues a frame; write() sends as much as goes now. Throws Lost if the socket broke.
  void queue(std::uint32_t head, std::span<const std::uint8_t> body);
  void write();

 private:
  void take_frames(const OnFrame& on_frame);

  Fd fd_;
  bool is_over_ = false;
  std::vector<std::uint8_t> in_;
  std::vector<std::uint8_t> out_;
  std::size_t written_ = 0;
  Clock::time_point sent_ = Clock::now();
  Clock::time_point received_ = Clock::now();
};

}  // namespace kvt::news
