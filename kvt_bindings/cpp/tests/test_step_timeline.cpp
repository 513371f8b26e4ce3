#include <algorithm>
#include <numeric>
#include <random>

#include "timeline_play.h"

using namespace play;

namespace {
constexpr auto kA = 1;
}

TEST(layers_go_out_as_their_events_complete) {
  Play p(3);
  CHECK(p.submit(7, p.part(kA)).ok());
  CHECK(p.start(7).ok());
  CHECK(p.log[kA].attached);
  CHECK(p.timeline.awaits_record());
  CHECK(p.record(7, 0).ok());
  CHECK_EQ(p.waits.size(), 1u);
  CHECK(p.log[kA].dispatched.empty());
  p.complete(0);
  CHECK_EQ(p.log[kA].dispatched.size(), 1u);
  CHECK(p.record(7, 1).ok());
  CHECK(p.record(7, 2).ok());
  CHECK(!p.timeline.awaits_record());
  p.complete_all();
  CHECK_EQ(p.log[kA].dispatched.size(), 2u);  // the last one only after the flush
  SubstepId taken = 9;
  CHECK(p.freeze(7, &taken).ok());
  CHECK_EQ(taken, 0u);
  CHECK(p.flush(7).ok());
  CHECK(p.log[kA].sealed);
  CHECK(p.timeline.view().empty());
}

TEST(only_needed_layers_are_waited_for) {
  Play p(4);
  p.submit(1, p.part(kA, {2}));
  p.start(1);
  for (std::uint16_t i = 0; i < 4; ++i) p.record(1, i);
  REQUIRE(p.waits.size() == 1);
  CHECK_EQ(p.waits[0].layer, 2);
  p.flush(1);
  p.complete_all();
  CHECK(p.log[kA].sealed);
}

TEST(a_layer_not_recorded_fails_by_name_and_only_those_who_need_it) {
  Play p(3);
  p.submit(4, p.part(1, {0, 1}));
  p.submit(4, p.part(2, {0, 2}));
  p.start(4);
  p.record(4, 0);
  p.record(4, 2);
  p.complete_all();
  p.flush(4);
  CHECK(p.log[1].failed);
  CHECK_EQ(p.log[1].status.detail, std::string("layer 1 of step 4 was not recorded"));
  CHECK(p.log[2].sealed);
}

TEST(the_last_record_counts) {
  Play p(2);
  p.submit(1, p.part(kA));
  p.start(1);
  p.record(1, 0);
  p.record(1, 0);  // before the first one's event completed
  REQUIRE(p.waits.size() == 2);
  p.complete(0);  // generation 1: not final any more
  CHECK(p.log[kA].dispatched.empty());
  p.complete(0);
  CHECK_EQ(p.log[kA].dispatched.size(), 1u);
  p.record(1, 1);
  p.flush(1);
  p.complete_all();
  CHECK(p.log[kA].sealed);
}

TEST(the_event_of_an_older_record_says_nothing) {
  Play p(1);
  p.submit(1, p.part(kA));
  p.start(1);
  p.record(1, 0);
  p.record(1, 0);
  REQUIRE(p.waits.size() == 2);
  p.complete(1);
  p.complete(0, {Code::kInternal, "of work that was done again"});
  p.flush(1);
  CHECK(p.log[kA].sealed);
}

TEST(a_record_after_the_bytes_went_out_fails_the_send) {
  Play p(2);
  p.submit(1, p.part(kA));
  p.start(1);
  p.record(1, 0);
  p.complete_all();
  CHECK_EQ(p.log[kA].dispatched.size(), 1u);
  p.record(1, 0);
  CHECK(p.log[kA].failed);
  CHECK(p.log[kA].status.detail.find("recorded again") != std::string::npos);
}

TEST(a_record_of_the_held_last_layer_replaces_it) {
  Play p(1);
  p.submit(1, p.part(kA));
  p.start(1);
  p.record(1, 0);
  p.complete_all();
  CHECK(p.log[kA].dispatched.empty());
  p.record(1, 0);
  p.flush(1);
  CHECK(p.log[kA].dispatched.empty());
  p.complete_all();
  CHECK(p.log[kA].sealed);
}

