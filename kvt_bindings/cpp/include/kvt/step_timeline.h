// The engine's steps as the sender sees them: which sends belong to which step, and which layer of
// which send may go out now. Pure: no clock, no thread, no event, no I/O; the caller serialises the
// calls, gives the time, and executes the returned effects in order.
//
// Rules kept here, whatever the order of calls:
//  * Steps start in ascending order within one scheduler incarnation; several may be open.
//  * Substeps of a step are numbered from 1 and taken only contiguously. Before the step starts one
//    is kept (early), until the step is frozen it is taken or kept behind a gap (timely),
//    afterwards it is refused (late). freeze() answers the highest one taken, for ever the same.
//  * A layer of a step is ready when its last record's event has completed: the record that makes
//    the count given at start_step full, or whatever was recorded last when the step is flushed.
//  * A send hands over its last outstanding layer only once its step is flushed. Until then another
//    record of a layer that went out already can still be seen, and fails the send: a send that
//    ends well never carried old bytes.
//  * A layer that a send needs and that was not recorded when the step is flushed fails that send.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvt/code.h"
#include "kvt/ids.h"
#include "kvt/sends.h"

namespace kvt {

using StepId = std::uint64_t;
using SubstepId = std::uint64_t;  // from 1
using PartId = std::uint64_t;     // one Send, numbered by the caller, never reused

struct TimelinePart {
  PartId id = 0;
  SharedSend send;                    // not looked into
  std::vector<std::uint16_t> layers;  // global numbers that it needs, ascending, no repeats
};

enum class SubstepVerdict : std::uint8_t {
  kTaken,      // attached to its step
  kKept,       // early, or behind a missing number: decided later
  kLate,       // its step is frozen, over or was given up: refused
  kDuplicate,  // this number is already here: ignored
  kStale,      // of a scheduler incarnation that has ended: refused
  kFull,       // too much is kept already: refused
};
const char* verdict_name(SubstepVerdict verdict);

struct TimelineEffect {
  enum class Kind : std::uint8_t {
    kAttach,    // `part` is in: its transfer begins or goes on
    kRefuse,    // `part` is out: forget it; the answer to freeze() is its end
    kWait,      // wait for the event (event_set, layer) of `step`, then call event_done(generation)
    kDispatch,  // `layer` of `part` is final: send it
    kSealed,    // all layers of `part` were dispatched
    kFail,      // `part` fails with `status`
  };
  Kind kind;
  PartId part = 0;
  SharedSend send{};  // kAttach, kRefuse; kFail of a send that was never attached
  Incarnation scheduler{};
  StepId step = 0;
  std::uint16_t layer = 0;
  std::uint32_t generation = 0;
  std::uint32_t event_set = 0;
  Status status{};
};
using TimelineEffects = std::vector<TimelineEffect>;

struct TimelineLimits {
  std::size_t max_open_steps = 64;  // event sets; more at once means that steps are not flushed
  std::size_t max_kept_substeps = 4096;     // early or behind a gap, over all steps
  std::size_t max_remembered_steps = 4096;  // frozen steps whose answer is still known
  double early_s = 5.0;  // how long an early substep waits once no step is running
};

// One open step, for people.
struct StepView {
  StepId step = 0;
  std::uint64_t sched_tokens = 0;
  bool frozen = false;
  bool flushed = false;
  SubstepId taken_substep = 0;
  std::size_t num_kept_substeps = 0;
  std::size_t num_parts = 0;           // sends that have not ended
  std::vector<std::uint16_t> missing;  // layers that these need and that were not recorded
  std::vector<std::uint16_t> pending;  // recorded, event not complete, needed
};

class StepTimeline {
 public:
  // The rank's layers are [first_layer, first_layer + num_layers), in global numbers.
  StepTimeline(std::uint16_t first_layer, std::uint16_t num_layers, TimelineLimits limits = {});

  // The scheduler of this incarnation speaks from now on; everything of the one before ends: its
  // sends fail with ABORTED, what it had kept is refused. An ended incarnation never comes back.
  Status begin_scheduler(const Incarnation& scheduler, TimelineEffects& out);

  // The current scheduler has ended and no other one speaks yet.
  void end_scheduler(TimelineEffects& out);

  // Adds a send to a step that has not started. GONE for an ended scheduler, BAD_REQUEST for a step
  // that has started already or a layer that is not this rank's.
  Status submit(const Incarnation& scheduler, StepId step, TimelinePart part);

  // GONE: ended scheduler; BAD_REQUEST: not later than the last step started; BUSY: too many open.
  // `records_per_layer` >= 1. A failure changes nothing.
  Status start_step(const Incarnation& scheduler, StepId step, std::uint64_t sched_tokens,
                    std::uint32_t records_per_layer, TimelineEffects& out);

  SubstepVerdict start_substep(const Incarnation& scheduler, StepId step, SubstepId substep,
                               std::vector<TimelinePart> parts, double now_s, TimelineEffects& out);

  // The event set of an open step to record `layer` into; then record on the stream; then call
  // recorded(). BAD_REQUEST: no such open step, flushed, or not this rank's layer.
  Status event_set_for(StepId step, std::uint16_t layer, std::uint32_t* event_set) const;
  Status recorded(StepId step, std::uint16_t layer, TimelineEffects& out);

