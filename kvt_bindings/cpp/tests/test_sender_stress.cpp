// Everything at once, on racing threads, with a right answer: the engine runs steps while three
// threads throw substeps at it (early, in time, late), a device finishes layers when it likes,
// somebody cancels, somebody looks, and what a step refused is sent frozen.
//
// The right answer. For each step the freeze says k: every send of substeps 1..k has completions
// from that step, every later one has none from it and gets them from the repair. So each request
// ends in exactly one completion per rank, and what ended OK has the bytes that its step computed,
// in every layer; before the device has worked on a block it holds bytes that nobody may send.
//
// Most steps race freely. On a busy machine the scheduler may let every substep of such a run be
// early or late, so some steps are held to one order each: what they must answer is known exactly.
#include <atomic>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "fake_peer.h"
#include "kvt/sender.h"

using namespace kvt;

namespace {

constexpr std::uint16_t kLayers = 3;
constexpr std::uint32_t kSubsteps = 5;             // of each step
constexpr std::uint32_t kPerStep = kSubsteps + 1;  // and one send of the step itself
constexpr std::uint32_t kBlockTokens = 2;
constexpr std::uint32_t kDim = 8;
constexpr std::uint8_t kNotComputed = 0xEE;

std::uint32_t num_steps() {
  const char* wanted = std::getenv("KVT_STRESS_STEPS");
  return wanted != nullptr ? static_cast<std::uint32_t>(std::atoi(wanted)) : 200;
}

template <class Id>
Id id(std::uint64_t n) {
  Id out;
  std::memcpy(out.bytes.data(), &n, sizeof n);
  out.bytes[15] = 1;
  return out;
}
const Incarnation kScheduler = id<Incarnation>(1);

// How the substeps of a step meet it.
enum class Meeting { kRacing, kBeforeStep, kInStep, kAfterFreeze };
Meeting meeting_of(StepId step) {
  switch (step % 10) {
    case 2:
      return Meeting::kBeforeStep;
    case 5:
      return Meeting::kInStep;
    case 8:
      return Meeting::kAfterFreeze;
    default:
      return Meeting::kRacing;
  }
}

// Request r is computed in step r / kPerStep + 1 and lives in block r on both sides.
std::uint32_t request_of(StepId step, std::uint32_t substep) {
  return static_cast<std::uint32_t>(step - 1) * kPerStep + substep;
}
std::uint8_t content(std::uint32_t request, std::uint16_t layer) {
  const auto value = static_cast<std::uint8_t>(request * 31 + layer * 7 + 1);
  return value == kNotComputed || value == 0 ? 0x55 : value;
}

Send send_of(std::uint32_t request) {
  Send s;
  s.key = id<TransferKey>(request + 1);
  s.target_instance = "d";
  s.target_incarnation = id<Incarnation>(9);
  s.targets = {{0, id<Incarnation>(50), "a"}, {1, id<Incarnation>(51), "b"}};
  s.src_blocks = {{request}};
  s.dst_blocks = {{request}};
  s.end_token = kBlockTokens;
  return s;
}

}  // namespace

