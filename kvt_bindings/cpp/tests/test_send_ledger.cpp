// The ledger by itself: what may follow what, for every order of words from the timeline, the
// connections, the planner, the scheduler and the clock.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "check.h"
#include "kvt/send_ledger.h"

using namespace kvt;
using Kind = LedgerEffect::Kind;

namespace {

constexpr std::uint16_t kLayers = 2;
constexpr ConnectionId kConnections = 2;  // one for each target rank

template <class Id>
Id id(std::uint64_t n) {
  Id out;
  std::memcpy(out.bytes.data(), &n, sizeof n);
  return out;
}

SharedSend send_of(std::uint64_t key, std::uint32_t first, std::uint32_t end, bool last,
                   bool is_delta = false, std::size_t num_targets = 2) {
  Send s;
  s.key = id<TransferKey>(key);
  s.target_instance = "d";
  if (!is_delta) {
    for (std::size_t i = 0; i < num_targets; ++i) {
      s.targets.push_back({static_cast<std::int32_t>(i), id<Incarnation>(i + 1), "a"});
    }
  }
  s.src_blocks = {{1}};
  s.dst_blocks = {{2}};
  s.first_token = first;
  s.end_token = end;
  s.last = last;
  s.is_delta = is_delta;
  return std::make_shared<const Send>(std::move(s));
}

SharedPlan plan_of(bool has_bytes) {
  auto plan = std::make_shared<Plan>();
  if (has_bytes) plan->parts.push_back({{0, 1}, {{0, 0, 8}}, 8});
  return plan;
}

// Runs a ledger, remembers what it said of each leg, and checks what must hold after every word.
struct Play {
  struct LegLog {
    TransferKey key;
    std::int32_t rank = -1;
    bool opened = false;
    bool ended = false;
    bool cancelled = false;
    bool completed = false;
    std::set<std::tuple<std::uint16_t, std::uint32_t, std::uint32_t>> sent;  // layer, first, end
  };

  explicit Play(LedgerLimits limits = {}) : ledger(3, true, limits) {}

  template <class Call>
  auto run(Call&& call) {
    LedgerEffects out;
    auto result = call(out);
    for (const LedgerEffect& e : out) look(e);
    return result;
  }
  std::size_t attach(PartId part, const SharedSend& send) {
    const auto opened =
        run([&](auto& out) { return ledger.attach(part, send, id<Incarnation>(9), now_s, out); });
    num_owed += opened;
    return opened;
  }
  void ready(PartId part, std::uint16_t layer) {
    run([&](auto& out) { return ledger.layer_ready(part, layer, out), 0; });
  }
  void sealed(PartId part) {
    run([&](auto& out) { return ledger.sealed(part, out), 0; });
  }
  void whole(PartId part) {
    for (std::uint16_t layer = 0; layer < kLayers; ++layer) ready(part, layer);
    sealed(part);
  }
  void connect_all(bool is_ready = true) {
    for (const LegId leg : std::exchange(connecting, {})) {
      const auto rank = legs.at(leg).rank;
      run([&](auto& out) {
        return ledger.connected(leg, static_cast<ConnectionId>(rank + 1), is_ready, out), 0;
      });
    }
  }
  void plan_all(bool has_bytes = true) {
    while (!planning.empty()) {
      const auto [leg, part] = planning.front();
      planning.erase(planning.begin());
      run([&](auto& out) { return ledger.planned(leg, part, plan_of(has_bytes), {}, out), 0; });
    }
  }
  void result(LegId leg, const Status& status, std::uint32_t tokens = 0) {
    run([&](auto& out) { return ledger.result(leg, status, tokens, out), 0; });
  }
  bool cancel(std::uint64_t key, Code code = Code::kAborted) {
    return run([&](auto& out) {
      return ledger.cancel(id<TransferKey>(key), {code, "no more"}, now_s, out);
    });
  }
  void tick() {
    run([&](auto& out) { return ledger.tick(now_s, out), 0; });
  }
  LegId leg(std::uint64_t key, std::int32_t rank) const {
    for (const auto& [leg_id, log] : legs) {
      if (log.key == id<TransferKey>(key) && log.rank == rank) return leg_id;
    }
    return 0;
  }

