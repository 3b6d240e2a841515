// A CUDA stream whose work is captured and thrown away, through the driver that the process has.
#pragma once

#include <dlfcn.h>

#include <cstdint>

namespace apex_te {

// While it lives, kernels launched on stream() are loaded and handles made, but nothing runs. All
// of it is best effort: stream() is null where the driver refuses a step.
class ThrowawayCapture {
 public:
  explicit ThrowawayCapture(int device) {
    const Driver& cuda = driver();
    if (!cuda.is_complete || cuda.device_get(&device_, device) != 0) return;
    if (cuda.primary_retain(&context_, device_) != 0) return;
    is_retained_ = true;
    if (cuda.push(context_) != 0) return;
    is_pushed_ = true;
    if (cuda.stream_create(&stream_, kNonBlocking) != 0) {
      stream_ = nullptr;
      return;
    }
    is_capturing_ = cuda.begin_capture(stream_, kRelaxed) == 0;
  }
  ~ThrowawayCapture() {
    const Driver& cuda = driver();
    void* graph = nullptr;
    if (is_capturing_ && cuda.end_capture(stream_, &graph) == 0 && graph) cuda.graph_destroy(graph);
    if (stream_) cuda.stream_destroy(stream_);
    void* popped;
    if (is_pushed_) cuda.pop(&popped);
    if (is_retained_) cuda.primary_release(device_);
  }
  ThrowawayCapture(const ThrowawayCapture&) = delete;
  ThrowawayCapture& operator=(const ThrowawayCapture&) = delete;
  void* stream() const { return is_capturing_ ? stream_ : nullptr; }

 private:
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
  static constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED: modules may load

  struct Driver {
    bool is_complete = false;
    int (*device_get)(int*, int);
    int (*primary_retain)(void**, int);
    int (*primary_release)(int);
    int (*push)(void*);
    int (*pop)(void**);
    int (*stream_create)(void**, unsigned);
    int (*stream_destroy)(void*);
    int (*begin_capture)(void*, int);
    int (*end_capture)(void*, void**);
    int (*graph_destroy)(void*);

    Driver() {
      void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
      if (!library) return;
      is_complete = true;
      find(library, "cuDeviceGet", &device_get);
      find(library, "cuDevicePrimaryCtxRetain", &primary_retain);
      find(library, "cuDevicePrimaryCtxRelease_v2", &primary_release);
      find(library, "cuCtxPushCurrent_v2", &push);
      find(library, "cuCtxPopCurrent_v2", &pop);
      find(library, "cuStreamCreate", &stream_create);
      find(library, "cuStreamDestroy_v2", &stream_destroy);
      find(library, "cuStreamBeginCapture_v2", &begin_capture);
      find(library, "cuStreamEndCapture", &end_capture);
      find(library, "cuGraphDestroy", &graph_destroy);
    }
    template <typename F>
    void find(void* library, const char* name, F* function) {
      *function = reinterpret_cast<F>(dlsym(library, name));
      is_complete = is_complete && *function;
    }
  };
  static const Driver& driver() {
    static const Driver found;
    return found;
  }

  int device_ = 0;
  void *context_ = nullptr, *stream_ = nullptr;
  bool is_retained_ = false, is_pushed_ = false, is_capturing_ = false;
};

}  // namespace apex_te