TEST(several_records_per_layer_are_awaited_until_the_flush) {
  Play p(2);
  p.submit(1, p.part(kA));
  p.start(1, 2);
  p.record(1, 0);
  CHECK(p.waits.empty());
  p.record(1, 0);
  p.record(1, 1);
  p.complete_all();
  CHECK_EQ(p.log[kA].dispatched.size(), 1u);
  p.flush(1);  // layer 1 got one of two: what there is counts
  p.complete_all();
  CHECK(p.log[kA].sealed);
  CHECK(!p.record(1, 1).ok());
}

TEST(a_failed_event_fails_the_send_with_its_code) {
  Play p(2);
  p.submit(1, p.part(kA));
  p.start(1);
  p.record(1, 0);
  p.complete(0, {Code::kInternal, "cuEventSynchronize: CUDA_ERROR_LAUNCH_FAILED"});
  CHECK(p.log[kA].failed);
  CHECK(p.log[kA].status.detail.find("layer 0 of step 1") != std::string::npos);
  CHECK(p.log[kA].status.detail.find("LAUNCH_FAILED") != std::string::npos);
}

TEST(substeps_early_timely_late) {
  Play p;
  CHECK(p.sub(5, 2, {p.part(12)}) == SubstepVerdict::kKept);
  CHECK(p.sub(5, 1, {p.part(11)}) == SubstepVerdict::kKept);
  CHECK(p.start(5).ok());
  CHECK(p.log[11].attached && p.log[12].attached);
  CHECK(p.sub(5, 2, {p.part(22)}) == SubstepVerdict::kDuplicate);
  CHECK(p.log[22].refused);
  CHECK(p.sub(5, 4, {p.part(14)}) == SubstepVerdict::kKept);  // behind a gap
  CHECK(p.sub(5, 3, {p.part(13)}) == SubstepVerdict::kTaken);
  CHECK(p.log[14].attached);
  CHECK(p.sub(5, 6, {p.part(16)}) == SubstepVerdict::kKept);
  SubstepId taken = 0;
  CHECK(p.freeze(5, &taken).ok());
  CHECK_EQ(taken, 4u);
  CHECK(p.log[16].refused);
  CHECK(p.sub(5, 5, {p.part(15)}) == SubstepVerdict::kLate);
  CHECK(p.sub(5, 3, {p.part(23)}) == SubstepVerdict::kDuplicate);
  p.flush(5);
  p.start(6);
  CHECK(p.freeze(5, &taken).ok());
  CHECK_EQ(taken, 4u);  // for ever
  CHECK(p.sub(5, 5, {p.part(25)}) == SubstepVerdict::kLate);
  CHECK(p.sub(4, 1, {p.part(41)}) == SubstepVerdict::kLate);  // a step passed over
  CHECK(p.sub(6, 0, {p.part(60)}) == SubstepVerdict::kLate);
  CHECK_EQ(p.timeline.num_kept(), 0u);
}

TEST(a_substep_that_attaches_in_mid_step_gets_the_layers_already_recorded) {
  Play p(3);
  p.start(1);
  p.record(1, 0);
  p.record(1, 1);
  CHECK(p.waits.empty());  // nobody needed them
  p.sub(1, 1, {p.part(kA)});
  CHECK_EQ(p.waits.size(), 2u);
  p.complete_all(true);
  CHECK_EQ(p.log[kA].dispatched.size(), 2u);
  p.sub(1, 2, {p.part(2)});  // their events are known complete: at once
  CHECK_EQ(p.log[2].dispatched.size(), 2u);
  p.record(1, 2);
  p.flush(1);
  p.complete_all();
  CHECK(p.log[kA].sealed && p.log[2].sealed);
}