  void look(const LedgerEffect& e) {
    switch (e.kind) {
      case Kind::kConnect:
        CHECK(!legs.contains(e.leg));
        legs[e.leg].rank = e.peer.rank;
        connecting.push_back(e.leg);
        break;
      case Kind::kPlan:
        CHECK(!legs.at(e.leg).completed);
        CHECK(asked.insert({e.leg, e.part}).second);
        planning.push_back({e.leg, e.part});
        break;
      case Kind::kOpen: {
        LegLog& log = legs.at(e.leg);
        CHECK(!log.opened && !log.completed);
        log.opened = true;
        log.key = e.open.key;
        break;
      }
      case Kind::kSend: {
        LegLog& log = legs.at(e.leg);
        CHECK(log.opened && !log.ended && !log.cancelled && !log.completed);
        CHECK(log.sent.insert({e.layer.layer, e.layer.first_token, e.layer.end_token})
                  .second);  // never twice
        CHECK(e.layer.runs != nullptr && !e.layer.runs->empty());
        break;
      }
      case Kind::kEnd: {
        LegLog& log = legs.at(e.leg);
        CHECK(log.opened && !log.ended && !log.cancelled && !log.completed);
        log.ended = true;
        break;
      }
      case Kind::kCancel: {
        LegLog& log = legs.at(e.leg);
        CHECK(log.opened && !log.cancelled && !log.completed);
        CHECK(!e.status.ok());
        log.cancelled = true;
        break;
      }
      case Kind::kComplete: {
        const Completion& c = e.completion;
        CHECK(c.kind == Completion::Kind::kSendDone && c.rank == 3);
        CHECK(completions.insert({{c.key, c.other_rank}, c}).second);  // exactly one
        if (e.leg != 0 && legs.contains(e.leg)) legs.at(e.leg).completed = true;
        break;
      }
      case Kind::kForget:
        forgotten.insert(e.part);
        break;
    }
  }
  const Completion& completion(std::uint64_t key, std::uint32_t rank) {
    static const Completion none;
    const auto it = completions.find({id<TransferKey>(key), rank});
    CHECK(it != completions.end());
    return it == completions.end() ? none : it->second;
  }

  SendLedger ledger;
  double now_s = 50;
  std::size_t num_owed = 0;
  std::map<LegId, LegLog> legs;
  std::vector<LegId> connecting;
  std::vector<std::pair<LegId, PartId>> planning;
  std::set<std::pair<LegId, PartId>> asked;
  std::map<std::pair<TransferKey, std::uint32_t>, Completion> completions;
  std::set<PartId> forgotten;
};

}  // namespace

TEST(a_transfer_in_one_part) {
  Play p;
  CHECK_EQ(p.attach(1, send_of(1, 4, 16, true)), 2u);
  p.ready(1, 0);  // before there is a connection
  p.connect_all();
  p.plan_all();
  const LegId leg = p.leg(1, 0);
  REQUIRE(leg != 0);
  CHECK_EQ(p.legs[leg].sent.size(), 1u);
  p.ready(1, 1);
  CHECK(!p.legs[leg].ended);
  p.sealed(1);
  CHECK(p.legs[leg].ended);
  p.result(leg, {}, 16);
  CHECK(p.completion(1, 0).code == Code::kOk);
  CHECK_EQ(p.completion(1, 0).tokens, 16u);
  CHECK(p.forgotten.empty());
  p.result(p.leg(1, 1), {Code::kCorrupt, "checksum"}, 0);
  CHECK(p.completion(1, 1).code == Code::kCorrupt);
  CHECK_EQ(p.completion(1, 1).tokens, 4u);  // nothing of it for sure
  CHECK(p.forgotten.contains(1));
  CHECK_EQ(p.ledger.num_legs(), 0u);
}

TEST(parts_may_come_in_any_order_and_the_end_waits_for_the_whole) {
  Play p;
  p.attach(1, send_of(1, 0, 8, false));
  p.attach(2, send_of(1, 12, 20, true));
  p.connect_all();
  p.plan_all();
  p.whole(2);
  p.whole(1);
  const LegId leg = p.leg(1, 0);
  CHECK(!p.legs[leg].ended);  // [8, 12) is missing
  p.attach(3, send_of(1, 8, 12, false, true));
  p.plan_all();
  p.whole(3);
  CHECK(p.legs[leg].ended);
  CHECK_EQ(p.legs[leg].sent.size(), 6u);
}

TEST(no_bytes_for_a_rank_is_ok_without_a_word_on_the_wire) {
  Play p;
  p.attach(1, send_of(1, 0, 8, true));
  p.connect_all();
  p.plan_all(false);
  p.whole(1);
  CHECK(p.completion(1, 0).code == Code::kOk && p.completion(1, 1).code == Code::kOk);
  for (const auto& [leg, log] : p.legs) CHECK(!log.opened);
}

