// The whole CUDA path through the stand-in driver: caches on a device, layer events on the caller's
// stream, staging on both sides, a real socket in between. Kernels run late, on their stream's own
// thread; memory that they have not reached holds bytes that must arrive nowhere.
#include <atomic>
#include <random>

#include "data_fixture.h"
#include "kvt/sender.h"
#include "standin_loaded.h"

using namespace data_test;

namespace {

constexpr int kNotComputed = 0xEE;

// A rank's cache in device memory.
struct DeviceCache {
  explicit DeviceCache(const Shape& s, int fill) : shape(s) {
    std::vector<LayerMemory> layers;
    for (std::uint16_t i = 0; i < s.layers; ++i) {
      addresses.push_back(standin::alloc(s.layer_bytes()));
      std::memset(image(i), fill, s.layer_bytes());
      LayerMemory m;
      m.layer = i;
      m.tensors = {{reinterpret_cast<std::uint8_t*>(addresses.back()), s.layer_bytes()}};
      layers.push_back(m);
    }
    cache = std::make_shared<RankCache>(s.layout(), 0, std::move(layers), 0);
  }
  ~DeviceCache() {
    for (const auto a : addresses) standin::free(a);
  }
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  std::uint8_t* image(std::uint16_t layer) const {
    return static_cast<std::uint8_t*>(standin::image(addresses[layer]));
  }
  // K and V of one block, as kernels on `stream` after everything that is there already.
  void compute(void* stream, std::uint16_t layer, std::uint32_t block, int value,
               std::uint32_t delay_us = 0) const {
    for (std::uint64_t kv = 0; kv < 2; ++kv) {
      const auto at = (kv * shape.blocks + block) * shape.block_bytes();
      CHECK_EQ(standin::fill(stream, addresses[layer] + at, value, shape.block_bytes(), delay_us),
               0);
    }
  }
  bool holds(std::uint16_t layer, std::uint32_t block, int value) const {
    for (std::uint64_t kv = 0; kv < 2; ++kv) {
      const auto* at = image(layer) + (kv * shape.blocks + block) * shape.block_bytes();
      for (std::uint64_t i = 0; i < shape.block_bytes(); ++i) {
        if (at[i] != value) return false;
      }
    }
    return true;
  }

  Shape shape;
  std::vector<unsigned long long> addresses;
  std::shared_ptr<const RankCache> cache;
};

// A sender and a receiver of given caches, over socket pairs.
struct Line {
  Line(std::shared_ptr<const RankCache> from, std::shared_ptr<const RankCache> to,
       EventWait wait = EventWait::kBlock) {
    ReceiverConfig receiving;
    if (to->cuda_device()) receiving.device_memory = cuda_device_memory(standin::path());
    receiver = std::make_unique<Receiver>(to, loaded, receiving);
    DataClientConfig dialling;
    if (from->cuda_device()) dialling.device_memory = cuda_device_memory(standin::path());
    client = std::make_shared<DataClient>(
        from,
        [this](const DialRequest& request) {
          const auto [ours, theirs] = socket_pair();
          CHECK(receiver->adopt(theirs, sender_identity()).ok());
          CHECK(read_go(ours));
          (void)client->adopt(request.id, ours);  // too late if the sender is being closed
        },
        dialling);
    SenderConfig config;
    config.cuda_library = standin::path();
    config.event_wait = wait;
    config.crc = true;
    sender = std::make_unique<Sender>(from, sent, client, config);
    sender->begin_scheduler(kSender);
  }
  ~Line() {
    sender->close();
    receiver->close();
    CHECK_EQ(sent->reserved(), sent->pushed());
    CHECK_EQ(loaded->reserved(), loaded->pushed());
  }

  // Blocks `blocks` on both sides, whole.
  Send send(std::uint8_t key, const std::vector<std::uint32_t>& blocks, const Shape& shape) {
    CHECK(receiver
              ->open_grant(grant(key_of(key), blocks, 0,
                                 static_cast<std::uint32_t>(blocks.size()) * shape.block_tokens))
              .ok());
    const Peer peer = peer_of();
    Send s;
    s.key = key_of(key);
    s.target_instance = peer.instance;
    s.target_incarnation = peer.scheduler_incarnation;
    s.targets = {{0, peer.worker_incarnation, peer.address}};
    s.src_blocks = {blocks};
    s.dst_blocks = {blocks};
    s.end_token = static_cast<std::uint32_t>(blocks.size()) * shape.block_tokens;
    return s;
  }

  std::shared_ptr<Sink> sent = std::make_shared<Sink>();
  std::shared_ptr<Sink> loaded = std::make_shared<Sink>();
  std::unique_ptr<Receiver> receiver;
  std::shared_ptr<DataClient> client;
  std::unique_ptr<Sender> sender;
};

}  // namespace

