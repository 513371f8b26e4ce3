// The sender engine, threads and all, against receivers without sockets.
#include <atomic>
#include <numeric>
#include <thread>

#include "fake_peer.h"
#include "kvt/sender.h"

using namespace kvt;

namespace {

constexpr std::uint16_t kLayers = 3;
constexpr std::uint32_t kBlocks = 16;
constexpr std::uint32_t kBlockTokens = 4;
constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kDim = 8;

template <class Id>
Id id(std::uint8_t n) {
  Id out;
  out.bytes.fill(n);
  return out;
}
const Incarnation kScheduler = id<Incarnation>(1);

// A sender of one rank and receivers of two; everything a test needs to see.
struct World {
  explicit World(SenderConfig config = {}, std::vector<fake::Behaviour> behaviours = {{}, {}},
                 std::size_t room = 1 << 16)
      : source(std::make_shared<fake::Memory>(
            fake::layout(kLayers, kBlocks, kBlockTokens, kHeads, kDim, 1), 0)),
        sink(std::make_shared<fake::Sink>(room)),
        connections(std::make_shared<fake::Connections>(source->cache)) {
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      targets.push_back(std::make_shared<fake::Memory>(
          fake::layout(kLayers, kBlocks, kBlockTokens, kHeads, kDim, 2), rank));
      connections->add_target(rank, targets.back(), behaviours.at(rank));
    }
    sender = std::make_unique<Sender>(source->cache, sink, connections, config);
    sender->begin_scheduler(kScheduler);
  }

  Send send(std::uint8_t key, std::uint32_t first, std::uint32_t end, bool last = true) const {
    Send s;
    s.key = id<TransferKey>(key);
    s.target_instance = "d";
    s.target_incarnation = id<Incarnation>(9);
    for (std::int32_t rank = 0; rank < 2; ++rank) {
      s.targets.push_back({rank, id<Incarnation>(static_cast<std::uint8_t>(50 + rank)),
                           "tcp://d:" + std::to_string(rank)});
    }
    s.src_blocks = {{3, 1, 4, 2}};
    s.dst_blocks = {{5, 0, 7, 6}};
    s.first_token = first;
    s.end_token = end;
    s.last = last;
    return s;
  }

  // What the compute of one layer leaves: every byte tells layer, block and position.
  void compute(std::uint16_t layer, std::uint8_t salt = 0) {
    for (std::size_t i = 0; i < source->bytes[layer].size(); ++i) {
      source->bytes[layer][i] = static_cast<std::uint8_t>(1 + (i * 7 + layer * 31u + salt) % 251);
    }
  }
  void run_step(StepId step) {
    sender->start_step(kScheduler, step, 8);
    for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
      compute(layer);
      sender->record_event(step, layer, 0);
    }
    sender->freeze_step(step);
    sender->flush_step(step);
  }
  // Number of bytes on the targets that differ from a reference of tokens [first, end) in `send`'s
  // block lists; bytes outside must be zero.
  std::size_t wrong_bytes(const Send& s, std::uint32_t first, std::uint32_t end) const {
    std::size_t wrong = 0;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
        std::vector<std::uint8_t> expected(targets[rank]->bytes[layer].size(), 0);
        for (std::uint32_t token = first; token < end; ++token) {
          const std::uint32_t from = s.src_blocks[0][token / kBlockTokens];
          const std::uint32_t to = s.dst_blocks[0][token / kBlockTokens];
          for (std::uint32_t d = 0; d < kDim; ++d) {
            const std::size_t src =
                ((from * kBlockTokens + token % kBlockTokens) * kHeads + rank) * kDim + d;
            const std::size_t dst = (to * kBlockTokens + token % kBlockTokens) * kDim + d;
            expected[dst] = source->bytes[layer][src];
          }
        }
        for (std::size_t i = 0; i < expected.size(); ++i) {
          wrong += expected[i] != targets[rank]->bytes[layer][i];
        }
      }
    }
    return wrong;
  }

  std::shared_ptr<fake::Memory> source;
  std::vector<std::shared_ptr<fake::Memory>> targets;
  std::shared_ptr<fake::Sink> sink;
  std::shared_ptr<fake::Connections> connections;
  std::unique_ptr<Sender> sender;
};

bool all_have(const std::vector<Completion>& all, Code code) {
  for (const Completion& c : all) {
    if (c.code != code) return false;
  }
  return !all.empty();
}

}  // namespace