TEST(early_substeps_wait_for_running_steps_and_then_five_seconds) {
  Play p;
  p.start(1);
  p.sub(2, 1, {p.part(1)});
  p.sub(2, 3, {p.part(3)});
  p.now_s += 60;  // a long step
  p.expire();
  CHECK(!p.log[1].refused);
  CHECK(p.timeline.next_deadline_s() < 0);
  p.flush(1);
  CHECK_EQ(p.timeline.next_deadline_s(), p.now_s + 5.0);
  p.now_s += 4.9;
  p.expire();
  CHECK(!p.log[1].refused);
  p.now_s += 0.2;
  p.expire();
  CHECK(p.log[1].refused && p.log[3].refused);
  CHECK(p.timeline.next_deadline_s() < 0);
  // Refused is for ever, even if the step does start.
  CHECK(p.sub(2, 1, {p.part(101)}) == SubstepVerdict::kLate);
  SubstepId taken = 9;
  p.start(2);
  p.freeze(2, &taken);
  CHECK_EQ(taken, 0u);
}

TEST(expiry_of_a_later_number_leaves_the_earlier_one) {
  Play p;
  p.sub(2, 2, {p.part(2)});
  p.now_s += 3;
  p.sub(2, 1, {p.part(1)});
  p.now_s += 3;
  p.expire();
  CHECK(p.log[2].refused && !p.log[1].refused);
  p.start(2);
  CHECK(p.log[1].attached);
  CHECK(p.sub(2, 2, {p.part(22)}) == SubstepVerdict::kTaken || p.log[22].refused);
}

TEST(steps_passed_over_end_what_was_meant_for_them) {
  Play p;
  p.submit(3, p.part(1));
  p.sub(3, 1, {p.part(2)});
  p.start(4);
  CHECK(p.log[1].failed);
  CHECK(p.log[1].status.code == Code::kAborted);
  CHECK(p.log[2].refused);
  CHECK(!p.submit(4, p.part(9)).ok());
  CHECK(!p.start(4).ok());
  CHECK(!p.start(3).ok());
}

TEST(several_steps_in_flight_share_no_events) {
  Play p(2);
  for (StepId s = 1; s <= 3; ++s) {
    p.submit(s, p.part(s));
    p.start(s);
    p.record(s, 0);
    p.record(s, 1);
  }
  std::set<std::uint32_t> sets;
  for (const Wait& w : p.waits) sets.insert(w.event_set);
  CHECK_EQ(sets.size(), 3u);
  for (StepId s = 3; s >= 1; --s) p.flush(s);
  p.complete_all(true);
  for (StepId s = 1; s <= 3; ++s) CHECK(p.log[s].sealed);
  for (StepId s = 4; s <= 40; ++s) {  // and are used again
    p.submit(s, p.part(s));
    p.start(s);
    p.record(s, 0);
    p.record(s, 1);
    p.flush(s);
    p.complete_all();
    CHECK(p.log[s].sealed);
  }
  CHECK_EQ(p.timeline.num_event_sets(), 3u);
}

TEST(too_many_open_steps_is_busy_and_changes_nothing) {
  TimelineLimits limits;
  limits.max_open_steps = 2;
  Play p(1, limits);
  p.start(1);
  p.start(2);
  p.sub(3, 1, {p.part(1)});
  CHECK(p.start(3).code == Code::kBusy);
  p.flush(1);
  CHECK(p.start(3).ok());
  CHECK(p.log[1].attached);
}

TEST(kept_substeps_are_bounded) {
  TimelineLimits limits;
  limits.max_kept_substeps = 3;
  Play p(1, limits);
  for (SubstepId k = 1; k <= 3; ++k) {
    CHECK(p.sub(9, k, {p.part(k)}) == SubstepVerdict::kKept);
  }
  CHECK(p.sub(9, 4, {p.part(4)}) == SubstepVerdict::kFull);
  CHECK(p.log[4].refused);
  p.start(9);
  CHECK_EQ(p.timeline.num_kept(), 0u);
}

