#include <cstddef>

#include "check.h"
#include "kvt/bytes.h"
#include "kvt/code.h"
#include "kvt/ids.h"
#include "kvt/ipc_block.h"

TEST(ipc_block_is_packed) {
  CHECK_EQ(sizeof(kvt::IpcBlock), 30u);
  CHECK_EQ(offsetof(kvt::IpcBlock, dst_offset), 8u);
  CHECK_EQ(offsetof(kvt::IpcBlock, length), 16u);
  CHECK_EQ(offsetof(kvt::IpcBlock, transfer), 24u);
  CHECK_EQ(offsetof(kvt::IpcBlock, layer), 28u);
}

TEST(code_names_and_numbers) {
  CHECK_EQ(kvt::code_name(kvt::Code::kOk), "OK");
  CHECK_EQ(kvt::code_name(kvt::Code::kInternal), "INTERNAL");
  CHECK_EQ(static_cast<int>(kvt::Code::kBadRequest), 12);
  CHECK(kvt::code_from_wire(200) == kvt::Code::kInternal);
}

TEST(heads_spell_their_name) {
  std::uint8_t wire[4];
  kvt::store_le(wire, kvt::head("TRKV"));
  CHECK(wire[0] == 'T' && wire[1] == 'R' && wire[2] == 'K' && wire[3] == 'V');
}

TEST(byte_orders) {
  std::uint8_t b[8];
  kvt::store_be<std::uint32_t>(b, 0x01020304u);
  CHECK(b[0] == 1 && b[3] == 4);
  CHECK_EQ(kvt::load_be<std::uint32_t>(b), 0x01020304u);
  CHECK_EQ(kvt::load_le<std::uint32_t>(b), 0x04030201u);
  CHECK_EQ(kvt::byte_swap<std::uint64_t>(0x0102030405060708ull), 0x0807060504030201ull);
  CHECK_EQ(kvt::byte_swap<std::uint8_t>(7), 7);
}

TEST(ids_print_and_hash) {
  const char raw[17] = "0123456789abcdef";
  const auto key = kvt::TransferKey::from(raw);
  CHECK_EQ(key.hex(), "30313233343536373839616263646566");
  CHECK(!key.is_zero());
  CHECK(std::hash<kvt::TransferKey>{}(key) != std::hash<kvt::TransferKey>{}({}));
}