TEST(a_step_sends_its_layers_to_every_rank) {
  World w;
  const Send s = w.send(1, 2, 13);
  w.sender->submit_send(kScheduler, 1, s);
  w.run_step(1);
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kOk));
  CHECK_EQ(done[0].tokens, 13u);
  CHECK(done[0].key == s.key && done[0].kind == Completion::Kind::kSendDone);
  CHECK(done[0].other_rank != done[1].other_rank);
  CHECK_EQ(w.wrong_bytes(s, 2, 13), 0u);
  CHECK_EQ(w.sink->reserved(), 0u);
  CHECK(w.sender->snapshot().transfers.empty());
}

TEST(a_prompt_in_chunks_over_steps_and_a_frozen_end) {
  World w;
  Send first = w.send(1, 0, 5, false);
  first.src_blocks = {{3, 1}};
  w.sender->submit_send(kScheduler, 1, first);
  w.run_step(1);
  w.sender->submit_delta(kScheduler, 2, first.key, {{4}}, {}, 5, 9, false);
  w.run_step(2);
  CHECK(w.sink->all().empty());
  w.sender->send_frozen(kScheduler, {w.send(1, 9, 14)});
  CHECK(all_have(w.sink->wait(2), Code::kOk));
  CHECK_EQ(w.wrong_bytes(w.send(1, 0, 14), 0, 14), 0u);
}

TEST(frozen_sends_need_no_step) {
  World w;
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) w.compute(layer);
  const Send s = w.send(1, 0, 16);
  w.sender->send_frozen(kScheduler, {s});
  CHECK(all_have(w.sink->wait(2), Code::kOk));
  CHECK_EQ(w.wrong_bytes(s, 0, 16), 0u);
}

TEST(a_substep_joins_a_running_step) {
  World w;
  w.sender->start_step(kScheduler, 1, 8);
  w.compute(0);
  w.sender->record_event(1, 0, 0);
  const Send s = w.send(2, 0, 16);
  CHECK(w.sender->start_substep(kScheduler, 1, 1, {s}) == SubstepVerdict::kTaken);
  for (std::uint16_t layer = 1; layer < kLayers; ++layer) {
    w.compute(layer);
    w.sender->record_event(1, layer, 0);
  }
  CHECK_EQ(w.sender->freeze_step(1), 1u);
  CHECK(w.sender->start_substep(kScheduler, 1, 2, {w.send(3, 0, 16)}) == SubstepVerdict::kLate);
  w.sender->flush_step(1);
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kOk));
  CHECK(done[0].key == s.key);
  CHECK_EQ(w.wrong_bytes(s, 0, 16), 0u);
  w.sender->close();
  CHECK_EQ(w.sink->all().size(), 2u);  // the refused one has no completion
  CHECK_EQ(w.sink->reserved(), 0u);    // and owes none
}

TEST(bytes_wait_for_the_stream) {
  HostStream stream;
  World w;
  const Send s = w.send(1, 0, 16);
  w.sender->submit_send(kScheduler, 1, s);
  w.sender->start_step(kScheduler, 1, 8);
  std::vector<std::uint64_t> work;
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
    work.push_back(stream.submit());
    w.sender->record_event(1, layer, stream.handle());
  }
  w.sender->freeze_step(1);
  w.sender->flush_step(1);
  std::thread device([&] {
    for (std::uint16_t layer = 0; layer < kLayers; ++layer) {
      w.compute(layer);  // only now: what was read before would be zeros
      stream.complete(work[layer]);
    }
  });
  CHECK(all_have(w.sink->wait(2), Code::kOk));
  device.join();
  CHECK_EQ(w.wrong_bytes(s, 0, 16), 0u);
}

TEST(a_layer_that_was_not_recorded_fails_its_sends_by_name) {
  World w;
  w.sender->submit_send(kScheduler, 5, w.send(1, 0, 16));
  w.sender->start_step(kScheduler, 5, 8);
  w.sender->record_event(5, 0, 0);
  w.sender->record_event(5, 2, 0);
  w.sender->flush_step(5);
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kInternal));
  CHECK_EQ(done[0].detail, std::string("layer 1 of step 5 was not recorded"));
}

