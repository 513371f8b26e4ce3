// Turning queued work into frames and frames into gathering system calls.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvt/crc32c.h"
#include "send_connection.h"

namespace kvt {
namespace {

constexpr std::size_t kMaxIovecs = 1024;           // IOV_MAX
constexpr std::uint64_t kAheadBytes = 8ull << 20;  // payload turned into frames in advance
constexpr int kMaxCalls = 16;                      // before looking at what the peer says
constexpr std::size_t kAheadItems = 256;           // and frames
constexpr std::uint64_t kFrameBytes = 16ull
                                      << 20;  // payload of one frame, unless one run is longer

const std::vector<std::byte>& filler() {
  static const std::vector<std::byte> zeros(256 * 1024);
  return zeros;
}

}  // namespace

// Keeps a little more than one system call's worth of frames ready.
void SocketSendConnection::refill() {
  while (!work_.empty() && end_.ok() && items_bytes_ < kAheadBytes && items_.size() < kAheadItems) {
    if (expand(work_.front())) work_.pop_front();
  }
}

// True if the entry is used up (it may be gone already if its transfer failed).
bool SocketSendConnection::expand(Work& work) {
  Item item;
  item.transfer = work.transfer;
  switch (work.kind) {
    case Work::Kind::kOpen: {
      wire::Open open;
      open.transfer = work.transfer;
      open.flags = work.open.crc ? wire::kOpenFlagCrc : 0;
      open.key = work.open.key;
      open.sender_incarnation = work.open.sender_incarnation;
      open.first_token = work.open.first_token;
      open.end_token = work.open.end_token;
      wire::append(item.frame, open);
      item.is_open = true;
      break;
    }
    case Work::Kind::kEnd:
      wire::append_end(item.frame, work.transfer);
      break;
    case Work::Kind::kLayer:
      return expand_layer(work);
  }
  items_.push_back(std::move(item));
  return true;
}

bool SocketSendConnection::expand_layer(Work& work) {
  const LayerSend& layer = work.layer;
  const wire::Chunk chunk{work.transfer, layer.layer, layer.first_token, layer.end_token};
  const Runs& runs = *layer.runs;
  Transfer& transfer = transfers_.at(work.transfer);
  std::size_t count = 0;
  std::uint64_t bytes = 0;
  while (work.next_run + count < runs.size() && count < wire::kMaxBlocksPerFrame) {
    const std::uint64_t next = runs[work.next_run + count].length;
    if (count > 0 && bytes + next > kFrameBytes) break;
    bytes += next;
    ++count;
  }
  Item item;
  item.transfer = work.transfer;
  TransportContext context;
  context.memory = &shared_->memory;
  const Status made = transport_->payload(
      {context, layer.layer, runs, work.next_run, count, reader_.get()}, &item.payload);
  if (!made.ok()) {
    // Ends the transfer, and with it this very entry of work_: the caller must not pop again.
    give_up(work.transfer, made.code, "layer " + std::to_string(layer.layer) + ": " + made.detail,
            true);
    return false;
  }
  wire::append_blocks(item.frame, chunk, runs, work.next_run, count);
  if (transfer.crc) {
    if (!item.payload) {
      *work.crc = checksum_runs(layer.layer, runs, work.next_run, count, *work.crc);
    } else if (item.payload->is_host()) {
      item.payload->start_checksum(*work.crc);
      *work.crc = item.payload->checksum();
    } else {
      item.crc = work.crc;
    }
  }
  if (item.payload) items_bytes_ += item.payload->left();
  items_.push_back(std::move(item));
  work.next_run += count;
  if (work.next_run < runs.size()) {
    ++transfer.num_unsent;  // this frame leaves on its own; the entry stays
    return false;
  }
  Item end;
  end.transfer = work.transfer;
  end.is_chunk_end = true;
  if (transfer.crc) end.crc = work.crc;
  wire::append(end.frame, wire::ChunkEnd{chunk, *work.crc});
  items_.push_back(std::move(end));
  ++transfer.num_unsent;
  return true;
}

std::uint32_t SocketSendConnection::checksum_runs(std::uint16_t layer, const Runs& runs,
                                                  std::size_t first, std::size_t count,
                                                  std::uint32_t crc) const {
  for (std::size_t i = first; i < first + count; ++i) {
    shared_->memory.visit(layer, runs[i].src_offset, runs[i].length, [&](const MemorySpan& span) {
      crc = crc32c(span.host(), span.length, crc);
    });
  }
  return crc;
}

// iovecs for the next system call, from as many items as fit. A device's payload stands alone at
// the end: what follows it is not known to be next until its copies are through.
bool SocketSendConnection::gather(std::vector<iovec>* pieces) {
  pieces->clear();
  for (Item& item : items_) {
    if (pieces->size() >= kMaxIovecs) break;
    if (item.frame_sent < item.frame.size()) {
      if (item.frame_sent == 0 && item.is_chunk_end && item.crc) {
        store_le(item.frame.data() + item.frame.size() - 4, *item.crc);
      }
      pieces->push_back({item.frame.data() + item.frame_sent, item.frame.size() - item.frame_sent});
    }
    std::uint64_t filling = item.filler_left;
    while (filling > 0 && pieces->size() < kMaxIovecs) {
      const std::uint64_t n = std::min<std::uint64_t>(filling, filler().size());
      pieces->push_back({const_cast<std::byte*>(filler().data()), n});
      filling -= n;
    }
    if (filling > 0) break;
    if (!item.payload || item.payload->left() == 0) continue;
    if (pieces->size() >= kMaxIovecs) break;
    if (item.payload->is_host()) {
      const std::size_t before = pieces->size();
      (void)item.payload->gather(kMaxIovecs - before, pieces);
      if (pieces->size() >= kMaxIovecs) break;
      continue;
    }
    if (item.crc && !item.payload_begun) item.payload->start_checksum(*item.crc);
    item.payload_begun = true;
    const Status ready = item.payload->gather(1, pieces);
    if (ready.ok()) break;
    const TransferHandle transfer = item.transfer;
    give_up(transfer, ready.code, ready.detail, true);
    lose(ready.code, ready.detail);  // a device stage that has failed stays failed
    return false;                    // items_ has changed
  }
  return true;
}

bool SocketSendConnection::send_some() {
  for (int calls = 0; !items_.empty() && calls < kMaxCalls; ++calls) {
    if (!gather(&pieces_)) return false;
    msghdr message{};
    message.msg_iov = pieces_.data();
    message.msg_iovlen = pieces_.size();
    const ssize_t n = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      sent(static_cast<std::uint64_t>(n));
      if (wake_.is_pending()) return true;  // perhaps a cancel: look before the next call
      if (state_ == State::kReady) refill();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      writable_ = false;
      return true;
    } else if (errno != EINTR) {
      const std::string why = std::strerror(errno);
      (void)receive_some();  // the peer may have said why it went
      return lose(Code::kPeerLost, "send: " + why);
    }
  }
  return true;
}