TEST(a_new_scheduler_ends_everything_of_the_old_one) {
  Play p(2);
  p.submit(1, p.part(1));
  p.submit(2, p.part(2));
  p.start(1);
  p.record(1, 0);
  p.sub(1, 2, {p.part(3)});
  p.sub(2, 1, {p.part(4)});
  p.sub(1, 1, {p.part(5)}, incarnation(2));  // of a scheduler yet to speak: early
  CHECK(p.start(1, 1, incarnation(2)).ok());
  CHECK(p.log[1].failed && p.log[1].status.code == Code::kAborted);
  CHECK(p.log[2].failed && p.log[3].refused && p.log[4].refused);
  CHECK(p.log[5].attached);
  CHECK(p.sub(1, 1, {p.part(6)}) == SubstepVerdict::kStale);
  CHECK(p.start(7).code == Code::kGone);
  CHECK(p.submit(9, p.part(7)).code == Code::kGone);
  CHECK(p.begin(incarnation(1)).code == Code::kGone);
  p.record(1, 0);  // step 1 of the new one, in another event set: the play checks it
  p.record(1, 1);
  p.flush(1);
  while (!p.waits.empty()) p.complete(0);
  CHECK(p.log[5].sealed);
}

TEST(a_dropped_part_is_not_waited_for) {
  Play p(2);
  p.submit(1, p.part(kA));
  p.start(1);
  p.drop(kA);
  CHECK(!p.timeline.awaits_record());
  p.record(1, 0);
  CHECK(p.waits.empty());
  p.flush(1);
  CHECK(p.timeline.view().empty());
}

TEST(what_is_not_this_ranks_is_refused) {
  Play p(2, {}, 4);  // layers 4 and 5
  CHECK(!p.submit(1, p.part(1, {3})).ok());
  CHECK(!p.submit(1, p.part(2, {6})).ok());
  p.start(1);
  CHECK(!p.record(1, 3).ok());
  CHECK(!p.record(1, 6).ok());
  CHECK(!p.record(2, 4).ok());
  p.sub(1, 1, {p.part(3, {6})});
  CHECK(p.log[3].failed);
  SubstepId taken = 0;
  CHECK(!p.freeze(8, &taken).ok());
  CHECK(!p.flush(8).ok());
  CHECK(!p.start(2, 0).ok());
}

TEST(an_empty_send_is_sealed_at_once) {
  Play p;
  p.sub(1, 1, {p.part(1, {})});
  p.start(1);
  CHECK(p.log[1].sealed);
}

