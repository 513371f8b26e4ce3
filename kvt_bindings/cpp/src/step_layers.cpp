// The half of StepTimeline that decides layer by layer: records, events, dispatch.
#include <algorithm>
#include <utility>

#include "kvt/step_timeline.h"

namespace kvt {
namespace {

using Kind = TimelineEffect::Kind;

std::string layer_text(StepId step, std::uint16_t layer) {
  return "layer " + std::to_string(layer) + " of step " + std::to_string(step);
}

}  // namespace

Status StepTimeline::event_set_for(StepId step, std::uint16_t layer,
                                   std::uint32_t* event_set) const {
  const auto it = open_.find(step);
  if (it == open_.end() || it->second.flushed) {
    return {Code::kBadRequest, layer_text(step, layer) + " recorded, but the step is not open"};
  }
  if (!owns(layer)) {
    return {Code::kBadRequest, "layer " + std::to_string(layer) + " is not of this rank"};
  }
  *event_set = it->second.event_set;
  return {};
}

Status StepTimeline::recorded(StepId id, std::uint16_t number, TimelineEffects& out) {
  std::uint32_t event_set = 0;
  if (Status status = event_set_for(id, number, &event_set); !status.ok()) return status;
  Step& step = open_.find(id)->second;
  Layer& layer = layer_of(step, number);
  ++layer.num_records;
  layer.failed = {};
  if (!layer.sent.empty()) {
    const Status again{Code::kInternal,
                       layer_text(id, number) + " was recorded again after its bytes went out"};
    for (const std::uint32_t index : std::exchange(layer.sent, {})) {
      if (step.parts[index].alive) end_part(step, index, again, out);
    }
  }
  recount(step, layer);
  advance(step, number, out);
  return {};
}

void StepTimeline::event_done(const Incarnation& scheduler, StepId id, std::uint16_t number,
                              std::uint32_t generation, const Status& status,
                              TimelineEffects& out) {
  if (scheduler != scheduler_) {
    const auto it = ending_.find({scheduler, id});
    if (it != ending_.end() && --it->second.num_waits == 0) {
      free_sets_.push_back(it->second.event_set);
      ending_.erase(it);
    }
    return;
  }
  const auto it = open_.find(id);
  if (it == open_.end() || !owns(number)) return;
  Step& step = it->second;
  --step.num_waits;
  Layer& layer = layer_of(step, number);
  if (generation == layer.num_records) {
    layer.done = generation;
    layer.failed = status;
  }
  advance(step, number, out);
  retire(it);
}

void StepTimeline::drop(const std::vector<PartId>& parts, TimelineEffects& out) {
  for (auto it = open_.begin(); it != open_.end();) {
    Step& step = it->second;
    for (std::uint32_t i = 0; i < step.parts.size(); ++i) {
      const bool named = std::find(parts.begin(), parts.end(), step.parts[i].of.id) != parts.end();
      if (named && step.parts[i].alive) end_part(step, i, {}, out);
    }
    retire(it++);
  }
}

// --- inside ---

void StepTimeline::attach(Step& step, TimelinePart part, TimelineEffects& out) {
  const PartId id = part.id;
  out.push_back({.kind = Kind::kAttach,
                 .part = id,
                 .send = part.send,
                 .scheduler = scheduler_,
                 .step = step.id});
  if (part.layers.empty()) {
    out.push_back({.kind = Kind::kSealed, .part = id});
    return;
  }
  const auto stranger = std::find_if_not(part.layers.begin(), part.layers.end(),
                                         [this](std::uint16_t layer) { return owns(layer); });
  if (stranger != part.layers.end()) {
    out.push_back({.kind = Kind::kFail,
                   .part = id,
                   .status = {Code::kBadRequest,
                              "layer " + std::to_string(*stranger) + " is not of this rank"}});
    return;
  }
  const auto index = static_cast<std::uint32_t>(step.parts.size());
  const std::vector<std::uint16_t> layers = part.layers;
  step.parts.push_back({std::move(part), layers.size(), true});
  ++step.num_alive;
  for (const std::uint16_t number : layers) layer_of(step, number).pending.push_back(index);
  for (const std::uint16_t number : layers) {
    recount(step, layer_of(step, number));
    advance(step, number, out);
  }
}

void StepTimeline::end_part(Step& step, std::uint32_t index, const Status& status,
                            TimelineEffects& out) {
  Part& part = step.parts[index];
  part.alive = false;
  --step.num_alive;
  for (const std::uint16_t number : part.of.layers) {
    Layer& layer = layer_of(step, number);
    std::erase(layer.pending, index);
    recount(step, layer);
  }
  if (!status.ok()) {
    out.push_back({.kind = Kind::kFail, .part = part.of.id, .step = step.id, .status = status});
  }
}

void StepTimeline::advance(Step& step, std::uint16_t number, TimelineEffects& out) {
  Layer& layer = layer_of(step, number);
  const bool is_sealed = step.flushed || layer.num_records >= step.records_per_layer;
  if (layer.pending.empty() || !is_sealed || layer.num_records == 0) return;
  if (layer.done != layer.num_records) {
    if (layer.waited == layer.num_records) return;
    layer.waited = layer.num_records;
    ++step.num_waits;
    out.push_back({.kind = Kind::kWait,
                   .scheduler = scheduler_,
                   .step = step.id,
                   .layer = number,
                   .generation = layer.num_records,
                   .event_set = step.event_set});
    return;
  }
  if (layer.failed.ok()) {
    dispatch(step, number, out);
    return;
  }
  const Status why{layer.failed.code,
                   layer_text(step.id, number) + ": its event failed: " + layer.failed.detail};
  while (!layer.pending.empty()) end_part(step, layer.pending.back(), why, out);
}

void StepTimeline::dispatch(Step& step, std::uint16_t number, TimelineEffects& out) {
  Layer& layer = layer_of(step, number);
  std::vector<std::uint32_t> held;
  for (const std::uint32_t index : layer.pending) {
    Part& part = step.parts[index];
    if (part.num_outstanding == 1 && !step.flushed) {
      held.push_back(index);
      continue;
    }
    --part.num_outstanding;
    layer.sent.push_back(index);
    out.push_back({.kind = Kind::kDispatch, .part = part.of.id, .step = step.id, .layer = number});
    if (part.num_outstanding == 0) {
      part.alive = false;
      --step.num_alive;
      out.push_back({.kind = Kind::kSealed, .part = part.of.id, .step = step.id});
    }
  }
  layer.pending = std::move(held);
  recount(step, layer);
}

void StepTimeline::recount(const Step& step, Layer& layer) {
  const bool awaited =
      !step.flushed && !layer.pending.empty() && layer.num_records < step.records_per_layer;
  if (awaited != layer.awaited) {
    layer.awaited = awaited;
    awaited ? ++num_awaited_ : --num_awaited_;
  }
}

// A flushed step goes when nothing of it is outstanding and no event of it is waited for.
void StepTimeline::retire(std::map<StepId, Step>::iterator step) {
  if (!step->second.flushed || step->second.num_waits > 0 || step->second.num_alive > 0) return;
  free_sets_.push_back(step->second.event_set);
  open_.erase(step);
}

std::vector<StepView> StepTimeline::view() const {
  std::vector<StepView> all;
  for (const auto& [id, step] : open_) {
    StepView v{id,         step.sched_tokens, step.frozen,    step.flushed,
               step.taken, step.gap.size(),   step.num_alive, {},
               {}};
    for (std::uint16_t i = 0; i < num_layers_; ++i) {
      const Layer& layer = step.layers[i];
      const auto number = static_cast<std::uint16_t>(first_layer_ + i);
      if (layer.pending.empty()) continue;
      if (layer.num_records == 0) {
        v.missing.push_back(number);
      } else if (layer.done != layer.num_records) {
        v.pending.push_back(number);
      }
    }
    all.push_back(std::move(v));
  }
  return all;
}

}  // namespace kvt
