#include "kvt/completion_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvt {

CompletionQueue::CompletionQueue(std::size_t max_reserved) : max_reserved_(max_reserved) {
  wake_fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) {
    throw Error(Code::kInternal, std::string("eventfd: ") + std::strerror(errno));
  }
}

CompletionQueue::~CompletionQueue() {
  ::close(wake_fd_);
}

bool CompletionQueue::reserve(std::size_t n) {
  const std::lock_guard lock(mutex_);
  if (closed_ || n > max_reserved_ - reserved_) return false;
  reserved_ += n;
  return true;
}

void CompletionQueue::release(std::size_t n) {
  const std::lock_guard lock(mutex_);
  reserved_ -= std::min(n, reserved_);
}

void CompletionQueue::push(Completion completion) {
  const std::lock_guard lock(mutex_);
  if (closed_) {
    ++stats_.dropped_after_close;
    return;
  }
  // A slot stays reserved until its completion is drained, so `items_` is bounded by it.
  if (items_.size() >= reserved_) {
    ++stats_.pushed_unreserved;
    ++reserved_;
  }
  items_.push_back(std::move(completion));
  ++stats_.pushed;
  if (!armed_) {
    armed_ = true;
    ++stats_.wakeups;
    const std::uint64_t one = 1;
    // Cannot fail: the counter is 0 or 1, and the descriptor is ours.
    (void)!::write(wake_fd_, &one, sizeof one);
  }
}

std::vector<Completion> CompletionQueue::drain(std::size_t max_items) {
  const std::lock_guard lock(mutex_);
  const std::size_t n = std::min(max_items, items_.size());
  const auto end = items_.begin() + static_cast<std::ptrdiff_t>(n);
  std::vector<Completion> out(std::make_move_iterator(items_.begin()),
                              std::make_move_iterator(end));
  items_.erase(items_.begin(), end);
  reserved_ -= std::min(n, reserved_);
  if (items_.empty() && armed_) {
    armed_ = false;
    std::uint64_t count = 0;
    (void)!::read(wake_fd_, &count, sizeof count);
  }
  return out;
}

void CompletionQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

CompletionQueue::Stats CompletionQueue::stats() const {
  const std::lock_guard lock(mutex_);
  Stats s = stats_;
  s.reserved = reserved_;
  s.queued = items_.size();
  return s;
}

}  // namespace kvt
