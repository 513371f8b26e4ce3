// The half of SendLedger about endings: results, failures, cancels, deadlines; and its view.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kvt/send_ledger.h"

namespace kvt {
namespace {

using Kind = LedgerEffect::Kind;

}  // namespace

void SendLedger::result(LegId id, const Status& status, std::uint32_t tokens, LedgerEffects& out) {
  const auto it = legs_.find(id);
  if (it == legs_.end()) return;
  // OK is the receiver's own word, even if we had begun to give up.
  const bool is_ours = !status.ok() && !it->second.failed.ok();
  const Status said = is_ours ? it->second.failed : status;
  complete(id, said, tokens, out);
}

void SendLedger::fail_transfer(const TransferKey& key, const Status& why, LedgerEffects& out) {
  const auto it = transfers_.find(key);
  if (it == transfers_.end()) return;
  for (const LegId leg : std::vector<LegId>(it->second.legs)) fail_leg(leg, why, out);
}

void SendLedger::fail_leg(LegId id, const Status& why, LedgerEffects& out) {
  Leg& leg = legs_.at(id);
  switch (leg.state) {
    case LegState::kConnecting:
    case LegState::kReady:
      complete(id, why, 0, out);
      return;
    case LegState::kOpen:
    case LegState::kEnding:
      leg.state = LegState::kCancelling;
      leg.failed = why;
      out.push_back({.kind = Kind::kCancel, .leg = id, .status = why});
      return;
    case LegState::kCancelling:
      return;
  }
}

void SendLedger::complete(LegId id, const Status& status, std::uint32_t tokens,
                          LedgerEffects& out) {
  const auto it = legs_.find(id);
  const TransferKey key = it->second.key;
  Transfer& transfer = transfers_.at(key);
  const TokenRange range = range_of(transfer);
  // Never more than this rank was told to send, never less than nothing of it.
  const std::uint64_t done = std::clamp<std::uint64_t>(tokens, range.first, range.end);
  out.push_back({.kind = Kind::kComplete,
                 .leg = id,
                 .completion = completion_of(key, it->second.target.rank, status,
                                             status.ok() ? range.end : done)});
  legs_.erase(it);
  std::erase(transfer.legs, id);
  if (!transfer.legs.empty()) return;
  for (const PartId part : transfer.parts) {
    out.push_back({.kind = Kind::kForget, .part = part});
    parts_.erase(part);
  }
  transfers_.erase(key);
  remember_end(key);
}

Completion SendLedger::completion_of(const TransferKey& key, std::int32_t target_rank,
                                     const Status& status, std::uint64_t tokens) {
  ++(status.ok() ? counts_.num_completed : counts_.num_failed);
  Completion c;
  c.kind = Completion::Kind::kSendDone;
  c.key = key;
  c.rank = rank_;
  c.other_rank = static_cast<std::uint32_t>(target_rank);
  c.tokens = tokens;
  c.code = status.code;
  c.detail = status.detail;
  return c;
}

void SendLedger::remember_end(const TransferKey& key) {
  marks_.erase(key);
  if (!ended_.emplace(key, true).second) return;
  ended_order_.push_back(key);
  if (ended_order_.size() <= limits_.max_ended) return;
  ended_.erase(ended_order_.front());
  ended_order_.pop_front();
}

std::size_t SendLedger::end_unopened(const Send& send, const Status& why, LedgerEffects& out) {
  for (const SendTarget& target : send.targets) {
    out.push_back({.kind = Kind::kComplete,
                   .completion = completion_of(send.key, target.rank, why, send.first_token)});
  }
  counts_.num_legs_opened += send.targets.size();
  remember_end(send.key);
  return send.targets.size();
}

bool SendLedger::cancel(const TransferKey& key, const Status& why, double now_s,
                        LedgerEffects& out) {
  if (transfers_.contains(key)) {
    fail_transfer(TransferKey(key), why, out);
    return true;
  }
  if (ended_.contains(key)) return false;
  const bool is_new = marks_.insert_or_assign(key, Mark{why, now_s + limits_.mark_s}).second;
  if (is_new) mark_order_.push_back(key);
  while (mark_order_.size() > limits_.max_marks) {
    marks_.erase(mark_order_.front());
    mark_order_.pop_front();
  }
  return false;
}

void SendLedger::cancel_all(const Status& why, LedgerEffects& out) {
  std::vector<TransferKey> keys;
  for (const auto& [key, transfer] : transfers_) keys.push_back(key);
  for (const TransferKey& key : keys) fail_transfer(key, why, out);
}

void SendLedger::tick(double now_s, LedgerEffects& out) {
  for (; !by_age_.empty() && now_s >= by_age_.front().first + limits_.whole_s;
       by_age_.pop_front()) {
    const TransferKey key = by_age_.front().second;
    const auto it = transfers_.find(key);
    if (it == transfers_.end()) continue;
    const auto num_waiting = num_unsealed(it->second);
    std::string why = "not sent within " + std::to_string(std::llround(limits_.whole_s)) + " s: ";
    if (num_waiting > 0) {
      why += std::to_string(num_waiting) + " of its sends wait for layers of their step";
    } else if (!it->second.last_seen || !is_whole(it->second)) {
      why += "its last send did not come";
    } else {
      why += "the receiver did not confirm";
    }
    fail_transfer(key, {Code::kTimeout, why}, out);
  }
  while (!mark_order_.empty()) {
    const auto mark = marks_.find(mark_order_.front());
    if (mark != marks_.end() && now_s < mark->second.until_s) break;
    if (mark != marks_.end()) marks_.erase(mark);
    mark_order_.pop_front();
  }
}

double SendLedger::next_deadline_s() {
  while (!by_age_.empty() && !transfers_.contains(by_age_.front().second)) by_age_.pop_front();
  return by_age_.empty() ? -1 : by_age_.front().first + limits_.whole_s;
}

std::size_t SendLedger::num_unsealed(const Transfer& transfer) const {
  return static_cast<std::size_t>(
      std::count_if(transfer.parts.begin(), transfer.parts.end(),
                    [this](PartId id) { return !parts_.at(id).sealed; }));
}

std::vector<TransferView> SendLedger::view(double now_s) const {
  std::vector<TransferView> all;
  for (const auto& [key, transfer] : transfers_) {
    TransferView v;
    v.key = key;
    v.target_instance = transfer.target_instance;
    v.first_token = static_cast<std::uint32_t>(range_of(transfer).first);
    v.end_token = static_cast<std::uint32_t>(range_of(transfer).end);
    v.last_seen = transfer.last_seen;
    v.age_s = now_s - transfer.started_s;
    v.num_parts_waiting = num_unsealed(transfer);
    for (const LegId id : transfer.legs) {
      static constexpr const char* kNames[] = {"connecting", "planning", "sending", "confirming",
                                               "cancelling"};
      const Leg& leg = legs_.at(id);
      v.legs.push_back({leg.target.rank, kNames[static_cast<int>(leg.state)], leg.num_layers_sent});
    }
    all.push_back(std::move(v));
  }
  return all;
}

}  // namespace kvt