TEST(a_failed_stream_fails_its_sends) {
  World w;
  HostStream stream;
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  w.sender->start_step(kScheduler, 1, 8);
  stream.submit();
  w.sender->record_event(1, 0, stream.handle());
  stream.fail("kernel died");
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kInternal));
  CHECK(done[0].detail.find("kernel died") != std::string::npos);
}

TEST(one_ranks_refusal_leaves_the_other) {
  fake::Behaviour refuses;
  refuses.refuse_open = {Code::kBadRequest, "no grant"};
  World w({}, {{}, refuses});
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  w.run_step(1);
  for (const Completion& c : w.sink->wait(2)) {
    CHECK(c.code == (c.other_rank == 0 ? Code::kOk : Code::kBadRequest));
  }
}

TEST(a_slow_receiver_delays_nobody) {
  std::mutex gate;
  fake::Behaviour slow;
  slow.before_read = [&](const LayerSend&) { const std::lock_guard wait(gate); };
  std::unique_lock held(gate);
  World w({}, {{}, slow});
  for (std::uint8_t key = 1; key <= 5; ++key) {
    w.sender->submit_send(kScheduler, key, w.send(key, 0, 16));
    w.run_step(key);  // returns although rank 1 takes nothing
  }
  const auto done = w.sink->wait(5);
  for (std::size_t i = 0; i < 5; ++i) CHECK_EQ(done[i].other_rank, 0u);
  held.unlock();
  CHECK(all_have(w.sink->wait(10), Code::kOk));
}

TEST(cancel_ends_a_transfer_once_whatever_it_is_doing) {
  fake::Behaviour silent;
  silent.never_ready = true;
  World w({}, {{}, silent});
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  w.sender->start_step(kScheduler, 1, 8);  // nothing recorded; rank 1 not even connected
  w.sender->cancel(id<TransferKey>(1), Code::kExpired, "hold is over");
  w.sender->cancel(id<TransferKey>(1));
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kExpired));
  CHECK_EQ(done[0].detail, std::string("hold is over"));
  for (std::uint16_t layer = 0; layer < kLayers; ++layer) w.sender->record_event(1, layer, 0);
  w.sender->flush_step(1);
  w.sender->close();
  CHECK_EQ(w.sink->all().size(), 2u);
}

TEST(a_cancel_that_comes_first_is_remembered) {
  World w;
  w.sender->cancel(id<TransferKey>(1));
  w.sender->send_frozen(kScheduler, {w.send(1, 0, 16)});
  CHECK(all_have(w.sink->wait(2), Code::kAborted));
  CHECK(w.connections->latest() == nullptr);
}

TEST(a_dead_peer_ends_what_was_on_its_way_to_it) {
  std::mutex gate;
  fake::Behaviour slow;
  slow.before_read = [&](const LayerSend&) { const std::lock_guard wait(gate); };
  World w({}, {{}, slow});
  {
    const std::lock_guard held(gate);
    w.sender->send_frozen(kScheduler, {w.send(1, 0, 16)});
    CHECK(all_have(w.sink->wait(1), Code::kOk));
    w.sender->drop_peer(id<Incarnation>(51), "worker 1 was killed");
  }
  const auto done = w.sink->wait(2);
  CHECK(done[1].code == Code::kPeerLost && done[1].other_rank == 1);
  // The next transfer gets a new connection.
  w.sender->send_frozen(kScheduler, {w.send(2, 0, 16)});
  CHECK(w.sink->wait(4)[3].code == Code::kOk);
}

TEST(the_whole_deadline_ends_what_nothing_else_does) {
  SenderConfig config;
  config.ledger.whole_s = 0.05;
  World w(config);
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  w.sender->start_step(kScheduler, 1, 8);
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kTimeout));
  CHECK(done[0].detail.find("wait for layers") != std::string::npos);
}

TEST(early_substeps_expire_without_a_step) {
  SenderConfig config;
  config.timeline.early_s = 0.02;
  World w(config);
  CHECK(w.sender->start_substep(kScheduler, 3, 1, {w.send(1, 0, 16)}) == SubstepVerdict::kKept);
  while (w.sender->snapshot().num_refused == 0) std::this_thread::yield();
  CHECK(w.sender->start_substep(kScheduler, 3, 1, {w.send(1, 0, 16)}) == SubstepVerdict::kLate);
  w.run_step(3);
  w.sender->close();
  CHECK(w.sink->all().empty());
  CHECK_EQ(w.sink->reserved(), 0u);
}