TEST(one_leg_fails_alone_but_a_part_fails_all) {
  Play p;
  p.attach(1, send_of(1, 0, 8, true));
  p.connect_all();
  p.plan_all();
  p.result(p.leg(1, 0), {Code::kPeerLost, "gone"});
  CHECK_EQ(p.completions.size(), 1u);
  p.run([&](auto& out) {
    return p.ledger.fail_part(1, {Code::kInternal, "layer 1 of step 1 was not recorded"}, out), 0;
  });
  CHECK(p.legs[p.leg(1, 1)].cancelled);
  CHECK_EQ(p.completions.size(), 1u);  // its source may still be read
  p.result(p.leg(1, 1), {Code::kAborted, "as you said"});
  CHECK(p.completion(1, 1).code == Code::kInternal);
  CHECK_EQ(p.completion(1, 1).detail, std::string("layer 1 of step 1 was not recorded"));
}

TEST(a_cancel_that_comes_too_late_leaves_the_receivers_word) {
  Play p;
  p.attach(1, send_of(1, 0, 8, true));
  p.connect_all();
  p.plan_all();
  p.whole(1);
  CHECK(p.cancel(1));
  CHECK(p.cancel(1));
  p.result(p.leg(1, 0), {}, 8);
  p.result(p.leg(1, 1), {Code::kAborted, ""});
  CHECK(p.completion(1, 0).code == Code::kOk);
  CHECK_EQ(p.completion(1, 1).detail, std::string("no more"));
  CHECK(!p.cancel(1));  // ended
}

TEST(a_mark_holds_until_its_time) {
  LedgerLimits limits;
  limits.mark_s = 10;
  Play p(limits);
  CHECK(!p.cancel(1, Code::kExpired));
  CHECK(!p.cancel(2, Code::kExpired));
  CHECK_EQ(p.attach(1, send_of(1, 0, 8, true)), 2u);
  CHECK(p.completion(1, 0).code == Code::kExpired && p.completion(1, 1).code == Code::kExpired);
  CHECK_EQ(p.attach(2, send_of(1, 8, 16, true)), 0u);  // ended: late
  p.now_s += 11;
  p.tick();
  CHECK_EQ(p.attach(3, send_of(2, 0, 8, true)), 2u);
  CHECK_EQ(p.completions.size(), 2u);
}

TEST(marks_and_ended_transfers_are_bounded) {
  LedgerLimits limits;
  limits.max_marks = 2;
  limits.max_ended = 2;
  Play p(limits);
  for (std::uint64_t key = 1; key <= 3; ++key) p.cancel(key);
  p.attach(1, send_of(1, 0, 8, true, false, 1));
  CHECK(p.completions.empty());  // the oldest mark made room
  p.attach(2, send_of(2, 0, 8, true, false, 1));
  p.attach(3, send_of(3, 0, 8, true, false, 1));
  CHECK_EQ(p.completions.size(), 2u);
}

TEST(deadlines_end_what_waits_and_say_for_what) {
  LedgerLimits limits;
  limits.whole_s = 5;
  Play p(limits);
  p.attach(1, send_of(1, 0, 8, true));
  p.attach(2, send_of(2, 0, 8, false));
  p.attach(3, send_of(3, 0, 8, true));
  p.connect_all();
  p.plan_all();
  p.whole(2);
  p.whole(3);
  CHECK_EQ(p.ledger.next_deadline_s(), 55.0);
  p.now_s = 54.9;
  p.tick();
  for (const auto& [leg, log] : p.legs) CHECK(!log.cancelled);
  p.now_s = 55;
  p.tick();
  for (const auto& [leg, log] : p.legs) p.result(leg, {Code::kTimeout, ""});
  CHECK(p.completion(1, 0).detail.find("wait for layers") != std::string::npos);
  CHECK(p.completion(2, 0).detail.find("last send did not come") != std::string::npos);
  CHECK(p.completion(3, 0).detail.find("did not confirm") != std::string::npos);
  CHECK(p.ledger.next_deadline_s() < 0);
}

TEST(sends_that_contradict_each_other_fail_their_transfer) {
  Play p;
  p.attach(1, send_of(1, 0, 8, false));
  p.attach(2, send_of(1, 4, 12, true));
  CHECK(p.completion(1, 0).code == Code::kBadRequest);
  p.attach(3, send_of(2, 0, 8, true));
  p.attach(4, send_of(2, 8, 16, false));
  CHECK(p.completion(2, 0).detail.find("after the transfer's last") != std::string::npos);
  CHECK_EQ(p.attach(5, send_of(3, 0, 8, false, true)), 0u);  // a delta of nothing
  CHECK_EQ(p.ledger.counts().num_unknown, 1u);
}

