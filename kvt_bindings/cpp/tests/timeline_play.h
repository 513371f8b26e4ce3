// Runs a StepTimeline and checks, after every call, what must hold whatever the order of calls.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "kvt/step_timeline.h"

namespace play {

using namespace kvt;
using Kind = TimelineEffect::Kind;

inline Incarnation incarnation(std::uint8_t n) {
  Incarnation id;
  id.bytes.fill(n);
  return id;
}

using Key = std::tuple<Incarnation, StepId, std::uint16_t>;

struct Wait {
  Incarnation scheduler;
  StepId step;
  std::uint16_t layer;
  std::uint32_t generation;
  std::uint32_t event_set;
};

struct PartLog {
  StepId step = 0;
  std::set<std::uint16_t> needed;
  std::vector<std::uint16_t> dispatched;
  bool attached = false;
  bool refused = false;
  bool sealed = false;
  bool failed = false;
  bool dropped = false;
  Status status;
};

class Play {
 private:
  template <class Call>
  auto run(Call&& call) {
    TimelineEffects out;
    auto result = call(out);
    for (const TimelineEffect& e : out) look(e);
    return result;
  }

  void look(const TimelineEffect& e) {
    if (e.kind == Kind::kWait) {
      CHECK_EQ(e.generation,
               (records[{e.scheduler, e.step, e.layer}]));  // after the host has seen the record
      waits.push_back({e.scheduler, e.step, e.layer, e.generation, e.event_set});
      return;
    }
    PartLog& p = log.at(e.part);
    CHECK(!p.refused && !p.failed && !p.sealed && !p.dropped);  // nothing follows an end
    switch (e.kind) {
      case Kind::kAttach:
        CHECK(!p.attached && e.send != nullptr);
        p.attached = true;
        p.step = e.step;
        break;
      case Kind::kRefuse:
        CHECK(!p.attached);
        p.refused = true;
        break;
      case Kind::kDispatch: {
        CHECK(p.attached && p.needed.contains(e.layer));
        for (const auto layer : p.dispatched) CHECK(layer != e.layer);
        p.dispatched.push_back(e.layer);
        // Only the last record's event makes a layer final.
        const auto recorded = records[{timeline.scheduler(), e.step, e.layer}];
        CHECK(recorded > 0);
        CHECK_EQ((done[{timeline.scheduler(), e.step, e.layer}]), recorded);
        CHECK(p.dispatched.size() < p.needed.size() || flushing(e.step));
        break;
      }
      case Kind::kSealed:
        CHECK(p.attached && p.dispatched.size() == p.needed.size());
        p.sealed = true;
        break;
      case Kind::kFail:
        CHECK(p.attached == (e.send == nullptr));
        CHECK(!e.status.ok() && !e.status.detail.empty());
        p.failed = true;
        p.status = e.status;
        break;
      case Kind::kWait:
        break;
    }
  }
  // Effects are looked at after the call, so ask the timeline itself.
  bool flushing(StepId step) {
    for (const StepView& v : timeline.view()) {
      if (v.step == step) return v.flushed;
    }
    return true;
  }

 public:
  explicit Play(std::uint16_t num_layers = 2, TimelineLimits limits = {}, std::uint16_t first = 0)
      : timeline(first, num_layers, limits), num_layers_(num_layers) {}

  TimelinePart part(PartId id, std::vector<std::uint16_t> layers) {
    log[id].needed = {layers.begin(), layers.end()};
    return {id, std::make_shared<Send>(), std::move(layers)};
  }
  TimelinePart part(PartId id) {
    std::vector<std::uint16_t> all;
    for (std::uint16_t i = 0; i < num_layers_; ++i) all.push_back(i);
    return part(id, all);
  }

  Status begin(const Incarnation& s) {
    return run([&](auto& out) { return timeline.begin_scheduler(s, out); });
  }
  Status submit(StepId step, TimelinePart p, const Incarnation& s = incarnation(1)) {
    return timeline.submit(s, step, std::move(p));
  }
  Status start(StepId step, std::uint32_t records = 1, const Incarnation& s = incarnation(1)) {
    return run([&](auto& out) { return timeline.start_step(s, step, 10, records, out); });
  }
  SubstepVerdict sub(StepId step, SubstepId k, std::vector<TimelinePart> parts,
                     const Incarnation& s = incarnation(1)) {
    return run([&](auto& out) {
      return timeline.start_substep(s, step, k, std::move(parts), now_s, out);
    });
  }
  Status record(StepId step, std::uint16_t layer) {
    return run([&](auto& out) {
      std::uint32_t set = 0;
      Status can = timeline.event_set_for(step, layer, &set);
      if (!can.ok()) return can;
      // The event is recorded anew: a set that somebody still waits on for another step is a bug.
      for (const Wait& w : waits) {
        CHECK(w.event_set != set || (w.step == step && w.scheduler == timeline.scheduler()));
      }
      ++records[{timeline.scheduler(), step, layer}];
      return timeline.recorded(step, layer, out);
    });
  }
  Status freeze(StepId step, SubstepId* taken) {
    return run([&](auto& out) { return timeline.freeze(step, taken, out); });
  }
  Status flush(StepId step) {
    return run([&](auto& out) {
      Status s = timeline.flush(step, now_s, out);
      if (s.ok()) flushed.insert(step);
      return s;
    });
  }
  void drop(PartId id) {
    log[id].dropped = true;
    run([&](auto& out) { return timeline.drop({id}, out), 0; });
  }
  void expire() {
    run([&](auto& out) { return timeline.expire(now_s, out), 0; });
  }
  // Completes the i-th outstanding wait.
  void complete(std::size_t i, const Status& status = {}) {
    const Wait w = waits.at(i);
    waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(i));
    auto& latest = done[{w.scheduler, w.step, w.layer}];
    if (status.ok()) latest = std::max(latest, w.generation);
    run([&](auto& out) {
      return timeline.event_done(w.scheduler, w.step, w.layer, w.generation, status, out), 0;
    });
  }
  void complete_all(bool newest_first = false) {
    while (!waits.empty()) complete(newest_first ? waits.size() - 1 : 0);
  }

  StepTimeline timeline;
  double now_s = 100;
  std::vector<Wait> waits;
  std::map<PartId, PartLog> log;
  // Numbers of records, and the last record whose event completed, by (scheduler, step, layer).
  std::map<Key, std::uint32_t> records;
  std::map<Key, std::uint32_t> done;
  std::set<StepId> flushed;

 private:
  const std::uint16_t num_layers_;
};

}  // namespace play