TEST(layers_leave_the_device_when_their_kernels_are_done) {
  const Shape shape;
  const DeviceCache source(shape, kNotComputed);
  const DeviceCache target(shape, 0);
  for (const EventWait wait : {EventWait::kBlock, EventWait::kQuery}) {
    const standin::Stream stream;
    Line line(source.cache, target.cache, wait);
    const int value = wait == EventWait::kBlock ? 10 : 20;
    const auto key = static_cast<std::uint8_t>(value);
    line.sender->submit_send(kSender, 1, line.send(key, {3, 5}, shape));
    line.sender->start_step(kSender, 1, 8);
    standin::pause(stream.get());
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      for (const std::uint32_t block : {3u, 5u}) {
        source.compute(stream.get(), layer, block, value + layer, 500);
      }
      line.sender->record_event(1, layer, stream.handle());
    }
    line.sender->freeze_step(1);
    line.sender->flush_step(1);
    CHECK_EQ(line.receiver->snapshot().bytes_placed, 0u);  // the host is ahead of the device
    standin::resume(stream.get());
    CHECK(line.loaded->last(1).code == Code::kOk);
    CHECK(line.sent->last(1).code == Code::kOk);
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      CHECK(target.holds(layer, 3, value + layer) && target.holds(layer, 5, value + layer));
      CHECK(target.holds(layer, 4, 0));
    }
  }
}

TEST(an_event_recorded_again_means_its_last_record) {
  const Shape shape;
  const DeviceCache source(shape, kNotComputed);
  const DeviceCache target(shape, 0);
  const standin::Stream stream;
  Line line(source.cache, target.cache);
  line.sender->submit_send(kSender, 1, line.send(1, {3}, shape));
  line.sender->start_step(kSender, 1, 8, 2);  // two microbatches
  for (int half = 0; half < 2; ++half) {
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      source.compute(stream.get(), layer, 3, 7 + half, 2000);
      line.sender->record_event(1, layer, stream.handle());
    }
  }
  line.sender->flush_step(1);
  CHECK(line.loaded->last(1).code == Code::kOk);
  for (std::uint16_t layer = 0; layer < shape.layers; ++layer) CHECK(target.holds(layer, 3, 8));
}

TEST(device_to_host_and_host_to_device) {
  const Shape shape;
  {
    const DeviceCache source(shape, 5);
    const Cache target(shape);
    Line line(source.cache, target.cache);
    line.sender->send_frozen(kSender, {line.send(1, {1, 2}, shape)});
    CHECK(line.loaded->last(1).code == Code::kOk);
    CHECK_EQ(static_cast<int>(target.memory[2][shape.block_bytes()]), 5);
  }
  {
    Cache source(shape);
    for (auto& layer : source.memory) std::fill(layer.begin(), layer.end(), 6);
    const DeviceCache target(shape, 0);
    Line line(source.cache, target.cache);
    line.sender->submit_send(kSender, 1, line.send(1, {1, 2}, shape));
    line.sender->start_step(kSender, 1, 8);
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      line.sender->record_event(1, layer, 0);
    }
    line.sender->flush_step(1);
    CHECK(line.loaded->last(1).code == Code::kOk);
    CHECK(target.holds(0, 1, 6) && target.holds(2, 2, 6) && target.holds(1, 3, 0));
  }
}

TEST(a_kernel_that_fails_ends_its_sends_by_name) {
  const Shape shape;
  const DeviceCache source(shape, kNotComputed);
  const DeviceCache target(shape, 0);
  const standin::Stream stream;
  Line line(source.cache, target.cache);
  line.sender->submit_send(kSender, 1, line.send(1, {3}, shape));
  line.sender->start_step(kSender, 1, 8);
  standin::pause(stream.get());
  standin::fault(stream.get(), 719);
  line.sender->record_event(1, 0, stream.handle());
  standin::resume(stream.get());
  const Completion c = line.sent->last(1);
  CHECK(c.code == Code::kInternal);
  CHECK(c.detail.find("layer 0 of step 1: its event failed") == 0);
  CHECK(c.detail.find("CUDA_ERROR_LAUNCH_FAILED (719)") != std::string::npos);
  line.receiver->close_grant(key_of(1));
  CHECK(target.holds(0, 3, 0));
}