TEST(racing_threads_have_one_right_answer) {
  const std::uint32_t steps = num_steps();
  const std::uint32_t num_requests = steps * kPerStep;
  const auto source = std::make_shared<fake::Memory>(
      fake::layout(kLayers, num_requests, kBlockTokens, 2, kDim, 1), 0);
  for (auto& layer : source->bytes) std::fill(layer.begin(), layer.end(), kNotComputed);
  const auto sink = std::make_shared<fake::Sink>();
  const auto connections = std::make_shared<fake::Connections>(source->cache);
  std::vector<std::shared_ptr<fake::Memory>> targets;
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    targets.push_back(std::make_shared<fake::Memory>(
        fake::layout(kLayers, num_requests, kBlockTokens, 2, kDim, 2),
        static_cast<std::uint32_t>(rank)));
    connections->add_target(rank, targets.back());
  }
  SenderConfig config;
  config.timeline.early_s = 600;
  Sender sender(source->cache, sink, connections, config);
  sender.begin_scheduler(kScheduler);

  HostStream stream;
  std::atomic<std::uint64_t> submitted{0};
  std::atomic<std::uint64_t> computed{0};  // pieces of work; kLayers a step
  std::atomic<StepId> started{0};
  std::vector<std::atomic<std::int64_t>> answers(steps + 1);
  for (auto& a : answers) a = -1;
  std::vector<std::atomic<int>> verdicts(num_requests);
  std::vector<std::atomic<std::uint32_t>> num_answered(steps + 1);  // substeps with a verdict
  std::set<std::uint32_t> cancelled;

  std::thread device([&] {
    std::mt19937 random(7);
    for (std::uint64_t work = 0; work < std::uint64_t{steps} * kLayers; ++work) {
      while (submitted.load() <= work) std::this_thread::yield();
      for (unsigned i = random() % 4; i > 0; --i) std::this_thread::yield();
      const StepId step = work / kLayers + 1;
      const auto layer = static_cast<std::uint16_t>(work % kLayers);
      const std::size_t block_bytes = kBlockTokens * 2 * kDim;
      for (std::uint32_t k = 0; k < kPerStep; ++k) {
        const std::uint32_t request = request_of(step, k);
        std::memset(source->bytes[layer].data() + request * block_bytes, content(request, layer),
                    block_bytes);
      }
      stream.complete(work + 1);
      computed.store(work + 1);
    }
  });

  std::vector<std::thread> bypass;
  constexpr std::uint32_t kThreads = 3;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    bypass.emplace_back([&, t] {
      std::mt19937 random(100 + t);
      for (StepId step = 1; step <= steps; ++step) {
        // Sometimes a step ahead of the engine, sometimes behind it.
        while (started.load() + 1 < step) std::this_thread::yield();
        for (std::uint32_t k = 1; k <= kSubsteps; ++k) {
          if (k % kThreads != t) continue;
          const Meeting meeting = meeting_of(step);
          while ((meeting == Meeting::kInStep && started.load() < step) ||
                 (meeting == Meeting::kAfterFreeze && answers[step].load() < 0)) {
            std::this_thread::yield();
          }
          for (unsigned i = random() % 6; i > 0; --i) std::this_thread::yield();
          const std::uint32_t request = request_of(step, k);
          verdicts[request] =
              static_cast<int>(sender.start_substep(kScheduler, step, k, {send_of(request)}));
          num_answered[step].fetch_add(1);
        }
      }
    });
  }

  std::thread repair([&] {
    for (StepId step = 1; step <= steps; ++step) {
      std::int64_t taken = -1;
      while ((taken = answers[step].load()) < 0) std::this_thread::yield();
      while (computed.load() < step * kLayers) std::this_thread::yield();
      for (auto k = static_cast<std::uint32_t>(taken) + 1; k <= kSubsteps; ++k) {
        sender.send_frozen(kScheduler, {send_of(request_of(step, k))});
      }
    }
  });

  std::thread cancels([&] {
    std::mt19937 random(5);
    for (StepId step = 1; step <= steps; ++step) {
      while (started.load() < step) std::this_thread::yield();
      if (random() % 3 != 0) continue;
      const std::uint32_t request = request_of(step, random() % kPerStep);
      cancelled.insert(request);
      sender.cancel(send_of(request).key);
    }
  });

  std::atomic<bool> over{false};
  std::thread looks([&] {
    while (!over.load()) {
      const SenderSnapshot s = sender.snapshot();
      CHECK(s.steps.size() <= 64);
      std::this_thread::yield();
    }
  });

  const auto await_substeps = [&](StepId step, Meeting meeting) {
    while (meeting_of(step) == meeting && num_answered[step].load() < kSubsteps) {
      std::this_thread::yield();
    }
  };
  std::mt19937 random(1);
  for (StepId step = 1; step <= steps; ++step) {
    await_substeps(step, Meeting::kBeforeStep);
    sender.submit_send(kScheduler, step, send_of(request_of(step, 0)));
    for (bool busy = true; busy;) {
      try {
        sender.start_step(kScheduler, step, 1);
        busy = false;
      } catch (const Error& e) {  // too many steps whose events nobody has waited for yet
        CHECK(e.code() == Code::kBusy);
        std::this_thread::yield();
      }
    }
    started.store(step);
    for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
      for (unsigned i = random() % 40; i > 0; --i) std::this_thread::yield();
      stream.submit();
      submitted.fetch_add(1);
      sender.record_event(step, layer, stream.handle());
    }
    await_substeps(step, Meeting::kInStep);
    answers[step].store(static_cast<std::int64_t>(sender.freeze_step(step)));
    sender.flush_step(step);
  }
  for (auto& t : bypass) t.join();
  repair.join();
  cancels.join();
  device.join();
  const std::size_t num_expected = std::size_t{num_requests} * 2;
  const auto all = sink->wait(num_expected);
  over.store(true);
  looks.join();
  sender.close();
  CHECK_EQ(sink->all().size(), num_expected);
  CHECK_EQ(sink->reserved(), 0u);

  // Verdicts agree with the answers.
  std::map<SubstepVerdict, std::size_t> num_verdicts;
  for (StepId step = 1; step <= steps; ++step) {
    const auto frozen_at = static_cast<SubstepId>(answers[step].load());
    const Meeting meeting = meeting_of(step);
    if (meeting == Meeting::kBeforeStep || meeting == Meeting::kInStep)
      CHECK_EQ(frozen_at, kSubsteps);
    if (meeting == Meeting::kAfterFreeze) CHECK_EQ(frozen_at, 0u);
    std::size_t num_taken = 0;
    for (std::uint32_t k = 1; k <= kSubsteps; ++k) {
      const auto verdict = static_cast<SubstepVerdict>(verdicts[request_of(step, k)].load());
      ++num_verdicts[verdict];
      num_taken += verdict == SubstepVerdict::kTaken;
      if (meeting == Meeting::kBeforeStep) CHECK(verdict == SubstepVerdict::kKept);
      if (meeting == Meeting::kInStep) CHECK(verdict != SubstepVerdict::kLate);
      if (meeting == Meeting::kAfterFreeze) CHECK(verdict == SubstepVerdict::kLate);
      if (verdict == SubstepVerdict::kTaken) CHECK(k <= frozen_at);
      if (verdict == SubstepVerdict::kLate) CHECK(k > frozen_at);
      CHECK(verdict == SubstepVerdict::kTaken || verdict == SubstepVerdict::kLate ||
            verdict == SubstepVerdict::kKept);
    }
    // The last one to arrive closes the gap that the others may have waited for.
    if (meeting == Meeting::kInStep) CHECK(num_taken > 0);
  }
  for (const auto verdict :
       {SubstepVerdict::kTaken, SubstepVerdict::kLate, SubstepVerdict::kKept}) {
    CHECK(num_verdicts[verdict] > 0);
  }
  for (const auto& [verdict, n] : num_verdicts)
    std::printf("     %zu %s\n", n, verdict_name(verdict));

  // Exactly one completion per request and rank; right bytes where it is OK, none where not begun.
  std::map<std::pair<TransferKey, std::uint32_t>, const Completion*> by_leg;
  for (const Completion& c : all) {
    const bool is_first = by_leg.emplace(std::pair{c.key, c.other_rank}, &c).second;
    CHECK(is_first);
  }
  CHECK_EQ(by_leg.size(), num_expected);
  std::size_t num_ok = 0;
  for (std::uint32_t request = 0; request < num_requests; ++request) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const auto it = by_leg.find({send_of(request).key, rank});
      REQUIRE(it != by_leg.end());
      const Completion& c = *it->second;
      const bool is_ok = c.code == Code::kOk;
      CHECK(is_ok || (cancelled.contains(request) && c.code == Code::kAborted));
      num_ok += is_ok;
      for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
        const std::size_t block_bytes = kBlockTokens * kDim;
        const auto* bytes = targets[rank]->bytes[layer].data() + request * block_bytes;
        for (std::size_t i = 0; i < block_bytes; ++i) {
          const bool is_right = bytes[i] == content(request, layer);
          if (!is_right && !(bytes[i] == 0 && !is_ok)) {
            check::fail(__FILE__, __LINE__,
                        "request " + std::to_string(request) + " layer " + std::to_string(layer) +
                            ": byte " + std::to_string(bytes[i]));
            return;
          }
        }
      }
    }
  }
  CHECK(num_ok > num_expected / 2);
}
