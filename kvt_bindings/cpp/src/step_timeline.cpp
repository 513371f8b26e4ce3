#include "kvt/step_timeline.h"

#include <algorithm>
#include <utility>

namespace kvt {
namespace {

using Kind = TimelineEffect::Kind;

constexpr std::size_t kMaxEndedSchedulers = 64;

Status bad(std::string detail) {
  return {Code::kBadRequest, std::move(detail)};
}

std::string step_text(StepId step) {
  return "step " + std::to_string(step);
}

std::string layer_text(StepId step, std::uint16_t layer) {
  return "layer " + std::to_string(layer) + " of " + step_text(step);
}

}  // namespace

const char* verdict_name(SubstepVerdict verdict) {
  switch (verdict) {
    case SubstepVerdict::kTaken:
      return "taken";
    case SubstepVerdict::kKept:
      return "kept";
    case SubstepVerdict::kLate:
      return "late";
    case SubstepVerdict::kDuplicate:
      return "duplicate";
    case SubstepVerdict::kStale:
      return "stale";
    case SubstepVerdict::kFull:
      return "full";
  }
  return "unknown";
}

StepTimeline::StepTimeline(std::uint16_t first_layer, std::uint16_t num_layers,
                           TimelineLimits limits)
    : first_layer_(first_layer), num_layers_(num_layers), limits_(limits) {}

bool StepTimeline::is_ended(const Incarnation& scheduler) const {
  return std::find(ended_.begin(), ended_.end(), scheduler) != ended_.end();
}

bool StepTimeline::owns(std::uint16_t layer) const {
  return layer >= first_layer_ && layer - first_layer_ < num_layers_;
}

// --- schedulers and steps ---

Status StepTimeline::begin_scheduler(const Incarnation& scheduler, TimelineEffects& out) {
  if (scheduler == scheduler_) return {};
  if (scheduler.is_zero()) return bad("a scheduler incarnation is not zero");
  if (is_ended(scheduler)) return {Code::kGone, "scheduler " + scheduler.hex() + " has ended"};
  end_scheduler(out);
  scheduler_ = scheduler;
  return {};
}

void StepTimeline::end_scheduler(TimelineEffects& out) {
  if (scheduler_.is_zero()) return;
  const Status ended{Code::kAborted, "scheduler " + scheduler_.hex() + " was replaced"};
  for (auto& [id, step] : open_) {
    refuse(step.gap, out);
    for (std::uint32_t i = 0; i < step.parts.size(); ++i) {
      if (step.parts[i].alive) end_part(step, i, ended, out);
    }
    // Its events may not be recorded again before the waits for them are over.
    if (step.num_waits > 0) {
      ending_.emplace(StepKey{scheduler_, id}, std::move(step));
    } else {
      free_sets_.push_back(step.event_set);
    }
  }
  open_.clear();
  num_running_ = 0;
  for (auto it = submitted_.begin(); it != submitted_.end();) {
    if (it->first.first != scheduler_) {
      ++it;
      continue;
    }
    for (const TimelinePart& part : it->second) {
      out.push_back({.kind = Kind::kFail,
                     .part = part.id,
                     .send = part.send,
                     .scheduler = scheduler_,
                     .status = ended});
    }
    it = submitted_.erase(it);
  }
  for (auto it = early_.begin(); it != early_.end();) {
    if (it->first.first != scheduler_) {
      ++it;
      continue;
    }
    refuse(it->second, out);
    it = early_.erase(it);
  }
  std::erase_if(refused_from_, [this](const auto& e) { return e.first.first == scheduler_; });
  answers_.clear();
  any_started_ = false;
  ended_.push_back(scheduler_);
  if (ended_.size() > kMaxEndedSchedulers) ended_.pop_front();
  scheduler_ = {};
}

Status StepTimeline::submit(const Incarnation& scheduler, StepId step, TimelinePart part) {
  if (is_ended(scheduler)) return {Code::kGone, "scheduler " + scheduler.hex() + " has ended"};
  if (scheduler == scheduler_ && any_started_ && step <= last_started_) {
    return bad(step_text(step) + " has started: sends are submitted before that");
  }
  for (const std::uint16_t layer : part.layers) {
    if (!owns(layer)) return bad("layer " + std::to_string(layer) + " is not of this rank");
  }
  submitted_[{scheduler, step}].push_back(std::move(part));
  return {};
}

Status StepTimeline::start_step(const Incarnation& scheduler, StepId step,
                                std::uint64_t sched_tokens, std::uint32_t records_per_layer,
                                TimelineEffects& out) {
  if (records_per_layer == 0) return bad("records_per_layer is at least 1");
  if (scheduler == scheduler_ && any_started_ && step <= last_started_) {
    return bad(step_text(step) + " after " + step_text(last_started_) + ": steps ascend");
  }
  // Each step whose events are still waited for keeps its set, also that of an ended scheduler.
  std::size_t num_held = ending_.size();
  for (const auto& [id, open] : open_) {
    if (scheduler == scheduler_ || open.num_waits > 0) ++num_held;
  }
  if (num_held >= limits_.max_open_steps) {
    return {Code::kBusy, std::to_string(num_held) + " steps are open: " +
                             (open_.empty() ? "none of this scheduler's"
                                            : "the oldest is " + step_text(open_.begin()->first))};
  }
  if (const Status begun = begin_scheduler(scheduler, out); !begun.ok()) return begun;

  // Steps that were passed over never start: what was meant for them ends here.
  const StepKey key{scheduler, step};
  for (auto it = submitted_.lower_bound({scheduler, 0}); it != submitted_.end() && it->first < key;
       it = submitted_.erase(it)) {
    for (const TimelinePart& part : it->second) {
      out.push_back({.kind = Kind::kFail,
                     .part = part.id,
                     .send = part.send,
                     .scheduler = scheduler,
                     .status = {Code::kAborted, step_text(it->first.second) + " never started"}});
    }
  }
  for (auto it = early_.lower_bound({scheduler, 0}); it != early_.end() && it->first < key;
       it = early_.erase(it)) {
    refuse(it->second, out);
  }
  std::erase_if(refused_from_, [&key](const auto& e) {
    return e.first.first == key.first && e.first.second < key.second;
  });

  last_started_ = step;
  any_started_ = true;
  Step& opened = open_[step];
  opened.id = step;
  opened.sched_tokens = sched_tokens;
  opened.records_per_layer = records_per_layer;
  if (free_sets_.empty()) free_sets_.push_back(num_event_sets_++);
  opened.event_set = free_sets_.back();
  free_sets_.pop_back();
  opened.layers.resize(num_layers_);
  ++num_running_;

  if (const auto it = submitted_.find(key); it != submitted_.end()) {
    for (TimelinePart& part : it->second) attach(opened, std::move(part), out);
    submitted_.erase(it);
  }
  if (const auto it = early_.find(key); it != early_.end()) {
    take_contiguous(opened, it->second, out);
    opened.gap = std::move(it->second);
    early_.erase(it);
  }
  return {};
}

Status StepTimeline::freeze(StepId step, SubstepId* taken, TimelineEffects& out) {
  if (const auto it = open_.find(step); it != open_.end()) freeze(it->second, out);
  const auto answer = answers_.find(step);
  if (answer == answers_.end()) return bad(step_text(step) + " has not started, or is forgotten");
  *taken = answer->second;
  return {};
}

void StepTimeline::freeze(Step& step, TimelineEffects& out) {
  if (step.frozen) return;
  step.frozen = true;
  refuse(step.gap, out);
  answers_[step.id] = step.taken;
  if (answers_.size() > limits_.max_remembered_steps) answers_.erase(answers_.begin());
}

Status StepTimeline::flush(StepId id, double now_s, TimelineEffects& out) {
  const auto it = open_.find(id);
  if (it == open_.end()) {
    if (answers_.contains(id)) return {};
    return bad(step_text(id) + " has not started, or is forgotten");
  }
  Step& step = it->second;
  if (step.flushed) return {};
  freeze(step, out);
  step.flushed = true;
  --num_running_;
  last_flush_s_ = now_s;
  for (std::uint16_t i = 0; i < num_layers_; ++i) {
    Layer& layer = step.layers[i];
    recount(step, layer);
    if (layer.num_records > 0 || layer.pending.empty()) continue;
    const auto number = static_cast<std::uint16_t>(first_layer_ + i);
    const Status missing{Code::kInternal, layer_text(id, number) + " was not recorded"};
    while (!layer.pending.empty()) end_part(step, layer.pending.back(), missing, out);
  }
  for (std::uint16_t i = 0; i < num_layers_; ++i) {
    advance(step, static_cast<std::uint16_t>(first_layer_ + i), out);
  }
  retire(it);
  return {};
}

// --- substeps ---

SubstepVerdict StepTimeline::start_substep(const Incarnation& scheduler, StepId step,
                                           SubstepId substep, std::vector<TimelinePart> parts,
                                           double now_s, TimelineEffects& out) {
  const auto refused = [&](SubstepVerdict verdict) {
    refuse(parts, out);
    return verdict;
  };
  if (substep == 0) return refused(SubstepVerdict::kLate);  // they count from 1: there is no 0
  if (scheduler.is_zero() || is_ended(scheduler)) return refused(SubstepVerdict::kStale);
  const bool is_current = scheduler == scheduler_;

  if (const auto it = open_.find(step); is_current && it != open_.end()) {
    Step& open = it->second;
    if (substep <= open.taken) return refused(SubstepVerdict::kDuplicate);
    if (open.frozen) return refused(SubstepVerdict::kLate);
    if (substep > open.taken + 1) {
      const SubstepVerdict kept = keep(open.gap, substep, std::move(parts), now_s);
      return kept == SubstepVerdict::kKept ? kept : refused(kept);
    }
    for (TimelinePart& part : parts) attach(open, std::move(part), out);
    ++open.taken;
    take_contiguous(open, open.gap, out);
    return SubstepVerdict::kTaken;
  }
  if (is_current && any_started_ && step <= last_started_) {
    const auto answer = answers_.find(step);
    const bool was_taken = answer != answers_.end() && substep <= answer->second;
    return refused(was_taken ? SubstepVerdict::kDuplicate : SubstepVerdict::kLate);
  }
  const StepKey key{scheduler, step};
  if (const auto it = refused_from_.find(key); it != refused_from_.end() && substep >= it->second) {
    return refused(SubstepVerdict::kLate);
  }
  const SubstepVerdict kept = keep(early_[key], substep, std::move(parts), now_s);
  if (early_[key].empty()) early_.erase(key);
  return kept == SubstepVerdict::kKept ? kept : refused(kept);
}

SubstepVerdict StepTimeline::keep(KeptSubsteps& in, SubstepId substep,
                                  std::vector<TimelinePart>&& parts, double now_s) {
  if (in.contains(substep)) return SubstepVerdict::kDuplicate;
  if (num_kept_ >= limits_.max_kept_substeps) return SubstepVerdict::kFull;
  in.emplace(substep, Kept{std::move(parts), now_s});
  ++num_kept_;
  return SubstepVerdict::kKept;
}

void StepTimeline::take_contiguous(Step& step, KeptSubsteps& from, TimelineEffects& out) {
  for (auto it = from.find(step.taken + 1); it != from.end(); it = from.find(step.taken + 1)) {
    for (TimelinePart& part : it->second.parts) attach(step, std::move(part), out);
    ++step.taken;
    --num_kept_;
    from.erase(it);
  }
}

void StepTimeline::refuse(KeptSubsteps& kept, TimelineEffects& out) {
  for (const auto& [substep, entry] : kept) refuse(entry.parts, out);
  num_kept_ -= kept.size();
  kept.clear();
}

void StepTimeline::refuse(const std::vector<TimelinePart>& parts, TimelineEffects& out) {
  for (const TimelinePart& part : parts) {
    out.push_back({.kind = Kind::kRefuse, .part = part.id, .send = part.send});
    ++num_refused_;
  }
}

void StepTimeline::expire(double now_s, TimelineEffects& out) {
  if (num_running_ > 0) return;  // a step before theirs runs: their time has not begun
  for (auto it = early_.begin(); it != early_.end();) {
    KeptSubsteps& kept = it->second;
    const auto over = std::find_if(kept.begin(), kept.end(), [&](const auto& entry) {
      return now_s >= std::max(entry.second.arrived_s, last_flush_s_) + limits_.early_s;
    });
    if (over == kept.end()) {
      ++it;
      continue;
    }
    // Numbers after a refused one can never be taken, so they go with it.
    KeptSubsteps gone(std::make_move_iterator(over), std::make_move_iterator(kept.end()));
    const auto [mark, is_new] = refused_from_.try_emplace(it->first, over->first);
    if (!is_new) mark->second = std::min(mark->second, over->first);
    if (refused_from_.size() > limits_.max_remembered_steps) {
      refused_from_.erase(refused_from_.begin());
    }
    kept.erase(over, kept.end());
    refuse(gone, out);
    it = kept.empty() ? early_.erase(it) : std::next(it);
  }
}

double StepTimeline::next_deadline_s() const {
  if (num_running_ > 0 || early_.empty()) return -1;
  double first = -1;
  for (const auto& [key, kept] : early_) {
    for (const auto& [substep, entry] : kept) {
      const double at = std::max(entry.arrived_s, last_flush_s_) + limits_.early_s;
      if (first < 0 || at < first) first = at;
    }
  }
  return first;
}

}  // namespace kvt
