#include <poll.h>

#include <thread>
#include <vector>

#include "check.h"
#include "kvt/completion_queue.h"

using namespace kvt;

namespace {

bool readable(int fd, int timeout_ms = 0) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, timeout_ms) == 1;
}

Completion completion(std::uint64_t n) {
  Completion c;
  c.tokens = n;
  return c;
}

}  // namespace

TEST(a_burst_is_one_wakeup) {
  CompletionQueue q;
  REQUIRE(q.reserve(3));
  CHECK(!readable(q.wake_fd()));
  for (std::uint64_t n = 0; n < 3; ++n) q.push(completion(n));
  CHECK_EQ(q.stats().wakeups, 1u);
  CHECK(readable(q.wake_fd()));
  CHECK_EQ(q.drain(2).size(), 2u);
  CHECK(readable(q.wake_fd()));  // one is left
  const auto rest = q.drain();
  REQUIRE(rest.size() == 1);
  CHECK_EQ(rest[0].tokens, 2u);
  CHECK(!readable(q.wake_fd()));
  CHECK_EQ(q.stats().reserved, 0u);
}

TEST(room_is_promised_ahead) {
  CompletionQueue q(4);
  CHECK(q.reserve(3));
  CHECK(!q.reserve(2));
  CHECK(q.reserve(1));
  q.release(2);
  CHECK(q.reserve(2));
  q.push(completion(1));
  CHECK(!q.reserve(1));  // a slot is held until its completion is taken
  (void)q.drain();
  CHECK(q.reserve(1));
}

TEST(closed_queues_give_what_is_left) {
  CompletionQueue q;
  REQUIRE(q.reserve(2));
  q.push(completion(1));
  q.close();
  q.push(completion(2));
  CHECK(!q.reserve(1));
  CHECK_EQ(q.drain().size(), 1u);
  CHECK_EQ(q.stats().dropped_after_close, 1u);
}

TEST(many_producers_lose_nothing) {
  CompletionQueue q;
  constexpr int kThreads = 4;
  constexpr std::uint64_t kEach = 5000;
  REQUIRE(q.reserve(kThreads * kEach));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t n = 0; n < kEach; ++n) {
        Completion c = completion(n);
        c.rank = static_cast<std::uint32_t>(t);
        q.push(std::move(c));
      }
    });
  }
  std::vector<std::uint64_t> next(kThreads, 0);
  std::uint64_t total = 0;
  while (total < kThreads * kEach && readable(q.wake_fd(), 10'000)) {
    for (const Completion& c : q.drain(1000)) {
      CHECK_EQ(c.tokens, next[c.rank]++);
      ++total;
    }
  }
  for (auto& t : threads) t.join();
  CHECK_EQ(total, kThreads * kEach);
  CHECK_EQ(q.stats().pushed_unreserved, 0u);
}
