// The stand-in driver's extra entry points, in the library that the tests give kvt by path.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "check.h"
#include "standin/standin_cuda.h"

namespace standin {

inline std::string path() {
  return KVT_STANDIN_CUDA;
}

template <class F>
F* symbol(const char* name) {
  static void* const handle = dlopen(KVT_STANDIN_CUDA, RTLD_NOW | RTLD_LOCAL);
  void* address = handle == nullptr ? nullptr : dlsym(handle, name);
  if (address == nullptr) {
    check::fail(__FILE__, __LINE__, std::string("the stand-in driver lacks ") + name);
    std::abort();
  }
  return reinterpret_cast<F*>(address);
}

#define KVT_STANDIN(name) \
  inline const auto name = symbol<decltype(standin_##name)>("standin_" #name)
KVT_STANDIN(alloc);
KVT_STANDIN(free);
KVT_STANDIN(image);
KVT_STANDIN(pause);
KVT_STANDIN(resume);
KVT_STANDIN(fill);
KVT_STANDIN(fault);
KVT_STANDIN(set_copy_delay_us);
KVT_STANDIN(fail);
KVT_STANDIN(calls);
KVT_STANDIN(alive);
#undef KVT_STANDIN

// A stream of the caller's, as an engine has them.
class Stream {
 public:
  Stream() {
    void* context = nullptr;
    symbol<int(unsigned)>("cuInit")(0);
    symbol<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
    symbol<int(void*)>("cuCtxSetCurrent")(context);
    symbol<int(void**, unsigned)>("cuStreamCreate")(&stream_, 0);
  }
  ~Stream() {
    resume(stream_);
    symbol<int(void*)>("cuStreamDestroy_v2")(stream_);
    symbol<int(void*)>("cuCtxSetCurrent")(nullptr);
    symbol<int(int)>("cuDevicePrimaryCtxRelease_v2")(0);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_); }

 private:
  void* stream_ = nullptr;
};

}  // namespace standin
