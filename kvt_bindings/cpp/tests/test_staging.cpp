// Pinned staging through the stand-in driver: any spans, any buffer size, whole and in order.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kvt/device_memory.h"
#include "standin_loaded.h"

using namespace kvt;

namespace {

struct DeviceBytes {
  explicit DeviceBytes(std::size_t bytes) : size(bytes), address(standin::alloc(bytes)) {}
  ~DeviceBytes() { standin::free(address); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  unsigned char* image() const { return static_cast<unsigned char*>(standin::image(address)); }
  MemorySpan span(std::size_t at, std::size_t length) const {
    return {address + at, length, MemoryKind::kDevice, 0};
  }
  const std::size_t size;
  const unsigned long long address;
};

std::vector<MemorySpan> random_spans(const DeviceBytes& memory, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<MemorySpan> spans;
  for (std::size_t at = 0; at + 1 < memory.size;) {
    const std::size_t gap = random() % 100;
    const std::size_t length = 1 + random() % (random() % 4 == 0 ? 30000 : 300);
    if (at + gap + length > memory.size) break;
    spans.push_back(memory.span(at + gap, length));
    at += gap + length;
  }
  std::shuffle(spans.begin(), spans.end(), random);
  return spans;
}

std::vector<unsigned char> gathered(const DeviceBytes& memory,
                                    const std::vector<MemorySpan>& spans) {
  std::vector<unsigned char> all;
  for (const MemorySpan& s : spans) {
    const auto* from = memory.image() + (s.address - memory.address);
    all.insert(all.end(), from, from + s.length);
  }
  return all;
}

}  // namespace

TEST(reading_gives_the_spans_bytes_in_order) {
  const DeviceBytes memory(300000);
  for (std::size_t i = 0; i < memory.size; ++i)
    memory.image()[i] = static_cast<unsigned char>(i * 7);
  const auto device = cuda_device_memory(standin::path());
  for (const std::size_t buffer_bytes : {4096ul, 65536ul, 1048576ul}) {
    const auto reader = device->make_reader(0, buffer_bytes);
    for (unsigned seed = 1; seed <= 4; ++seed) {
      const auto spans = random_spans(memory, seed);
      REQUIRE(reader->begin(spans).ok());
      std::vector<unsigned char> got;
      for (;;) {
        std::span<const std::byte> piece;
        REQUIRE(reader->next(&piece).ok());
        if (piece.empty()) break;
        CHECK(piece.size() <= buffer_bytes);
        const auto* bytes = reinterpret_cast<const unsigned char*>(piece.data());
        got.insert(got.end(), bytes, bytes + piece.size());
      }
      CHECK(got == gathered(memory, spans));
    }
  }
}

TEST(the_next_piece_is_copied_while_this_one_is_used) {
  const DeviceBytes memory(64 << 10);
  const auto device = cuda_device_memory(standin::path());
  const auto reader = device->make_reader(0, 16 << 10);
  const auto before = standin::calls("cuMemcpyDtoHAsync");
  const std::vector<MemorySpan> spans{memory.span(0, memory.size)};
  REQUIRE(reader->begin(spans).ok());
  std::span<const std::byte> piece;
  REQUIRE(reader->next(&piece).ok());
  CHECK_EQ(standin::calls("cuMemcpyDtoHAsync") - before, 2u);  // the second one is under way
  REQUIRE(reader->next(&piece).ok());
  CHECK_EQ(standin::calls("cuMemcpyDtoHAsync") - before, 3u);
  REQUIRE(reader->cancel().ok());
  std::fill_n(memory.image(), memory.size, static_cast<unsigned char>(9));  // nobody reads it now
  REQUIRE(reader->begin(spans).ok());
  REQUIRE(reader->next(&piece).ok());
  CHECK(piece.size() == (16u << 10) && piece[0] == std::byte{9});
}

TEST(nothing_to_read_is_an_empty_piece) {
  const auto reader = cuda_device_memory(standin::path())->make_reader(0);
  std::span<const std::byte> piece;
  REQUIRE(reader->begin({}).ok());
  REQUIRE(reader->next(&piece).ok());
  CHECK(piece.empty());
}

TEST(writing_puts_each_byte_in_its_span_and_no_other) {
  const DeviceBytes memory(200000);
  const auto device = cuda_device_memory(standin::path());
  for (const std::size_t buffer_bytes : {4096ul, 65536ul}) {
    const auto writer = device->make_writer(0, buffer_bytes);
    for (unsigned seed = 1; seed <= 4; ++seed) {
      std::fill_n(memory.image(), memory.size, static_cast<unsigned char>(0));
      const auto spans = random_spans(memory, seed);
      std::vector<unsigned char> expected(memory.size, 0);
      unsigned char next = 1;
      for (const MemorySpan& whole : spans) {
        for (std::size_t done = 0; done < whole.length;) {
          std::span<std::byte> buffer;
          REQUIRE(writer->buffer(whole.length - done, &buffer).ok());
          REQUIRE(!buffer.empty() && buffer.size() <= buffer_bytes);
          const std::size_t at = whole.address - memory.address + done;
          for (std::size_t i = 0; i < buffer.size(); ++i) {
            buffer[i] = std::byte{next};
            expected[at + i] = next;
            next = static_cast<unsigned char>(next == 255 ? 1 : next + 1);
          }
          // In two spans, as a piece of the wire may fall.
          const std::size_t half = buffer.size() / 2;
          std::vector<MemorySpan> to;
          if (half > 0) to.push_back(memory.span(at, half));
          to.push_back(memory.span(at + half, buffer.size() - half));
          REQUIRE(writer->scatter(to).ok());
          done += buffer.size();
        }
      }
      REQUIRE(writer->flush().ok());
      CHECK(std::equal(expected.begin(), expected.end(), memory.image()));
    }
  }
}

TEST(a_failed_copy_is_told_by_name_and_the_stage_stays_failed) {
  const DeviceBytes memory(64 << 10);
  const auto device = cuda_device_memory(standin::path());
  const std::vector<MemorySpan> spans{memory.span(0, memory.size)};
  const auto reader = device->make_reader(0, 8 << 10);
  standin::fail("cuMemcpyDtoHAsync", 2, 719);
  REQUIRE(reader->begin(spans).ok());
  std::span<const std::byte> piece;
  REQUIRE(reader->next(&piece).ok());
  const Status failed = reader->next(&piece);
  CHECK(failed.code == Code::kInternal);
  CHECK(failed.detail.find("cuMemcpyDtoHAsync: CUDA_ERROR_LAUNCH_FAILED (719)") == 0);
  CHECK(piece.empty());
  CHECK(reader->begin(spans).detail == failed.detail);

  const auto writer = device->make_writer(0, 8 << 10);
  std::span<std::byte> buffer;
  REQUIRE(writer->buffer(100, &buffer).ok());
  const std::vector<MemorySpan> outside{memory.span(memory.size - 10, 100)};
  CHECK(writer->scatter(outside).detail.find("cuMemcpyHtoDAsync") == 0);
  CHECK(!writer->flush().ok());
}

TEST(a_stage_that_cannot_be_made_leaves_nothing) {
  const auto device = cuda_device_memory(standin::path());
  const auto before = standin::alive();
  standin::fail("cuMemHostAlloc", 1, 2);
  CHECK_THROWS(Error, device->make_reader(0));
  standin::fail("cuEventCreate", 1, 2);
  CHECK_THROWS(Error, device->make_writer(0));
  CHECK_THROWS(Error, device->make_reader(3));
  CHECK_EQ(standin::alive(), before);
}

TEST(destroying_a_stage_waits_for_its_copies) {
  const DeviceBytes memory(64 << 10);
  const auto device = cuda_device_memory(standin::path());
  const auto before = standin::alive();
  standin::set_copy_delay_us(2000);
  {
    const auto reader = device->make_reader(0, 8 << 10);
    const std::vector<MemorySpan> spans{memory.span(0, memory.size)};
    REQUIRE(reader->begin(spans).ok());
  }
  standin::set_copy_delay_us(0);
  CHECK_EQ(standin::alive(), before);
}