void SocketSendConnection::sent(std::uint64_t bytes) {
  last_progress_ = Clock::now();
  while (bytes > 0) {
    Item& item = items_.front();
    const std::uint64_t header =
        std::min<std::uint64_t>(bytes, item.frame.size() - item.frame_sent);
    item.frame_sent += header;
    bytes -= header;
    const std::uint64_t filling = std::min(bytes, item.filler_left);
    item.filler_left -= filling;
    bytes -= filling;
    if (item.payload) {
      const std::uint64_t body = std::min(bytes, item.payload->left());
      item.payload->advance(body);
      items_bytes_ -= body;
      bytes -= body;
      payload_sent_.fetch_add(body, std::memory_order_relaxed);
    }
    if (!item.finished()) return;
    if (item.payload && item.crc) *item.crc = item.payload->checksum();
    const TransferHandle transfer = item.transfer;
    const bool is_open = item.is_open;
    items_.pop_front();
    one_unsent_less(transfer, is_open);
  }
}

void SocketSendConnection::one_unsent_less(TransferHandle transfer, bool was_open) {
  const auto it = transfers_.find(transfer);
  if (it == transfers_.end()) return;
  if (was_open) it->second.announced = true;
  if (--it->second.num_unsent > 0 || !it->second.ending) return;
  ++num_awaiting_;
  // All bytes are in the kernel's hands, unless the receiver still comes to fetch them.
  if (!transport_->confirms()) release(transfer, it->second);
}

}  // namespace kvt