TEST(the_clock_of_early_substeps_runs_from_the_last_flush) {
  SenderConfig config;
  config.timeline.early_s = 0.01;
  World w(config);
  w.sender->start_step(kScheduler, 1, 8);
  CHECK(w.sender->start_substep(kScheduler, 2, 1, {w.send(1, 0, 16)}) == SubstepVerdict::kKept);
  w.sender->flush_step(1);  // nothing else wakes the thread that keeps the deadlines
  while (w.sink->reserved() > 0) std::this_thread::yield();  // a snapshot would wake it
  CHECK_EQ(w.sender->snapshot().num_refused, 1u);
}

TEST(an_empty_range_is_answered_without_a_connection) {
  World w;
  w.sender->submit_send(kScheduler, 1, w.send(1, 16, 16));
  w.sender->start_step(kScheduler, 1, 8);
  CHECK(all_have(w.sink->wait(2), Code::kOk));
  CHECK(w.connections->latest() == nullptr);
}

TEST(blocks_that_cannot_be_planned_fail_with_the_planners_words) {
  World w;
  Send s = w.send(1, 0, 16);
  s.dst_blocks = {{5, 0, 99, 6}};
  w.sender->send_frozen(kScheduler, {s});
  const auto done = w.sink->wait(2);
  CHECK(all_have(done, Code::kBadRequest));
  CHECK(!done[0].detail.empty());
}

TEST(no_room_for_completions_is_busy_at_the_door) {
  World w({}, {{}, {}}, 3);
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  CHECK_THROWS(Error, w.sender->submit_send(kScheduler, 1, w.send(2, 0, 16)));
  CHECK_THROWS(Error, w.sender->send_frozen(kScheduler, {w.send(2, 0, 16)}));
  w.run_step(1);
  w.sink->wait(2);
  w.sender->send_frozen(kScheduler, {w.send(2, 0, 16)});
  CHECK(all_have(w.sink->wait(4), Code::kOk));
}

TEST(a_new_scheduler_ends_the_old_ones_sends) {
  World w;
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 16));
  w.sender->submit_send(kScheduler, 2, w.send(2, 0, 16));
  w.sender->start_step(kScheduler, 1, 8);
  w.sender->begin_scheduler(id<Incarnation>(2));
  CHECK(all_have(w.sink->wait(4), Code::kAborted));
  CHECK_THROWS(Error, w.sender->start_step(kScheduler, 3, 8));
  CHECK(w.sender->start_substep(kScheduler, 3, 1, {}) == SubstepVerdict::kStale);
}

TEST(closing_completes_everything_and_refuses_more) {
  auto w = std::make_unique<World>();
  HostStream stream;
  stream.submit();
  w->sender->submit_send(kScheduler, 1, w->send(1, 0, 16));
  w->sender->submit_send(kScheduler, 2, w->send(2, 0, 16));
  w->sender->start_step(kScheduler, 1, 8);
  w->sender->record_event(1, 0, stream.handle());  // never completes
  w->sender->send_frozen(kScheduler, {w->send(3, 0, 16)});
  w->sender->close();
  const auto done = w->sink->all();
  CHECK_EQ(done.size(), 6u);
  CHECK_EQ(w->sink->reserved(), 0u);
  CHECK_THROWS(Error, w->sender->send_frozen(kScheduler, {w->send(4, 0, 16)}));
  CHECK_THROWS(Error, w->sender->start_step(kScheduler, 3, 8));
  w->sender->close();
}

TEST(overlapping_and_repeated_sends) {
  World w;
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 8, false));
  w.sender->submit_send(kScheduler, 1, w.send(1, 0, 8, false));  // again: dropped
  w.run_step(1);
  w.sender->send_frozen(kScheduler, {w.send(1, 8, 16)});
  CHECK(all_have(w.sink->wait(2), Code::kOk));
  CHECK_EQ(w.sender->snapshot().counts.num_repeated, 1u);
  w.sender->send_frozen(kScheduler, {w.send(2, 0, 8, false)});
  w.sender->send_frozen(kScheduler, {w.send(2, 4, 12)});
  const auto done = w.sink->wait(4);
  CHECK(done[2].code == Code::kBadRequest && done[3].code == Code::kBadRequest);
}
