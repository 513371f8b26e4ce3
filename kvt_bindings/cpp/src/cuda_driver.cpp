#include "kvt/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace kvt {
namespace {

// An entry point's name and where its address goes.
struct Entry {
  const char* name;
  void** slot;
};

std::vector<Entry> entries(CudaTable& t) {
#define KVT_ENTRY(name)                      \
  Entry {                                    \
    #name, reinterpret_cast<void**>(&t.name) \
  }
  return {
      KVT_ENTRY(cuInit),
      KVT_ENTRY(cuDriverGetVersion),
      KVT_ENTRY(cuGetErrorName),
      KVT_ENTRY(cuGetErrorString),
      KVT_ENTRY(cuDeviceGetCount),
      KVT_ENTRY(cuDeviceGet),
      KVT_ENTRY(cuDevicePrimaryCtxRetain),
      KVT_ENTRY(cuDevicePrimaryCtxRelease_v2),
      KVT_ENTRY(cuCtxGetCurrent),
      KVT_ENTRY(cuCtxSetCurrent),
      KVT_ENTRY(cuEventCreate),
      KVT_ENTRY(cuEventDestroy_v2),
      KVT_ENTRY(cuEventRecord),
      KVT_ENTRY(cuEventQuery),
      KVT_ENTRY(cuEventSynchronize),
      KVT_ENTRY(cuStreamCreate),
      KVT_ENTRY(cuStreamDestroy_v2),
      KVT_ENTRY(cuStreamSynchronize),
      KVT_ENTRY(cuMemHostAlloc),
      KVT_ENTRY(cuMemFreeHost),
      KVT_ENTRY(cuMemcpyDtoHAsync_v2),
      KVT_ENTRY(cuMemcpyHtoDAsync_v2),
  };
#undef KVT_ENTRY
}

}  // namespace

std::shared_ptr<const CudaDriver> CudaDriver::open(const std::string& library) {
  std::string name = library;
  if (name.empty()) {
    const char* named = std::getenv("KVT_CUDA_LIBRARY");
    name = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  }
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const CudaDriver>> opened;
  const std::lock_guard lock(mutex);
  auto& driver = opened[name];
  if (driver == nullptr) driver.reset(new CudaDriver(name));
  return driver;
}

CudaDriver::CudaDriver(std::string library) : library_(std::move(library)) {
  // Never closed: streams and contexts of the process may outlive any object of ours.
  void* handle = dlopen(library_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw Error(Code::kInternal, "CUDA driver " + library_ + " cannot be opened: " +
                                     (why != nullptr ? why : "unknown reason"));
  }
  std::string missing;
  for (const Entry& entry : entries(table_)) {
    *entry.slot = dlsym(handle, entry.name);
    if (*entry.slot == nullptr) missing += std::string(missing.empty() ? "" : ", ") + entry.name;
  }
  if (!missing.empty()) {
    throw Error(Code::kInternal, "CUDA driver " + library_ + " lacks " + missing);
  }
  must(table_.cuInit(0), "cuInit");
  must(table_.cuDriverGetVersion(&version_), "cuDriverGetVersion");
  must(table_.cuDeviceGetCount(&num_devices_), "cuDeviceGetCount");
}

Status CudaDriver::check(cuda::Result result, const char* call) const {
  if (result == cuda::kSuccess) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  table_.cuGetErrorName(result, &name);
  table_.cuGetErrorString(result, &text);
  return {result == cuda::kOutOfMemory ? Code::kBusy : Code::kInternal,
          std::string(call) + ": " + (name != nullptr ? name : "unknown error") + " (" +
              std::to_string(result) + ")" + (text != nullptr ? std::string(": ") + text : "")};
}

void CudaDriver::must(cuda::Result result, const char* call) const {
  if (const Status status = check(result, call); !status.ok()) {
    throw Error(status.code, status.detail);
  }
}

CudaContext::CudaContext(std::shared_ptr<const CudaDriver> driver, int device)
    : driver_(std::move(driver)), device_(device) {
  if (device < 0 || device >= driver_->num_devices()) {
    throw Error(Code::kBadRequest, "CUDA device " + std::to_string(device) + " of " +
                                       std::to_string(driver_->num_devices()));
  }
  driver_->must(api().cuDeviceGet(&handle_, device), "cuDeviceGet");
  driver_->must(api().cuDevicePrimaryCtxRetain(&context_, handle_), "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() {
  (void)api().cuDevicePrimaryCtxRelease_v2(handle_);
}

CudaContext::Scope::Scope(const CudaContext& context) : context_(context) {
  const CudaDriver& driver = context.driver();
  status_ = driver.check(context.api().cuCtxGetCurrent(&before_), "cuCtxGetCurrent");
  if (!status_.ok() || before_ == context.context_) return;
  status_ = driver.check(context.api().cuCtxSetCurrent(context.context_), "cuCtxSetCurrent");
  changed_ = status_.ok();
}

CudaContext::Scope::~Scope() {
  if (changed_) (void)context_.api().cuCtxSetCurrent(before_);
}

}  // namespace kvt