TEST(a_record_that_fails_is_thrown_and_the_layer_missing) {
  const Shape shape;
  const DeviceCache source(shape, 1);
  const DeviceCache target(shape, 0);
  Line line(source.cache, target.cache);
  line.sender->submit_send(kSender, 1, line.send(1, {3}, shape));
  line.sender->start_step(kSender, 1, 8);
  line.sender->record_event(1, 0, 0);
  standin::fail("cuEventRecord", 0, 400);
  try {
    line.sender->record_event(1, 1, 0);
    CHECK(false);
  } catch (const Error& e) {
    CHECK(std::string(e.what()).find("cuEventRecord: CUDA_ERROR_INVALID_HANDLE") == 0);
  }
  line.sender->record_event(1, 2, 0);
  line.sender->flush_step(1);
  CHECK_EQ(line.sent->last(1).detail, std::string("layer 1 of step 1 was not recorded"));
  line.receiver->close_grant(key_of(1));
}

TEST(a_copy_that_fails_ends_the_transfer_on_both_sides) {
  const Shape shape;
  for (const char* call : {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}) {
    const DeviceCache source(shape, 1);
    const DeviceCache target(shape, 0);
    Line line(source.cache, target.cache);
    standin::fail(call, 1, 719);
    line.sender->send_frozen(kSender, {line.send(1, {3, 4}, shape)});
    const Completion sent = line.sent->last(1);
    // A transfer that failed before its OPEN left is news to the receiver only from its scheduler.
    line.receiver->close_grant(key_of(1));
    const Completion loaded = line.loaded->last(1);
    CHECK(sent.code != Code::kOk);
    CHECK(loaded.code != Code::kOk);
    CHECK(sent.detail.find(call) != std::string::npos ||
          loaded.detail.find(call) != std::string::npos);
  }
}

TEST(events_that_cannot_be_made_fail_the_steps_sends_and_the_call) {
  const Shape shape;
  const DeviceCache source(shape, 1);
  const DeviceCache target(shape, 0);
  Line line(source.cache, target.cache);
  line.sender->submit_send(kSender, 1, line.send(1, {3}, shape));
  standin::fail("cuEventCreate", 1, 2);
  CHECK_THROWS(Error, line.sender->start_step(kSender, 1, 8));
  CHECK(line.sent->last(1).code == Code::kInternal);
  line.receiver->close_grant(key_of(1));
  line.sender->submit_send(kSender, 2, line.send(2, {3}, shape));
  line.sender->start_step(kSender, 2, 8);  // the next one can make them
  for (std::uint16_t layer = 0; layer < shape.layers; ++layer)
    line.sender->record_event(2, layer, 0);
  line.sender->flush_step(2);
  CHECK(line.loaded->last(2).code == Code::kOk);
}

TEST(many_steps_in_flight_on_several_streams) {
  Shape shape;
  shape.blocks = 64;
  const DeviceCache source(shape, kNotComputed);
  const DeviceCache target(shape, 0);
  const standin::Stream streams[3];
  Line line(source.cache, target.cache);
  std::mt19937 random(3);
  constexpr std::uint32_t kSteps = 60;
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    const standin::Stream& stream = streams[step % 3];
    line.sender->submit_send(kSender, step,
                             line.send(static_cast<std::uint8_t>(step), {step}, shape));
    line.sender->start_step(kSender, step, 8);
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      source.compute(stream.get(), layer, step, static_cast<int>(step + layer), random() % 300);
      line.sender->record_event(step, layer, stream.handle());
    }
    line.sender->freeze_step(step);
    line.sender->flush_step(step);  // never waits: steps pile up on the device
  }
  for (const Completion& c : line.loaded->wait(kSteps)) CHECK(c.code == Code::kOk);
  for (const Completion& c : line.sent->wait(kSteps)) CHECK(c.code == Code::kOk);
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    for (std::uint16_t layer = 0; layer < shape.layers; ++layer) {
      CHECK(target.holds(layer, step, static_cast<int>(step + layer)));
    }
  }
}

TEST(a_stream_that_never_ends_does_not_hold_up_closing) {
  const Shape shape;
  const DeviceCache source(shape, kNotComputed);
  const DeviceCache target(shape, 0);
  const standin::Stream stream;
  Line line(source.cache, target.cache, EventWait::kQuery);
  line.sender->submit_send(kSender, 1, line.send(1, {3}, shape));
  line.sender->start_step(kSender, 1, 8);
  standin::pause(stream.get());
  source.compute(stream.get(), 0, 3, 1);
  line.sender->record_event(1, 0, stream.handle());
  line.sender->close();
  CHECK(line.sent->last(1).code == Code::kAborted);
  line.receiver->close_grant(key_of(1));
}

TEST(nothing_is_left_on_the_device) {
  const Shape shape;
  const auto before = standin::alive();
  {
    const DeviceCache source(shape, 1);
    const DeviceCache target(shape, 0);
    Line line(source.cache, target.cache);
    line.sender->send_frozen(kSender, {line.send(1, {3}, shape)});
    CHECK(line.loaded->last(1).code == Code::kOk);
    CHECK(standin::alive() > before);
  }
  CHECK_EQ(standin::alive(), before);
}
