// Owned descriptors and the wake-up of a thread that sits in poll().
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "kvt/code.h"

namespace kvt {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Wakes a thread that sleeps in poll(). Any thread notifies; only the first of several pays for a
// system call. The owner, in a loop: acknowledge(), look at what it may have been woken for, and
// before it sleeps ask is_pending(); when poll says that fd() is readable, drain().
class WakeUp {
 public:
  WakeUp() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_) throw Error(Code::kInternal, std::string("eventfd: ") + std::strerror(errno));
  }
  int fd() const { return fd_.get(); }

  void notify() {
    if (pending_.exchange(true)) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = write(fd_.get(), &one, sizeof one);
  }

  // True if somebody had notified since the last call.
  bool acknowledge() { return pending_.load() && pending_.exchange(false); }
  bool is_pending() const { return pending_.load(); }

  // Never the other way round: a count read here may belong to a notify() that is acknowledged
  // already, and one whose flag is still up has its look at the owner's next turn.
  void drain() {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto n = read(fd_.get(), &count, sizeof count);
  }

 private:
  Fd fd_;
  std::atomic<bool> pending_{false};
};

}  // namespace kvt
