// The CUDA driver, opened at run time: one build serves machines with and without a GPU.
//
// No CUDA header is used; the few types and numbers needed are spelled out here. A library that
// lacks an entry point is refused with the names that are missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvt/code.h"

namespace kvt {

namespace cuda {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using DevicePtr = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kHostAllocPortable = 1;

}  // namespace cuda

// The entry points as the driver exports them. Filled whole or not at all.
struct CudaTable {
  cuda::Result (*cuInit)(unsigned) = nullptr;
  cuda::Result (*cuDriverGetVersion)(int*) = nullptr;
  cuda::Result (*cuGetErrorName)(cuda::Result, const char**) = nullptr;
  cuda::Result (*cuGetErrorString)(cuda::Result, const char**) = nullptr;
  cuda::Result (*cuDeviceGetCount)(int*) = nullptr;
  cuda::Result (*cuDeviceGet)(cuda::Device*, int) = nullptr;
  cuda::Result (*cuDevicePrimaryCtxRetain)(cuda::Context*, cuda::Device) = nullptr;
  cuda::Result (*cuDevicePrimaryCtxRelease_v2)(cuda::Device) = nullptr;
  cuda::Result (*cuCtxGetCurrent)(cuda::Context*) = nullptr;
  cuda::Result (*cuCtxSetCurrent)(cuda::Context) = nullptr;
  cuda::Result (*cuEventCreate)(cuda::Event*, unsigned) = nullptr;
  cuda::Result (*cuEventDestroy_v2)(cuda::Event) = nullptr;
  cuda::Result (*cuEventRecord)(cuda::Event, cuda::Stream) = nullptr;
  cuda::Result (*cuEventQuery)(cuda::Event) = nullptr;
  cuda::Result (*cuEventSynchronize)(cuda::Event) = nullptr;
  cuda::Result (*cuStreamCreate)(cuda::Stream*, unsigned) = nullptr;
  cuda::Result (*cuStreamDestroy_v2)(cuda::Stream) = nullptr;
  cuda::Result (*cuStreamSynchronize)(cuda::Stream) = nullptr;
  cuda::Result (*cuMemHostAlloc)(void**, std::size_t, unsigned) = nullptr;
  cuda::Result (*cuMemFreeHost)(void*) = nullptr;
  cuda::Result (*cuMemcpyDtoHAsync_v2)(void*, cuda::DevicePtr, std::size_t, cuda::Stream) = nullptr;
  cuda::Result (*cuMemcpyHtoDAsync_v2)(cuda::DevicePtr, const void*, std::size_t,
                                       cuda::Stream) = nullptr;
};

// One opened and initialised driver library; any thread. Kept open until the process ends.
class CudaDriver {
 public:
  // `library` empty: what KVT_CUDA_LIBRARY names, else libcuda.so.1. Opened once per name. Throws
  // Error(INTERNAL): cannot be opened, entry points missing (all are named), cuInit failed.
  static std::shared_ptr<const CudaDriver> open(const std::string& library = {});

  const CudaTable& api() const { return table_; }
  const std::string& library() const { return library_; }
  int version() const { return version_; }  // 12040 is 12.4
  int num_devices() const { return num_devices_; }

  // OK, or what failed: BUSY for lack of memory, INTERNAL otherwise, "cuEventRecord:
  // CUDA_ERROR_INVALID_HANDLE (400): invalid resource handle".
  Status check(cuda::Result result, const char* call) const;
  // The same, thrown.
  void must(cuda::Result result, const char* call) const;

 private:
  friend class CudaContext;
  explicit CudaDriver(std::string library);

  std::string library_;
  CudaTable table_;
  int version_ = 0;
  int num_devices_ = 0;
};

// A device's primary context (the one that torch uses), held for the object's life. Any thread.
class CudaContext {
 public:
  // Throws Error: no such device, or the driver's refusal.
  CudaContext(std::shared_ptr<const CudaDriver> driver, int device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const { return *driver_; }
  const CudaTable& api() const { return driver_->api(); }
  int device() const { return device_; }

  // Makes the context current on this thread for the scope, and puts back what was there: on the
  // engine's threads another device's context may be current.
  class Scope {
   public:
    explicit Scope(const CudaContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    const Status& status() const { return status_; }

   private:
    const CudaContext& context_;
    cuda::Context before_ = nullptr;
    bool changed_ = false;
    Status status_;
  };

 private:
  std::shared_ptr<const CudaDriver> driver_;
  int device_;
  cuda::Device handle_ = 0;
  cuda::Context context_ = nullptr;
};

}  // namespace kvt
