// tcp with one or both caches on a device, over the stand-in driver: staged, overlapped, closed in
// the middle of copies, and failing.
#include <thread>

#include "data_fixture.h"
#include "standin_loaded.h"

using namespace data_test;

namespace {

Shape shape() {
  Shape s;
  s.layers = 2;
  s.blocks = 128;
  s.block_tokens = 16;
  s.heads_total = 8;
  s.head_dim = 64;  // 16 KiB a block and half: 4 MiB a layer
  return s;
}

// A cache on the stand-in's device; its bytes are looked at through the image.
struct DeviceCache {
  Shape s = shape();
  std::vector<unsigned long long> memory;
  std::shared_ptr<const RankCache> cache;

  DeviceCache() {
    std::vector<LayerMemory> layers;
    for (std::uint16_t i = 0; i < s.layers; ++i) {
      memory.push_back(standin::alloc(s.layer_bytes()));
      LayerMemory m;
      m.layer = i;
      m.tensors = {{reinterpret_cast<std::uint8_t*>(memory.back()), s.layer_bytes()}};
      layers.push_back(m);
    }
    cache = std::make_shared<RankCache>(s.layout(), 0, std::move(layers), 0);
  }
  ~DeviceCache() {
    for (const auto address : memory) standin::free(address);
  }
  std::uint8_t* image(std::size_t layer) const {
    return static_cast<std::uint8_t*>(standin::image(memory[layer]));
  }
  std::vector<std::uint8_t> bytes(std::size_t layer) const {
    return {image(layer), image(layer) + s.layer_bytes()};
  }
  void fill(std::uint8_t value) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      for (std::uint64_t b = 0; b < s.layer_bytes(); ++b) {
        image(i)[b] = static_cast<std::uint8_t>(value + b * 31 + (b >> 9));
      }
    }
  }
};

struct Link {
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();
  std::shared_ptr<Log> log = std::make_shared<Log>();
  Receiver receiver;
  std::unique_ptr<DataClient> client;
  std::shared_ptr<SendConnection> connection;

  Link(const std::shared_ptr<const RankCache>& source,
       const std::shared_ptr<const RankCache>& target)
      : receiver(target, sink, receiver_config()) {
    DataClientConfig config;
    config.device_memory = cuda_device_memory(standin::path());
    client = std::make_unique<DataClient>(
        source,
        [this](const DialRequest& request) {
          const auto [ours, theirs] = socket_pair();
          CHECK(receiver.adopt(theirs, sender_identity()).ok());
          CHECK(read_go(ours));
          CHECK(client->adopt(request.id, ours).ok());
        },
        config);
    connection = client->get(peer_of(), log);
    CHECK(log->wait_ready());
    CHECK_EQ(connection->transport(), "tcp");  // cma cannot read a device: negotiated away
  }
  ~Link() {
    client->close();
    receiver.close();
    CHECK_EQ(sink->reserved(), sink->pushed());
  }
  static ReceiverConfig receiver_config() {
    ReceiverConfig config;
    config.device_memory = cuda_device_memory(standin::path());
    return config;
  }
};

std::vector<std::uint32_t> scattered(std::uint32_t count, std::uint32_t step) {
  std::vector<std::uint32_t> blocks;
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(i * step % 128);
  return blocks;
}

const auto kSrcBlocks = scattered(100, 37);
const auto kDstBlocks = scattered(100, 75);

TransferHandle start(Link& link, std::uint8_t key, bool crc,
                     std::initializer_list<std::uint16_t> layers = {0, 1}) {
  REQUIRE(link.receiver.open_grant(grant(key_of(key), kDstBlocks, 5, 1595)).ok());
  TransferOpen open;
  open.key = key_of(key);
  open.sender_incarnation = kSender;
  open.crc = crc;
  const TransferHandle t = link.connection->open(open, link.log);
  const Plan plan = PairPlanner(shape().layout(), shape().layout())
                        .plan(0, 0, {kSrcBlocks}, {kDstBlocks}, {5, 1595}, true);
  const auto runs = std::make_shared<const Runs>(plan.parts[0].runs);
  for (const std::uint16_t layer : layers) link.connection->send_layer(t, {layer, 5, 1595, runs});
  if (layers.size() == 2) link.connection->end(t);
  return t;
}

void copy_runs(const std::uint8_t* from, std::vector<std::uint8_t>* to) {
  const Plan plan = PairPlanner(shape().layout(), shape().layout())
                        .plan(0, 0, {kSrcBlocks}, {kDstBlocks}, {5, 1595}, true);
  for (const Run& r : plan.parts[0].runs) {
    std::memcpy(to->data() + r.dst_offset, from + r.src_offset, r.length);
  }
}

}  // namespace