  // The wait of a kWait effect is over. Unknown ones (the step was aborted) are ignored.
  void event_done(const Incarnation& scheduler, StepId step, std::uint16_t layer,
                  std::uint32_t generation, const Status& status, TimelineEffects& out);

  // The highest contiguous substep taken; repeatable. BAD_REQUEST if the step never started or is
  // forgotten.
  Status freeze(StepId step, SubstepId* taken, TimelineEffects& out);

  // No more records. Freezes a step that is not frozen. A second flush changes nothing.
  Status flush(StepId step, double now_s, TimelineEffects& out);

  // The sends have ended elsewhere (cancelled, peer lost): nothing is waited for on their behalf.
  void drop(const std::vector<PartId>& parts, TimelineEffects& out);

  // Refuses the early substeps whose time is up.
  void expire(double now_s, TimelineEffects& out);
  // When expire() has something to do, or a negative number.
  double next_deadline_s() const;

  // True while some open step has a needed layer that is not recorded: a record is worth awaiting.
  bool awaits_record() const { return num_awaited_ > 0; }
  // Events needed so far: sets [0, num_event_sets()), each of num_layers events.
  std::uint32_t num_event_sets() const { return num_event_sets_; }

  std::vector<StepView> view() const;
  const Incarnation& scheduler() const { return scheduler_; }
  std::size_t num_kept() const { return num_kept_; }
  std::uint64_t num_refused() const { return num_refused_; }

 private:
  struct Part {
    TimelinePart of;
    std::size_t num_outstanding = 0;  // layers not dispatched
    bool alive = true;
  };
  struct Layer {
    std::uint32_t num_records = 0;       // also the generation of the last record
    std::uint32_t waited = 0;            // the last generation that kWait was given for
    std::uint32_t done = 0;              // the last generation whose event completed
    bool awaited = false;                // counted in num_awaited_
    Status failed;                       // its event failed
    std::vector<std::uint32_t> pending;  // indexes of the living parts that need it
    std::vector<std::uint32_t> sent;     // indexes of the parts that it was dispatched for
  };
  struct Kept {
    std::vector<TimelinePart> parts;
    double arrived_s = 0;
  };
  using KeptSubsteps = std::map<SubstepId, Kept>;
  struct Step {
    StepId id = 0;
    std::uint64_t sched_tokens = 0;
    std::uint32_t records_per_layer = 1;
    std::uint32_t event_set = 0;
    bool frozen = false;
    bool flushed = false;
    SubstepId taken = 0;
    KeptSubsteps gap;  // numbers after a missing one
    std::vector<Part> parts;
    std::vector<Layer> layers;
    std::size_t num_waits = 0;  // kWait given, event_done not yet called
    std::size_t num_alive = 0;
  };
  using StepKey = std::pair<Incarnation, StepId>;

  bool is_ended(const Incarnation& scheduler) const;
  bool owns(std::uint16_t layer) const;
  Layer& layer_of(Step& step, std::uint16_t layer) { return step.layers[layer - first_layer_]; }
  void attach(Step& step, TimelinePart part, TimelineEffects& out);
  void take_contiguous(Step& step, KeptSubsteps& from, TimelineEffects& out);
  // Leaves `parts` alone unless the verdict is kKept.
  SubstepVerdict keep(KeptSubsteps& in, SubstepId substep, std::vector<TimelinePart>&& parts,
                      double now_s);
  void refuse(KeptSubsteps& kept, TimelineEffects& out);
  void refuse(const std::vector<TimelinePart>& parts, TimelineEffects& out);
  // Ends a part inside the timeline; a failing `status` is also told.
  void end_part(Step& step, std::uint32_t index, const Status& status, TimelineEffects& out);
  // Waits for, dispatches or fails whatever has become possible for one layer of one step.
  void advance(Step& step, std::uint16_t layer, TimelineEffects& out);
  void dispatch(Step& step, std::uint16_t layer, TimelineEffects& out);
  void recount(const Step& step, Layer& layer);
  void freeze(Step& step, TimelineEffects& out);
  void retire(std::map<StepId, Step>::iterator step);

  const std::uint16_t first_layer_;
  const std::uint16_t num_layers_;
  const TimelineLimits limits_;

  Incarnation scheduler_;  // zero: none yet
  std::deque<Incarnation> ended_;
  StepId last_started_ = 0;  // meaningful if any_started_
  bool any_started_ = false;
  double last_flush_s_ = 0;
  std::size_t num_running_ = 0;  // open and not flushed
  std::map<StepId, Step> open_;
  std::map<StepKey, Step> ending_;       // of an ended scheduler, events still waited for
  std::map<StepId, SubstepId> answers_;  // of frozen steps
  std::map<StepKey, std::vector<TimelinePart>> submitted_;
  std::map<StepKey, KeptSubsteps> early_;
  std::map<StepKey, SubstepId> refused_from_;  // of steps not started: early ones given up
  std::vector<std::uint32_t> free_sets_;
  std::uint32_t num_event_sets_ = 0;
  std::size_t num_kept_ = 0;
  std::size_t num_awaited_ = 0;
  std::uint64_t num_refused_ = 0;
};

}  // namespace kvt
