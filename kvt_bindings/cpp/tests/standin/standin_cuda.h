// Extra entry points of the stand-in driver, for tests that load it by path: what a test needs to
// make the device slow, stuck or broken. All are callable from any thread (and through ctypes).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Device memory and its host image. A device address is not canonical on x86-64 or AArch64, so
// code that dereferences one dies at once.
unsigned long long standin_alloc(std::size_t bytes);
void standin_free(unsigned long long device_address);
void* standin_image(unsigned long long device_address);

// Holds a stream (null: the default one) before its next operation; releases it again.
void standin_pause(void* stream);
void standin_resume(void* stream);
// Puts a kernel on the stream: after `delay_us` it fills `bytes` at `device_address` with `value`.
int standin_fill(void* stream, unsigned long long device_address, int value, std::size_t bytes,
                 std::uint32_t delay_us);
// Puts a kernel on the stream that fails with `result`, as does all that follows on the stream.
int standin_fault(void* stream, int result);
// Every copy takes this much longer.
void standin_set_copy_delay_us(std::uint32_t delay_us);

// After `skip` more successful calls of the named entry point, one call returns `result`. The
// environment variable KVT_STANDIN_FAIL="cuEventRecord:2:700,..." does the same at load.
void standin_fail(const char* entry_point, std::uint32_t skip, int result);
// Calls of the named entry point so far.
std::uint64_t standin_calls(const char* entry_point);
// Objects alive: events + streams + pinned allocations; and retained contexts.
std::uint64_t standin_alive();
}