// Every order of: start, three substeps, freeze. The answer follows from who came before whom.
TEST(every_order_of_substeps_start_and_freeze) {
  enum Op { kStart, kSub1, kSub2, kSub3, kFreeze, kNumOps };
  std::vector<int> order(kNumOps);
  std::iota(order.begin(), order.end(), 0);
  do {
    Play p(1);
    std::map<int, std::size_t> at;
    for (std::size_t i = 0; i < order.size(); ++i) at[order[i]] = i;
    const bool frozen = at[kFreeze] > at[kStart];  // otherwise the freeze is refused
    SubstepId expected = 0;
    while (expected < 3) {
      const auto arrived = at[static_cast<int>(kSub1 + expected)];
      if (frozen && arrived > at[kFreeze]) break;
      ++expected;
    }
    for (const int op : order) {
      SubstepId taken = 99;
      if (op == kStart) CHECK(p.start(1).ok());
      if (op >= kSub1 && op <= kSub3) {
        p.sub(1, static_cast<SubstepId>(op), {p.part(static_cast<PartId>(op))});
      }
      if (op == kFreeze) {
        CHECK_EQ(p.freeze(1, &taken).ok(), frozen);
        if (frozen) CHECK_EQ(taken, expected);
      }
    }
    SubstepId taken = 99;
    CHECK(p.freeze(1, &taken).ok());
    CHECK_EQ(taken, expected);
    for (PartId id = 1; id <= 3; ++id) {
      CHECK_EQ(p.log[id].attached, id <= expected);
      CHECK_EQ(p.log[id].refused, id > expected);
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

// Every order of: start, two substeps, records of two layers (one of them twice), freeze, flush;
// with events that complete at once, at the end, and at the end in reverse.
TEST(every_order_of_a_whole_step) {
  enum Op { kStart, kSub1, kSub2, kRecord0, kRecord0Again, kRecord1, kFreeze, kFlush, kNumOps };
  std::vector<int> order(kNumOps);
  std::iota(order.begin(), order.end(), 0);
  std::size_t num_sealed = 0;
  std::size_t num_failed = 0;
  do {
    for (int events = 0; events < 3; ++events) {
      Play p(2);
      std::map<int, std::size_t> at;
      for (std::size_t i = 0; i < order.size(); ++i) at[order[i]] = i;
      for (const int op : order) {
        SubstepId taken = 0;
        switch (op) {
          case kStart:
            p.start(1);
            break;
          case kSub1:
          case kSub2:
            p.sub(1, static_cast<SubstepId>(op), {p.part(static_cast<PartId>(op))});
            break;
          case kRecord0:
          case kRecord0Again:
            p.record(1, 0);
            break;
          case kRecord1:
            p.record(1, 1);
            break;
          case kFreeze:
            p.freeze(1, &taken);
            break;
          case kFlush:
            p.flush(1);
            break;
        }
        if (events == 0) p.complete_all();
      }
      p.complete_all(events == 2);
      const bool was_flushed = at[kFlush] > at[kStart];
      const auto counts = [&](int op) { return at[op] > at[kStart] && at[op] < at[kFlush]; };
      const bool both_recorded = (counts(kRecord0) || counts(kRecord0Again)) && counts(kRecord1);
      for (PartId id = 1; id <= 2; ++id) {
        const PartLog& log = p.log[id];
        if (was_flushed) {
          // A send that is in ends in one way; sealed only if every layer was recorded.
          CHECK_EQ(log.attached, !log.refused);
          if (log.attached) CHECK(log.sealed != log.failed);
          if (log.sealed) CHECK(both_recorded);
          if (log.attached && events != 0) CHECK_EQ(log.sealed, both_recorded);
          num_sealed += log.sealed;
          num_failed += log.failed;
        } else {
          CHECK(!log.sealed);
        }
      }
      CHECK(!was_flushed || p.timeline.view().empty());
      CHECK(!was_flushed || !p.timeline.awaits_record());
    }
  } while (std::next_permutation(order.begin(), order.end()));
  CHECK(num_sealed > 1000);
  CHECK(num_failed > 1000);
}

// Long random runs over several steps, incarnations and drops; the play checks every effect.
TEST(random_runs_keep_the_invariants) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
    TimelineLimits limits;
    limits.max_open_steps = 4;
    limits.max_kept_substeps = 6;
    Play p(3, limits);
    PartId next_part = 1;
    StepId step = 0;
    std::uint8_t scheduler = 1;
    const auto some_part = [&] {
      std::vector<std::uint16_t> layers;
      for (std::uint16_t i = 0; i < 3; ++i) {
        if (below(3) != 0) layers.push_back(i);
      }
      return p.part(next_part++, layers);
    };
    for (int i = 0; i < 200; ++i) {
      const StepId near = step + below(4) - (step > 1 ? below(3) : 0);
      SubstepId taken = 0;
      switch (below(12)) {
        case 0:
          if (!p.submit(near, some_part(), incarnation(scheduler)).ok()) p.log.erase(next_part - 1);
          break;
        case 1:
          if (p.start(step + 1 + below(2), 1 + below(2), incarnation(scheduler)).ok()) {
            step = p.timeline.view().empty() ? step + 1 : p.timeline.view().back().step;
          }
          break;
        case 2:
        case 3:
          p.sub(near, 1 + below(4), {some_part(), some_part()}, incarnation(scheduler));
          break;
        case 4:
        case 5:
        case 6:
          p.record(near, static_cast<std::uint16_t>(below(3)));
          break;
        case 7:
          p.freeze(near, &taken);
          break;
        case 8:
          p.flush(near);
          break;
        case 9:
        case 10:
          if (!p.waits.empty()) {
            p.complete(below(static_cast<unsigned>(p.waits.size())),
                       below(10) == 0 ? Status{Code::kInternal, "driver"} : Status{});
          }
          break;
        case 11:
          p.now_s += below(4);
          p.expire();
          if (below(20) == 0) {
            ++scheduler;
            p.begin(incarnation(scheduler));
            step = 0;
          }
          break;
      }
    }
  }
}
