// Sends as news: a sender that takes its scheduler's words from the channel, in order, on the
// channel's own thread, without Python.
//
//   SUBS [scheduler_incarnation, step, substep, [send, …]]
//   FRZN [send, …]
//   ABRT [key, code]
//   send [key, target_instance, target_incarnation, [[rank, worker_incarnation, address], …],
//         [[src block ids of group 0], …], [[dst block ids of group 0], …], first_token, end_token,
//         last]
//
// Each target of a send that is taken ends in one SDON. An ABRT for which nothing is open is
// answered by one SDON with nil for the target: nothing of that key is read here, now or later.
#pragma once

#include <cstdint>
#include <memory>

#include "kvt/msgpack.h"
#include "kvt/news_channel.h"
#include "kvt/sender.h"

namespace kvt {

// Before channel.start(). The end of the scheduler's incarnation ends its steps and sends. The
// channel does not keep the sender alive. `rank` is the sender's. The channel is the sender's sink.
void serve_sends(NewsChannel& channel, std::weak_ptr<Sender> sender, std::uint32_t rank);

// One send of the form above, bounded and checked. Throws Error(BAD_REQUEST) naming the field.
Send read_send(msgpack::Reader& item);

}  // namespace kvt