TEST(a_failed_plan_fails_only_its_leg) {
  Play p;
  p.attach(1, send_of(1, 0, 8, true));
  p.connect_all();
  const auto [leg, part] = p.planning.front();
  p.planning.erase(p.planning.begin());
  p.run([&, leg = leg, part = part](auto& out) {
    return p.ledger.planned(leg, part, nullptr, {Code::kIncompatible, "head dim 64 and 128"}, out),
           0;
  });
  CHECK_EQ(p.completions.size(), 1u);
  CHECK(p.completions.begin()->second.code == Code::kIncompatible);
  p.plan_all();
  p.whole(1);
  CHECK_EQ(p.completions.size(), 1u);
}

// Random words in random order; Play checks each, and at the end everything has ended once.
TEST(random_runs_end_every_leg_once) {
  for (unsigned seed = 1; seed <= 400; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    LedgerLimits limits;
    limits.whole_s = 60;
    Play p(limits);
    PartId next_part = 1;
    std::vector<PartId> parts;
    std::map<std::uint64_t, std::uint32_t> sent_to;  // key → end of what was attached
    std::uint64_t next_key = 1;
    std::set<LegId> answered;
    const auto open_leg = [&]() -> LegId {
      std::vector<LegId> open;
      for (const auto& [leg, log] : p.legs) {
        if (log.opened && !log.completed) open.push_back(leg);
      }
      return open.empty() ? 0 : open[below(open.size())];
    };
    for (int i = 0; i < 150; ++i) {
      switch (below(13)) {
        case 0:
        case 1: {
          const std::uint64_t key = next_key++;
          const auto end = static_cast<std::uint32_t>(below(3) * 8);
          p.attach(next_part, send_of(key, 0, end, below(2) == 0));
          sent_to[key] = end;
          parts.push_back(next_part++);
          break;
        }
        case 2: {
          if (sent_to.empty()) break;
          const std::uint64_t key = 1 + below(next_key - 1);
          const std::uint32_t from = sent_to[key] - (below(8) == 0 && sent_to[key] > 0 ? 4 : 0);
          p.attach(next_part, send_of(key, from, from + 8, below(2) == 0, below(2) == 0));
          sent_to[key] = from + 8;
          parts.push_back(next_part++);
          break;
        }
        case 3:
        case 4:
          if (!parts.empty()) p.ready(parts[below(parts.size())], static_cast<std::uint16_t>(99));
          break;
        case 5:
          if (!parts.empty()) {
            const auto at = below(parts.size());
            p.whole(parts[at]);
            parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at));
          }
          break;
        case 6:
          p.connect_all(below(2) == 0);
          break;
        case 7:
          p.run([&](auto& out) {
            return p.ledger.connection_ready(1 + below(kConnections), out), 0;
          });
          break;
        case 8:
          p.plan_all(below(5) != 0);
          break;
        case 9:
          if (const LegId leg = open_leg(); leg != 0 && p.legs[leg].ended) {
            p.result(leg, below(3) == 0 ? Status{Code::kCorrupt, "x"} : Status{}, 8);
          }
          break;
        case 10:
          if (const LegId leg = open_leg(); leg != 0 && p.legs[leg].cancelled) {
            p.result(leg, {Code::kAborted, "x"});
          }
          break;
        case 11:
          if (next_key > 1 && below(3) == 0) p.cancel(1 + below(next_key));
          break;
        case 12:
          if (below(6) == 0) {
            p.run([&](auto& out) {
              return p.ledger.connection_lost(1 + below(kConnections), {Code::kPeerLost, "x"}, out),
                     0;
            });
          } else {
            p.now_s += static_cast<double>(below(10));
            p.tick();
          }
          break;
      }
    }
    p.run([&](auto& out) { return p.ledger.cancel_all({Code::kAborted, "over"}, out), 0; });
    for (const auto& [leg, log] : p.legs) {
      if (log.opened && !log.completed) {
        CHECK(log.cancelled);
        p.result(leg, {Code::kAborted, "over"});
      }
    }
    CHECK_EQ(p.completions.size(), p.num_owed);
    CHECK_EQ(p.ledger.num_legs(), 0u);
    CHECK(p.ledger.view(p.now_s).empty());
    const LedgerCounts& c = p.ledger.counts();
    CHECK_EQ(c.num_completed + c.num_failed, p.num_owed);
    CHECK_EQ(c.num_legs_opened, p.num_owed);
  }
}
