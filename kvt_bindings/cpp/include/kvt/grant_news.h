// Grants as news: a receiver that takes GRNT items from its scheduler's channel and answers with
// GACK, in order, on the channel's own thread, without Python.
//
//   GRNT [op, key, sender_instance, sender_incarnation, [[block ids of group 0], …], first_token,
//         end_token, [source ranks], options]      op: 0 open, 1 close, 2 the sender has started
//   GACK [rank, key, op, code, detail]             for 0 and 1
//
// A close or start needs op and key only. options: {"progress_ms": n}.
#pragma once

#include <memory>

#include "kvt/news_channel.h"
#include "kvt/receiver.h"

namespace kvt {

// Before channel.start(). The end of the scheduler's incarnation closes its grants. The channel
// does not keep the receiver alive; items for a receiver that is gone are answered ABORTED.
// `rank` is the receiver's.
void serve_grants(NewsChannel& channel, std::weak_ptr<Receiver> receiver, std::uint32_t rank);

}  // namespace kvt