TEST(device_to_device) {
  for (const bool crc : {false, true}) {
    DeviceCache source;
    DeviceCache target;
    source.fill(3);
    target.fill(9);
    auto want = std::vector{target.bytes(0), target.bytes(1)};
    for (std::size_t i = 0; i < 2; ++i) copy_runs(source.image(i), &want[i]);
    Link link(source.cache, target.cache);
    const TransferHandle t = start(link, 1, crc);
    CHECK_EQ(code_name(link.log->wait_result(t).code), "OK");
    CHECK_EQ(code_name(link.sink->last(1).code), "OK");
    // When the completion is out the copies are through, not merely queued.
    for (std::size_t i = 0; i < 2; ++i) CHECK(target.bytes(i) == want[i]);
  }
}

TEST(host_to_device_and_back) {
  for (const bool to_device : {true, false}) {
    DeviceCache device;
    Cache host(shape());
    device.fill(3);
    host.fill(5);
    auto want = to_device ? std::vector{device.bytes(0), device.bytes(1)} : host.memory;
    for (std::size_t i = 0; i < 2; ++i) {
      copy_runs(to_device ? host.memory[i].data() : device.image(i), &want[i]);
    }
    Link link(to_device ? host.cache : device.cache, to_device ? device.cache : host.cache);
    CHECK_EQ(code_name(link.log->wait_result(start(link, 1, true)).code), "OK");
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK((to_device ? device.bytes(i) : host.memory[i]) == want[i]);
    }
  }
}

TEST(a_close_waits_for_copies_in_flight_and_no_later_ones) {
  DeviceCache target;
  Cache source(shape());
  source.fill(5);
  standin::set_copy_delay_us(2000);
  {
    Link link(source.cache, target.cache);
    for (std::uint8_t round = 1; round <= 5; ++round) {
      const std::uint64_t placed = link.receiver.snapshot().bytes_placed;
      const TransferHandle t = start(link, round, false);
      while (link.receiver.snapshot().bytes_placed == placed) std::this_thread::yield();
      CHECK(link.receiver.close_grant(key_of(round)).ok());
      target.fill(round);  // the next owner writes
      const auto after = std::vector{target.bytes(0), target.bytes(1)};
      const Code code = link.log->wait_result(t).code;
      CHECK(code == Code::kAborted || code == Code::kOk);
      for (std::size_t i = 0; i < 2; ++i) CHECK(target.bytes(i) == after[i]);
    }
  }
  standin::set_copy_delay_us(0);
}

TEST(a_cancel_in_the_middle_of_device_reads) {
  DeviceCache source;
  Cache target(shape());
  source.fill(5);
  standin::set_copy_delay_us(2000);
  {
    Link link(source.cache, target.cache);
    const TransferHandle t = start(link, 1, false, {0});
    link.connection->cancel(t, Code::kExpired, "lease is over");
    CHECK_EQ(code_name(link.log->wait_result(t).code), "EXPIRED");
    source.fill(77);  // nothing reads it any more, and what is read now is of the next transfer
    // What was on its way when the sender gave up may land until the receiver closes.
    REQUIRE(link.receiver.close_grant(key_of(1)).ok());
    auto want = target.memory;
    const TransferHandle next = start(link, 2, true);
    CHECK_EQ(code_name(link.log->wait_result(next).code), "OK");
    for (std::size_t i = 0; i < 2; ++i) {
      copy_runs(source.image(i), &want[i]);
      CHECK(target.memory[i] == want[i]);
    }
  }
  standin::set_copy_delay_us(0);
}

TEST(a_failing_copy_fails_the_transfer_by_name_and_the_next_connection_works) {
  for (const bool at_receiver : {true, false}) {
    DeviceCache device;
    Cache host(shape());
    const auto source = at_receiver ? host.cache : device.cache;
    const auto target = at_receiver ? device.cache : host.cache;
    Link link(source, target);
    const char* const call = at_receiver ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync";
    standin::fail(call, 300, 719);  // in the second layer
    const TransferHandle t = start(link, 1, false);
    const Log::Result result = link.log->wait_result(t);
    CHECK_EQ(code_name(result.code), "INTERNAL");
    CHECK(result.detail.find(call) != std::string::npos);
    const Completion done = link.sink->last(1);
    CHECK(done.code == Code::kInternal || done.code == Code::kPeerLost);
    link.log->wait_lost();
    // A failed stage stays failed, so it went with its connection.
    link.log = std::make_shared<Log>();
    link.connection = link.client->get(peer_of(), link.log);
    REQUIRE(link.log->wait_ready());
    CHECK_EQ(code_name(link.log->wait_result(start(link, 2, false)).code), "OK");
  }
}
