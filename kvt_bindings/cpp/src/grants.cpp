#include "grants.h"

#include <algorithm>

namespace kvt {
namespace {

const char* state_name(SourceSlot::State state) {
  switch (state) {
    case SourceSlot::State::kWaiting:
      return "waiting";
    case SourceSlot::State::kReceiving:
      return "receiving";
    case SourceSlot::State::kConfirming:
      return "confirming";
    case SourceSlot::State::kEnded:
      return "ended";
  }
  return "unknown";
}

std::int64_t to_ns(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

constexpr std::size_t kMaxEndedSchedulers = 64;  // incarnations of one scheduler: restarts

}  // namespace

Status SourceSlot::end(Code code, std::uint32_t tokens, std::string detail,
                       const std::function<void()>& before_telling) {
  std::shared_ptr<SlotEndBox> box;
  Completion completion;
  Status quiet;
  ending_.store(true, std::memory_order_release);
  {
    const std::lock_guard held(mutex_);
    if (state_ == State::kEnded) return quiet_;
    if (quiesce) {
      quiet_ = quiesce();
      quiesce = nullptr;
      if (!quiet_.ok() && code == Code::kOk) {
        code = quiet_.code;
        detail = quiet_.detail;
      }
    }
    quiet = quiet_;
    state_ = State::kEnded;
    ended_.store(true, std::memory_order_release);
    code_ = code;
    detail_ = detail;
    box = box_.lock();
    box_.reset();
    completion = Completion{
        Completion::Kind::kLoadDone, key_, own_rank_, source_rank_, tokens, code, detail};
  }
  if (before_telling) before_telling();
  (code == Code::kOk ? counters_->completed : counters_->failed).fetch_add(1);
  sink_->push(std::move(completion));
  if (box) box->post({transfer_, code, tokens, std::move(detail)});
  return quiet;
}

bool SourceSlot::attach(std::weak_ptr<SlotEndBox> box, std::uint32_t transfer, Plan expected,
                        std::uint32_t tokens, std::string* why) {
  const std::lock_guard held(mutex_);
  if (state_ != State::kWaiting || is_ending()) {
    *why = "source rank " + std::to_string(source_rank_) + " of this transfer is " +
           state_name(state_) + " already";
    return false;
  }
  box_ = std::move(box);
  transfer_ = transfer;
  tokens_ = tokens;
  expected_ = std::move(expected);
  bytes_expected_.store(expected_.total_bytes());
  state_ = State::kReceiving;
  return true;
}

void SourceSlot::count_placed(std::uint64_t bytes) {
  bytes_placed_.fetch_add(bytes, std::memory_order_relaxed);
  last_progress_ns_.store(to_ns(Clock::now()), std::memory_order_relaxed);
}

bool SourceSlot::commit(std::uint16_t layer) {
  LayerCoverage& layer_coverage = coverage_[layer];
  const std::uint64_t before = layer_coverage.covered_bytes();
  layer_coverage.commit();
  committed_bytes_ += layer_coverage.covered_bytes() - before;
  return committed_bytes_ == bytes_expected_.load(std::memory_order_relaxed);
}

std::string SourceSlot::describe_missing() const {
  for (const PlanPart& part : expected_.parts) {
    for (const std::uint16_t layer : part.layers) {
      const auto it = coverage_.find(layer);
      const std::uint64_t have = it == coverage_.end() ? 0 : it->second.covered_bytes();
      if (have < part.bytes) {
        return "layer " + std::to_string(layer) + " has " + std::to_string(have) + " of " +
               std::to_string(part.bytes) + " bytes";
      }
    }
  }
  return "nothing";
}

void SourceSlot::set_confirming() {
  const std::lock_guard held(mutex_);
  if (state_ == State::kReceiving) state_ = State::kConfirming;
}

void SourceSlot::start_clock(Clock::time_point now) {
  std::int64_t stopped = -1;  // a running clock is not turned back
  last_progress_ns_.compare_exchange_strong(stopped, to_ns(now));
}

bool SourceSlot::deadline(std::chrono::milliseconds timeout, Clock::time_point* at) const {
  const std::int64_t last = last_progress_ns_.load();
  if (last < 0 || ended()) return false;
  *at = Clock::time_point(std::chrono::nanoseconds(last)) + timeout;
  return true;
}

ReceiverSnapshot::Source SourceSlot::view(Clock::time_point now) const {
  ReceiverSnapshot::Source out;
  out.rank = source_rank_;
  out.bytes_placed = bytes_placed();
  out.bytes_expected = bytes_expected_.load();
  const std::int64_t last = last_progress_ns_.load(std::memory_order_relaxed);
  if (last >= 0) out.idle_s = static_cast<double>(to_ns(now) - last) * 1e-9;
  const std::lock_guard held(mutex_);
  out.state = state_name(state_);
  out.code = code_;
  out.detail = detail_;
  return out;
}

SourceSlot* Grant::slot_of(std::uint32_t source_rank) const {
  for (const auto& slot : slots) {
    if (slot->source_rank() == source_rank) return slot.get();
  }
  return nullptr;
}

bool Grant::all_ended() const {
  return std::all_of(slots.begin(), slots.end(), [](const auto& slot) { return slot->ended(); });
}

GrantTable::GrantTable(std::uint32_t own_rank, std::shared_ptr<CompletionSink> sink,
                       ReceiverCounters* counters, std::size_t max_marks)
    : own_rank_(own_rank), sink_(std::move(sink)), counters_(counters), max_marks_(max_marks) {}

Status GrantTable::open(GrantSpec spec) {
  auto grant = std::make_shared<Grant>();
  const TransferKey key = spec.key;
  for (const std::uint32_t rank : spec.source_ranks) {
    grant->slots.push_back(std::make_shared<SourceSlot>(key, own_rank_, rank, sink_, counters_));
  }
  grant->spec = std::move(spec);
  const std::lock_guard held(mutex_);
  if (closed_) return {Code::kAborted, "the receiver is closed"};
  const Incarnation& scheduler = grant->spec.scheduler_incarnation;
  if (std::find(ended_schedulers_.begin(), ended_schedulers_.end(), scheduler) !=
      ended_schedulers_.end()) {
    counters_->marks_hit.fetch_add(1);
    return {Code::kAborted, "scheduler incarnation " + scheduler.hex() + " has ended"};
  }
  if (marks_.contains(key)) {
    counters_->marks_hit.fetch_add(1);
    return {Code::kAborted, "transfer " + key.hex() + " was closed before it was opened"};
  }
  if (grants_.contains(key)) {
    return {Code::kBadRequest, "transfer " + key.hex() + " is open already"};
  }
  if (!sink_->reserve(grant->slots.size())) {
    return {Code::kBusy, "no room for the completions of another transfer"};
  }
  grants_.emplace(key, std::move(grant));
  return {};
}

Status GrantTable::close(const TransferKey& key, Code code, const std::string& detail) {
  std::shared_ptr<Grant> grant;
  {
    const std::lock_guard held(mutex_);
    mark(key);
    const auto it = grants_.find(key);
    if (it == grants_.end()) return {};
    grant = it->second;
  }
  // It stays in the table, and in the snapshot, until the slots have let go.
  const Status quiet = end_all(*grant, code, detail);
  const std::lock_guard held(mutex_);
  grants_.erase(key);
  return quiet;
}

void GrantTable::end_scheduler(const Incarnation& scheduler_incarnation) {
  std::vector<std::shared_ptr<Grant>> theirs;
  {
    const std::lock_guard held(mutex_);
    ended_schedulers_.push_back(scheduler_incarnation);
    if (ended_schedulers_.size() > kMaxEndedSchedulers) ended_schedulers_.pop_front();
    for (const auto& [key, grant] : grants_) {
      if (grant->spec.scheduler_incarnation == scheduler_incarnation) theirs.push_back(grant);
    }
  }
  for (const auto& grant : theirs) {
    (void)close(grant->spec.key, Code::kAborted, "the scheduler's incarnation has ended");
  }
}

void GrantTable::close_all(Code code, const std::string& detail) {
  std::vector<TransferKey> keys;
  {
    const std::lock_guard held(mutex_);
    closed_ = true;
    for (const auto& [key, grant] : grants_) keys.push_back(key);
  }
  for (const TransferKey& key : keys) (void)close(key, code, detail);
}

Status GrantTable::end_all(const Grant& grant, Code code, const std::string& detail) {
  Status quiet;
  for (const auto& slot : grant.slots) {
    const Status ended = slot->end(code, grant.spec.first_token, detail);
    if (!ended.ok()) quiet = ended;
  }
  return quiet;
}

std::shared_ptr<Grant> GrantTable::find(const TransferKey& key) const {
  const std::lock_guard held(mutex_);
  const auto it = grants_.find(key);
  return it == grants_.end() ? nullptr : it->second;
}

bool GrantTable::is_marked(const TransferKey& key) const {
  const std::lock_guard held(mutex_);
  return marks_.contains(key);
}

Status GrantTable::finish(const Grant& grant, SourceSlot& slot, Code code, std::uint32_t tokens,
                          std::string detail) {
  // With the last source the grant is over before anybody hears of it.
  return slot.end(code, tokens, std::move(detail), [&] {
    if (!grant.all_ended()) return;
    const std::lock_guard held(mutex_);
    mark(grant.spec.key);
    grants_.erase(grant.spec.key);
  });
}

Clock::time_point GrantTable::expire(Clock::time_point now) {
  Clock::time_point next = Clock::time_point::max();
  std::vector<std::pair<std::shared_ptr<Grant>, std::shared_ptr<SourceSlot>>> late;
  {
    const std::lock_guard held(mutex_);
    for (const auto& [key, grant] : grants_) {
      const std::chrono::milliseconds timeout(grant->spec.progress_timeout_ms);
      for (const auto& slot : grant->slots) {
        Clock::time_point at;
        if (!slot->deadline(timeout, &at)) continue;
        if (at <= now) {
          late.emplace_back(grant, slot);
        } else {
          next = std::min(next, at);
        }
      }
    }
  }
  for (const auto& [grant, slot] : late) {
    (void)finish(*grant, *slot, Code::kTimeout, grant->spec.first_token,
                 "no byte from source rank " + std::to_string(slot->source_rank()) + " of " +
                     grant->spec.sender_instance + " for " +
                     std::to_string(grant->spec.progress_timeout_ms) + " ms, after " +
                     std::to_string(slot->bytes_placed()) + " bytes");
  }
  return next;
}

void GrantTable::snapshot(ReceiverSnapshot* out) const {
  const Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<Grant>> grants;
  {
    const std::lock_guard held(mutex_);
    out->num_marks = marks_.size();
    for (const auto& [key, grant] : grants_) grants.push_back(grant);
  }
  for (const auto& grant : grants) {
    ReceiverSnapshot::GrantView view;
    view.key = grant->spec.key;
    view.sender_instance = grant->spec.sender_instance;
    view.first_token = grant->spec.first_token;
    view.end_token = grant->spec.end_token;
    view.progress_timeout_ms = grant->spec.progress_timeout_ms;
    for (const auto& blocks : grant->spec.block_ids) view.num_blocks += blocks.size();
    for (const auto& slot : grant->slots) view.sources.push_back(slot->view(now));
    out->grants.push_back(std::move(view));
  }
}

void GrantTable::mark(const TransferKey& key) {
  if (!marks_.insert(key).second) return;
  marks_order_.push_back(key);
  if (marks_order_.size() > max_marks_) {
    marks_.erase(marks_order_.front());
    marks_order_.pop_front();
  }
}

}  // namespace kvt
